//! A node that belongs to a group: Raft, its peers, and what both say about the leader.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use openraft::async_runtime::WatchReceiver;
use openraft::metrics::{RaftDataMetrics, RaftServerMetrics};
use openraft::{Instant, Raft, ServerState};
use parking_lot::Mutex;

use super::barrier::Barriers;
use super::identity::KnownPeer;
use super::log_store::LogStore;
use super::peers::{CallError, Lane, Peers, REACHABLE};
use super::proposals::{Carrier, Proposals, Sent};
use super::room::Room;
use super::server::{own_propose, own_read_index};
use super::session_clock::SessionClock;
use super::state_store::StateStore;
use super::suspect::Suspicions;
use super::types::{Peer, Proposal, StoredMembership, TypeConfig, Vote};
use super::wire::{ForwardAnswer, ReadIndex, ReadIndexAnswer};
use super::{Role, Timing};
use crate::clock::{BootInstant, Clock};
use crate::group::Unavailable;
use crate::machine::{BatchReply, ClientId, Command, Machine};
use crate::outside;
use crate::types::NodeId;

/// A leader that was not heard for this many heartbeats is not asked.
const SILENT_BEATS: u32 = 20;
/// How long the own Raft may take to commit a batch before its outcome is called unknown.
const COMMIT_WITHIN: Duration = Duration::from_secs(2);
/// How long a forwarded batch may take.
const FORWARD_WITHIN: Duration = Duration::from_secs(3);

/// Who leads, as far as this node knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Leader {
    /// This node.
    Here,
    /// Another.
    At(NodeId, String),
    /// Nobody that a majority follows.
    Nobody,
}

/// A member of a group, while its process runs.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) raft: Raft<TypeConfig, StateStore>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) proposals: Arc<Proposals>,
    pub(crate) barriers: Arc<Barriers>,
    pub(crate) sessions: Arc<SessionClock>,
    pub(crate) suspicions: Suspicions,
    pub(crate) log: LogStore,
    pub(crate) state: StateStore,
    pub(crate) room: Arc<Room>,
    pub(crate) timing: Timing,
    pub(crate) clock: Arc<dyn Clock>,
    /// One membership change at a time, each computed on the membership the last one left. An async
    /// mutex: it is held across the change.
    pub(crate) change: tokio::sync::Mutex<()>,
    /// Whom this node last took entries or a heartbeat from, and when.
    heard_leader: Mutex<Option<(NodeId, BootInstant)>>,
    /// Whether it has applied what its first leader had committed; never goes back.
    caught_up: AtomicBool,
    incoming: PathBuf,
}

/// The parts of a [`Member`].
pub(crate) struct Parts {
    pub(crate) raft: Raft<TypeConfig, StateStore>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) proposals: Arc<Proposals>,
    pub(crate) sessions: Arc<SessionClock>,
    pub(crate) log: LogStore,
    pub(crate) state: StateStore,
    pub(crate) room: Arc<Room>,
    pub(crate) timing: Timing,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) incoming: PathBuf,
}

impl Member {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { raft, peers, proposals, sessions, log, state, room, timing, clock, incoming } =
            parts;
        Self {
            raft,
            peers,
            proposals,
            barriers: Arc::default(),
            sessions,
            suspicions: Suspicions::default(),
            log,
            state,
            room,
            timing,
            clock,
            change: tokio::sync::Mutex::new(()),
            heard_leader: Mutex::new(None),
            caught_up: AtomicBool::new(false),
            incoming,
        }
    }

    /// This node's id.
    pub(crate) fn id(&self) -> NodeId {
        self.peers.id
    }

    /// What Raft says of this node's part in the group.
    pub(crate) fn server(&self) -> RaftServerMetrics<TypeConfig> {
        self.raft.server_metrics().borrow_watched().clone()
    }

    /// What Raft says of the log.
    pub(crate) fn data(&self) -> RaftDataMetrics<TypeConfig> {
        self.raft.data_metrics().borrow_watched().clone()
    }

    /// The membership in effect, committed or not.
    pub(crate) fn membership(&self) -> Arc<StoredMembership> {
        self.raft.server_metrics().borrow_watched().membership_config.clone()
    }

    /// What an entry proposed now is stamped with, where this node leads.
    pub(crate) fn stamp_ms(&self) -> u64 {
        let voters = self.membership().membership().voter_ids().collect();
        let reached = self.state.read(Machine::now_ms);
        self.peers.time.stamp_ms(self.id(), &voters, reached)
    }

    /// A member's name and address.
    pub(crate) fn peer(&self, id: NodeId) -> Option<Peer> {
        self.membership().membership().get_node(&id).cloned()
    }

    /// The vote in effect, on disk or not; `None` once Raft has stopped.
    pub(crate) async fn vote(&self) -> Option<Vote> {
        self.raft.with_raft_state(|state| *state.vote_ref()).await.ok()
    }

    /// Where a member is, as it said itself, or else as the membership says.
    pub(crate) fn address_of(&self, id: NodeId) -> Option<String> {
        self.peers.address(id).or_else(|| self.peer(id).map(|peer| peer.address))
    }

    /// Takes note of a message of a leader.
    pub(crate) fn heard_leader(&self, from: NodeId) {
        *self.heard_leader.lock() = Some((from, self.clock.now()));
    }

    /// Whether this node has applied what its first leader had committed.
    pub(crate) fn caught_up(&self) -> bool {
        self.caught_up.load(Ordering::Acquire)
    }

    pub(crate) fn set_caught_up(&self) {
        self.caught_up.store(true, Ordering::Release);
    }

    fn silence_max(&self) -> Duration {
        self.timing.heartbeat * SILENT_BEATS
    }

    /// Who leads. A leader that lost its majority, or that was not heard for a second, is none.
    pub(crate) fn leader(&self) -> Leader {
        let metrics = self.raft.server_metrics();
        let metrics = metrics.borrow_watched();
        let Some(leader) = metrics.current_leader else { return Leader::Nobody };
        if leader == self.id() {
            if metrics.state != ServerState::Leader {
                return Leader::Nobody;
            }
            let alone = metrics.membership_config.membership().voter_ids().all(|id| id == leader);
            // One look at a time: a writer that waits for the one would stop the other.
            drop(metrics);
            return if alone || self.quorum_acked() { Leader::Here } else { Leader::Nobody };
        }
        let fresh = self.heard_leader.lock().is_some_and(|(from, at)| {
            from == leader && self.clock.now() - at <= self.silence_max()
        });
        match metrics.membership_config.membership().get_node(&leader) {
            Some(peer) if fresh => {
                let address = self.peers.address(leader).unwrap_or_else(|| peer.address.clone());
                Leader::At(leader, address)
            }
            _ => Leader::Nobody,
        }
    }

    /// Whether a majority answered this leader lately.
    fn quorum_acked(&self) -> bool {
        let data = self.raft.data_metrics();
        let acked = data.borrow_watched().last_quorum_acked;
        acked.is_some_and(|at| at.elapsed() <= self.silence_max())
    }

    /// Why the group cannot be asked, where that is so.
    pub(crate) fn hindrance(&self) -> Option<Unavailable> {
        if let Some(doubt) = self.peers.doubt() {
            return Some(Unavailable::NotServing { why: doubt.to_owned() });
        }
        if let Some(lasts) = self.lasting_hindrance() {
            return Some(lasts);
        }
        match self.leader() {
            Leader::Here | Leader::At(..) => None,
            Leader::Nobody => Some(self.no_quorum()),
        }
    }

    /// What hinders this node itself, and will not pass within a deadline.
    pub(crate) fn lasting_hindrance(&self) -> Option<Unavailable> {
        let halted = self.state.halted().map(|why| Unavailable::NotServing { why });
        halted.or_else(|| self.room.hindrance())
    }

    /// How many voters answer, this node included where it is one.
    pub(crate) fn no_quorum(&self) -> Unavailable {
        let membership = self.membership();
        let voters: Vec<NodeId> = membership.membership().voter_ids().collect();
        let reachable = voters.iter().filter(|id| self.peers.heard_within(**id, REACHABLE)).count();
        Unavailable::NoQuorum { reachable, voters: voters.len() }
    }

    /// What this node does in the group.
    pub(crate) fn role(&self) -> Role {
        match self.raft.server_metrics().borrow_watched().state {
            ServerState::Leader => Role::Leader,
            ServerState::Candidate => Role::Candidate,
            ServerState::Follower => Role::Follower,
            ServerState::Learner | ServerState::Shutdown => Role::Learner,
        }
    }

    /// The lease a command renews: such a command must not be delivered late (DESIGN 3 rule 10).
    pub(crate) fn lease_renewed(&self, command: &Command) -> Option<Duration> {
        match command {
            Command::RenewSession { session, .. } => {
                let view = self.state.read(|machine| machine.session(*session));
                view.map(|view| Duration::from_millis(view.lease_ms))
            }
            Command::RenewLock { ttl_ms, .. } => Some(Duration::from_millis(*ttl_ms)),
            Command::Keyed { command, .. } => self.lease_renewed(command),
            _ => None,
        }
    }

    /// Where the next snapshot that comes in is written.
    pub(crate) fn incoming_snapshot(&self) -> std::io::Result<PathBuf> {
        std::fs::create_dir_all(&self.incoming)?;
        Ok(self.incoming.join(format!("{}", outside::uuid().simple())))
    }

    /// One ReadIndex round: up to where to apply.
    pub(crate) async fn read_index(&self) -> Result<u64, Unavailable> {
        if let Some(why) = self.state.halted() {
            return Err(Unavailable::NotServing { why });
        }
        let answer = match self.leader() {
            Leader::Nobody => return Err(self.no_quorum()),
            Leader::Here => own_read_index(self).await,
            Leader::At(id, address) => {
                let to = (id, address.as_str());
                let within = self.timing.election_max;
                let asked = self.peers.call(Lane::Beat, to, "/raft/read-index", &ReadIndex, within);
                let answer = tokio::select! {
                    biased;
                    answer = asked => answer,
                    // Whoever led may be silent; the next round asks whoever leads now.
                    () = another_leads(self, id) => return Err(self.no_quorum()),
                };
                answer.map_err(|error: CallError| {
                    tracing::debug!(%error, "no read index");
                    self.no_quorum()
                })?
            }
        };
        match answer {
            ReadIndexAnswer::At(index) => Ok(index),
            ReadIndexAnswer::NotLeader(_) | ReadIndexAnswer::NoQuorum => Err(self.no_quorum()),
        }
    }

    /// The members other than this one, for the identity file.
    pub(crate) fn known_peers(&self) -> Vec<KnownPeer> {
        let membership = self.membership();
        let others = membership.membership().nodes().filter(|(id, _)| **id != self.id());
        others
            .map(|(&node_id, peer)| KnownPeer {
                node_id,
                name: peer.name.clone(),
                address: peer.address.clone(),
            })
            .collect()
    }

    /// Returns once this node has applied up to `index`.
    pub(crate) async fn applied(&self, index: u64) -> Result<(), Unavailable> {
        let mut applied = self.state.applied();
        let reached = applied.wait_for(|applied| applied.is_some_and(|at| at.index >= index)).await;
        reached
            .map(|_| ())
            .map_err(|_| Unavailable::NotServing { why: "it is shutting down".to_owned() })
    }
}

/// Batches of this member on their way to whoever leads.
#[derive(Debug)]
pub(crate) struct MemberCarrier(pub(crate) Arc<Member>);

#[async_trait]
impl Carrier for MemberCarrier {
    fn hindrance(&self) -> Option<Unavailable> {
        self.0.hindrance()
    }

    fn stamp_ms(&self) -> u64 {
        match self.0.leader() {
            Leader::Here => self.0.stamp_ms(),
            // The leader puts its own in this one's place; what would slip past it moves no time.
            Leader::At(..) | Leader::Nobody => 0,
        }
    }

    async fn propose(&self, proposal: Proposal) -> Sent {
        let answer = match self.0.leader() {
            Leader::Nobody => return Sent::NotTaken,
            Leader::Here => {
                let write = own_propose(&self.0, proposal);
                tokio::time::timeout(COMMIT_WITHIN, write).await.unwrap_or(ForwardAnswer::Unknown)
            }
            Leader::At(id, address) => {
                let member = self.0.clone();
                // Its own task: the local apply often comes before the answer, and dropping a
                // request half-way costs its connection.
                let asked = tokio::spawn(async move {
                    let to = (id, address.as_str());
                    member
                        .peers
                        .call(Lane::Forward, to, "/raft/forward", &proposal, FORWARD_WITHIN)
                        .await
                });
                let asked = tokio::select! {
                    biased;
                    asked = asked => asked,
                    // Whoever led may be silent for ever, and this batch in its log or not.
                    () = another_leads(&self.0, id) => return Sent::Unknown,
                };
                match asked {
                    Ok(Ok(answer)) => answer,
                    Ok(Err(error)) => {
                        tracing::debug!(%error, "a batch was not forwarded");
                        if error.not_executed() {
                            return Sent::NotTaken;
                        }
                        ForwardAnswer::Unknown
                    }
                    Err(_) => ForwardAnswer::Unknown,
                }
            }
        };
        match answer {
            ForwardAnswer::Committed => Sent::Committed,
            ForwardAnswer::NotLeader(_) => Sent::NotTaken,
            ForwardAnswer::Unknown => Sent::Unknown,
        }
    }

    fn remembered(&self, client: ClientId, lane: u16, serial: u64) -> Option<BatchReply> {
        self.0.state.read(|machine| machine.remembered(client, lane, serial))
    }
}

/// Returns once this node follows another leader than this one, or leads itself.
async fn another_leads(member: &Member, than: NodeId) {
    let mut metrics = member.raft.server_metrics();
    loop {
        let leader = metrics.borrow_and_update().current_leader;
        if leader.is_some_and(|leader| leader != than) {
            return;
        }
        if metrics.changed().await.is_err() {
            // It shuts down; whoever waits is dropped.
            return std::future::pending().await;
        }
    }
}
