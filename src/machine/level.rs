//! Which programs understand a command (SPEC M5, case r19).
//!
//! Problem: while a group is upgraded node by node, its programs do not know the same commands, and
//! one that meets a committed entry it does not know can only halt: to pass it over would make its
//! state another one. Idea: commands have a *level*, the number of the program that knew them first.
//! A group has an agreed level, which is part of the state: nobody proposes a command above it. It is
//! raised by an entry of its own ([`Command::RaiseLevel`]), which a leader proposes once every voter
//! has announced that its program knows that level; from then on it stays, whoever leads and whoever
//! is down, and a node that comes back with an older program than that halts at the first entry it
//! does not know, if not before.
//!
//! Invariants:
//! * Whoever adds a variant to [`Command`] or [`Op`] has to give it a level here: the matches are
//!   exhaustive. A new variant, or a new table of the state, needs a level above those of programs
//!   that are in use: raise [`LEVEL`].
//! * The agreed level never falls.

use super::{Batch, Command, Op, Reply};
use crate::machine::Machine;

/// What a program understands that says nothing of its level.
pub const LEVEL_LOWEST: u32 = 1;

/// What this program understands.
///
/// | level | what came |
/// |---|---|
/// | 1 | sessions, queues, locks, commits, journal, outbox, tasks, keys, processes; tables to 18 |
/// | 2 | `EnsureTask`, `ReturnTask`, `Rekey`, `GiveUpSession`, `RaiseLevel`; `Op::Keep`, `Op::Home`; tables 19, 21, 22 |
/// | 3 | `SetLimits` |
/// | 4 | a session with many turns ends in slices; table 23 |
pub const LEVEL: u32 = 4;

/// From this level on, a session that has much ends in slices.
pub(super) const LEVEL_SLICES: u32 = 4;

impl Command {
    /// The lowest level of a program that understands it, with all it carries.
    pub fn level(&self) -> u32 {
        match self {
            Self::Noop
            | Self::OpenSession { .. }
            | Self::RenewSession { .. }
            | Self::CloseSession { .. }
            | Self::ExpireSession { .. }
            | Self::TakeTicket { .. }
            | Self::Release { .. }
            | Self::ReleaseQueue { .. }
            | Self::AcquireLock { .. }
            | Self::RenewLock { .. }
            | Self::ReleaseLock { .. }
            | Self::MarkSent { .. }
            | Self::PutTask { .. }
            | Self::ClaimTask { .. }
            | Self::FinishTask { .. }
            | Self::DeadLetter { .. }
            | Self::DeclareDead { .. } => 1,
            Self::Commit { ops, .. } => ops.iter().map(Op::level).max().unwrap_or(1),
            Self::Admit { cursor, .. } => cursor.as_deref().map_or(1, Self::level),
            Self::Keyed { command, .. } | Self::ForProcess { command, .. } => command.level(),
            Self::EnsureTask { .. }
            | Self::ReturnTask { .. }
            | Self::Rekey { .. }
            | Self::GiveUpSession { .. } => 2,
            // Whoever does not know that level had better halt before it meets one of its commands.
            Self::RaiseLevel { level } => (*level).max(2),
            Self::SetLimits { .. } => 3,
        }
    }
}

impl Op {
    /// As [`Command::level`].
    pub fn level(&self) -> u32 {
        match self {
            Self::Put { .. }
            | Self::Delete { .. }
            | Self::Acknowledge { .. }
            | Self::Send { .. }
            | Self::Release { .. }
            | Self::Post { .. } => 1,
            Self::Keep { .. } | Self::Home { .. } => 2,
        }
    }
}

impl Batch {
    /// As [`Command::level`], of all its commands.
    pub fn level(&self) -> u32 {
        self.commands.iter().map(Command::level).max().unwrap_or(LEVEL_LOWEST)
    }
}

impl Machine {
    /// The agreed level: up to it, commands may be proposed.
    pub fn level(&self) -> u32 {
        self.tables.level()
    }

    pub(super) fn raise_level(&mut self, level: u32) -> Reply {
        if level > self.level() {
            self.tables.levels.insert((), level);
        }
        Reply::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::tables::Tables;
    use crate::machine::{Authority, LoadError};
    use crate::types::{Fence, Prefix, TicketId};

    /// A new table needs a higher level, as a new command does: an older program refuses its records.
    #[test]
    fn m5_every_table_is_counted_in_the_level() {
        let known: Vec<u8> = (1..=19).chain([21, 22, 23]).collect();
        assert_eq!(
            (Tables::TAGS, LEVEL),
            (&known[..], 4),
            "list it under its level, and raise that"
        );
    }

    #[test]
    fn m5_a_command_needs_what_it_carries() {
        let prefix = Prefix::new("p").unwrap();
        let keep = Op::Keep { prefix: prefix.clone(), ticket: TicketId(1), said: 0 };
        let release = Op::Release { prefix, ticket: TicketId(1) };
        let commit = |ops| Command::Commit { by: Authority::Nobody, ops };
        assert_eq!(commit(vec![release.clone()]).level(), 1);
        assert_eq!(commit(vec![release, keep]).level(), 2);
        let process = crate::types::ProcessToken(1);
        let wrapped = |command| Command::ForProcess { process, command: Box::new(command) };
        assert_eq!(wrapped(Command::Noop).level(), 1);
        assert_eq!(wrapped(Command::RaiseLevel { level: 7 }).level(), 7);
    }

    #[test]
    fn m5_a_level_only_rises_and_is_part_of_the_state() {
        let mut machine = Machine::new(crate::machine::Limits::default());
        let before = machine.freeze().records().count();
        assert_eq!(machine.level(), LEVEL_LOWEST);
        machine.raise_level(LEVEL_LOWEST);
        assert_eq!(
            machine.freeze().records().count(),
            before,
            "as it was before there were levels"
        );
        machine.raise_level(2);
        machine.raise_level(1);
        assert_eq!(machine.level(), 2);
        let records: Vec<_> = machine.freeze().records().collect();
        // Format 1 for ever.
        assert_eq!(records.last(), Some(&(vec![22], vec![2])));
        assert_eq!(crate::machine::stored::encode(&Command::RaiseLevel { level: 2 }), [25, 2]);
        assert_eq!(Machine::from_records(records).unwrap().level(), 2);
        assert_eq!(machine.next_fence(), Fence(1), "no counter moved");
    }

    /// What a newer program wrote is not taken for damage.
    #[test]
    fn m5_a_newer_state_is_told_from_a_damaged_one() {
        let mut machine = Machine::new(crate::machine::Limits::default());
        machine.raise_level(LEVEL + 1);
        let mut records: Vec<_> = machine.freeze().records().collect();
        let load = |records: &[_]| Machine::from_records(records.to_vec());
        assert!(matches!(load(&records), Err(LoadError::Newer(_))));
        // Also where a record does not decode, as one of a newer form would not.
        records.insert(1, (vec![5, 1], vec![]));
        assert!(matches!(load(&records), Err(LoadError::Newer(_))));
        records.pop();
        assert!(matches!(load(&records), Err(LoadError::Corrupt(_))));
        records.remove(1);
        records.push((vec![200], vec![]));
        assert!(matches!(load(&records), Err(LoadError::Newer(_))));
    }
}
