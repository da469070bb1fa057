use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::client::{Answer, Client, Sham};
use crate::clock::ManualClock;
use crate::machine::Limits;

const TURNS: &str = "/v1/shop/turns";

struct Fixture {
    clock: ManualClock,
    sham: Sham,
    client: Client,
}

fn fixture() -> Fixture {
    let clock = ManualClock::new();
    let sham = Sham::new(Limits::default(), clock.clone());
    let client = Client::over(sham.clone());
    Fixture { clock, sham, client }
}

impl Fixture {
    async fn take(&self, session: u64, key: &str) -> Answer {
        self.client.call("POST", TURNS, json!({"session": session, "key": key})).await
    }

    async fn get(&self, ticket: u64) -> Answer {
        self.client.call("GET", &format!("{TURNS}/{ticket}"), Value::Null).await
    }

    async fn end(&self, ticket: u64, session: u64) -> Answer {
        let path = format!("{TURNS}/{ticket}?session={session}");
        self.client.call("DELETE", &path, Value::Null).await
    }

    /// Asks in the background, and returns once the question waits.
    async fn in_background(
        &self,
        method: &'static str,
        path: String,
        body: Value,
    ) -> JoinHandle<Answer> {
        let client = self.client.clone();
        let asked = tokio::spawn(async move { client.call(method, &path, body).await });
        // One runtime thread: the task runs until it has nothing to do but wait.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        asked
    }
}

#[tokio::test]
async fn k6_turns_go_in_order_of_tickets() {
    let f = fixture();
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);

    let first = f.take(ann, "demo:c").await.ok(200);
    assert_eq!(first.body["granted"], true);
    assert_eq!(first.body["previous_holder"], Value::Null);
    let second = f.take(bob, "demo:c").await.ok(202);
    assert_eq!((second.body["granted"].clone(), second.number("ahead")), (json!(false), 1));
    // The same session again queues behind its own.
    let third = f.take(ann, "demo:c").await.ok(202);
    assert_eq!(third.number("ahead"), 2);
    // Another chat is another queue.
    f.take(bob, "demo:d").await.ok(200);

    f.end(first.number("ticket"), ann).await.ok(204);
    let granted = f.get(second.number("ticket")).await.ok(200);
    assert_eq!(granted.number("previous_holder"), ann);
    assert!(granted.number("fence") > first.number("fence"));
    assert_eq!(f.get(third.number("ticket")).await.ok(202).number("ahead"), 1);

    // A withdrawal of the one that waits, then a release of the one that holds.
    f.end(third.number("ticket"), ann).await.ok(204);
    f.end(second.number("ticket"), bob).await.ok(204);
    let numbers = [&first, &second, &third].map(|answer| answer.number("ticket"));
    assert!(numbers.is_sorted());
}

#[tokio::test]
async fn k6_unknown_and_ended_tickets_are_told_apart() {
    let f = fixture();
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);
    let ticket = f.take(ann, "demo:c").await.ok(200).number("ticket");

    f.get(ticket + 1).await.expect(404, "unknown_ticket");
    f.end(ticket + 1, ann).await.expect(404, "unknown_ticket");
    f.end(ticket, bob).await.expect(409, "not_yours");
    f.end(ticket, ann).await.ok(204);
    f.end(ticket, ann).await.ok(204);
    f.get(ticket).await.expect(404, "ticket_gone");
    f.end(ticket, 4711).await.expect(404, "session_expired");

    // Another prefix numbers its own; a lead's ticket is no turn.
    let elsewhere = format!("/v1/other/turns/{ticket}");
    f.client.call("GET", &elsewhere, Value::Null).await.expect(404, "unknown_ticket");
    f.client.call("POST", "/v1/shop/leads/job", json!({"session": ann})).await.ok(200);
    f.get(ticket + 1).await.expect(404, "unknown_ticket");
}

#[tokio::test]
async fn b7_a_long_poll_is_woken_by_the_grant_and_looks_at_nothing_meanwhile() {
    let f = fixture();
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);
    let first = f.take(ann, "demo:c").await.ok(200).number("ticket");

    // Both kinds of wait. The clock stands still, so no timer can be what wakes them.
    let body = json!({"session": bob, "key": "demo:c", "wait_ms": 60_000});
    let taking = f.in_background("POST", TURNS.into(), body).await;
    let waited = format!("{TURNS}/{}?wait_ms=60000", first + 1);
    let waiting = f.in_background("GET", waited, Value::Null).await;

    // Time passes on other things; nobody looks.
    let looks = f.sham.looks();
    f.clock.advance(Duration::from_secs(10));
    for _ in 0..1_000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(f.sham.looks(), looks);
    assert!(!taking.is_finished() && !waiting.is_finished());

    f.end(first, ann).await.ok(204);
    let (taken, told) = (taking.await.unwrap().ok(200), waiting.await.unwrap().ok(200));
    assert_eq!(taken.body, told.body);
    assert_eq!(taken.number("previous_holder"), ann);
}

#[tokio::test]
async fn k6_a_long_poll_ends_in_time_and_the_ticket_stays() {
    let f = fixture();
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);
    let first = f.take(ann, "demo:c").await.ok(200).number("ticket");
    let body = json!({"session": bob, "key": "demo:c", "wait_ms": 1_000});
    let taking = f.in_background("POST", TURNS.into(), body).await;
    f.clock.advance(Duration::from_millis(1_000));
    let taken = taking.await.unwrap().ok(202);
    assert_eq!(taken.number("ahead"), 1);

    // More than a minute is a minute.
    let long = format!("{TURNS}/{}?wait_ms={}", first + 1, u64::MAX);
    let waiting = f.in_background("GET", long, Value::Null).await;
    let renew = |session| format!("/v1/shop/sessions/{session}/renew");
    for _ in 0..6 {
        for session in [ann, bob] {
            f.client.call("POST", &renew(session), Value::Null).await.ok(200);
        }
        f.clock.advance(Duration::from_secs(10));
        tokio::task::yield_now().await;
    }
    waiting.await.unwrap().ok(202);
    f.end(first, ann).await.ok(204);
    f.get(first + 1).await.ok(200);
}

#[tokio::test]
async fn k6_a_dropped_connection_takes_nothing_away() {
    let f = fixture();
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);
    let first = f.take(ann, "demo:c").await.ok(200).number("ticket");
    let body = json!({"session": bob, "key": "demo:c", "wait_ms": 60_000});
    let taking = f.in_background("POST", TURNS.into(), body).await;
    taking.abort();
    assert!(taking.await.unwrap_err().is_cancelled());
    assert_eq!(f.get(first + 1).await.ok(202).number("ahead"), 1);
    f.end(first, ann).await.ok(204);
    f.get(first + 1).await.ok(200);
}

#[tokio::test]
async fn k6_a_wait_ends_with_its_session() {
    let f = fixture();
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);
    let first = f.take(ann, "demo:c").await.ok(200).number("ticket");
    let body = json!({"session": bob, "key": "demo:c", "wait_ms": 60_000});
    let taking = f.in_background("POST", TURNS.into(), body).await;
    let waited = format!("{TURNS}/{}?wait_ms=60000", first + 1);
    let waiting = f.in_background("GET", waited, Value::Null).await;
    f.client.call("DELETE", &format!("/v1/shop/sessions/{bob}"), Value::Null).await.ok(204);
    taking.await.unwrap().expect(404, "session_expired");
    waiting.await.unwrap().expect(404, "session_expired");
}

#[tokio::test]
async fn m3_tickets_of_one_queue_are_bounded() {
    let limits = Limits { tickets_per_queue_max: 2, ..Limits::default() };
    let client = Client::over(Sham::new(limits, ManualClock::new()));
    let ann = client.session("shop").await;
    let take = json!({"session": ann, "key": "demo:c"});
    client.call("POST", TURNS, take.clone()).await.ok(200);
    client.call("POST", TURNS, take.clone()).await.ok(202);
    let full = client.call("POST", TURNS, take).await.expect(429, "queue_full");
    assert_eq!(full.body["not_executed"], true);
}
