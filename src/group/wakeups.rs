//! Grants are pushed (SPEC B7): who waits registers here, and the apply wakes it.
//!
//! Two kinds of listener. A *session* (the coordinator of one incarnation) gets every effect that
//! concerns it, in order. A *topic* wakes whoever waits for one thing, without saying what
//! happened: the waiter reads the machine again. Both are level-triggered by use: register first,
//! then look at the machine, then wait; so no wake-up falls between the look and the wait.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::machine::{Effect, QueueKey, RowKey};
use crate::types::{Incarnation, Prefix, TicketId};
use crate::watch;

/// What can be waited for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Topic {
    /// A ticket was granted or ended.
    Ticket(Prefix, TicketId),
    /// A queue has a new holder.
    Queue(QueueKey),
    /// A session ended.
    Session(Incarnation),
    /// A chat's replies grew.
    Replies(Prefix, String),
    /// A row changed.
    Row(RowKey),
    /// A scheduled task changed.
    Task(Prefix, String),
}

/// What the listener of one session gets.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionEvent {
    /// An apply on this node had this effect.
    Effect(Effect),
    /// The state was replaced; effects may have been missed: read the machine.
    Resync,
}

/// What concerns one incarnation, in order. Unbounded because it holds at most what the machine
/// itself is bounded to (tickets and outboxes of one session).
pub type SessionEvents = mpsc::UnboundedReceiver<SessionEvent>;

/// The listeners of one node.
#[derive(Debug, Default, Clone)]
pub struct Wakeups {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    sessions: HashMap<Incarnation, mpsc::UnboundedSender<SessionEvent>>,
    topics: HashMap<Topic, watch::Sender<u64>>,
    all: Vec<mpsc::UnboundedSender<Arc<Vec<Effect>>>>,
    /// Who wants to hear of messages that were given up, in any prefix.
    dead_letters: Vec<mpsc::UnboundedSender<Effect>>,
}

/// Waits for a topic. Dropping it ends the wait.
#[derive(Debug)]
pub struct Waiter {
    topic: Topic,
    woken: Option<watch::Receiver<u64>>,
    inner: Arc<Mutex<Inner>>,
}

impl Waiter {
    /// Returns when the topic was raised since registration or since the last return.
    pub async fn woken(&mut self) {
        if let Some(woken) = &mut self.woken {
            // The sender lives in the map as long as a receiver does.
            let _ = woken.changed().await;
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        self.woken = None;
        if inner.topics.get(&self.topic).is_some_and(|sender| sender.receiver_count() == 0) {
            inner.topics.remove(&self.topic);
        }
    }
}

impl Wakeups {
    /// No listeners.
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on, every effect that concerns this session. A second call takes over.
    pub fn session(&self, session: Incarnation) -> SessionEvents {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.inner.lock().sessions.insert(session, sender);
        receiver
    }

    /// Ends what [`Wakeups::session`] began.
    pub fn forget_session(&self, session: Incarnation) {
        self.inner.lock().sessions.remove(&session);
    }

    /// Registers for a topic.
    pub fn wait_for(&self, topic: Topic) -> Waiter {
        let mut inner = self.inner.lock();
        let sender = inner.topics.entry(topic.clone()).or_insert_with(|| watch::channel(0).0);
        let woken = Some(sender.subscribe());
        Waiter { topic, woken, inner: self.inner.clone() }
    }

    /// Every effect of every apply from now on: for what watches the whole node.
    pub fn everything(&self) -> mpsc::UnboundedReceiver<Arc<Vec<Effect>>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.inner.lock().all.push(sender);
        receiver
    }

    /// Every [`Effect::DeadLettered`] from now on. They belong to no session.
    pub fn dead_letters(&self) -> mpsc::UnboundedReceiver<Effect> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut inner = self.inner.lock();
        inner.dead_letters.retain(|sender| !sender.is_closed());
        inner.dead_letters.push(sender);
        receiver
    }

    /// Raises everything: after a snapshot replaced the state, nobody knows what was missed.
    pub fn raise_all(&self) {
        let mut inner = self.inner.lock();
        inner.sessions.retain(|_, sender| sender.send(SessionEvent::Resync).is_ok());
        for sender in inner.topics.values() {
            sender.send_modify(|count| *count += 1);
        }
    }

    /// Hands out the effects of one apply.
    pub fn dispatch(&self, effects: Vec<Effect>) {
        if effects.is_empty() {
            return;
        }
        let mut inner = self.inner.lock();
        for effect in &effects {
            if let Some(session) = session_of(effect)
                && let Some(sender) = inner.sessions.get(&session)
                && sender.send(SessionEvent::Effect(effect.clone())).is_err()
            {
                inner.sessions.remove(&session);
            }
            if matches!(effect, Effect::DeadLettered { .. }) {
                inner.dead_letters.retain(|sender| sender.send(effect.clone()).is_ok());
            }
            if inner.topics.is_empty() {
                continue;
            }
            for topic in topics_of(effect).into_iter().flatten() {
                if let Some(sender) = inner.topics.get(&topic) {
                    sender.send_modify(|count| *count += 1);
                }
            }
        }
        if !inner.all.is_empty() {
            let effects = Arc::new(effects);
            inner.all.retain(|sender| sender.send(effects.clone()).is_ok());
        }
    }
}

/// The session an effect concerns.
fn session_of(effect: &Effect) -> Option<Incarnation> {
    match effect {
        Effect::SessionArmed { session, .. }
        | Effect::SessionEnded { session, .. }
        | Effect::Granted { session, .. }
        | Effect::CalledBack { session, .. }
        | Effect::Adopted { session, .. }
        | Effect::OutboxAdopted { session, .. }
        | Effect::OutboxReady { session, .. } => Some(*session),
        Effect::TicketEnded { session, .. } => *session,
        Effect::Replied { .. }
        | Effect::RowChanged(_)
        | Effect::TaskChanged { .. }
        | Effect::DeadLettered { .. }
        | Effect::BodyDiffers { .. }
        | Effect::Mark => None,
    }
}

/// The topics an effect raises.
fn topics_of(effect: &Effect) -> [Option<Topic>; 2] {
    match effect {
        Effect::SessionEnded { session, .. } => [Some(Topic::Session(*session)), None],
        Effect::Granted { queue, ticket, .. } => {
            [Some(Topic::Ticket(queue.prefix.clone(), *ticket)), Some(Topic::Queue(queue.clone()))]
        }
        Effect::TicketEnded { prefix, ticket, .. } => {
            [Some(Topic::Ticket(prefix.clone(), *ticket)), None]
        }
        Effect::Adopted { queue, ticket, .. } => {
            [Some(Topic::Ticket(queue.prefix.clone(), *ticket)), None]
        }
        Effect::Replied { prefix, chat } => {
            [Some(Topic::Replies(prefix.clone(), chat.clone())), None]
        }
        Effect::RowChanged(row) => [Some(Topic::Row(row.clone())), None],
        Effect::TaskChanged { prefix, id } => [Some(Topic::Task(prefix.clone(), id.clone())), None],
        Effect::SessionArmed { .. }
        | Effect::CalledBack { .. }
        | Effect::OutboxAdopted { .. }
        | Effect::OutboxReady { .. }
        | Effect::DeadLettered { .. }
        | Effect::BodyDiffers { .. }
        | Effect::Mark => [None, None],
    }
}
