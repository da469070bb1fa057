//! WhatsApp Web on an inbox whose commits a test holds open, counts or refuses.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use botmesh::provider::{
    Closed, DeliverError, Delivered, Inbox, Link, Notice, Provider, ProviderError,
};
use botmesh::store::{RekeyError, Taken};
use botmesh::types::{ChatKey, Message};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::whatsapp_api::WhatsAppApi;
use super::whatsapp_people::text;
use super::whatsapp_web::{Steps, eventually, linked, whatsapp};

/// What was taken and what is kept.
#[derive(Default)]
struct Journal {
    taken: Mutex<Vec<String>>,
    rows: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Commits of rows.
    commits: Mutex<usize>,
    /// Deliveries that were begun.
    begun: Mutex<usize>,
    /// Deliveries that are refused before the next one is taken.
    full: Mutex<usize>,
    /// Deliveries of this text are held open.
    held: watch::Sender<&'static str>,
}

#[async_trait]
impl Inbox for Journal {
    async fn deliver(&self, messages: Vec<Message>) -> Result<Vec<Delivered>, DeliverError> {
        *self.begun.lock() += messages.len();
        let left = self.full.lock().checked_sub(1);
        if let Some(left) = left {
            *self.full.lock() = left;
            let (why, retry_after) = ("no quorum".to_owned(), Duration::from_millis(1));
            return Err(DeliverError::Unavailable { why, retry_after });
        }
        let is_free = |held: &&str| messages.iter().all(|message| message.text != *held);
        self.held.subscribe().wait_for(is_free).await.unwrap();
        let mut taken = self.taken.lock();
        let mut delivered = Vec::new();
        for message in messages {
            let duplicate = taken.contains(&message.id);
            delivered.push(Delivered { duplicate });
            if !duplicate {
                taken.push(message.id);
            }
        }
        Ok(delivered)
    }

    async fn deliver_past(
        &self,
        _: &str,
        _: Vec<Message>,
        _: Vec<u8>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        unreachable!("WhatsApp remembers where it stands")
    }

    async fn cursor(&self, _: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(None)
    }

    async fn keep(
        &self,
        _: &str,
        _: Vec<(String, Vec<u8>)>,
        _: Duration,
    ) -> Result<(), DeliverError> {
        unreachable!("what it keeps has no end")
    }

    async fn kept(&self, _: &str, name: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        Ok(self.rows.lock().get(name).cloned())
    }

    async fn change(
        &self,
        _: &str,
        changes: Vec<(String, Option<Vec<u8>>)>,
    ) -> Result<(), DeliverError> {
        *self.commits.lock() += 1;
        let mut rows = self.rows.lock();
        for (name, row) in changes {
            match row {
                Some(row) => rows.insert(name, row),
                None => rows.remove(&name),
            };
        }
        Ok(())
    }

    async fn all_kept(&self, _: &str) -> Result<Vec<(String, Vec<u8>)>, DeliverError> {
        Ok(self.rows.lock().clone().into_iter().collect())
    }

    async fn rekey(&self, _: &ChatKey, _: &ChatKey, _: Taken) -> Result<(), RekeyError> {
        Ok(())
    }

    fn notice(&self, _: &str, _: Notice) {}

    fn connected(&self, _: &str, _: bool) {}
}

/// A run of the provider, until it is dropped.
struct Run {
    run: JoinHandle<Result<Closed, ProviderError>>,
    _closing: watch::Sender<bool>,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.run.abort();
    }
}

impl Run {
    fn of(journal: &Arc<Journal>, api: &Arc<WhatsAppApi>) -> Self {
        let (closing, closed) = watch::channel(false);
        let (provider, link) =
            (whatsapp(api, &Steps::default()), Link::new(journal.clone(), closed));
        Self { run: tokio::spawn(async move { provider.run(link).await }), _closing: closing }
    }
}

async fn listening() -> (Arc<WhatsAppApi>, Arc<Journal>, Run) {
    let (api, journal) = (Arc::new(WhatsAppApi::start().await), Arc::<Journal>::default());
    let run = Run::of(&journal, &api);
    linked(&api).await;
    api.person("15550001");
    (api, journal, run)
}

#[tokio::test]
async fn g1_a_message_is_acknowledged_to_whatsapp_after_its_commit() {
    let (api, journal, _run) = listening().await;
    journal.held.send_replace("one");
    api.says("15550001", None, "A1", &text("one")).await;
    eventually("its commit is begun", async || *journal.begun.lock() == 1).await;
    // The ratchet is stored meanwhile, and the message with it.
    let kept = || journal.rows.lock().keys().any(|name| name.starts_with("pending/"));
    eventually("it is kept", async || kept()).await;
    assert_eq!(api.acknowledged(), Vec::<String>::new());
    journal.held.send_replace("");
    eventually("it is acknowledged", async || api.acknowledged() == ["A1"]).await;
    assert_eq!(*journal.taken.lock(), ["15550001@s.whatsapp.net/A1"]);
    eventually("and no longer kept", async || !kept()).await;
}

#[tokio::test]
async fn g1_what_the_bot_cannot_take_now_is_taken_later_on_the_same_connection() {
    let (api, journal, _run) = listening().await;
    *journal.full.lock() = 3;
    api.says("15550001", None, "A1", &text("one")).await;
    eventually("it is acknowledged", async || api.acknowledged() == ["A1"]).await;
    assert_eq!((*journal.begun.lock(), journal.taken.lock().len()), (4, 1));
    assert_eq!(api.logins().len(), 2, "registered and logged in, once");
}

/// A crash after the ratchet was stored and before the message was journaled: decrypted again it cannot be.
#[tokio::test]
async fn case_w20_what_was_decrypted_and_not_journaled_is_taken_by_the_next_replica_once() {
    let (api, journal, run) = listening().await;
    api.says("15550001", None, "A1", &text("one")).await;
    eventually("it is acknowledged", async || api.acknowledged() == ["A1"]).await;
    let session = || {
        let rows = journal.rows.lock();
        let found = rows.iter().find(|(name, _)| name.starts_with("session/15550001"));
        found.map(|(_, row)| row.clone())
    };
    eventually("her session is stored", async || session().is_some()).await;
    let before = session();
    journal.held.send_replace("two");
    api.says("15550001", None, "A2", &text("two")).await;
    eventually("its commit is begun", async || *journal.begun.lock() == 2).await;
    // Somebody else's message has the client store all that it has, hers with it.
    api.person("15550002");
    api.says("15550002", None, "B1", &text("hi")).await;
    eventually("her ratchet is stored", async || session() != before).await;
    let kept = journal.rows.lock().keys().any(|name| name.starts_with("pending/15550001"));
    assert!(kept, "and the message with it");
    eventually("the other is acknowledged", async || api.acknowledged().len() == 2).await;
    drop(run);
    eventually("the connection is gone", async || api.connected() == 0).await;
    assert_eq!(journal.taken.lock().len(), 2);
    journal.held.send_replace("");
    let _next = Run::of(&journal, &api);
    eventually("it is acknowledged", async || api.acknowledged() == ["A1", "B1", "A2"]).await;
    let taken = journal.taken.lock().clone();
    let of = |user: &str, id: &str| format!("{user}@s.whatsapp.net/{id}");
    assert_eq!(taken, [of("15550001", "A1"), of("15550002", "B1"), of("15550001", "A2")]);
    api.says("15550001", None, "A3", &text("three")).await;
    eventually("and it goes on", async || api.acknowledged().len() == 4).await;
}

#[tokio::test]
async fn d5_what_is_stored_of_a_message_costs_about_a_commit() {
    let (api, journal, _run) = listening().await;
    api.says("15550001", None, "A0", &text("hello")).await;
    eventually("the first is taken", async || api.acknowledged().len() == 1).await;
    let before = *journal.commits.lock();
    let messages = 20;
    for n in 1..=messages {
        api.says("15550001", None, &format!("A{n}"), &text("again")).await;
        eventually("it is taken", async || api.acknowledged().len() == n + 1).await;
    }
    let commits = *journal.commits.lock() - before;
    // The ratchet's; on a slow machine some that would have gone along go alone.
    assert!(commits <= 2 * messages, "{commits} commits for {messages} messages");
}
