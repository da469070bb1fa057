//! A node among its peers: who it is to them, whom it heard lately, and the connections to them.
//!
//! One HTTP client per kind of traffic, so that a large append or a snapshot delays no heartbeat
//! (HTTP/1.1 answers in order). Each request has a deadline of its own; connections idle for two
//! seconds are dropped, because a dead one in the pool starves a restarted peer (DESIGN 6).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::NodeOptions;
use super::group_time::GroupTime;
use super::identity::DataDir;
use super::levels::{self, Levels};
use super::way::Lost;
use super::wire::{self, Header, Refusal};
use crate::clock::{BootInstant, Clock};
use crate::codec::Kind;
use crate::types::NodeId;

/// How long a connection may lie idle.
const IDLE: Duration = Duration::from_secs(2);
/// How long a stream on which nothing is said may be silent before the kernel looks whether the
/// other end is there.
const ALIVE: Duration = Duration::from_secs(10);

/// For how long somebody heard counts as reachable.
pub(crate) const REACHABLE: Duration = Duration::from_millis(1500);

/// Kinds of traffic; each has its own connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Heartbeats, votes, read indexes: small and urgent.
    Beat,
    /// Log entries.
    Append,
    /// Snapshots.
    Snapshot,
    /// Forwarded batches and administration.
    Forward,
    /// Streams that end with the leader's process: each on a connection of its own.
    Attend,
}

/// The HTTP clients of a node.
#[derive(Clone, Debug)]
pub(crate) struct Clients {
    beat: Client,
    append: Client,
    snapshot: Client,
    forward: Client,
    attend: Client,
    #[cfg(feature = "test-util")]
    simulated: Option<super::simulated::Place>,
}

impl Clients {
    /// Builds the clients. All carry the secret.
    pub(crate) fn new(options: &NodeOptions) -> Result<Self, reqwest::Error> {
        use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
        let mut headers = HeaderMap::new();
        // A secret is printable ASCII: that is checked when it is taken.
        let mut value = HeaderValue::from_str(&options.secret.bearer())
            .expect("a checked secret is a valid header value");
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
        let build = || {
            let builder = Client::builder()
                .no_proxy()
                .http1_only()
                .tcp_nodelay(true)
                .connect_timeout(options.timing.connect)
                .pool_idle_timeout(IDLE)
                .default_headers(headers.clone());
            options.hosts.iter().fold(builder, |builder, (name, ip)| {
                // The port is the one the address names.
                builder.resolve(name, SocketAddr::new(*ip, 0))
            })
        };
        let attend = build().pool_max_idle_per_host(0).tcp_keepalive(ALIVE).build()?;
        let [beat, append, snapshot, forward] =
            [build().build()?, build().build()?, build().build()?, build().build()?];
        Ok(Self {
            beat,
            append,
            snapshot,
            forward,
            attend,
            #[cfg(feature = "test-util")]
            simulated: options.simulated.clone(),
        })
    }

    /// The client of a kind of traffic.
    pub(crate) fn of(&self, lane: Lane) -> &Client {
        match lane {
            Lane::Beat => &self.beat,
            Lane::Append => &self.append,
            Lane::Snapshot => &self.snapshot,
            Lane::Forward => &self.forward,
            Lane::Attend => &self.attend,
        }
    }

    /// Sends a request and returns once the head of the answer is there.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, Lost> {
        #[cfg(feature = "test-util")]
        if let Some(place) = &self.simulated {
            return place.send(request.build()?).await;
        }
        Ok(request.send().await?)
    }

    /// Whether somebody accepts a connection there.
    pub(crate) async fn knock(&self, address: &str) -> bool {
        #[cfg(feature = "test-util")]
        if let Some(place) = &self.simulated {
            return place.knock(address);
        }
        tokio::net::TcpStream::connect(address).await.is_ok()
    }
}

/// Why a call to a peer has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// No connection: it was certainly not executed.
    #[error("cannot connect to {address}: {why}")]
    Connect {
        /// Where to.
        address: String,
        /// Why.
        why: String,
    },
    /// The peer refused it: it was certainly not executed.
    #[error("{address} refuses: {refusal}")]
    Refused {
        /// Who.
        address: String,
        /// Why.
        refusal: Refusal,
    },
    /// It may have been executed.
    #[error("{address} did not answer within {within:?}")]
    Timeout {
        /// Who.
        address: String,
        /// How long was waited.
        within: Duration,
    },
    /// It may have been executed.
    #[error("the answer of {address} is lost: {why}")]
    Broken {
        /// Who.
        address: String,
        /// Why.
        why: String,
    },
}

impl CallError {
    /// Whether the peer has certainly done nothing.
    pub(crate) fn not_executed(&self) -> bool {
        match self {
            Self::Connect { .. } => true,
            // A failure may have come half-way.
            Self::Refused { refusal, .. } => !matches!(refusal, Refusal::Failed { .. }),
            Self::Timeout { .. } | Self::Broken { .. } => false,
        }
    }
}

/// This node as its peers see it.
#[derive(Debug)]
pub(crate) struct Peers {
    /// The group.
    pub(crate) cluster: Uuid,
    /// This node's id.
    pub(crate) id: NodeId,
    dir: DataDir,
    clients: Clients,
    clock: Arc<dyn Clock>,
    /// What the wall clocks of this node and its peers show.
    pub(crate) time: GroupTime,
    /// Which commands this node's program and those of its peers understand.
    pub(crate) levels: Levels,
    /// When a checked message of each peer last came. A plain mutex: held for a map access.
    heard: Mutex<HashMap<NodeId, BootInstant>>,
    /// Where each peer is, as the membership or the peer itself said last.
    book: Mutex<HashMap<NodeId, String>>,
    /// Where this node is.
    address: String,
    /// Set once a peer said that this directory was restored or copied: from then on this node
    /// neither votes nor acknowledges.
    doubt: OnceLock<String>,
}

impl Peers {
    pub(crate) fn new(
        cluster: Uuid,
        id: NodeId,
        dir: DataDir,
        clients: Clients,
        clock: Arc<dyn Clock>,
        address: String,
        levels: Levels,
    ) -> Arc<Self> {
        Arc::new(Self {
            cluster,
            id,
            dir,
            clients,
            time: GroupTime::new(clock.clone()),
            clock,
            levels,
            heard: Mutex::default(),
            book: Mutex::default(),
            address,
            doubt: OnceLock::new(),
        })
    }

    /// The header of a message to `to`.
    pub(crate) fn header(&self, to: NodeId) -> Header {
        let boot = self.dir.boot();
        Header {
            cluster: self.cluster,
            from: self.id,
            to,
            boot: boot.counter,
            nonce: boot.nonce,
            address: self.address.clone(),
            wall_ms: self.time.own_ms(),
        }
    }

    /// Why this node must not take part, where that is so.
    pub(crate) fn doubt(&self) -> Option<&str> {
        self.doubt.get().map(String::as_str)
    }

    /// Checks who a message is from and for, and records the sender's boot durably before
    /// anything of it is acted on.
    pub(crate) fn admit(&self, header: &Header) -> Result<(), Refusal> {
        if header.cluster != self.cluster {
            return Err(Refusal::WrongCluster { ours: self.cluster, theirs: header.cluster });
        }
        if header.to != self.id {
            return Err(Refusal::WrongNode { ours: self.id, meant: header.to });
        }
        if let Some(doubt) = self.doubt() {
            return Err(Refusal::NotServing { why: doubt.to_owned() });
        }
        match self.dir.meet(header.from, header.boot, header.nonce) {
            Ok(Ok(())) => {}
            Ok(Err(restored)) => {
                return Err(Refusal::RestoredDirectory { why: restored.to_string() });
            }
            Err(error) => return Err(Refusal::Failed { why: error.to_string() }),
        }
        self.heard.lock().insert(header.from, self.clock.now());
        self.time.heard(header.from, header.wall_ms);
        self.levels.met(header.from, header.nonce);
        self.note_address(header.from, &header.address);
        Ok(())
    }

    /// Takes note of where a peer is.
    pub(crate) fn note_address(&self, peer: NodeId, address: &str) {
        let mut book = self.book.lock();
        if book.get(&peer).is_none_or(|known| known != address) {
            book.insert(peer, address.to_owned());
        }
    }

    /// Where a peer is, as far as anybody said.
    pub(crate) fn address(&self, peer: NodeId) -> Option<String> {
        self.book.lock().get(&peer).cloned()
    }

    /// Whether this peer was heard within `within`.
    pub(crate) fn heard_within(&self, peer: NodeId, within: Duration) -> bool {
        if peer == self.id {
            return true;
        }
        let heard = self.heard.lock().get(&peer).copied();
        heard.is_some_and(|at| self.clock.now() - at <= within)
    }

    /// The client of a kind of traffic.
    pub(crate) fn client(&self, lane: Lane) -> &Client {
        self.clients.of(lane)
    }

    /// See [`Clients::send`].
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, Lost> {
        self.clients.send(request).await
    }

    /// Asks a peer and waits for its checked answer.
    pub(crate) async fn call<Q, A>(
        &self,
        lane: Lane,
        (to, address): (NodeId, &str),
        path: &str,
        question: &Q,
        within: Duration,
    ) -> Result<A, CallError>
    where
        Q: Serialize,
        A: DeserializeOwned,
    {
        let body = wire::seal(Kind::Request, &self.header(to), question);
        // A megabyte takes its time on a slow link; 8 MiB/s is slow.
        let within = within + Duration::from_millis(body.len() as u64 >> 13);
        let request = self
            .client(lane)
            .post(format!("http://{address}{path}"))
            .timeout(within)
            .header(levels::HEADER, self.levels.announcement())
            .body(body);
        let response = self.clients.send(request).await;
        let response = response.map_err(|lost| failed(address, within, lost))?;
        self.answer(response, to, address, within).await
    }

    /// Reads and checks the answer of a peer.
    pub(crate) async fn answer<A: DeserializeOwned>(
        &self,
        response: Response,
        to: NodeId,
        address: &str,
        within: Duration,
    ) -> Result<A, CallError> {
        let status = response.status();
        let said = response.headers().get(levels::HEADER).cloned();
        let body = response.bytes().await.map_err(|error| failed(address, within, error.into()))?;
        if status != StatusCode::OK {
            return Err(self.refused(address, status, &body));
        }
        let broken = |why: String| CallError::Broken { address: address.to_owned(), why };
        let (header, payload) =
            wire::open(Kind::Response, &body).map_err(|error| broken(error.to_string()))?;
        if header.from != to {
            return Err(broken(format!("node {} answered for node {to}", header.from)));
        }
        self.admit(&header).map_err(|refusal| broken(refusal.to_string()))?;
        self.levels.heard(header.from, header.nonce, said.as_ref());
        wire::message(payload).map_err(|error| broken(error.to_string()))
    }

    fn refused(&self, address: &str, status: StatusCode, body: &[u8]) -> CallError {
        let address = address.to_owned();
        match serde_json::from_slice::<Refusal>(body) {
            Ok(refusal) => {
                if let Refusal::RestoredDirectory { why } = &refusal
                    && self.doubt.set(why.clone()).is_ok()
                {
                    tracing::error!(%address, why, "a peer refuses this data directory");
                }
                CallError::Refused { address, refusal }
            }
            Err(_) => CallError::Broken { address, why: format!("status {status}") },
        }
    }
}

/// What a failed request means.
pub(crate) fn failed(address: &str, within: Duration, lost: Lost) -> CallError {
    let address = address.to_owned();
    match lost {
        Lost::Refused(why) | Lost::Connect(why) => CallError::Connect { address, why },
        Lost::Timeout(_) => CallError::Timeout { address, within },
        Lost::Broken(why) => CallError::Broken { address, why },
    }
}
