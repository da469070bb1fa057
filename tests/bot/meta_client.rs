//! What our tests take for Meta, seen by somebody else's client: pywa, unchanged, sends to the fake Graph
//! API and reads what the tests post. A shape that only our provider understands would show here.

use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use std::io::{BufRead, BufReader, Write};

use botmesh::testing::MemoryHub;
use serde_json::{Value, json};

use super::graph_api::GraphApi;
use super::meta::{
    ACCOUNT, Taken, change, envelope, message, noting, post_bytes, secret, start, status, whatsapp,
};

/// Python with pywa, where `.ci/run` put it.
fn python() -> Option<PathBuf> {
    // target/<profile>/deps/bot-… → target/pywa/…
    let own = std::env::current_exe().unwrap();
    let python = own.ancestors().nth(3)?.join("pywa/bin/python");
    let has = Command::new(&python).args(["-c", "import pywa"]).stderr(Stdio::null()).status();
    has.is_ok_and(|status| status.success()).then_some(python)
}

/// The client's process; killed with the test.
struct Client {
    child: Child,
    asks: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Client {
    fn start(python: &PathBuf, graph: &GraphApi, token: &str) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/pywa_client.py");
        let mut child = Command::new(python)
            .args([script, &graph.url, ACCOUNT, token, "app secret"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (asks, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, asks, answers: BufReader::new(answers) }
    }

    /// Blocks: the fake answers on other threads.
    fn ask(&mut self, what: &Value) -> Value {
        writeln!(self.asks, "{what}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|_| panic!("{what}: {line:?}"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d4_another_client_finds_the_graph_api_and_what_it_posts_as_it_expects() {
    let Some(python) = python() else {
        println!("SKIPPED: no pywa in target/pywa; `.ci/run` puts it there");
        return;
    };
    let (hub, graph, taken) = (MemoryHub::new(), GraphApi::start().await, Taken::default());
    let bot = start(&hub, whatsapp(&graph), noting(&taken)).await;
    let mut client = Client::start(&python, &graph, "token");

    // What it sends arrives, as ours does, and it reads the answers, those that refuse too.
    assert_eq!(client.ask(&json!({ "send": ["491", "hi"] })), json!({ "sent": "wamid.out1" }));
    assert_eq!((graph.texts(), graph.calls()[0].token.as_str()), (vec!["hi".to_owned()], "token"));
    for (status, code, class) in [
        (400, 131_047, "ReEngagementMessage"),
        (400, 131_056, "TooManyMessages"),
        (429, 130_429, "RateLimitHit"),
        (401, 190, "ExpiredAccessToken"),
    ] {
        graph.fail_next(status, json!({ "code": code, "message": "no" }), None);
        let answer = client.ask(&json!({ "send": ["491", "again"] }));
        assert_eq!(answer, json!({ "error": [class, code] }));
    }

    // What is posted it understands as our provider does, and takes no other signature.
    let said = envelope(vec![change(vec![message("m1", "491", "hello")], vec![])]).to_string();
    let read = envelope(vec![change(vec![], vec![status("wamid.out1", "read")])]).to_string();
    let signature = format!("sha256={}", secret().sign(said.as_bytes()));
    let understood = client.ask(&json!({ "posted": [said, signature] }));
    assert_eq!(understood, json!({ "understood": [["message", "m1", "491", "hello"]] }));
    assert_eq!(post_bytes(&bot, "wa", said.clone().into_bytes()).await.status, 200);
    super::support::until("ours has it", || !taken.lock().is_empty()).await;
    assert_eq!(*taken.lock(), [(format!("{ACCOUNT}/491"), "hello".to_owned())]);
    let refused = client.ask(&json!({ "posted": [read, signature] }));
    assert_eq!(refused, json!({ "refused": 403 }));
    let signature = format!("sha256={}", secret().sign(read.as_bytes()));
    let understood = client.ask(&json!({ "posted": [read, signature] }));
    assert_eq!(understood, json!({ "understood": [["status", "wamid.out1", "491", "read"]] }));
}
