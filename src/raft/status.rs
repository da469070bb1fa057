//! What a node says of itself and its group: the body of `GET /cluster/status` (SPEC N4).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::member::{Leader, Member};
use super::node::{Inner, Node};
use super::peers::REACHABLE;
use super::types::{LogId, Peer, StoredMembership};
use crate::machine::{Machine, SessionKind};
use crate::types::NodeId;

/// What a node does in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Leads.
    Leader,
    /// Votes.
    Follower,
    /// Replicates without a vote, or is not a member (yet).
    Learner,
    /// Asks for votes.
    Candidate,
}

/// A hash of the logical state at a log index every node marks alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateMark {
    /// The log index.
    pub index: u64,
    /// The hash, in hexadecimal: JSON numbers lose the upper bits in other languages.
    #[serde(with = "hex")]
    pub hash: u64,
}

mod hex {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(hash: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{hash:016x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(from)?;
        u64::from_str_radix(&text, 16).map_err(serde::de::Error::custom)
    }
}

/// A member, as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Its id.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Its cluster address.
    pub address: String,
    /// What it does.
    pub role: Role,
    /// Whether this node spoke with it lately.
    pub reachable: bool,
    /// The level of commands its program knows, as it told this node; `None` where it has not. Two
    /// followers do not talk to each other, so the leader's view is the whole one.
    #[serde(default)]
    pub level: Option<u32>,
}

/// A live session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// The replica's own name.
    pub replica: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// The node it runs on.
    pub node_id: NodeId,
    /// What is left of its lease on this node's clock.
    pub valid_ms: u64,
    /// Another incarnation that lives under the same replica id, where two processes certainly do:
    /// give each a name of its own (SPEC A3, `ReplicaIdShared`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_with: Option<u64>,
}

/// A held lead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeadStatus {
    /// `prefix/name`.
    pub name: String,
    /// The incarnation that holds it.
    pub holder: u64,
    /// Its fence.
    pub fence: u64,
}

/// How many turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnCounts {
    /// Granted.
    pub held: u64,
    /// Tickets waiting.
    pub waiting: u64,
}

/// The whole picture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The group's id; `None` before this node belongs to one.
    pub cluster_id: Option<String>,
    /// This node's id; `None` as above.
    pub node_id: Option<NodeId>,
    /// This node's name.
    pub name: String,
    /// What it does.
    pub role: Role,
    /// The term it is in.
    pub term: u64,
    /// Who leads, as far as it knows.
    pub leader: Option<NodeId>,
    /// The last log index it applied.
    pub applied: u64,
    /// The last log index it knows committed.
    pub committed: u64,
    /// The last log index that is in a snapshot only: who is behind it is sent that.
    #[serde(default)]
    pub purged: u64,
    /// The last few marks.
    pub state_marks: Vec<StateMark>,
    /// All members.
    pub nodes: Vec<NodeStatus>,
    /// Live sessions, locks left out.
    pub sessions: Vec<SessionStatus>,
    /// Held leads.
    pub leads: Vec<LeadStatus>,
    /// Turns.
    pub turns: TurnCounts,
    /// The level of commands the group has agreed on; 0 before this node belongs to one.
    #[serde(default)]
    pub command_level: u32,
    /// Log index of the membership it sees. A leave that names it is refused once there is another one.
    #[serde(default)]
    pub membership: Option<u64>,
}

/// Whether a node serves, for `/readyz` (SPEC K7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// It has applied what was committed when it first heard of a leader after its start.
    pub caught_up: bool,
    /// It hears a leader that has a majority.
    pub quorum: bool,
}

impl Readiness {
    /// Both.
    pub fn ready(self) -> bool {
        self.caught_up && self.quorum
    }
}

/// How long a member that was not heard of is given to accept a connection.
const KNOCK: Duration = Duration::from_millis(250);

impl Inner {
    /// See [`Status`].
    pub(crate) fn status(&self) -> Status {
        let Ok(member) = self.member() else {
            return Status {
                cluster_id: None,
                node_id: None,
                name: self.options.name.clone(),
                role: Role::Learner,
                term: 0,
                leader: None,
                applied: 0,
                committed: 0,
                purged: 0,
                state_marks: Vec::new(),
                nodes: Vec::new(),
                sessions: Vec::new(),
                leads: Vec::new(),
                turns: TurnCounts::default(),
                command_level: 0,
                membership: None,
            };
        };
        let server = member.server();
        let data = member.data();
        let leader = match member.leader() {
            Leader::Here => Some(member.id()),
            Leader::At(id, _) => Some(id),
            Leader::Nobody => None,
        };
        let index = |id: &Option<LogId>| id.as_ref().map_or(0, |id| id.index());
        let (sessions, leads, turns) = member.state.read(|machine| status_of(machine, &member));
        Status {
            cluster_id: Some(member.peers.cluster.to_string()),
            node_id: Some(member.id()),
            name: self.options.name.clone(),
            role: role_of(&member),
            term: server.vote.leader_id.term,
            leader,
            applied: index(&data.last_applied),
            committed: index(&data.local_committed),
            purged: index(&member.log.last_purged()),
            state_marks: member.state.marks(),
            nodes: nodes_of(&member, leader),
            sessions,
            leads,
            turns,
            command_level: member.command_level(),
            membership: member.membership().log_id().map(|at| at.index()),
        }
    }

    /// As [`Inner::status`], with a look at the members this node has no business with: two
    /// followers do not talk to each other, so whether the other is there is known only by knocking.
    pub(crate) async fn status_probed(&self) -> Status {
        let mut status = self.status();
        let own = status.node_id;
        let unheard =
            status.nodes.iter_mut().filter(|node| !node.reachable && Some(node.id) != own);
        let knock = unheard.map(|node| async {
            let knock = self.clients.knock(node.address.as_str());
            node.reachable = tokio::time::timeout(KNOCK, knock).await.unwrap_or(false);
        });
        futures_util::future::join_all(knock).await;
        status
    }
}

impl Node {
    /// How often this process has read all of its state on disk again, and how often it was not what
    /// had been written (it is written anew, then). Once an hour.
    pub fn scrubbed(&self) -> (u64, u64) {
        self.inner.member().map_or((0, 0), |member| member.state.scrubbed())
    }
}

/// Whether a node votes in all of these memberships, in each of their configurations. In the middle of
/// a change the old voters still have to agree: whoever votes only in the new ones cannot take their
/// place yet. To call it a voter would call a group safe that the death of its founder ends.
fn votes(memberships: [&StoredMembership; 2], id: NodeId) -> bool {
    let mut configs =
        memberships.into_iter().flat_map(|one| one.membership().get_joint_config().iter());
    configs.all(|voters| voters.contains(&id))
}

/// What this node does in the group; a learner until its vote is committed.
fn role_of(member: &Member) -> Role {
    let server = member.server();
    let memberships = [&*server.membership_config, &*server.committed_membership_config];
    match member.role() {
        Role::Follower if !votes(memberships, member.id()) => Role::Learner,
        role => role,
    }
}

/// The members, as one of them sees them.
fn nodes_of(member: &Member, leader: Option<NodeId>) -> Vec<NodeStatus> {
    let server = member.server();
    let memberships = [&*server.membership_config, &*server.committed_membership_config];
    let nodes = server.membership_config.membership().nodes();
    let one = |(&id, peer): (&NodeId, &Peer)| NodeStatus {
        id,
        name: peer.name.clone(),
        address: peer.address.clone(),
        role: match leader {
            _ if id == member.id() => role_of(member),
            Some(leader) if leader == id => Role::Leader,
            _ if votes(memberships, id) => Role::Follower,
            _ => Role::Learner,
        },
        reachable: member.peers.heard_within(id, REACHABLE),
        level: match id == member.id() {
            true => Some(member.peers.levels.own),
            false => member.peers.levels.of(id),
        },
    };
    nodes.map(one).collect()
}

/// What the machine adds to the status.
fn status_of(
    machine: &Machine,
    member: &Member,
) -> (Vec<SessionStatus>, Vec<LeadStatus>, TurnCounts) {
    let sessions = machine
        .sessions()
        .into_iter()
        .filter(|view| view.kind != SessionKind::Lock)
        .map(|view| SessionStatus {
            shared_with: match view.kind {
                SessionKind::Replica => {
                    let namesakes = machine.namesakes(view.session);
                    member.sessions.shared_with(view.session, &namesakes).map(|other| other.0)
                }
                _ => None,
            },
            valid_ms: member.sessions.left(view.session).as_millis() as u64,
            replica: view.replica,
            incarnation: view.session.0,
            node_id: view.node,
        })
        .collect();
    let leads = machine
        .leads()
        .into_iter()
        .map(|(queue, holder)| LeadStatus {
            name: format!("{}/{}", queue.prefix, queue.name),
            holder: holder.session.0,
            fence: holder.fence.map_or(0, |fence| fence.0),
        })
        .collect();
    let (held, waiting) = machine.turn_counts();
    (sessions, leads, TurnCounts { held, waiting })
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use openraft::Membership;

    use super::*;

    fn membership(configs: &[&[NodeId]]) -> StoredMembership {
        let configs = configs.iter().map(|ids| BTreeSet::from_iter(ids.iter().copied()));
        let nodes = BTreeMap::from([1, 2, 3].map(|id| (id, Peer::default())));
        StoredMembership::new(None, Membership::new(configs.collect(), nodes).unwrap())
    }

    #[test]
    fn k1_who_votes_in_one_half_of_a_change_only_is_no_voter_yet() {
        let (alone, both) = (membership(&[&[1]]), membership(&[&[1], &[1, 2, 3]]));
        let three = membership(&[&[1, 2, 3]]);
        for (effective, committed) in [(&both, &alone), (&both, &both), (&three, &both)] {
            assert!(votes([effective, committed], 1));
            assert!(!votes([effective, committed], 2), "without node 1 it decides nothing");
        }
        assert!(votes([&three, &three], 2));
    }
}
