//! openraft's view of the network: one [`Link`] per target and kind of traffic.
//!
//! openraft gives replication the heartbeat interval as its time limit, which a slow fsync on the
//! follower exceeds; appends have a deadline of their own instead (DESIGN 6). Its default for
//! `pre_vote` grants without asking, so it is implemented here.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use openraft::errors::{
    NetworkError, RPCError, ReplicationClosed, StreamingError, Timeout, Unreachable,
};
use openraft::network::{Backoff, RPCOption, RPCTypes, RaftNetworkFactory, RaftNetworkV2};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::AsyncReadExt;

use super::Timing;
use super::peers::{CallError, Lane, Peers};
use super::types::{Peer, SnapshotFile, TypeConfig, Vote};
use super::wire::{self, SnapshotStart};
use crate::codec::Kind;
use crate::types::NodeId;

/// Makes links.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    peers: Arc<Peers>,
    timing: Timing,
}

impl Network {
    pub(crate) fn new(peers: Arc<Peers>, timing: Timing) -> Self {
        Self { peers, timing }
    }

    fn link(&self, lane: Lane, target: NodeId, node: &Peer) -> Link {
        Link {
            peers: self.peers.clone(),
            timing: self.timing,
            lane,
            target,
            given: node.address.clone(),
        }
    }
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Link;

    async fn new_client(&mut self, target: NodeId, node: &Peer) -> Link {
        self.link(Lane::Append, target, node)
    }

    async fn new_heartbeat_client(&mut self, target: NodeId, node: &Peer) -> Link {
        self.link(Lane::Beat, target, node)
    }

    async fn new_snapshot_client(&mut self, target: NodeId, node: &Peer) -> Link {
        self.link(Lane::Snapshot, target, node)
    }
}

/// A way to one peer.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    peers: Arc<Peers>,
    timing: Timing,
    lane: Lane,
    target: NodeId,
    /// Where the membership saw it when the link was made; openraft keeps a link across changes
    /// that only move its node, so the address is looked up at each call.
    given: String,
}

impl Link {
    fn address(&self) -> String {
        self.peers.address(self.target).unwrap_or_else(|| self.given.clone())
    }

    async fn call<Q: Serialize, A: DeserializeOwned>(
        &self,
        lane: Lane,
        path: &str,
        question: &Q,
        within: Duration,
    ) -> Result<A, CallError> {
        let address = self.address();
        self.peers.call(lane, (self.target, &address), path, question, within).await
    }

    fn error(&self, action: RPCTypes, error: CallError) -> RPCError<TypeConfig> {
        match error {
            // openraft waits before it tries an unreachable node again.
            CallError::Connect { .. } | CallError::Refused { .. } => {
                RPCError::Unreachable(Unreachable::new(&error))
            }
            CallError::Timeout { within, .. } => RPCError::Timeout(Timeout {
                action,
                id: self.peers.id,
                target: self.target,
                timeout: within,
            }),
            CallError::Broken { .. } => RPCError::Network(NetworkError::new(&error)),
        }
    }
}

impl RaftNetworkV2<TypeConfig> for Link {
    type SnapshotData = SnapshotFile;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RPCError<TypeConfig>> {
        let answer = self.call(self.lane, "/raft/append", &rpc, self.timing.append).await;
        answer.map_err(|error| self.error(RPCTypes::AppendEntries, error))
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        let within = self.timing.election_max;
        let answer = self.call(Lane::Beat, "/raft/vote", &rpc, within).await;
        answer.map_err(|error| self.error(RPCTypes::Vote, error))
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RPCError<TypeConfig>> {
        let within = self.timing.election_max;
        let answer = self.call(Lane::Beat, "/raft/pre-vote", &rpc, within).await;
        answer.map_err(|error| self.error(RPCTypes::Vote, error))
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: openraft::type_config::alias::SnapshotOf<TypeConfig, SnapshotFile>,
        cancel: impl Future<Output = ReplicationClosed> + Send + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        futures_util::select_biased! {
            closed = cancel.fuse() => Err(StreamingError::Closed(closed)),
            sent = self.send_snapshot(vote, snapshot.meta, snapshot.snapshot).fuse() => sent
                .map_err(|error| match self.error(RPCTypes::InstallSnapshot, error) {
                    RPCError::Timeout(error) => StreamingError::Timeout(error),
                    RPCError::Unreachable(error) => StreamingError::Unreachable(error),
                    RPCError::Network(error) => StreamingError::Network(error),
                    RPCError::RemoteError(error) => StreamingError::Network(
                        NetworkError::from_string(error),
                    ),
                }),
        }
    }

    async fn transfer_leader(
        &mut self,
        req: TransferLeaderRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RPCError<TypeConfig>> {
        let within = self.timing.append;
        let path = "/raft/transfer-leader";
        let answer = self.call(Lane::Beat, path, &req, within).await;
        answer.map_err(|error| self.error(RPCTypes::TransferLeader, error))
    }

    fn backoff(&self) -> Option<Backoff> {
        // A peer that restarts is back within a heartbeat or two of its port being open.
        let beat = self.timing.heartbeat;
        Some(Backoff::new(
            [beat / 2, beat, beat * 2].into_iter().chain(std::iter::repeat(beat * 4)),
        ))
    }
}

/// How long a snapshot of this size may take: 2 MiB/s is a slow link.
pub(crate) fn snapshot_deadline(bytes: u64) -> Duration {
    Duration::from_secs(30 + (bytes >> 21))
}

/// A file in pieces of 256 KiB.
fn chunks(
    file: tokio::fs::File,
) -> impl futures_util::Stream<Item = std::io::Result<bytes::Bytes>> + Send {
    futures_util::stream::try_unfold(file, |mut file| async move {
        let mut piece = bytes::BytesMut::with_capacity(1 << 18);
        let read = file.read_buf(&mut piece).await?;
        Ok((read > 0).then(|| (piece.freeze(), file)))
    })
}

/// The head and behind it the file.
async fn body(mut head: Vec<u8>, file: &std::path::Path) -> std::io::Result<reqwest::Body> {
    #[cfg(feature = "test-util")]
    if crate::outside::seeded::is_on() {
        head.extend(std::fs::read(file)?);
        return Ok(head.into());
    }
    let source = tokio::fs::File::open(file).await?;
    let head = futures_util::stream::iter([Ok(bytes::Bytes::from(std::mem::take(&mut head)))]);
    Ok(reqwest::Body::wrap_stream(futures_util::StreamExt::chain(head, chunks(source))))
}

impl Link {
    /// Sends the head and then the file, as one request.
    async fn send_snapshot(
        &self,
        vote: Vote,
        meta: super::types::SnapshotMeta,
        file: SnapshotFile,
    ) -> Result<SnapshotResponse<TypeConfig>, CallError> {
        let address = self.address();
        let broken = |error: std::io::Error| CallError::Broken {
            address: address.clone(),
            why: format!("{}: {error}", file.path.display()),
        };
        let start = SnapshotStart { vote, meta, bytes: file.bytes };
        let head = wire::seal(Kind::Request, &self.peers.header(self.target), &start);
        let mut first = (head.len() as u32).to_le_bytes().to_vec();
        first.extend_from_slice(&head);
        let body = body(first, &file.path).await.map_err(broken)?;
        let within = snapshot_deadline(file.bytes);
        let request = self
            .peers
            .client(Lane::Snapshot)
            .post(format!("http://{address}/raft/snapshot"))
            .timeout(within)
            .body(body);
        let response = self.peers.send(request).await;
        let response = response.map_err(|lost| super::peers::failed(&address, within, lost))?;
        self.peers.answer(response, self.target, &address, within).await
    }
}
