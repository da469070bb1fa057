//! A process dies after the provider took its reply and before that is recorded (case h6). Another
//! cannot know, and sends it again; the provider can, by its id, and shows it once.
//!
//! The provider is ours, over real sockets, and answers when the test lets it; so the instant of
//! each death is chosen, not met by luck: once before the answer was given, once after it was read,
//! by a process that can record nothing because it is alone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::support::cluster::{Arena, Cluster, Options};
use crate::support::demo::Demo;

/// How long anything that is going to happen may take.
const PATIENCE: Duration = Duration::from_secs(90);
/// The client closes when it has read it.
const TAKEN: &[u8] = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
const CHAT: &str = "h6";

/// A request, as the provider got it.
#[derive(Clone, Debug)]
struct Got {
    /// Index of the node that sent it.
    from: usize,
    id: String,
    text: String,
}

#[derive(Debug, Default)]
struct Seen {
    got: Vec<Got>,
    /// What the user sees: of every id the first.
    shown: Vec<String>,
    /// Requests that were answered and whose connection its client has ended.
    over: usize,
}

/// Takes replies, and answers none while `held`.
struct Provider {
    url: String,
    seen: watch::Sender<Seen>,
    held: watch::Sender<bool>,
}

impl Provider {
    async fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (seen, held) = (watch::Sender::default(), watch::Sender::default());
        let provider = Arc::new(Self { url, seen, held });
        let serving = provider.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let provider = serving.clone();
                tokio::spawn(async move { provider.serve(stream).await });
            }
        });
        provider
    }

    /// One connection, which is one request; `None` = its client went away in the middle of it.
    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut stream = BufReader::new(stream);
        let (mut from, mut length) = (None, 0);
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await.ok()?;
            let line = line.trim_end().to_ascii_lowercase();
            if line.is_empty() {
                break;
            } else if let Some(path) = line.strip_prefix("post /") {
                from = path.split(' ').next()?.parse().ok();
            } else if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().ok()?;
            }
        }
        let from = from?;
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.ok()?;
        let body: Value = serde_json::from_slice(&body).unwrap();
        let text = |name: &str| body[name].as_str().unwrap().to_owned();
        assert_eq!(text("chat"), CHAT);
        self.take(Got { from, id: text("id"), text: text("text") });

        self.held.subscribe().wait_for(|held| !held).await.ok()?;
        // Whether or not anybody is there to read it.
        let _ = stream.write_all(TAKEN).await;
        let _ = stream.read_to_end(&mut Vec::new()).await;
        self.seen.send_modify(|seen| seen.over += 1);
        Some(())
    }

    fn take(&self, got: Got) {
        self.seen.send_modify(|seen| {
            if seen.got.iter().all(|known| known.id != got.id) {
                seen.shown.push(got.text.clone());
            }
            seen.got.push(got);
        });
    }

    /// Waits for what the provider is to have seen.
    async fn until(&self, what: &str, holds: impl Fn(&Seen) -> bool) {
        let mut seen = self.seen.subscribe();
        let waited = tokio::time::timeout(PATIENCE, seen.wait_for(holds)).await.is_ok();
        assert!(waited, "{what}: not within {PATIENCE:?}: {:?}", self.seen.borrow());
    }

    async fn shows(&self, text: &str) {
        self.until(text, |seen| seen.shown.iter().any(|shown| shown == text)).await;
    }

    /// One text after the other, each once; the first was sent by the victim and by another, as one
    /// message. A provider that heeds no ids has shown it as often as it got it.
    fn check(&self, victim: usize) {
        let seen = self.seen.borrow();
        let first: Vec<&Got> = seen.got.iter().filter(|got| got.text == "echo: 1").collect();
        assert_eq!(first[0].from, victim, "{seen:?}");
        assert!(first.iter().any(|got| got.from != victim), "nothing was sent again: {seen:?}");
        let ids: BTreeSet<&str> = first.iter().map(|got| got.id.as_str()).collect();
        assert_eq!(ids.len(), 1, "one message: {seen:?}");
        assert_eq!(seen.shown, ["echo: 1", "echo: 2", "echo: 3"], "{seen:?}");
    }
}

/// A group whose replies go to the provider, and one message in it whose reply the provider has and
/// has not answered. The index of the node that sent it.
async fn sent_and_not_answered(provider: &Provider) -> (Cluster, Demo, usize) {
    let options = Options::nodes(3).lease("4s");
    let cluster = Cluster::start_prepared(&options, Arena::enter().await, |cluster| {
        for (index, node) in cluster.nodes.iter_mut().enumerate() {
            let url = format!("{}/{index}", provider.url);
            node.env.push(("BOTMESH_REPLY_URL".to_owned(), url));
        }
    });
    let cluster = cluster.await;
    let demo = Demo::new(cluster.public());
    provider.held.send_replace(true);
    demo.post(0, "h6-1", CHAT, "1").await;
    provider.until("the first request", |seen| !seen.got.is_empty()).await;
    let victim = provider.seen.borrow().got[0].from;
    (cluster, demo, victim)
}

/// After the death: another sends the reply again, then what comes next; so does the victim when it
/// is back.
async fn goes_on(provider: &Provider, mut cluster: Cluster, demo: Demo, victim: usize) {
    let again = |seen: &Seen| seen.got.iter().any(|got| got.from != victim);
    provider.until("the reply again, from another", again).await;
    demo.post((victim + 1) % 3, "h6-2", CHAT, "2").await;
    provider.shows("echo: 2").await;
    cluster.restart(victim).await;
    demo.post(victim, "h6-3", CHAT, "3").await;
    provider.shows("echo: 3").await;
    provider.check(victim);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_h6_a_reply_whose_answer_a_kill_9_swallowed_is_one_message_and_one_text() {
    let provider = Provider::start().await;
    let (mut cluster, demo, victim) = sent_and_not_answered(&provider).await;
    cluster.nodes[victim].kill();
    provider.held.send_replace(false);
    goes_on(&provider, cluster, demo, victim).await;
}

/// The record needs a majority, and there is none when the answer comes. The victim stays away
/// until another has sent again, or it could still tell of what it had written down for itself.
#[tokio::test(flavor = "multi_thread")]
async fn case_h6_a_reply_whose_record_a_kill_9_prevented_is_one_message_and_one_text() {
    let provider = Provider::start().await;
    let (mut cluster, demo, victim) = sent_and_not_answered(&provider).await;
    let others = [(victim + 1) % 3, (victim + 2) % 3];
    for other in others {
        cluster.nodes[other].kill();
    }
    provider.held.send_replace(false);
    provider.until("the answer was read", |seen| seen.over > 0).await;
    cluster.nodes[victim].kill();
    for other in others {
        cluster.nodes[other].start(&[]);
    }
    for other in others {
        cluster.wait_ready(other).await;
    }
    goes_on(&provider, cluster, demo, victim).await;
}
