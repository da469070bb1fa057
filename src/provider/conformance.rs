//! What every provider has to hold to, as tests that a provider of one's own can run.
//!
//! ```
//! # use botmesh::provider::{WebhookRequest, conformance};
//! # use botmesh::provider::webhook::WebhookProvider;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let request = |body: &str| WebhookRequest {
//!     method: "POST".into(),
//!     path: String::new(),
//!     query: String::new(),
//!     headers: Vec::new(),
//!     body: body.to_owned().into(),
//! };
//! let sample = request(r#"{"id": "m1", "chat": "c", "text": "hello"}"#);
//! conformance::provider(&WebhookProvider::new("hook"), &[(sample, &["m1"])]).await;
//! # }
//! ```
//!
//! They panic with what is wrong, as tests do.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{
    Closed, DeliverError, Delivered, Inbox, Link, Notice, Provider, Webhook, WebhookRequest,
    WebhookResponse,
};
use crate::store::{MemoryStore, RekeyError, Taken};
use crate::types::{ChatKey, Message, Prefix};

/// How long a provider may take to do what it is asked.
const PATIENCE: Duration = Duration::from_secs(10);

/// An inbox that notes what it is given, or has no room.
struct Probe {
    full: bool,
    kept: Mutex<HashMap<String, Vec<u8>>>,
    taken: Mutex<Vec<Message>>,
    connected: watch::Sender<bool>,
}

impl Probe {
    fn new(full: bool) -> Arc<Self> {
        Arc::new(Self {
            full,
            kept: Mutex::default(),
            taken: Mutex::default(),
            connected: watch::channel(false).0,
        })
    }
}

#[async_trait]
impl Inbox for Probe {
    async fn deliver(&self, messages: Vec<Message>) -> Result<Vec<Delivered>, DeliverError> {
        if self.full {
            let why = "the group has no quorum".to_owned();
            return Err(DeliverError::Unavailable { why, retry_after: Duration::from_secs(2) });
        }
        let mut taken = self.taken.lock();
        let known = |message: &Message| taken.iter().any(|known| known.id == message.id);
        let answers: Vec<Delivered> =
            messages.iter().map(|message| Delivered { duplicate: known(message) }).collect();
        taken.extend(messages);
        Ok(answers)
    }

    async fn deliver_past(
        &self,
        _: &str,
        messages: Vec<Message>,
        _: Vec<u8>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        self.deliver(messages).await
    }

    async fn cursor(&self, _: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(None)
    }

    async fn keep(
        &self,
        _: &str,
        rows: Vec<(String, Vec<u8>)>,
        _: Duration,
    ) -> Result<(), DeliverError> {
        self.kept.lock().extend(rows);
        Ok(())
    }

    async fn kept(&self, _: &str, name: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(self.kept.lock().get(name).cloned())
    }

    async fn rekey(&self, _: &ChatKey, _: &ChatKey, _: Taken) -> Result<(), RekeyError> {
        Ok(())
    }

    fn notice(&self, _: &str, _: Notice) {}

    fn connected(&self, _: &str, connected: bool) {
        self.connected.send_replace(connected);
    }
}

/// All of it: the provider alone, and its webhook with requests that it takes, each with the ids of
/// the messages it holds, in order.
///
/// # Panics
/// Where the provider does not hold to it.
pub async fn provider(provider: &dyn Provider, samples: &[(WebhookRequest, &[&str])]) {
    assert!(ChatKey::new(provider.id(), "chat").check().is_ok(), "its id can name a channel");
    assert_eq!(provider.id(), provider.id(), "its id stays");
    assert_eq!(provider.capabilities(), provider.capabilities(), "what it can do stays");
    closes(provider).await;
    let Some(hook) = provider.webhook() else {
        assert!(samples.is_empty(), "samples are of a webhook, and it has none");
        return;
    };
    refuses_what_is_none(&*hook, provider.id()).await;
    for (request, ids) in samples {
        takes(&*hook, provider.id(), request, ids).await;
    }
}

/// It runs until it is asked to stop, and says when it is connected where it needs a connection.
async fn closes(provider: &dyn Provider) {
    let (probe, closing) = (Probe::new(false), watch::channel(false).0);
    let link = Link::new(probe.clone(), closing.subscribe());
    let exclusive = provider.capabilities().exclusive_session;
    let mut connected = probe.connected.subscribe();
    let asking = async {
        if exclusive {
            let said = tokio::time::timeout(PATIENCE, connected.wait_for(|connected| *connected));
            assert!(matches!(said.await, Ok(Ok(_))), "it says when it is connected");
        }
        closing.send_replace(true);
    };
    let run = tokio::time::timeout(PATIENCE * 2, provider.run(link));
    let (closed, ()) = tokio::join!(run, asking);
    let closed = closed.expect("it ends soon after link.closing()");
    assert_eq!(closed.expect("it ends without an error"), Closed::Asked, "it was asked to");
}

async fn ask(hook: &dyn Webhook, inbox: &Arc<Probe>, request: &WebhookRequest) -> WebhookResponse {
    let closing = watch::channel(false).0;
    let link = Link::new(inbox.clone(), closing.subscribe());
    let prefix = Prefix::new("conformance").expect("a name of letters");
    hook.handle(request.clone(), &link, &MemoryStore::new(prefix)).await
}

/// What is no request of the other side is refused, and not repeated.
async fn refuses_what_is_none(hook: &dyn Webhook, id: &str) {
    let deep = "[".repeat(100_000);
    let texts = ["", "hunter2", "{", "[]", "null", "\"hunter2\"", "{\"hunter2\": 1}", &deep];
    let bodies = texts.iter().map(|text| text.as_bytes().to_vec()).chain([vec![0xff, 0xfe, 0]]);
    for (n, body) in bodies.enumerate() {
        for (method, path) in [("POST", ""), ("GET", ""), ("DELETE", ""), ("POST", "a/../b")] {
            let request = WebhookRequest {
                method: method.into(),
                path: path.into(),
                query: "x=%ff&=&hunter2".into(),
                headers: Vec::new(),
                body: body.clone().into(),
            };
            let probe = Probe::new(false);
            let answer = ask(hook, &probe, &request).await;
            let what = format!("{id}: {method} {path:?}, body {n}: {}", answer.status);
            assert!((200..500).contains(&answer.status), "{what}");
            let said = String::from_utf8_lossy(&answer.body).into_owned();
            assert!(!said.contains("hunter2"), "{what} repeats what was sent: {said}");
            assert!(probe.taken.lock().is_empty(), "{what} delivered something");
        }
    }
}

/// A request is taken whole, in order, twice under the same ids, and answered 503 where it cannot be.
async fn takes(hook: &dyn Webhook, id: &str, request: &WebhookRequest, ids: &[&str]) {
    let probe = Probe::new(false);
    for round in 1..=2 {
        let answer = ask(hook, &probe, request).await;
        assert_eq!(answer.status, 200, "{id}: a good request, time {round}");
        let taken = probe.taken.lock();
        let found: Vec<&str> = taken.iter().map(|message| message.id.as_str()).collect();
        assert_eq!(found, ids.repeat(round), "{id}: the messages, in order, by the same ids");
        for message in &*taken {
            assert_eq!(message.chat.channel, id, "its chats are of its channel");
            assert!(message.chat.check().is_ok(), "{} is a chat", message.chat);
        }
    }
    if ids.is_empty() {
        return;
    }
    let answer = ask(hook, &Probe::new(true), request).await;
    assert_eq!(answer.status, 503, "{id}: not 200 before the commit (SPEC G1)");
    let again = answer.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("retry-after"));
    assert!(again, "{id}: 503 says when to come again");
}
