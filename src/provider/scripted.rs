//! A provider that plays users: for tests of flows, hand-over and order.
//!
//! ```no_run
//! # async fn test(bot: botmesh::bot::Bot, provider: botmesh::provider::scripted::ScriptedProvider) {
//! provider.user("ann").says("order").await.hears("What would you like?").await;
//! # }
//! ```

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;

use super::{
    Capabilities, Closed, Delivered, Delivery, Link, Provider, ProviderError, SendError, SentId,
    Webhook,
};
use crate::types::{ChatKey, Message};
use crate::watch;

/// How long a user waits for a reply, and for the bot to be there at all.
const PATIENCE: Duration = Duration::from_secs(10);

/// Numbers what is said, in this whole process: two providers of one id may play two replicas.
static SAID: AtomicU64 = AtomicU64::new(1);

fn number() -> u64 {
    #[cfg(feature = "test-util")]
    if let Some(number) = crate::outside::seeded::number() {
        return number;
    }
    SAID.fetch_add(1, Ordering::Relaxed)
}

/// One reply a user got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// The reply's id.
    pub id: String,
    /// The text.
    pub text: String,
    /// Id of the message it answers.
    pub in_reply_to: String,
    /// The fence it was written under.
    pub fence: u64,
    /// Its place among what was said under that fence.
    pub turn_seq: u64,
}

#[derive(Default)]
struct Transcript {
    heard: BTreeMap<ChatKey, Vec<Heard>>,
    ids: HashSet<String>,
    // How many each user has listened to.
    listened: BTreeMap<ChatKey, usize>,
    resent: u64,
    // Errors to answer the next sends with, first one first.
    faults: std::collections::VecDeque<SendError>,
    // The next send arrives, and its answer never comes.
    answer_lost: bool,
}

struct Inner {
    // What all replicas of the channel share: users hear whoever speaks to them.
    transcript: Arc<Mutex<Transcript>>,
    changed: Arc<watch::Sender<u64>>,
    // This replica's own.
    link: watch::Sender<Option<Link>>,
    exclusive: bool,
    // Whether the outside lets this replica connect.
    up: watch::Sender<bool>,
}

impl Inner {
    fn new(
        transcript: Arc<Mutex<Transcript>>,
        changed: Arc<watch::Sender<u64>>,
        exclusive: bool,
    ) -> Self {
        let (link, up) = (watch::channel(None).0, watch::channel(true).0);
        Self { transcript, changed, link, exclusive, up }
    }
}

/// See the module. Cheap to clone: clones are one provider.
#[derive(Clone)]
pub struct ScriptedProvider {
    id: Arc<str>,
    inner: Arc<Inner>,
}

impl fmt::Debug for ScriptedProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedProvider").field("id", &self.id).finish_non_exhaustive()
    }
}

impl ScriptedProvider {
    /// A channel of that id.
    pub fn new(id: &str) -> Self {
        Self::with(id, false)
    }

    /// A channel of that id that allows one session, as a bot's long poll does (SPEC D1).
    pub fn exclusive(id: &str) -> Self {
        Self::with(id, true)
    }

    fn with(id: &str, exclusive: bool) -> Self {
        let (transcript, changed) = (Arc::default(), Arc::new(watch::channel(0).0));
        Self { id: id.into(), inner: Arc::new(Inner::new(transcript, changed, exclusive)) }
    }

    /// The same channel at another replica: its users are the same people, who hear both.
    #[must_use]
    pub fn replica(&self) -> Self {
        let (transcript, changed) = (self.inner.transcript.clone(), self.inner.changed.clone());
        let inner = Inner::new(transcript, changed, self.inner.exclusive);
        Self { id: self.id.clone(), inner: Arc::new(inner) }
    }

    /// Whether a bot runs this replica's session.
    pub fn is_connected(&self) -> bool {
        self.inner.link.borrow().is_some()
    }

    /// The outside closes this replica's session, and any it opens, until told otherwise.
    pub fn set_up(&self, up: bool) {
        self.inner.up.send_replace(up);
    }

    /// One user of the channel, in a chat of their own, at this replica.
    pub fn user(&self, name: &str) -> ScriptedUser {
        ScriptedUser { provider: self.clone(), chat: ChatKey::new(&*self.id, name) }
    }

    /// One participant of a group chat, at this replica.
    pub fn participant(&self, chat: &str, name: &str) -> ScriptedUser {
        let chat = ChatKey::new(&*self.id, chat).participant(name);
        ScriptedUser { provider: self.clone(), chat }
    }

    /// The next sends fail like this, one each.
    pub fn fail_next(&self, faults: impl IntoIterator<Item = SendError>) {
        self.inner.transcript.lock().faults.extend(faults);
    }

    /// The next send arrives, and its answer never comes: the moment at which a sender may die.
    pub fn lose_next_answer(&self) {
        self.inner.transcript.lock().answer_lost = true;
    }

    /// How often a reply came again under an id that had arrived.
    pub fn resent(&self) -> u64 {
        self.inner.transcript.lock().resent
    }

    /// The link of the running bot.
    async fn link(&self) -> Link {
        let mut link = self.inner.link.subscribe();
        let found = tokio::time::timeout(PATIENCE, link.wait_for(Option::is_some)).await;
        match found {
            Ok(Ok(link)) => link.clone().expect("the condition asks for it"),
            _ => panic!("provider {}: no bot ran it within {PATIENCE:?}", self.id),
        }
    }
}

struct Disconnect<'a>(&'a watch::Sender<Option<Link>>);

impl Drop for Disconnect<'_> {
    fn drop(&mut self) {
        self.0.send_replace(None);
    }
}

#[async_trait]
impl Provider for ScriptedProvider {
    fn id(&self) -> &str {
        &self.id
    }

    fn capabilities(&self) -> Capabilities {
        let exclusive_session = self.inner.exclusive;
        Capabilities { exclusive_session, listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        // However it ends, also where it is dropped: nobody is connected any more.
        let _disconnect = Disconnect(&self.inner.link);
        let mut up = self.inner.up.subscribe();
        if !*up.borrow_and_update() {
            return Ok(Closed::ByPeer);
        }
        self.inner.link.send_replace(Some(link.clone()));
        link.connected(&self.id, true);
        tokio::select! {
            biased;
            () = link.closing() => Ok(Closed::Asked),
            // The sender is this provider's own.
            _ = up.wait_for(|up| !up) => Ok(Closed::ByPeer),
        }
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        let answer_lost = {
            let mut transcript = self.inner.transcript.lock();
            if let Some(fault) = transcript.faults.pop_front() {
                return Err(fault);
            }
            if !transcript.ids.insert(delivery.id.clone()) {
                transcript.resent += 1;
                return Ok(SentId(delivery.id.clone()));
            }
            transcript.heard.entry(delivery.chat.clone()).or_default().push(Heard {
                id: delivery.id.clone(),
                text: delivery.text.clone(),
                in_reply_to: delivery.in_reply_to.clone(),
                fence: delivery.fence.0,
                turn_seq: delivery.turn_seq,
            });
            std::mem::take(&mut transcript.answer_lost)
        };
        self.inner.changed.send_modify(|count| *count += 1);
        if answer_lost {
            std::future::pending::<()>().await;
        }
        Ok(SentId(delivery.id.clone()))
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}

/// A user who says things and listens. Cheap to clone; clones listen on together.
#[derive(Clone, Debug)]
pub struct ScriptedUser {
    provider: ScriptedProvider,
    chat: ChatKey,
}

impl ScriptedUser {
    /// The chat's key.
    pub fn chat(&self) -> &ChatKey {
        &self.chat
    }

    /// Says something; returns when the bot has taken it.
    ///
    /// # Panics
    /// Where the bot does not take it.
    pub async fn says(&self, text: &str) -> &Self {
        let id = format!("{}-{}", self.chat.chat, number());
        self.says_as(&id, text).await;
        self
    }

    /// Says something under an id of the test's choice; whether it was known.
    ///
    /// # Panics
    /// Where the bot does not take it.
    pub async fn says_as(&self, id: &str, text: &str) -> Delivered {
        let message = Message::text(id, self.chat.clone(), text);
        let link = self.provider.link().await;
        match link.deliver(vec![message]).await {
            Ok(delivered) => delivered[0],
            Err(error) => panic!("{}: {text:?} was not taken: {error}", self.chat),
        }
    }

    /// Says something under an id of the test's choice, where a bot runs this replica's session;
    /// whether it was taken.
    pub async fn offers(&self, id: &str, text: &str) -> bool {
        let link = self.provider.inner.link.borrow().clone();
        let Some(link) = link else { return false };
        link.deliver(vec![Message::text(id, self.chat.clone(), text)]).await.is_ok()
    }

    /// Listens for the next reply, which has to be this text.
    ///
    /// # Panics
    /// Where it is another, or none comes.
    pub async fn hears(&self, text: &str) -> &Self {
        let heard = self.next(&format!("{text:?}")).await;
        assert_eq!(heard.text, text, "{} heard something else", self.chat);
        self
    }

    /// Listens for the next reply.
    ///
    /// # Panics
    /// Where none comes.
    pub async fn hears_any(&self) -> Heard {
        self.next("anything").await
    }

    /// All this user was told so far, whether listened to or not.
    pub fn heard(&self) -> Vec<Heard> {
        let transcript = self.provider.inner.transcript.lock();
        transcript.heard.get(&self.chat).cloned().unwrap_or_default()
    }

    /// The texts of [`ScriptedUser::heard`].
    pub fn heard_texts(&self) -> Vec<String> {
        self.heard().into_iter().map(|heard| heard.text).collect()
    }

    async fn next(&self, wanted: &str) -> Heard {
        let mut changed = self.provider.inner.changed.subscribe();
        let next = async {
            loop {
                changed.borrow_and_update();
                if let Some(heard) = self.listen() {
                    return heard;
                }
                // The sender is kept by the provider, which `self` keeps.
                let _ = changed.changed().await;
            }
        };
        match tokio::time::timeout(PATIENCE, next).await {
            Ok(heard) => heard,
            Err(_) => panic!(
                "{} waited {PATIENCE:?} for {wanted} and has heard only {:?}",
                self.chat,
                self.heard_texts()
            ),
        }
    }

    fn listen(&self) -> Option<Heard> {
        let mut transcript = self.provider.inner.transcript.lock();
        let listened = transcript.listened.get(&self.chat).copied().unwrap_or(0);
        let heard = transcript.heard.get(&self.chat)?.get(listened)?.clone();
        transcript.listened.insert(self.chat.clone(), listened + 1);
        Some(heard)
    }
}
