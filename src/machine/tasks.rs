//! Scheduled tasks: each occurrence is claimed by one session at a time (SPEC G4).
//!
//! An occurrence is a task at a due instant. Whoever claims it runs it and finishes it, which sets
//! the next one; the end of the claimer's session frees it to be claimed again.

use super::Reply;
use super::apply::{check_key, check_value};
use super::state::Machine;
use super::tables::{Payload, PrefixId, Task, TaskKey};
use crate::types::{Fence, Incarnation, Prefix};

impl Machine {
    pub(super) fn put_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        body: &[u8],
    ) -> Reply {
        let checked = check_key(id).and_then(|()| check_value(body));
        let prefix = match checked.and_then(|()| self.intern(prefix)) {
            Ok(prefix) => prefix,
            Err(limit) => return Reply::Full(limit),
        };
        let key = TaskKey { prefix, id: id.to_owned() };
        let mut task = match self.tables.tasks.get(&key) {
            Some(task) if task.claimed_by.is_some() => return Reply::Stale,
            Some(task) => task.clone(),
            None => {
                let body = Payload(body.into());
                Task { due_ms, body, claimed_by: None, fence: Fence(0), attempt: 0 }
            }
        };
        self.index.due.remove(&(prefix, task.due_ms, key.clone()));
        if task.due_ms != due_ms {
            task.due_ms = due_ms;
            task.attempt = 0;
        }
        task.body = Payload(body.into());
        self.set_task(prefix, key, task);
        Reply::Done
    }

    pub(super) fn claim_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        session: Incarnation,
    ) -> Reply {
        let Some(prefix) = self.acting(session, prefix) else { return Reply::SessionExpired };
        let key = TaskKey { prefix, id: id.to_owned() };
        let task = self.tables.tasks.get(&key);
        if task.is_none_or(|task| task.due_ms != due_ms || task.claimed_by.is_some()) {
            return Reply::Stale;
        }
        let fence = self.next_fence();
        let task = self.tables.tasks.get_mut(&key).expect("it was there above");
        task.claimed_by = Some(session);
        task.fence = fence;
        task.attempt = task.attempt.saturating_add(1);
        let attempt = task.attempt;
        if let Some(holdings) = self.index.holdings.get_mut(&session) {
            holdings.claims.insert(key);
        }
        Reply::Claimed { fence, attempt }
    }

    pub(super) fn finish_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        next_ms: Option<u64>,
    ) -> Reply {
        let Some(prefix) = self.acting(session, prefix) else { return Reply::SessionExpired };
        let key = TaskKey { prefix, id: id.to_owned() };
        let task = self.tables.tasks.get(&key);
        let ours = |task: &&Task| task.due_ms == due_ms && task.claimed_by == Some(session);
        let Some(mut task) = task.filter(ours).cloned() else { return Reply::Stale };
        if let Some(holdings) = self.index.holdings.get_mut(&session) {
            holdings.claims.remove(&key);
        }
        self.index.due.remove(&(prefix, due_ms, key.clone()));
        match next_ms {
            Some(next_ms) => {
                (task.due_ms, task.claimed_by, task.attempt) = (next_ms, None, 0);
                self.set_task(prefix, key, task);
            }
            None => drop(self.tables.tasks.remove(&key)),
        }
        Reply::Done
    }

    fn set_task(&mut self, prefix: PrefixId, key: TaskKey, task: Task) {
        self.index.due.insert((prefix, task.due_ms, key.clone()));
        self.tables.tasks.insert(key, task);
    }
}
