use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, Sham};
use crate::clock::ManualClock;
use crate::group::{Group, Topic};
use crate::machine::Limits;
use crate::types::Incarnation;

#[tokio::test]
async fn k6_a_session_is_opened_renewed_and_closed() {
    let clock = ManualClock::new();
    let client = Client::over(Sham::new(Limits::default(), clock.clone()));

    // The lease in the answer is the one granted.
    let opened = client.call("POST", "/v1/shop/sessions", json!({"lease_ms": 1})).await.ok(201);
    assert_eq!(opened.number("lease_ms"), 500);
    let opened = client.call("POST", "/v1/shop/sessions", json!({"lease_ms": 1_000})).await.ok(201);
    assert_eq!(opened.number("lease_ms"), 1_000);
    let own = format!("/v1/shop/sessions/{}", opened.number("session"));
    let renew = format!("{own}/renew");

    // Renewed for as long as that happens.
    for _ in 0..3 {
        clock.advance(Duration::from_millis(900));
        let renewed = client.call("POST", &renew, Value::Null).await.ok(200);
        assert_eq!(renewed.number("valid_ms"), 1_000);
    }

    // Of another prefix it is none.
    for (method, path) in
        [("POST", renew.replace("/shop/", "/other/")), ("DELETE", own.replace("/shop/", "/other/"))]
    {
        client.call(method, &path, Value::Null).await.expect(404, "session_expired");
    }

    client.call("DELETE", &own, Value::Null).await.ok(204);
    client.call("DELETE", &own, Value::Null).await.expect(404, "session_expired");
    client.call("POST", &renew, Value::Null).await.expect(404, "session_expired");
}

#[tokio::test]
async fn k6_a_session_that_is_not_renewed_ends_and_does_not_come_back() {
    let clock = ManualClock::new();
    let sham = Sham::new(Limits::default(), clock.clone());
    let client = Client::over(sham.clone());
    let session = client.session("shop").await;
    let mut ended = sham.wakeups().wait_for(Topic::Session(Incarnation(session)));
    clock.advance(Duration::from_secs(15));
    ended.woken().await;
    let renew = format!("/v1/shop/sessions/{session}/renew");
    client.call("POST", &renew, Value::Null).await.expect(404, "session_expired");
    let take = json!({"session": session, "key": "demo:ann"});
    client.call("POST", "/v1/shop/turns", take).await.expect(404, "session_expired");
    let lead = json!({"session": session});
    client.call("POST", "/v1/shop/leads/job", lead).await.expect(404, "session_expired");
}

#[tokio::test]
async fn k6_a_lock_is_no_session() {
    let client = Client::over(Sham::new(Limits::default(), ManualClock::new()));
    let lock = client.call("POST", "/v1/shop/locks/door", json!({"ttl_ms": 5_000})).await.ok(201);
    let token = lock.body["token"].as_str().unwrap().strip_prefix("l-").unwrap();
    let renew = format!("/v1/shop/sessions/{token}/renew");
    client.call("POST", &renew, Value::Null).await.expect(404, "session_expired");
}
