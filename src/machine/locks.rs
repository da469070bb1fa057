//! Fenced locks: a queue that takes one at a time, and a session per acquisition.
//!
//! The token of a lock is the incarnation of the session its acquisition opened, so a stale token
//! is a dead session's and is refused like one (SPEC F2), and the lock ends as a session does.

use std::sync::Arc;

use super::apply::check_key;
use super::state::Machine;
use super::{Effect, EndReason, QueueKey, QueueKind, Reply, SessionKind};
use crate::types::{Incarnation, NodeId, Prefix};

impl Machine {
    pub(super) fn acquire_lock(
        &mut self,
        prefix: &Prefix,
        key: &str,
        ttl_ms: u64,
        node: NodeId,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if let Err(limit) = check_key(key) {
            return Reply::Full(limit);
        }
        let queue =
            QueueKey { kind: QueueKind::Lock, prefix: prefix.clone(), name: key.to_owned() };
        self.settle(&queue, effects);
        if let Some(holder) = self.holder(&queue) {
            return Reply::Held(holder);
        }
        let ttl_ms = self.lock_ttl(ttl_ms);
        let queue = Arc::new(queue);
        let lock = Some(queue.clone());
        let kind = SessionKind::Lock;
        let token = match self.new_session(prefix, kind, "", node, ttl_ms, lock, effects) {
            Ok(token) => token,
            Err(limit) => return Reply::Full(limit),
        };
        let ticket = self.enqueue(&queue, Some(token), effects);
        let grant = self.live_ticket(ticket).grant.expect("the queue was empty");
        Reply::Lock { token, fence: grant.fence, ttl_ms }
    }

    pub(super) fn renew_lock(
        &mut self,
        prefix: &Prefix,
        key: &str,
        token: Incarnation,
        ttl_ms: u64,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let Some(seq) = self.lock_seq(prefix, key, token) else { return Reply::Stale };
        let (seq, lease_ms) = (seq.saturating_add(1), self.lock_ttl(ttl_ms));
        self.arm(token, seq, lease_ms, effects);
        Reply::Renewed { seq, lease_ms, shared_with: None }
    }

    pub(super) fn release_lock(
        &mut self,
        prefix: &Prefix,
        key: &str,
        token: Incarnation,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if self.lock_seq(prefix, key, token).is_none() {
            return Reply::Stale;
        }
        self.end_session(token, EndReason::Closed, effects);
        Reply::Done
    }

    fn lock_ttl(&self, ttl_ms: u64) -> u64 {
        ttl_ms.clamp(1, self.tables.meta.limits.lease_ms_max.max(1))
    }

    /// The last renewal of a lock, if the token still names its acquisition.
    fn lock_seq(&self, prefix: &Prefix, key: &str, token: Incarnation) -> Option<u64> {
        let session = self.tables.sessions.get(&token)?;
        let lock = session.lock.as_ref()?;
        (lock.prefix == *prefix && lock.name == key).then_some(session.seq)
    }
}
