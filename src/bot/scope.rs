//! One turn at work: the message, the right to act, and what was said so far.
//!
//! Invariant: whatever acts for a chat goes through a [`Scope`] and asks [`Scope::check`] first. With
//! durability, what is said is only gathered here; it enters the chat's outbox in the commit that
//! ends the turn, or, from a step that takes long, in an early one under the same fence. Without, it
//! is sent at once; but what a checkpointed conversation says is gathered too, and sent after the
//! write that says how far it is: who hears a question has its answer taken for that question, also
//! where the replica dies right after asking.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::error::{ReplyError, RuntimeError};
use super::events::Event;
use super::outbox;
use super::runtime::{Phase, Runtime};
use crate::clock::BootInstant;
use crate::coordinator::{LostReason, Turn};
use crate::provider::{Body, Delivery, Provider, SendError, room};
use crate::store::{Authority, CommitError, Expect, Op, Outgoing};
use crate::types::{ChatKey, Fence, Message, Revision, TicketId, VALUE_BYTES_MAX};

/// Steps one turn goes through; more are a circle that never waits.
pub(crate) const STEPS_MAX: u32 = 10_000;

/// Why there is a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A message in the journal.
    Journaled,
    /// A message of a bot without durability.
    Message,
    /// The wait of that number is due for something.
    Timer(u64),
}

/// The chat's stored conversation, as far as this turn knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// At this revision, or absent.
    Known(Option<Revision>),
    /// A write of this turn may have been made or not. The fence alone guards the next.
    Unknown,
}

/// See the module.
pub(crate) struct Scope {
    turn: Turn,
    message: Message,
    /// Stable name of the message: its id and its ticket, which a replay keeps.
    origin: String,
    runtime: Arc<Runtime>,
    cause: Cause,
    stored: Mutex<Stored>,
    // Whether the turn's loss was told.
    told: AtomicBool,
    // Whether what is said waits for a write, though there is no outbox.
    holding: AtomicBool,
    // What was said and not committed; the step appends, the driver takes. One lock because both
    // sides are tasks' short critical sections.
    said: Mutex<Said>,
}

struct Said {
    pending: VecDeque<Outgoing>,
    count: u64,
    steps: u32,
    step_started: BootInstant,
}

impl Scope {
    pub(crate) fn new(
        runtime: Arc<Runtime>,
        turn: Turn,
        message: Message,
        cause: Cause,
    ) -> Arc<Self> {
        let escaped = percent_encoding::utf8_percent_encode(&message.id, ID_PART);
        // A turn that stayed has one ticket for many messages, and a timer speaks in the name of a
        // message that had a turn before.
        let origin = match turn.nth() {
            0 => format!("{escaped}.{}", turn.ticket()),
            nth => format!("{escaped}.{}+{nth}", turn.ticket()),
        };
        let step_started = runtime.clock.now();
        let count = turn.said_before();
        let said = Mutex::new(Said { pending: VecDeque::new(), count, steps: 0, step_started });
        let (stored, told) = (Mutex::new(Stored::Known(None)), AtomicBool::new(false));
        let holding = AtomicBool::new(runtime.durable);
        Arc::new(Self { turn, message, origin, runtime, cause, stored, told, holding, said })
    }

    pub(crate) fn cause(&self) -> Cause {
        self.cause
    }

    /// The ticket of the journaled message, which the turn's last commit acknowledges.
    pub(crate) fn journaled(&self) -> Option<TicketId> {
        (self.cause == Cause::Journaled).then(|| self.turn.ticket())
    }

    pub(crate) fn set_stored(&self, stored: Stored) {
        *self.stored.lock() = stored;
    }

    pub(crate) fn stored(&self) -> Stored {
        *self.stored.lock()
    }

    /// The condition of the next write of the chat's row.
    pub(crate) fn expect(&self) -> Expect {
        match self.stored() {
            Stored::Known(None) => Expect::Absent,
            Stored::Known(Some(revision)) => Expect::Revision(revision),
            Stored::Unknown => Expect::Any,
        }
    }

    pub(crate) fn settle(&self) -> Duration {
        self.runtime.settle
    }

    pub(crate) fn now(&self) -> BootInstant {
        self.runtime.clock.now()
    }

    pub(crate) async fn sleep(&self, time: Duration) {
        self.runtime.clock.sleep_until(self.now() + time).await;
    }

    pub(crate) fn knows_flow(&self, name: &str) -> bool {
        self.runtime.flows.contains_key(name)
    }

    /// Whether what runs here should have been cut a while ago; whoever cuts it goes first.
    pub(crate) fn is_overdue(&self) -> bool {
        let settle = self.settle();
        let grace = (settle / 10).clamp(Duration::from_millis(20), Duration::from_secs(1));
        self.check().is_ok() && self.now() >= self.step_started_at() + settle + grace
    }

    /// Takes the turn from a step that does not let go of its thread. Called from outside of the
    /// runtime; what the step tries from now on is refused. The turn is under way: the chat's slot
    /// is its own.
    pub(crate) fn fence_off(&self) {
        self.runtime.chats.abandon(self.chat());
        self.turn.abandon(LostReason::Settled);
    }

    /// Tells that it was.
    pub(crate) fn tell_blocked(&self) {
        self.tell_lost(LostReason::Settled);
        let chat = self.chat().to_string();
        let error = RuntimeError::Blocked { chat: chat.clone(), settle: self.settle() };
        self.runtime.events.error(Some(chat), error);
    }

    /// Tells once that the turn is lost.
    pub(crate) fn tell_lost(&self, reason: LostReason) {
        if !self.told.swap(true, Ordering::AcqRel) {
            self.runtime.events.emit(Event::LeaseLost { key: self.chat().to_string(), reason });
        }
    }

    pub(crate) fn turn(&self) -> &Turn {
        &self.turn
    }

    pub(crate) fn message(&self) -> &Message {
        &self.message
    }

    pub(crate) fn chat(&self) -> &ChatKey {
        &self.message.chat
    }

    pub(crate) fn origin(&self) -> &str {
        &self.origin
    }

    pub(crate) fn fence(&self) -> Fence {
        self.turn.fence()
    }

    pub(crate) fn check(&self) -> Result<(), LostReason> {
        self.turn.check()
    }

    /// The error of what was to be said under a turn that is lost.
    pub(crate) fn lost_reply(&self, reason: LostReason) -> ReplyError {
        ReplyError::LeaseLost { chat: self.chat().to_string(), reason }
    }

    /// In whose name writes of this turn are made.
    pub(crate) fn authority(&self) -> Authority<'_> {
        if self.runtime.fenced_store { Authority::Turn(&self.turn) } else { Authority::Nobody }
    }

    /// A step begins: `settle` counts from here. `false` where this turn has begun too many.
    pub(crate) fn step_started(&self) -> bool {
        let now = self.now();
        let mut said = self.said.lock();
        said.step_started = now;
        said.steps += 1;
        said.steps <= STEPS_MAX
    }

    pub(crate) fn step_started_at(&self) -> BootInstant {
        self.said.lock().step_started
    }

    /// What was said and not committed, taken out in order.
    pub(crate) fn take_said(&self) -> Vec<Outgoing> {
        self.said.lock().pending.drain(..).collect()
    }

    /// Puts back what a failed early commit had taken.
    pub(crate) fn put_back(&self, sends: Vec<Outgoing>) {
        let mut said = self.said.lock();
        for send in sends.into_iter().rev() {
            said.pending.push_front(send);
        }
    }

    /// From here on what is said waits for the write that holds how far the conversation is, and
    /// goes out after it, in order.
    pub(crate) fn hold(&self) {
        self.holding.store(true, Ordering::Release);
    }

    /// Whether what is said goes out only with the turn's last commit, or one the step asks for.
    pub(crate) fn is_holding(&self) -> bool {
        !self.runtime.durable && self.holding.load(Ordering::Acquire)
    }

    /// What this adds to the chat's outbox; without durability only where being listed is being
    /// delivered, and where a commit may hold several operations.
    pub(crate) fn sends(&self, said: &[Outgoing]) -> Vec<Op> {
        let chat = room(self.chat());
        let (durable, several) = (self.runtime.durable, self.runtime.fenced_store);
        let said = said.iter().filter(|send| durable || several && send.keep > 0);
        let op = |send: &Outgoing| {
            let send = Outgoing { deliver: durable && send.deliver, ..send.clone() };
            Op::Send { chat: chat.clone(), send }
        };
        said.map(op).collect()
    }

    /// Commits this much of what was said, ahead of the turn's end, after this write.
    pub(crate) async fn commit_said(
        &self,
        write: Option<Op>,
        said: &[Outgoing],
    ) -> Result<Vec<Revision>, CommitError> {
        let ops: Vec<Op> = write.into_iter().chain(self.sends(said)).collect();
        let written = match ops.is_empty() {
            true => Ok(Vec::new()),
            false => self.runtime.store.commit(self.authority(), ops).await,
        };
        match &written {
            Ok(_) => self.deliver(said).await,
            Err(CommitError::OutcomeUnknown { .. }) => self.turn.mark_uncertain(),
            Err(_) => {}
        }
        written
    }

    /// Sends what waited for a write that is made; with durability the outbox does. It takes no longer
    /// than a step may. What is not sent is reported.
    pub(crate) async fn deliver(&self, said: &[Outgoing]) {
        if self.runtime.durable {
            return;
        }
        let Some(provider) = self.runtime.providers.get(&self.chat().channel) else { return };
        let over = self.over();
        tokio::pin!(over);
        let mut late = false;
        for send in said {
            let sent = match late {
                true => Err(self.late()),
                false => tokio::select! {
                    biased;
                    sent = self.deliver_one(provider.as_ref(), send) => sent,
                    () = &mut over => {
                        late = true;
                        // It was under way.
                        let why = "the turn's time was over before its answer came".to_owned();
                        Err(SendError::OutcomeUnknown { why }.into())
                    }
                },
            };
            if let Err(source) = sent {
                let (chat, id) = (self.chat().to_string(), send.id.clone());
                let error = RuntimeError::Send { chat: chat.clone(), id, source };
                self.runtime.events.error(Some(chat), error);
            }
        }
    }

    async fn deliver_one(
        &self,
        provider: &dyn Provider,
        send: &Outgoing,
    ) -> Result<(), ReplyError> {
        if send.keep > 0 && !self.runtime.fenced_store {
            self.list(send.clone()).await?;
        }
        if !send.deliver {
            return Ok(());
        }
        let until = self.turn.valid_until();
        let delivery = outbox::delivery(self.chat(), send, self.fence(), until);
        self.send_now(provider, &delivery).await
    }

    /// Returns when nothing more is to be sent under this turn.
    async fn over(&self) {
        let until = self.now() + self.settle();
        tokio::select! {
            biased;
            _ = self.turn.lost() => {}
            () = self.runtime.clock.sleep_until(until) => {}
            () = self.runtime.reached(Phase::Cutting) => {}
        }
    }

    /// The error of what was not sent in time.
    fn late(&self) -> ReplyError {
        match self.check() {
            Err(reason) => self.lost_reply(reason),
            Ok(()) => self.lost_reply(LostReason::Settled),
        }
    }

    /// How much was said under this turn's fence so far.
    pub(crate) fn said_so_far(&self) -> u64 {
        self.said.lock().count
    }

    pub(crate) fn has_said(&self) -> bool {
        !self.said.lock().pending.is_empty()
    }

    /// Says something under a stable id.
    pub(crate) async fn send(&self, id: String, text: String) -> Result<(), ReplyError> {
        self.check().map_err(|reason| self.lost_reply(reason))?;
        if text.len() > VALUE_BYTES_MAX / 2 {
            return Err(ReplyError::TooLarge { bytes: text.len(), max: VALUE_BYTES_MAX / 2 });
        }
        let channel = &self.chat().channel;
        let Some(provider) = self.runtime.providers.get(channel) else {
            return Err(ReplyError::NoProvider { channel: channel.clone() });
        };
        let capabilities = provider.capabilities();
        let send = {
            let mut said = self.said.lock();
            said.count += 1;
            Outgoing {
                id,
                in_reply_to: self.message.id.clone(),
                body: Body { text, participant: self.chat().participant.clone() }.encode(),
                turn_seq: said.count,
                deliver: capabilities.sends,
                keep: capabilities.listed,
            }
        };
        if self.holding.load(Ordering::Acquire) {
            self.said.lock().pending.push_back(send);
            return Ok(());
        }
        if capabilities.listed > 0 {
            self.list(send.clone()).await?;
        }
        if capabilities.sends {
            let delivery =
                outbox::delivery(self.chat(), &send, self.fence(), self.turn.valid_until());
            self.send_now(provider.as_ref(), &delivery).await?;
        }
        Ok(())
    }

    /// Without durability a listed reply still goes into the store: there it is delivered.
    async fn list(&self, send: Outgoing) -> Result<(), ReplyError> {
        let op = Op::Send { chat: room(self.chat()), send: Outgoing { deliver: false, ..send } };
        match self.runtime.store.commit(self.authority(), vec![op]).await {
            Ok(_) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends at once, waiting out rate limits and transport faults while the turn lasts.
    async fn send_now(
        &self,
        provider: &dyn Provider,
        delivery: &Delivery,
    ) -> Result<(), ReplyError> {
        for attempt in 0.. {
            self.check().map_err(|reason| self.lost_reply(reason))?;
            let error = match outbox::hand_over(&self.runtime, provider, delivery).await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            let wait = match &error {
                SendError::RateLimited { retry_after } => *retry_after,
                SendError::Transport { .. } if attempt < outbox::DIRECT_TRIES_MAX => {
                    outbox::back_off(attempt)
                }
                _ => return Err(error.into()),
            };
            self.runtime.clock.sleep_until(self.runtime.clock.now() + wait).await;
        }
        Ok(())
    }
}

/// What is escaped inside a message id when it becomes part of a reply's id.
const ID_PART: &percent_encoding::AsciiSet =
    &percent_encoding::CONTROLS.add(b'/').add(b'%').add(b' ');
