//! What the API answers when it does not do what was asked.
//!
//! Problem: a program that retries must know three things from a refusal: what to change, whether
//! to come again, and whether the thing may have happened all the same. So every refusal is one
//! variant here, with its status and the name programs match on; `not_executed` is said only where
//! it is certain (SPEC K6, *Outcomes*). Messages name the place of a fault, never the content of
//! what was sent (SPEC M1).

use std::time::Duration;

use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::group::{ExecuteError, Unavailable};
use crate::machine::Limit;
use crate::types::{Fence, Incarnation, NameError, Revision};

/// A refusal.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// The body is not the JSON that was expected.
    #[error("the body is not the JSON expected here: {why} at {at}")]
    Json {
        /// The JSON path of the fault, or its line and column.
        at: String,
        /// What is wrong there, without the content.
        why: String,
    },
    /// A prefix, name or key is not acceptable.
    #[error("{0}")]
    Name(NameError),
    /// A part of the path is not what it should be.
    #[error("the {what} in the path is not {expected}")]
    Path {
        /// Which part.
        what: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// The query string is not what it should be.
    #[error("the query string is not acceptable: {why}")]
    Query {
        /// What is wrong.
        why: String,
    },
    /// A header is not what it should be.
    #[error("the header {name} is not acceptable: {why}")]
    Header {
        /// Which header.
        name: &'static str,
        /// What is wrong, and what is expected.
        why: &'static str,
    },
    /// The body ended early, or came too slowly.
    #[error("the body did not arrive whole; send it again")]
    BodyBroken,
    /// The body, or a value in it, is too large.
    #[error("the body is over the limit of {max} bytes")]
    TooLarge {
        /// The limit, in bytes.
        max: usize,
    },
    /// The secret is missing or wrong.
    #[error("send the cluster secret as `Authorization: Bearer SECRET`")]
    Unauthorized,
    /// There is no such route.
    #[error("there is no such route here; the cluster listener's /v1/openapi.json lists the API's")]
    NoRoute,
    /// The route does not take this method.
    #[error("this route does not take this method; the Allow header lists those it takes")]
    Method,
    /// The session is not alive, or is another prefix's.
    #[error("the session is not alive; open a new one, it does not come back")]
    SessionExpired,
    /// The ticket was never allocated in this prefix.
    #[error("this ticket was never allocated in this prefix")]
    UnknownTicket,
    /// The ticket has ended.
    #[error("this ticket was released, withdrawn or ended with its session")]
    TicketGone,
    /// The ticket belongs to another session.
    #[error("this ticket belongs to another session")]
    NotYours,
    /// Somebody else has it.
    #[error("held by another; try again when it is free")]
    Held {
        /// The session that holds it; not told for locks, where it is the token.
        holder: Option<Incarnation>,
        /// Under which fence.
        fence: Option<Fence>,
    },
    /// The lock is not held under this token.
    #[error("the lock is not held under this token (any more); acquire it again")]
    StaleToken,
    /// There is no such checkpoint.
    #[error("there is no checkpoint under this key")]
    NoCheckpoint,
    /// A write without a condition.
    #[error("send If-Match: \"revision\" to replace, or If-None-Match: * to create")]
    ConditionRequired,
    /// The condition does not hold.
    #[error("another revision is there; read it and decide again")]
    RevisionMismatch {
        /// What is there.
        found: Option<Revision>,
    },
    /// The fence does not hold the chat's turn.
    #[error("this fence does not hold the chat's turn (any more); nothing was written")]
    StaleFence,
    /// The idempotency key came with another request before.
    #[error("this Idempotency-Key came with another request before; nothing was done")]
    KeyReused,
    /// A bound was met.
    #[error("{} is full; nothing was done", limit_words(.0))]
    Full(Limit),
    /// Too many requests are under way at this node.
    #[error("{in_flight} requests are under way at this node; try again later or ask another")]
    Overloaded {
        /// How many.
        in_flight: usize,
    },
    /// Certainly not executed.
    #[error("{0}")]
    NotExecuted(Unavailable),
    /// It may have been executed, or still be.
    #[error("whether it was done is unknown ({0}); ask again under the same Idempotency-Key")]
    OutcomeUnknown(Unavailable),
    /// The machine gave an answer that does not fit the command.
    #[error("the group gave an answer that does not fit the request; this is a defect")]
    Defect,
}

fn limit_words(limit: &Limit) -> &'static str {
    match limit {
        Limit::TicketsPerQueue => "the queue of this key",
        Limit::Sessions => "the table of sessions",
        Limit::IdempotencyKeys => "the table of idempotency keys of this prefix",
        Limit::KeyBytes => "the key",
        Limit::ValueBytes => "the value",
        Limit::Prefixes => "the table of prefixes",
        Limit::OutboxEntries => "the outbox of this chat",
    }
}

/// When to come again after a bound was met or the group could not be asked: about the time an
/// election takes.
const SOON: Duration = Duration::from_millis(250);
/// When to come again where a table has to empty by itself.
const LATER: Duration = Duration::from_secs(1);

impl ApiError {
    /// The status it is answered with.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Json { .. }
            | Self::Name(_)
            | Self::Path { .. }
            | Self::Query { .. }
            | Self::Header { .. }
            | Self::BodyBroken
            | Self::Full(Limit::KeyBytes) => StatusCode::BAD_REQUEST,
            Self::TooLarge { .. } | Self::Full(Limit::ValueBytes) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::NoRoute
            | Self::SessionExpired
            | Self::UnknownTicket
            | Self::TicketGone
            | Self::NoCheckpoint => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotYours | Self::Held { .. } | Self::StaleToken => StatusCode::CONFLICT,
            Self::ConditionRequired => StatusCode::PRECONDITION_REQUIRED,
            Self::RevisionMismatch { .. } | Self::StaleFence => StatusCode::PRECONDITION_FAILED,
            Self::KeyReused => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Full(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Overloaded { .. } | Self::NotExecuted(_) | Self::OutcomeUnknown(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Defect => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The name programs match on.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Json { .. } => "malformed_json",
            Self::Name(_) => "bad_name",
            Self::Path { .. } => "bad_path",
            Self::Query { .. } => "bad_query",
            Self::Header { .. } => "bad_header",
            Self::BodyBroken => "body_broken",
            Self::TooLarge { .. } => "too_large",
            Self::Unauthorized => "unauthorized",
            Self::NoRoute => "no_such_route",
            Self::Method => "method_not_allowed",
            Self::SessionExpired => "session_expired",
            Self::UnknownTicket => "unknown_ticket",
            Self::TicketGone => "ticket_gone",
            Self::NotYours => "not_yours",
            Self::Held { .. } => "held",
            Self::StaleToken => "stale_token",
            Self::NoCheckpoint => "no_checkpoint",
            Self::ConditionRequired => "condition_required",
            Self::RevisionMismatch { .. } => "revision_mismatch",
            Self::StaleFence => "stale_fence",
            Self::KeyReused => "key_reused",
            Self::Full(Limit::TicketsPerQueue) => "queue_full",
            Self::Full(Limit::Sessions) => "sessions_full",
            Self::Full(Limit::IdempotencyKeys) => "keys_full",
            Self::Full(Limit::KeyBytes) => "bad_name",
            Self::Full(Limit::ValueBytes) => "too_large",
            Self::Full(Limit::Prefixes) => "prefixes_full",
            Self::Full(Limit::OutboxEntries) => "outbox_full",
            Self::Overloaded { .. } | Self::NotExecuted(Unavailable::Overloaded { .. }) => {
                "overloaded"
            }
            Self::NotExecuted(Unavailable::NoQuorum { .. }) => "no_quorum",
            Self::NotExecuted(Unavailable::Timeout { .. }) => "timeout",
            Self::NotExecuted(Unavailable::NotServing { .. }) => "not_serving",
            Self::NotExecuted(Unavailable::TooNew { .. }) => "upgrade_needed",
            Self::OutcomeUnknown(_) => "outcome_unknown",
            Self::Defect => "defect",
        }
    }

    /// When to come again, where that may help.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Full(Limit::KeyBytes | Limit::ValueBytes) => None,
            Self::Full(_) => Some(LATER),
            Self::Overloaded { .. } | Self::NotExecuted(_) | Self::OutcomeUnknown(_) => Some(SOON),
            _ => None,
        }
    }

    /// Whether nothing happened and nothing will, where the status alone leaves it open.
    pub fn not_executed(&self) -> bool {
        matches!(self, Self::Full(_) | Self::Overloaded { .. } | Self::NotExecuted(_))
    }

    /// The body.
    fn body(&self) -> Value {
        let mut body = Map::new();
        body.insert("error".into(), json!(self.name()));
        body.insert("message".into(), json!(self.to_string()));
        if let Some(after) = self.retry_after() {
            body.insert("retry_after_ms".into(), json!(after.as_millis() as u64));
        }
        if self.not_executed() {
            body.insert("not_executed".into(), json!(true));
        }
        match self {
            Self::Held { holder, fence } => {
                if let Some(holder) = holder {
                    body.insert("holder".into(), json!(holder));
                }
                body.insert("fence".into(), json!(fence));
            }
            Self::RevisionMismatch { found } => {
                body.insert("revision".into(), json!(found));
            }
            _ => {}
        }
        Value::Object(body)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after() {
            // The header counts whole seconds; the body says it exactly.
            let seconds = after.as_millis().div_ceil(1000).max(1);
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds as u64));
        }
        if self == Self::Unauthorized {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<NameError> for ApiError {
    fn from(error: NameError) -> Self {
        Self::Name(error)
    }
}

impl From<ExecuteError> for ApiError {
    fn from(error: ExecuteError) -> Self {
        match error {
            ExecuteError::NotExecuted(why) => Self::NotExecuted(why),
            ExecuteError::OutcomeUnknown(why) => Self::OutcomeUnknown(why),
        }
    }
}
