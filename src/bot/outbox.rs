//! How replies go out.
//!
//! The outbox of a room is replicated; whichever replica owns it sends its entries in order and
//! records each. One task a room that has something to send; the group's `OutboxReady` starts it. An
//! entry is recorded as sent only after the provider took it, and before the next goes out; so after
//! a crash one may have been in flight. Whoever takes the outbox over tells so, and sends it again
//! under the same id or not at all (SPEC G3, [`OnUnknown`]).
//!
//! The record of a room's last entry is in no hurry: it waits up to [`MARK_WITHIN`] for another
//! command of this replica to share a log entry with. So long a crash may come after the provider
//! took it: what is in doubt is still one entry a room, but more often than if it were recorded at
//! once.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::builder::OnUnknown;
use super::error::{ReplyError, RuntimeError};
use super::events::Event;
use super::runtime::{Phase, Runtime};
use crate::clock::BootInstant;
use crate::provider::{Body, Delivery, Provider, SendError, SentId};
use crate::store::{OutboxEntry, Outgoing, StoreError};
use crate::types::{ChatKey, Fence, Incarnation};

/// Tries of a send made at once, without an outbox.
pub(crate) const DIRECT_TRIES_MAX: u32 = 8;
/// Entries read at once.
const PAGE: usize = 64;
/// Rooms of which it is remembered how far they were sent.
const SENT_KNOWN_MAX: usize = 50_000;
/// Rooms sent to at once.
const ROOMS_AT_ONCE_MAX: usize = 1024;
/// How long the record of a room's last entry may wait for another command.
const MARK_WITHIN: Duration = Duration::from_millis(200);
/// Longest wait between two tries.
const BACK_OFF_MAX: Duration = Duration::from_secs(5);

/// How long to wait before the next try.
pub(crate) fn back_off(attempt: u32) -> Duration {
    BACK_OFF_MAX.min(Duration::from_millis(50) * 2_u32.saturating_pow(attempt.min(10)))
}

/// A reply as a provider is given it.
pub(crate) fn delivery(
    chat: &ChatKey,
    send: &Outgoing,
    fence: Fence,
    deadline: BootInstant,
) -> Delivery {
    Delivery {
        id: send.id.clone(),
        chat: chat.clone(),
        in_reply_to: send.in_reply_to.clone(),
        text: Body::decode(&send.body).text,
        fence,
        turn_seq: send.turn_seq,
        deadline,
    }
}

/// Gives a delivery to its provider, and no longer than until its deadline: after that another
/// replica may speak in the chat.
pub(crate) async fn hand_over(
    runtime: &Runtime,
    provider: &dyn Provider,
    delivery: &Delivery,
) -> Result<SentId, SendError> {
    runtime.check_lead(provider.id())?;
    tokio::select! {
        biased;
        sent = provider.send(delivery) => sent,
        () = runtime.clock.sleep_until(delivery.deadline) => {
            let why = "the lease ended first".to_owned();
            Err(SendError::OutcomeUnknown { why })
        }
    }
}

/// The rooms being sent to.
pub(crate) struct Sender {
    // Room → whether it became ready again since its task last looked.
    rooms: Mutex<HashMap<String, bool>>,
    // Room → how far it was sent, so that a pass need not go through what stays listed. Bounded:
    // emptied when full, which costs the next passes a longer look.
    sent: Mutex<HashMap<String, u64>>,
    // Room → what was sent in it and is not recorded yet, and as whom.
    unmarked: Mutex<HashMap<String, (Incarnation, u64)>>,
    // Rooms whose first unsent entry may have gone out already: whoever was to send it died.
    doubtful: Mutex<HashSet<String>>,
    at_once: Arc<Semaphore>,
}

impl Default for Sender {
    fn default() -> Self {
        let at_once = Arc::new(Semaphore::new(ROOMS_AT_ONCE_MAX));
        let (rooms, sent, unmarked) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { rooms, sent, unmarked, doubtful: Mutex::default(), at_once }
    }
}

impl Sender {
    /// The room has something to send.
    pub(crate) fn ready(runtime: &Arc<Runtime>, room: String) {
        if runtime.sender.rooms.lock().insert(room.clone(), true).is_some() {
            return; // A task is at it and will look again.
        }
        let task = sending(runtime.clone(), room);
        runtime.tasks.spawn(task);
    }

    /// The room's sender died or lost its lease, perhaps while it sent.
    pub(crate) fn doubt(&self, room: String) {
        self.doubtful.lock().insert(room);
    }

    /// The task is about to look: what becomes ready after this makes it look again.
    fn looking(&self, room: &str) {
        if let Some(again) = self.rooms.lock().get_mut(room) {
            *again = false;
        }
    }

    fn sent(&self, room: &str) -> u64 {
        self.sent.lock().get(room).copied().unwrap_or(0)
    }

    fn sent_up_to(&self, room: &str, number: u64) {
        let mut sent = self.sent.lock();
        if sent.len() >= SENT_KNOWN_MAX {
            sent.clear();
        }
        sent.insert(room.to_owned(), number);
    }

    /// What this session sent last in a room, where that is not recorded yet.
    fn unmarked(&self, room: &str, me: Incarnation) -> Option<u64> {
        let mut unmarked = self.unmarked.lock();
        match unmarked.get(room) {
            Some((by, number)) if *by == me => Some(*number),
            // Of a session that is gone: whoever has the outbox now judges by what is recorded.
            Some(_) => {
                unmarked.remove(room);
                None
            }
            None => None,
        }
    }

    fn marked(&self, room: &str, me: Incarnation, number: u64) {
        let mut unmarked = self.unmarked.lock();
        if unmarked.get(room) == Some(&(me, number)) {
            unmarked.remove(room);
        }
    }

    fn forget(&self, room: &str) {
        self.sent.lock().remove(room);
    }

    /// Ends the room's task unless the room became ready again.
    fn done(&self, room: &str) -> bool {
        let mut rooms = self.rooms.lock();
        if rooms.get(room).copied().unwrap_or(false) {
            return false;
        }
        rooms.remove(room);
        true
    }
}

/// How a pass over a room's outbox ended.
enum Pass {
    /// Nothing is left to send here.
    Empty,
    /// A page was sent; more may have come.
    More,
    /// Try again after this.
    Wait(Duration),
    /// Not ours, or no session, or stopping.
    GiveUp,
}

async fn sending(runtime: Arc<Runtime>, room: String) {
    let closing = runtime.reached(Phase::Closing);
    tokio::pin!(closing);
    let mut attempt = 0;
    loop {
        runtime.sender.looking(&room);
        let pass = {
            // The semaphore is never closed.
            let _permit = runtime.sender.at_once.clone().acquire_owned().await.ok();
            pass(&runtime, &room, &mut attempt).await
        };
        match pass {
            Pass::Wait(wait) => {
                let until = runtime.clock.now() + wait;
                tokio::select! {
                    biased;
                    // First: a wait of no length would come before it each time.
                    () = &mut closing => {
                        runtime.sender.rooms.lock().remove(&room);
                        return;
                    }
                    () = runtime.clock.sleep_until(until) => {}
                }
            }
            Pass::More => {}
            // Named again meanwhile, perhaps for the next session: look again rather than lose it.
            Pass::Empty | Pass::GiveUp => {
                if runtime.sender.done(&room) {
                    return;
                }
            }
        }
    }
}

/// Sends a page of what the outbox holds, in order, and records how far it came.
///
/// An outbox that was sent to its end has no owner, and the next to commit into it becomes it. So
/// each page asks first: what this session owns stays its own until it marked the last entry.
async fn pass(runtime: &Arc<Runtime>, room: &str, attempt: &mut u32) -> Pass {
    let Ok(chat) = room.parse::<ChatKey>() else { return Pass::GiveUp };
    let Some(provider) = runtime.providers.get(&chat.channel).cloned() else {
        return Pass::GiveUp;
    };
    let Some(me) = runtime.coordinator.incarnation() else { return Pass::GiveUp };
    match runtime.store.outbox_owner(room).await {
        Ok(owner) if owner == Some(me) => {}
        Ok(_) => return Pass::Empty,
        Err(error) => {
            tracing::warn!(%room, %error, "the outbox cannot be read");
            return Pass::Wait(next_wait(attempt));
        }
    }
    let mut page = match unsent(runtime, room).await {
        Ok(page) => page,
        Err(error) => {
            tracing::warn!(%room, %error, "the outbox cannot be read");
            return Pass::Wait(next_wait(attempt));
        }
    };
    // Whether there is more than this page tells of, by what is not recorded yet.
    let full = page.len() == PAGE;
    if let Some(number) = runtime.sender.unmarked(room, me) {
        let in_doubt = page.iter().any(|entry| entry.number <= number);
        page.retain(|entry| entry.number > number);
        if in_doubt && !page.is_empty() {
            // Recorded before the next goes out: one at most is in doubt.
            if let Some(pass) = mark(runtime, room, number, me).await {
                return pass;
            }
        }
    }
    let last = page.last().filter(|_| !full).map(|entry| entry.number);
    for entry in &page {
        let doubtful = runtime.sender.doubtful.lock().remove(room);
        let sent = match doubtful && unknown(runtime, &chat, entry) == OnUnknown::Drop {
            true => Sent::Yes,
            false => send(runtime, provider.as_ref(), &chat, entry, me).await,
        };
        match sent {
            Sent::Yes => *attempt = 0,
            Sent::Later(retry_after) => {
                return Pass::Wait(retry_after.unwrap_or_else(|| next_wait(attempt)));
            }
            Sent::Lost => return Pass::GiveUp,
        }
        if Some(entry.number) == last {
            mark_later(runtime, room, entry.number, me);
            break;
        }
        // Each on its own, before the next goes out: one at most is in doubt when this replica dies.
        if let Some(pass) = mark(runtime, room, entry.number, me).await {
            return pass;
        }
    }
    if page.is_empty() { Pass::Empty } else { Pass::More }
}

/// Tells that an entry may have arrived; what is to become of it.
fn unknown(runtime: &Runtime, chat: &ChatKey, entry: &OutboxEntry) -> OnUnknown {
    let participant = Body::decode(&entry.body).participant;
    let key = ChatKey { participant, ..chat.clone() }.to_string();
    runtime.events.emit(Event::SendUnknown { key, id: entry.id.clone() });
    runtime.on_unknown
}

/// The first entries that were not sent.
async fn unsent(runtime: &Runtime, room: &str) -> Result<Vec<OutboxEntry>, StoreError> {
    let known = runtime.sender.sent(room);
    let mut after = known;
    loop {
        let mut page = runtime.store.outbox(room, after, PAGE).await?;
        match page.last() {
            None if after == known && known > 0 => {
                // What was remembered may be of an outbox that is gone: look at all of it.
                runtime.sender.forget(room);
                return Box::pin(unsent(runtime, room)).await;
            }
            None => return Ok(page),
            Some(last) => after = last.number,
        }
        page.retain(|entry| entry.unsent);
        if !page.is_empty() {
            return Ok(page);
        }
    }
}

fn next_wait(attempt: &mut u32) -> Duration {
    *attempt = attempt.saturating_add(1);
    back_off(*attempt)
}

/// Records what was sent last in a room, with whatever this replica commits next. A bot that stops
/// waits for no other command.
fn mark_later(runtime: &Arc<Runtime>, room: &str, up_to: u64, me: Incarnation) {
    runtime.sender.unmarked.lock().insert(room.to_owned(), (me, up_to));
    let (shared, room) = (runtime.clone(), room.to_owned());
    runtime.tasks.spawn(async move {
        let riding = async {
            shared.coordinator.incarnation().filter(|now| *now == me)?;
            shared.store.mark_sent(&room, up_to, me, MARK_WITHIN).await.ok()
        };
        let marked = tokio::select! {
            biased;
            marked = riding => marked,
            () = shared.reached(Phase::Closing) => None,
        };
        match marked {
            Some(true) => shared.sender.sent_up_to(&room, up_to),
            Some(false) => {}
            // No answer, or none in time.
            None => {
                // Whether it was refused changes nothing here.
                let _ = mark(&shared, &room, up_to, me).await;
            }
        }
        shared.sender.marked(&room, me, up_to);
    });
}

/// Records that the room was sent up to there; an end of the pass where that is refused.
async fn mark(runtime: &Runtime, room: &str, up_to: u64, me: Incarnation) -> Option<Pass> {
    for attempt in 0.. {
        // Recording is an act, too: whoever has the outbox now decides what becomes of the entry.
        if runtime.coordinator.incarnation() != Some(me) {
            return Some(Pass::GiveUp);
        }
        match runtime.store.mark_sent(room, up_to, me, Duration::ZERO).await {
            Ok(true) => {
                runtime.sender.sent_up_to(room, up_to);
                runtime.sender.marked(room, me, up_to);
                return None;
            }
            Ok(false) => return Some(Pass::GiveUp),
            // Recording it twice is harmless.
            Err(error) => {
                tracing::warn!(%room, %error, "what was sent is not recorded yet");
                let until = runtime.clock.now() + back_off(attempt);
                tokio::select! {
                    biased;
                    () = runtime.reached(Phase::Cutting) => return Some(Pass::GiveUp),
                    () = runtime.clock.sleep_until(until) => {}
                }
            }
        }
    }
    None
}

enum Sent {
    Yes,
    Later(Option<Duration>),
    Lost,
}

async fn send(
    runtime: &Arc<Runtime>,
    provider: &dyn Provider,
    chat: &ChatKey,
    entry: &OutboxEntry,
    me: Incarnation,
) -> Sent {
    // Asked at every act: a session that was given up sends nothing more.
    if runtime.coordinator.incarnation() != Some(me) || runtime.phase() >= Phase::Cutting {
        return Sent::Lost;
    }
    let Some(deadline) = runtime.coordinator.valid_until() else { return Sent::Lost };
    let body = Body::decode(&entry.body);
    let delivery = Delivery {
        id: entry.id.clone(),
        chat: ChatKey { participant: body.participant, ..chat.clone() },
        in_reply_to: entry.in_reply_to.clone(),
        text: body.text,
        fence: Fence(entry.fence),
        turn_seq: entry.turn_seq,
        deadline,
    };
    match hand_over(runtime, provider, &delivery).await {
        Ok(_) => Sent::Yes,
        Err(SendError::RateLimited { retry_after }) => Sent::Later(Some(retry_after)),
        Err(SendError::OutcomeUnknown { why }) => {
            tracing::debug!(room = %chat, id = %entry.id, %why, "it may have arrived");
            match unknown(runtime, chat, entry) {
                OnUnknown::Resend => Sent::Later(None),
                OnUnknown::Drop => Sent::Yes,
            }
        }
        Err(error @ SendError::ProviderNotLeader { .. }) => {
            tracing::debug!(room = %chat, id = %entry.id, %error, "not sent yet");
            Sent::Later(None)
        }
        Err(SendError::Transport { why }) => {
            tracing::debug!(room = %chat, id = %entry.id, %why, "not sent yet");
            Sent::Later(None)
        }
        Err(error) => {
            let key = delivery.chat.to_string();
            let source = ReplyError::Provider(error);
            let error = RuntimeError::Send { chat: key.clone(), id: entry.id.clone(), source };
            runtime.events.error(Some(key), error);
            Sent::Yes
        }
    }
}
