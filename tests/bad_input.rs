//! What a node says to what is wrong: the status and error code of each refusal (SPEC K5, K6, M3),
//! and what a process says before it ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};

use support::api::{Answer, Request};
use support::cluster::{Arena, Cluster, Options};
use support::session::Prefix;

const SECOND: Duration = Duration::from_secs(1);
const LONG_MS: u64 = 600_000;

/// One call and the refusal it must meet.
struct Row {
    what: &'static str,
    request: Request,
    status: u16,
    /// The error code; empty = the status says it all.
    error: &'static str,
}

fn row(what: &'static str, request: Request, status: u16, error: &'static str) -> Row {
    Row { what, request: request.once(10 * SECOND), status, error }
}

async fn refuse_all(prefix: &Prefix, rows: Vec<Row>) {
    let mut wrong = Vec::new();
    for row in rows {
        for node in 0..prefix.api.nodes() {
            let answer = prefix.api.call(node, &row.request).await.answer();
            let as_wanted = answer.status == row.status
                && (row.error.is_empty() || answer.error() == row.error)
                && (answer.status < 400 || is_error_body(&answer));
            if !as_wanted {
                wrong.push(format!(
                    "{} at n{}: {} {} instead of {} {:?}",
                    row.what,
                    node + 1,
                    answer.status,
                    answer.body,
                    row.status,
                    row.error
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// `{error, message, …}`, and no error is without words.
fn is_error_body(answer: &Answer) -> bool {
    let text = |name: &str| answer.body[name].as_str().is_some_and(|text| !text.is_empty());
    text("error") && text("message")
}

#[tokio::test(flavor = "multi_thread")]
async fn k6_every_wrong_call_has_its_status_and_its_code() {
    let cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "bad");
    let session = prefix.open(0, LONG_MS).await;
    let other = prefix.open(1, LONG_MS).await;
    let dead = prefix.open(2, LONG_MS).await;
    let closed = prefix.write(0, prefix.request(Method::DELETE, &format!("sessions/{dead}"))).await;
    assert_eq!(closed.status, 204, "{}", closed.body);
    let held = prefix.take(0, session, "demo:held").await;
    let gone = prefix.take(0, session, "demo:gone").await;
    prefix.release(0, session, gone.ticket).await;
    let row_written = prefix.write(0, prefix.create("demo:row", &json!({ "n": 1 }))).await;
    assert_eq!(row_written.status, 200, "{}", row_written.body);
    let lock = prefix.request(Method::POST, "locks/l").body(json!({ "ttl_ms": LONG_MS }));
    assert_eq!(prefix.write(0, lock.clone()).await.status, 201);
    let lead = prefix.request(Method::POST, "leads/job").body(json!({ "session": session }));
    assert_eq!(prefix.write(0, lead).await.status, 200);
    let unknown = 987_654_321_u64;

    let post = |path: &str, body: Value| prefix.request(Method::POST, path).body(body);
    let get = |path: &str| prefix.request(Method::GET, path);
    let delete = |path: &str| prefix.request(Method::DELETE, path);
    let put = |path: &str| prefix.request(Method::PUT, path).body(json!({ "n": 2 }));
    let long_key = "k".repeat(513);
    let rows = vec![
        // Sessions.
        row(
            "renewing a session never opened",
            post(&format!("sessions/{unknown}/renew"), json!({})),
            404,
            "session_expired",
        ),
        row(
            "renewing a closed session",
            post(&format!("sessions/{dead}/renew"), json!({})),
            404,
            "session_expired",
        ),
        row(
            "a ticket for a session never opened",
            post("turns", json!({ "session": unknown, "key": "demo:a" })),
            404,
            "session_expired",
        ),
        row(
            "a ticket for a closed session",
            post("turns", json!({ "session": dead, "key": "demo:a" })),
            404,
            "session_expired",
        ),
        row(
            "a lead for a closed session",
            post("leads/x", json!({ "session": dead })),
            404,
            "session_expired",
        ),
        // Tickets.
        row(
            "asking for a ticket never allocated",
            get(&format!("turns/{unknown}")),
            404,
            "unknown_ticket",
        ),
        row(
            "ending a ticket never allocated",
            delete(&format!("turns/{unknown}?session={session}")),
            404,
            "unknown_ticket",
        ),
        row(
            "asking for a ticket that has ended",
            get(&format!("turns/{}", gone.ticket)),
            404,
            "ticket_gone",
        ),
        row(
            "ending a ticket that has ended",
            delete(&format!("turns/{}?session={session}", gone.ticket)),
            204,
            "",
        ),
        // Leads and locks.
        row("a lead that another holds", post("leads/job", json!({ "session": other })), 409, ""),
        row("a lock that another holds", post("locks/l", json!({ "ttl_ms": 1_000 })), 409, ""),
        row(
            "renewing a lock with a wrong token",
            post("locks/l/renew", json!({ "token": "nobody", "ttl_ms": 1_000 })),
            409,
            "",
        ),
        row("releasing a lock with a wrong token", delete("locks/l?token=nobody"), 409, ""),
        row(
            "renewing a lock nobody holds",
            post("locks/free/renew", json!({ "token": "nobody", "ttl_ms": 1_000 })),
            409,
            "",
        ),
        // Checkpoints.
        row("reading a checkpoint never written", get("checkpoints/demo:none"), 404, ""),
        row("writing without a condition", put("checkpoints/demo:row"), 428, ""),
        row("deleting without a condition", delete("checkpoints/demo:row"), 428, ""),
        row(
            "writing over a revision that is not there",
            put("checkpoints/demo:row").header("If-Match", format!("\"{unknown}\"")),
            412,
            "",
        ),
        row(
            "creating what exists",
            put("checkpoints/demo:row").header("If-None-Match", "*"),
            412,
            "",
        ),
        row(
            "deleting what is absent",
            delete("checkpoints/demo:none").header("If-Match", "\"1\""),
            412,
            "",
        ),
        row(
            "writing under a fence that holds nothing",
            put("checkpoints/demo:fenced")
                .header("If-None-Match", "*")
                .header("Botmesh-Chat", "demo:held")
                .header("Botmesh-Fence", unknown.to_string()),
            412,
            "stale_fence",
        ),
        row(
            "writing under a fence of another chat",
            put("checkpoints/demo:fenced")
                .header("If-None-Match", "*")
                .header("Botmesh-Chat", "demo:elsewhere")
                .header("Botmesh-Fence", held.fence.unwrap().to_string()),
            412,
            "stale_fence",
        ),
        row(
            "writing under a released fence",
            put("checkpoints/demo:fenced")
                .header("If-None-Match", "*")
                .header("Botmesh-Chat", "demo:gone")
                .header("Botmesh-Fence", gone.fence.unwrap().to_string()),
            412,
            "stale_fence",
        ),
        // What is no call at all.
        row("a body without the session", post("turns", json!({ "key": "demo:a" })), 400, ""),
        row(
            "another spelling of a chat key",
            post("turns", json!({ "session": session, "key": "demo:%61" })),
            400,
            "",
        ),
        row(
            "a prefix that is no name",
            Request::new(Method::GET, "/v1/a%20b/checkpoints/demo:row"),
            400,
            "",
        ),
        row("a key of 513 bytes", get(&format!("checkpoints/{long_key}")), 400, ""),
        row(
            "a lock's key of 513 bytes",
            post(&format!("locks/{long_key}"), json!({ "ttl_ms": 1_000 })),
            400,
            "",
        ),
        row("a path nobody serves", get("nothing/here"), 404, ""),
    ];
    refuse_all(&prefix, rows).await;

    // The turn that is held is still held, and nothing was written.
    assert_eq!(prefix.ask(1, held.ticket, Duration::ZERO).await.fence, held.fence);
    assert_eq!(prefix.read(2, "demo:fenced").await, None);
    let kept = prefix.read(2, "demo:row").await.unwrap();
    assert_eq!(kept, (json!({ "n": 1 }), row_written.number("revision")));
}

#[tokio::test(flavor = "multi_thread")]
async fn k6_a_key_used_again_answers_the_same_or_refuses() {
    let cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "keys");
    let ask = |ttl: u64, key: &str| {
        prefix.request(Method::POST, "locks/one").body(json!({ "ttl_ms": ttl })).key(key)
    };
    let first = prefix.write(0, ask(LONG_MS, "a")).await;
    assert_eq!(first.status, 201, "{}", first.body);
    // The same call under the same key, at every node: the same answer, no second acquisition.
    for node in 0..3 {
        let again = prefix.write(node, ask(LONG_MS, "a")).await;
        assert_eq!((again.status, &again.body), (first.status, &first.body));
    }
    // A definite refusal is remembered too, also after what caused it is over.
    let refused = prefix.write(1, ask(LONG_MS, "b")).await;
    assert_eq!(refused.status, 409);
    let token = first.body["token"].as_str().expect("a token is a string");
    let freed = prefix.request(Method::DELETE, &format!("locks/one?token={token}"));
    assert_eq!(prefix.write(2, freed).await.status, 204);
    let again = prefix.write(0, ask(LONG_MS, "b")).await;
    assert_eq!((again.status, again.body), (refused.status, refused.body));
    // Another body under a used key.
    let other = prefix.write(0, ask(LONG_MS + 1, "a")).await;
    assert_eq!(other.status, 422, "{}", other.body);
    assert!(is_error_body(&other), "{}", other.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn m3_oversize_and_malformed_bodies_are_refused() {
    let cluster = Cluster::start(Options::nodes(1)).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let base = cluster.nodes[0].base();
    let public = cluster.nodes[0].public_base();
    let send = async |method: Method, url: String, body: Vec<u8>| {
        let call = http
            .request(method, url)
            .bearer_auth(&cluster.secret)
            .header("content-type", "application/json")
            .header("if-none-match", "*")
            .body(body);
        let answer = call.send().await.unwrap();
        let status = answer.status().as_u16();
        (status, answer.json::<Value>().await.unwrap_or(Value::Null))
    };
    let large = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2)).into_bytes();
    let row = format!("{base}/v1/m3/checkpoints/demo:large");
    let webhook = format!("{public}/webhooks/demo");
    const MIB: usize = 1024 * 1024;

    // The value limit is 1 MiB, to the byte.
    let (status, body) = send(Method::PUT, row.clone(), large(MIB + 1)).await;
    assert_eq!(status, 413, "{body}");
    let (status, body) = send(Method::PUT, row.clone(), large(MIB)).await;
    assert_eq!(status, 200, "{body}");
    // The webhook's is 4 MiB.
    let (status, body) = send(Method::POST, webhook.clone(), large(4 * MIB + 1)).await;
    assert_eq!(status, 413, "{body}");
    for malformed in ["", "{", "[1,", "{\"id\": 1}", "nonsense", "{\"id\":\"a\",\"chat\":\"b\"}"] {
        let (status, body) = send(Method::POST, webhook.clone(), malformed.into()).await;
        assert_eq!(status, 400, "{malformed:?}: {body}");
        let (status, body) =
            send(Method::POST, format!("{base}/v1/m3/turns"), malformed.into()).await;
        assert_eq!(status, 400, "{malformed:?}: {body}");
        assert!(body["error"].is_string() && body["message"].is_string(), "{body}");
    }
    let (status, body) =
        send(Method::PUT, format!("{base}/v1/m3/checkpoints/demo:x"), "{".into()).await;
    assert_eq!(status, 400, "{body}");
    // The node has taken no harm.
    assert!(cluster.is_ready(0).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn n3_requests_to_the_cluster_listener_carry_the_secret_as_bearer() {
    let cluster = Cluster::start(Options::nodes(1)).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let status = async |method: Method, path: &str, secret: Option<&str>| {
        let mut call = http.request(method, format!("{}{path}", cluster.nodes[0].base()));
        if let Some(secret) = secret {
            call = call.header("authorization", secret);
        }
        call.send().await.unwrap().status().as_u16()
    };
    let right = format!("Bearer {}", cluster.secret);
    let longer = format!("{right}x");
    let shorter = &right[..right.len() - 1];
    let wrong = [None, Some(""), Some("Bearer"), Some("Bearer "), Some("Bearer wrong")];
    for secret in wrong.into_iter().chain([Some(longer.as_str()), Some(shorter)]) {
        for path in ["/cluster/status", "/v1/p/checkpoints/demo:a", "/v1/openapi.json", "/nothing"]
        {
            assert_eq!(status(Method::GET, path, secret).await, 401, "{path} with {secret:?}");
        }
        for path in ["/cluster/join", "/cluster/leave", "/cluster/yield-leader", "/v1/p/sessions"] {
            assert_eq!(status(Method::POST, path, secret).await, 401, "{path} with {secret:?}");
        }
    }
    for path in ["/livez", "/readyz", "/metrics"] {
        assert_eq!(status(Method::GET, path, None).await, 200, "{path}");
    }
    assert_eq!(status(Method::GET, "/cluster/status", Some(&right)).await, 200);
    assert_eq!(status(Method::GET, "/v1/openapi.json", Some(&right)).await, 200);
}

// ----------------------------------------------------------------------------------- processes

/// A process that must not run: waits for its end and returns what it printed.
async fn ends_with(cluster: &mut Cluster, index: usize) -> String {
    let status = cluster.nodes[index].wait_ended(30 * SECOND).await;
    let printed = cluster.nodes[index].printed();
    assert!(!status.success(), "it ended as if all were well:\n{printed}");
    assert!(status.code().is_some(), "it was killed or crashed: {status}\n{printed}");
    assert!(!printed.contains("panicked"), "{printed}");
    printed
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r14_a_second_process_on_a_data_directory_names_the_first() {
    let mut cluster = Cluster::start(Options::nodes(1)).await;
    let second = cluster.add_node();
    cluster.nodes[second].dir = cluster.nodes[0].dir.clone();
    cluster.nodes[second].start(&[]);
    let printed = ends_with(&mut cluster, second).await;
    let pid = cluster.nodes[0].pid().to_string();
    assert!(printed.contains(&pid), "the holder's pid {pid} is not named:\n{printed}");
    assert!(cluster.is_ready(0).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn l1_a_port_already_taken_is_named() {
    let mut cluster = Cluster::start(Options::nodes(1)).await;
    let second = cluster.add_node();
    cluster.nodes[second].cluster = cluster.nodes[0].cluster;
    cluster.nodes[second].start(&["--bootstrap"]);
    let printed = ends_with(&mut cluster, second).await;
    let port = cluster.nodes[0].cluster.port().to_string();
    assert!(printed.contains(&port), "the port {port} is not named:\n{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn k5_a_node_with_a_wrong_secret_is_not_let_in() {
    let mut cluster = Cluster::start(Options::nodes(1)).await;
    let second = cluster.add_node();
    let wrong = cluster.root().join("wrong-secret");
    std::fs::write(&wrong, "another-secret-altogether").unwrap();
    cluster.nodes[second].use_secret(&wrong);
    let first = cluster.nodes[0].cluster.to_string();
    cluster.nodes[second].start(&["--join", &first]);
    // It may go on asking, since a secret is sometimes mended on the other side; but it says why.
    let until = Instant::now() + 15 * SECOND;
    while !cluster.nodes[second].printed().contains("send the cluster secret") {
        assert!(Instant::now() < until, "{}", cluster.nodes[second].printed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!cluster.is_ready(second).await);
    let nodes = cluster.status(0).await.unwrap()["nodes"].clone();
    assert_eq!(nodes.as_array().unwrap().len(), 1, "{nodes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r6_groups_founded_apart_refuse_each_other() {
    let _arena = Arena::enter().await;
    let mut cluster = Cluster::prepare(&Options::nodes(3));
    for index in 0..3 {
        cluster.nodes[index].start(&["--bootstrap"]);
        cluster.wait_ready(index).await;
    }
    let mut ids = Vec::new();
    for index in 0..3 {
        ids.push(cluster.status(index).await.unwrap()["cluster_id"].clone());
    }
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2], "{ids:?}");
    // A process that has a group does not enter another, whatever it is told (K2).
    let first = cluster.nodes[0].cluster.to_string();
    for (index, flags) in [(1, vec!["--bootstrap"]), (2, vec!["--join", &first])] {
        cluster.nodes[index].kill();
        cluster.nodes[index].start(&flags);
        let until = Instant::now() + 30 * SECOND;
        while !cluster.is_ready(index).await && cluster.nodes[index].ended().is_none() {
            assert!(Instant::now() < until, "neither serves nor ends");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if cluster.nodes[index].runs() {
            let status = cluster.status(index).await.unwrap();
            assert_eq!(status["cluster_id"], ids[index], "it is of the group it was of");
        } else {
            let printed = cluster.nodes[index].printed();
            let id = ids[index].as_str().unwrap();
            assert!(printed.contains(id), "its group {id} is not named:\n{printed}");
        }
    }
    // One group's calls to another are refused: the ids differ.
    let nodes = cluster.status(0).await.unwrap()["nodes"].clone();
    assert_eq!(nodes.as_array().unwrap().len(), 1, "{nodes}");
}
