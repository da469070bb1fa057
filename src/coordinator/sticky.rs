//! Turns that stay with their replica while nobody else wants them (SPEC B10, DESIGN 4).
//!
//! Problem: without a journal, a message to a chat that always comes to the same replica costs a
//! commit for its ticket and one for its release, though nobody is there to be kept apart from.
//!
//! Idea: the ticket of the last message stays at the head of the queue, granted. Further messages
//! are *local*: handled one after another under that grant, without a ticket. A ticket of anybody
//! else behind it calls the turn back. With a journal nothing stays held: every message has a ticket
//! in the log anyway, and the machine lets the *fence* go on (`Op::Keep`).
//!
//! Invariants, by the rules of DESIGN 4:
//! * 4: a message is local only where the turn is here, its release is not proposed, no command
//!   that takes a ticket in the chat is under way here, and the ticket is alone in the queue as this
//!   node applied it. Else it takes a ticket at once.
//! * 6: local messages run one at a time, and the next starts only after the end of the one before
//!   was clean: every write of it answered. Anything else gives the turn back (9).
//! * 7: a call-back is a level. [`crate::machine::Machine::is_alone`] is read after each message and
//!   whenever the node says that somebody came to wait; a message that tells so is only a hint.
//! * 8: called back, the local messages already taken are handled first, and no new one is taken.
//! * 10: once a release is on its way the turn is dead here. Local messages that waited for it take
//!   tickets, in their order, before any later message of the chat does.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::mpsc;

use super::guards::Returned;
use super::place::{Granted, Place, Waiter};
use super::session::Session;
use crate::clock::BootInstant;
use crate::group::look;
use crate::machine::{Grant, QueueKey};
use crate::types::{Fence, Incarnation, TicketId};

/// A chat called back twice within this is not sticky for as long.
const CALLED_WINDOW: Duration = Duration::from_secs(60);

/// How turns stay with their replica (SPEC B10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sticky {
    /// An unused turn is given back after this (60 s).
    pub idle: Duration,
    /// Chats whose turns stay here at most (10,000); the least recently used are given back first.
    pub chats_max: usize,
}

impl Default for Sticky {
    fn default() -> Self {
        Self { idle: Duration::from_secs(60), chats_max: 10_000 }
    }
}

/// Where a turn belongs when its message is done.
#[derive(Debug)]
pub(crate) struct Home {
    session: Weak<Session>,
    /// Which message under the fence it is, from 0.
    nth: u64,
    /// How much the messages before it said.
    said: u64,
    /// Set where a write of it has no answer (DESIGN 4 rule 6): its fence ends with it.
    uncertain: AtomicBool,
}

impl Home {
    /// No turn stays there, but its fence may have gone on from others that said this much.
    pub(super) fn none(said: u64) -> Self {
        Self::of(Weak::new(), 0, said)
    }

    fn of(session: Weak<Session>, nth: u64, said: u64) -> Self {
        Self { session, nth, said, uncertain: AtomicBool::new(false) }
    }

    pub(super) fn mark_uncertain(&self) {
        self.uncertain.store(true, Ordering::Release);
    }

    pub(super) fn is_uncertain(&self) -> bool {
        self.uncertain.load(Ordering::Acquire)
    }

    pub(crate) fn nth(&self) -> u64 {
        self.nth
    }

    pub(crate) fn said(&self) -> u64 {
        self.said
    }

    /// The turn is given back, or its release is proposed: dead here from now on.
    pub(super) fn ended(&self, queue: &QueueKey, fence: Fence) {
        if let Some(session) = self.session.upgrade() {
            session.places.lock().sticks.end(queue, fence);
        }
    }

    /// The message is done; `false` where the turn does not stay and is to be given back.
    pub(super) fn kept(&self, queue: &QueueKey, fence: Fence, said: u64) -> bool {
        self.session.upgrade().is_some_and(|session| session.keep(queue, fence, Some(said)))
    }

    /// Whether the turn is to be released by the commit that ends its message: somebody else waits
    /// for it and no local message does. It is dead here, then.
    pub(super) fn to_release(&self, queue: &QueueKey, fence: Fence) -> bool {
        self.session.upgrade().is_none_or(|session| session.end_unless_wanted(queue, fence))
    }
}

/// The turns of one session that stay.
#[derive(Debug)]
pub(super) struct Sticks {
    how: Option<Sticky>,
    held: HashMap<QueueKey, Stick>,
    /// Unused ones, by when they became so: the least recently used first.
    idle: BTreeMap<u64, QueueKey>,
    counted: u64,
    called: HashMap<QueueKey, Called>,
    /// Queues whose local messages may need a ticket.
    stranded: mpsc::UnboundedSender<QueueKey>,
}

/// One of them.
#[derive(Debug)]
struct Stick {
    ticket: TicketId,
    fence: Fence,
    standing: Standing,
    /// Local messages, in order of arrival. Only while one is at work, or after the end.
    waiting: VecDeque<Waiter>,
    /// Messages that had it.
    messages: u64,
    said: u64,
    /// Whose memory of the chat is fresh: the holder before, until a message was handled.
    fresh: Option<Incarnation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// A message has it.
    AtWork,
    /// Nobody has it.
    Idle { number: u64, since: BootInstant },
    /// Its release is proposed; who waits has no ticket.
    Ended,
}

/// When a chat was called back.
#[derive(Clone, Copy, Debug)]
struct Called {
    last: BootInstant,
    /// Not sticky until then.
    until: Option<BootInstant>,
}

impl Sticks {
    pub(super) fn new(how: Option<Sticky>) -> (Self, mpsc::UnboundedReceiver<QueueKey>) {
        let (stranded, found) = mpsc::unbounded_channel();
        let (held, idle, called) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        (Self { how, held, idle, counted: 0, called, stranded }, found)
    }

    /// A ticket's turn is handed out: from now on it may stay.
    fn begin(&mut self, queue: &QueueKey, ticket: TicketId, grant: Grant, now: BootInstant) {
        let resting = self.called.get(queue).and_then(|called| called.until);
        if self.how.is_none() || resting.is_some_and(|until| now < until) {
            return;
        }
        let (standing, waiting) = (Standing::AtWork, VecDeque::new());
        let (fence, fresh) = (grant.fence, grant.previous);
        let stick = Stick { ticket, fence, standing, waiting, messages: 1, said: 0, fresh };
        // One that ended still has local messages that take tickets: no new ones until they have.
        if !self.held.get(queue).is_some_and(|held| held.standing == Standing::Ended) {
            self.held.insert(queue.clone(), stick);
        }
    }

    /// The turn under this fence is dead here.
    fn end(&mut self, queue: &QueueKey, fence: Fence) {
        let Some(stick) = self.held.get_mut(queue).filter(|stick| stick.fence == fence) else {
            return;
        };
        if let Standing::Idle { number, .. } = stick.standing {
            self.idle.remove(&number);
        }
        stick.standing = Standing::Ended;
        self.look_at(queue);
    }

    /// A turn that ended, where messages still wait for it.
    fn ended(&mut self, queue: &QueueKey) -> Option<&mut Stick> {
        let stick = self.held.get_mut(queue)?;
        if stick.standing != Standing::Ended {
            return None;
        }
        stick.waiting.retain(|waiting| !waiting.is_gone());
        if stick.waiting.is_empty() {
            self.held.remove(queue);
        }
        self.held.get_mut(queue)
    }

    /// Whether messages wait in this queue for a turn that ended, and have no ticket.
    pub(super) fn has_stranded(&mut self, queue: &QueueKey) -> bool {
        self.ended(queue).is_some()
    }

    /// Has it looked whether they need one.
    pub(super) fn look_at(&mut self, queue: &QueueKey) {
        if self.has_stranded(queue) {
            // The session's task is gone only when the session is.
            let _ = self.stranded.send(queue.clone());
        }
    }

    /// Takes out the oldest of them, for a ticket of its own.
    pub(super) fn oldest_stranded(&mut self, queue: &QueueKey) -> Option<Waiter> {
        let oldest = self.ended(queue)?.waiting.pop_front();
        self.has_stranded(queue);
        oldest
    }

    /// The turn of a ticket came. Who waits without a ticket and came before whoever took it has it
    /// first, as if the turn had stayed. `false`: nobody waits any more.
    pub(super) fn granted(
        &mut self,
        queue: &QueueKey,
        ticket: TicketId,
        grant: Grant,
        waiter: Waiter,
    ) -> bool {
        let Some(stick) = self.ended(queue) else {
            return waiter.granted(Granted { ticket, grant, local: None }).is_ok();
        };
        let mut waiting = std::mem::take(&mut stick.waiting);
        let at = waiting.partition_point(|other| other.number < waiter.number);
        waiting.insert(at, waiter);
        let (fence, fresh, standing) = (grant.fence, grant.previous, Standing::AtWork);
        *stick = Stick { ticket, fence, standing, waiting, messages: 1, said: 0, fresh };
        while let Some(next) = stick.waiting.pop_front() {
            if next.granted(Granted { ticket, grant, local: Some((0, 0)) }).is_ok() {
                return true;
            }
        }
        self.held.remove(queue);
        false
    }

    /// The next number, of a waiter or a rest.
    pub(super) fn next_number(&mut self) -> u64 {
        self.counted += 1;
        self.counted
    }

    /// Passes the turn on to the next local message.
    fn pass_on(&mut self, queue: &QueueKey) -> bool {
        let Some(stick) = self.held.get_mut(queue) else { return false };
        while let Some(next) = stick.waiting.pop_front() {
            let granted = stick.granted();
            if next.granted(granted).is_ok() {
                stick.messages += 1;
                stick.standing = Standing::AtWork;
                return true;
            }
        }
        false
    }

    fn rest(&mut self, queue: &QueueKey, now: BootInstant) {
        let number = self.next_number();
        if let Some(stick) = self.held.get_mut(queue) {
            stick.standing = Standing::Idle { number, since: now };
            self.idle.insert(number, queue.clone());
        }
    }

    /// Takes an unused turn out, to be given back.
    fn take_idle(&mut self, queue: &QueueKey) -> Option<Returned> {
        let stick = self.held.get(queue)?;
        let Standing::Idle { number, .. } = stick.standing else { return None };
        let (ticket, fence) = (stick.ticket, stick.fence);
        self.idle.remove(&number);
        self.held.remove(queue);
        Some(Returned { ticket, granted: Some((queue.clone(), fence)), answer: None })
    }

    /// Takes out the unused turns that are to go: all that lapsed, and all beyond the bound.
    fn take_lapsed(&mut self, now: BootInstant) -> Vec<Returned> {
        let mut lapsed = Vec::new();
        while let Some((number, queue)) = self.idle.first_key_value() {
            let (queue, first) = (queue.clone(), *number);
            let since = match self.held.get(&queue).map(|stick| stick.standing) {
                Some(Standing::Idle { number, since }) if number == first => since,
                _ => {
                    self.idle.pop_first();
                    continue;
                }
            };
            let stays = self
                .how
                .is_some_and(|how| self.held.len() <= how.chats_max && now < since + how.idle);
            if stays {
                break;
            }
            lapsed.extend(self.take_idle(&queue));
        }
        lapsed
    }

    fn note_called(&mut self, queue: &QueueKey, now: BootInstant) {
        let recent = |last: BootInstant| now < last + CALLED_WINDOW;
        let bound = self.how.map_or(0, |how| how.chats_max).max(1);
        if self.called.len() >= bound {
            self.called.retain(|_, called| {
                recent(called.last) || called.until.is_some_and(|until| now < until)
            });
            if self.called.len() >= bound {
                self.called.clear();
            }
        }
        let before = self.called.get(queue);
        let twice = before.is_some_and(|called| recent(called.last));
        let until = twice.then(|| now + CALLED_WINDOW);
        self.called.insert(queue.clone(), Called { last: now, until });
    }
}

impl Stick {
    /// What the next local message is given.
    fn granted(&self) -> Granted {
        Granted {
            ticket: self.ticket,
            // Where this replica handled a message under it, its memory is fresh (SPEC C2).
            grant: Grant { fence: self.fence, previous: self.fresh },
            local: Some((self.messages, self.said)),
        }
    }
}

impl Session {
    /// A place without a ticket, where rule 4 allows one.
    pub(super) fn local(self: &Arc<Self>, queue: &QueueKey, now: BootInstant) -> Option<Place> {
        let mut places = self.places.lock();
        let taking = places.is_taking(queue);
        let number = places.sticks.next_number();
        let stick = places.sticks.held.get_mut(queue)?;
        let (ticket, fence) = (stick.ticket, stick.fence);
        if taking
            || stick.standing == Standing::Ended
            || !look(&*self.group, |machine| machine.is_alone(queue, ticket, fence))
        {
            return None;
        }
        let (place, waiter) = Place::new(queue.clone(), ticket, self, now, number);
        stick.waiting.push_back(waiter);
        if let Standing::Idle { number, .. } = stick.standing {
            places.sticks.idle.remove(&number);
            places.sticks.pass_on(queue);
        }
        Some(place)
    }

    /// The place was granted: where its turn belongs.
    pub(super) fn home(self: &Arc<Self>, queue: &QueueKey, granted: &Granted) -> Home {
        let now = self.tenure.now();
        let (nth, said) = granted.local.unwrap_or_else(|| {
            self.places.lock().sticks.begin(queue, granted.ticket, granted.grant, now);
            (0, 0)
        });
        Home::of(Arc::downgrade(self), nth, said)
    }

    /// A local message ends without anything in doubt, having said so much under the fence; `None`
    /// where it went away unhandled. `false`: the turn is to be given back.
    pub(super) fn keep(&self, queue: &QueueKey, fence: Fence, said: Option<u64>) -> bool {
        let now = self.tenure.now();
        let mut places = self.places.lock();
        let sticks = &mut places.sticks;
        let Some(stick) = sticks.held.get_mut(queue).filter(|stick| stick.fence == fence) else {
            return false;
        };
        if stick.standing != Standing::AtWork {
            return false;
        }
        if let Some(said) = said {
            stick.said = stick.said.max(said);
            stick.fresh = Some(self.incarnation());
        }
        let ticket = stick.ticket;
        if sticks.pass_on(queue) {
            return true;
        }
        if sticks.how.is_none() {
            sticks.end(queue, fence);
            return false;
        }
        if !look(&*self.group, |machine| machine.is_alone(queue, ticket, fence)) {
            sticks.note_called(queue, now);
            sticks.end(queue, fence);
            return false;
        }
        sticks.rest(queue, now);
        let lapsed = sticks.take_lapsed(now);
        drop(places);
        self.give_up(lapsed);
        true
    }

    /// See [`Home::to_release`].
    fn end_unless_wanted(&self, queue: &QueueKey, fence: Fence) -> bool {
        let now = self.tenure.now();
        let mut places = self.places.lock();
        let sticks = &mut places.sticks;
        let Some(stick) = sticks.held.get_mut(queue).filter(|stick| stick.fence == fence) else {
            return true;
        };
        stick.waiting.retain(|waiting| !waiting.is_gone());
        let (ticket, wanted) = (stick.ticket, !stick.waiting.is_empty());
        if stick.standing != Standing::AtWork {
            return true;
        }
        if wanted || look(&*self.group, |machine| machine.is_alone(queue, ticket, fence)) {
            return sticks.how.is_none() && !wanted;
        }
        sticks.note_called(queue, now);
        sticks.end(queue, fence);
        true
    }

    /// Somebody came to wait for a turn.
    pub(super) fn called_back(&self, queue: &QueueKey) {
        let now = self.tenure.now();
        let returned = {
            let mut places = self.places.lock();
            let Some(stick) = places.sticks.held.get(queue) else { return };
            let (ticket, fence) = (stick.ticket, stick.fence);
            if look(&*self.group, |machine| machine.is_alone(queue, ticket, fence)) {
                return;
            }
            // One at work looks for itself when it ends.
            let Some(returned) = places.sticks.take_idle(queue) else { return };
            places.sticks.note_called(queue, now);
            returned
        };
        self.give_up(vec![returned]);
    }

    /// Reads the machine for call-backs that nobody told of.
    pub(super) fn call_back_all(&self) {
        let idle: Vec<QueueKey> = self.places.lock().sticks.idle.values().cloned().collect();
        idle.iter().for_each(|queue| self.called_back(queue));
    }

    /// Gives back the turns that were unused too long, all at once.
    pub(super) fn lapse(&self) {
        let lapsed = self.places.lock().sticks.take_lapsed(self.tenure.now());
        self.give_up(lapsed);
    }

    /// From now on turns stay like this. `None` gives back at once what is unused.
    pub(super) fn keep_turns(&self, how: Option<Sticky>) {
        self.places.lock().sticks.how = how;
        self.lapse();
    }

    fn give_up(&self, returned: Vec<Returned>) {
        for returned in returned {
            // The session's task is gone only when the session is, and then nothing is held.
            let _ = self.orphans.send(returned);
        }
    }
}
