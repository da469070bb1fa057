//! Why a node does not run.

use super::OpenError;
use crate::supervise::OrphanError;

/// Why a node did not open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// A name or an address is not acceptable.
    #[error("{0}")]
    Options(String),
    /// The data directory cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The directory belongs to no member.
    #[error(
        "{dir} belongs to no member of a group; found one with --bootstrap, join one with --join \
         HOST:PORT, or start replicas together with --bootstrap-expect N --peers A,B,C"
    )]
    NotAMember {
        /// The directory.
        dir: String,
    },
    /// The parent that started this process has ended.
    #[error(transparent)]
    Orphan(#[from] OrphanError),
    /// Raft did not start.
    #[error("starting Raft failed: {0}")]
    Raft(String),
    /// It has to be started as a newer version.
    #[error("{why}")]
    Halted {
        /// What it met, and what to do.
        why: String,
    },
    /// It did not become a member in time.
    #[error("this node belongs to no group yet: {why}")]
    NotJoined {
        /// What it waits for.
        why: String,
    },
}
