//! What speeds up finding things: derived from the tables, never stored, rebuilt on load.
//!
//! Invariant: an index built anew from the tables equals the one kept up by applies
//! (`check_invariants` compares them). Nothing here decides anything that the tables do not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::arrivals::Arrivals;
use super::digest::{self, Digest};
use super::state::LoadError;
use super::tables::{ChatName, EntryKey, PrefixId, Tables, TaskKey, TicketKey};
use super::{IdempotencyKey, QueueKey, QueueKind, RowKey, SessionKind};
use crate::types::{Incarnation, ProcessToken};

/// What one session has.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Holdings {
    /// Tickets of leads: what a session leaves, it leaves these first.
    pub(super) leads: BTreeSet<TicketKey>,
    /// Other tickets.
    pub(super) tickets: BTreeSet<TicketKey>,
    pub(super) outboxes: BTreeSet<Arc<ChatName>>,
    /// Tasks whose occurrence it claimed.
    pub(super) claims: BTreeSet<TaskKey>,
}

impl Holdings {
    /// The tickets of this kind.
    pub(super) fn tickets_of(&mut self, kind: QueueKind) -> &mut BTreeSet<TicketKey> {
        match kind {
            QueueKind::Lead => &mut self.leads,
            QueueKind::Turn | QueueKind::Lock => &mut self.tickets,
        }
    }

    /// All tickets.
    pub(super) fn all_tickets(&self) -> impl Iterator<Item = &TicketKey> {
        self.leads.iter().chain(&self.tickets)
    }
}

/// All indexes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Index {
    /// Every session that lives or still leaves something, with what it has.
    pub(super) holdings: BTreeMap<Incarnation, Holdings>,
    /// Live replicas of each prefix: who can be given what a dead one leaves.
    pub(super) replicas: BTreeMap<PrefixId, BTreeSet<Incarnation>>,
    /// Durable tickets without an owner.
    pub(super) orphans: BTreeSet<TicketKey>,
    /// Outboxes with unsent entries and without an owner.
    pub(super) orphan_outboxes: BTreeSet<Arc<ChatName>>,
    /// Idle queues by when they became so: the least recently used first.
    pub(super) idle: BTreeMap<u64, Arc<QueueKey>>,
    /// Leads with tickets.
    pub(super) leads: BTreeSet<Arc<QueueKey>>,
    /// Turns granted, and tickets in queues of turns, the granted included.
    pub(super) turns_held: u64,
    pub(super) turn_tickets: u64,
    /// Rows that end, by when.
    pub(super) row_ends: BTreeSet<(u64, Arc<RowKey>)>,
    /// Message ids, oldest first.
    pub(super) seen: Arrivals,
    /// Ids of the entries every outbox knows.
    pub(super) send_ids: BTreeSet<Digest>,
    /// Tasks by when they are due.
    pub(super) due: BTreeSet<(PrefixId, u64, TaskKey)>,
    /// Idempotency keys by when they end.
    pub(super) keyed_ends: BTreeSet<(u64, Arc<IdempotencyKey>)>,
    /// How many of them each prefix has.
    pub(super) keyed_counts: BTreeMap<PrefixId, u64>,
    /// Live sessions of each process.
    pub(super) processes: BTreeMap<ProcessToken, BTreeSet<Incarnation>>,
    /// Dead processes in the order they became known, and back.
    pub(super) deaths: BTreeMap<u64, ProcessToken>,
    pub(super) dead_processes: BTreeMap<ProcessToken, u64>,
}

/// The digest under which an outbox knows an entry.
pub(super) fn send_digest(chat: &ChatName, id: &str) -> Digest {
    digest::of_parts(&[&chat.prefix.0.to_le_bytes(), chat.chat.as_bytes(), id.as_bytes()])
}

fn corrupt<T>(what: &str) -> Result<T, LoadError> {
    Err(LoadError::Corrupt(what.to_owned()))
}

impl Index {
    /// Builds the indexes of tables just loaded, and the queues' lines. Tables that contradict
    /// each other are refused.
    pub(super) fn build(tables: &mut Tables) -> Result<Self, LoadError> {
        let mut index = Self::default();
        for (incarnation, session) in tables.sessions.iter() {
            index.holdings.insert(*incarnation, Holdings::default());
            if session.kind == SessionKind::Replica {
                index.replicas.entry(session.prefix_id).or_default().insert(*incarnation);
            }
        }
        for (incarnation, _) in tables.endings.iter() {
            if index.holdings.insert(*incarnation, Holdings::default()).is_some() {
                return corrupt("a session lives and has ended");
            }
        }
        index.build_queues(tables)?;
        index.build_outboxes(tables)?;
        for (key, row) in tables.rows.iter() {
            if let Some(expires) = row.expires_ms {
                index.row_ends.insert((expires, key.clone()));
            }
        }
        let seen = tables.seen.iter().map(|(id, seen)| (seen.order, *id));
        match Arrivals::of(seen, tables.meta.seen) {
            Some(arrivals) => index.seen = arrivals,
            None => return corrupt("message ids are numbered as none can be"),
        }
        for (key, task) in tables.tasks.iter() {
            index.due.insert((key.prefix, task.due_ms, key.clone()));
            // Claims are free with the end, also with one that goes on.
            let live = task.claimed_by.filter(|session| tables.sessions.contains(session));
            match live.and_then(|session| index.holdings.get_mut(&session)) {
                Some(holdings) => drop(holdings.claims.insert(key.clone())),
                None if task.claimed_by.is_some() => {
                    return corrupt("a task is claimed by a dead session");
                }
                None => {}
            }
        }
        for (key, reply) in tables.keyed.iter() {
            let Some(prefix) = tables.prefixes.get(&key.prefix) else {
                return corrupt("an idempotency key has an unknown prefix");
            };
            index.keyed_ends.insert((reply.expires_ms, key.clone()));
            *index.keyed_counts.entry(prefix.id).or_default() += 1;
        }
        index.build_processes(tables)?;
        Ok(index)
    }

    fn build_processes(&mut self, tables: &Tables) -> Result<(), LoadError> {
        for (number, process) in tables.dead_processes.iter() {
            self.deaths.insert(*number, *process);
            if self.dead_processes.insert(*process, *number).is_some() {
                return corrupt("a process died twice");
            }
        }
        for (session, process) in tables.processes.iter() {
            if !tables.sessions.contains(session) || self.dead_processes.contains_key(process) {
                return corrupt("a process has a dead session, or is dead and has one");
            }
            self.processes.entry(*process).or_default().insert(*session);
        }
        Ok(())
    }

    fn build_queues(&mut self, tables: &mut Tables) -> Result<(), LoadError> {
        let mut tickets: Vec<TicketKey> = tables.tickets.iter().map(|(key, _)| *key).collect();
        tickets.sort_unstable();
        for key in tickets {
            let Some(ticket) = tables.tickets.get_mut(&key) else { continue };
            let Some(shared) = tables.queues.get_key(&ticket.queue).cloned() else {
                return corrupt("a ticket has no queue");
            };
            ticket.queue = shared.clone();
            match ticket.owner.map(|owner| self.holdings.get_mut(&owner)) {
                Some(Some(holdings)) => drop(holdings.tickets_of(shared.kind).insert(key)),
                Some(None) => return corrupt("a ticket is a dead session's"),
                None => drop(self.orphans.insert(key)),
            }
            if shared.kind == QueueKind::Turn {
                self.turn_tickets += 1;
                self.turns_held += u64::from(ticket.grant.is_some());
            }
            if let Some(queue) = tables.queues.get_mut(&shared) {
                queue.line.push_back(key.ticket);
            }
        }
        for (key, queue) in tables.queues.iter() {
            if queue.line.is_empty() != (queue.idle > 0) {
                return corrupt("a queue is idle with tickets, or neither");
            }
            if queue.idle > 0 {
                self.idle.insert(queue.idle, key.clone());
            } else if key.kind == QueueKind::Lead {
                self.leads.insert(key.clone());
            }
        }
        match tables.kept.iter().all(|(queue, _)| tables.queues.contains(queue)) {
            true => Ok(()),
            false => corrupt("a fence goes on in no queue"),
        }
    }

    fn build_outboxes(&mut self, tables: &Tables) -> Result<(), LoadError> {
        for (chat, outbox) in tables.outboxes.iter() {
            match outbox.owner.map(|owner| self.holdings.get_mut(&owner)) {
                Some(Some(holdings)) => drop(holdings.outboxes.insert(chat.clone())),
                Some(None) => return corrupt("an outbox is a dead session's"),
                None if outbox.sent < outbox.last => {
                    self.orphan_outboxes.insert(chat.clone());
                }
                None => {}
            }
            for number in outbox.known..=outbox.last {
                let key = EntryKey { chat: chat.clone(), number };
                let digest = match tables.entries.get(&key) {
                    Some(entry) => send_digest(chat, &entry.id),
                    None => match tables.sent_ids.get(&key) {
                        Some(digest) => *digest,
                        None => return corrupt("an outbox misses an entry"),
                    },
                };
                self.send_ids.insert(digest);
            }
        }
        Ok(())
    }
}
