//! Scheduled tasks: each occurrence is claimed by one session at a time (SPEC G4).
//!
//! An occurrence is a task at a due instant. Whoever claims it runs it and finishes it, which sets
//! the next one; what fails is given back, and the end of the claimer's session frees it too, to be
//! claimed again with one attempt more. When an occurrence is due is judged by machine time, which
//! all nodes agree on (DESIGN 9); what an occurrence *is* (an interval, cron in a zone) is its
//! owner's business.

use super::apply::{check_key, check_value};
use super::state::Machine;
use super::tables::{Payload, PrefixId, Task, TaskKey};
use super::{Effect, Reply};
use crate::types::{Fence, Incarnation, Prefix};

impl Machine {
    pub(super) fn put_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        body: &[u8],
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let checked = check_key(id).and_then(|()| check_value(body));
        let prefix_id = match checked.and_then(|()| self.intern(prefix)) {
            Ok(prefix) => prefix,
            Err(limit) => return Reply::Full(limit),
        };
        let key = TaskKey { prefix: prefix_id, id: id.to_owned() };
        let mut task = match self.tables.tasks.get(&key) {
            Some(task) if task.claimed_by.is_some() => return Reply::Stale,
            Some(task) => task.clone(),
            None => {
                let body = Payload(body.into());
                Task { due_ms, body, claimed_by: None, fence: Fence(0), attempt: 0 }
            }
        };
        self.index.due.remove(&(prefix_id, task.due_ms, key.clone()));
        if task.due_ms != due_ms {
            task.due_ms = due_ms;
            task.attempt = 0;
        }
        task.body = Payload(body.into());
        self.set_task(prefix_id, key, task);
        effects.push(changed(prefix, id));
        Reply::Done
    }

    pub(super) fn ensure_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        body: &[u8],
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let key = self.prefix_id(prefix).map(|prefix| TaskKey { prefix, id: id.to_owned() });
        let task = key.and_then(|key| self.tables.tasks.get(&key));
        match task {
            Some(task) if *task.body.0 == *body => Reply::Done,
            _ => self.put_task(prefix, id, due_ms, body, effects),
        }
    }

    pub(super) fn claim_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let Some(prefix_id) = self.acting(session, prefix) else { return Reply::SessionExpired };
        let key = TaskKey { prefix: prefix_id, id: id.to_owned() };
        let free = |task: &&Task| task.due_ms == due_ms && task.claimed_by.is_none();
        let due = due_ms <= self.tables.meta.now_ms;
        if !due || self.tables.tasks.get(&key).filter(free).is_none() {
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
        effects.push(changed(prefix, id));
        Reply::Claimed { fence, attempt }
    }

    pub(super) fn finish_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        next_ms: Option<u64>,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let Some(prefix_id) = self.acting(session, prefix) else { return Reply::SessionExpired };
        let key = TaskKey { prefix: prefix_id, id: id.to_owned() };
        let Some(mut task) = self.claimed(&key, due_ms, session) else { return Reply::Stale };
        self.unclaim(&key, session);
        self.index.due.remove(&(prefix_id, due_ms, key.clone()));
        match next_ms {
            Some(next_ms) => {
                (task.due_ms, task.claimed_by, task.attempt) = (next_ms, None, 0);
                self.set_task(prefix_id, key, task);
            }
            None => drop(self.tables.tasks.remove(&key)),
        }
        effects.push(changed(prefix, id));
        Reply::Done
    }

    pub(super) fn return_task(
        &mut self,
        prefix: &Prefix,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let Some(prefix_id) = self.acting(session, prefix) else { return Reply::SessionExpired };
        let key = TaskKey { prefix: prefix_id, id: id.to_owned() };
        let Some(task) = self.claimed(&key, due_ms, session) else { return Reply::Stale };
        self.unclaim(&key, session);
        self.tables.tasks.insert(key, Task { claimed_by: None, ..task });
        effects.push(changed(prefix, id));
        Reply::Done
    }

    /// The claims of a session that has ended are free.
    pub(super) fn free_claims(
        &mut self,
        prefix: &Prefix,
        claims: impl IntoIterator<Item = TaskKey>,
        effects: &mut Vec<Effect>,
    ) {
        for key in claims {
            if let Some(task) = self.tables.tasks.get_mut(&key) {
                task.claimed_by = None;
                effects.push(changed(prefix, &key.id));
            }
        }
    }

    /// A copy of the task, if this very occurrence is this session's.
    fn claimed(&self, key: &TaskKey, due_ms: u64, session: Incarnation) -> Option<Task> {
        let ours = |task: &&Task| task.due_ms == due_ms && task.claimed_by == Some(session);
        self.tables.tasks.get(key).filter(ours).cloned()
    }

    fn unclaim(&mut self, key: &TaskKey, session: Incarnation) {
        if let Some(holdings) = self.index.holdings.get_mut(&session) {
            holdings.claims.remove(key);
        }
    }

    fn set_task(&mut self, prefix: PrefixId, key: TaskKey, task: Task) {
        self.index.due.insert((prefix, task.due_ms, key.clone()));
        self.tables.tasks.insert(key, task);
    }
}

fn changed(prefix: &Prefix, id: &str) -> Effect {
    Effect::TaskChanged { prefix: prefix.clone(), id: id.to_owned() }
}
