//! The OpenAPI document and the router say the same.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Router;
use serde_json::{Map, Value, json};

use super::client::{Client, Mood, Seen, Sham};
use crate::clock::ManualClock;
use crate::group::Group;
use crate::http::cluster::{self, Parts, Probe};
use crate::http::coordination::{OPENAPI, Options, routes};
use crate::http::metrics::Text;
use crate::machine::Limits;
use crate::raft::Secret;

const METHODS: [&str; 5] = ["GET", "POST", "PUT", "DELETE", "PATCH"];

fn document() -> Value {
    serde_json::from_str(OPENAPI).expect("the document is JSON")
}

fn resolve<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value.get("$ref").and_then(Value::as_str) {
        Some(at) => document.pointer(at.strip_prefix('#').unwrap()).expect(at),
        None => value,
    }
}

/// Every operation: (method, template below `/v1`, its object).
fn operations(document: &Value) -> Vec<(String, String, &Map<String, Value>)> {
    let mut found = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            if method != "parameters" {
                let template = path.strip_prefix("/v1").unwrap().to_owned();
                found.push((method.to_uppercase(), template, operation.as_object().unwrap()));
            }
        }
    }
    found
}

struct Fine;

impl Probe for Fine {
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }
    fn measure(&self, _text: &mut Text) {}
}

fn cluster_listener(group: Arc<dyn Group>, secret: Secret, calls_max: usize) -> Router {
    let (routes, probe, options) = (Router::new(), Arc::new(Fine), Options::default());
    cluster::router(Parts { group, routes, probe, secret, options, calls_max })
}

/// A request for the operation that passes every check but the group's own.
struct Sample {
    path: String,
    headers: Vec<(&'static str, &'static str)>,
    body: Value,
}

fn sample(method: &str, template: &str, session: u64) -> Sample {
    let path = template
        .replace("{prefix}", "shop")
        .replace("{session}", &session.to_string())
        .replace("{ticket}", "1")
        .replace("{name}", "job")
        .replace("{key}", "demo%3Aann");
    let query = match (method, template) {
        ("DELETE", "/{prefix}/turns/{ticket}" | "/{prefix}/leads/{name}") => {
            format!("?session={session}")
        }
        ("DELETE", "/{prefix}/locks/{key}") => "?token=l-1".to_owned(),
        _ => String::new(),
    };
    let body = match (method, template) {
        ("POST", "/{prefix}/sessions") => json!({"lease_ms": 15_000}),
        ("POST", "/{prefix}/turns") => json!({"session": session, "key": "demo:ann"}),
        ("POST", "/{prefix}/leads/{name}") => json!({"session": session}),
        ("POST", "/{prefix}/locks/{key}") => json!({"ttl_ms": 1_000}),
        ("POST", "/{prefix}/locks/{key}/renew") => json!({"token": "l-1", "ttl_ms": 1_000}),
        ("PUT", _) => json!({"at": "Item"}),
        _ => Value::Null,
    };
    let headers = match template {
        "/{prefix}/checkpoints/{key}" => vec![("If-Match", "\"1\"")],
        _ => Vec::new(),
    };
    Sample { path: format!("/v1{path}{query}"), headers, body }
}

/// Provokes, for every operation, what any operation may answer.
async fn common(client: &Client, document: &Value) {
    let secret = Secret::random();
    let bearer = secret.bearer();
    let sham = Sham::new(Limits::default(), ManualClock::new());
    let full =
        Sham::new(Limits { idempotency_keys_max: 0, ..Limits::default() }, ManualClock::new());
    let listener = client.at(cluster_listener(Arc::new(sham.clone()), secret.clone(), 10));
    let crowded = client.at(cluster_listener(Arc::new(sham.clone()), secret.clone(), 0));
    let at_capacity = client.at(cluster_listener(Arc::new(full), secret, 10));
    let auth = ("Authorization", &*bearer);
    let open = json!({"lease_ms": 15_000});
    let opened = listener.with("POST", "/v1/shop/sessions", &[auth], open.clone()).await.ok(201);
    let session = opened.number("session");
    let elsewhere = at_capacity.with("POST", "/v1/shop/sessions", &[auth], open).await.ok(201);
    assert_eq!(elsewhere.number("session"), session);

    for (method, template, operation) in operations(document) {
        let Sample { path, headers, body } = sample(&method, &template, session);
        let wrong = [("Authorization", "Bearer wrong")];
        listener.with(&method, &path, &wrong, body.clone()).await.expect(401, "unauthorized");
        let with = |extra: &[(&'static str, &'static str)]| {
            let mut all: Vec<(&str, &str)> = vec![auth];
            all.extend(headers.iter().copied());
            all.extend(extra);
            all
        };
        let overloaded = crowded.with(&method, &path, &with(&[]), body.clone()).await;
        overloaded.expect(503, "overloaded");
        if template == "/openapi.json" {
            continue;
        }
        let bad = path.replace("/shop/", "/sh%20op/");
        listener.with(&method, &bad, &with(&[]), body.clone()).await.expect(400, "bad_name");
        sham.set(Mood::NoQuorum);
        let refused = listener.with(&method, &path, &with(&[]), body.clone()).await;
        assert_eq!(refused.expect(503, "no_quorum").body["not_executed"], true);
        sham.set(Mood::Sound);
        if operation.contains_key("requestBody") {
            let large = json!("x".repeat(2 << 20));
            listener.with(&method, &path, &with(&[]), large).await.expect(413, "too_large");
        }
        if method == "GET" {
            continue;
        }
        let key = [(
            "Idempotency-Key",
            Box::leak(format!("{method}{template}").into_boxed_str()) as &str,
        )];
        let key: [(&'static str, &'static str); 1] = key;
        let refused = at_capacity.with(&method, &path, &with(&key), body.clone()).await;
        refused.expect(429, "keys_full");
        // Closing the session would take the others' ground away.
        if template == "/{prefix}/sessions/{session}" {
            continue;
        }
        listener.with(&method, &path, &with(&key), body.clone()).await;
        let joint = if path.contains('?') { '&' } else { '?' };
        let other = format!("{path}{joint}other=1");
        listener.with(&method, &other, &with(&key), body).await.expect(422, "key_reused");
    }
    let close = format!("/v1/shop/sessions/{session}");
    let key = [auth, ("Idempotency-Key", "close")];
    listener.with("DELETE", &close, &key, Value::Null).await.ok(204);
    let other = format!("{close}?other=1");
    listener.with("DELETE", &other, &key, Value::Null).await.expect(422, "key_reused");
}

/// Goes through what is each operation's own.
async fn own(client: &Client) {
    let none = Value::Null;
    client.call("GET", "/v1/openapi.json", none.clone()).await.ok(200);
    let (ann, bob) = (client.session("shop").await, client.session("shop").await);
    let renew = format!("/v1/shop/sessions/{ann}/renew");
    client.call("POST", &renew, none.clone()).await.ok(200);
    let dead = "/v1/shop/sessions/4711";
    client.call("DELETE", dead, none.clone()).await.expect(404, "session_expired");
    let renew = format!("{dead}/renew");
    client.call("POST", &renew, none.clone()).await.expect(404, "session_expired");

    let turns = "/v1/shop/turns";
    let take = |session: u64| json!({"session": session, "key": "demo:c"});
    let first = client.call("POST", turns, take(ann)).await.ok(200).number("ticket");
    let second = client.call("POST", turns, take(bob)).await.ok(202).number("ticket");
    client.call("POST", turns, take(4711)).await.expect(404, "session_expired");
    let path = |ticket: u64| format!("{turns}/{ticket}");
    client.call("GET", &path(first), none.clone()).await.ok(200);
    client.call("GET", &path(second), none.clone()).await.ok(202);
    client.call("GET", &path(4711), none.clone()).await.expect(404, "unknown_ticket");
    let end = |ticket: u64, session: u64| format!("{turns}/{ticket}?session={session}");
    client.call("DELETE", &end(4711, ann), none.clone()).await.expect(404, "unknown_ticket");
    client.call("DELETE", &end(first, bob), none.clone()).await.expect(409, "not_yours");
    client.call("DELETE", &end(first, ann), none.clone()).await.ok(204);

    let lead = "/v1/shop/leads/job";
    client.call("POST", lead, json!({"session": ann})).await.ok(200);
    client.call("POST", lead, json!({"session": bob})).await.expect(409, "held");
    client.call("POST", lead, json!({"session": 4711})).await.expect(404, "session_expired");
    let end = |session: u64| format!("{lead}?session={session}");
    client.call("DELETE", &end(ann), none.clone()).await.ok(204);
    client.call("DELETE", &end(4711), none.clone()).await.expect(404, "session_expired");

    let lock = "/v1/shop/locks/door";
    let held = client.call("POST", lock, json!({"ttl_ms": 9_000})).await.ok(201);
    client.call("POST", lock, json!({"ttl_ms": 9_000})).await.expect(409, "held");
    let token = held.body["token"].as_str().unwrap();
    let renew = |token: &str| json!({"token": token, "ttl_ms": 9_000});
    let at = format!("{lock}/renew");
    client.call("POST", &at, renew(token)).await.ok(200);
    client.call("POST", &at, renew("l-4711")).await.expect(409, "stale_token");
    let release = |token: &str| format!("{lock}?token={token}");
    client.call("DELETE", &release("l-4711"), none.clone()).await.expect(409, "stale_token");
    client.call("DELETE", &release(token), none.clone()).await.ok(204);

    let row = "/v1/shop/checkpoints/demo%3Aann";
    client.call("GET", row, none.clone()).await.expect(404, "no_checkpoint");
    client.call("PUT", row, json!(1)).await.expect(428, "condition_required");
    client.call("DELETE", row, none.clone()).await.expect(428, "condition_required");
    let stale = [("If-Match", "\"4711\"")];
    client.with("PUT", row, &stale, json!(1)).await.expect(412, "revision_mismatch");
    client.with("DELETE", row, &stale, none.clone()).await.expect(412, "revision_mismatch");
    let written = client.with("PUT", row, &[("If-None-Match", "*")], json!(1)).await.ok(200);
    client.call("GET", row, none.clone()).await.ok(200);
    let tag = format!("\"{}\"", written.number("revision"));
    client.with("DELETE", row, &[("If-Match", &tag)], none).await.ok(200);
}

#[tokio::test]
async fn k6_the_openapi_document_and_the_router_agree() {
    let document = document();
    // Every route is in the document, every path of the document is a route.
    let served: BTreeSet<String> = routes().iter().map(|(path, _)| format!("/v1{path}")).collect();
    let paths: BTreeSet<String> = document["paths"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(served, paths);

    // Every method.
    let client = Client::over(Sham::new(Limits::default(), ManualClock::new()));
    let described: BTreeSet<(String, String)> =
        operations(&document).into_iter().map(|(method, template, _)| (method, template)).collect();
    for (template, _) in routes() {
        for method in METHODS {
            let path = sample(method, template, 1).path;
            let taken = client.call(method, &path, Value::Null).await.status != 405;
            let here = described.contains(&(method.to_owned(), template.to_owned()));
            assert_eq!(taken, here, "{method} {template}");
        }
    }

    // Every status: those provoked are described, and those described can be provoked.
    let client = Client::over(Sham::new(Limits::default(), ManualClock::new()));
    common(&client, &document).await;
    own(&client).await;
    let described: Seen = operations(&document)
        .into_iter()
        .flat_map(|(method, template, operation)| {
            let statuses = operation["responses"].as_object().unwrap().keys();
            let of = statuses.map(|status| status.parse().unwrap());
            of.map(|status| (method.clone(), template.clone(), status)).collect::<Vec<_>>()
        })
        .collect();
    let seen = client.seen();
    let undescribed: Vec<_> = seen.difference(&described).collect();
    let unseen: Vec<_> = described.difference(&seen).collect();
    assert!(undescribed.is_empty(), "answered but not described: {undescribed:?}");
    assert!(unseen.is_empty(), "described but never answered: {unseen:?}");
}

#[test]
fn k6_the_openapi_document_holds_together() {
    let document = document();
    assert_eq!(document["openapi"], "3.1.0");
    // Every reference leads somewhere.
    fn walk(document: &Value, value: &Value) {
        match value {
            Value::Object(fields) => {
                if fields.contains_key("$ref") {
                    resolve(document, value);
                }
                fields.values().for_each(|value| walk(document, value));
            }
            Value::Array(items) => items.iter().for_each(|value| walk(document, value)),
            _ => {}
        }
    }
    walk(&document, &document);
    // Every parameter of a path is declared, and every operation has a name of its own.
    let mut names = BTreeSet::new();
    for (method, template, operation) in operations(&document) {
        assert!(names.insert(operation["operationId"].to_string()), "{method} {template}");
        let shared = &document["paths"][format!("/v1{template}")]["parameters"];
        let declared: BTreeSet<&str> = shared
            .as_array()
            .into_iter()
            .flatten()
            .map(|parameter| resolve(&document, parameter))
            .filter(|parameter| parameter["in"] == "path")
            .map(|parameter| parameter["name"].as_str().unwrap())
            .collect();
        let needed: BTreeSet<&str> = template
            .split('/')
            .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
            .collect();
        assert_eq!(declared, needed, "{method} {template}");
        let writes = method != "GET";
        let keyed = operation.get("parameters").is_some_and(|parameters| {
            let parameters = parameters.as_array().unwrap().iter();
            parameters.map(|p| resolve(&document, p)).any(|p| p["name"] == "Idempotency-Key")
        });
        assert_eq!(writes, keyed, "{method} {template}");
    }
}
