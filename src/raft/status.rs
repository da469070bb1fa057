//! What a node says of itself and its group: the body of `GET /cluster/status` (SPEC N4).

use serde::{Deserialize, Serialize};

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
