//! What must hold after every apply.

use std::collections::BTreeSet;

use super::index::Index;
use super::state::Machine;
use super::tables::{PrefixId, TicketKey};
use super::{QueueKind, SessionKind};
use crate::types::Prefix;

impl Machine {
    /// Panics where the state contradicts itself. Walks everything: for tests.
    pub fn check_invariants(&self) {
        self.check_sessions();
        self.check_processes();
        self.check_endings();
        self.check_queues();
        self.check_journal();
        self.check_outboxes();
        self.check_rest();
        self.check_index();
    }

    fn prefix_of(&self, id: PrefixId) -> &Prefix {
        let mut prefixes = self.tables.prefixes.iter();
        let found = prefixes.find(|(_, record)| record.id == id);
        found.unwrap_or_else(|| panic!("prefix {id:?} is not known")).0
    }

    fn check_sessions(&self) {
        for (incarnation, session) in self.tables.sessions.iter() {
            assert!(incarnation.0 > 0, "incarnation 0 stands for nobody");
            assert!(incarnation.0 <= self.tables.meta.incarnation, "{incarnation} is allocated");
            assert_eq!(self.prefix_id(&session.prefix), Some(session.prefix_id));
            assert_eq!(session.lock.is_some(), session.kind == SessionKind::Lock);
            if let Some(lock) = &session.lock {
                let held = self.index.holdings[incarnation].all_tickets();
                let mut queues = held.map(|key| &self.live_ticket(*key).queue);
                assert!(queues.any(|queue| queue == lock), "a lock's session has its ticket");
            }
        }
    }

    fn check_endings(&self) {
        for (session, _) in self.tables.endings.iter() {
            assert!(session.0 <= self.tables.meta.incarnation, "{session} is allocated");
            assert!(!self.tables.sessions.contains(session), "{session} has ended for good");
            assert!(self.index.holdings.contains_key(session), "{session} left something");
        }
    }

    fn check_queues(&self) {
        let mut fences = BTreeSet::new();
        let mut standing = 0;
        for (queue, record) in self.tables.queues.iter() {
            let prefix = self.prefix_id(&queue.prefix).expect("a queue's prefix is known");
            assert_eq!(record.line.is_empty(), record.idle > 0, "{queue:?} is idle or has tickets");
            assert!(!record.line.is_empty() || record.last.is_some(), "{queue:?} is worth keeping");
            assert!(!record.line.is_empty() || queue.kind != QueueKind::Lock, "{queue:?}");
            assert!(record.line.iter().is_sorted(), "{queue:?} is in the order of its tickets");
            standing += record.line.len() as u64;
            for (place, ticket) in record.line.iter().enumerate() {
                let key = TicketKey { prefix, ticket: *ticket };
                let found = self.live_ticket(key);
                assert_eq!(found.queue, *queue, "{ticket} stands in its own queue");
                assert!(self.was_allocated(&queue.prefix, *ticket), "{ticket} is allocated");
                let holds = place == 0 && found.owner.is_some();
                assert_eq!(
                    found.grant.is_some(),
                    holds,
                    "the head is granted once it has an owner"
                );
                if let Some(grant) = found.grant {
                    assert!(grant.fence.0 <= self.tables.meta.fence, "{} was given", grant.fence);
                    assert!(fences.insert(grant.fence), "{} was given once", grant.fence);
                    assert_eq!(record.last, found.owner, "the holder was granted last");
                }
                match found.owner {
                    // Its end goes on, and this goes with it.
                    Some(session) if self.left_something(session) => {}
                    Some(session) => {
                        if found.grant.is_none() && self.tables.journal.contains(&key) {
                            let home = self.owner_at_home(prefix, &queue.name, Some(session));
                            assert_eq!(home, Some(session), "{ticket} waits at its home");
                        }
                        let owner = self.tables.sessions.get(&session);
                        let owner = owner.expect("a ticket's owner lives");
                        assert_eq!(owner.prefix, queue.prefix, "{ticket} is its owner's prefix's");
                    }
                    None => {
                        assert!(self.tables.journal.contains(&key), "only durable ones can wait");
                        let heir = self.pick_replica(prefix, &queue.name);
                        assert_eq!(heir, None, "{ticket} has no owner though somebody could");
                    }
                }
            }
        }
        assert_eq!(standing, self.tables.tickets.len(), "every ticket stands in a queue");
        for (queue, kept) in self.tables.kept.iter() {
            let record = self.tables.queues.get(queue).expect("a fence goes on in a known queue");
            assert_eq!(queue.kind, QueueKind::Turn, "only a turn's fence goes on");
            assert!(record.last.is_some(), "{queue:?} has somebody whose fence goes on");
            assert!(kept.fence.0 <= self.tables.meta.fence, "{} was given", kept.fence);
            let head = self.head(queue).and_then(|key| self.live_ticket(key).grant);
            assert!(head.is_none_or(|grant| grant.fence == kept.fence), "{queue:?} goes on");
        }
        assert!(self.index.idle.len() as u64 <= u64::from(self.tables.meta.limits.idle_keys_max));
        for task in self.tables.tasks.iter().filter(|(_, task)| task.claimed_by.is_some()) {
            assert!(fences.insert(task.1.fence), "{} was given once", task.1.fence);
        }
    }

    fn check_journal(&self) {
        for (key, record) in self.tables.journal.iter() {
            let ticket = self.live_ticket(*key);
            assert_eq!(ticket.queue.kind, QueueKind::Turn, "messages wait for turns");
            assert_eq!(ticket.queue.name, record.chat, "in their own chat");
            assert!(!self.tables.dead.contains(key), "a live message is not a dead letter");
        }
    }

    fn check_outboxes(&self) {
        let (mut listed, mut known) = (0, 0);
        for (chat, outbox) in self.tables.outboxes.iter() {
            let prefix = self.prefix_of(chat.prefix);
            assert!(outbox.sent <= outbox.last, "{chat:?}");
            assert!(outbox.first <= outbox.sent + 1, "{chat:?} lists all that is unsent");
            assert!(outbox.known <= outbox.first, "{chat:?} knows all that is listed");
            let kept = outbox.sent + 1 - outbox.first;
            assert!(kept <= u64::from(outbox.keep), "{chat:?} lists no more than it keeps");
            listed += outbox.last + 1 - outbox.first;
            known += outbox.first - outbox.known;
            let entries = self.outbox(prefix, &chat.chat, 0, usize::MAX);
            let numbers = entries.iter().map(|entry| entry.number);
            assert!(numbers.eq(outbox.first..=outbox.last), "{chat:?} has no gap");
            let next = entries.iter().find(|entry| entry.number > outbox.sent);
            assert!(next.is_none_or(|entry| entry.unsent), "{chat:?} waits for a send");
            match outbox.owner {
                Some(owner) if self.left_something(owner) => {}
                Some(owner) => {
                    let owner = self.tables.sessions.get(&owner);
                    let owner = owner.expect("an outbox's owner lives");
                    assert_eq!(owner.prefix_id, chat.prefix);
                    assert!(next.is_some(), "{chat:?} has an owner for something");
                }
                None if next.is_some() => {
                    let heir = self.pick_replica(chat.prefix, &chat.chat);
                    assert_eq!(heir, None, "{chat:?} has no owner though somebody could");
                }
                None => {}
            }
        }
        assert_eq!(listed, self.tables.entries.len(), "every entry is some outbox's");
        assert_eq!(known, self.tables.sent_ids.len(), "every known id is some outbox's");
        assert_eq!(listed + known, self.index.send_ids.len() as u64, "ids are known once");
    }

    fn check_rest(&self) {
        let meta = &self.tables.meta;
        for (key, row) in self.tables.rows.iter() {
            assert!(row.revision.0 <= meta.revision, "{key:?} has a revision that was given");
            assert!(self.prefix_id(&key.prefix).is_some(), "{key:?} has a known prefix");
        }
        for (key, lane) in self.tables.lanes.iter() {
            assert!(self.tables.clients.contains(&key.0), "lane {key:?} has a client");
            assert!(lane.next > 0, "lane {key:?} ran a batch");
        }
        assert!(meta.mark_ms <= meta.now_ms, "marks are taken in the past");
    }

    fn check_index(&self) {
        let mut tables = self.tables.clone();
        for queue in self.tables.queues.iter().map(|(queue, _)| queue.clone()) {
            if let Some(queue) = tables.queues.get_mut(&queue) {
                queue.line.clear();
            }
        }
        let rebuilt = Index::build(&mut tables).expect("the tables agree");
        assert_eq!(rebuilt, self.index, "the index follows from the tables");
    }
}
