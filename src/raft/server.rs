//! The receiving end of `/raft/*`.
//!
//! The listener checks the secret before anything comes here. Each route opens the envelope, checks
//! whom it is from and for, and only then asks Raft; a refusal is a 409 with a typed JSON body and
//! has no effect. Bodies are bounded: axum's own limit of 2 MB is too small for an append, so each
//! route states its own.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use futures_util::StreamExt;
use openraft::ReadPolicy;
use openraft::errors::{ClientWriteError, LinearizableReadError, RaftError};
use openraft::raft::{AppendEntriesRequest, TransferLeaderRequest, VoteRequest};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::AsyncWriteExt;

use super::member::Member;
use super::network::snapshot_deadline;
use super::node::Inner;
use super::types::{Proposal, SnapshotFile, TypeConfig};
use super::wire::{
    self, ForwardAnswer, Header, ReadIndex, ReadIndexAnswer, Refusal, SnapshotStart,
};
use super::{attend, levels, suspect};
use crate::codec::{DECODE_BYTES_MAX, Kind};
use crate::group::Unavailable;
use crate::outside;

/// Of an append: as much as decodes.
const APPEND_BYTES_MAX: usize = DECODE_BYTES_MAX;
/// Of everything small.
const SMALL_BYTES_MAX: usize = 1 << 20;
/// Of a forwarded batch: its bound plus one large command.
const FORWARD_BYTES_MAX: usize = 8 << 20;

/// The routes between nodes.
pub(crate) fn routes() -> Router<Arc<Inner>> {
    let limit = DefaultBodyLimit::max;
    Router::new()
        .route("/raft/append", post(append).layer(limit(APPEND_BYTES_MAX)))
        .route("/raft/vote", post(vote).layer(limit(SMALL_BYTES_MAX)))
        .route("/raft/pre-vote", post(pre_vote).layer(limit(SMALL_BYTES_MAX)))
        .route("/raft/transfer-leader", post(transfer_leader).layer(limit(SMALL_BYTES_MAX)))
        .route("/raft/read-index", post(read_index).layer(limit(SMALL_BYTES_MAX)))
        .route("/raft/attend", post(attend::attend).layer(limit(SMALL_BYTES_MAX)))
        .route("/raft/suspect", post(suspect::suspect).layer(limit(SMALL_BYTES_MAX)))
        .route("/raft/forward", post(forward).layer(limit(FORWARD_BYTES_MAX)))
        .route("/raft/snapshot", post(snapshot).layer(DefaultBodyLimit::disable()))
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::Failed { .. } => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NotServing { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::Malformed { .. } => StatusCode::BAD_REQUEST,
            _ => StatusCode::CONFLICT,
        };
        tracing::debug!(refusal = %self, "refused a message");
        (status, axum::Json(self)).into_response()
    }
}

/// A question that has passed every check.
pub(super) struct Asked<Q> {
    pub(super) member: Arc<Member>,
    pub(super) from: Header,
    pub(super) question: Q,
}

impl<Q: DeserializeOwned> Asked<Q> {
    pub(super) fn open(inner: &Inner, body: &[u8]) -> Result<Self, Refusal> {
        let member = inner.member().map_err(not_serving)?;
        let (from, payload) = wire::open(Kind::Request, body)?;
        member.peers.admit(&from)?;
        Ok(Self { question: wire::message(payload)?, member, from })
    }
}

/// Puts an answer into its envelope.
pub(super) fn answer<A: Serialize>(member: &Member, to: &Header, answer: &A) -> Response {
    let body = wire::seal(Kind::Response, &member.peers.header(to.from), answer);
    let kind = HeaderValue::from_static("application/octet-stream");
    let level = (HeaderName::from_static(levels::HEADER), member.peers.levels.announcement());
    ([(header::CONTENT_TYPE, kind), level], body).into_response()
}

fn not_serving(why: Unavailable) -> Refusal {
    let why = match why {
        Unavailable::NotServing { why } => why,
        other => other.to_string(),
    };
    Refusal::NotServing { why }
}

fn failed(error: impl std::fmt::Display) -> Refusal {
    Refusal::Failed { why: error.to_string() }
}

pub(super) type Answer = Result<Response, Refusal>;

async fn append(State(inner): State<Arc<Inner>>, headers: HeaderMap, body: Bytes) -> Answer {
    let asked = Asked::<AppendEntriesRequest<TypeConfig>>::open(&inner, &body)?;
    asked.member.peers.levels.led(&asked.from, headers.get(levels::HEADER));
    if !asked.question.entries.is_empty() {
        has_room(&asked.member)?;
    }
    let response = asked.member.raft.append_entries(asked.question).await.map_err(failed)?;
    if !matches!(response, openraft::raft::AppendEntriesResponse::HigherVote(_)) {
        asked.member.heard_leader(asked.from.from);
    }
    Ok(answer(&asked.member, &asked.from, &response))
}

async fn vote(State(inner): State<Arc<Inner>>, body: Bytes) -> Answer {
    let asked = Asked::<VoteRequest<TypeConfig>>::open(&inner, &body)?;
    let response = asked.member.raft.vote(asked.question).await.map_err(failed)?;
    Ok(answer(&asked.member, &asked.from, &response))
}

async fn pre_vote(State(inner): State<Arc<Inner>>, body: Bytes) -> Answer {
    let asked = Asked::<VoteRequest<TypeConfig>>::open(&inner, &body)?;
    let response = asked.member.raft.pre_vote(asked.question).await.map_err(failed)?;
    Ok(answer(&asked.member, &asked.from, &response))
}

async fn transfer_leader(State(inner): State<Arc<Inner>>, body: Bytes) -> Answer {
    let asked = Asked::<TransferLeaderRequest<TypeConfig>>::open(&inner, &body)?;
    has_room(&asked.member)?;
    let response =
        asked.member.raft.handle_transfer_leader(asked.question).await.map_err(failed)?;
    Ok(answer(&asked.member, &asked.from, &response))
}

async fn read_index(State(inner): State<Arc<Inner>>, body: Bytes) -> Answer {
    let asked = Asked::<ReadIndex>::open(&inner, &body)?;
    let response = own_read_index(&asked.member).await;
    Ok(answer(&asked.member, &asked.from, &response))
}

/// Asks the own Raft up to where to apply.
pub(crate) async fn own_read_index(member: &Member) -> ReadIndexAnswer {
    match member.raft.get_read_log_id(ReadPolicy::ReadIndex).await {
        Ok((read, _)) => ReadIndexAnswer::At(read.index()),
        Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(other))) => {
            ReadIndexAnswer::NotLeader(other.leader_id)
        }
        Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(_)))
        | Err(RaftError::Fatal(_)) => ReadIndexAnswer::NoQuorum,
    }
}

async fn forward(State(inner): State<Arc<Inner>>, body: Bytes) -> Answer {
    let asked = Asked::<Proposal>::open(&inner, &body)?;
    // Decoded here, because an entry that does not decode would stop every node, and because the
    // leader stamps it, not the sender (DESIGN 9).
    let mut batch = asked.question.open()?;
    if batch.client.node != asked.from.from {
        let why = format!("a batch of node {} came from another", batch.client.node);
        return Err(Refusal::Malformed { why });
    }
    batch.stamp_ms = asked.member.stamp_ms();
    let response = own_propose(&asked.member, Proposal::seal(&batch)).await;
    Ok(answer(&asked.member, &asked.from, &response))
}

/// Refuses what would fill a disk that is nearly full.
fn has_room(member: &Member) -> Result<(), Refusal> {
    member.room.hindrance().map_or(Ok(()), |why| Err(not_serving(why)))
}

/// Writes a batch into the own log, where this node leads.
pub(crate) async fn own_propose(member: &Member, proposal: Proposal) -> ForwardAnswer {
    if member.room.is_short() {
        return ForwardAnswer::NotLeader(None);
    }
    match member.raft.client_write(proposal).await {
        Ok(_) => ForwardAnswer::Committed,
        // Refused before it was appended.
        Err(RaftError::APIError(ClientWriteError::ForwardToLeader(other))) => {
            ForwardAnswer::NotLeader(other.leader_id)
        }
        // Everything else may have left it in a log.
        Err(error) => {
            tracing::debug!(%error, "a proposal's outcome is not known");
            ForwardAnswer::Unknown
        }
    }
}

/// The head of a snapshot: an envelope behind its length.
const HEAD_BYTES_MAX: usize = 1 << 20;

async fn snapshot(State(inner): State<Arc<Inner>>, body: Body) -> Answer {
    let mut stream = body.into_data_stream();
    let mut buffer = Vec::new();
    let head = loop {
        if let Some((length, rest)) = buffer.split_first_chunk::<4>() {
            let length = u32::from_le_bytes(*length) as usize;
            if length > HEAD_BYTES_MAX {
                return Err(Refusal::Malformed { why: format!("a head of {length} bytes") });
            }
            if rest.len() >= length {
                break length;
            }
        }
        let piece = tokio::time::timeout(Duration::from_secs(5), stream.next()).await;
        let piece = piece.map_err(failed)?.ok_or_else(|| failed("the snapshot has no head"))?;
        buffer.extend_from_slice(&piece.map_err(failed)?);
    };
    let asked = Asked::<SnapshotStart>::open(&inner, &buffer[4..4 + head])?;
    let start = &asked.question;
    has_room(&asked.member)?;
    if start.bytes > inner.options.limits.snapshot_bytes_max {
        let why = format!("a snapshot of {} bytes is over this node's limit", start.bytes);
        return Err(Refusal::Malformed { why });
    }
    let path = asked.member.incoming_snapshot().map_err(failed)?;
    let received = receive(&path, &buffer[4 + head..], stream, start.bytes);
    let received = tokio::time::timeout(snapshot_deadline(start.bytes), received).await;
    let response = match received.map_err(failed).and_then(|done| done.map_err(failed)) {
        Ok(()) => {
            let file = SnapshotFile { path: path.clone(), bytes: start.bytes };
            let snapshot = openraft::Snapshot { meta: start.meta.clone(), snapshot: file };
            let vote = start.vote;
            asked.member.raft.install_full_snapshot(vote, snapshot).await.map_err(failed)
        }
        Err(error) => Err(error),
    };
    // Installed means renamed away; what is still there was not wanted.
    let _ = outside::off_thread(move || std::fs::remove_file(&path)).await;
    asked.member.heard_leader(asked.from.from);
    Ok(answer(&asked.member, &asked.from, &response?))
}

/// Writes exactly `bytes` bytes to a new file and syncs it.
async fn receive(
    path: &std::path::Path,
    first: &[u8],
    mut stream: impl futures_util::Stream<Item = Result<Bytes, axum::Error>> + Unpin,
    bytes: u64,
) -> std::io::Result<()> {
    let wrong = |found: u64| {
        std::io::Error::other(format!("the snapshot has {found} bytes instead of {bytes}"))
    };
    #[cfg(feature = "test-util")]
    if crate::outside::seeded::is_on() {
        let mut whole = first.to_vec();
        while let Some(piece) = stream.next().await {
            whole.extend_from_slice(&piece.map_err(std::io::Error::other)?);
        }
        return match whole.len() as u64 == bytes {
            true => std::fs::write(path, &whole),
            false => Err(wrong(whole.len() as u64)),
        };
    }
    let mut file = tokio::fs::File::create(path).await?;
    file.write_all(first).await?;
    let mut written = first.len() as u64;
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(std::io::Error::other)?;
        written += piece.len() as u64;
        if written > bytes {
            return Err(wrong(written));
        }
        file.write_all(&piece).await?;
    }
    if written != bytes {
        return Err(wrong(written));
    }
    file.sync_all().await
}
