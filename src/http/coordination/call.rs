//! One request of the API, taken apart and checked.
//!
//! [`Call`] is the one extractor of this API: it reads the body within the route's bound, decodes
//! query and body into the types the handler names, and, for a write, computes the request's
//! fingerprint, so that the same `Idempotency-Key` with another request is refused (SPEC K6).

use axum::extract::{FromRequest, RawPathParams, Request};
use axum::http::{HeaderMap, request::Parts};
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use super::Api;
use crate::clock::BootInstant;
use crate::http::{ApiError, body};
use crate::types::{ChatKey, Incarnation, NameError, Prefix, TicketId, VALUE_BYTES_MAX, check_key};

/// The longest `Idempotency-Key`, in bytes.
pub(super) const ONCE_KEY_BYTES_MAX: usize = 255;
/// The largest body of a call that carries no value, in bytes.
const SMALL_BODY_BYTES_MAX: usize = 16 * 1024;
/// Headers that are part of what is asked.
const ASKING_HEADERS: [&str; 4] = ["if-match", "if-none-match", "botmesh-fence", "botmesh-chat"];

/// Run once, whatever the number of times it is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Once {
    /// The caller's key.
    pub(super) key: String,
    /// Hash of the whole request.
    pub(super) fingerprint: [u8; 16],
}

/// What a handler makes of the body.
pub(super) trait FromBody: Sized + Send {
    /// The largest body it takes, in bytes.
    const BYTES_MAX: usize = SMALL_BODY_BYTES_MAX;
    /// Decodes it.
    fn from_body(bytes: Bytes) -> Result<Self, ApiError>;
}

/// A body that says nothing; whatever is sent is passed over.
#[derive(Debug)]
pub(super) struct NoBody;

impl FromBody for NoBody {
    fn from_body(_bytes: Bytes) -> Result<Self, ApiError> {
        Ok(Self)
    }
}

/// A JSON body of known shape.
#[derive(Debug)]
pub(super) struct Json<T>(pub(super) T);

impl<T: DeserializeOwned + Send> FromBody for Json<T> {
    fn from_body(bytes: Bytes) -> Result<Self, ApiError> {
        body::json(&bytes).map(Self)
    }
}

/// Any JSON value, kept as it was sent.
#[derive(Debug)]
pub(super) struct AnyJson(pub(super) Bytes);

impl FromBody for AnyJson {
    const BYTES_MAX: usize = VALUE_BYTES_MAX;
    fn from_body(bytes: Bytes) -> Result<Self, ApiError> {
        body::check_json(&bytes)?;
        Ok(Self(bytes))
    }
}

/// A query string that says nothing.
#[derive(Debug, Deserialize)]
pub(super) struct NoQuery {}

/// One request.
#[derive(Debug)]
pub(super) struct Call<Q = NoQuery, B = NoBody> {
    params: Params,
    /// The query string.
    pub(super) query: Q,
    /// The body.
    pub(super) body: B,
    /// Its headers.
    pub(super) headers: HeaderMap,
    /// Set where the caller sent an `Idempotency-Key`.
    pub(super) once: Option<Once>,
    /// When this node had its head: ages of renewals count from here (DESIGN 3 rule 10).
    pub(super) received: BootInstant,
}

impl<Q, B> FromRequest<Api> for Call<Q, B>
where
    Q: DeserializeOwned + Send,
    B: FromBody,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Api) -> Result<Self, ApiError> {
        let received = api.group.clock().now();
        let (mut parts, raw) = request.into_parts();
        let params = Params::of(&mut parts, api).await?;
        let once_key = once_key(&parts.headers)?;
        let query = axum::extract::Query::<Q>::try_from_uri(&parts.uri)
            .map_err(|error| ApiError::Query { why: error.body_text() })?
            .0;
        let bytes = body::read(raw, B::BYTES_MAX).await?;
        let once = once_key.map(|key| Once { key, fingerprint: fingerprint(&parts, &bytes) });
        let body = B::from_body(bytes)?;
        Ok(Self { params, query, body, headers: parts.headers, once, received })
    }
}

impl<Q, B> Call<Q, B> {
    /// The prefix in the path.
    pub(super) fn prefix(&self) -> Result<Prefix, ApiError> {
        Ok(Prefix::new(self.params.get("prefix"))?)
    }

    /// The session in the path.
    pub(super) fn session(&self) -> Result<Incarnation, ApiError> {
        self.params.number("session").map(Incarnation)
    }

    /// The ticket in the path.
    pub(super) fn ticket(&self) -> Result<TicketId, ApiError> {
        self.params.number("ticket").map(TicketId)
    }

    /// The lead's name in the path.
    pub(super) fn lead(&self) -> Result<String, ApiError> {
        let name = self.params.get("name");
        check_key("lead name", name)?;
        Ok(name.to_owned())
    }

    /// The lock's key in the path.
    pub(super) fn lock(&self) -> Result<String, ApiError> {
        let key = self.params.get("key");
        check_key("lock key", key)?;
        Ok(key.to_owned())
    }

    /// The checkpoint's key in the path.
    pub(super) fn chat(&self) -> Result<String, ApiError> {
        let key = self.params.get("key");
        check_chat(key)?;
        Ok(key.to_owned())
    }
}

/// A chat's key is its canonical string. Another spelling of the same chat would be a second queue
/// beside the bot's own, so it is refused. A text that names no chat harms none: programs without
/// chats may use such.
pub(super) fn check_chat(key: &str) -> Result<(), ApiError> {
    check_key("chat key", key)?;
    match key.parse::<ChatKey>() {
        Ok(chat) if chat.to_string() != key => {
            let text = key.chars().take(64).collect();
            Err(NameError::NotAChatKey { text }.into())
        }
        _ => Ok(()),
    }
}

/// The decoded parts of the path.
#[derive(Debug)]
struct Params(Vec<(Box<str>, String)>);

impl Params {
    async fn of(parts: &mut Parts, api: &Api) -> Result<Self, ApiError> {
        use axum::extract::FromRequestParts;
        match RawPathParams::from_request_parts(parts, api).await {
            Ok(params) => {
                let pairs = params.iter().map(|(name, text)| (name.into(), text.to_owned()));
                Ok(Self(pairs.collect()))
            }
            Err(_not_utf8) => Err(ApiError::Path { what: "name or key", expected: "UTF-8" }),
        }
    }

    /// Empty where the route has no such part: every check refuses that.
    fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(found, _)| **found == *name).map_or("", |(_, text)| text)
    }

    fn number(&self, what: &'static str) -> Result<u64, ApiError> {
        let text = self.get(what);
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        match text.parse() {
            Ok(number) if digits => Ok(number),
            _ => Err(ApiError::Path { what, expected: "an unsigned integer" }),
        }
    }
}

/// The header's value, where there is exactly one.
pub(super) fn header<'a>(
    headers: &'a HeaderMap,
    name: &'static str,
) -> Result<Option<&'a [u8]>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    match values.next() {
        Some(_) => Err(ApiError::Header { name, why: "it was sent more than once" }),
        None => Ok(first.map(|value| value.as_bytes())),
    }
}

fn once_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    const NAME: &str = "Idempotency-Key";
    let Some(value) = header(headers, "idempotency-key")? else { return Ok(None) };
    let fault = |why| ApiError::Header { name: NAME, why };
    if value.is_empty() || value.len() > ONCE_KEY_BYTES_MAX {
        return Err(fault("use 1 to 255 characters"));
    }
    match std::str::from_utf8(value) {
        Ok(text) if text.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(Some(text.to_owned())),
        _ => Err(fault("use printable ASCII without blanks")),
    }
}

/// Hash of everything that says what is asked. Each part is led by its length, so that no two
/// requests run together into the same bytes. SHA-256 because the hash is replicated: it must be
/// the same on every node and in every version.
fn fingerprint(parts: &Parts, body: &[u8]) -> [u8; 16] {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_be_bytes());
        hash.update(bytes);
    };
    part(parts.method.as_str().as_bytes());
    // Inside the nested router: the path below `/v1`, the same wherever the API is mounted.
    let uri = &parts.uri;
    part(uri.path().as_bytes());
    part(uri.query().unwrap_or_default().as_bytes());
    for name in ASKING_HEADERS {
        let mut values = 0u64;
        for value in parts.headers.get_all(name) {
            values += 1;
            part(value.as_bytes());
        }
        part(&values.to_be_bytes());
    }
    part(body);
    let digest = hash.finalize();
    let mut short = [0; 16];
    short.copy_from_slice(&digest[..16]);
    short
}
