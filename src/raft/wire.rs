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
    use openraft::raft::{
        AppendEntriesRequest, AppendEntriesResponse, TransferLeaderRequest, VoteRequest,
        VoteResponse,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::codec::hostile::{self, settles};
    use crate::machine::{
        Admit, Authority, Batch, ClientId, Command, Expect, IdempotencyKey, Op, QueueKey,
        QueueKind, RowKey, Table,
    };
    use crate::raft::suspect::{Claim, Opinion, Suspicion};
    use crate::raft::types::{Entry, Proposal, TypeConfig};
    use crate::types::{Incarnation, Prefix, ProcessToken};

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

    // ------------------------------------------------------------ whatever comes over the wire

    fn log_id(index: u64) -> crate::raft::types::LogId {
        crate::raft::log_store::test_log_id(3, index)
    }

    fn commands() -> Vec<Command> {
        let (prefix, session) = (Prefix::new("shop").unwrap(), Incarnation(7));
        let queue =
            QueueKey { kind: QueueKind::Turn, prefix: prefix.clone(), name: "x:ann".into() };
        let row = RowKey { table: Table::Checkpoint, prefix: prefix.clone(), key: "x:ann".into() };
        let put = Op::Put { row, value: b"{}".to_vec(), expect: Expect::Absent, ttl_ms: Some(9) };
        let cursor = Command::Commit { by: Authority::Nobody, ops: vec![put] };
        let key = IdempotencyKey { prefix: prefix.clone(), session: None, key: "once".into() };
        let lock =
            Command::AcquireLock { prefix: prefix.clone(), key: "k".into(), ttl_ms: 50, node: 2 };
        let body = b"hello".to_vec();
        let message = Admit { id: "m1".into(), channel: "x".into(), chat: "x:ann".into(), body };
        vec![
            Command::TakeTicket { session, queue, if_free: false },
            Command::Admit {
                prefix,
                session,
                messages: vec![message],
                cursor: Some(Box::new(cursor)),
            },
            Command::Keyed { key, fingerprint: [7; 16], command: Box::new(lock) },
        ]
    }

    fn batch() -> Batch {
        let client = ClientId { node: 1, boot: 2 };
        Batch { client, lane: 3, serial: 4, stamp_ms: 1_767_225_600_000, commands: commands() }
    }

    /// The payloads of all that nodes say to each other.
    fn said() -> Vec<Vec<u8>> {
        fn bytes<T: Serialize>(value: T) -> Vec<u8> {
            let mut bytes = Vec::new();
            codec::encode_onto(&value, &mut bytes);
            bytes
        }
        let vote = Vote::new_committed(3, 1);
        let payload = openraft::EntryPayload::Normal(Proposal::seal(&batch()));
        let blank = openraft::EntryPayload::Blank;
        let entries =
            vec![Entry { log_id: log_id(8), payload }, Entry { log_id: log_id(9), payload: blank }];
        let (prev_log_id, leader_commit) = (Some(log_id(7)), Some(log_id(6)));
        let last_log = Some(log_id(9));
        vec![
            bytes(batch()),
            bytes(Proposal::seal(&batch())),
            bytes(AppendEntriesRequest::<TypeConfig> { vote, prev_log_id, entries, leader_commit }),
            bytes(VoteRequest::<TypeConfig>::new(vote, last_log)),
            bytes(TransferLeaderRequest::<TypeConfig>::new(vote, 2, last_log)),
            bytes(SnapshotStart { vote, meta: SnapshotMeta::default(), bytes: 9 }),
            bytes(Suspicion { of: vote, claim: Claim::Dead(ProcessToken(9)), last_log }),
            bytes(Opinion { suspects: true, last_log }),
            bytes(ForwardAnswer::NotLeader(Some(5))),
            bytes(ReadIndexAnswer::At(8)),
            bytes(AppendEntriesResponse::<TypeConfig>::PartialSuccess(last_log)),
            bytes(VoteResponse::<TypeConfig>::new(vote, last_log, true)),
            bytes(header()),
        ]
    }

    /// Takes a payload for each of these things.
    fn take_for_everything(payload: &[u8]) {
        settles::<Batch>(payload);
        settles::<Proposal>(payload);
        settles::<AppendEntriesRequest<TypeConfig>>(payload);
        settles::<AppendEntriesResponse<TypeConfig>>(payload);
        settles::<VoteRequest<TypeConfig>>(payload);
        settles::<VoteResponse<TypeConfig>>(payload);
        settles::<TransferLeaderRequest<TypeConfig>>(payload);
        settles::<SnapshotStart>(payload);
        settles::<Suspicion>(payload);
        settles::<Opinion>(payload);
        settles::<ForwardAnswer>(payload);
        settles::<ReadIndex>(payload);
        settles::<ReadIndexAnswer>(payload);
        settles::<Header>(payload);
        if let Ok(proposal) = message::<Proposal>(payload) {
            let _ = proposal.open();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn m1_whatever_a_body_between_nodes_holds_is_taken_or_refused(
            payload in hostile::bytes(said()),
        ) {
            take_for_everything(&payload);
            let mut sealed = codec::begin(Kind::Request, 64);
            codec::encode_onto(&header(), &mut sealed);
            sealed.extend_from_slice(&payload);
            let sealed = codec::finish(sealed);
            let (found, rest) = open(Kind::Request, &sealed).unwrap();
            prop_assert_eq!((found, rest), (header(), &payload[..]));
        }

        #[test]
        fn m1_a_damaged_envelope_is_refused(
            bytes in hostile::bytes(vec![seal(Kind::Request, &header(), &batch())]),
        ) {
            let whole = seal(Kind::Request, &header(), &batch());
            prop_assert_eq!(open(Kind::Request, &bytes).is_ok(), bytes == whole);
        }
    }

    #[test]
    fn m3_a_length_that_lies_claims_no_memory() {
        for payload in said() {
            hostile::lies_claim_no_memory(&payload, take_for_everything);
        }
    }

    #[test]
    fn m3_commands_within_commands_are_bounded() {
        let mut command = Command::Noop;
        for process in 0..7 {
            let process = ProcessToken(process);
            command = Command::ForProcess { process, command: Box::new(command) };
        }
        let nested = Batch { commands: vec![command], ..batch() };
        let bytes = codec::seal(Kind::Batch, &nested);
        assert_eq!(codec::open::<Batch>(Kind::Batch, &bytes), Ok(nested));

        // "For process 0, for process 0, …": half a megabyte of it.
        let mut payload = Vec::new();
        codec::encode_onto(&Batch { commands: vec![Command::Noop], ..batch() }, &mut payload);
        let noop = payload.pop().unwrap();
        payload.extend([19, 0].repeat(250_000));
        payload.push(noop);
        let refused = codec::decode::<Batch>(&payload).unwrap_err().to_string();
        assert!(refused.contains("too deep"), "{refused}");
        assert_eq!(codec::open::<Batch>(Kind::Batch, &bytes).map(|batch| batch.lane), Ok(3));
    }
}
