//! Reading bodies within bounds.
//!
//! Problem: a server that answers 413 and stops reading resets the connection under a client that
//! is still sending, and the client sees a broken pipe instead of the answer. Idea: keep at most
//! the limit, then read on and *discard*, up to a second bound; a client that goes beyond that too,
//! or dawdles, loses its connection.
//!
//! Invariants: never more than `limit` bytes are held; a body takes at most [`TIME_MAX`].

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use super::ApiError;

/// The longest a body may take to arrive: slower clients hold connections for nothing.
const TIME_MAX: Duration = Duration::from_secs(30);
/// How many bytes over the limit are read and thrown away before the connection is let go.
const DISCARD_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The whole body, if it has at most `limit` bytes.
pub(crate) async fn read(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    match tokio::time::timeout(TIME_MAX, collect(body, limit)).await {
        Ok(read) => read,
        Err(_elapsed) => Err(ApiError::BodyBroken),
    }
}

async fn collect(mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let mut kept = BytesMut::new();
    let mut seen = 0usize;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return Err(ApiError::BodyBroken) };
        // Trailers are none of ours.
        let Ok(data) = frame.into_data() else { continue };
        seen = seen.saturating_add(data.len());
        if seen <= limit {
            kept.extend_from_slice(&data);
        } else if seen - limit > DISCARD_BYTES_MAX {
            break;
        } else {
            kept = BytesMut::new();
        }
    }
    if seen > limit { Err(ApiError::TooLarge { max: limit }) } else { Ok(kept.freeze()) }
}

/// Decodes JSON. A fault names its place and what was expected there, not what was found.
pub(crate) fn json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        fault(error.inner(), Some(path).filter(|path| path != "."))
    })?;
    reader.end().map_err(|error| fault(&error, None))?;
    Ok(value)
}

/// Checks that the bytes are one JSON value, whatever it holds.
pub(crate) fn check_json(bytes: &[u8]) -> Result<(), ApiError> {
    // serde_json skips strings without looking whether they are UTF-8.
    if std::str::from_utf8(bytes).is_err() {
        return Err(ApiError::Json { at: "the body".into(), why: "not UTF-8".into() });
    }
    json::<serde::de::IgnoredAny>(bytes).map(|_| ())
}

/// A JSON fault without the content: serde's own message quotes what it found.
fn fault(error: &serde_json::Error, path: Option<String>) -> ApiError {
    use serde_json::error::Category;
    let place = format!("line {} column {}", error.line(), error.column());
    let at = match path {
        // A path is made of the names of our own fields and of indexes only where it leads to a
        // field that is known; no map with keys of the sender's is decoded here.
        Some(path) => format!("{path} ({place})"),
        None => place,
    };
    let why = match error.classify() {
        Category::Data => expected(&error.to_string()),
        Category::Eof => "it ends early".to_owned(),
        Category::Syntax | Category::Io => "a syntax error".to_owned(),
    };
    ApiError::Json { at, why }
}

/// Of a message like ``invalid type: string "secret", expected u64 at line 1 column 9`` what is
/// said of the expectation.
fn expected(message: &str) -> String {
    let message = message.rsplit_once(" at line ").map_or(message, |(said, _)| said);
    if message.starts_with("missing field `") || message.starts_with("duplicate field `") {
        return message.to_owned();
    }
    match message.rsplit_once(", expected ") {
        Some((_, expected)) if expected.len() <= 120 => format!("expected {expected}"),
        _ => "a value of the wrong kind".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Probe {
        #[allow(dead_code)]
        session: u64,
    }

    fn why(text: &str) -> String {
        json::<Probe>(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn m1_a_json_fault_names_the_place_and_not_the_content() {
        let wrong = why(r#"{"session": "hunter2"}"#);
        assert!(wrong.contains("session") && wrong.contains("expected u64"), "{wrong}");
        assert!(!wrong.contains("hunter2"), "{wrong}");
        let negative = why(r#"{"session": -4711}"#);
        assert!(!negative.contains("4711"), "{negative}");
        assert!(why("{}").contains("missing field `session`"));
        assert!(why(r#"{"session": 1"#).contains("ends early"));
        assert!(why(r#"{"session": 1} hunter2"#).contains("syntax error"));
        let quoted = why(r#"{"session": "a, expected b"}"#);
        assert!(quoted.contains("expected u64"), "{quoted}");
    }

    #[test]
    fn k6_any_json_value_passes_and_nothing_else() {
        for good in ["null", "1", "\"x\"", "[]", "{\"a\":[1,2.5e3,true]}", " {} "] {
            assert_eq!(check_json(good.as_bytes()), Ok(()), "{good}");
        }
        for bad in ["", "{", "nul", "1 2", "{\"a\"}", "\"a\nb\""] {
            assert!(check_json(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(check_json(b"\"\xff\"").is_err());
    }

    #[tokio::test]
    async fn m3_a_body_over_the_limit_is_refused_and_not_kept() {
        let body = |len: usize| Body::from(vec![b'x'; len]);
        assert_eq!(read(body(100), 100).await.unwrap().len(), 100);
        assert_eq!(read(body(101), 100).await, Err(ApiError::TooLarge { max: 100 }));
        let endless = futures_util::stream::repeat_with(|| {
            Ok::<_, std::convert::Infallible>(Bytes::from_static(&[0; 65_536]))
        });
        let endless = Body::from_stream(endless);
        assert_eq!(read(endless, 100).await, Err(ApiError::TooLarge { max: 100 }));
    }
}
