//! The openraft type configuration, and our names for what it makes. openraft's names stay inside
//! this folder.

use std::path::PathBuf;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::codec::{self, DecodeError, Kind};
use crate::machine::Batch;
use crate::types::NodeId;

/// What a log entry holds: an encoded [`crate::machine::Batch`]. Encoded once where it was
/// proposed, copied from there on; decoded where it is applied.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Proposal(pub(crate) Bytes);

impl Proposal {
    /// Encodes a batch.
    pub(crate) fn seal(batch: &Batch) -> Self {
        Self(codec::seal(Kind::Batch, batch).into())
    }

    /// The batch.
    pub(crate) fn open(&self) -> Result<Batch, DecodeError> {
        codec::open(Kind::Batch, &self.0)
    }
}

impl std::fmt::Debug for Proposal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Proposal({} bytes)", self.0.len())
    }
}

impl std::fmt::Display for Proposal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}

/// What apply answers to the proposer: nothing. Answers come out of the local apply of the node
/// that asked (see [`crate::group`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Applied;

impl std::fmt::Display for Applied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("applied")
    }
}

/// A member as the membership names it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// The operator's name for it.
    pub name: String,
    /// `host:port` of its cluster listener, resolved at each dial (SPEC K4).
    pub address: String,
    /// Made by the member and written to its disk before it asked to join: a join that is asked
    /// again is known by it (SPEC K1).
    pub nonce: u128,
    /// The member it takes the place of: the same machine before its data was lost. The change that
    /// makes this one a voter removes that one (SPEC K3).
    pub replaces: Option<NodeId>,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.name, self.address)
    }
}

/// A finished snapshot: a file on this node's disk, fsynced under its final name (or a received
/// one, complete and checked).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its size, in bytes.
    pub bytes: u64,
}

openraft::declare_raft_types!(
    /// One leader per term (DESIGN 5.5): the standard leader id.
    pub(crate) TypeConfig:
        D = Proposal,
        R = Applied,
        NodeId = NodeId,
        Node = Peer,
        LeaderId = openraft::impls::leader_id_std::LeaderId<u64, u64>,
        AsyncRuntime = super::runtime::Runtime,
);

/// A log entry.
pub(crate) type Entry = <TypeConfig as openraft::RaftTypeConfig>::Entry;
/// A log id.
pub(crate) type LogId = openraft::type_config::alias::LogIdOf<TypeConfig>;
/// A vote.
pub(crate) type Vote = openraft::type_config::alias::VoteOf<TypeConfig>;
/// The membership as of an entry.
pub(crate) type StoredMembership = openraft::type_config::alias::StoredMembershipOf<TypeConfig>;
/// What a snapshot says of itself.
pub(crate) type SnapshotMeta = openraft::type_config::alias::SnapshotMetaOf<TypeConfig>;
