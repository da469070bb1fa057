use serde_json::{Value, json};

use super::client::{Client, Mood, Sham};
use crate::clock::ManualClock;
use crate::machine::Limits;
use crate::types::VALUE_BYTES_MAX;

const ROW: &str = "/v1/shop/checkpoints/demo%3Aann";
const CREATE: (&str, &str) = ("If-None-Match", "*");

fn client() -> Client {
    Client::over(Sham::new(Limits::default(), ManualClock::new()))
}

fn tag(revision: u64) -> String {
    format!("\"{revision}\"")
}

#[tokio::test]
async fn c3_k6_a_checkpoint_is_written_by_compare_and_set() {
    let client = client();
    client.call("GET", ROW, Value::Null).await.expect(404, "no_checkpoint");
    client.call("PUT", ROW, json!(1)).await.expect(428, "condition_required");
    client.call("DELETE", ROW, Value::Null).await.expect(428, "condition_required");
    // A delete of what is not there is refused.
    let absent = client.with("DELETE", ROW, &[("If-Match", "\"1\"")], Value::Null).await;
    assert_eq!(absent.expect(412, "revision_mismatch").body["revision"], Value::Null);

    // Kept as it was sent, byte for byte.
    let sent = "{ \"a\" : [1, 2.50] }";
    let request = super::client::request("PUT", ROW, &[CREATE], sent.into());
    let first = client.send(request).await.ok(200).number("revision");
    let read = client.call("GET", ROW, Value::Null).await.ok(200);
    assert_eq!(read.text, sent);
    assert_eq!(read.headers["etag"].to_str().unwrap(), tag(first));
    let local = client.call("GET", &format!("{ROW}?consistency=local"), Value::Null).await.ok(200);
    assert_eq!(local.text, sent);

    let twice = client.with("PUT", ROW, &[CREATE], json!(2)).await;
    assert_eq!(twice.expect(412, "revision_mismatch").number("revision"), first);
    let replace = [("If-Match", &*tag(first))];
    let second = client.with("PUT", ROW, &replace, json!(2)).await.ok(200).number("revision");
    client.with("PUT", ROW, &replace, json!(3)).await.expect(412, "revision_mismatch");

    // Across a delete no revision comes back.
    client.with("DELETE", ROW, &replace, Value::Null).await.expect(412, "revision_mismatch");
    let delete = [("If-Match", &*tag(second))];
    let gone = client.with("DELETE", ROW, &delete, Value::Null).await.ok(200);
    assert_eq!(gone.number("revision"), second);
    client.call("GET", ROW, Value::Null).await.expect(404, "no_checkpoint");
    let third = client.with("PUT", ROW, &[CREATE], json!(null)).await;
    // `null` is a value; the test client sends it as an empty body, which is none.
    third.expect(400, "malformed_json");
    let third = client.with("PUT", ROW, &[CREATE], json!(4)).await.ok(200).number("revision");
    assert!(second < third && first < second);
}

#[tokio::test]
async fn c10_k6_a_fenced_write_needs_exactly_that_turn() {
    let client = client();
    let ann = client.session("shop").await;
    let take = json!({"session": ann, "key": "demo:ann"});
    let turn = client.call("POST", "/v1/shop/turns", take.clone()).await.ok(200);
    let fence = turn.number("fence").to_string();
    let put = async |fence: &str, chat: &str, condition: (&str, &str), value: u64| {
        let headers = [condition, ("Botmesh-Fence", fence), ("Botmesh-Chat", chat)];
        client.with("PUT", ROW, &headers, json!(value)).await
    };

    let revision = put(&fence, "demo:ann", CREATE, 1).await.ok(200).number("revision");
    let next = tag(revision);
    let replace = ("If-Match", &*next);
    put("1000000", "demo:ann", replace, 2).await.expect(412, "stale_fence");
    put(&fence, "demo:bob", replace, 2).await.expect(412, "stale_fence");
    let path = format!("/v1/shop/turns/{}?session={ann}", turn.number("ticket"));
    client.call("DELETE", &path, Value::Null).await.ok(204);
    // Also after the release, though nobody holds it.
    put(&fence, "demo:ann", replace, 2).await.expect(412, "stale_fence");
    client.call("POST", "/v1/shop/turns", take).await.ok(200);
    put(&fence, "demo:ann", replace, 2).await.expect(412, "stale_fence");
    assert_eq!(client.call("GET", ROW, Value::Null).await.ok(200).text, "1");
}

#[tokio::test]
async fn k6_conditions_are_read_strictly() {
    let client = client();
    for (name, value) in [
        ("If-Match", "*"),
        ("If-Match", "W/\"1\""),
        ("If-Match", "1"),
        ("If-Match", "\"\""),
        ("If-Match", "\"1\", \"2\""),
        ("If-Match", "\"one\""),
        ("If-None-Match", "\"1\""),
        ("If-None-Match", "**"),
    ] {
        let answer = client.with("PUT", ROW, &[(name, value)], json!(1)).await;
        answer.expect(400, "bad_header");
    }
    let both = [("If-Match", "\"1\""), CREATE];
    client.with("PUT", ROW, &both, json!(1)).await.expect(400, "bad_header");
    let twice = [("If-Match", "\"1\""), ("If-Match", "\"2\"")];
    client.with("PUT", ROW, &twice, json!(1)).await.expect(400, "bad_header");
    client.with("DELETE", ROW, &[CREATE], Value::Null).await.expect(400, "bad_header");
    for half in [("Botmesh-Fence", "1"), ("Botmesh-Chat", "demo:ann")] {
        client.with("PUT", ROW, &[CREATE, half], json!(1)).await.expect(400, "bad_header");
    }
    let fence = [CREATE, ("Botmesh-Fence", "-1"), ("Botmesh-Chat", "demo:ann")];
    client.with("PUT", ROW, &fence, json!(1)).await.expect(400, "bad_header");
    // More digits than a revision has, or another spelling of one: no row has it.
    for tag in ["\"99999999999999999999999\"", "\"007\""] {
        let answer = client.with("PUT", ROW, &[("If-Match", tag)], json!(1)).await;
        answer.expect(412, "revision_mismatch");
    }
}

#[tokio::test]
async fn m3_a_value_has_a_mebibyte() {
    let client = client();
    let text = |len: usize| Value::String("x".repeat(len - 2));
    client.with("PUT", ROW, &[CREATE], text(VALUE_BYTES_MAX)).await.ok(200);
    let over = client.with("PUT", ROW, &[CREATE], text(VALUE_BYTES_MAX + 1)).await;
    over.expect(413, "too_large");
}

#[tokio::test]
async fn f4_k6_only_a_local_read_answers_without_a_quorum() {
    let sham = Sham::new(Limits::default(), ManualClock::new());
    let client = Client::over(sham.clone());
    client.with("PUT", ROW, &[CREATE], json!(1)).await.ok(200);
    sham.set(Mood::NoQuorum);
    let refused = client.call("GET", ROW, Value::Null).await.expect(503, "no_quorum");
    assert_eq!(refused.body["not_executed"], true);
    client.call("GET", &format!("{ROW}?consistency=local"), Value::Null).await.ok(200);
    client
        .call("GET", &format!("{ROW}?consistency=near"), Value::Null)
        .await
        .expect(400, "bad_query");
}
