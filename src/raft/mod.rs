//! The group of nodes: log, machine, snapshots, transport, membership.

mod types;

pub use types::Peer;
