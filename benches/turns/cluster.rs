//! Two `botmesh run` processes and the node of this process, one group.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use botmesh::coordinator::{Coordinator, CoordinatorOptions, GroupCoordinator};
use botmesh::group::Group;
use botmesh::raft::{Node, NodeOptions, Secret, Start, Status};
use botmesh::types::Prefix;
use serde_json::{Value, json};

use super::Fault;

/// How long the group may take for any one change.
const PATIENCE: Duration = Duration::from_secs(20);

/// Who is to lead.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// The node of this process.
    Here,
    /// One of the others.
    There,
}

/// What an idle group does, a second.
pub(crate) struct Idle {
    /// Requests that reached the node of this process.
    pub(crate) requests: f64,
    /// Log entries.
    pub(crate) entries: f64,
}

/// The group. Dropping it kills the processes.
pub(crate) struct Cluster {
    root: tempfile::TempDir,
    secret: Secret,
    node: Node,
    requests: Arc<AtomicU64>,
    others: Vec<Other>,
}

struct Other {
    child: Child,
    cluster: String,
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Cluster {
    pub(crate) async fn start() -> Result<Self, Fault> {
        let root =
            tempfile::Builder::new().prefix("bench-").tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let secret = Secret::random();
        std::fs::write(root.path().join("secret"), secret.reveal())?;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let options = NodeOptions {
            start: Start::Bootstrap,
            ..NodeOptions::new("n1", root.path().join("n1"), &address, secret.clone())
        };
        let node = Node::open(options).await?;
        let requests = Arc::new(AtomicU64::new(0));
        let counted =
            node.router::<()>().layer(from_fn_with_state(requests.clone(), count_request));
        tokio::spawn(async move { axum::serve(listener, counted).await });
        node.joined(PATIENCE).await?;
        let mut cluster = Self { root, secret, node, requests, others: Vec::new() };
        for name in ["n2", "n3"] {
            let other = cluster.spawn(name, &address)?;
            cluster.others.push(other);
        }
        cluster.settled(|status| status.nodes.len() == 3).await?;
        cluster.voters().await?;
        Ok(cluster)
    }

    fn spawn(&self, name: &str, join: &str) -> Result<Other, Fault> {
        let dir = self.root.path().join(name);
        let log = std::fs::File::create(self.root.path().join(format!("{name}.log")))?;
        let cluster = free_address()?;
        let child = Command::new(env!("CARGO_BIN_EXE_botmesh"))
            .args(["run", "--name", name, "--public", "127.0.0.1:0", "--cluster", &cluster])
            .args(["--join", join, "--log", "warn"])
            .arg("--dir")
            .arg(dir)
            .arg("--secret-file")
            .arg(self.root.path().join("secret"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        Ok(Other { child, cluster })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.root.path()
    }

    pub(crate) fn group(&self) -> Arc<dyn Group> {
        self.node.as_group()
    }

    /// A fresh, open coordinator on the node of this process.
    pub(crate) async fn coordinator(&self) -> Result<Arc<dyn Coordinator>, Fault> {
        let prefix = Prefix::new("bench")?;
        let coordinator =
            GroupCoordinator::new(self.group(), prefix, CoordinatorOptions::default());
        tokio::time::timeout(PATIENCE, coordinator.open()).await??;
        Ok(Arc::new(coordinator))
    }

    async fn settled(&self, done: impl Fn(&Status) -> bool) -> Result<(), Fault> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let status = self.node.status();
            if status.leader.is_some() && done(&status) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let logs = ["n2.log", "n3.log"]
            .map(|log| std::fs::read_to_string(self.root.path().join(log)).unwrap_or_default());
        Err(format!("the group did not settle: {:?}\n{}", self.node.status(), logs.join("\n"))
            .into())
    }

    async fn voters(&self) -> Result<(), Fault> {
        use botmesh::raft::Role::{Follower, Leader};
        let votes = |status: &Status| {
            status.nodes.iter().filter(|node| matches!(node.role, Leader | Follower)).count() == 3
        };
        self.settled(votes).await
    }

    /// Moves Raft leadership and waits until it is there.
    pub(crate) async fn lead(&self, who: Who) -> Result<(), Fault> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            let status = self.node.status();
            let here = status.leader.is_some() && status.leader == status.node_id;
            if status.leader.is_some() && here == (who == Who::Here) {
                return Ok(());
            }
            if here {
                self.node.yield_leader(PATIENCE).await;
            } else if status.leader.is_some() {
                // It may have lost the lead meanwhile; then the next look says so.
                let _ = self.yield_to_this_node(&status).await;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Err("leadership did not move".into())
    }

    async fn yield_to_this_node(&self, status: &Status) -> Result<(), Fault> {
        let leader = status.nodes.iter().find(|node| Some(node.id) == status.leader);
        let leader = leader.ok_or("no leader")?;
        let url = format!("http://{}/cluster/yield-leader", leader.address);
        let request = client()?.post(url).header("authorization", self.secret.bearer());
        request.json(&json!({ "to": status.node_id })).send().await?.error_for_status()?;
        Ok(())
    }

    /// Counts what an idle group does.
    pub(crate) async fn idle(&self, length: Duration) -> Idle {
        let (requests, applied) = (self.requests.load(Relaxed), self.node.status().applied);
        tokio::time::sleep(length).await;
        let seconds = length.as_secs_f64();
        Idle {
            requests: (self.requests.load(Relaxed) - requests) as f64 / seconds,
            entries: (self.node.status().applied - applied) as f64 / seconds,
        }
    }

    /// The last entry the node of this process has applied.
    pub(crate) fn applied(&self) -> u64 {
        self.node.status().applied
    }

    /// Resident memory of the `botmesh run` processes, in MiB.
    pub(crate) fn resident_mib(&self) -> Result<Vec<f64>, Fault> {
        let resident = |other: &Other| -> Result<f64, Fault> {
            let status = std::fs::read_to_string(format!("/proc/{}/status", other.child.id()))?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
            let kib: f64 = line
                .and_then(|line| line.split_ascii_whitespace().next())
                .ok_or("no VmRSS")?
                .parse()?;
            Ok(kib / 1024.0)
        };
        self.others.iter().map(resident).collect()
    }

    /// The coordination API of a node in another process.
    pub(crate) fn api(&self) -> Result<Api, Fault> {
        let base = format!("http://{}/v1/bench", self.others[0].cluster);
        Ok(Api { http: client()?, base, bearer: self.secret.bearer() })
    }

    pub(crate) async fn stop(mut self) -> Result<(), Fault> {
        self.others.clear();
        self.node.shutdown().await;
        Ok(())
    }
}

/// The coordination API of one node.
#[derive(Clone)]
pub(crate) struct Api {
    http: reqwest::Client,
    base: String,
    bearer: String,
}

impl Api {
    pub(crate) async fn post(&self, path: &str, body: Value) -> Result<Value, Fault> {
        let request = self.http.post(format!("{}/{path}", self.base)).json(&body);
        let answer = request.header("authorization", &self.bearer).send().await?;
        let (status, text) = (answer.status(), answer.text().await?);
        if !status.is_success() {
            return Err(format!("POST {path}: {status} {text}").into());
        }
        Ok(serde_json::from_str(&text)?)
    }

    pub(crate) async fn delete(&self, path: &str) -> Result<(), Fault> {
        let request = self.http.delete(format!("{}/{path}", self.base));
        let answer = request.header("authorization", &self.bearer).send().await?;
        let status = answer.status();
        if !status.is_success() {
            return Err(format!("DELETE {path}: {status} {}", answer.text().await?).into());
        }
        Ok(())
    }
}

fn client() -> Result<reqwest::Client, Fault> {
    Ok(reqwest::Client::builder().no_proxy().tcp_nodelay(true).timeout(PATIENCE).build()?)
}

/// A port below the range of outgoing connections that is free now.
fn free_address() -> Result<String, Fault> {
    for _ in 0..100 {
        let port: u16 = rand::random_range(14_000..32_000);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(format!("127.0.0.1:{port}"));
        }
    }
    Err("no free port".into())
}

async fn count_request(
    State(seen): State<Arc<AtomicU64>>,
    request: Request,
    next: Next,
) -> Response {
    seen.fetch_add(1, Relaxed);
    next.run(request).await
}
