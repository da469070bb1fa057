//! One batch: exactly once, in order, then one command after the other.
//!
//! A client sends the batches of a lane one after another and repeats one until it is answered
//! (SPEC B8), so a batch may be in the log several times. The lane's next serial tells: that one
//! runs, a lower one has run, a higher one has a gap before it.

use std::sync::Arc;

use super::state::Machine;
use super::tables::{Lane, PrefixId, PrefixRecord};
use super::{Batch, BatchReply, ClientId, Command, Effect, EndReason, Limit, Reply};
use crate::types::{Fence, KEY_BYTES_MAX, NodeId, Prefix, TicketId, VALUE_BYTES_MAX};

/// How much of each kind of ended data one batch removes at most: an apply stays short however
/// much ends at once.
pub(super) const SWEEP_MAX: usize = 64;

impl Machine {
    /// Applies one entry. `effects` is appended to, in order.
    pub fn apply(&mut self, _index: u64, batch: &Batch, effects: &mut Vec<Effect>) -> BatchReply {
        let now_ms = &mut self.tables.meta.now_ms;
        *now_ms = batch.stamp_ms.max(*now_ms);
        if let Err(refused) = self.admit_batch(batch) {
            return refused;
        }
        self.sweep(effects);
        self.go_on_ending(batch.commands.len(), effects);
        let renewed_before = self.tables.meta.mark_ms;
        let replies: Arc<Vec<Reply>> =
            Arc::new(batch.commands.iter().map(|command| self.run(command, effects)).collect());
        if self.tables.meta.mark_ms != renewed_before {
            effects.push(Effect::Mark);
        }
        let lane = Lane { next: batch.serial + 1, replies: replies.clone() };
        self.tables.lanes.insert((batch.client.node, batch.lane), lane);
        #[cfg(test)]
        self.check_invariants();
        BatchReply::Applied(replies.to_vec())
    }

    /// Whether this batch is the next of its lane. A node's first batch, and the first after it
    /// was started again, are numbered 0.
    fn admit_batch(&mut self, batch: &Batch) -> Result<(), BatchReply> {
        let ClientId { node, boot } = batch.client;
        if let Some(answer) = self.remembered(batch.client, batch.lane, batch.serial) {
            return Err(answer);
        }
        let next = self.next_serial(batch.client, batch.lane);
        if batch.serial != next {
            return Err(BatchReply::Gap { next });
        }
        if self.tables.clients.get(&node) != Some(&boot) {
            self.forget_lanes(node);
            self.tables.clients.insert(node, boot);
        }
        Ok(())
    }

    fn forget_lanes(&mut self, node: NodeId) {
        let lanes = self.tables.lanes.range((node, 0)..=(node, u16::MAX), usize::MAX, |_| true);
        let lanes: Vec<(NodeId, u16)> = lanes.into_iter().map(|(key, _)| *key).collect();
        for lane in lanes {
            self.tables.lanes.remove(&lane);
        }
    }

    /// The answer a batch would get if it has been applied already: lets a node answer its own
    /// callers after it caught up by a snapshot.
    pub fn remembered(&self, client: ClientId, lane: u16, serial: u64) -> Option<BatchReply> {
        let boot = *self.tables.clients.get(&client.node)?;
        if client.boot < boot {
            return Some(BatchReply::Superseded { boot });
        }
        let lane = self.tables.lanes.get(&(client.node, lane)).filter(|_| client.boot == boot)?;
        match serial.checked_add(1)? {
            after if after == lane.next => Some(BatchReply::Applied(lane.replies.to_vec())),
            after if after < lane.next => Some(BatchReply::Forgotten),
            _ => None,
        }
    }

    /// The serial the lane waits for; 0 for an unknown client or an older boot's.
    pub fn next_serial(&self, client: ClientId, lane: u16) -> u64 {
        let known = self.tables.clients.get(&client.node) == Some(&client.boot);
        let lane = self.tables.lanes.get(&(client.node, lane)).filter(|_| known);
        lane.map_or(0, |lane| lane.next)
    }

    /// Removes what has ended, a bounded number of each kind. What has ended counts as absent
    /// whether it was removed or not.
    fn sweep(&mut self, effects: &mut Vec<Effect>) {
        self.sweep_rows(effects);
        self.sweep_seen();
        self.sweep_keyed();
    }

    /// Runs one command.
    pub(super) fn run(&mut self, command: &Command, effects: &mut Vec<Effect>) -> Reply {
        match command {
            Command::Noop => Reply::Done,
            Command::OpenSession { prefix, kind, replica, node, lease_ms } => {
                self.open_session(prefix, *kind, replica, *node, *lease_ms, effects)
            }
            Command::RenewSession { session, seq } => self.renew_session(*session, *seq, effects),
            Command::CloseSession { session } => {
                self.end_if_live(*session, EndReason::Closed, effects)
            }
            Command::GiveUpSession { session } => {
                self.end_if_live(*session, EndReason::Expired, effects)
            }
            Command::ExpireSession { session, seq } => self.expire(*session, *seq, effects),
            Command::TakeTicket { session, queue, if_free } => {
                self.take_ticket(*session, queue, *if_free, effects)
            }
            Command::Release { prefix, ticket, session } => {
                self.release(prefix, *ticket, *session, effects)
            }
            Command::ReleaseQueue { queue, session } => {
                self.release_queue(queue, *session, effects)
            }
            Command::AcquireLock { prefix, key, ttl_ms, node } => {
                self.acquire_lock(prefix, key, *ttl_ms, *node, effects)
            }
            Command::RenewLock { prefix, key, token, ttl_ms } => {
                self.renew_lock(prefix, key, *token, *ttl_ms, effects)
            }
            Command::ReleaseLock { prefix, key, token } => {
                self.release_lock(prefix, key, *token, effects)
            }
            Command::Commit { by, ops } => self.commit(by, ops, effects),
            Command::Admit { prefix, session, messages, cursor } => {
                self.admit(prefix, *session, messages, cursor.as_deref(), effects)
            }
            Command::MarkSent { prefix, chat, up_to, session } => {
                self.mark_sent(prefix, chat, *up_to, *session, effects)
            }
            Command::PutTask { prefix, id, due_ms, body } => {
                self.put_task(prefix, id, *due_ms, body, effects)
            }
            Command::ClaimTask { prefix, id, due_ms, session } => {
                self.claim_task(prefix, id, *due_ms, *session, effects)
            }
            Command::FinishTask { prefix, id, due_ms, session, next_ms } => {
                self.finish_task(prefix, id, *due_ms, *session, *next_ms, effects)
            }
            Command::EnsureTask { prefix, id, due_ms, body } => {
                self.ensure_task(prefix, id, *due_ms, body, effects)
            }
            Command::ReturnTask { prefix, id, due_ms, session } => {
                self.return_task(prefix, id, *due_ms, *session, effects)
            }
            Command::Keyed { key, fingerprint, command } => {
                self.keyed(key, fingerprint, command, effects)
            }
            Command::DeadLetter { prefix, ticket, retry } => {
                self.dead_letter(prefix, *ticket, *retry, effects)
            }
            Command::ForProcess { process, command } => {
                self.for_process(*process, command, effects)
            }
            Command::DeclareDead { process } => self.declare_dead(*process, effects),
            Command::RaiseLevel { level } => self.raise_level(*level),
            Command::SetLimits { limits } => self.set_limits(*limits),
            Command::Rekey { prefix, from, to, users, keep_new } => {
                self.rekey(prefix, (from, to), users, *keep_new, effects)
            }
        }
    }

    /// A fence no grant or claim ever had.
    pub(super) fn next_fence(&mut self) -> Fence {
        self.tables.meta.fence += 1;
        Fence(self.tables.meta.fence)
    }

    /// A ticket no queue of the prefix ever had.
    pub(super) fn next_ticket(&mut self, prefix: &Prefix) -> TicketId {
        let record = self.tables.prefixes.get_mut(prefix).expect("interned before it is used");
        record.tickets += 1;
        TicketId(record.tickets)
    }

    /// The number of a prefix that has been used before.
    pub(super) fn prefix_id(&self, prefix: &Prefix) -> Option<PrefixId> {
        self.tables.prefixes.get(prefix).map(|record| record.id)
    }

    /// Whether a prefix is known or may still be added.
    pub(super) fn check_prefix(&self, prefix: &Prefix) -> Result<(), Limit> {
        let full = self.tables.prefixes.len() >= u64::from(self.tables.meta.limits.prefixes_max);
        if full && !self.tables.prefixes.contains(prefix) {
            return Err(Limit::Prefixes);
        }
        Ok(())
    }

    /// The number of a prefix, which gets one where it is new.
    pub(super) fn intern(&mut self, prefix: &Prefix) -> Result<PrefixId, Limit> {
        self.check_prefix(prefix)?;
        if let Some(id) = self.prefix_id(prefix) {
            return Ok(id);
        }
        let id = PrefixId(u32::try_from(self.tables.prefixes.len()).map_err(|_| Limit::Prefixes)?);
        self.tables.prefixes.insert(prefix.clone(), PrefixRecord { id, tickets: 0 });
        Ok(id)
    }
}

/// Refuses keys nobody may store.
pub(super) fn check_key(key: &str) -> Result<(), Limit> {
    if key.len() > KEY_BYTES_MAX { Err(Limit::KeyBytes) } else { Ok(()) }
}

/// Refuses values nobody may store.
pub(super) fn check_value(value: &[u8]) -> Result<(), Limit> {
    if value.len() > VALUE_BYTES_MAX { Err(Limit::ValueBytes) } else { Ok(()) }
}
