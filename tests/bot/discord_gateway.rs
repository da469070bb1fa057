//! Discord's gateway on an inbox whose commits a test holds open.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use botmesh::bot::{BotBuilder, Route};
use botmesh::provider::{
    Closed, DeliverError, Delivered, Inbox, Link, Notice, Provider, ProviderError,
};
use botmesh::store::{RekeyError, Taken};
use botmesh::testing::MemoryHub;
use botmesh::types::{ChatKey, Message};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::discord::{discord, listens, start};
use super::discord_api::{DiscordApi, channel};
use super::support::{PATIENCE, until};

/// What was taken, and what is to be told of besides.
struct Journal {
    taken: Mutex<Vec<String>>,
    cursor: Mutex<Option<Vec<u8>>>,
    rows: Mutex<HashMap<String, Vec<u8>>>,
    told: Mutex<Vec<Notice>>,
    /// Commits that were begun.
    begun: Mutex<usize>,
    /// Whether commits with messages are held open.
    held: watch::Sender<bool>,
}

#[async_trait]
impl Inbox for Journal {
    async fn deliver(&self, _: Vec<Message>) -> Result<Vec<Delivered>, DeliverError> {
        unreachable!("it delivers with its cursor")
    }

    async fn deliver_past(
        &self,
        _: &str,
        messages: Vec<Message>,
        cursor: Vec<u8>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        *self.begun.lock() += messages.len();
        if !messages.is_empty() {
            self.held.subscribe().wait_for(|held| !held).await.unwrap();
        }
        let delivered = messages.iter().map(|_| Delivered { duplicate: false }).collect();
        self.taken.lock().extend(messages.into_iter().map(|message| message.text));
        *self.cursor.lock() = Some(cursor);
        Ok(delivered)
    }

    async fn cursor(&self, _: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(self.cursor.lock().clone())
    }

    async fn keep(
        &self,
        _: &str,
        rows: Vec<(String, Vec<u8>)>,
        _: Duration,
    ) -> Result<(), DeliverError> {
        self.rows.lock().extend(rows);
        Ok(())
    }

    async fn kept(&self, _: &str, name: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(self.rows.lock().get(name).cloned())
    }

    async fn rekey(&self, _: &ChatKey, _: &ChatKey, _: Taken) -> Result<(), RekeyError> {
        unreachable!("a channel keeps its id")
    }

    fn notice(&self, _: &str, notice: Notice) {
        self.told.lock().push(notice);
    }

    fn connected(&self, _: &str, _: bool) {}
}

/// A listener, until it is dropped.
struct Listener {
    journal: Arc<Journal>,
    _closing: watch::Sender<bool>,
    run: JoinHandle<Result<Closed, ProviderError>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.run.abort();
    }
}

impl Listener {
    /// Listens, with a session that is stored.
    async fn start(api: &DiscordApi) -> Self {
        let journal = Arc::new(Journal {
            taken: Mutex::default(),
            cursor: Mutex::default(),
            rows: Mutex::default(),
            told: Mutex::default(),
            begun: Mutex::default(),
            held: watch::Sender::new(false),
        });
        let (closing, closed) = watch::channel(false);
        let (discord, link) = (discord(api), Link::new(journal.clone(), closed));
        let run = tokio::spawn(async move { discord.run(link).await });
        let listener = Self { journal, _closing: closing, run };
        listens(api).await;
        until("the session is stored", || listener.journal.cursor.lock().is_some()).await;
        listener
    }

    fn taken(&self) -> Vec<String> {
        self.journal.taken.lock().clone()
    }

    /// What was left out, and why.
    fn left_out(&self) -> Vec<String> {
        let told = self.journal.told.lock();
        let bad = told.iter().filter_map(|notice| match notice {
            Notice::Bad(item) => Some(format!("{}: {}", item.at, item.why)),
            _ => None,
        });
        bad.collect()
    }

    /// Whether an event of that kind came that nobody handles.
    fn is_unknown(&self, wanted: &str) -> bool {
        let told = self.journal.told.lock();
        told.iter().any(|notice| matches!(notice, Notice::Unknown { kind } if kind == wanted))
    }
}

/// Waits until all that was sent so far is read: a heartbeat that is asked for comes after it.
async fn is_read(api: &DiscordApi) {
    let before = api.heartbeats().len();
    api.to_all(&Ok(json!({ "op": 1, "d": null })));
    until("it is read", || api.heartbeats().len() > before).await;
}

#[tokio::test]
async fn d5_a_heartbeat_stays_below_a_commit_that_is_open() {
    let api = DiscordApi::start().await;
    let listener = Listener::start(&api).await;
    is_read(&api).await;
    let stored = api.last();
    assert_eq!(api.heartbeats().last(), Some(&Some(stored)));
    listener.journal.held.send_replace(true);
    api.says(7, "one");
    until("the commit is begun", || *listener.journal.begun.lock() == 1).await;
    api.says(7, "two");
    for _ in 0..3 {
        is_read(&api).await;
        assert_eq!(api.heartbeats().last(), Some(&Some(stored)), "nothing of it is stored");
    }
    listener.journal.held.send_replace(false);
    until("both are taken", || listener.taken() == ["one", "two"]).await;
    let last = api.last();
    let acknowledged = tokio::time::timeout(PATIENCE, async {
        while api.heartbeats().last() != Some(&Some(last)) {
            is_read(&api).await;
        }
    });
    acknowledged.await.expect("and acknowledged");
}

#[tokio::test]
async fn d5_what_was_read_is_taken_though_the_session_is_lost() {
    let api = DiscordApi::start().await;
    let listener = Listener::start(&api).await;
    listener.journal.held.send_replace(true);
    api.says(7, "one");
    until("the commit is begun", || *listener.journal.begun.lock() == 1).await;
    api.says(7, "two");
    api.says(8, "three");
    is_read(&api).await;
    api.forget_sessions();
    api.to_all(&Ok(json!({ "op": 9, "d": false })));
    listener.journal.held.send_replace(false);
    until("it identifies anew", || api.identified().len() == 2).await;
    listens(&api).await;
    assert_eq!(listener.taken(), ["one", "two", "three"]);
    assert!(listener.left_out().iter().any(|bad| bad.contains("session is over")));
    api.says(7, "four");
    until("it goes on", || listener.taken() == ["one", "two", "three", "four"]).await;
}

#[tokio::test]
async fn m1_what_the_gateway_says_amiss_does_not_end_the_connection() {
    let api = DiscordApi::start().await;
    let listener = Listener::start(&api).await;
    api.to_all(&Ok(Value::String("{\"op\":".to_owned())));
    api.to_all(&Ok(json!({ "op": 0, "t": "TYPING_START", "d": {} })));
    api.to_all(&Ok(json!([])));
    api.dispatch("READY", &json!({ "v": 10 }));
    api.dispatch("", &json!({}));
    api.says(7, "hi");
    until("the next is taken", || listener.taken() == ["hi"]).await;
    let left_out = listener.left_out();
    assert_eq!(left_out, ["frame: it is no JSON", "event: it has no number"]);
    assert!(listener.is_unknown("READY") && listener.is_unknown("event without name"));
    assert_eq!((api.identified().len(), api.resumed().len()), (1, 0));
}

#[tokio::test]
async fn d4_a_session_that_never_lets_in_again_is_given_up() {
    let api = DiscordApi::start().await;
    let _listener = Listener::start(&api).await;
    for _ in 0..5 {
        api.refuse_next(Ok(true));
    }
    api.to_all(&Ok(json!({ "op": 7, "d": null })));
    // It waits longer each time, eight seconds in all.
    let given_up = tokio::time::timeout(PATIENCE * 6, async {
        while api.identified().len() < 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    given_up.await.expect("it identifies anew");
    assert_eq!(api.resumed().len(), 5);
    listens(&api).await;
}

#[tokio::test]
async fn d4_an_acknowledgement_that_meets_trouble_is_made_again() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let make = |bot: BotBuilder| bot.on(Route::Any, async |ctx| Ok(ctx.reply("done").await?));
    let _a = start(&hub, discord(&api), make).await;
    listens(&api).await;
    // Once it did not arrive; once it did, and Discord says so when it comes again.
    for arrives in [false, true] {
        api.trouble(502, "<html>".into(), &[], arrives);
        let asked = api.asks(7, 2, &json!({ "id": "5", "name": "order" }));
        until("it is answered", || api.interaction(&asked).answers == ["done"]).await;
        assert!(api.interaction(&asked).acknowledged.is_some());
    }
    assert_eq!(api.sent(), [], "neither by a message");
}

#[tokio::test]
async fn g3_what_is_not_discords_answer_is_no_refusal() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let make = |bot: BotBuilder| bot.on(Route::Any, async |ctx| Ok(ctx.reply("done").await?));
    let _a = start(&hub, discord(&api), make).await;
    listens(&api).await;
    api.trouble(403, "error code: 1015".into(), &[], false);
    api.trouble(404, "<html>".into(), &[], false);
    api.says(7, "hi");
    until("it goes out all the same", || api.sent_to(&channel(7)) == ["done"]).await;
    // Not even an acknowledgement is given up for it.
    api.trouble(403, "error code: 1015".into(), &[], false);
    let asked = api.asks(8, 2, &json!({ "id": "5", "name": "order" }));
    until("it is answered", || api.interaction(&asked).answers == ["done"]).await;
    assert_eq!(api.sent_to(&channel(8)), [""; 0]);
}
