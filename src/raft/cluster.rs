//! `/cluster/*`: join, leave, yield-leader and status, as JSON (SPEC K1, N4).
//!
//! Any node may be asked; what only the leader can do is passed on to it once. A status is always
//! the asked node's own view.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::member::{Leader, Member};
use super::membership::{self, Applicant, MembershipError};
use super::node::Inner;
use super::peers::Lane;
use super::types::Peer;
use super::way::Lost;
use super::{NodeStatus, Role, Status, levels, process};
use crate::group::Unavailable;
use crate::supervise::DEATH_PATH;
use crate::types::{NameError, NodeId, ProcessToken, check_name};

/// Marks a request that was passed on already.
const HOP: &str = "botmesh-hop";
/// How long a leader may take for what was passed on to it.
const PASS_WITHIN: Duration = Duration::from_secs(20);
/// How long a report of a death waits to be committed: an election, and a little more. Whoever
/// reports tells all nodes, and again.
const DECLARE_WITHIN: Duration = Duration::from_secs(2);
/// The longest a join is waited for.
const WAIT_MS_MAX: u64 = 10 * 60_000;

/// The body of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// A code programs rely on.
    pub error: String,
    /// What is wrong and what to do, for people.
    pub message: String,
    /// When to ask again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// Its HTTP status.
    #[serde(skip)]
    pub status: u16,
}

impl Problem {
    fn new(status: StatusCode, error: &str, message: impl Into<String>) -> Self {
        let status = status.as_u16();
        Self { error: error.to_owned(), message: message.into(), retry_after_ms: None, status }
    }

    fn later(mut self, retry_after_ms: u64) -> Self {
        self.retry_after_ms = Some(retry_after_ms);
        self
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(&self)).into_response();
        if let Some(after) = self.retry_after_ms
            && let Ok(value) = after.div_ceil(1000).to_string().parse()
        {
            response.headers_mut().insert(axum::http::header::RETRY_AFTER, value);
        }
        response
    }
}

impl From<Unavailable> for Problem {
    fn from(why: Unavailable) -> Self {
        let error = match &why {
            Unavailable::NoQuorum { .. } => "no_quorum",
            Unavailable::Timeout { .. } => "timeout",
            Unavailable::Overloaded { .. } => "overloaded",
            Unavailable::NotServing { .. } => "not_serving",
            Unavailable::TooNew { .. } => "upgrade_needed",
        };
        Self::new(StatusCode::SERVICE_UNAVAILABLE, error, why.to_string()).later(500)
    }
}

impl From<MembershipError> for Problem {
    fn from(error: MembershipError) -> Self {
        let message = error.to_string();
        let conflict = |code| Self::new(StatusCode::CONFLICT, code, message.clone());
        match error {
            MembershipError::NotLeader => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_leader", message).later(200)
            }
            MembershipError::UnknownNode { .. } => {
                Self::new(StatusCode::NOT_FOUND, "unknown_node", message)
            }
            MembershipError::Unconfirmed { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unconfirmed", message).later(1000)
            }
            MembershipError::IdNotFree { .. } => conflict("node_id_not_free"),
            MembershipError::LastVoter { .. } => conflict("last_voter"),
            MembershipError::WouldLoseQuorum { .. } => conflict("would_lose_quorum"),
            MembershipError::MembershipChanged { .. } => conflict("membership_changed"),
            MembershipError::NoSuccessor { .. } => conflict("no_successor"),
            MembershipError::Full => conflict("group_full"),
            MembershipError::ProgramTooOld { .. } => conflict("program_too_old"),
        }
    }
}

/// `POST /cluster/join`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// The node's name.
    pub name: String,
    /// `host:port` of its cluster listener.
    pub address: String,
    /// Made once and kept on its disk: the same nonce is the same node.
    pub nonce: Uuid,
    /// Refused unless it is the id this nonce has: ids are never asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_id: Option<NodeId>,
    /// The member it was before its data was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<NodeId>,
    /// Waits so long for it to catch up and become a voter, where it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// The answer to a join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinAnswer {
    /// The group.
    pub cluster_id: String,
    /// The node's id.
    pub node_id: NodeId,
    /// What it is now.
    pub role: Role,
    /// Who votes.
    pub voters: Vec<NodeId>,
    /// All members.
    pub nodes: Vec<NodeStatus>,
    /// What else there is to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// `POST /cluster/leave`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaveRequest {
    /// Who leaves.
    pub node_id: NodeId,
    /// Log index of the membership the request was made for: refused where another came since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub membership: Option<u64>,
}

/// The answer to a leave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaveAnswer {
    /// Who left.
    pub node_id: NodeId,
    /// Who votes now.
    pub voters: Vec<NodeId>,
    /// Set where the group is weaker than it should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// `POST /cluster/yield-leader`; the body may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YieldRequest {
    /// Who is to lead; the voter that is furthest where nobody is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<NodeId>,
}

/// The answer to a yield.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct YieldAnswer {
    /// Who led.
    pub from: NodeId,
    /// Who leads.
    pub to: NodeId,
}

/// `POST /cluster/declare-dead`: whoever sends it has waited for the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeathReport {
    /// The token of the process, in hexadecimal digits.
    pub process: String,
}

/// The answer to a report, once the group has committed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeathAnswer {
    /// How many sessions it had, as this node saw it.
    pub sessions: usize,
}

/// The routes for people and programs.
pub(crate) fn routes() -> Router<Arc<Inner>> {
    Router::new()
        .route("/cluster/status", get(status))
        .route("/cluster/join", post(join))
        .route("/cluster/leave", post(leave))
        .route("/cluster/yield-leader", post(yield_leader))
        .route(DEATH_PATH, post(declare_dead))
        .layer(DefaultBodyLimit::max(64 << 10))
}

async fn status(State(inner): State<Arc<Inner>>) -> Json<Status> {
    Json(inner.status_probed().await)
}

fn taken<T>(body: Result<Json<T>, JsonRejection>) -> Result<T, Problem> {
    match body {
        Ok(Json(body)) => Ok(body),
        Err(rejection) => Err(Problem {
            status: rejection.status().as_u16(),
            ..Problem::new(StatusCode::BAD_REQUEST, "bad_request", rejection.body_text())
        }),
    }
}

/// Who does what was asked: this node, or another that already did.
enum Turn<A> {
    Mine(Arc<Member>),
    Done(A),
}

/// How long a change of the membership waits for a leader before it says that there is none.
const LEADER_WITHIN: Duration = Duration::from_secs(2);

/// Passes a request on to the leader, unless that is this node.
async fn at_leader<Q: Serialize, A: DeserializeOwned>(
    inner: &Inner,
    headers: &HeaderMap,
    path: &str,
    request: &Q,
    within: Duration,
) -> Result<Turn<A>, Problem> {
    let member = inner.member()?;
    // Between two leaders, and before a new one has heard its majority, there is none.
    let began = member.clock.now();
    while member.leader() == Leader::Nobody && member.clock.now() - began < LEADER_WITHIN {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    match member.leader() {
        Leader::Here => Ok(Turn::Mine(member)),
        Leader::Nobody => Err(member.no_quorum().into()),
        Leader::At(id, _) if headers.contains_key(HOP) => {
            let message = format!("node {id} leads now");
            let status = StatusCode::SERVICE_UNAVAILABLE;
            Err(Problem::new(status, "not_leader", message).later(200))
        }
        Leader::At(_, address) => {
            let level = headers.get(levels::HEADER);
            pass(inner, &address, path, (request, level), within).await.map(Turn::Done)
        }
    }
}

async fn pass<Q: Serialize, A: DeserializeOwned>(
    inner: &Inner,
    address: &str,
    path: &str,
    (request, level): (&Q, Option<&HeaderValue>),
    within: Duration,
) -> Result<A, Problem> {
    let lost = |why: String| {
        let message = format!("the leader at {address} did not answer: {why}; ask again");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "leader_lost", message).later(500)
    };
    let url = format!("http://{address}{path}");
    let passed = inner.clients.of(Lane::Forward).post(url).header(HOP, "1").timeout(within);
    let passed = match level {
        Some(level) => passed.header(levels::HEADER, level),
        None => passed,
    };
    let response = inner.clients.send(passed.json(request)).await;
    let response = response.map_err(|error| lost(error.why().to_owned()))?;
    let status = response.status();
    let body = response.bytes().await.map_err(|error| lost(Lost::from(error).why().to_owned()))?;
    if status.is_success() {
        return serde_json::from_slice(&body).map_err(|error| lost(error.to_string()));
    }
    let problem = serde_json::from_slice::<Problem>(&body).map_err(|e| lost(e.to_string()))?;
    Err(Problem { status: status.as_u16(), ..problem })
}

/// A cluster address as it may be dialled.
fn check_address(address: &str) -> Result<(), Problem> {
    let port = address
        .rsplit_once(':')
        .and_then(|(host, port)| (!host.is_empty()).then(|| port.parse::<u16>().ok()).flatten());
    if port.is_some_and(|port| port > 0) && address.len() <= 256 {
        return Ok(());
    }
    let message = format!("{address:?} is no HOST:PORT of a cluster listener");
    Err(Problem::new(StatusCode::BAD_REQUEST, "bad_address", message))
}

async fn join(
    State(inner): State<Arc<Inner>>,
    headers: HeaderMap,
    body: Result<Json<JoinRequest>, JsonRejection>,
) -> Result<Json<JoinAnswer>, Problem> {
    let request = taken(body)?;
    check_name("node name", &request.name)
        .map_err(|error| Problem::new(StatusCode::BAD_REQUEST, "bad_name", error.to_string()))?;
    check_address(&request.address)?;
    let wait_ms = request.wait_ms.unwrap_or(0).min(WAIT_MS_MAX);
    let within = PASS_WITHIN + Duration::from_millis(wait_ms);
    let member = match at_leader(&inner, &headers, "/cluster/join", &request, within).await? {
        Turn::Mine(member) => member,
        Turn::Done(answer) => return Ok(Json(answer)),
    };
    let peer = Peer {
        name: request.name,
        address: request.address,
        nonce: request.nonce.as_u128(),
        replaces: request.replaces,
    };
    let level = headers.get(levels::HEADER).and_then(levels::announced);
    let applicant = Applicant { peer, wanted: request.node_id, level };
    let id = membership::admit(&member, applicant).await?;
    let note = wait_for_vote(&member, id, wait_ms).await?;
    let status = inner.status();
    let voters: Vec<NodeId> = member.membership().membership().voter_ids().collect();
    Ok(Json(JoinAnswer {
        cluster_id: member.peers.cluster.to_string(),
        node_id: id,
        role: if voters.contains(&id) { Role::Follower } else { Role::Learner },
        voters,
        nodes: status.nodes,
        note,
    }))
}

/// Waits until a member votes, or is known to stay a learner; in the latter case says why.
async fn wait_for_vote(
    member: &Member,
    id: NodeId,
    wait_ms: u64,
) -> Result<Option<String>, Problem> {
    if wait_ms == 0 {
        return Ok(None);
    }
    let decided = async {
        loop {
            // In the middle of a change the old voters still have to agree.
            let configs = member.membership();
            if configs.membership().get_joint_config().iter().all(|voters| voters.contains(&id)) {
                return None;
            }
            if membership::stays_learner(member, id) {
                return Some(
                    "it stays a learner: the number of voters stays odd, and it votes as soon as \
                     another node joins or a voter leaves"
                        .to_owned(),
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_millis(wait_ms), decided).await.map_err(|_| {
        let message = format!(
            "node {id} was taken in and did not catch up within {wait_ms} ms; it becomes a voter \
             once it has: start it, or see whether its address can be reached"
        );
        Problem::new(StatusCode::GATEWAY_TIMEOUT, "not_caught_up", message).later(1000)
    })
}

async fn leave(
    State(inner): State<Arc<Inner>>,
    headers: HeaderMap,
    body: Result<Json<LeaveRequest>, JsonRejection>,
) -> Result<Json<LeaveAnswer>, Problem> {
    let request = taken(body)?;
    let path = "/cluster/leave";
    let member = match at_leader(&inner, &headers, path, &request, PASS_WITHIN).await? {
        Turn::Mine(member) => member,
        Turn::Done(answer) => return Ok(Json(answer)),
    };
    let id = request.node_id;
    if id == member.id() {
        // A leader that leaves hands over first; the one that leads then lets it go.
        if member.membership().membership().voter_ids().count() == 1 {
            return Err(MembershipError::LastVoter { id }.into());
        }
        membership::yield_leader(&member, None, Duration::from_secs(5)).await?;
        let began = member.clock.now();
        while member.clock.now() - began < Duration::from_secs(5) {
            if let Leader::At(_, address) = member.leader() {
                return pass(&inner, &address, path, (&request, None), PASS_WITHIN).await.map(Json);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        return Err(member.no_quorum().into());
    }
    let left = membership::leave(&member, id, request.membership).await?;
    Ok(Json(LeaveAnswer { node_id: id, voters: left.voters, warning: left.warning }))
}

async fn yield_leader(
    State(inner): State<Arc<Inner>>,
    headers: HeaderMap,
    body: axum::body::Bytes,
) -> Result<Json<YieldAnswer>, Problem> {
    let request: YieldRequest = if body.is_empty() {
        YieldRequest::default()
    } else {
        serde_json::from_slice(&body).map_err(|error| {
            Problem::new(StatusCode::BAD_REQUEST, "bad_request", error.to_string())
        })?
    };
    let path = "/cluster/yield-leader";
    let member = match at_leader(&inner, &headers, path, &request, PASS_WITHIN).await? {
        Turn::Mine(member) => member,
        Turn::Done(answer) => return Ok(Json(answer)),
    };
    let yielded = membership::yield_leader(&member, request.to, Duration::from_secs(5)).await?;
    Ok(Json(YieldAnswer { from: yielded.from, to: yielded.to }))
}

async fn declare_dead(
    State(inner): State<Arc<Inner>>,
    body: Result<Json<DeathReport>, JsonRejection>,
) -> Result<Json<DeathAnswer>, Problem> {
    let report = taken(body)?;
    let dead: ProcessToken = report.process.parse().map_err(|error: NameError| {
        Problem::new(StatusCode::BAD_REQUEST, "bad_process", error.to_string())
    })?;
    let member = inner.member()?;
    tracing::info!(process = %dead, "told that a process is dead");
    // Where it led, nothing can be committed before another does.
    member.suspicions.dead(dead);
    let sessions = member.state.read(|machine| machine.sessions_of(dead));
    process::declare(&member, dead, DECLARE_WITHIN).await?;
    tracing::info!(process = %dead, sessions, "a process is dead; what it held passes on");
    Ok(Json(DeathAnswer { sessions }))
}
