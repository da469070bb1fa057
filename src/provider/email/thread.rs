//! What is remembered of a correspondent: how to go on with their thread, and how often they wrote.
//!
//! Problem: a reply needs the ids and the subject of the mail it answers, on whichever replica sends
//! it; and a program that does not say it is one answers every reply at once. Idea: one row for each
//! correspondent, written before the commit that journals their mails. A mail that comes again (its commit
//! failed) is in the row already and changes nothing.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::identity::{digest, mark};
use super::read::Said;
use crate::provider::{DeliverError, Link};

/// How long a correspondent is remembered.
pub(super) const REMEMBERED: Duration = Duration::from_secs(180 * 24 * 3_600);
/// Mails that can be answered by name; a later reply goes to the last.
const MAILS_MAX: usize = 8;
/// Equal mails whose numbers are known; an older one that is read again is taken for a new one.
const EQUALS_MAX: usize = 256;
/// Turns of one correspondent in a day.
const DAY_MAX: usize = 100;
const DAY_MS: u64 = 24 * 3_600_000;

/// A mail that may be answered.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Answerable {
    /// What its message is called.
    pub(super) id: String,
    /// Its `Message-ID`, where it has one.
    pub(super) message_id: Option<String>,
    pub(super) references: Vec<String>,
    pub(super) subject: String,
}

/// What is remembered of one correspondent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Thread {
    /// The latest last.
    mails: Vec<Answerable>,
    /// Turns of the last day: a mark of each mail, and when it arrived.
    rounds: Vec<(u64, u64)>,
}

/// How many turns within how long are taken for a loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) most: usize,
    pub(super) within: Duration,
}

impl Thread {
    pub(super) fn row(address: &str) -> String {
        format!("thread:{}", digest(address))
    }

    /// The mail of that id, else the last.
    pub(super) fn answered(&self, id: &str) -> Option<&Answerable> {
        self.mails.iter().rfind(|mail| mail.id == id).or(self.mails.last())
    }

    /// Notes a mail that arrived then; `false` where it is one too many.
    fn note(&mut self, said: &Said, at_ms: u64, bound: Bound) -> bool {
        let mark = mark(&said.message.id);
        if self.rounds.iter().any(|round| round.0 == mark) {
            return true;
        }
        let within = u64::try_from(bound.within.as_millis()).unwrap_or(u64::MAX);
        let since = |ms: u64| at_ms.saturating_sub(ms);
        self.rounds.retain(|round| round.1 >= since(DAY_MS));
        let lately = self.rounds.iter().filter(|round| round.1 > since(within)).count();
        if lately >= bound.most || self.rounds.len() >= DAY_MAX.max(bound.most) {
            return false;
        }
        self.rounds.push((mark, at_ms));
        self.mails.push(Answerable {
            id: said.message.id.clone(),
            message_id: said.message_id.clone(),
            references: said.references.clone(),
            subject: said.subject.clone(),
        });
        let old = self.mails.len().saturating_sub(MAILS_MAX);
        self.mails.drain(..old);
        true
    }
}

/// Mails without a `Message-ID` that are equal to the byte, by their UIDs.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Equals {
    validity: u32,
    /// UID → the how-manieth; the last ones.
    numbers: BTreeMap<u32, u32>,
    /// The greatest number that was given, whatever the mailbox was.
    highest: u32,
}

impl Equals {
    /// The how-manieth of its kind the mail of that UID is. In a mailbox that was rebuilt the first
    /// one of a kind is again the first; what came after that is none of them.
    fn number(&mut self, validity: u32, uid: u32, rebuilt: bool) -> u32 {
        if self.validity != validity {
            *self = Self { validity, numbers: BTreeMap::new(), highest: self.highest };
        }
        let last = match rebuilt {
            true => self.numbers.values().max().copied().unwrap_or_default(),
            false => self.highest,
        };
        let number = *self.numbers.entry(uid).or_insert(last.saturating_add(1));
        self.highest = self.highest.max(number);
        while self.numbers.len() > EQUALS_MAX {
            self.numbers.pop_first();
        }
        number
    }
}

/// Rows that are read once and written together.
pub(super) struct Rows<'a> {
    link: &'a Link,
    provider: &'a str,
    threads: HashMap<String, Thread>,
    equals: HashMap<String, Equals>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(link: &'a Link, provider: &'a str) -> Self {
        Self { link, provider, threads: HashMap::new(), equals: HashMap::new() }
    }

    /// Notes a mail; `false` where it is one too many of its correspondent's.
    pub(super) async fn note(
        &mut self,
        said: &Said,
        at_ms: u64,
        bound: Bound,
    ) -> Result<bool, DeliverError> {
        let name = Thread::row(&said.message.chat.chat);
        if !self.threads.contains_key(&name) {
            let thread = load(self.link, self.provider, &name).await?;
            self.threads.insert(name.clone(), thread);
        }
        let thread = self.threads.entry(name).or_default();
        Ok(thread.note(said, at_ms, bound))
    }

    /// The how-manieth of those that are equal to it a mail without a `Message-ID` is.
    pub(super) async fn number(
        &mut self,
        digest: &str,
        validity: u32,
        uid: u32,
        rebuilt: bool,
    ) -> Result<u32, DeliverError> {
        let name = format!("equal:{digest}");
        if !self.equals.contains_key(&name) {
            let equals = load(self.link, self.provider, &name).await?;
            self.equals.insert(name.clone(), equals);
        }
        Ok(self.equals.entry(name).or_default().number(validity, uid, rebuilt))
    }

    /// Writes what was noted.
    pub(super) async fn keep(self) -> Result<(), DeliverError> {
        // Plain fields always serialise.
        let threads = self.threads.into_iter();
        let threads = threads.map(|(name, row)| (name, serde_json::to_vec(&row)));
        let equals = self.equals.into_iter();
        let equals = equals.map(|(name, row)| (name, serde_json::to_vec(&row)));
        let rows: Vec<(String, Vec<u8>)> =
            threads.chain(equals).map(|(name, row)| (name, row.unwrap_or_default())).collect();
        if rows.is_empty() {
            return Ok(());
        }
        self.link.keep(self.provider, rows, REMEMBERED).await
    }
}

/// A row; one that does not decode is none.
pub(super) async fn load<T: Default + for<'de> Deserialize<'de>>(
    link: &Link,
    provider: &str,
    name: &str,
) -> Result<T, DeliverError> {
    let found = link.kept(provider, name).await?;
    Ok(found.and_then(|row| serde_json::from_slice(&row).ok()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ChatKey, Message};

    fn said(id: &str) -> Said {
        let message = Message::text(id, ChatKey::new("mail", "ann@a.example"), "hi");
        let message_id = Some(id.to_owned());
        Said { message, message_id, references: Vec::new(), subject: "s".to_owned() }
    }

    #[test]
    fn case_w22_more_than_so_many_turns_within_so_long_are_a_loop() {
        let bound = Bound { most: 3, within: Duration::from_secs(120) };
        let mut thread = Thread::default();
        for n in 0..3 {
            assert!(thread.note(&said(&n.to_string()), 1_000_000 + n, bound));
        }
        assert!(!thread.note(&said("3"), 1_000_003, bound));
        assert!(thread.note(&said("1"), 1_000_003, bound), "it came again, and was one of them");
        assert!(thread.note(&said("4"), 1_120_001, bound), "that is later");
        assert_eq!(thread.answered("1").unwrap().id, "1");
        assert_eq!(thread.answered("what the bot says by itself").unwrap().id, "4");
        // A slow loop ends, too.
        let slow = (0..1_000_u64)
            .filter(|n| thread.note(&said(&format!("slow {n}")), 2_000_000 + n * 60_000, bound));
        assert!(slow.count() <= DAY_MAX);
        assert!(thread.mails.len() <= MAILS_MAX);
    }

    #[test]
    fn case_w21_equal_mails_without_an_id_are_counted() {
        let mut equals = Equals::default();
        assert_eq!((equals.number(1, 7, false), equals.number(1, 8, false)), (1, 2));
        assert_eq!(equals.number(1, 7, false), 1, "the same one again");
        let rebuilt = (equals.number(2, 1, true), equals.number(2, 2, true));
        assert_eq!(rebuilt, (1, 2), "rebuilt: the same two");
        assert_eq!(equals.number(2, 3, true), 3, "and a new one");
        assert_eq!(equals.number(3, 9, false), 4, "the old ones were passed by as old");
        for uid in 10..10_000 {
            equals.number(3, uid, false);
        }
        assert!(equals.numbers.len() <= EQUALS_MAX);
    }
}
