//! Checkpoints: one JSON value a chat, written by compare-and-set on its revision (SPEC C3).
//!
//! The revision is the ETag. With `Botmesh-Fence` and `Botmesh-Chat` the write is accepted only
//! while exactly that fence holds that chat's turn (SPEC C10).

use axum::Json as Answer;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CONTENT_TYPE, ETAG};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::json;

use super::Api;
use super::call::{AnyJson, Call, FromBody, NoQuery, check_chat, header};
use crate::group::look;
use crate::http::ApiError;
use crate::machine::{
    Authority, Command, Expect, Op, QueueKey, QueueKind, Refusal, Reply, RowKey, Table,
};
use crate::types::{Fence, Prefix, Revision};

/// `GET /v1/{prefix}/checkpoints/{key}?consistency=`
#[derive(Debug, Deserialize)]
pub(super) struct Read {
    consistency: Option<String>,
}

pub(super) async fn read(State(api): State<Api>, call: Call<Read>) -> Result<Response, ApiError> {
    let row = RowKey { table: Table::Checkpoint, prefix: call.prefix()?, key: call.chat()? };
    match call.query.consistency.as_deref() {
        None | Some("linearizable") => api.barrier().await?,
        Some("local") => {}
        Some(_) => {
            let why = "consistency is `linearizable` or `local`".to_owned();
            return Err(ApiError::Query { why });
        }
    }
    let found = look(&*api.group, |machine| machine.row(&row)).ok_or(ApiError::NoCheckpoint)?;
    let tag = format!("\"{}\"", found.revision);
    let headers = [(CONTENT_TYPE, "application/json".to_owned()), (ETAG, tag)];
    Ok((headers, found.value).into_response())
}

/// `PUT /v1/{prefix}/checkpoints/{key}`
pub(super) async fn write(
    State(api): State<Api>,
    call: Call<NoQuery, AnyJson>,
) -> Result<Response, ApiError> {
    let row = RowKey { table: Table::Checkpoint, prefix: call.prefix()?, key: call.chat()? };
    let expect = condition(&call.headers)?;
    let value = call.body.0.to_vec();
    let op = Op::Put { row: row.clone(), value, expect, ttl_ms: None };
    let revision = commit(&api, &row.prefix, call, op).await?;
    Ok(Answer(json!({ "revision": revision })).into_response())
}

/// `DELETE /v1/{prefix}/checkpoints/{key}`
pub(super) async fn delete(State(api): State<Api>, call: Call) -> Result<Response, ApiError> {
    let row = RowKey { table: Table::Checkpoint, prefix: call.prefix()?, key: call.chat()? };
    let expect = condition(&call.headers)?;
    let Expect::Revision(deleted) = expect else {
        let why = "a DELETE takes If-Match: \"revision\"";
        return Err(ApiError::Header { name: "If-None-Match", why });
    };
    let op = Op::Delete { row: row.clone(), expect };
    commit(&api, &row.prefix, call, op).await?;
    // A delete makes no revision of its own; it answers the one that is gone.
    Ok(Answer(json!({ "revision": deleted })).into_response())
}

async fn commit<B: FromBody>(
    api: &Api,
    prefix: &Prefix,
    call: Call<NoQuery, B>,
    op: Op,
) -> Result<Revision, ApiError> {
    let by = authority(prefix, &call.headers)?;
    let command = Command::Commit { by, ops: vec![op] };
    match api.execute(prefix, None, call.once, command, api.deadline()).await? {
        Reply::Committed(revisions) => revisions.first().copied().ok_or(ApiError::Defect),
        Reply::Refused(Refusal::Superseded { found, .. }) => {
            Err(ApiError::RevisionMismatch { found })
        }
        Reply::Refused(Refusal::Fenced { .. } | Refusal::SessionExpired) => {
            Err(ApiError::StaleFence)
        }
        Reply::Refused(Refusal::Full { limit, .. }) => Err(ApiError::Full(limit)),
        _ => Err(ApiError::Defect),
    }
}

/// The one condition a write must carry.
fn condition(headers: &HeaderMap) -> Result<Expect, ApiError> {
    let replace = header(headers, "if-match")?;
    let create = header(headers, "if-none-match")?;
    match (replace, create) {
        (None, None) => Err(ApiError::ConditionRequired),
        (Some(_), Some(_)) => {
            let why = "send either it or If-None-Match, not both";
            Err(ApiError::Header { name: "If-Match", why })
        }
        (None, Some(b"*")) => Ok(Expect::Absent),
        (None, Some(_)) => {
            Err(ApiError::Header { name: "If-None-Match", why: "only * is taken here" })
        }
        (Some(tag), None) => revision(tag).map(Expect::Revision),
    }
}

/// The revision of a strong entity tag. A well-formed tag that is none of ours matches nothing.
fn revision(tag: &[u8]) -> Result<Revision, ApiError> {
    let why = "send one revision in double quotes, as the ETag of a GET has it";
    let fault = ApiError::Header { name: "If-Match", why };
    let inner = tag
        .strip_prefix(b"\"")
        .and_then(|rest| rest.strip_suffix(b"\""))
        .filter(|inner| !inner.is_empty() && inner.iter().all(|byte| byte.is_ascii_digit()))
        .ok_or(fault)?;
    // More digits than a revision has, or another spelling: tags are compared as text, and no row
    // has this one.
    let number = std::str::from_utf8(inner).ok().and_then(|digits| digits.parse::<u64>().ok());
    let number = number.filter(|number| number.to_string().as_bytes() == inner);
    Ok(Revision(number.unwrap_or(u64::MAX)))
}

/// In whose name the write is made.
fn authority(prefix: &Prefix, headers: &HeaderMap) -> Result<Authority, ApiError> {
    let fence = header(headers, "botmesh-fence")?;
    let chat = header(headers, "botmesh-chat")?;
    let (fence, chat) = match (fence, chat) {
        (None, None) => return Ok(Authority::Nobody),
        (Some(fence), Some(chat)) => (fence, chat),
        (Some(_), None) => {
            let why = "it goes with Botmesh-Chat, which is missing";
            return Err(ApiError::Header { name: "Botmesh-Fence", why });
        }
        (None, Some(_)) => {
            let why = "it goes with Botmesh-Fence, which is missing";
            return Err(ApiError::Header { name: "Botmesh-Chat", why });
        }
    };
    let number = std::str::from_utf8(fence)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|text| text.parse().ok());
    let Some(number) = number else {
        let why = "it is an unsigned integer";
        return Err(ApiError::Header { name: "Botmesh-Fence", why });
    };
    let Ok(name) = std::str::from_utf8(chat) else {
        return Err(ApiError::Header { name: "Botmesh-Chat", why: "it is not UTF-8" });
    };
    check_chat(name)?;
    let queue = QueueKey { kind: QueueKind::Turn, prefix: prefix.clone(), name: name.to_owned() };
    Ok(Authority::Holder { queue, fence: Fence(number), session: None })
}
