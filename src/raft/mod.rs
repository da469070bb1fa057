//! The group of nodes: log, machine, snapshots, transport, membership.

mod hooks;
mod options;
mod secret;
mod status;
mod types;

pub use hooks::ApplyHook;
pub use options::{NodeLimits, NodeOptions, Start, Timing};
pub use secret::{Secret, SecretError};
pub use status::{
    LeadStatus, NodeStatus, Readiness, Role, SessionStatus, StateMark, Status, TurnCounts,
};
pub use types::Peer;
