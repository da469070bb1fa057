use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Client, Sham};
use crate::clock::ManualClock;
use crate::group::{Group, Topic};
use crate::machine::Limits;
use crate::types::Incarnation;

#[tokio::test]
async fn k6_a_lead_is_one_sessions() {
    let client = Client::over(Sham::new(Limits::default(), ManualClock::new()));
    let (ann, bob) = (client.session("shop").await, client.session("shop").await);
    const LEAD: &str = "/v1/shop/leads/demo%3Aann";
    let take = async |session: u64| client.call("POST", LEAD, json!({"session": session})).await;
    let end = async |session: u64| {
        client.call("DELETE", &format!("{LEAD}?session={session}"), Value::Null).await
    };

    let fence = take(ann).await.ok(200).number("fence");
    // The holder asks again: the same lead.
    assert_eq!(take(ann).await.ok(200).number("fence"), fence);
    let held = take(bob).await.expect(409, "held");
    assert_eq!((held.number("holder"), held.number("fence")), (ann, fence));
    // Ending what one does not have changes nothing.
    end(bob).await.ok(204);
    take(bob).await.expect(409, "held");
    end(ann).await.ok(204);
    assert!(take(bob).await.ok(200).number("fence") > fence);
    end(4711).await.expect(404, "session_expired");

    // A turn of that name is another thing.
    let turn = json!({"session": ann, "key": "demo:ann"});
    client.call("POST", "/v1/shop/turns", turn).await.ok(200);
}

#[tokio::test]
async fn f2_k6_a_lock_is_held_under_its_token() {
    let clock = ManualClock::new();
    let sham = Sham::new(Limits::default(), clock.clone());
    let client = Client::over(sham.clone());
    const LOCK: &str = "/v1/shop/locks/door";
    let acquire = async || client.call("POST", LOCK, json!({"ttl_ms": 2_000})).await;
    let renew = async |token: &str| {
        let body = json!({"token": token, "ttl_ms": 2_000});
        client.call("POST", &format!("{LOCK}/renew"), body).await
    };
    let release = async |token: &str| {
        client.call("DELETE", &format!("{LOCK}?token={token}"), Value::Null).await
    };

    let first = acquire().await.ok(201);
    let token = first.body["token"].as_str().unwrap().to_owned();
    let held = acquire().await.expect(409, "held");
    // Whoever is refused does not learn the token.
    assert_eq!(held.body.get("holder"), None);
    assert!(!held.text.contains(token.strip_prefix("l-").unwrap()) || token == "l-1");

    clock.advance(Duration::from_millis(1_500));
    assert_eq!(renew(&token).await.ok(200).number("ttl_ms"), 2_000);
    clock.advance(Duration::from_millis(1_500));
    acquire().await.expect(409, "held");
    for stranger in ["l-4711", "nonsense", ""] {
        renew(stranger).await.expect(409, "stale_token");
        release(stranger).await.expect(409, "stale_token");
    }

    // After its ttl the lock is free, and the old token good for nothing, also while it is free.
    let number = token.strip_prefix("l-").unwrap().parse().unwrap();
    let mut ended = sham.wakeups().wait_for(Topic::Session(Incarnation(number)));
    clock.advance(Duration::from_millis(500));
    ended.woken().await;
    renew(&token).await.expect(409, "stale_token");
    let second = acquire().await.ok(201);
    assert!(second.number("fence") > first.number("fence"));
    release(&token).await.expect(409, "stale_token");
    release(second.body["token"].as_str().unwrap()).await.ok(204);
    acquire().await.ok(201);
}
