//! Three or five real nodes, under `botmesh supervise` or without, which whoever measures starts again
//! itself: the supervisor's own pauses would be most of the time.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::json;

use super::load::Doors;
use super::mode::Strike;
use super::net::Network;
use super::sink::Sink;
use crate::cli::client::Client;
use crate::cli::failure::Failure;
use crate::config::HostPort;
use crate::raft::{Role, Secret, Status};
use crate::types::ProcessToken;

/// How long the group may take for any one change.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(10);

/// What a group is made of.
pub(super) struct Setup<'a> {
    /// The `botmesh` binary.
    pub(super) program: &'a Path,
    pub(super) nodes: usize,
    pub(super) lease: Duration,
    /// What goes before the bot's own command line.
    pub(super) watched_by: &'static [&'static str],
    /// Whether the bots poll the sink, one at a time.
    pub(super) polls: bool,
    /// How long each handler sleeps instead of the demo bot's flows.
    pub(super) handlers_sleep: Option<Duration>,
}

struct Member {
    arguments: Vec<String>,
    dir: PathBuf,
    cluster: HostPort,
    client: Client,
    supervisor: Option<Child>,
    /// Supervisors of processes that were replaced before they had told of the death.
    former: Vec<Child>,
}

impl Member {
    fn pid(&self) -> Result<Pid, Failure> {
        let file = self.dir.join("pid");
        let pid = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        pid.and_then(Pid::from_raw)
            .ok_or_else(|| Failure::Other(format!("{} names no process", file.display())))
    }
}

/// The group. Dropping it kills the processes and removes their data.
pub(super) struct Group {
    root: PathBuf,
    program: PathBuf,
    watched_by: &'static [&'static str],
    polls: bool,
    members: Vec<Member>,
    doors: Doors,
    secret: Secret,
    // Dropped after the processes that are in it.
    network: Network,
}

impl Drop for Group {
    fn drop(&mut self) {
        for member in &mut self.members {
            for mut child in member.supervisor.take().into_iter().chain(member.former.drain(..)) {
                // Its bot dies with it.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn other(what: &str, error: impl std::fmt::Display) -> Failure {
    Failure::Other(format!("{what}: {error}"))
}

/// Who is where in a group that is well, as all of its nodes see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    /// The node that leads.
    pub(super) leader: usize,
    /// The node that leads the polled transport.
    pub(super) polls: Option<usize>,
    /// The incarnations of all sessions.
    pub(super) sessions: BTreeSet<u64>,
}

impl Group {
    pub(super) async fn start(
        setup: &Setup<'_>,
        sink: &Sink,
        network: Network,
    ) -> Result<Self, Failure> {
        let root = std::env::temp_dir().join(format!("botmesh-bench-{}", ProcessToken::random()));
        fs::create_dir_all(&root).map_err(|error| other("cannot make a directory", error))?;
        let secret = Secret::random();
        fs::write(root.join("secret"), secret.reveal())
            .map_err(|error| other("the secret", error))?;
        let clusters: Vec<_> = (0..setup.nodes).map(|node| network.listener(node, 101)).collect();
        let publics: Vec<_> = (0..setup.nodes).map(|node| network.listener(node, 1)).collect();
        let doors = Doors::new(&publics)?;
        let program = setup.program.to_owned();
        let (watched_by, polls) = (setup.watched_by, setup.polls);
        let members = Vec::new();
        let mut group = Self { root, program, watched_by, polls, members, doors, secret, network };
        for node in 0..setup.nodes {
            let arguments = group.arguments(setup, sink, node, &clusters, &publics[node]);
            let (dir, cluster) = (group.root.join(name(node)), clusters[node].clone());
            let client = Client::with_secret(cluster.clone(), group.secret.clone())?;
            let (supervisor, former) = (None, Vec::new());
            let member = Member { arguments, dir, cluster, client, supervisor, former };
            group.members.push(member);
            group.spawn(node)?;
        }
        group.well().await?;
        Ok(group)
    }

    /// The command line of a node.
    fn arguments(
        &self,
        setup: &Setup<'_>,
        sink: &Sink,
        node: usize,
        clusters: &[HostPort],
        public: &HostPort,
    ) -> Vec<String> {
        let peers: Vec<String> = clusters.iter().map(HostPort::to_string).collect();
        let time = |time: Duration| format!("{}ms", time.as_millis());
        let log = "warn,openraft=error,botmesh::raft=info,botmesh::bot::run=debug";
        let mut pairs = vec![
            ("--name", name(node)),
            ("--dir", self.root.join(name(node)).display().to_string()),
            ("--public", public.to_string()),
            ("--cluster", clusters[node].to_string()),
            ("--secret-file", self.root.join("secret").display().to_string()),
            ("--bootstrap-expect", setup.nodes.to_string()),
            ("--peers", peers.join(",")),
            ("--reply-url", sink.reply_url(node)),
            ("--lease", time(setup.lease)),
            ("--log", log.to_owned()),
        ];
        if setup.polls {
            pairs.push(("--poll", sink.poll_url(node)));
        }
        if let Some(sleep) = setup.handlers_sleep {
            pairs.push(("--handlers-sleep", time(sleep)));
        }
        let pairs = pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
        ["bench".to_owned(), "member".to_owned()].into_iter().chain(pairs).collect()
    }

    /// How many nodes it has.
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Its webhooks.
    pub(super) fn doors(&self) -> &Doors {
        &self.doors
    }

    /// Its cluster listeners.
    pub(super) fn clusters(&self) -> Vec<HostPort> {
        self.members.iter().map(|member| member.cluster.clone()).collect()
    }

    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// What these nodes have logged.
    pub(super) fn logged(&self, nodes: &[usize]) -> Vec<String> {
        let read = |node: &usize| fs::read_to_string(self.log(*node)).unwrap_or_default();
        nodes.iter().map(read).collect()
    }

    fn log(&self, node: usize) -> PathBuf {
        self.root.join(format!("{}.log", name(node)))
    }

    /// The last words of every node, for whoever has to say what went wrong.
    pub(super) fn last_words(&self) -> String {
        let last = |node: usize| {
            let log = self.logged(&[node]).concat();
            let lines: Vec<&str> = log.lines().rev().take(5).collect();
            format!("{}: {}", name(node), lines.into_iter().rev().collect::<Vec<_>>().join(" / "))
        };
        (0..self.len()).map(last).collect::<Vec<_>>().join("\n")
    }

    fn spawn(&mut self, node: usize) -> Result<(), Failure> {
        let log = File::options().create(true).append(true).open(self.log(node));
        let log = log.map_err(|error| other("cannot write a log", error))?;
        let err = log.try_clone().map_err(|error| other("cannot write a log", error))?;
        let mut command = self.network.command(node, &self.program);
        if !self.watched_by.is_empty() {
            command.args(self.watched_by).arg(&self.program);
        }
        let child = command
            .args(&self.members[node].arguments)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(err)
            .spawn()
            .map_err(|error| other("cannot start a node", error))?;
        self.members[node].supervisor = Some(child);
        Ok(())
    }

    /// What one node says, if it does.
    pub(super) async fn status(&self, node: usize) -> Option<Status> {
        Some(self.members[node].client.status().await.ok()?.0)
    }

    /// Waits until all nodes serve and see the same group: one leader, all of them voters, one session
    /// each, and somebody who polls where somebody should.
    pub(super) async fn well(&self) -> Result<View, Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut views = Vec::new();
            for node in 0..self.len() {
                let Some(view) = self.view(node).await else { break };
                views.push(view);
            }
            if views.len() == self.len() && views.iter().all(|view| *view == views[0]) {
                return Ok(views.swap_remove(0));
            }
            if Instant::now() >= until {
                let why = format!("the group does not come up\n{}", self.last_words());
                return Err(Failure::Other(why));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Has this node lead the group.
    pub(super) async fn lead(&self, node: usize) -> Result<View, Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let view = self.well().await?;
            if view.leader == node {
                return Ok(view);
            }
            if Instant::now() >= until {
                return Err(Failure::Other(format!("{} does not get to lead", name(node))));
            }
            let client = &self.members[node].client;
            let id = client.status().await?.0.node_id;
            // It may have to catch up first; then the next attempt is heard.
            let _ = client.change("/cluster/yield-leader", json!({ "to": id })).await;
        }
    }

    async fn view(&self, node: usize) -> Option<View> {
        // A standby of an exclusive transport is not ready, and serves all the same.
        if !self.polls && !self.members[node].client.is_ready().await {
            return None;
        }
        let status = self.status(node).await?;
        let voters = status.nodes.iter().filter(|node| node.role != Role::Learner).count();
        if voters != self.len() || status.nodes.len() != self.len() {
            return None;
        }
        let index = |id| {
            let found = status.nodes.iter().find(|node| node.id == id)?;
            (0..self.len()).find(|node| name(*node) == found.name)
        };
        let of = |incarnation: u64| {
            let mut all = status.sessions.iter();
            index(all.find(|session| session.incarnation == incarnation)?.node_id)
        };
        let polls = status.leads.iter().find(|lead| lead.name.ends_with("provider:poll"));
        let polls = polls.and_then(|lead| of(lead.holder));
        let holders: BTreeSet<u64> =
            status.sessions.iter().map(|session| session.node_id).collect();
        let sessions: BTreeSet<u64> =
            status.sessions.iter().map(|session| session.incarnation).collect();
        let whole = holders.len() == self.len() && sessions.len() == self.len();
        let leader = index(status.leader?)?;
        (whole && polls.is_some() == self.polls).then_some(View { leader, polls, sessions })
    }

    /// Whether a node's process, or its supervisor, has ended.
    pub(super) fn ended(&mut self, node: usize) -> bool {
        let child = self.members[node].supervisor.as_mut();
        child.is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    /// Strikes nodes at one instant.
    pub(super) fn strike(&self, nodes: &[usize], how: Strike) -> Result<(), Failure> {
        match how {
            Strike::Cut(cut) => self.network.cut(nodes, self.len(), cut),
            Strike::Signal(signal) => {
                let pids: Vec<Pid> =
                    nodes.iter().map(|node| self.members[*node].pid()).collect::<Result<_, _>>()?;
                for pid in pids {
                    kill_process(pid, signal)
                        .map_err(|error| other("cannot strike a node", error))?;
                }
                Ok(())
            }
        }
    }

    /// Starts a node whose process was killed, without waiting for what its supervisor has to tell.
    pub(super) async fn restart_at_once(&mut self, node: usize) -> Result<(), Failure> {
        let pid = self.members[node].pid()?;
        let until = Instant::now() + PATIENCE;
        // Unwatched, it is this process's child, and has to be waited for.
        while !self.ended(node) && test_kill_process(pid).is_ok() {
            if Instant::now() >= until {
                return Err(Failure::Other(format!("{} does not end", name(node))));
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let member = &mut self.members[node];
        member.former.extend(member.supervisor.take());
        let _ = fs::remove_file(member.dir.join("pid"));
        self.spawn(node)
    }

    /// Undoes what was done to these nodes, and waits until the group is whole.
    pub(super) async fn revive(&mut self, nodes: &[usize], how: Strike) -> Result<View, Failure> {
        match how {
            Strike::Cut(_) => self.network.heal()?,
            Strike::Signal(_) => {
                for &node in nodes {
                    self.revive_one(node).await?;
                }
            }
        }
        let view = self.well().await?;
        for member in &mut self.members {
            // Those that have told by now.
            member.former.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        }
        Ok(view)
    }

    async fn revive_one(&mut self, node: usize) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        while !self.ended(node) {
            if Instant::now() >= until {
                let why = format!("{} does not end\n{}", name(node), self.last_words());
                return Err(Failure::Other(why));
            }
            tokio::time::sleep(LOOK).await;
        }
        let _ = fs::remove_file(self.members[node].dir.join("pid"));
        self.spawn(node)
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
        while Instant::now() < until && !(0..self.len()).all(|node| self.ended(node)) {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// What a node is called.
fn name(node: usize) -> String {
    format!("n{}", node + 1)
}
