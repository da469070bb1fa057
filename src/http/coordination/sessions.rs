//! Sessions: one program alive, as the group sees it.
//!
//! `valid_ms` counts from the instant the caller *sent* the first attempt of a renewal, so the
//! caller stops at sent + `valid_ms` − margin (DESIGN 3). The group counts from the apply, which
//! is later; but a renewal that lay about at this node for long would stretch a dead program's
//! session by as much, so an old one is dropped (DESIGN 3 rule 10).

use std::time::Duration;

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;

use super::Api;
use super::call::{Call, Json, NoQuery};
use crate::group::look;
use crate::http::ApiError;
use crate::machine::{Command, Reply, SessionKind};
use crate::types::Incarnation;

/// A renewal older than this is dropped, however long the lease.
const RENEWAL_AGE_MAX: Duration = Duration::from_millis(500);

/// `POST /v1/{prefix}/sessions`
#[derive(Debug, Deserialize)]
pub(super) struct Open {
    /// The lease asked for; kept within the group's limits.
    lease_ms: u64,
}

pub(super) async fn open(
    State(api): State<Api>,
    call: Call<NoQuery, Json<Open>>,
) -> Result<Response, ApiError> {
    let prefix = call.prefix()?;
    let Json(Open { lease_ms }) = call.body;
    let command = Command::OpenSession {
        prefix: prefix.clone(),
        kind: SessionKind::Remote,
        replica: String::new(),
        node: api.group.node_id(),
        lease_ms,
    };
    match api.execute(&prefix, None, call.once, command, api.deadline()).await? {
        Reply::Session { session, lease_ms, .. } => {
            let answer = json!({ "session": session, "lease_ms": lease_ms });
            Ok((StatusCode::CREATED, Answer(answer)).into_response())
        }
        _ => Err(ApiError::Defect),
    }
}

/// `POST /v1/{prefix}/sessions/{session}/renew`
pub(super) async fn renew(State(api): State<Api>, call: Call) -> Result<Response, ApiError> {
    let (prefix, session) = (call.prefix()?, call.session()?);
    api.check_prefix(&prefix, session).await?;
    let deadline = call.received + renewal_age_max(&api, session);
    let command = Command::RenewSession { session, seq: None };
    match api.execute(&prefix, Some(session), call.once, command, deadline).await? {
        Reply::Renewed { lease_ms, .. } => {
            Ok(Answer(json!({ "valid_ms": lease_ms })).into_response())
        }
        _ => Err(ApiError::Defect),
    }
}

/// How old a renewal of this session may be when it is handed on.
fn renewal_age_max(api: &Api, session: Incarnation) -> Duration {
    let lease = look(&*api.group, |machine| machine.session(session).map(|found| found.lease_ms));
    lease.map_or(RENEWAL_AGE_MAX, |ms| (Duration::from_millis(ms) / 3).min(RENEWAL_AGE_MAX))
}

/// `DELETE /v1/{prefix}/sessions/{session}`
pub(super) async fn close(State(api): State<Api>, call: Call) -> Result<StatusCode, ApiError> {
    let (prefix, session) = (call.prefix()?, call.session()?);
    api.check_prefix(&prefix, session).await?;
    let command = Command::CloseSession { session };
    match api.execute(&prefix, Some(session), call.once, command, api.deadline()).await? {
        Reply::Done => Ok(StatusCode::NO_CONTENT),
        _ => Err(ApiError::Defect),
    }
}
