//! Turns: a ticket in a chat's queue, waited for by long poll.
//!
//! A ticket belongs to its session, not to the connection that took it: a caller that lost its
//! answer asks again under the same `Idempotency-Key` and is told of the same ticket. Both calls
//! answer from this node's machine after this node applied the command (POST) or passed the
//! barrier (GET), so what they say was true while they ran. A wait is one registration and one
//! look per wake-up; there is no interval anywhere (SPEC B7).

use std::time::Duration;

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;

use super::Api;
use super::call::{Call, Json, NoQuery, check_chat};
use crate::clock::BootInstant;
use crate::group::{Topic, look};
use crate::http::ApiError;
use crate::machine::{Command, Grant, QueueKey, QueueKind, Reply, TicketState};
use crate::types::{Incarnation, Prefix, TicketId};

/// `POST /v1/{prefix}/turns`
#[derive(Debug, Deserialize)]
pub(super) struct Take {
    /// Whose ticket.
    session: Incarnation,
    /// The chat's canonical string.
    key: String,
    /// How long to wait for the grant before answering that it is not there yet.
    #[serde(default)]
    wait_ms: u64,
}

pub(super) async fn take(
    State(api): State<Api>,
    call: Call<NoQuery, Json<Take>>,
) -> Result<Response, ApiError> {
    let prefix = call.prefix()?;
    let Json(Take { session, key, wait_ms }) = call.body;
    check_chat(&key)?;
    api.check_prefix(&prefix, session).await?;
    let until = api.wait_until(call.received, wait_ms);
    let queue = QueueKey { kind: QueueKind::Turn, prefix: prefix.clone(), name: key };
    let command = Command::TakeTicket { session, queue, if_free: false };
    let reply = api.execute(&prefix, Some(session), call.once, command, api.deadline()).await?;
    let Reply::Ticket { ticket, grant, ahead } = reply else { return Err(ApiError::Defect) };
    // Looked at even where granted at once: under an idempotency key the reply is a memory, and
    // the ticket may have come further since.
    match api.stand(&prefix, ticket, until).await {
        Standing::Granted(grant) => Ok(granted(ticket, grant)),
        Standing::Waiting { ahead } => Ok(waiting(ticket, ahead)),
        Standing::Ended | Standing::Unknown => match grant {
            Some(grant) => Ok(granted(ticket, grant)),
            None if api.is_dead(session) => Err(ApiError::SessionExpired),
            None => Ok(waiting(ticket, ahead)),
        },
    }
}

/// `GET /v1/{prefix}/turns/{ticket}?wait_ms=`
#[derive(Debug, Deserialize)]
pub(super) struct Wait {
    /// As in [`Take`].
    #[serde(default)]
    wait_ms: u64,
}

pub(super) async fn wait(State(api): State<Api>, call: Call<Wait>) -> Result<Response, ApiError> {
    let (prefix, ticket) = (call.prefix()?, call.ticket()?);
    let until = api.wait_until(call.received, call.query.wait_ms);
    api.barrier().await?;
    let owner = api.owner(&prefix, ticket);
    match api.stand(&prefix, ticket, until).await {
        Standing::Granted(grant) => Ok(granted(ticket, grant)),
        Standing::Waiting { ahead } => Ok(waiting(ticket, ahead)),
        Standing::Unknown => Err(ApiError::UnknownTicket),
        Standing::Ended if owner.is_some_and(|owner| api.is_dead(owner)) => {
            Err(ApiError::SessionExpired)
        }
        Standing::Ended => Err(ApiError::TicketGone),
    }
}

/// `DELETE /v1/{prefix}/turns/{ticket}?session=`
#[derive(Debug, Deserialize)]
pub(super) struct End {
    /// Whose ticket it is.
    session: Incarnation,
}

pub(super) async fn end(State(api): State<Api>, call: Call<End>) -> Result<StatusCode, ApiError> {
    let (prefix, ticket, session) = (call.prefix()?, call.ticket()?, call.query.session);
    api.check_prefix(&prefix, session).await?;
    let command = Command::Release { prefix: prefix.clone(), ticket, session };
    match api.execute(&prefix, Some(session), call.once, command, api.deadline()).await? {
        Reply::Done | Reply::TicketGone => Ok(StatusCode::NO_CONTENT),
        Reply::UnknownTicket => Err(ApiError::UnknownTicket),
        Reply::NotYours => Err(ApiError::NotYours),
        _ => Err(ApiError::Defect),
    }
}

/// Where a ticket of a turn stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Granted(Grant),
    Waiting { ahead: u64 },
    Ended,
    Unknown,
}

impl Api {
    fn wait_until(&self, received: BootInstant, wait_ms: u64) -> BootInstant {
        received + Duration::from_millis(wait_ms).min(self.options.wait_max)
    }

    fn standing(&self, prefix: &Prefix, ticket: TicketId) -> Standing {
        match look(&*self.group, |machine| machine.ticket(prefix, ticket)) {
            // Tickets of leads and locks are numbered alike; they are none of this resource.
            TicketState::Waiting { queue, .. } | TicketState::Granted { queue, .. }
                if queue.kind != QueueKind::Turn =>
            {
                Standing::Unknown
            }
            TicketState::Granted { grant, .. } => Standing::Granted(grant),
            TicketState::Waiting { ahead, .. } => Standing::Waiting { ahead },
            TicketState::Gone => Standing::Ended,
            TicketState::Unknown => Standing::Unknown,
        }
    }

    /// Where the ticket stands, as soon as it no longer waits, or at `until`.
    async fn stand(&self, prefix: &Prefix, ticket: TicketId, until: BootInstant) -> Standing {
        // Registered before the first look, so that no wake-up falls between look and wait.
        let mut waiter = self.group.wakeups().wait_for(Topic::Ticket(prefix.clone(), ticket));
        loop {
            let standing = self.standing(prefix, ticket);
            let (clock, stop) = (self.group.clock(), &self.options.stop);
            let waits = matches!(standing, Standing::Waiting { .. });
            if !waits || clock.now() >= until || stop.is_cancelled() {
                return standing;
            }
            tokio::select! {
                () = waiter.woken() => {}
                () = clock.sleep_until(until) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    fn owner(&self, prefix: &Prefix, ticket: TicketId) -> Option<Incarnation> {
        match look(&*self.group, |machine| machine.ticket(prefix, ticket)) {
            TicketState::Waiting { session, .. } => session,
            TicketState::Granted { session, .. } => Some(session),
            TicketState::Gone | TicketState::Unknown => None,
        }
    }

    /// A session that has a ticket has been opened; once this node does not know it any more it
    /// is dead for ever.
    fn is_dead(&self, session: Incarnation) -> bool {
        look(&*self.group, |machine| machine.session(session)).is_none()
    }
}

fn granted(ticket: TicketId, grant: Grant) -> Response {
    Answer(json!({
        "ticket": ticket,
        "granted": true,
        "fence": grant.fence,
        "previous_holder": grant.previous,
    }))
    .into_response()
}

fn waiting(ticket: TicketId, ahead: u64) -> Response {
    let answer = json!({ "ticket": ticket, "granted": false, "ahead": ahead });
    (StatusCode::ACCEPTED, Answer(answer)).into_response()
}
