//! The group of nodes: log, machine, snapshots, transport, membership.

mod files;
mod hooks;
mod identity;
mod log_store;
mod marker;
mod options;
mod secret;
mod snapshot;
mod state_store;
mod status;
mod types;

pub use files::OpenError;
pub use hooks::ApplyHook;
pub use identity::{Boot, DataDir, Identity, KnownPeer, RestoredDirectory};
pub use options::{NodeLimits, NodeOptions, Start, Timing};
pub use secret::{Secret, SecretError};
pub use status::{
    LeadStatus, NodeStatus, Readiness, Role, SessionStatus, StateMark, Status, TurnCounts,
};
pub use types::Peer;
