//! A node: the handle everything above holds, and its life from an empty directory to a shutdown.
//!
//! ```text
//!   open ──► identity there? ──yes──► member ──► shutdown
//!             │ no                      ▲
//!             ├─ bootstrap ─────────────┤ founds a group of one
//!             └─ join, expect ── asks ──┘ the group allocates its id (in the background)
//! ```
//!
//! `open` returns as soon as the directory is open; [`Node::joined`] waits until the node belongs
//! to a group. The routes answer from the first moment: symmetric replicas find each other by them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use openraft::Raft;
use parking_lot::{Mutex, RwLock};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::error::NodeError;
use super::hooks::Hook;
use super::identity::{DataDir, Identity};
use super::levels::Levels;
use super::log_store::{LogOptions, LogStore};
use super::member::{Leader, Member, MemberCarrier, Parts};
use super::network::Network;
use super::peers::{Clients, Peers};
use super::proposals::{Answer, Proposals};
use super::room::Room;
use super::session_clock::SessionClock;
use super::settings::settings;
use super::state_store::{Memory, StateOptions, StateStore};
use super::types::Peer;
use super::{
    NodeOptions, OpenError, Readiness, Start, Status, bootstrap, cluster, membership, process,
    server, watch as watching,
};
use crate::clock::{BootInstant, Clock};
use crate::group::{ExecuteError, Group, Unavailable, Wakeups};
use crate::machine::{Command, LEVEL_LOWEST, Machine};
use crate::outside;
use crate::supervise::{self, Link};
use crate::types::{NodeId, ProcessToken, check_name};
use crate::watch;

/// The founder's id; every other is allocated by the group (DESIGN 2).
const FOUNDER: NodeId = 1;

/// How far a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It looks for its group; what it waits for.
    Seeking(String),
    /// It belongs to a group.
    Member,
    /// It never will.
    Failed(String),
    /// It was shut down.
    Stopped,
}

/// What a node is made of.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) options: NodeOptions,
    pub(crate) clients: Clients,
    wakeups: Wakeups,
    /// Names the process it runs in.
    pub(crate) process: ProcessToken,
    /// The parent that waits for it.
    pub(crate) link: Option<Arc<Link>>,
    /// Let go at shutdown, so that the same process may open the directory again.
    dir: Mutex<Option<DataDir>>,
    /// There from the moment the node belongs to a group until its shutdown.
    member: RwLock<Option<Arc<Member>>>,
    /// What is read while there is no member: nothing at first, and after the shutdown what the member
    /// had. A reader whose barrier has passed must not find an empty state behind it.
    beside: RwLock<Memory>,
    pub(crate) phase: watch::Sender<Phase>,
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

/// A node of a group. Clones are handles to the same one.
#[derive(Clone, Debug)]
pub struct Node {
    pub(crate) inner: Arc<Inner>,
}

impl Node {
    /// Opens a data directory and starts what it says, or what `options.start` says where it says
    /// nothing yet. Does not wait for other nodes.
    pub async fn open(options: NodeOptions) -> Result<Self, NodeError> {
        check_name("node name", &options.name)
            .map_err(|error| NodeError::Options(error.to_string()))?;
        options.machine.check().map_err(NodeError::Options)?;
        if let Start::Expect { count, peers } = &options.start {
            bootstrap::check_expected(*count, peers, &options.advertise)
                .map_err(NodeError::Options)?;
        }
        let link = supervise::attach()?;
        let process = link.as_ref().map_or_else(ProcessToken::random, |link| link.token());
        let clients =
            Clients::new(&options).map_err(|error| NodeError::Options(error.to_string()))?;
        let holder = format!("node {} at {}", options.name, options.advertise);
        let root = options.dir.clone();
        let dir = blocking(move || DataDir::occupied(&root, &holder, process)).await?;
        if let Some(link) = &link {
            link.start();
        }
        let inner = Arc::new(Inner {
            clients,
            wakeups: Wakeups::new(),
            process,
            link,
            dir: Mutex::new(Some(dir.clone())),
            member: RwLock::new(None),
            beside: RwLock::new(Memory::empty()),
            phase: watch::channel(Phase::Seeking("starting".to_owned())).0,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            options,
        });
        inner.begin(dir).await?;
        Ok(Self { inner })
    }

    /// Returns once this node belongs to a group and has started Raft.
    pub async fn joined(&self, within: Duration) -> Result<(), NodeError> {
        let mut phase = self.inner.phase.subscribe();
        let settled = phase.wait_for(|phase| !matches!(phase, Phase::Seeking(_)));
        let why = match tokio::time::timeout(within, settled).await {
            Ok(Ok(phase)) => match &*phase {
                Phase::Member => return Ok(()),
                Phase::Failed(why) => why.clone(),
                Phase::Seeking(_) | Phase::Stopped => "it was shut down".to_owned(),
            },
            Ok(Err(_)) => "it was shut down".to_owned(),
            Err(_) => match &*self.inner.phase.borrow() {
                Phase::Seeking(why) => why.clone(),
                _ => return Ok(()),
            },
        };
        Err(NodeError::NotJoined { why })
    }

    /// `/raft/*` and `/cluster/*`. Every request has to carry the cluster secret.
    pub fn router<S: Clone + Send + Sync + 'static>(&self) -> Router<S> {
        let guard = from_fn_with_state(self.inner.clone(), demand_secret);
        server::routes().merge(cluster::routes()).layer(guard).with_state(self.inner.clone())
    }

    /// As the trait object the upper layers take.
    pub fn as_group(&self) -> Arc<dyn Group> {
        Arc::new(self.clone())
    }

    /// What it says of itself and its group.
    pub fn status(&self) -> Status {
        self.inner.status()
    }

    /// Whether it serves.
    pub fn readiness(&self) -> Readiness {
        match self.inner.member() {
            Ok(member) => {
                Readiness { caught_up: member.caught_up(), quorum: member.hindrance().is_none() }
            }
            Err(_) => Readiness { caught_up: false, quorum: false },
        }
    }

    /// Resolves when this node has halted at something it does not understand, with what and what to
    /// do about it. It takes part no longer; nothing was passed over, and a newer version of the
    /// program goes on from there.
    pub async fn halted(&self) -> String {
        let Ok(member) = self.inner.member() else { return std::future::pending().await };
        let mut halted = member.state.watch_halted();
        drop(member);
        match halted.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            // Shut down before.
            Err(_) => std::future::pending().await,
        }
    }

    /// Commands waiting for a batch.
    pub fn commands_waiting(&self) -> usize {
        self.inner.member().map_or(0, |member| member.proposals.waiting())
    }

    /// Hands leadership on where this node has it, and answers which node leads then.
    pub async fn yield_leader(&self, within: Duration) -> Option<NodeId> {
        let member = self.inner.member().ok()?;
        membership::yield_leader(&member, None, within).await.ok().map(|yielded| yielded.to)
    }

    /// Ends it: hands leadership on, stops, and lets the directory go.
    pub async fn shutdown(&self) {
        if let Ok(member) = self.inner.member()
            && member.leader() == Leader::Here
            && let Err(error) =
                membership::yield_leader(&member, None, member.timing.election_max * 3).await
        {
            tracing::debug!(%error, "leadership was not handed on");
        }
        self.inner.halt().await;
    }

    /// Ends it as a crash would: nothing is handed on and nobody is told.
    #[cfg(feature = "test-util")]
    pub async fn crash(&self) {
        self.inner.halt().await;
    }
}

/// Runs what blocks off the runtime.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, OpenError> + Send + 'static,
) -> Result<T, NodeError> {
    match outside::off_thread(work).await {
        Ok(done) => Ok(done?),
        Err(error) => Err(NodeError::Raft(error.to_string())),
    }
}

/// 401 to whoever does not know the secret.
async fn demand_secret(State(inner): State<Arc<Inner>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    if inner.options.secret.admits(given) {
        return next.run(request).await;
    }
    let body = serde_json::json!({
        "error": "unauthorized",
        "message": "send the cluster secret as `Authorization: Bearer SECRET`",
    });
    (StatusCode::UNAUTHORIZED, axum::Json(body)).into_response()
}

impl Inner {
    /// The member this node is.
    pub(crate) fn member(&self) -> Result<Arc<Member>, Unavailable> {
        if let Some(member) = self.member.read().as_ref() {
            return Ok(member.clone());
        }
        let why = match &*self.phase.borrow() {
            Phase::Seeking(why) => format!("it belongs to no group yet ({why})"),
            Phase::Failed(why) => why.clone(),
            Phase::Member | Phase::Stopped => "it is shut down".to_owned(),
        };
        Err(Unavailable::NotServing { why })
    }

    /// The member, where it takes this command and the group understands it.
    async fn takes(&self, command: &Command, by: BootInstant) -> Result<Arc<Member>, ExecuteError> {
        let member = self.member().map_err(ExecuteError::NotExecuted)?;
        if let Some(lasts) = member.lasting_hindrance() {
            return Err(ExecuteError::NotExecuted(lasts));
        }
        member.is_understood(command, by).await.map_err(ExecuteError::NotExecuted)?;
        Ok(member)
    }

    /// The data directory, until the shutdown.
    pub(crate) fn dir(&self) -> Result<DataDir, NodeError> {
        let stopped = || NodeError::NotJoined { why: "it was shut down".to_owned() };
        self.dir.lock().clone().ok_or_else(stopped)
    }

    /// Decides what the directory is to become.
    async fn begin(self: &Arc<Self>, dir: DataDir) -> Result<(), NodeError> {
        let mut lost = dir.former()?;
        if dir.quarantined()?.is_none() {
            if let Some(identity) = dir.identity() {
                let cluster_id = identity.cluster_id;
                match self.start(identity, false).await {
                    Ok(()) => {
                        if let Start::Join(addresses) = self.options.start.clone() {
                            let looks =
                                bootstrap::compare_join_flag(self.clone(), cluster_id, addresses);
                            let stop = self.stop.clone();
                            self.tasks.spawn(stop.run_until_cancelled_owned(looks));
                        }
                        return Ok(());
                    }
                    // Doubtful state is not used; the node comes back as a new one.
                    Err(NodeError::Open(OpenError::Quarantined { .. })) => lost = dir.identity(),
                    Err(_) if dir.quarantined()?.is_some() => lost = dir.identity(),
                    Err(error) => return Err(error),
                }
            }
        } else {
            lost = dir.identity().or(lost);
            if lost.is_none() {
                let why = "its directory is quarantined and does not say who it was; move the \
                           directory away and join with an empty one";
                return Err(NodeError::NotJoined { why: why.to_owned() });
            }
        }
        if let Some(lost) = lost {
            return self.rejoin(dir, lost).await;
        }
        match self.options.start.clone() {
            Start::Member => {
                Err(NodeError::NotAMember { dir: self.options.dir.display().to_string() })
            }
            Start::Bootstrap => self.found().await,
            Start::Join(addresses) => {
                self.seek(bootstrap::join(self.clone(), addresses, None));
                Ok(())
            }
            Start::Expect { peers, .. } => {
                self.seek(bootstrap::expect(self.clone(), peers));
                Ok(())
            }
        }
    }

    /// Sets doubtful state aside and asks the peers it knew to be taken in as a new node.
    async fn rejoin(self: &Arc<Self>, dir: DataDir, lost: Identity) -> Result<(), NodeError> {
        let doubtful = dir.quarantined()?.is_some() || dir.identity().is_some();
        let why = dir.quarantined()?.unwrap_or_else(|| "its state was set aside".to_owned());
        let addresses: Vec<String> = lost.peers.iter().map(|peer| peer.address.clone()).collect();
        if addresses.is_empty() {
            return Err(NodeError::NotJoined {
                why: format!(
                    "its data is damaged ({why}) and it knows no peer that has a copy; restore a \
                     backup into an empty directory"
                ),
            });
        }
        tracing::error!(node_id = lost.node_id, why, "rejoining as a new node");
        // Once is enough: the nonce that was asked under must stay, or one rejoin becomes two.
        if doubtful {
            blocking(move || dir.set_aside().map(|_| ())).await?;
        }
        self.seek(bootstrap::join(self.clone(), addresses, Some(lost.node_id)));
        Ok(())
    }

    /// Runs the search for a group in the background.
    fn seek(
        self: &Arc<Self>,
        search: impl Future<Output = Result<(), NodeError>> + Send + 'static,
    ) {
        let inner = self.clone();
        self.tasks.spawn(async move {
            let found = tokio::select! {
                biased;
                () = inner.stop.cancelled() => return,
                found = search => found,
            };
            if let Err(error) = found {
                tracing::error!(%error, "this node did not become a member");
                inner.phase.send_replace(Phase::Failed(error.to_string()));
            }
        });
    }

    /// Founds a group of one.
    pub(crate) async fn found(self: &Arc<Self>) -> Result<(), NodeError> {
        let identity = Identity {
            cluster_id: outside::uuid(),
            node_id: FOUNDER,
            name: self.options.name.clone(),
            peers: Vec::new(),
        };
        self.become_member(identity).await
    }

    /// Stamps the directory and starts.
    pub(crate) async fn become_member(
        self: &Arc<Self>,
        identity: Identity,
    ) -> Result<(), NodeError> {
        let dir = self.dir()?;
        let stamped = identity.clone();
        blocking(move || dir.stamp(stamped)).await?;
        self.start(identity, true).await
    }

    /// Starts Raft on a stamped directory.
    async fn start(self: &Arc<Self>, identity: Identity, fresh: bool) -> Result<(), NodeError> {
        let dir = self.dir()?;
        let NodeOptions { timing, limits, .. } = self.options;
        let clock = self.options.clock.clone();
        let client = crate::machine::ClientId { node: identity.node_id, boot: dir.boot().counter };
        let stop = self.stop.child_token();
        let proposals =
            Arc::new(Proposals::new(client, limits.commands_waiting_max, clock.clone(), stop));
        let sessions = Arc::new(SessionClock::new(clock.clone()));
        let hook = Arc::new(Hook {
            proposals: proposals.clone(),
            sessions: sessions.clone(),
            wakeups: self.wakeups.clone(),
            #[cfg(feature = "test-util")]
            simulated: self.options.simulated.clone(),
        });
        let opening = dir.clone();
        let state_options = StateOptions {
            level: self.options.command_level,
            cuts: !self.options.is_simulated(),
            ..StateOptions::default()
        };
        #[cfg(feature = "test-util")]
        let simulated = self.options.simulated.clone();
        let (room, log, state, pristine) = blocking(move || {
            let room = Arc::new(Room::new(opening.root(), limits.disk_low_water));
            #[cfg(feature = "test-util")]
            let log = match simulated {
                Some(place) => LogStore::simulated(&opening, place.disk()),
                None => LogStore::open(&opening, LogOptions::default())?,
            };
            #[cfg(not(feature = "test-util"))]
            let log = LogStore::open(&opening, LogOptions::default())?;
            let pristine = log.is_pristine();
            let state = StateStore::open(&opening, &log, state_options, hook, Some(room.clone()))?;
            Ok((room, log, state, pristine))
        })
        .await?;
        let peers = Peers::new(
            identity.cluster_id,
            identity.node_id,
            dir.clone(),
            self.clients.clone(),
            clock.clone(),
            self.options.advertise.clone(),
            Levels::new(self.options.command_level),
        );
        let settings = settings(&timing, &limits).map_err(NodeError::Options)?;
        let network = Network::new(peers.clone(), timing);
        let raft = Raft::new(identity.node_id, settings, network, log.clone(), state.clone());
        let raft = raft.await.map_err(|error| match state.halted() {
            Some(why) => NodeError::Halted { why },
            None => NodeError::Raft(error.to_string()),
        })?;
        // The founder of a group of one initialises it, also where it was cut off before it could:
        // its identity is only stamped where no log, no vote and no other member exist.
        if identity.node_id == FOUNDER && pristine {
            let nonce = dir.boot().join_nonce.as_u128();
            let NodeOptions { name, advertise, .. } = &self.options;
            let me = Peer { name: name.clone(), address: advertise.clone(), nonce, replaces: None };
            raft.initialize(std::collections::BTreeMap::from([(FOUNDER, me)]))
                .await
                .map_err(|error| NodeError::Raft(error.to_string()))?;
        }
        let incoming = dir.root().join("incoming");
        // What a transfer that was cut off left behind.
        let _ = std::fs::remove_dir_all(&incoming);
        let member = Arc::new(Member::new(Parts {
            raft,
            peers,
            proposals,
            sessions,
            log,
            state,
            room,
            timing,
            clock,
            incoming,
        }));
        let Identity { node_id, cluster_id, .. } = identity;
        tracing::info!(node_id, %cluster_id, fresh, "member of a group");
        self.run(member);
        Ok(())
    }

    /// Starts the member's tasks.
    fn run(self: &Arc<Self>, member: Arc<Member>) {
        for lane in Proposals::lane_numbers() {
            let carrier = MemberCarrier(member.clone());
            let proposals = member.proposals.clone();
            self.tasks.spawn(async move { proposals.run_lane(lane, &carrier).await });
        }
        watching::spawn(self, &member);
        process::spawn(self, &member);
        *self.member.write() = Some(member);
        self.phase.send_replace(Phase::Member);
    }

    /// Stops everything and lets the directory go.
    async fn halt(self: &Arc<Self>) {
        self.phase.send_replace(Phase::Stopped);
        self.stop.cancel();
        let member = {
            let mut member = self.member.write();
            if let Some(member) = &*member {
                *self.beside.write() = member.state.memory();
            }
            member.take()
        };
        self.dir.lock().take();
        if let Some(member) = member {
            if let Err(error) = member.raft.shutdown().await {
                tracing::warn!(%error, "Raft did not stop cleanly");
            }
            member.state.close().await;
            member.log.close().await;
        }
        self.tasks.close();
        if tokio::time::timeout(Duration::from_secs(5), self.tasks.wait()).await.is_err() {
            tracing::warn!("some tasks of the node did not end");
        }
    }
}

#[async_trait]
impl Group for Node {
    fn node_id(&self) -> NodeId {
        self.inner.member().map_or(0, |member| member.id())
    }

    fn clock(&self) -> &dyn Clock {
        &*self.inner.options.clock
    }

    async fn execute(&self, command: Command, deadline: BootInstant) -> Answer {
        let member = self.inner.takes(&command, deadline).await?;
        let renewal = member.lease_renewed(&command);
        member.proposals.execute(command, renewal, deadline, || member.hindrance()).await
    }

    async fn execute_by(&self, command: Command, latest: BootInstant, by: BootInstant) -> Answer {
        let member = self.inner.takes(&command, by).await?;
        member.proposals.execute_by(command, latest, by, || member.hindrance()).await
    }

    async fn barrier(&self, deadline: BootInstant) -> Result<(), Unavailable> {
        let member = self.inner.member()?;
        let began = member.clock.now();
        let passed = async {
            loop {
                let asking = member.clone();
                let ask = move || {
                    let member = asking.clone();
                    async move { member.read_index().await }
                };
                match member.barriers.index(ask).await {
                    Ok(index) => return member.applied(index).await,
                    Err(why @ Unavailable::NotServing { .. }) => return Err(why),
                    // An election takes less than most deadlines; the next round starts later than
                    // this barrier, so it serves as well.
                    Err(_) => tokio::time::sleep(member.timing.heartbeat / 2).await,
                }
            }
        };
        tokio::select! {
            biased;
            passed = passed => passed,
            () = member.clock.sleep_until(deadline) => Err(member
                .hindrance()
                .unwrap_or(Unavailable::Timeout { waited: member.clock.now() - began })),
        }
    }

    fn read(&self, look: &mut dyn FnMut(&Machine)) {
        match self.inner.member() {
            Ok(member) => member.state.read(look),
            Err(_) => self.inner.beside.read().read(look),
        }
    }

    fn wakeups(&self) -> &Wakeups {
        &self.inner.wakeups
    }

    fn is_durable(&self) -> bool {
        true
    }

    fn command_level(&self) -> u32 {
        self.inner.member().map_or(LEVEL_LOWEST, |member| member.command_level())
    }

    fn process(&self) -> Option<ProcessToken> {
        Some(self.inner.process)
    }
}
