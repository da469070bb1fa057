//! The group's bounds: what its nodes were told, agreed by the log (SPEC G1, M3).
//!
//! Problem: the machine's bounds decide what an apply does, so they must be the same on all nodes at
//! every entry, and yet an operator wants to set them. Idea: a machine begins with the default ones,
//! and whoever leads proposes those it was started with, where they are others. Nodes that were told
//! different bounds follow whichever of them leads, and say so.

use std::sync::Arc;
use std::time::Duration;

use super::Role;
use super::member::Member;
use crate::group::ExecuteError;
use crate::machine::{Command, Limits};

/// How often it is looked whether they are agreed.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long agreeing may take before it is tried anew.
const AGREE_WITHIN: Duration = Duration::from_secs(2);
/// Looks, one after another, at which a follower was told other bounds than hold, before it says so:
/// a leader that was told the same has agreed on them by then.
const LOOKS: u32 = 40;

/// While this node leads: has the group agree on these bounds.
pub(crate) async fn tend(member: Arc<Member>, told: Limits) {
    let (mut differed, mut said) = (0_u32, false);
    let command = Command::SetLimits { limits: told };
    loop {
        let held = member.state.read(|machine| *machine.limits());
        if held == told {
            (differed, said) = (0, false);
        } else if member.role() == Role::Leader {
            if let Err(error) = agree(&member, &command).await
                && !std::mem::replace(&mut said, true)
            {
                tracing::warn!(%error, "the bounds this node was started with do not hold yet");
            }
        } else if member.command_level() >= command.level() {
            differed = differed.saturating_add(1);
            if differed >= LOOKS && !std::mem::replace(&mut said, true) {
                tracing::warn!(
                    "the group's bounds are not those this node was started with; start all nodes \
                     with the same dedupe_window and dedupe_ids (bounds of the library: \
                     NodeOptions::machine)"
                );
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn agree(member: &Member, command: &Command) -> Result<(), ExecuteError> {
    let deadline = member.clock.now() + AGREE_WITHIN;
    // A voter with an older program holds them back, and is named there.
    member.is_understood(command, deadline).await.map_err(ExecuteError::NotExecuted)?;
    // Another may lead by now, and have been told others.
    if member.role() == Role::Leader {
        let hindrance = || member.hindrance();
        member.proposals.execute(command.clone(), None, deadline, hindrance).await?;
        tracing::info!(bounds = ?command, "the group keeps these bounds from now on");
    }
    Ok(())
}
