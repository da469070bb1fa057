//! Which lane a command takes, and how much room it needs in a batch.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::machine::{Authority, Command, Op};

/// The lane of a command. A session's commands share one, so whatever one holder says about a chat
/// keeps its order; commands without a session go by the key they name.
pub(super) fn lane_of(command: &Command, lanes: u16) -> u16 {
    let mut hasher = DefaultHasher::new();
    match command {
        Command::Noop | Command::RaiseLevel { .. } | Command::SetLimits { .. } => {}
        Command::OpenSession { prefix, replica, .. } => (prefix, replica).hash(&mut hasher),
        Command::RenewSession { session, .. }
        | Command::CloseSession { session }
        | Command::GiveUpSession { session }
        | Command::ExpireSession { session, .. }
        | Command::TakeTicket { session, .. }
        | Command::Release { session, .. }
        | Command::ReleaseQueue { session, .. }
        | Command::Admit { session, .. }
        | Command::MarkSent { session, .. }
        | Command::Commit { by: Authority::Holder { session: Some(session), .. }, .. } => {
            session.hash(&mut hasher);
        }
        Command::AcquireLock { prefix, key, .. }
        | Command::RenewLock { prefix, key, .. }
        | Command::ReleaseLock { prefix, key, .. } => (prefix, key).hash(&mut hasher),
        Command::Commit { by: Authority::Holder { queue, session: None, .. }, .. } => {
            (&queue.prefix, &queue.name).hash(&mut hasher);
        }
        Command::Commit { by: Authority::Nobody, ops } => {
            if let Some(op) = ops.first() {
                hash_op(op, &mut hasher);
            }
        }
        Command::PutTask { prefix, id, .. }
        | Command::EnsureTask { prefix, id, .. }
        | Command::ClaimTask { prefix, id, .. }
        | Command::ReturnTask { prefix, id, .. }
        | Command::FinishTask { prefix, id, .. } => (prefix, id).hash(&mut hasher),
        Command::Keyed { command, .. } | Command::ForProcess { command, .. } => {
            return lane_of(command, lanes);
        }
        Command::DeclareDead { process } => process.hash(&mut hasher),
        Command::Rekey { prefix, from, .. } => (prefix, from).hash(&mut hasher),
        Command::DeadLetter { prefix, .. } => prefix.hash(&mut hasher),
    }
    (hasher.finish() % u64::from(lanes)) as u16
}

fn hash_op(op: &Op, hasher: &mut DefaultHasher) {
    match op {
        Op::Put { row, .. } | Op::Delete { row, .. } => (&row.prefix, &row.key).hash(hasher),
        Op::Send { prefix, chat, .. } => (prefix, chat).hash(hasher),
        Op::Post { prefix, message, .. } => (prefix, &message.chat).hash(hasher),
        Op::Home { prefix, channel, .. } => (prefix, channel).hash(hasher),
        Op::Acknowledge { prefix, .. } | Op::Release { prefix, .. } | Op::Keep { prefix, .. } => {
            prefix.hash(hasher);
        }
    }
}

/// About how many bytes a command takes: what can be large is counted, the rest is a guess.
pub(super) fn weight(command: &Command) -> usize {
    const SMALL: usize = 192;
    match command {
        Command::Commit { ops, .. } => SMALL + ops.iter().map(op_weight).sum::<usize>(),
        Command::Admit { messages, cursor, .. } => {
            let messages: usize = messages.iter().map(|one| one.body.len() + SMALL).sum();
            SMALL + messages + cursor.as_deref().map_or(0, weight)
        }
        Command::PutTask { body, .. } | Command::EnsureTask { body, .. } => SMALL + body.len(),
        Command::Keyed { command, .. } | Command::ForProcess { command, .. } => {
            SMALL + weight(command)
        }
        _ => SMALL,
    }
}

fn op_weight(op: &Op) -> usize {
    const SMALL: usize = 96;
    match op {
        Op::Put { row, value, .. } => SMALL + row.key.len() + value.len(),
        Op::Send { chat, send, .. } => SMALL + chat.len() + send.body.len(),
        Op::Post { message, .. } => SMALL + message.body.len(),
        Op::Delete { .. }
        | Op::Acknowledge { .. }
        | Op::Release { .. }
        | Op::Keep { .. }
        | Op::Home { .. } => SMALL,
    }
}
