//! Fenced locks: held for a time to live, by whoever knows the token (SPEC F2).
//!
//! The token is an opaque string to the caller. Whatever is not the token of the acquisition that
//! holds the lock is stale, also what never was a token; and a refusal does not tell the holder's.

use axum::Json as Answer;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Deserializer};
use serde_json::json;

use super::Api;
use super::call::{Call, Json, NoQuery};
use crate::http::ApiError;
use crate::machine::{Command, Reply};
use crate::types::Incarnation;

/// Names one acquisition: `l-` and its incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Token(Incarnation);

impl Token {
    /// An incarnation the log never allocates: a stranger's token is sent on as this, so that it
    /// is refused, and remembered under its idempotency key, as any stale one is.
    const NOBODY: Self = Self(Incarnation(u64::MAX));

    fn parse(text: &str) -> Self {
        let digits = text.strip_prefix("l-").filter(|digits| {
            digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0')
        });
        digits
            .and_then(|digits| digits.parse().ok())
            .map_or(Self::NOBODY, |number| Self(Incarnation(number)))
    }

    fn text(self) -> String {
        format!("l-{}", self.0)
    }
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(|text| Self::parse(&text))
    }
}

/// `POST /v1/{prefix}/locks/{key}`
#[derive(Debug, Deserialize)]
pub(super) struct Acquire {
    /// How long it is to be held.
    ttl_ms: u64,
}

pub(super) async fn acquire(
    State(api): State<Api>,
    call: Call<NoQuery, Json<Acquire>>,
) -> Result<Response, ApiError> {
    let (prefix, key) = (call.prefix()?, call.lock()?);
    let Json(Acquire { ttl_ms }) = call.body;
    let node = api.group.node_id();
    let command = Command::AcquireLock { prefix: prefix.clone(), key, ttl_ms, node };
    match api.execute(&prefix, None, call.once, command, api.deadline()).await? {
        Reply::Lock { token, fence, ttl_ms } => {
            let answer = json!({ "token": Token(token).text(), "fence": fence, "ttl_ms": ttl_ms });
            Ok((StatusCode::CREATED, Answer(answer)).into_response())
        }
        Reply::Held(holder) => Err(ApiError::Held { holder: None, fence: holder.fence }),
        _ => Err(ApiError::Defect),
    }
}

/// `POST /v1/{prefix}/locks/{key}/renew`
#[derive(Debug, Deserialize)]
pub(super) struct Renew {
    /// The acquisition.
    token: Token,
    /// How long it is to be held from now.
    ttl_ms: u64,
}

pub(super) async fn renew(
    State(api): State<Api>,
    call: Call<NoQuery, Json<Renew>>,
) -> Result<Response, ApiError> {
    let (prefix, key) = (call.prefix()?, call.lock()?);
    let Json(Renew { token, ttl_ms }) = call.body;
    let command = Command::RenewLock { prefix: prefix.clone(), key, token: token.0, ttl_ms };
    match api.execute(&prefix, None, call.once, command, api.deadline()).await? {
        Reply::Renewed { lease_ms, .. } => {
            Ok(Answer(json!({ "ttl_ms": lease_ms })).into_response())
        }
        Reply::Stale => Err(ApiError::StaleToken),
        _ => Err(ApiError::Defect),
    }
}

/// `DELETE /v1/{prefix}/locks/{key}?token=`
#[derive(Debug, Deserialize)]
pub(super) struct Release {
    /// The acquisition.
    token: Token,
}

pub(super) async fn release(
    State(api): State<Api>,
    call: Call<Release>,
) -> Result<StatusCode, ApiError> {
    let (prefix, key) = (call.prefix()?, call.lock()?);
    let token = call.query.token.0;
    let command = Command::ReleaseLock { prefix: prefix.clone(), key, token };
    match api.execute(&prefix, None, call.once, command, api.deadline()).await? {
        Reply::Done => Ok(StatusCode::NO_CONTENT),
        Reply::Stale => Err(ApiError::StaleToken),
        _ => Err(ApiError::Defect),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k6_a_token_is_read_strictly() {
        let token = Token(Incarnation(17));
        assert_eq!(Token::parse(&token.text()), token);
        for other in ["", "l-", "17", "l-017", "l-+17", "l-17 ", "L-17", "l-99999999999999999999"] {
            assert_eq!(Token::parse(other), Token::NOBODY, "{other}");
        }
    }
}
