//! HTTP to the other side of a provider, told apart by what is known afterwards.
//!
//! A send that did not leave can be made again; of one that left and was not answered nobody knows
//! whether it arrived (SPEC G3). A client that answers both with "error" makes one of them twice or
//! the other never. Errors hold no address: some providers put the token there.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONTENT_TYPE, HeaderMap};
use hyper::{Method, Request};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use super::SendError;

/// The longest answer read.
const ANSWER_BYTES_MAX: usize = 16 * 1024 * 1024;
/// The longest a connection may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// The longest wait that another side's `Retry-After` is believed.
const RETRY_MAX: Duration = Duration::from_secs(3_600);

/// A client. Cheap to clone; clones share their connections.
#[derive(Clone, Debug)]
pub(super) struct Outward {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

/// What came back.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// Why nothing did.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum OutwardError {
    /// It did not leave.
    #[error("not sent: {0}")]
    NotSent(String),
    /// It may have arrived.
    #[error("no answer: {0}")]
    NoAnswer(String),
}

impl From<OutwardError> for SendError {
    fn from(error: OutwardError) -> Self {
        match error {
            OutwardError::NotSent(why) => Self::Transport { why },
            OutwardError::NoAnswer(why) => Self::OutcomeUnknown { why },
        }
    }
}

impl Answer {
    /// The body, where it is JSON.
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// What `Retry-After` says in seconds.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        let seconds = self.headers.get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
        Some(Duration::from_secs(seconds).min(RETRY_MAX))
    }
}

impl Outward {
    pub(super) fn new() -> Self {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(CONNECT_MAX));
        http.set_nodelay(true);
        let https = HttpsConnectorBuilder::new()
            .with_provider_and_webpki_roots(rustls::crypto::ring::default_provider())
            .expect("ring has the suites of TLS 1.2 and 1.3")
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let client = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(20))
            .build(https);
        Self { client }
    }

    /// Makes one call, and waits no longer than `patience` for the whole of its answer.
    pub(super) async fn call(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
        patience: Duration,
    ) -> Result<Answer, OutwardError> {
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let bytes = match body {
            Some(value) => {
                request = request.header(CONTENT_TYPE, "application/json");
                Bytes::from(value.to_string())
            }
            None => Bytes::new(),
        };
        let request = request
            .body(Full::new(bytes))
            .map_err(|_| OutwardError::NotSent("the address or token is malformed".to_owned()))?;
        match tokio::time::timeout(patience, self.exchange(request)).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(OutwardError::NoAnswer(format!("none within {patience:?}"))),
        }
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Answer, OutwardError> {
        let response = self.client.request(request).await.map_err(|error| {
            let why = reason(&error);
            match error.is_connect() {
                true => OutwardError::NotSent(why),
                false => OutwardError::NoAnswer(why),
            }
        })?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| OutwardError::NoAnswer(error.to_string()))?.to_bytes();
        Ok(Answer { status: head.status.as_u16(), headers: head.headers, body })
    }
}

/// The innermost cause: the outer ones say no more than that there is one.
fn reason(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}
