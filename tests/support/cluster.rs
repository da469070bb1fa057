//! A group of real processes: started, killed, frozen and restarted by a test.
//!
//! Invariants: every process a test started is killed and reaped when the test ends, also when it
//! panics; the test then shows the end of each node's log. One group at a time runs on a machine
//! (a file lock, which holds across test binaries and nextest's processes too), so that the timing
//! of one test is not disturbed by another.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read as _;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::api::Api;

/// How long a node may take to serve: its log is read first, on a disk that others use as well.
const READY: Duration = Duration::from_secs(90);

/// How to start a group.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many nodes.
    pub nodes: usize,
    /// Further arguments of every node.
    pub args: Vec<String>,
    /// Environment of every node.
    pub env: Vec<(String, String)>,
}

impl Options {
    /// A group of so many nodes.
    pub fn nodes(nodes: usize) -> Self {
        Self { nodes, args: Vec::new(), env: Vec::new() }
    }

    /// With a lease, as `"1s"`.
    #[must_use]
    pub fn lease(mut self, lease: &str) -> Self {
        self.args.extend(["--lease".to_owned(), lease.to_owned()]);
        self
    }
}

/// The right to run processes on this machine.
pub struct Arena {
    _lock: File,
}

impl Arena {
    /// Waits until no other test runs processes.
    pub async fn enter() -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("one-cluster-at-a-time");
        let lock = tokio::task::spawn_blocking(move || {
            let lock = File::create(path).expect("the lock file can be made");
            rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
                .expect("the lock can be taken");
            lock
        });
        Self { _lock: lock.await.unwrap() }
    }
}

/// A port that is free now and that this process has not chosen before. It lies below the range of
/// outgoing connections: a node that is down must find its port free when it comes back.
pub fn free_address() -> SocketAddr {
    static CHOSEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let port = rand::rng().random_range(14_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() && CHOSEN.lock().unwrap().insert(port) {
            return SocketAddr::from(([127, 0, 0, 1], port));
        }
    }
}

/// The binary under test: this build's, or the one `TEST_BOTMESH_BINARY` names (a release build, an
/// older version).
fn binary() -> PathBuf {
    let named = std::env::var_os("TEST_BOTMESH_BINARY");
    named.unwrap_or_else(|| env!("CARGO_BIN_EXE_botmesh").into()).into()
}

/// One node.
pub struct Node {
    /// `n1`, `n2`, …
    pub name: String,
    /// Its data directory.
    pub dir: PathBuf,
    /// Its public listener.
    pub public: SocketAddr,
    /// Its cluster listener.
    pub cluster: SocketAddr,
    /// What it announces instead of its cluster listener.
    pub advertise: Option<SocketAddr>,
    /// Its environment at the next start.
    pub env: Vec<(String, String)>,
    secret_file: PathBuf,
    log: PathBuf,
    args: Vec<String>,
    child: Option<Child>,
}

impl Node {
    fn new(root: &Path, number: usize, options: &Options) -> Self {
        Self {
            name: format!("n{number}"),
            dir: root.join(format!("n{number}")),
            public: free_address(),
            cluster: free_address(),
            advertise: None,
            env: options.env.clone(),
            secret_file: root.join("secret"),
            log: root.join(format!("n{number}.log")),
            args: options.args.clone(),
            child: None,
        }
    }

    /// Base URL of the cluster listener.
    pub fn base(&self) -> String {
        format!("http://{}", self.cluster)
    }

    /// Base URL of the public listener.
    pub fn public_base(&self) -> String {
        format!("http://{}", self.public)
    }

    /// Its next start reads the cluster's secret from another file.
    pub fn use_secret(&mut self, file: &Path) {
        self.secret_file = file.to_owned();
    }

    /// Whether its process has been started and not ended by the test.
    pub fn runs(&self) -> bool {
        self.child.is_some()
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the node runs").id()
    }

    /// Starts its process, with these arguments after the usual ones.
    pub fn start(&mut self, more: &[&str]) {
        assert!(self.child.is_none(), "{} runs already", self.name);
        let log = File::options().create(true).append(true).open(&self.log).unwrap();
        let advertise = self.advertise.map(|address| address.to_string());
        let advertise = advertise.iter().flat_map(|address| ["--advertise", address.as_str()]);
        let child = Command::new(binary())
            .args(["run", "--name", &self.name])
            .arg("--dir")
            .arg(&self.dir)
            .args(["--public", &self.public.to_string()])
            .args(["--cluster", &self.cluster.to_string()])
            .arg("--secret-file")
            .arg(&self.secret_file)
            .args(&self.args)
            .args(advertise)
            .args(more)
            .envs(self.env.iter().cloned())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .expect("the binary starts");
        self.child = Some(child);
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).expect("a child has a pid");
        kill_process(pid, signal).expect("the child is still ours");
    }

    /// Kills it and waits until the kernel has ended it.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// How it ended, if it did by itself.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut()?.try_wait().expect("a child can be waited for")?;
        self.child = None;
        Some(status)
    }

    /// Waits until it ended by itself.
    pub async fn wait_ended(&mut self, within: Duration) -> ExitStatus {
        let until = Instant::now() + within;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(Instant::now() < until, "{} still runs after {within:?}", self.name);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// All it has printed.
    pub fn printed(&self) -> String {
        let mut text = String::new();
        let _ = File::open(&self.log).and_then(|mut log| log.read_to_string(&mut text));
        text
    }

    /// The last lines it printed.
    pub fn last_lines(&self, lines: usize) -> String {
        let text = self.printed();
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }
}

/// A group of nodes in a directory of its own.
pub struct Cluster {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The cluster's secret.
    pub secret: String,
    http: reqwest::Client,
    root: tempfile::TempDir,
    options: Options,
    _arena: Option<Arena>,
}

impl Cluster {
    /// Starts a group and waits until all of it serves.
    pub async fn start(options: Options) -> Self {
        Self::start_prepared(&options, Arena::enter().await, |_| {}).await
    }

    /// As [`Cluster::start`]; `prepare` sees the group before its first process runs.
    pub async fn start_prepared(
        options: &Options,
        arena: Arena,
        prepare: impl Fn(&mut Self),
    ) -> Self {
        for _ in 0..5 {
            let mut cluster = Self::prepare(options);
            prepare(&mut cluster);
            if cluster.form().await {
                cluster._arena = Some(arena);
                return cluster;
            }
        }
        panic!("five times a port was taken between choosing and using it");
    }

    /// The directories, addresses and arguments of a group that does not run yet.
    pub fn prepare(options: &Options) -> Self {
        let root = tempfile::Builder::new()
            .prefix("cluster-")
            .tempdir_in(env!("CARGO_TARGET_TMPDIR"))
            .unwrap();
        let secret = format!("test-secret-{}", uuid::Uuid::new_v4());
        let secret_file = root.path().join("secret");
        fs::write(&secret_file, &secret).unwrap();
        rustix::fs::chmod(&secret_file, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
        let nodes = (1..=options.nodes).map(|number| Node::new(root.path(), number, options));
        let nodes = nodes.collect();
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(Duration::from_secs(3))
            .build()
            .expect("a client without TLS can always be built");
        Self { nodes, secret, http, root, options: options.clone(), _arena: None }
    }

    /// One more node, which does not run yet; its index.
    pub fn add_node(&mut self) -> usize {
        let number = self.nodes.len() + 1;
        self.nodes.push(Node::new(self.root.path(), number, &self.options));
        number - 1
    }

    /// Takes a node out of the group, waits until the others say so, and ends its process.
    pub async fn leave(&mut self, index: usize, node_id: u64) {
        self.let_go(0, node_id).await;
        self.nodes[index].kill();
    }

    /// Has the group let a member go, through a node, and waits until that node says so.
    pub async fn let_go(&self, via: usize, node_id: u64) {
        let url = format!("{}/cluster/leave", self.nodes[via].base());
        let until = Instant::now() + 2 * READY;
        loop {
            let body = serde_json::json!({ "node_id": node_id });
            let call = self.http.post(&url).bearer_auth(&self.secret).json(&body);
            let (status, why) = match call.timeout(READY).send().await {
                Ok(answer) => (answer.status().as_u16(), answer.text().await.unwrap_or_default()),
                Err(error) => (503, error.to_string()),
            };
            // An attempt whose answer was lost may have done it.
            if (200..300).contains(&status) || status == 404 {
                break;
            }
            // So says a group that is electing, or does not hear enough of its voters yet.
            let again = matches!(status, 409 | 503) && Instant::now() < until;
            assert!(again, "leave: {status} {why}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        loop {
            let seen = self.status(via).await.expect("the node answers");
            let nodes = seen["nodes"].as_array().expect("the nodes are an array");
            if nodes.iter().all(|node| node["id"] != node_id) {
                break;
            }
            assert!(Instant::now() < until, "the node is still a member: {seen}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The id the group gave a node.
    pub async fn node_id(&self, index: usize) -> u64 {
        let status = self.status(index).await.expect("the node answers");
        status["node_id"].as_u64().expect("a member has an id")
    }

    /// Waits until every running node has marked its state at one index that comes after all that
    /// is applied now, and sees that the marks are equal there and at every other common index.
    pub async fn states_are_equal(&self) {
        let running: Vec<usize> = (0..self.nodes.len()).filter(|i| self.nodes[*i].runs()).collect();
        let mut applied = 0;
        for &index in &running {
            let status = self.status(index).await.expect("the node answers");
            applied = applied.max(status["applied"].as_u64().unwrap_or(0));
        }
        let until = Instant::now() + 2 * READY;
        loop {
            let mut marks: BTreeMap<u64, Vec<String>> = BTreeMap::new();
            for &index in &running {
                let status = self.status(index).await.expect("the node answers");
                for mark in status["state_marks"].as_array().expect("marks are an array") {
                    let at = mark["index"].as_u64().expect("a mark has an index");
                    marks.entry(at).or_default().push(mark["hash"].to_string());
                }
            }
            for (at, hashes) in &marks {
                let equal = hashes.iter().all(|hash| *hash == hashes[0]);
                assert!(equal, "the states differ at index {at}: {hashes:?}");
            }
            if marks.iter().any(|(at, hashes)| *at > applied && hashes.len() == running.len()) {
                return;
            }
            assert!(Instant::now() < until, "no common mark after index {applied}: {marks:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Founds the group with the first node and joins the others; `false` = a port was taken.
    async fn form(&mut self) -> bool {
        self.nodes[0].start(&["--bootstrap"]);
        if !self.came_up(0).await {
            return false;
        }
        let first = self.nodes[0].cluster.to_string();
        for index in 1..self.nodes.len() {
            self.nodes[index].start(&["--join", &first]);
            if !self.came_up(index).await {
                return false;
            }
        }
        self.wait_settled().await;
        true
    }

    async fn came_up(&mut self, index: usize) -> bool {
        let until = Instant::now() + READY;
        while Instant::now() < until {
            if let Some(status) = self.nodes[index].ended() {
                let printed = self.nodes[index].printed();
                if printed.to_lowercase().contains("in use") {
                    return false;
                }
                panic!("{} ended at its start: {status}\n{printed}", self.nodes[index].name);
            }
            if self.is_ready(index).await {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{} is not ready within {READY:?}", self.nodes[index].name);
    }

    /// Where this group keeps its files.
    pub fn root(&self) -> &Path {
        self.root.path()
    }

    /// A client of all nodes' cluster listeners.
    pub fn api(&self) -> Api {
        Api::new(self.nodes.iter().map(Node::base).collect(), &self.secret)
    }

    /// A client of all nodes' public listeners.
    pub fn public(&self) -> Api {
        Api::new(self.nodes.iter().map(Node::public_base).collect(), "")
    }

    /// Starts a node again, as the member it is, and waits until it serves.
    pub async fn restart(&mut self, index: usize) {
        self.nodes[index].start(&[]);
        self.wait_ready(index).await;
    }

    /// Whether a node answers `/readyz` with 200.
    pub async fn is_ready(&self, index: usize) -> bool {
        let url = format!("{}/readyz", self.nodes[index].base());
        self.http.get(url).send().await.is_ok_and(|answer| answer.status().as_u16() == 200)
    }

    /// Waits until a node serves; panics when its process ends instead.
    pub async fn wait_ready(&mut self, index: usize) {
        assert!(self.came_up(index).await, "a port of {} was taken", self.nodes[index].name);
    }

    /// `GET /cluster/status` of a node, if it answers.
    pub async fn status(&self, index: usize) -> Option<Value> {
        let url = format!("{}/cluster/status", self.nodes[index].base());
        let answer = self.http.get(url).bearer_auth(&self.secret).send().await.ok()?;
        answer.json().await.ok()
    }

    /// The index of the node that leads and says so itself.
    pub async fn leader(&self) -> usize {
        let until = Instant::now() + READY;
        while Instant::now() < until {
            for index in 0..self.nodes.len() {
                if !self.nodes[index].runs() {
                    continue;
                }
                let Some(status) = self.status(index).await else { continue };
                if status["role"] == "leader" {
                    return index;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no leader within {READY:?}");
    }

    /// Waits until all nodes are voters of one group and follow one leader.
    pub async fn wait_settled(&self) {
        let until = Instant::now() + READY;
        loop {
            let seen = futures_util::future::join_all(
                (0..self.nodes.len()).map(|index| self.status(index)),
            )
            .await;
            let leader = seen[0].as_ref().map(|status| status["leader"].clone());
            let agreed = seen.iter().all(|status| {
                status.as_ref().is_some_and(|status| {
                    let role = status["role"].as_str().unwrap_or_default();
                    status["leader"].is_u64()
                        && Some(&status["leader"]) == leader.as_ref()
                        && (role == "leader" || role == "follower")
                })
            });
            if agreed {
                return;
            }
            assert!(Instant::now() < until, "the group did not settle within {READY:?}: {seen:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Kills every process at one instant.
    pub fn kill_all(&mut self) {
        // All signals first, so that no survivor acts on the death of another.
        for node in self.nodes.iter().filter(|node| node.runs()) {
            node.signal(Signal::KILL);
        }
        for node in &mut self.nodes {
            node.kill();
        }
    }

    /// Starts every node that does not run, all at once, and waits until all serve.
    pub async fn restart_all(&mut self) {
        for node in self.nodes.iter_mut().filter(|node| !node.runs()) {
            node.start(&[]);
        }
        for index in 0..self.nodes.len() {
            self.wait_ready(index).await;
        }
        self.wait_settled().await;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            if let Some(status) = node.ended()
                && (status.signal().is_some() || !status.success())
            {
                eprintln!("{} had ended by itself: {status}", node.name);
            }
            node.kill();
            if std::thread::panicking() {
                eprintln!("--- {}, last lines:\n{}", node.name, node.last_lines(40));
            }
        }
    }
}
