//! Who else runs under this replica's id (SPEC A3).
//!
//! Problem: an older session of the same name that is still live says little. It is left by an
//! opening whose answer was lost, by a session this process gave up and could not close, or by an
//! earlier life of it that was killed: nobody is behind any of these, and they end with their lease.
//! Idea: two processes are told from one by what only a living process does. It renews. So another
//! counts when the older of the two renewed after the newer had opened, and the newer renewed too.
//!
//! Invariants:
//! * An incarnation this coordinator opened is never another, though a renewal of it that was under
//!   way when it was given up may arrive late.
//! * Another is told of once a session.

use std::collections::{BTreeMap, BTreeSet};

use crate::types::Incarnation;

/// What is known of the sessions under one replica id.
#[derive(Debug, Default)]
pub(super) struct Namesakes {
    /// Opened here, as far as answers told, and still live when last looked at.
    own: BTreeSet<Incarnation>,
    /// Last renewal of each older one as the current session opened.
    at_opening: BTreeMap<Incarnation, u64>,
    told: BTreeSet<Incarnation>,
}

impl Namesakes {
    /// A session opened while these others were live, each with its last renewal.
    pub(super) fn opened(&mut self, session: Incarnation, others: &[(Incarnation, u64)]) {
        self.own.retain(|own| others.iter().any(|(other, _)| other == own));
        self.own.insert(session);
        self.at_opening = others.iter().copied().collect();
        self.told.clear();
    }

    /// The session was renewed; answers who else lives, if it was not said before.
    pub(super) fn renewed(
        &mut self,
        session: Incarnation,
        others: &[(Incarnation, u64)],
    ) -> Vec<Incarnation> {
        let at_opening = &self.at_opening;
        let lives = |other: Incarnation, seq: u64| {
            // One that is newer than this, or came in between, had not renewed before.
            seq > at_opening.get(&other).copied().unwrap_or(0)
        };
        let found = others.iter().filter(|(other, seq)| {
            *other != session && !self.own.contains(other) && lives(*other, *seq)
        });
        let found: Vec<Incarnation> = found.map(|(other, _)| *other).collect();
        found.into_iter().filter(|other| self.told.insert(*other)).collect()
    }
}
