//! What came to the far end, judged: nothing lost, nothing doubled, in order.
//!
//! Problem: a replica that dies after it sent a reply and before that was recorded leaves the next one
//! in doubt, which sends the reply again under the same id; that is promised (SPEC G3), and a provider
//! that knows ids drops it. The same from two replicas that live is a fault. Idea: whoever strikes
//! says so, and a repetition with a struck node at one of its ends counts as *sent again*; every other
//! one as doubled. One message answered under two ids is doubled whoever did it.
//!
//! In order: the replies of a chat stand at growing places (fence, then number under it: a fence goes
//! on where the same replica has the next turn, SPEC N5 and B10), and answer its messages, whose ids
//! end in a number that grows, one after another.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::report::Checks;

/// A reply, as it came.
#[derive(Clone, Debug)]
pub(super) struct Came {
    /// Its id, the same at every attempt.
    pub(super) id: String,
    pub(super) in_reply_to: String,
    pub(super) chat: String,
    pub(super) fence: u64,
    /// How many replies came before it under this fence.
    pub(super) turn_seq: u64,
    /// Who sent it.
    pub(super) node: usize,
    pub(super) at: Instant,
}

/// That a reply was sent is recorded so much later at the most; the rest is for a busy machine.
const UNRECORDED: Duration = Duration::from_secs(2);
/// What was on its way when a node was struck comes so much after it is back at the most.
const ON_ITS_WAY: Duration = Duration::from_secs(5);

/// When a node was not itself: from a moment before the blow to a moment after its return.
#[derive(Debug)]
struct Struck {
    from: Instant,
    until: Option<Instant>,
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// All that came, by message.
    came: HashMap<String, Vec<Came>>,
    /// Where the last reply of each chat stands: fence, number under it, number of the message.
    places: HashMap<String, (u64, u64, u64)>,
    /// Messages that were taken and not answered yet.
    open: HashSet<String>,
    struck: HashMap<usize, Vec<Struck>>,
    /// Replies sent again under their id after a blow.
    again: u64,
    checks: Checks,
}

impl Ledger {
    /// The bot has taken a message: a reply has to come.
    pub(super) fn taken(&mut self, message: &str) {
        if !self.came.contains_key(message) {
            self.open.insert(message.to_owned());
        }
    }

    pub(super) fn take(&mut self, came: Came) {
        self.open.remove(&came.in_reply_to);
        let before = self.came.get(&came.in_reply_to).and_then(|all| all.last());
        match before {
            None => {
                let place = (came.fence, came.turn_seq, number(&came.in_reply_to));
                let last = self.places.insert(came.chat.clone(), place);
                let behind = |last: (u64, u64, u64)| {
                    (place.0, place.1) > (last.0, last.1) && place.2 > last.2
                };
                if last.is_some_and(|last| !behind(last)) {
                    self.checks.out_of_order += 1;
                }
            }
            Some(before) if before.id != came.id => self.checks.doubled += 1,
            Some(before) if self.was_struck(before) || self.was_struck(&came) => self.again += 1,
            Some(_) => self.checks.doubled += 1,
        }
        self.came.entry(came.in_reply_to.clone()).or_default().push(came);
    }

    fn was_struck(&self, came: &Came) -> bool {
        let all = self.struck.get(&came.node).map(Vec::as_slice).unwrap_or_default();
        all.iter().any(|it| it.from <= came.at && it.until.is_none_or(|until| came.at <= until))
    }

    /// A node was struck at this instant.
    pub(super) fn struck(&mut self, node: usize, at: Instant) {
        let from = at.checked_sub(UNRECORDED).unwrap_or(at);
        self.struck.entry(node).or_default().push(Struck { from, until: None });
    }

    /// A struck node is back.
    pub(super) fn revived(&mut self, node: usize, at: Instant) {
        for struck in self.struck.entry(node).or_default() {
            struck.until.get_or_insert(at + ON_ITS_WAY);
        }
    }

    /// The first reply to a message that is as wanted.
    pub(super) fn reply(&self, message: &str, wanted: impl Fn(&Came) -> bool) -> Option<Came> {
        self.came.get(message)?.iter().find(|came| wanted(came)).cloned()
    }

    /// How many messages wait for their reply.
    pub(super) fn open(&self) -> usize {
        self.open.len()
    }

    /// A reply that was waited for did not come.
    pub(super) fn lose(&mut self) {
        self.checks.lost += 1;
    }

    /// The verdict once nothing more is to come.
    pub(super) fn checks(&self) -> Checks {
        Checks { lost: self.checks.lost + self.open.len() as u64, ..self.checks }
    }

    /// Replies sent again under their id after a blow.
    pub(super) fn again(&self) -> u64 {
        self.again
    }
}

/// The number a message's id ends in.
fn number(message: &str) -> u64 {
    message.rsplit('-').next().and_then(|digits| digits.parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(message: &str, id: &str, place: (u64, u64), node: usize, at: Instant) -> Came {
        let (in_reply_to, chat) = (message.to_owned(), "c".to_owned());
        Came { id: id.to_owned(), in_reply_to, chat, fence: place.0, turn_seq: place.1, node, at }
    }

    #[test]
    fn l6_what_never_came_is_lost_and_what_came_before_it_was_asked_for_is_not() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        ledger.take(came("m-1", "a", (1, 0), 0, now));
        ledger.taken("m-1");
        ledger.taken("m-2");
        assert_eq!(ledger.checks(), Checks { lost: 1, doubled: 0, out_of_order: 0 });
        ledger.take(came("m-2", "b", (1, 1), 0, now));
        assert_eq!(ledger.checks(), Checks::default());
        ledger.lose();
        assert_eq!(ledger.checks().lost, 1);
    }

    #[test]
    fn l6_a_reply_again_is_excused_by_a_blow_and_by_nothing_else() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        let later = |seconds| now + Duration::from_secs(seconds);
        ledger.take(came("m-1", "a", (1, 0), 0, now));
        ledger.struck(0, later(1));
        ledger.take(came("m-1", "a", (1, 0), 1, later(2)));
        assert_eq!((ledger.again(), ledger.checks().doubled), (1, 0));
        // Whoever answers under another id has handled the message again.
        ledger.take(came("m-1", "b", (2, 0), 1, later(2)));
        assert_eq!(ledger.checks().doubled, 1);
        ledger.revived(0, later(3));
        ledger.take(came("m-2", "c", (3, 0), 0, later(20)));
        ledger.take(came("m-2", "c", (3, 0), 1, later(21)));
        assert_eq!((ledger.again(), ledger.checks().doubled), (1, 2));
    }

    #[test]
    fn l6_places_and_messages_of_a_chat_have_to_grow() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        ledger.take(came("m-1", "a", (5, 0), 0, now));
        ledger.take(came("m-2", "b", (5, 1), 0, now));
        assert_eq!(ledger.checks().out_of_order, 0);
        ledger.take(came("m-4", "c", (5, 1), 0, now));
        assert_eq!(ledger.checks().out_of_order, 1, "the place of the one before it");
        ledger.take(came("m-3", "d", (6, 0), 0, now));
        assert_eq!(ledger.checks().out_of_order, 2, "an earlier message");
    }
}
