//! The group of nodes: log, machine, snapshots, transport, membership.

mod attend;
mod barrier;
mod bootstrap;
mod bounds;
mod campaign;
mod cluster;
mod compaction;
mod error;
mod files;
mod group_time;
mod hooks;
mod identity;
mod lanes;
mod levels;
mod log_store;
mod marker;
mod member;
mod membership;
mod network;
mod node;
mod options;
mod peers;
mod process;
mod proposals;
mod room;
mod runtime;
mod secret;
mod server;
mod session_clock;
mod settings;
#[cfg(feature = "test-util")]
pub(crate) mod simulated;
mod snapshot;
mod state_store;
mod status;
mod suspect;
mod types;
mod watch;
mod way;
mod wire;

pub use cluster::{
    DeathAnswer, DeathReport, JoinAnswer, JoinRequest, LeaveAnswer, LeaveRequest, Problem,
    YieldAnswer, YieldRequest,
};
pub use error::NodeError;
pub use files::OpenError;
pub use hooks::ApplyHook;
pub use identity::{Boot, DataDir, Identity, KnownPeer, RestoredDirectory};
pub use node::Node;
pub use options::{NodeLimits, NodeOptions, Start, Timing};
pub use secret::{Secret, SecretError};
pub use status::{
    LeadStatus, NodeStatus, Readiness, Role, SessionStatus, StateMark, Status, TurnCounts,
};
pub use types::Peer;
