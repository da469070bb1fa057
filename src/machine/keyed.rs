//! Callers' idempotency keys: one run for one key, through whichever node it comes (SPEC K6).
//!
//! Definite answers are remembered, refusals too. An answer that a bound was met is not: nothing was
//! done, and the same call may succeed later. Keys end with time and never early; when a prefix has
//! no room, new keys are refused.

use std::sync::Arc;

use super::apply::{SWEEP_MAX, check_key};
use super::state::Machine;
use super::tables::{KeyedReply, PrefixId};
use super::{Command, Effect, IdempotencyKey, Limit, Reply};

impl Machine {
    pub(super) fn keyed(
        &mut self,
        key: &IdempotencyKey,
        fingerprint: &[u8; 16],
        command: &Command,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if let Some(known) = self.tables.keyed.get(key) {
            if !self.has_ended(Some(known.expires_ms)) {
                return match known.fingerprint == *fingerprint {
                    true => Reply::clone(&known.reply),
                    false => Reply::KeyReused,
                };
            }
            let ended = self.tables.keyed.get_key(key).cloned();
            ended.into_iter().for_each(|key| self.forget_key(&key));
        }
        let prefix = match self.check_room(key) {
            Ok(prefix) => prefix,
            Err(limit) => return Reply::Full(limit),
        };
        // A key inside a key would be remembered twice; the outer one is what the caller sent.
        let mut command = command;
        while let Command::Keyed { command: inner, .. } = command {
            command = inner;
        }
        let reply = self.run(command, effects);
        if !matches!(reply, Reply::Full(_)) {
            self.remember_key(prefix, key, fingerprint, &reply);
        }
        reply
    }

    fn check_room(&mut self, key: &IdempotencyKey) -> Result<PrefixId, Limit> {
        check_key(&key.key)?;
        let prefix = self.intern(&key.prefix)?;
        let count = self.index.keyed_counts.get(&prefix).copied().unwrap_or(0);
        let max = u64::from(self.tables.meta.limits.idempotency_keys_max);
        if count >= max { Err(Limit::IdempotencyKeys) } else { Ok(prefix) }
    }

    fn remember_key(
        &mut self,
        prefix: PrefixId,
        key: &IdempotencyKey,
        fingerprint: &[u8; 16],
        reply: &Reply,
    ) {
        let meta = &self.tables.meta;
        let expires_ms = meta.now_ms.saturating_add(meta.limits.idempotency_ms);
        let (key, reply) = (Arc::new(key.clone()), Arc::new(reply.clone()));
        let record = KeyedReply { fingerprint: *fingerprint, reply, expires_ms };
        self.index.keyed_ends.insert((expires_ms, key.clone()));
        *self.index.keyed_counts.entry(prefix).or_default() += 1;
        self.tables.keyed.insert(key, record);
    }

    fn forget_key(&mut self, key: &Arc<IdempotencyKey>) {
        let Some(record) = self.tables.keyed.remove(key) else { return };
        self.index.keyed_ends.remove(&(record.expires_ms, key.clone()));
        let prefix = self.prefix_id(&key.prefix).expect("interned when the key was remembered");
        if let Some(count) = self.index.keyed_counts.get_mut(&prefix) {
            *count -= 1;
            if *count == 0 {
                self.index.keyed_counts.remove(&prefix);
            }
        }
    }

    pub(super) fn sweep_keyed(&mut self) {
        for _ in 0..SWEEP_MAX {
            let Some((expires_ms, key)) = self.index.keyed_ends.first().cloned() else { return };
            if !self.has_ended(Some(expires_ms)) {
                return;
            }
            self.forget_key(&key);
        }
    }
}
