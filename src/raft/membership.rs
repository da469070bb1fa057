//! Membership: who is taken in, who votes, who leaves.
//!
//! A node is taken in as a learner under an id the log allocates, catches up, and becomes a voter
//! where that keeps the number of voters odd (1, 3, 5): an even number tolerates no more failures
//! than the odd one below it. What is left over stays a learner and fills the next vacancy.
//!
//! Invariants:
//! * Every change is computed on one membership and carries its log id: openraft refuses it where
//!   another came between (DESIGN 2).
//! * One change at a time on a leader ([`Member::change`]); a joint membership that a dead leader
//!   left behind is flattened first.
//! * An id is the index of a committed blank entry, so it is never given twice (SPEC K3).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use openraft::ChangeMembers;
use openraft::Precondition;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, RaftError};

use super::member::{Leader, Member};
use super::peers::REACHABLE;
use super::types::{Peer, StoredMembership};
use crate::machine::LEVEL_LOWEST;
use crate::types::NodeId;

/// The most voters.
const VOTERS_MAX: usize = 5;
/// The most members.
const MEMBERS_MAX: usize = 64;
/// A learner this many entries behind counts as caught up.
const LAG_MAX: u64 = 64;
/// How often the leader looks at its learners while it has any.
const TEND_EVERY: Duration = Duration::from_millis(100);
/// How long one change may take.
const CHANGE_WITHIN: Duration = Duration::from_secs(10);

/// Why a membership request was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum MembershipError {
    /// Ask this node.
    #[error("this node does not lead")]
    NotLeader,
    /// Ids are the group's to give.
    #[error(
        "node id {id} cannot be asked for: ids are allocated by the group and never reused; join without one"
    )]
    IdNotFree {
        /// The id.
        id: NodeId,
    },
    /// No such member.
    #[error("node {id} is no member of the group")]
    UnknownNode {
        /// The id.
        id: NodeId,
    },
    /// It is the last voter.
    #[error(
        "node {id} is the only voter; a group without one cannot decide anything: stop it instead"
    )]
    LastVoter {
        /// The id.
        id: NodeId,
    },
    /// Those that would be left do not answer.
    #[error("without node {id} only {reachable} of {voters} voters answer; bring them back first")]
    WouldLoseQuorum {
        /// The id.
        id: NodeId,
        /// Voters that would be left and answer.
        reachable: usize,
        /// Voters that would be left.
        voters: usize,
    },
    /// The membership is not the one the request was made for.
    #[error(
        "the membership is at log index {found}, the request was made for {expected}; look again"
    )]
    MembershipChanged {
        /// What the request names.
        expected: u64,
        /// What is there.
        found: u64,
    },
    /// Nobody can take over.
    #[error("no other voter answers; leadership stays with node {id}")]
    NoSuccessor {
        /// The leader.
        id: NodeId,
    },
    /// Too many members.
    #[error("the group has {MEMBERS_MAX} members, the most it takes; let one leave first")]
    Full,
    /// It would not understand what the group has decided.
    #[error(
        "the group uses commands of level {needs} and the node's program knows those up to level \
         {knows}: start a newer version of it, and it will be taken in"
    )]
    ProgramTooOld {
        /// The group's level.
        needs: u32,
        /// The applicant's.
        knows: u32,
    },
    /// It was tried and its outcome is open.
    #[error("the change was not confirmed within {within:?}; look at the status and ask again")]
    Unconfirmed {
        /// How long was waited.
        within: Duration,
    },
}

/// Somebody who wants in.
#[derive(Clone, Debug)]
pub(crate) struct Applicant {
    pub(crate) peer: Peer,
    /// An id it asks for, which is refused unless it has it already.
    pub(crate) wanted: Option<NodeId>,
    /// The level of its program, where it says so. One that does not is taken in, and halts where it
    /// does not understand what it is given.
    pub(crate) level: Option<u32>,
}

/// Who was handed leadership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Yielded {
    pub(crate) from: NodeId,
    pub(crate) to: NodeId,
}

/// What a leave led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Left {
    pub(crate) voters: Vec<NodeId>,
    pub(crate) warning: Option<String>,
}

/// The membership in effect, once it is committed and not joint. A joint one that an earlier
/// leader left behind is flattened: its second step died with that leader. The caller holds
/// [`Member::change`], so no change of this leader is half-way.
async fn settled(member: &Member) -> Result<Arc<StoredMembership>, MembershipError> {
    let mut metrics = member.raft.server_metrics();
    let wait = async {
        loop {
            let (leader, effective, committed) = {
                let now = metrics.borrow_and_update();
                let committed = now.membership_config == now.committed_membership_config;
                (now.current_leader, now.membership_config.clone(), committed)
            };
            if leader != Some(member.id()) {
                return Err(MembershipError::NotLeader);
            }
            if committed {
                if effective.membership().get_joint_config().len() == 1 {
                    return Ok(effective);
                }
                let nothing = ChangeMembers::AddVoterIds(BTreeSet::new());
                change(member, &effective, nothing, false).await?;
            } else if metrics.changed().await.is_err() {
                return Err(MembershipError::NotLeader);
            }
        }
    };
    let within = CHANGE_WITHIN;
    tokio::time::timeout(within, wait).await.unwrap_or(Err(MembershipError::Unconfirmed { within }))
}

/// Makes one change on top of `seen`.
async fn change(
    member: &Member,
    seen: &StoredMembership,
    change: ChangeMembers<NodeId, Peer>,
    retain: bool,
) -> Result<(), MembershipError> {
    let on = Precondition::LastMembershipLogId { last_membership_log_id: *seen.log_id() };
    let within = CHANGE_WITHIN;
    let changing = member.raft.change_membership_if(change, retain, [on]);
    match tokio::time::timeout(within, changing).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_)))) => {
            Err(MembershipError::NotLeader)
        }
        Ok(Err(error)) => {
            tracing::warn!(%error, "a membership change failed");
            Err(MembershipError::Unconfirmed { within })
        }
        Err(_) => {
            tracing::warn!(node_id = member.id(), "a membership change is not confirmed");
            Err(MembershipError::Unconfirmed { within })
        }
    }
}

fn voters(membership: &StoredMembership) -> BTreeSet<NodeId> {
    membership.membership().voter_ids().collect()
}

/// Takes a node in as a learner and answers its id. The same nonce gets the same id, and moves the
/// member to a new address where it has one (SPEC K1, K4).
pub(crate) async fn admit(
    member: &Member,
    applicant: Applicant,
) -> Result<NodeId, MembershipError> {
    let _one_at_a_time = member.change.lock().await;
    let seen = settled(member).await?;
    let mut nodes = seen.membership().nodes();
    // Whoever comes in the place of a member is never answered with that member's id (SPEC K3).
    let same = |(id, known): &(&NodeId, &Peer)| {
        known.nonce == applicant.peer.nonce && Some(**id) != applicant.peer.replaces
    };
    if let Some((&id, known)) = nodes.find(same) {
        if applicant.wanted.is_some_and(|wanted| wanted != id) {
            return Err(MembershipError::IdNotFree { id: applicant.wanted.unwrap_or(id) });
        }
        let peer = Peer { replaces: known.replaces, ..applicant.peer };
        if *known != peer {
            tracing::info!(id, %known, now = %peer, "a member has a new name or address");
            let moved = ChangeMembers::SetNodes(BTreeMap::from([(id, peer)]));
            change(member, &seen, moved, true).await?;
        }
        return Ok(id);
    }
    if let Some(id) = applicant.wanted {
        return Err(MembershipError::IdNotFree { id });
    }
    if seen.membership().nodes().count() >= MEMBERS_MAX {
        return Err(MembershipError::Full);
    }
    let needs = member.command_level();
    if let Some(knows) = applicant.level.filter(|knows| *knows < needs) {
        return Err(MembershipError::ProgramTooOld { needs, knows });
    }
    let within = CHANGE_WITHIN;
    let id = match tokio::time::timeout(within, member.raft.write_blank()).await {
        Ok(Ok(written)) => written.log_id.index(),
        Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(_)))) => {
            return Err(MembershipError::NotLeader);
        }
        // The index is lost, which costs nothing.
        Ok(Err(_)) | Err(_) => return Err(MembershipError::Unconfirmed { within }),
    };
    tracing::info!(id, peer = %applicant.peer, "taking a node in");
    let added = ChangeMembers::AddNodes(BTreeMap::from([(id, applicant.peer)]));
    change(member, &seen, added, true).await?;
    Ok(id)
}

/// Lets a member go.
pub(crate) async fn leave(
    member: &Member,
    id: NodeId,
    made_for: Option<u64>,
) -> Result<Left, MembershipError> {
    let _one_at_a_time = member.change.lock().await;
    let seen = settled(member).await?;
    let found = seen.log_id().map_or(0, |at| at.index());
    if let Some(expected) = made_for
        && expected != found
    {
        return Err(MembershipError::MembershipChanged { expected, found });
    }
    if seen.membership().get_node(&id).is_none() {
        return Err(MembershipError::UnknownNode { id });
    }
    let mut left = voters(&seen);
    if !left.remove(&id) {
        change(member, &seen, ChangeMembers::RemoveNodes(BTreeSet::from([id])), false).await?;
        return Ok(Left { voters: left.into_iter().collect(), warning: None });
    }
    if left.is_empty() {
        return Err(MembershipError::LastVoter { id });
    }
    // A caught-up learner takes the place in the same change.
    let substitute = caught_up(member, &seen).into_iter().find(|learner| *learner != id);
    if left.len().is_multiple_of(2) {
        left.extend(substitute);
    }
    let reachable = left.iter().filter(|id| member.peers.heard_within(**id, REACHABLE)).count();
    if reachable <= left.len() / 2 {
        return Err(MembershipError::WouldLoseQuorum { id, reachable, voters: left.len() });
    }
    change(member, &seen, ChangeMembers::ReplaceAllVoters(left.clone()), false).await?;
    let warning = (left.len().is_multiple_of(2)).then(|| {
        format!(
            "{} voters are left, which tolerate {} failures; let another node join",
            left.len(),
            (left.len() - 1) / 2
        )
    });
    Ok(Left { voters: left.into_iter().collect(), warning })
}

/// Hands leadership to `to`, or to the voter that is furthest, and waits until somebody else leads.
pub(crate) async fn yield_leader(
    member: &Member,
    to: Option<NodeId>,
    within: Duration,
) -> Result<Yielded, MembershipError> {
    if member.leader() != Leader::Here {
        return Err(MembershipError::NotLeader);
    }
    let from = member.id();
    let seen = member.membership();
    let others = voters(&seen).into_iter().filter(|id| *id != from);
    let fit: Vec<NodeId> = others.filter(|id| member.peers.heard_within(*id, REACHABLE)).collect();
    let matched = member.data().replication.unwrap_or_default();
    let furthest = fit.iter().max_by_key(|id| matched.get(id).copied().flatten());
    let to = match to {
        Some(to) if !seen.membership().voter_ids().any(|id| id == to) => {
            return Err(MembershipError::UnknownNode { id: to });
        }
        Some(to) if to == from || !fit.contains(&to) => {
            return Err(MembershipError::NoSuccessor { id: from });
        }
        Some(to) => to,
        None => *furthest.ok_or(MembershipError::NoSuccessor { id: from })?,
    };
    tracing::info!(from, to, "handing leadership on");
    let began = member.clock.now();
    while member.clock.now() - began < within {
        if member.raft.trigger().transfer_leader(to).await.is_err() {
            return Err(MembershipError::NotLeader);
        }
        // A successor whose disk does not follow in time drops the request. Meanwhile this node takes
        // no writes, so it asks again, and does not leave it to the election timer.
        let again = member.timing.election_min.min(within);
        if let Ok(led) = tokio::time::timeout(again, succeeded(member)).await {
            let to = led.ok_or(MembershipError::Unconfirmed { within })?;
            return Ok(Yielded { from, to });
        }
    }
    Err(MembershipError::Unconfirmed { within })
}

/// Waits until another leads; `None` where Raft stops before that.
async fn succeeded(member: &Member) -> Option<NodeId> {
    let mut metrics = member.raft.server_metrics();
    loop {
        let leader = metrics.borrow_and_update().current_leader;
        if let Some(leader) = leader.filter(|leader| *leader != member.id()) {
            return Some(leader);
        }
        metrics.changed().await.ok()?;
    }
}

/// Learners that are heard and (nearly) as far as the leader, lowest id first.
fn caught_up(member: &Member, seen: &StoredMembership) -> Vec<NodeId> {
    let data = member.data();
    let last = data.last_log.map_or(0, |id| id.index());
    let matched = data.replication.unwrap_or_default();
    let near = |id: &NodeId| {
        let at = matched.get(id).copied().flatten().map(|id| id.index());
        at.is_some_and(|at| last.saturating_sub(at) <= LAG_MAX)
    };
    // A voter has to understand whatever the group may decide, also by a `RaiseLevel` that is on its
    // way: where there is one, every voter has announced its level.
    let levels = &member.peers.levels;
    let announced = |id| if id == member.id() { Some(levels.own) } else { levels.of(id) };
    let least = seen.membership().voter_ids().filter_map(announced).min();
    let needs = member.command_level().max(least.unwrap_or(LEVEL_LOWEST));
    let understands = |id: &NodeId| levels.of(*id).unwrap_or(LEVEL_LOWEST) >= needs;
    let learners = seen.membership().learner_ids();
    let fit = learners.filter(|id| member.peers.heard_within(*id, REACHABLE) && understands(id));
    fit.filter(near).collect()
}

/// How many of `ready` caught-up learners become voters beside `voters` that are there: as many as
/// make the number odd, and at most five.
fn promotions(voters: usize, ready: usize) -> usize {
    let most = (voters + ready).min(VOTERS_MAX);
    let odd = if most.is_multiple_of(2) { most - 1 } else { most };
    odd.saturating_sub(voters)
}

/// Whether a learner has to wait for another to become a voter.
pub(crate) fn stays_learner(member: &Member, id: NodeId) -> bool {
    let seen = member.membership();
    let ready = caught_up(member, &seen);
    ready.contains(&id) && promotions(voters(&seen).len(), ready.len()) == 0
}

/// While this node leads: finishes what an earlier leader began, makes voters of learners, removes
/// whom a rejoined node replaces.
pub(crate) async fn tend(member: Arc<Member>) {
    let mut metrics = member.raft.server_metrics();
    loop {
        let busy = member.leader() == Leader::Here && {
            let membership = member.membership();
            let membership = membership.membership();
            membership.get_joint_config().len() > 1 || membership.learner_ids().next().is_some()
        };
        if busy {
            if let Err(error) = tend_once(&member).await {
                tracing::debug!(%error, "the membership stays as it is for now");
            }
            tokio::time::sleep(TEND_EVERY).await;
        } else {
            // Leading may begin without a change that is seen here, so this looks again by itself.
            let changed = tokio::time::timeout(Duration::from_secs(1), metrics.changed()).await;
            if matches!(changed, Ok(Err(_))) {
                return;
            }
        }
    }
}

async fn tend_once(member: &Member) -> Result<(), MembershipError> {
    let _one_at_a_time = member.change.lock().await;
    let seen = settled(member).await?;
    let ready = caught_up(member, &seen);
    let mut voting = voters(&seen);
    for &id in &ready {
        let Some(old) = seen.membership().get_node(&id).and_then(|peer| peer.replaces) else {
            continue;
        };
        if voting.remove(&old) {
            tracing::info!(id, old, "a node that came back takes the place of its former self");
            voting.insert(id);
            return change(member, &seen, ChangeMembers::ReplaceAllVoters(voting), false).await;
        }
        if seen.membership().get_node(&old).is_some() {
            let gone = ChangeMembers::RemoveNodes(BTreeSet::from([old]));
            return change(member, &seen, gone, false).await;
        }
    }
    let count = promotions(voting.len(), ready.len());
    if count == 0 {
        return Ok(());
    }
    let chosen: BTreeSet<NodeId> = ready.into_iter().take(count).collect();
    tracing::info!(?chosen, "learners become voters");
    change(member, &seen, ChangeMembers::AddVoterIds(chosen), true).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k1_voters_stay_odd_and_at_most_five() {
        // (voters, caught-up learners) → promoted
        let table = [
            ((1, 0), 0),
            ((1, 1), 0),
            ((1, 2), 2),
            ((1, 3), 2),
            ((1, 9), 4),
            ((2, 0), 0),
            ((2, 1), 1),
            ((3, 1), 0),
            ((3, 2), 2),
            ((3, 9), 2),
            ((4, 1), 1),
            ((5, 9), 0),
        ];
        for ((voters, ready), expected) in table {
            assert_eq!(promotions(voters, ready), expected, "{voters} voters, {ready} learners");
        }
    }
}
