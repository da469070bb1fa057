//! A child that does not outlive its parent.
//!
//! `kill -9` of the parent runs no code of the parent, so the child has to see to it: it asks the
//! kernel for SIGKILL at the parent's death. Between the parent's `spawn` and that request the
//! parent may already have died, in which case no signal ever comes; comparing the parent's pid
//! with the one passed at spawn closes that gap (comparing with 1 would not: under a subreaper an
//! orphan's new parent is somebody else).

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// The variable in which a parent passes its pid to its child.
pub const PARENT_VARIABLE: &str = "BOTMESH__PARENT";

/// Why the child must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrphanError {
    /// The parent has ended already.
    #[error("the parent process {parent} has ended; start again with `botmesh up`")]
    ParentGone {
        /// Its pid.
        parent: String,
    },
    /// The kernel refused.
    #[error("cannot tie this process to its parent: {why}")]
    Refused {
        /// The system's word.
        why: String,
    },
}

/// Ties this process's life to its parent's, if a parent asked for it. To be called first thing.
pub fn die_with_parent() -> Result<(), OrphanError> {
    match std::env::var(PARENT_VARIABLE) {
        Ok(parent) => tie(&parent),
        Err(_) => Ok(()),
    }
}

fn tie(parent: &str) -> Result<(), OrphanError> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| OrphanError::Refused { why: error.to_string() })?;
    let expected = parent.parse().ok().and_then(Pid::from_raw);
    if expected.is_none() || getppid() != expected {
        return Err(OrphanError::ParentGone { parent: parent.to_owned() });
    }
    Ok(())
}
