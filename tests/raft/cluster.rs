//! Nodes on port-0 listeners, and what tests wait for.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use botmesh::clock::{Clock, SystemClock};
use botmesh::group::{ExecuteError, Group, look};
use botmesh::machine::{
    Authority, Command, Expect, Op, QueueKey, QueueKind, Reply, RowKey, SessionKind, Table,
};
use botmesh::raft::{Node, NodeError, NodeOptions, Role, Secret, Start, Status, Timing};
use botmesh::types::{Incarnation, NodeId, Prefix, TicketId};
use parking_lot::Mutex;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A generous bound for anything that should happen soon, on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);

/// One node with its listener. Dropping it kills it.
pub(crate) struct Running {
    pub(crate) node: Node,
    pub(crate) address: String,
    pub(crate) dir: PathBuf,
    /// Requests taken, by path.
    pub(crate) taken: Arc<Mutex<BTreeMap<String, u64>>>,
    server: JoinHandle<()>,
}

impl Running {
    /// Ends it as a crash would: connections are cut, nothing is handed on.
    pub(crate) async fn crash(self) {
        self.server.abort();
        self.node.crash().await;
    }

    /// Ends it gracefully.
    pub(crate) async fn stop(self) {
        self.node.shutdown().await;
        self.server.abort();
    }

    pub(crate) fn status(&self) -> Status {
        self.node.status()
    }

    pub(crate) fn id(&self) -> NodeId {
        self.node.node_id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The directories, the secret and the ports of a test's nodes.
pub(crate) struct Lab {
    pub(crate) root: TempDir,
    pub(crate) secret: Secret,
    timing: Timing,
}

impl Lab {
    pub(crate) fn new() -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        Self {
            root: tempfile::tempdir().unwrap(),
            secret: Secret::random(),
            timing: Timing::default(),
        }
    }

    /// With another beat.
    pub(crate) fn with_timing(self, timing: Timing) -> Self {
        Self { timing, ..self }
    }

    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(crate) fn options(&self, name: &str, address: &str, start: Start) -> NodeOptions {
        let options = NodeOptions::new(name, self.dir(name), address, self.secret.clone());
        NodeOptions { start, timing: self.timing, ..options }
    }

    /// Starts a node on a listener of its own.
    pub(crate) async fn start(&self, name: &str, start: Start) -> Running {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        self.start_on(listener, name, start).await.unwrap()
    }

    pub(crate) async fn start_on(
        &self,
        listener: TcpListener,
        name: &str,
        start: Start,
    ) -> Result<Running, NodeError> {
        let address = listener.local_addr().unwrap().to_string();
        let options = self.options(name, &address, start);
        self.serve(listener, options).await
    }

    pub(crate) async fn serve(
        &self,
        listener: TcpListener,
        options: NodeOptions,
    ) -> Result<Running, NodeError> {
        self.serve_as(listener, options, |router| router).await
    }

    /// As [`Lab::serve`], with something in front of the node's routes.
    pub(crate) async fn serve_as(
        &self,
        listener: TcpListener,
        options: NodeOptions,
        wrap: impl FnOnce(axum::Router) -> axum::Router,
    ) -> Result<Running, NodeError> {
        let (address, dir) = (options.advertise.clone(), options.dir.clone());
        let node = Node::open(options).await?;
        let taken = Arc::<Mutex<BTreeMap<String, u64>>>::default();
        let counted = taken.clone();
        let count = axum::middleware::from_fn(
            move |request: axum::extract::Request, next: axum::middleware::Next| {
                *counted.lock().entry(request.uri().path().to_owned()).or_default() += 1;
                next.run(request)
            },
        );
        let router = wrap(node.router::<()>().layer(count));
        let server = tokio::spawn(async move {
            axum::serve(listener, router).await.unwrap();
        });
        Ok(Running { node, address, dir, taken, server })
    }

    /// Starts a node again, on another port.
    pub(crate) async fn restart(&self, name: &str) -> Running {
        self.start(name, Start::Member).await
    }

    /// Three voters: n1 founds, n2 and n3 join.
    pub(crate) async fn three(&self) -> Vec<Running> {
        let first = self.start("n1", Start::Bootstrap).await;
        let join = Start::Join(vec![first.address.clone()]);
        let second = self.start("n2", join.clone()).await;
        let third = self.start("n3", join).await;
        let nodes = vec![first, second, third];
        until("three voters", || nodes.iter().all(|one| voters(&one.status()) == 3)).await;
        nodes
    }

    pub(crate) fn client(&self) -> reqwest::Client {
        let mut headers = reqwest::header::HeaderMap::new();
        headers.insert("authorization", self.secret.bearer().parse().unwrap());
        reqwest::Client::builder().no_proxy().default_headers(headers).build().unwrap()
    }
}

pub(crate) fn voters(status: &Status) -> usize {
    status.nodes.iter().filter(|node| node.role != Role::Learner).count()
}

/// Waits for a condition.
pub(crate) async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let waited = tokio::time::timeout(SOON, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "waited too long for {what}");
}

/// Who leads, by the word of all these nodes.
pub(crate) async fn leader_of(nodes: &[&Running]) -> usize {
    let mut found = None;
    until("a leader all know", || {
        let said: Vec<_> = nodes.iter().map(|one| one.status().leader).collect();
        let agreed = said.iter().all(|id| id.is_some() && *id == said[0]);
        found = nodes.iter().position(|one| Some(one.id()) == said[0]);
        agreed && found.is_some()
    })
    .await;
    found.unwrap()
}

pub(crate) fn prefix() -> Prefix {
    Prefix::new("test").unwrap()
}

pub(crate) fn row(key: &str) -> RowKey {
    RowKey { table: Table::Kv, prefix: prefix(), key: key.to_owned() }
}

pub(crate) fn put(key: &str, value: &[u8], expect: Expect) -> Command {
    Command::Commit {
        by: Authority::Nobody,
        ops: vec![Op::Put { row: row(key), value: value.to_vec(), expect, ttl_ms: None }],
    }
}

pub(crate) async fn execute(node: &Node, command: Command) -> Result<Reply, ExecuteError> {
    node.execute(command, SystemClock.now() + SOON).await
}

/// What this node's own machine holds.
pub(crate) fn local(node: &Node, key: &str) -> Option<Vec<u8>> {
    look(node, |machine| machine.row(&row(key)).map(|row| row.value))
}

/// A linearizable read.
pub(crate) async fn read(node: &Node, key: &str) -> Option<Vec<u8>> {
    node.barrier(SystemClock.now() + SOON).await.unwrap();
    local(node, key)
}

/// Hash of a node's whole logical state.
pub(crate) fn state_hash(node: &Node) -> u64 {
    look(node, |machine| machine.freeze().hash())
}

/// Waits until all have applied the same and are in the same state.
pub(crate) async fn converge(nodes: &[&Running]) {
    until("equal states", || {
        let applied: Vec<u64> = nodes.iter().map(|one| one.status().applied).collect();
        applied.iter().all(|one| *one == applied[0])
            && nodes.iter().all(|one| state_hash(&one.node) == state_hash(&nodes[0].node))
    })
    .await;
}

/// The status of an HTTP answer and its body.
pub(crate) async fn post(
    lab: &Lab,
    node: &Running,
    path: &str,
    body: serde_json::Value,
) -> (u16, serde_json::Value) {
    let url = format!("http://{}{path}", node.address);
    let response = lab.client().post(url).json(&body).send().await.unwrap();
    let status = response.status().as_u16();
    (status, response.json().await.unwrap_or_default())
}

/// Opens a session that outlives the test.
pub(crate) async fn session(node: &Node, replica: &str) -> Incarnation {
    let command = Command::OpenSession {
        prefix: prefix(),
        kind: SessionKind::Remote,
        replica: replica.to_owned(),
        node: node.node_id(),
        lease_ms: 600_000,
    };
    match execute(node, command).await.unwrap() {
        Reply::Session { session, .. } => session,
        other => panic!("{other:?}"),
    }
}

/// Takes a ticket: an effect that shows itself when it happens twice.
pub(crate) fn take(session: Incarnation, chat: &str) -> Command {
    let queue = QueueKey { kind: QueueKind::Turn, prefix: prefix(), name: chat.to_owned() };
    Command::TakeTicket { session, queue, if_free: false }
}

/// The tickets a session has, as this node knows.
pub(crate) fn tickets(node: &Node, session: Incarnation) -> Vec<TicketId> {
    let mut all: Vec<TicketId> = look(node, |machine| {
        machine.tickets_of(session).into_iter().map(|(ticket, ..)| ticket).collect()
    });
    all.sort();
    all
}
