//! How the state store tells its node what an apply did.

use std::sync::Arc;

use super::proposals::Proposals;
use super::session_clock::SessionClock;
use crate::group::Wakeups;
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

/// What the state store calls.
#[derive(Debug)]
pub(super) struct Hook {
    pub(super) proposals: Arc<Proposals>,
    pub(super) sessions: Arc<SessionClock>,
    pub(super) wakeups: Wakeups,
    #[cfg(feature = "test-util")]
    pub(super) simulated: Option<super::simulated::Place>,
}

impl ApplyHook for Hook {
    #[cfg_attr(not(feature = "test-util"), expect(unused_variables))]
    fn applied(&self, index: u64, batch: &Batch, reply: BatchReply, effects: Vec<Effect>) {
        #[cfg(feature = "test-util")]
        if let Some(place) = &self.simulated {
            place.applied(index, batch, &reply, &effects);
        }
        self.sessions.observe(&effects);
        // Effects first: who is answered may look for them at once.
        self.wakeups.dispatch(effects);
        self.proposals.landed(batch, reply);
    }

    fn installed(&self, machine: &Machine) {
        #[cfg(feature = "test-util")]
        if let Some(place) = &self.simulated {
            place.installed();
        }
        self.sessions.rearm(machine);
        self.proposals.installed(machine);
        self.wakeups.raise_all();
    }
}
