//! The REST half of the fake Discord.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::discord_api::{BOT, Inner, Sent, TOKEN, message, user};

/// How long an interaction may be left unanswered.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(3);

#[derive(Clone)]
struct Shared {
    inner: Arc<Mutex<Inner>>,
    gateway: String,
}

pub(super) fn router(inner: Arc<Mutex<Inner>>, gateway: String) -> axum::Router {
    axum::Router::new().fallback(call).with_state(Shared { inner, gateway })
}

/// A status, a body and headers.
type Answer = (u16, Value, Vec<(&'static str, String)>);

fn no(status: u16, code: u64, said: &str) -> Answer {
    (status, json!({ "message": said, "code": code }), Vec::new())
}

fn respond((status, body, headers): Answer) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    let mut response = match body {
        Value::Null => status.into_response(),
        Value::String(text) => (status, text).into_response(),
        body => (status, Json(body)).into_response(),
    };
    for (name, value) in headers {
        let value = HeaderValue::from_str(&value).unwrap();
        response.headers_mut().insert(HeaderName::from_static(name), value);
    }
    response
}

async fn call(
    State(shared): State<Shared>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let asked = match body.is_empty() {
        true => json!({}),
        false => match serde_json::from_slice::<Value>(&body) {
            Ok(asked) => asked,
            Err(_) => return respond(no(400, 50_109, "The request body contains invalid JSON.")),
        },
    };
    let path: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
    let Some(path) = path.strip_prefix(&["api", "v10"]) else {
        return respond(no(404, 0, "404: Not Found"));
    };
    let named = headers.get("user-agent").and_then(|value| value.to_str().ok());
    if !named.is_some_and(|name| name.starts_with("DiscordBot (")) {
        return respond((403, "error code: 1010".into(), Vec::new()));
    }
    let mut inner = shared.inner.lock();
    inner.calls += 1;
    let known = headers.get("authorization").is_some_and(|value| *value == format!("Bot {TOKEN}"));
    // Those say who they are by their token.
    if !known && !matches!(path, ["interactions" | "webhooks", ..]) {
        return respond(no(401, 0, "401: Unauthorized"));
    }
    if path[0] != "gateway"
        && let Some(trouble) = inner.troubles.pop_front()
    {
        if trouble.done {
            answer(&mut inner, &shared.gateway, &method, path, &asked);
        }
        return respond((trouble.status, trouble.body, trouble.headers));
    }
    respond(answer(&mut inner, &shared.gateway, &method, path, &asked))
}

fn answer(
    inner: &mut Inner,
    gateway: &str,
    method: &Method,
    path: &[&str],
    asked: &Value,
) -> Answer {
    let ok = |body: Value| (200, body, Vec::new());
    match (method.as_str(), path) {
        ("GET", ["gateway"]) => ok(json!({ "url": gateway })),
        ("GET", ["gateway", "bot"]) => {
            let budget = inner.budget();
            ok(json!({ "url": gateway, "shards": 1, "session_start_limit": {
                "total": budget.total, "remaining": budget.remaining,
                "reset_after": budget.reset_after_ms, "max_concurrency": 1,
            } }))
        }
        ("GET", ["users", "@me"]) => {
            let mut me = user(BOT, true);
            me["mfa_enabled"] = false.into();
            ok(me)
        }
        ("POST", ["channels", channel, "messages"]) => send(inner, channel, asked),
        ("POST", ["interactions", id, token, "callback"]) => {
            let Some(open) = inner.interactions.get_mut(*id).filter(|open| open.token == *token)
            else {
                return no(404, 10_062, "Unknown interaction");
            };
            let since = open.at.unwrap().elapsed();
            if since > ACKNOWLEDGED_WITHIN {
                return no(404, 10_062, "Unknown interaction");
            }
            if open.acknowledged.is_some() {
                return no(400, 40_060, "Interaction has already been acknowledged.");
            }
            let Some(kind @ (4..=9 | 12)) = asked["type"].as_u64() else {
                return no(400, 50_035, "Invalid Form Body");
            };
            open.acknowledged = Some((kind, since));
            (204, Value::Null, Vec::new())
        }
        ("PATCH", ["webhooks", BOT, token, "messages", "@original"]) => {
            let id = inner.id();
            let open = inner.interactions.values_mut().find(|open| open.token == *token);
            let Some(open) = open.filter(|open| matches!(open.acknowledged, Some((4 | 5, _))))
            else {
                return no(404, 10_015, "Unknown Webhook");
            };
            match text(asked) {
                Err(refused) => refused,
                Ok(text) => {
                    open.answers.push(text.to_owned());
                    ok(message(&id, &open.channel, BOT, text))
                }
            }
        }
        _ => no(404, 0, "404: Not Found"),
    }
}

fn text(asked: &Value) -> Result<&str, Answer> {
    match asked["content"].as_str() {
        None | Some("") => Err(no(400, 50_006, "Cannot send an empty message")),
        Some(text) if text.chars().count() > 2_000 => Err(no(400, 50_035, "Invalid Form Body")),
        Some(text) => Ok(text),
    }
}

fn send(inner: &mut Inner, channel: &str, asked: &Value) -> Answer {
    let headers = match window(inner, channel) {
        Ok(headers) => headers,
        Err(wait) => {
            inner.too_many += 1;
            let body = json!({
                "message": "You are being rate limited.", "retry_after": wait.as_secs_f64(),
                "global": false,
            });
            let mut headers = limits(0, wait);
            headers.push(("retry-after", wait.as_secs_f64().ceil().to_string()));
            headers.push(("x-ratelimit-scope", "user".to_owned()));
            return (429, body, headers);
        }
    };
    if inner.closed_channels.contains(channel) {
        return no(403, 50_007, "Cannot send messages to this user");
    }
    let text = match text(asked) {
        Ok(text) => text,
        Err(refused) => return refused,
    };
    let nonce = &asked["nonce"];
    if nonce.as_str().is_some_and(|nonce| nonce.len() > 25) {
        return no(400, 50_035, "Invalid Form Body");
    }
    let enforced = asked["enforce_nonce"] == true && !nonce.is_null();
    let same = inner.sent.iter().find(|sent| enforced && sent.body["nonce"] == *nonce);
    if let Some(same) = same {
        return (200, message(&same.id, channel, BOT, &same.text), headers);
    }
    let id = inner.id();
    let mut made = message(&id, channel, BOT, text);
    made["nonce"] = nonce.clone();
    let (channel, text) = (channel.to_owned(), text.to_owned());
    inner.sent.push(Sent { channel, text, id, body: asked.clone() });
    // A bot is told of what it said itself.
    inner.dispatch("MESSAGE_CREATE", &made);
    (200, made, headers)
}

fn limits(remaining: u32, reset: Duration) -> Vec<(&'static str, String)> {
    vec![
        ("x-ratelimit-bucket", "messages".to_owned()),
        ("x-ratelimit-remaining", remaining.to_string()),
        ("x-ratelimit-reset-after", reset.as_secs_f64().to_string()),
    ]
}

/// Counts a message of a channel; how long to wait where it is one too many.
fn window(inner: &mut Inner, channel: &str) -> Result<Vec<(&'static str, String)>, Duration> {
    let Some((most, within)) = inner.limited else { return Ok(Vec::new()) };
    let now = Instant::now();
    let window = inner.windows.entry(channel.to_owned()).or_insert((now, 0));
    if now.duration_since(window.0) >= within {
        *window = (now, 0);
    }
    let rest = within - now.duration_since(window.0);
    if window.1 >= most {
        return Err(rest);
    }
    window.1 += 1;
    Ok(limits(most - window.1, rest))
}
