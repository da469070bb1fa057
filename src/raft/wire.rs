//! What nodes say to each other, and how each makes sure whom it talks to.
//!
//! Every request and every answer is one codec envelope: a [`Header`], then the message. The header
//! names the group, sender and receiver, and the sender's boot (DESIGN 2). Both sides check it: an
//! answer from a directory that was restored from a backup counts as little as its question, since
//! it may have forgotten a vote or an acknowledgement. What does not fit is a typed [`Refusal`],
//! and never reaches Raft.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::types::{SnapshotMeta, Vote};
use crate::codec::{self, DecodeError, Kind};
use crate::types::NodeId;

/// Whom a message is from and for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    /// The group both belong to.
    pub(crate) cluster: Uuid,
    /// The sender.
    pub(crate) from: NodeId,
    /// The node it is meant for.
    pub(crate) to: NodeId,
    /// The sender's boot counter …
    pub(crate) boot: u64,
    /// … and the nonce of that boot.
    pub(crate) nonce: Uuid,
    /// Where the sender can be reached: a member that came back under a new address is heard of
    /// before the membership says so (SPEC K4).
    pub(crate) address: String,
    /// What the sender's wall clock shows: see [`super::group_time`].
    pub(crate) wall_ms: u64,
}

/// Why a node does not take a message. Nothing of it was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "error", rename_all = "snake_case")]
#[non_exhaustive]
pub(crate) enum Refusal {
    /// Another group's.
    #[error("wrong cluster: this node belongs to group {ours}, the message to {theirs}")]
    WrongCluster {
        /// The group of the node that refuses.
        ours: Uuid,
        /// The group the message names.
        theirs: Uuid,
    },
    /// Another node's.
    #[error("wrong node: this is node {ours}, the message is for node {meant}")]
    WrongNode {
        /// The node that refuses.
        ours: NodeId,
        /// The node the message names.
        meant: NodeId,
    },
    /// The sender's directory was restored or copied.
    #[error("{why}")]
    RestoredDirectory {
        /// In words.
        why: String,
    },
    /// The receiver is not a member (yet, any more), or shuts down.
    #[error("this node does not serve: {why}")]
    NotServing {
        /// In words.
        why: String,
    },
    /// It does not decode, or is of another format version.
    #[error("the message does not decode: {why}")]
    Malformed {
        /// In words.
        why: String,
    },
    /// The receiver could not do it.
    #[error("the node failed: {why}")]
    Failed {
        /// In words.
        why: String,
    },
}

impl From<DecodeError> for Refusal {
    fn from(error: DecodeError) -> Self {
        Self::Malformed { why: error.to_string() }
    }
}

/// Puts header and message into an envelope.
pub(crate) fn seal<T: Serialize>(kind: Kind, header: &Header, message: &T) -> Vec<u8> {
    let mut bytes = codec::begin(kind, 256);
    codec::encode_onto(header, &mut bytes);
    codec::encode_onto(message, &mut bytes);
    codec::finish(bytes)
}

/// Opens an envelope up to its header; the rest is the message.
pub(crate) fn open(kind: Kind, bytes: &[u8]) -> Result<(Header, &[u8]), DecodeError> {
    let mut payload = codec::open_raw(kind, bytes)?;
    let header = codec::decode_from(&mut payload)?;
    Ok((header, payload))
}

/// The message behind a header.
pub(crate) fn message<T: DeserializeOwned>(payload: &[u8]) -> Result<T, DecodeError> {
    codec::decode(payload)
}

/// What became of a forwarded batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ForwardAnswer {
    /// It is committed; the sender's own apply brings the answers.
    Committed,
    /// Not taken into the log here: ask this one.
    NotLeader(Option<NodeId>),
    /// It may be committed or not.
    Unknown,
}

/// Asks the leader up to where to apply before a linearizable read.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct ReadIndex;

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ReadIndexAnswer {
    /// A majority confirmed the leader after it was asked: apply up to here.
    At(u64),
    /// Ask this one.
    NotLeader(Option<NodeId>),
    /// No majority confirmed it.
    NoQuorum,
}

/// What goes before the bytes of a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotStart {
    /// The leader's vote.
    pub(crate) vote: Vote,
    /// What the snapshot says of itself.
    pub(crate) meta: SnapshotMeta,
    /// How many bytes follow.
    pub(crate) bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            cluster: Uuid::from_u128(7),
            from: 1,
            to: 2,
            boot: 3,
            nonce: Uuid::from_u128(9),
            address: "127.0.0.1:9101".to_owned(),
            wall_ms: 1_767_225_600_000,
        }
    }

    #[test]
    fn a_message_comes_out_as_it_went_in() {
        let bytes = seal(Kind::Request, &header(), &ForwardAnswer::NotLeader(Some(5)));
        let (found, payload) = open(Kind::Request, &bytes).unwrap();
        assert_eq!(found, header());
        let found: ForwardAnswer = message(payload).unwrap();
        assert_eq!(found, ForwardAnswer::NotLeader(Some(5)));
        assert!(open(Kind::Response, &bytes).is_err());
        assert!(open(Kind::Request, &bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn a_refusal_is_json_with_a_code() {
        let refusal = Refusal::WrongNode { ours: 3, meant: 2 };
        let json = serde_json::to_value(&refusal).unwrap();
        assert_eq!(json["error"], "wrong_node");
        assert_eq!(serde_json::from_value::<Refusal>(json).unwrap(), refusal);
    }
}
