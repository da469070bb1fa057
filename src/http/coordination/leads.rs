//! Leads: the right to one named job, taken only while nobody has it.

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;

use super::Api;
use super::call::{Call, Json, NoQuery};
use crate::http::ApiError;
use crate::machine::{Command, QueueKey, QueueKind, Reply};
use crate::types::Incarnation;

/// `POST /v1/{prefix}/leads/{name}`, and the query of its DELETE.
#[derive(Debug, Deserialize)]
pub(super) struct Who {
    /// Whose lead.
    session: Incarnation,
}

pub(super) async fn take(
    State(api): State<Api>,
    call: Call<NoQuery, Json<Who>>,
) -> Result<Response, ApiError> {
    let (prefix, name) = (call.prefix()?, call.lead()?);
    let Json(Who { session }) = call.body;
    api.check_prefix(&prefix, session).await?;
    let queue = QueueKey { kind: QueueKind::Lead, prefix: prefix.clone(), name };
    let command = Command::TakeTicket { session, queue, if_free: true };
    let fence =
        match api.execute(&prefix, Some(session), call.once, command, api.deadline()).await? {
            Reply::Ticket { grant: Some(grant), .. } => grant.fence,
            Reply::Held(holder) => match holder.fence {
                // The holder asks again: the same lead, the same fence.
                Some(fence) if holder.session == session => fence,
                fence => return Err(ApiError::Held { holder: Some(holder.session), fence }),
            },
            _ => return Err(ApiError::Defect),
        };
    Ok(Answer(json!({ "fence": fence })).into_response())
}

/// `DELETE /v1/{prefix}/leads/{name}?session=`: afterwards this session does not have the lead,
/// whether it had it before or not.
pub(super) async fn end(State(api): State<Api>, call: Call<Who>) -> Result<StatusCode, ApiError> {
    let (prefix, name, session) = (call.prefix()?, call.lead()?, call.query.session);
    api.check_prefix(&prefix, session).await?;
    let queue = QueueKey { kind: QueueKind::Lead, prefix: prefix.clone(), name };
    let command = Command::ReleaseQueue { queue, session };
    match api.execute(&prefix, Some(session), call.once, command, api.deadline()).await? {
        Reply::Done | Reply::TicketGone | Reply::UnknownTicket | Reply::NotYours => {
            Ok(StatusCode::NO_CONTENT)
        }
        _ => Err(ApiError::Defect),
    }
}
