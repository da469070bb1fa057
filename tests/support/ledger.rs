//! What was acknowledged, and whether it is there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use super::api::Outcome;
use super::demo::Demo;
use super::session::Prefix;

const ATTEMPT: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(30);

/// What one writer was told is safe.
#[derive(Debug, Default)]
struct Page {
    chat: String,
    /// Checkpoints by key and revision.
    rows: Vec<(String, u64)>,
    /// Messages by id.
    messages: Vec<String>,
}

/// What all writers were told is safe.
#[derive(Debug, Default)]
pub struct Ledger {
    pages: Vec<Page>,
}

/// Writers at work, through all nodes.
#[derive(Debug)]
pub struct Writers {
    running: tokio::task::JoinSet<Page>,
    /// Messages acknowledged so far.
    acknowledged: Arc<AtomicUsize>,
}

impl Writers {
    /// Starts so many. Each writes a row, then delivers a message, one after the other, and stops
    /// at the first call that is not acknowledged.
    pub fn start(demo: &Demo, prefix: &Prefix, writers: usize) -> Self {
        let mut running = tokio::task::JoinSet::new();
        let acknowledged = Arc::new(AtomicUsize::new(0));
        for writer in 0..writers {
            running.spawn(write(demo.clone(), prefix.clone(), writer, acknowledged.clone()));
        }
        Self { running, acknowledged }
    }

    /// Waits until so many messages, and at least as many rows, are acknowledged.
    pub async fn have_written(&self, messages: usize) {
        let until = Instant::now() + 2 * ANSWER;
        while self.acknowledged.load(Ordering::Relaxed) < messages {
            assert!(Instant::now() < until, "the group takes hardly any message: {self:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the group is gone under them.
    pub async fn stopped(mut self) -> Ledger {
        let mut pages = Vec::new();
        while let Some(page) = self.running.join_next().await {
            pages.push(page.unwrap());
        }
        Ledger { pages }
    }
}

async fn write(demo: Demo, prefix: Prefix, writer: usize, acknowledged: Arc<AtomicUsize>) -> Page {
    let node = writer % prefix.api.nodes();
    let mut page = Page { chat: format!("{}-{writer}", prefix.name), ..Page::default() };
    for number in 0.. {
        let id = format!("{}-{writer}-{number}", prefix.name);
        let write = prefix.create(&id, &json!({ "written": id })).once(ATTEMPT);
        match prefix.api.call(node, &write).await {
            Outcome::Answered(answer) if answer.status == 200 => {
                page.rows.push((id.clone(), answer.number("revision")));
            }
            Outcome::Answered(answer) => panic!("PUT: {} {}", answer.status, answer.body),
            Outcome::NotExecuted { .. } | Outcome::Unknown { .. } => break,
        }
        match demo.post_once(node, &id, &page.chat, &id).await {
            Some(duplicate) => {
                assert!(!duplicate, "{id} is no duplicate");
                page.messages.push(id);
                acknowledged.fetch_add(1, Ordering::Relaxed);
            }
            None => break,
        }
    }
    page
}

impl Ledger {
    /// How many rows and messages were acknowledged.
    pub fn len(&self) -> (usize, usize) {
        let rows = self.pages.iter().map(|page| page.rows.len()).sum();
        let messages = self.pages.iter().map(|page| page.messages.len()).sum();
        (rows, messages)
    }

    /// The rows that are not there, or are other ones.
    pub async fn missing_rows(&self, prefix: &Prefix) -> Vec<String> {
        let mut missing = Vec::new();
        for (key, revision) in self.pages.iter().flat_map(|page| &page.rows) {
            let found = prefix.read(0, key).await;
            if found != Some((json!({ "written": key }), *revision)) {
                missing.push(format!("{key} at {revision}: {found:?}"));
            }
        }
        missing
    }

    /// Waits until every acknowledged message is answered, and sees that none is answered twice.
    pub async fn every_message_is_answered_once(&self, demo: &Demo) {
        for page in &self.pages {
            for id in &page.messages {
                let reply = demo.answer_to(1, id, &page.chat, ANSWER).await;
                assert_eq!(reply.text, format!("echo: {id}"));
            }
            // One more than was acknowledged may have been taken: its answer died on the way.
            let replies = demo.replies(2, &page.chat).await;
            let once: BTreeSet<&str> = replies.iter().map(|r| r.in_reply_to.as_str()).collect();
            assert_eq!(once.len(), replies.len(), "a message was answered twice: {replies:?}");
            assert!(replies.len() <= page.messages.len() + 1, "{replies:?}");
        }
    }
}
