//! What a bot counts: the facts of its events as figures (SPEC H1).
//!
//! Every event passes the emitter, so that is where they are counted; what is no event, a duplicate
//! message, is counted where it is answered. Kept as a table because reasons and outcomes are enums
//! that grow, and each value is a line of its own.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::events::Event;
use crate::coordinator::LostReason;

/// One counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    /// What is counted: `lease_lost`.
    pub name: &'static str,
    /// In words.
    pub help: &'static str,
    /// What tells its lines apart, (name, value), where there are several: (`reason`, `expired`).
    pub label: Option<(&'static str, String)>,
    /// How often it happened.
    pub value: u64,
}

/// Name, label, words.
const FAMILIES: [(&str, Option<&str>, &str); 9] = [
    ("dead_letters", None, "Messages given up after their last attempt"),
    ("duplicates", Some("body"), "Messages whose id was seen before, by whether the body was, too"),
    ("errors", None, "Errors reported"),
    ("handovers", Some("outcome"), "Conversations that changed hands, by what became of them"),
    ("jobs_given_up", None, "Occurrences of jobs given up after their last attempt"),
    ("lease_lost", Some("reason"), "Rights to act lost, by reason"),
    ("replica_id_shared", None, "Other live processes found under this replica id"),
    ("sends_unknown", None, "Replies of which it is unknown whether they arrived"),
    ("unknown_events", Some("provider"), "Events of a kind that nobody handles, by provider"),
];

/// See the module.
#[derive(Debug)]
pub(crate) struct Counts {
    // A mutex: a few dozen rows, held for one addition.
    table: Mutex<BTreeMap<(&'static str, String), u64>>,
}

impl Counts {
    /// Families of one line begin at zero, and so do the closed sets: what is not there is no zero.
    pub(crate) fn new() -> Self {
        let mut table = BTreeMap::new();
        let plain = FAMILIES.iter().filter(|family| family.1.is_none());
        table.extend(plain.map(|(name, ..)| ((*name, String::new()), 0)));
        let reasons = [
            LostReason::Expired,
            LostReason::Superseded,
            LostReason::SteppedDown,
            LostReason::Settled,
        ];
        table.extend(reasons.map(|reason| (("lease_lost", snake(&reason)), 0)));
        table.extend(["same", "other"].map(|body| (("duplicates", body.to_owned()), 0)));
        Self { table: Mutex::new(table) }
    }

    pub(crate) fn count(&self, event: &Event) {
        match event {
            Event::LeaseLost { reason, .. } => self.add("lease_lost", snake(reason)),
            Event::Handover { outcome, .. } => self.add("handovers", snake(outcome)),
            Event::SendUnknown { .. } => self.add("sends_unknown", String::new()),
            Event::DeadLetter { .. } => self.add("dead_letters", String::new()),
            Event::ReplicaIdShared { .. } => self.add("replica_id_shared", String::new()),
            Event::JobGivenUp { .. } => self.add("jobs_given_up", String::new()),
            Event::Error { .. } => self.add("errors", String::new()),
            _ => {}
        }
    }

    pub(crate) fn duplicate(&self, same_body: bool) {
        self.add("duplicates", if same_body { "same" } else { "other" }.to_owned());
    }

    pub(crate) fn unknown(&self, provider: String) {
        self.add("unknown_events", provider);
    }

    fn add(&self, name: &'static str, label: String) {
        *self.table.lock().entry((name, label)).or_default() += 1;
    }

    /// Every counter, those of one family together.
    pub(crate) fn figures(&self) -> Vec<Figure> {
        let table = self.table.lock();
        let known = |name: &str| FAMILIES.iter().find(|family| family.0 == name);
        let figures = table.iter().filter_map(|((name, label), value)| {
            let (name, key, help) = *known(name)?;
            Some(Figure { name, help, label: key.map(|key| (key, label.clone())), value: *value })
        });
        figures.collect()
    }
}

/// `SteppedDown` as `stepped_down`.
fn snake(value: &impl std::fmt::Debug) -> String {
    let mut name = String::new();
    for letter in format!("{value:?}").chars() {
        // A variant's fields, should it have some, are no part of its name.
        if !letter.is_ascii_alphanumeric() {
            break;
        }
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h1_events_are_counted_by_reason() {
        let counts = Counts::new();
        let lost = |reason| Event::LeaseLost { key: "x:ann".to_owned(), reason };
        for reason in [LostReason::SteppedDown, LostReason::Settled, LostReason::SteppedDown] {
            counts.count(&lost(reason));
        }
        counts.count(&Event::SendUnknown { key: "x:ann".to_owned(), id: "r1".to_owned() });
        counts.duplicate(false);
        let figures = counts.figures();
        let value = |name: &str, label: &str| {
            let same = |found: &&Figure| {
                let labelled = found.label.as_ref().map_or("", |label| label.1.as_str());
                found.name == name && labelled == label
            };
            figures.iter().find(same).map(|found| found.value)
        };
        assert_eq!(value("lease_lost", "stepped_down"), Some(2));
        assert_eq!(value("lease_lost", "settled"), Some(1));
        assert_eq!(value("lease_lost", "expired"), Some(0), "what never happened is zero");
        assert_eq!(value("sends_unknown", ""), Some(1));
        assert_eq!(value("dead_letters", ""), Some(0));
        assert_eq!(value("duplicates", "other"), Some(1));
        assert_eq!(value("duplicates", "same"), Some(0));
        assert!(figures.is_sorted_by_key(|figure| figure.name), "families stay together");
    }
}
