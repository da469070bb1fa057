//! A server of Meta's Graph API, as far as sending goes: over real sockets, errors included.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// What was asked, and by whose token.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub account: String,
    pub token: String,
    pub body: Value,
}

type Faults = VecDeque<(u16, Value, Option<u64>)>;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct GraphApi {
    pub url: String,
    calls: Arc<Mutex<Vec<Call>>>,
    faults: Arc<Mutex<Faults>>,
    _server: Arc<Server>,
}

struct Server(tokio::task::JoinHandle<()>);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl GraphApi {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v23.0", listener.local_addr().unwrap());
        let (calls, faults) = (Arc::default(), Arc::default());
        let app = axum::Router::new()
            .route("/v23.0/{account}/messages", axum::routing::post(take))
            .with_state((Arc::clone(&calls), Arc::clone(&faults)));
        let server = tokio::spawn(async move { drop(axum::serve(listener, app).await) });
        Self { url, calls, faults, _server: Arc::new(Server(server)) }
    }

    /// The next call is refused like this.
    pub fn fail_next(&self, status: u16, error: Value, retry_after_s: Option<u64>) {
        self.faults.lock().push_back((status, json!({ "error": error }), retry_after_s));
    }

    /// The calls that succeeded.
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().clone()
    }

    pub fn texts(&self) -> Vec<String> {
        let text = |call: Call| {
            let text = call.body.pointer("/text/body").or(call.body.pointer("/message/text"));
            text.and_then(Value::as_str).unwrap().to_owned()
        };
        self.calls().into_iter().map(text).collect()
    }
}

type Both = (Arc<Mutex<Vec<Call>>>, Arc<Mutex<Faults>>);

async fn take(
    State((calls, faults)): State<Both>,
    Path(account): Path<String>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Response {
    if let Some((status, error, wait)) = faults.lock().pop_front() {
        let mut response = (StatusCode::from_u16(status).unwrap(), Json(error)).into_response();
        if let Some(wait) = wait {
            response.headers_mut().insert("retry-after", wait.into());
        }
        return response;
    }
    let bearer = headers.get("authorization").and_then(|value| value.to_str().ok());
    let Some(token) = bearer.and_then(|value| value.strip_prefix("Bearer ")) else {
        let error = json!({ "error": { "code": 190, "message": "no access token" } });
        return (StatusCode::UNAUTHORIZED, Json(error)).into_response();
    };
    let mut calls = calls.lock();
    calls.push(Call { account, token: token.to_owned(), body: body.clone() });
    let id = format!("wamid.out{}", calls.len());
    match body["messaging_product"].as_str() {
        Some("whatsapp") => Json(json!({
            "messaging_product": "whatsapp",
            "contacts": [{ "input": body["to"], "wa_id": body["to"] }],
            "messages": [{ "id": id }],
        })),
        _ => Json(json!({ "recipient_id": body["recipient"]["id"], "message_id": id })),
    }
    .into_response()
}
