//! How the state store tells its node what an apply did.

use crate::machine::{Batch, BatchReply, Effect, Machine};

/// Called by the state store, in log order, after the machine has applied and before anybody else
/// can read the new state's successors. Short and without waiting: applies wait meanwhile.
pub trait ApplyHook: Send + Sync + std::fmt::Debug + 'static {
    /// One entry was applied: its callers are answered and its effects handed out.
    fn applied(&self, index: u64, batch: &Batch, reply: BatchReply, effects: Vec<Effect>);

    /// The state was replaced by a snapshot, or loaded at the start: nobody knows what was missed,
    /// so everything that hangs on it is looked at again.
    fn installed(&self, machine: &Machine);
}
