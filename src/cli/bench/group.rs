//! Three or five real nodes, under `botmesh supervise` or without, which whoever measures starts again
//! itself: the supervisor's own pauses would be most of the time.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::Rng;
use rustix::process::{Pid, Signal, kill_process};

use crate::cli::client::Client;
use crate::cli::failure::Failure;
use crate::config::HostPort;
use crate::raft::{Role, Secret, Status};
use crate::types::ProcessToken;

/// How long the group may take for any one change.
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(10);

/// How a replica goes, and who watches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// Killed under a supervisor that reports its death; the lease is a minute.
    Supervised,
    /// Killed, and nobody knows: its lease of a second decides.
    Unsupervised,
    /// Stopped (SIGSTOP) under a supervisor with `--hang-kill 1s`.
    Freeze,
    /// Asked to stop (SIGTERM).
    Graceful,
}

impl Mode {
    fn lease(self) -> &'static str {
        if self == Self::Unsupervised { "1s" } else { "60s" }
    }

    /// What goes before the bot's own command line.
    fn watched_by(self) -> &'static [&'static str] {
        match self {
            Self::Unsupervised => &[],
            Self::Freeze => &["supervise", "--no-restart", "--hang-kill", "1s", "--"],
            Self::Supervised | Self::Graceful => &["supervise", "--no-restart", "--"],
        }
    }

    fn signal(self) -> Signal {
        match self {
            Self::Supervised | Self::Unsupervised => Signal::KILL,
            Self::Freeze => Signal::STOP,
            Self::Graceful => Signal::TERM,
        }
    }
}

struct Member {
    arguments: Vec<String>,
    dir: PathBuf,
    public: HostPort,
    client: Client,
    supervisor: Option<Child>,
}

/// The group. Dropping it kills the processes and removes their data.
pub(super) struct Group {
    root: PathBuf,
    program: PathBuf,
    mode: Mode,
    members: Vec<Member>,
    http: reqwest::Client,
}

impl Drop for Group {
    fn drop(&mut self) {
        for member in &mut self.members {
            if let Some(mut supervisor) = member.supervisor.take() {
                // Its bot dies with it.
                let _ = supervisor.kill();
                let _ = supervisor.wait();
            }
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn other(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::Other(format!("{what}: {error}"))
}

/// An address that is free now, below the range of outgoing connections: a node that is down must
/// find it free when it comes back.
fn free_address() -> HostPort {
    loop {
        let port = rand::rng().random_range(14_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return HostPort { host: "127.0.0.1".to_owned(), port };
        }
    }
}

impl Group {
    pub(super) async fn start(
        program: &Path,
        reply_url: &str,
        nodes: usize,
        mode: Mode,
    ) -> Result<Self, Failure> {
        let root = std::env::temp_dir().join(format!("botmesh-bench-{}", ProcessToken::random()));
        fs::create_dir_all(&root).map_err(|error| other("cannot make a directory", error))?;
        let secret = Secret::random();
        let secret_file = root.join("secret");
        fs::write(&secret_file, secret.reveal()).map_err(|error| other("the secret", error))?;
        let clusters: Vec<HostPort> = (0..nodes).map(|_| free_address()).collect();
        let peers: Vec<String> = clusters.iter().map(HostPort::to_string).collect();
        let http = reqwest::Client::builder()
            .no_proxy()
            .build()
            .map_err(|error| other("cannot make a client", error))?;
        let program = program.to_owned();
        let mut group = Self { root, program, mode, members: Vec::new(), http };
        for (i, cluster) in clusters.into_iter().enumerate() {
            let (name, public) = (format!("n{}", i + 1), free_address());
            let dir = group.root.join(&name);
            let pairs = [
                ("--name", name),
                ("--dir", dir.display().to_string()),
                ("--public", public.to_string()),
                ("--cluster", cluster.to_string()),
                ("--secret-file", secret_file.display().to_string()),
                ("--bootstrap-expect", nodes.to_string()),
                ("--peers", peers.join(",")),
                ("--reply-url", reply_url.to_owned()),
                ("--lease", mode.lease().to_owned()),
                ("--log", "warn,openraft=error,botmesh::raft=info".to_owned()),
            ];
            let arguments = pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
            let arguments = arguments.collect();
            let client = Client::with_secret(cluster, secret.clone())?;
            group.members.push(Member { arguments, dir, public, client, supervisor: None });
            group.spawn(i)?;
        }
        for i in 0..nodes {
            group.wait_well(i).await?;
        }
        Ok(group)
    }

    /// How many nodes it has.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// What all nodes have logged, by node.
    pub(super) fn logged(&self) -> Vec<String> {
        let read = |i| fs::read_to_string(self.log(i)).unwrap_or_default();
        (0..self.len()).map(read).collect()
    }

    fn log(&self, i: usize) -> PathBuf {
        self.root.join(format!("n{}.log", i + 1))
    }

    /// Where to look when something went wrong.
    pub(super) fn logs(&self) -> String {
        self.root.join("n1.log").display().to_string()
    }

    fn spawn(&mut self, i: usize) -> Result<(), Failure> {
        let log = self.log(i);
        let log = File::options().create(true).append(true).open(log);
        let log = log.map_err(|error| other("cannot write a log", error))?;
        let err = log.try_clone().map_err(|error| other("cannot write a log", error))?;
        let member = &mut self.members[i];
        let watched_by = self.mode.watched_by();
        let mut command = Command::new(&self.program);
        if !watched_by.is_empty() {
            command.args(watched_by).arg(&self.program);
        }
        let child = command
            .arg("run")
            .args(&member.arguments)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(err)
            .spawn()
            .map_err(|error| other("cannot start a node", error))?;
        member.supervisor = Some(child);
        Ok(())
    }

    /// Waits until a node serves and sees one session a node.
    async fn wait_well(&self, i: usize) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let client = &self.members[i].client;
            if client.is_ready().await
                && let Ok((status, _)) = client.status().await
                && status.sessions.len() == self.len()
                && status.leader.is_some()
                && status.nodes.len() == self.len()
                && status.nodes.iter().all(|node| node.role != Role::Learner)
            {
                return Ok(());
            }
            if Instant::now() >= until {
                let name = format!("n{} does not come up, see {}", i + 1, self.logs());
                return Err(Failure::Other(name));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Who leads.
    pub(super) async fn leader(&self) -> Result<usize, Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut leads: Vec<usize> = Vec::new();
            for (i, member) in self.members.iter().enumerate() {
                let status = member.client.status().await.ok().map(|(status, _)| status);
                if status.is_some_and(|Status { leader, node_id, .. }| {
                    leader.is_some() && leader == node_id
                }) {
                    leads.push(i);
                }
            }
            if let [found] = leads[..] {
                return Ok(found);
            }
            if Instant::now() >= until {
                return Err(Failure::Leaderless("the group elects no leader".to_owned()));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Gives a node a message, again until it has taken it.
    pub(super) async fn post(&self, i: usize, id: &str, chat: &str) -> Result<(), Failure> {
        let url = format!("http://{}/webhooks/demo", self.members[i].public);
        let body = serde_json::json!({ "id": id, "chat": chat, "text": "hello" });
        let until = Instant::now() + PATIENCE;
        loop {
            let asked = self.http.post(&url).json(&body).timeout(Duration::from_secs(10));
            let why = match asked.send().await {
                Ok(answer) if answer.status().is_success() => return Ok(()),
                Ok(answer) => answer.status().to_string(),
                Err(error) => error.to_string(),
            };
            if Instant::now() >= until {
                return Err(Failure::Other(format!("n{} takes no message: {why}", i + 1)));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Gives a message to the first of these nodes that takes it, as fast as that goes.
    pub(super) async fn post_to(
        &self,
        nodes: &[usize],
        id: &str,
        chat: &str,
    ) -> Result<(), Failure> {
        let body = serde_json::json!({ "id": id, "chat": chat, "text": "hello" });
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            for &i in nodes {
                let url = format!("http://{}/webhooks/demo", self.members[i].public);
                let asked = self.http.post(&url).json(&body).timeout(Duration::from_secs(10));
                if asked.send().await.is_ok_and(|answer| answer.status().is_success()) {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Err(Failure::Other(format!("nobody takes a message: see {}", self.logs())))
    }

    /// Whether a node's process, or its supervisor, has ended.
    pub(super) fn ended(&mut self, i: usize) -> bool {
        let child = self.members[i].supervisor.as_mut();
        child.is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    /// Sends the bot's process the signal of the mode.
    pub(super) fn strike(&self, i: usize) -> Result<(), Failure> {
        let file = self.members[i].dir.join("pid");
        let pid = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        let pid = pid
            .and_then(Pid::from_raw)
            .ok_or_else(|| Failure::Other(format!("{} names no process", file.display())))?;
        kill_process(pid, self.mode.signal()).map_err(|error| other("cannot kill a node", error))
    }

    /// Starts dead nodes again and waits until the group is whole.
    pub(super) async fn revive(&mut self, dead: &[usize]) -> Result<(), Failure> {
        for &i in dead {
            self.revive_one(i).await?;
        }
        for i in 0..self.len() {
            self.wait_well(i).await?;
        }
        Ok(())
    }

    async fn revive_one(&mut self, i: usize) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        while let Some(supervisor) = &mut self.members[i].supervisor {
            match supervisor.try_wait() {
                Ok(Some(_)) => self.members[i].supervisor = None,
                Ok(None) if Instant::now() < until => tokio::time::sleep(LOOK).await,
                Ok(None) => return Err(Failure::Other("a supervisor does not end".to_owned())),
                Err(error) => return Err(other("a supervisor", error)),
            }
        }
        let _ = fs::remove_file(self.members[i].dir.join("pid"));
        self.spawn(i)
    }

    /// Stops all, as an operator would.
    pub(super) async fn stop(mut self) {
        for member in &mut self.members {
            let pid = member.supervisor.as_ref().map(Pid::from_child);
            if let Some(pid) = pid {
                // It may have ended; the drop waits for it.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        let until = Instant::now() + PATIENCE;
        let ended = |member: &mut Member| {
            let supervisor = member.supervisor.as_mut();
            supervisor.is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
        };
        while Instant::now() < until && !self.members.iter_mut().all(ended) {
            tokio::time::sleep(LOOK).await;
        }
    }
}
