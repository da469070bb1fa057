//! Processes: what is certain to die together, and the certainty that it did.
//!
//! Problem: a session that goes silent may belong to a slow process or to a dead one, so its chats
//! wait for a lease. But sometimes somebody *knows*: a parent that waited for the process, or the
//! next process on its data directory, which got the lock that the dead one held. Idea: sessions
//! carry the token of their process, and a report of its death is a command. It takes no clock and
//! no guess; what it costs to lose one is a lease.
//!
//! A report may be applied before the opening of the session it is about: the dead process's last
//! proposal can come late. So a token stays dead: openings under it are refused. Of those, a
//! bounded number is remembered, the oldest forgotten first; an opening that comes after so many
//! deaths would be an entry that was under way for hours, and its session ends with its lease.

use super::state::Machine;
use super::{Command, Effect, EndReason, Reply};
use crate::types::{Incarnation, ProcessToken};

/// Dead processes remembered. Not one of the stored limits, whose form is fixed; another number
/// needs a new format version, as every node must forget alike.
const DEAD_MAX: usize = if cfg!(test) { 3 } else { 4_096 };

impl Machine {
    pub(super) fn for_process(
        &mut self,
        process: ProcessToken,
        command: &Command,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        // Only an opening makes a session: an answer remembered from before names another's.
        if !matches!(command, Command::OpenSession { .. }) {
            return self.run(command, effects);
        }
        if self.index.dead_processes.contains_key(&process) {
            return Reply::SessionExpired;
        }
        let reply = self.run(command, effects);
        if let Reply::Session { session, .. } = &reply {
            self.tables.processes.insert(*session, process);
            self.index.processes.entry(process).or_default().insert(*session);
        }
        reply
    }

    pub(super) fn declare_dead(
        &mut self,
        process: ProcessToken,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        if self.index.dead_processes.contains_key(&process) {
            return Reply::Done;
        }
        let sessions = self.index.processes.get(&process).into_iter().flatten();
        let sessions: Vec<Incarnation> = sessions.copied().collect();
        self.end_sessions(&sessions, EndReason::Dead, effects);

        // The newest is never forgotten, so numbers only grow.
        let number = self.index.deaths.last_key_value().map_or(0, |(number, _)| number + 1);
        self.tables.dead_processes.insert(number, process);
        self.index.deaths.insert(number, process);
        self.index.dead_processes.insert(process, number);
        while self.index.deaths.len() > DEAD_MAX {
            if let Some((number, process)) = self.index.deaths.pop_first() {
                self.tables.dead_processes.remove(&number);
                self.index.dead_processes.remove(&process);
            }
        }
        Reply::Done
    }

    /// A session has ended: its process has one less.
    pub(super) fn forget_process_of(&mut self, session: Incarnation) {
        let Some(process) = self.tables.processes.remove(&session) else { return };
        if let Some(sessions) = self.index.processes.get_mut(&process) {
            sessions.remove(&session);
            if sessions.is_empty() {
                self.index.processes.remove(&process);
            }
        }
    }

    /// The process a live session belongs to, where it named one.
    pub fn process_of(&self, session: Incarnation) -> Option<ProcessToken> {
        self.tables.processes.get(&session).copied()
    }

    /// How many live sessions a process has.
    pub fn sessions_of(&self, process: ProcessToken) -> usize {
        self.index.processes.get(&process).map_or(0, |sessions| sessions.len())
    }

    /// Whether a process is known to be dead.
    pub fn is_dead(&self, process: ProcessToken) -> bool {
        self.index.dead_processes.contains_key(&process)
    }

    /// What must hold of processes.
    pub(super) fn check_processes(&self) {
        for (session, process) in self.tables.processes.iter() {
            assert!(self.tables.sessions.contains(session), "{session} of {process} lives");
            assert!(!self.is_dead(*process), "{session} does not outlive its process");
        }
        assert!(self.tables.dead_processes.len() <= DEAD_MAX as u64);
        assert_eq!(self.index.dead_processes.len(), self.index.deaths.len(), "each died once");
    }
}
