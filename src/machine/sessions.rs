//! Sessions: who is alive, and what becomes of what the dead had.
//!
//! A session is an entry in a table; the end of one removes it, and since incarnations are never
//! given out twice, absence is its tombstone: nothing revives it (DESIGN 3). The state holds no
//! instants. Each node counts the lease from its own apply and may propose to expire the session at
//! a *seq*; that applies only if no later renewal did.
//!
//! The end of a session is one apply (DESIGN 4 rule 13): its tickets go, those with a journaled
//! message keep their place under a live replica, or under none until one opens; its outboxes get
//! another sender; its claims are free; then the next tickets are granted. Where it leaves so much
//! that others would wait for it, it is as if so, and takes several (see [`super::endings`]).

use std::sync::Arc;

use super::apply::check_key;
use super::digest;
use super::index::Holdings;
use super::state::Machine;
use super::tables::{ChatName, PrefixId, Session, TicketKey};
use super::{Effect, EndReason, Limit, QueueKey, Reply, SessionKind};
use crate::types::{Incarnation, NodeId, Prefix};

impl Machine {
    pub(super) fn open_session(
        &mut self,
        prefix: &Prefix,
        kind: SessionKind,
        replica: &str,
        node: NodeId,
        lease_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let limits = self.tables.meta.limits;
        let lease_ms = lease_ms.max(limits.lease_ms_min).min(limits.lease_ms_max);
        // A session that stands for a lock is opened by its acquisition and by nothing else.
        let kind = if kind == SessionKind::Lock { SessionKind::Remote } else { kind };
        let session = match check_key(replica)
            .and_then(|()| self.new_session(prefix, kind, replica, node, lease_ms, None, effects))
        {
            Ok(session) => session,
            Err(limit) => return Reply::Full(limit),
        };
        let shared_with = self.namesakes_of(session).filter(|other| *other < session).max();
        if kind == SessionKind::Replica {
            self.adopt_orphans(session, effects);
        }
        Reply::Session { session, lease_ms, shared_with }
    }

    /// Opens a session under a new incarnation.
    #[expect(clippy::too_many_arguments, reason = "they are the fields of the record")]
    pub(super) fn new_session(
        &mut self,
        prefix: &Prefix,
        kind: SessionKind,
        replica: &str,
        node: NodeId,
        lease_ms: u64,
        lock: Option<Arc<QueueKey>>,
        effects: &mut Vec<Effect>,
    ) -> Result<Incarnation, Limit> {
        if self.tables.sessions.len() >= u64::from(self.tables.meta.limits.sessions_max) {
            return Err(Limit::Sessions);
        }
        let prefix_id = self.intern(prefix)?;
        self.tables.meta.incarnation += 1;
        let session = Incarnation(self.tables.meta.incarnation);
        let (prefix, replica) = (prefix.clone(), replica.to_owned());
        let record = Session { prefix, prefix_id, kind, replica, node, lease_ms, seq: 0, lock };
        self.tables.sessions.insert(session, record);
        self.index.holdings.insert(session, Holdings::default());
        if kind == SessionKind::Replica {
            self.index.replicas.entry(prefix_id).or_default().insert(session);
        }
        effects.push(Effect::SessionArmed { session, seq: 0, lease_ms });
        Ok(session)
    }

    /// Live sessions under the same replica name, its own among them (SPEC A3).
    pub(super) fn namesakes_of(&self, session: Incarnation) -> impl Iterator<Item = Incarnation> {
        let own = self.tables.sessions.get(&session);
        let own = own.filter(|own| own.kind == SessionKind::Replica && !own.replica.is_empty());
        let peers = own.and_then(|own| self.index.replicas.get(&own.prefix_id));
        peers.into_iter().flatten().copied().filter(move |other| {
            let other = self.tables.sessions.get(other);
            other.map(|other| &other.replica) == own.map(|own| &own.replica)
        })
    }

    pub(super) fn renew_session(
        &mut self,
        session: Incarnation,
        seq: Option<u64>,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let Some(record) = self.tables.sessions.get(&session) else {
            return Reply::SessionExpired;
        };
        let lease_ms = record.lease_ms;
        let seq = seq.unwrap_or(record.seq.saturating_add(1));
        if seq <= record.seq {
            return Reply::Stale;
        }
        self.arm(session, seq, lease_ms, effects);
        let meta = &mut self.tables.meta;
        if meta.now_ms.saturating_sub(meta.mark_ms) >= meta.limits.mark_every_ms {
            meta.mark_ms = meta.now_ms;
        }
        // Only the older of two is told: it was there when the newer one came.
        let shared_with = self.namesakes_of(session).filter(|other| *other > session).max();
        Reply::Renewed { seq, lease_ms, shared_with }
    }

    /// Counts a renewal.
    pub(super) fn arm(
        &mut self,
        session: Incarnation,
        seq: u64,
        lease_ms: u64,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(record) = self.tables.sessions.get_mut(&session) {
            record.seq = seq;
            record.lease_ms = lease_ms;
            effects.push(Effect::SessionArmed { session, seq, lease_ms });
        }
    }

    pub(super) fn expire(
        &mut self,
        session: Incarnation,
        seq: u64,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if self.tables.sessions.get(&session).is_none_or(|record| record.seq != seq) {
            return Reply::Stale;
        }
        self.end_session(session, EndReason::Expired, effects);
        Reply::Done
    }

    /// Ends a session by its holder's own word.
    pub(super) fn end_if_live(
        &mut self,
        session: Incarnation,
        reason: EndReason,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if !self.tables.sessions.contains(&session) {
            return Reply::SessionExpired;
        }
        self.end_session(session, reason, effects);
        Reply::Done
    }

    /// Ends a live session.
    pub(super) fn end_session(
        &mut self,
        session: Incarnation,
        reason: EndReason,
        effects: &mut Vec<Effect>,
    ) {
        self.end_sessions(&[session], reason, effects);
    }

    /// Ends live sessions together: none of them is given what another of them had.
    pub(super) fn end_sessions(
        &mut self,
        sessions: &[Incarnation],
        reason: EndReason,
        effects: &mut Vec<Effect>,
    ) {
        let held: Vec<(Incarnation, Holdings)> = sessions
            .iter()
            .map(|session| (*session, self.forget_session(*session, reason, effects)))
            .collect();
        if self.leaves_too_much(held.iter().map(|(_, held)| held)) {
            return self.begin_ending(held, reason, effects);
        }
        let tickets = held.iter().flat_map(|(_, held)| {
            // In the order in which they were taken.
            let mut tickets: Vec<TicketKey> = held.all_tickets().copied().collect();
            tickets.sort_unstable();
            tickets
        });
        self.free_tickets(tickets.collect(), effects);
        for chat in held.iter().flat_map(|(_, held)| &held.outboxes) {
            self.pass_outbox(chat, reason, effects);
        }
    }

    /// Frees tickets of sessions that have ended, then grants whatever comes next.
    pub(super) fn free_tickets(&mut self, tickets: Vec<TicketKey>, effects: &mut Vec<Effect>) {
        let mut queues: Vec<Arc<QueueKey>> = Vec::new();
        for key in tickets {
            let queue = self.free_ticket(key, effects);
            if queues.last() != Some(&queue) {
                queues.push(queue);
            }
        }
        for queue in queues {
            self.grant_head(&queue, effects);
        }
    }

    /// Ends a dead session's ticket, or gives it to a live replica where it is durable. Who comes next
    /// is for the caller to grant.
    pub(super) fn free_ticket(
        &mut self,
        key: TicketKey,
        effects: &mut Vec<Effect>,
    ) -> Arc<QueueKey> {
        match self.tables.journal.contains(&key) {
            true => self.rehome(key, effects),
            false => self.end_ticket(key, effects),
        }
    }

    /// Gives a dead session's outbox to a live replica, or to nobody for now.
    pub(super) fn pass_outbox(
        &mut self,
        chat: &Arc<ChatName>,
        reason: EndReason,
        effects: &mut Vec<Effect>,
    ) {
        let owner = self.pick_replica(chat.prefix, &chat.chat);
        let adopter = owner.filter(|_| reason != EndReason::Closed);
        if let Some((session, record)) =
            adopter.and_then(|owner| Some((owner, self.tables.sessions.get(&owner)?)))
        {
            let (prefix, chat) = (record.prefix.clone(), chat.chat.clone());
            effects.push(Effect::OutboxAdopted { session, prefix, chat });
        }
        self.set_outbox_owner(chat, owner, effects);
    }

    /// Takes a session out of the tables and answers what it had, which is nobody's now.
    fn forget_session(
        &mut self,
        session: Incarnation,
        reason: EndReason,
        effects: &mut Vec<Effect>,
    ) -> Holdings {
        let Some(record) = self.tables.sessions.remove(&session) else {
            return Holdings::default();
        };
        effects.push(Effect::SessionEnded { session, reason });
        if let Some(replicas) = self.index.replicas.get_mut(&record.prefix_id) {
            replicas.remove(&session);
            if replicas.is_empty() {
                self.index.replicas.remove(&record.prefix_id);
            }
        }
        self.forget_process_of(session);
        let mut held = self.index.holdings.remove(&session).unwrap_or_default();
        self.free_claims(&record.prefix, std::mem::take(&mut held.claims), effects);
        held
    }

    /// Gives a dead session's durable ticket to a live replica, or to nobody for now.
    fn rehome(&mut self, key: TicketKey, effects: &mut Vec<Effect>) -> Arc<QueueKey> {
        self.ungrant(key);
        let queue = self.live_ticket(key).queue.clone();
        let owner = self.pick_replica(key.prefix, &queue.name);
        self.own(key, owner, effects);
        queue
    }

    /// The first replica of a prefix to open takes what nobody has, unless it has a home: the leader
    /// will.
    fn adopt_orphans(&mut self, session: Incarnation, effects: &mut Vec<Effect>) {
        let Some(prefix) = self.tables.sessions.get(&session).map(|own| own.prefix_id) else {
            return;
        };
        let chat = |key: &TicketKey| &self.live_ticket(*key).queue.name;
        let of_prefix =
            |key: &&TicketKey| key.prefix == prefix && self.home(prefix, chat(key)).is_none();
        let orphans: Vec<_> = self.index.orphans.iter().filter(of_prefix).copied().collect();
        for key in &orphans {
            self.index.orphans.remove(key);
            self.own(*key, Some(session), effects);
        }
        for key in orphans {
            let queue = self.live_ticket(key).queue.clone();
            self.grant_head(&queue, effects);
        }
        let of_prefix = |chat: &&Arc<ChatName>| {
            chat.prefix == prefix && self.home(prefix, &chat.chat).is_none()
        };
        let chats = self.index.orphan_outboxes.iter().filter(of_prefix);
        for chat in chats.cloned().collect::<Vec<_>>() {
            self.index.orphan_outboxes.remove(&chat);
            self.set_outbox_owner(&chat, Some(session), effects);
        }
    }

    /// A live replica for a chat: the leader of its home, else always the same one while the same ones live, so that what one
    /// chat left behind stays together, and chats spread evenly.
    pub(super) fn pick_replica(&self, prefix: PrefixId, chat: &str) -> Option<Incarnation> {
        if let Some(lead) = self.home(prefix, chat) {
            return self.leader_of(lead);
        }
        let replicas = self.index.replicas.get(&prefix)?;
        let nth = digest::short(chat.as_bytes()) % replicas.len() as u64;
        replicas.iter().nth(usize::try_from(nth).unwrap_or(0)).copied()
    }

    /// The number of the prefix, if this session is alive in it and may act there. The session of
    /// a lock acts by its token alone.
    pub(super) fn acting(&self, session: Incarnation, prefix: &Prefix) -> Option<PrefixId> {
        let record = self.tables.sessions.get(&session)?;
        let may = record.kind != SessionKind::Lock && record.prefix == *prefix;
        may.then_some(record.prefix_id)
    }

    /// As [`Machine::acting`], for what only a bot's replica may do.
    pub(super) fn acting_replica(&self, session: Incarnation, prefix: &Prefix) -> Option<PrefixId> {
        let record = self.tables.sessions.get(&session)?;
        let may = record.kind == SessionKind::Replica && record.prefix == *prefix;
        may.then_some(record.prefix_id)
    }
}
