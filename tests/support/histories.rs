//! Histories of single keys, taken by the clients of [`super::workload`] and judged by what is right
//! for their kind.

use super::api::Api;
use super::linearize::{Call, Verdict};
use super::models::{CheckpointCall, LockCall, check_checkpoint, check_lock, check_turns};
use super::turnlog::{Held, faults};
use super::workload::{self, Size, TurnHistory};

/// The calls of one key.
pub enum History {
    /// Of a checkpoint.
    Checkpoint(Vec<CheckpointCall>),
    /// Of a lock.
    Lock(Vec<LockCall>),
    /// Of a chat's turns.
    Turns(TurnHistory),
}

impl History {
    /// Takes the history of that number: a third of each kind. Turns have a size of their own.
    pub async fn take(api: &Api, name: &str, number: u64, (size, turns): (Size, Size)) -> Self {
        // A prefix holds a bounded number of idempotency keys, so each hundred has its own.
        let prefix = format!("{name}-{}", number / 100);
        let key = format!("demo:k{number}");
        match number % 3 {
            0 => Self::Checkpoint(workload::checkpoints(api, &prefix, &key, number, size).await),
            1 => Self::Lock(workload::locks(api, &prefix, &key, number, size).await),
            _ => Self::Turns(workload::turns(api, &prefix, &key, number, turns).await),
        }
    }

    /// How many calls.
    pub fn len(&self) -> usize {
        match self {
            Self::Checkpoint(calls) => calls.len(),
            Self::Lock(calls) => calls.len(),
            Self::Turns(taken) => taken.calls.len(),
        }
    }

    /// How many of them were never answered.
    pub fn unknown(&self) -> usize {
        fn count<Op, Answer>(calls: &[Call<Op, Answer>]) -> usize {
            calls.iter().filter(|call| call.answer.is_none()).count()
        }
        match self {
            Self::Checkpoint(calls) => count(calls),
            Self::Lock(calls) => count(calls),
            Self::Turns(taken) => count(&taken.calls),
        }
    }

    /// The turns that were held.
    pub fn turns(&self) -> &[Held] {
        match self {
            Self::Checkpoint(_) | Self::Lock(_) => &[],
            Self::Turns(taken) => &taken.log,
        }
    }

    /// What is wrong with it.
    pub fn fault(&self) -> Option<String> {
        let verdict = match self {
            Self::Checkpoint(calls) => check_checkpoint(calls),
            Self::Lock(calls) => check_lock(calls),
            Self::Turns(taken) => check_turns(&taken.calls),
        };
        match verdict {
            Verdict::Linearizable => {}
            Verdict::Refuted(text) => return Some(text),
            Verdict::GaveUp { visited } => return Some(format!("gave up after {visited}")),
        }
        let faults = faults(self.turns());
        (!faults.is_empty()).then(|| format!("{faults:?}"))
    }
}
