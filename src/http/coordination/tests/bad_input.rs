//! What is refused before the group is asked (issue *the spine*, bad input).

use axum::body::Body;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::client::{Client, Sham, request};
use crate::clock::ManualClock;
use crate::codec::hostile;
use crate::machine::Limits;

fn client() -> Client {
    Client::over(Sham::new(Limits::default(), ManualClock::new()))
}

#[tokio::test]
async fn k6_malformed_json_names_the_place_and_not_the_content() {
    let client = client();
    for (body, place) in [
        ("", "line 1 column 0"),
        ("{\"session\": 1, \"key\": ", "line 1"),
        ("{\"session\": \"hunter2\", \"key\": \"demo:a\"}", "session"),
        ("{\"session\": 1, \"key\": {\"hunter2\": 1}}", "key"),
        ("{\"session\": 1}", "missing field `key`"),
        ("{\"session\": 1.5, \"key\": \"demo:a\"}", "session"),
        ("{\"session\": 1, \"key\": \"demo:a\"} hunter2", "line 1"),
        ("[]", "line 1"),
    ] {
        let answer = client.send(request("POST", "/v1/shop/turns", &[], body.into())).await;
        let answer = answer.expect(400, "malformed_json");
        let message = answer.body["message"].as_str().unwrap();
        assert!(message.contains(place), "{body}: {message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
    let row = "/v1/shop/checkpoints/demo%3Aann";
    let create = [("If-None-Match", "*")];
    for body in [&b"{"[..], b"\"\xff\"", b"", b"1 2"] {
        let answer = client.send(request("PUT", row, &create, Body::from(body))).await;
        answer.expect(400, "malformed_json");
    }
}

#[tokio::test]
async fn k6_bad_names_are_refused() {
    let client = client();
    let lease = json!({"lease_ms": 1_000});
    let long = "p".repeat(65);
    for prefix in ["a%20b", "%C3%BC", "a%2Fb", &long] {
        let path = format!("/v1/{prefix}/sessions");
        client.call("POST", &path, lease.clone()).await.expect(400, "bad_name");
    }
    let ann = client.session("shop").await;
    let long = format!("demo:{}", "k".repeat(508));
    for key in ["", "demo:a\nb", "demo:a%3a", "demo:%41", &*long] {
        let take = json!({"session": ann, "key": key});
        let answer = client.call("POST", "/v1/shop/turns", take).await;
        assert_eq!((answer.status, answer.error()), (400, "bad_name"), "{key:?}");
    }
    let fits = format!("demo:{}", "k".repeat(507));
    client.call("POST", "/v1/shop/turns", json!({"session": ann, "key": fits})).await.ok(200);
    let name = "n".repeat(513);
    let lead = format!("/v1/shop/leads/{name}");
    client.call("POST", &lead, json!({"session": ann})).await.expect(400, "bad_name");
    let lock = format!("/v1/shop/locks/{name}");
    client.call("POST", &lock, json!({"ttl_ms": 1})).await.expect(400, "bad_name");
    let row = "/v1/shop/checkpoints/demo%3A%0A";
    client.call("GET", row, Value::Null).await.expect(400, "bad_name");
    client.call("GET", "/v1/shop/checkpoints/%FF", Value::Null).await.expect(400, "bad_path");
}

#[tokio::test]
async fn k6_bad_paths_and_queries_are_refused() {
    let client = client();
    for number in ["x", "-1", "+1", "1.0", "99999999999999999999999"] {
        let path = format!("/v1/shop/turns/{number}");
        client.call("GET", &path, Value::Null).await.expect(400, "bad_path");
        let path = format!("/v1/shop/sessions/{number}");
        client.call("DELETE", &path, Value::Null).await.expect(400, "bad_path");
    }
    for (method, path) in [
        ("DELETE", "/v1/shop/turns/1"),
        ("DELETE", "/v1/shop/turns/1?session=x"),
        ("DELETE", "/v1/shop/turns/1?session=1&session=2"),
        ("GET", "/v1/shop/turns/1?wait_ms=-1"),
        ("DELETE", "/v1/shop/leads/job"),
        ("DELETE", "/v1/shop/locks/door"),
    ] {
        client.call(method, path, Value::Null).await.expect(400, "bad_query");
    }
}

#[tokio::test]
async fn k6_unknown_routes_and_methods_answer_json() {
    let client = client();
    for path in ["/v1/shop", "/v1/shop/turns/1/2", "/v1/shop/nothing", "/v1//sessions/x/y"] {
        client.call("GET", path, Value::Null).await.expect(404, "no_such_route");
    }
    let refused = client.call("PATCH", "/v1/shop/turns/1", Value::Null).await;
    let refused = refused.expect(405, "method_not_allowed");
    let allow = refused.headers["allow"].to_str().unwrap();
    assert!(allow.contains("GET") && allow.contains("DELETE"), "{allow}");
    client.call("GET", "/v1/shop/sessions", Value::Null).await.expect(405, "method_not_allowed");
}

#[tokio::test]
async fn m3_a_body_over_the_limit_is_413() {
    let client = client();
    let large = json!({"session": 1, "key": "x".repeat(20_000)});
    client.call("POST", "/v1/shop/turns", large).await.expect(413, "too_large");
}

/// Calls with a body of known shape, and what they are sent.
const BODIES: [(&str, &str, &str); 8] = [
    ("POST", "/v1/shop/sessions", r#"{"lease_ms":15000,"replica":"a"}"#),
    ("POST", "/v1/shop/sessions/1/renew", r#"{"seq":1,"age_ms":5}"#),
    ("POST", "/v1/shop/turns", r#"{"session":1,"key":"demo:ann"}"#),
    ("POST", "/v1/shop/leads/jobs", r#"{"session":1}"#),
    ("POST", "/v1/shop/locks/k", r#"{"ttl_ms":1000}"#),
    ("POST", "/v1/shop/locks/k/renew", r#"{"token":"0000000000000001","ttl_ms":1000}"#),
    ("PUT", "/v1/shop/checkpoints/demo%3Aann", r#"{"step":"item","n":[1,2.5,null]}"#),
    ("POST", "/v1/shop/nothing", r#"{}"#),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn m1_whatever_body_a_call_has_it_is_answered_and_never_by_a_failure(
        bodies in proptest::collection::vec(prop_oneof![
            hostile::json_of(&BODIES.map(|(.., body)| body)).prop_map(|body| body.to_string().into()),
            hostile::bytes(BODIES.iter().map(|(.., body)| body.as_bytes().to_vec()).collect()),
        ], 4),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = client();
            client.session("shop").await;
            for (method, path, _) in BODIES {
                for body in &bodies {
                    let create = [("If-None-Match", "*")];
                    let sent = request(method, path, &create, Body::from(body.clone()));
                    let answer = client.send(sent).await;
                    assert!(answer.status < 500, "{method} {path} {body:?}: {answer:?}");
                }
            }
        });
    }
}
