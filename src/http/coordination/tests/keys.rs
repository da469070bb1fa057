//! `Idempotency-Key` (SPEC K6, *Keys* and *Outcomes*).

use serde_json::{Value, json};

use super::client::{Answer, Client, Mood, Sham};
use crate::clock::ManualClock;
use crate::machine::Limits;

struct Fixture {
    sham: Sham,
    client: Client,
}

fn fixture(limits: Limits) -> Fixture {
    let sham = Sham::new(limits, ManualClock::new());
    Fixture { client: Client::over(sham.clone()), sham }
}

impl Fixture {
    async fn keyed(&self, key: &str, method: &str, path: &str, body: Value) -> Answer {
        self.client.with(method, path, &[("Idempotency-Key", key)], body).await
    }

    /// Asks twice: the first answer gets lost, the second is the first's.
    async fn lost(&self, key: &str, method: &str, path: &str, body: Value) -> Answer {
        self.sham.set(Mood::Forgets);
        let lost = self.keyed(key, method, path, body.clone()).await;
        // May have been done: nothing says that it was not.
        assert_eq!(lost.clone().expect(503, "outcome_unknown").body.get("not_executed"), None);
        self.sham.set(Mood::Sound);
        self.keyed(key, method, path, body).await
    }
}

#[tokio::test]
async fn b8_k6_a_lost_answer_is_asked_for_again() {
    let f = fixture(Limits::default());
    let opened =
        f.lost("a", "POST", "/v1/shop/sessions", json!({"lease_ms": 15_000})).await.ok(201);
    let ann = opened.number("session");
    let again =
        f.keyed("a", "POST", "/v1/shop/sessions", json!({"lease_ms": 15_000})).await.ok(201);
    assert_eq!(again.number("session"), ann);

    // No second ticket, though the session could have two.
    let take = json!({"session": ann, "key": "demo:c"});
    let taken = f.lost("b", "POST", "/v1/shop/turns", take.clone()).await.ok(200);
    let next = f.keyed("c", "POST", "/v1/shop/turns", take.clone()).await.ok(202);
    assert_eq!((next.number("ticket"), next.number("ahead")), (taken.number("ticket") + 1, 1));

    // No second release either: the one that waits is now granted and stays so.
    let end = format!("/v1/shop/turns/{}?session={ann}", taken.number("ticket"));
    f.lost("d", "DELETE", &end, Value::Null).await.ok(204);
    f.keyed("d", "DELETE", &end, Value::Null).await.ok(204);

    // A ticket that came further since is told as it is now; one that has ended as it was then.
    let now = f.keyed("c", "POST", "/v1/shop/turns", take.clone()).await.ok(200);
    assert_eq!(now.number("ticket"), next.number("ticket"));
    assert_eq!(now.number("previous_holder"), ann);
    assert_eq!(f.keyed("b", "POST", "/v1/shop/turns", take).await.ok(200).body, taken.body);

    let lock = f.lost("e", "POST", "/v1/shop/locks/door", json!({"ttl_ms": 1_000})).await.ok(201);
    let release = format!("/v1/shop/locks/door?token={}", lock.body["token"].as_str().unwrap());
    f.lost("f", "DELETE", &release, Value::Null).await.ok(204);
    f.keyed("f", "DELETE", &release, Value::Null).await.ok(204);

    let renew = format!("/v1/shop/sessions/{ann}/renew");
    f.lost("g", "POST", &renew, Value::Null).await.ok(200);
    let close = format!("/v1/shop/sessions/{ann}");
    f.lost("h", "DELETE", &close, Value::Null).await.ok(204);
    // The session is dead, and still the lost answer is the one it was.
    f.keyed("h", "DELETE", &close, Value::Null).await.ok(204);
}

#[tokio::test]
async fn k6_refusals_are_remembered_too() {
    let f = fixture(Limits::default());
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);
    let lead = "/v1/shop/leads/job";
    f.client.call("POST", lead, json!({"session": ann})).await.ok(200);
    f.keyed("a", "POST", lead, json!({"session": bob})).await.expect(409, "held");
    let end = format!("{lead}?session={ann}");
    f.client.call("DELETE", &end, Value::Null).await.ok(204);
    f.keyed("a", "POST", lead, json!({"session": bob})).await.expect(409, "held");
    f.keyed("b", "POST", lead, json!({"session": bob})).await.ok(200);

    let row = "/v1/shop/checkpoints/demo%3Aann";
    let put = async |key: &str, condition: (&str, &str), value: u64| {
        f.client.with("PUT", row, &[("Idempotency-Key", key), condition], json!(value)).await
    };
    put("c", ("If-Match", "\"7\""), 1).await.expect(412, "revision_mismatch");
    put("d", ("If-None-Match", "*"), 1).await.ok(200);
    put("c", ("If-Match", "\"7\""), 1).await.expect(412, "revision_mismatch");
    // Another condition or another value is another request.
    put("d", ("If-Match", "\"7\""), 1).await.expect(422, "key_reused");
    put("d", ("If-None-Match", "*"), 2).await.expect(422, "key_reused");
    put("d", ("If-None-Match", "*"), 1).await.ok(200);
}

#[tokio::test]
async fn k6_a_key_belongs_to_its_session_or_prefix() {
    let f = fixture(Limits::default());
    let (ann, bob) = (f.client.session("shop").await, f.client.session("shop").await);
    for session in [ann, bob] {
        let take = json!({"session": session, "key": "demo:c"});
        let answer = f.keyed("same", "POST", "/v1/shop/turns", take).await;
        assert!(matches!(answer.status, 200 | 202), "{answer:?}");
    }
    for prefix in ["shop", "other"] {
        let path = format!("/v1/{prefix}/locks/door");
        f.keyed("same", "POST", &path, json!({"ttl_ms": 1_000})).await.ok(201);
    }
    // In one session the same key means the same request, whatever the route.
    let lead = f.keyed("same", "POST", "/v1/shop/leads/job", json!({"session": ann})).await;
    lead.expect(422, "key_reused");
}

#[tokio::test]
async fn k6_at_capacity_new_keys_are_refused_and_old_ones_kept() {
    let f = fixture(Limits { idempotency_keys_max: 1, ..Limits::default() });
    let open = json!({"lease_ms": 15_000});
    let first = f.keyed("a", "POST", "/v1/shop/sessions", open.clone()).await.ok(201);
    let full =
        f.keyed("b", "POST", "/v1/shop/sessions", open.clone()).await.expect(429, "keys_full");
    assert_eq!(full.body["not_executed"], true);
    let again = f.keyed("a", "POST", "/v1/shop/sessions", open.clone()).await.ok(201);
    assert_eq!(again.number("session"), first.number("session"));
    // Without a key it goes on.
    f.client.call("POST", "/v1/shop/sessions", open).await.ok(201);
}

#[tokio::test]
async fn k6_a_key_is_checked() {
    let f = fixture(Limits::default());
    let open = json!({"lease_ms": 15_000});
    for bad in ["", "a b", &"x".repeat(256)] {
        f.keyed(bad, "POST", "/v1/shop/sessions", open.clone()).await.expect(400, "bad_header");
    }
    f.keyed(&"x".repeat(255), "POST", "/v1/shop/sessions", open.clone()).await.ok(201);
    let twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")];
    let answer = f.client.with("POST", "/v1/shop/sessions", &twice, open).await;
    answer.expect(400, "bad_header");
}
