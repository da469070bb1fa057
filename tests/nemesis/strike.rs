//! How each fault is done and undone.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use super::plan::{ALL, Fault, Kind};
use crate::support::cluster::{Arena, Cluster, Options};
use crate::support::demo::Demo;
use crate::support::disks::{SmallDisk, Tampering};
use crate::support::links::{Link, Links};
use crate::support::talk::Chat;

/// The lease of the nodes' own sessions.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// How long the group may take after a fault until all of it serves again. A stopped process may have
/// to be started, to catch up and to be made a voter, on a machine that does other things as well.
pub(crate) const READY_AGAIN: Duration = Duration::from_secs(120);
/// Where libfaketime is, if it is installed.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";
/// Holds what an hour of it leaves: the state grows all the while, and sled's file to several times
/// its size.
const SMALL_DISK_BYTES: u64 = 2 << 30;
/// The node on the small disk.
const ON_SMALL_DISK: usize = 2;

/// A group, and what can be done to it.
pub(crate) struct Nemesis {
    /// The group.
    pub(crate) cluster: Cluster,
    /// Its links.
    pub(crate) links: Links,
    /// The chats whose messages were taken by a node that was killed at once.
    pub(crate) chats: Vec<Chat>,
    demo: Demo,
    disk: Option<SmallDisk>,
    // Dropped last: the disk is mounted in it.
    _root: tempfile::TempDir,
}

impl Nemesis {
    /// Starts the group. Also returns the kinds that cannot be done on this machine, and why.
    pub(crate) async fn start(patience: Duration) -> (Self, Vec<(Kind, String)>) {
        let arena = Arena::enter().await;
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut impossible = Vec::new();
        let disk = SmallDisk::mount(root.path(), SMALL_DISK_BYTES);
        let disk = disk.map_err(|why| impossible.push((Kind::FullDisk, why))).ok();
        if let Err(why) = can_trace() {
            impossible.push((Kind::SlowSync, why.clone()));
            impossible.push((Kind::FailedSync, why));
        }
        if !PathBuf::from(FAKETIME).exists() {
            impossible.push((Kind::ClockJump, format!("there is no {FAKETIME}")));
        }
        let links = Links::start(3).await;
        let lease = format!("{}ms", LEASE.as_millis());
        let options = Options::nodes(3).lease(&lease);
        let cluster = Cluster::start_prepared(&options, arena, |cluster| {
            links.lead_to(cluster);
            for node in &mut cluster.nodes {
                // Snapshots and what follows from them come about every two minutes.
                node.env.push(("BOTMESH_SNAPSHOT_EVERY".to_owned(), "3000".to_owned()));
            }
            if let Some(disk) = &disk {
                let at = disk.at.join("node");
                let _ = std::fs::remove_dir_all(&at);
                cluster.nodes[ON_SMALL_DISK].dir = at;
                let mark = ("BOTMESH_DISK_LOW_WATER".to_owned(), "48MiB".to_owned());
                cluster.nodes[ON_SMALL_DISK].env.push(mark);
            }
        })
        .await;
        let demo = Demo::new(cluster.public().impatient(patience));
        (Self { cluster, links, chats: Vec::new(), demo, disk, _root: root }, impossible)
    }

    /// Does what the fault says, undoes it, and waits until the group serves again. How long that
    /// took after it was undone.
    pub(crate) async fn strike(&mut self, fault: &Fault) -> Duration {
        let Fault { kind, node, other, lasts, .. } = *fault;
        let (next, after) = ((node + 1 + other) % 3, (node + 2 - other) % 3);
        match kind {
            Kind::KillLeader => {
                let leader = self.cluster.leader().await;
                self.kill_for(&[leader], lasts).await;
            }
            Kind::KillFollower => {
                let follower = self.follower(other).await;
                self.kill_for(&[follower], lasts).await;
            }
            Kind::KillHolder => self.kill_holder(node, lasts).await,
            Kind::KillTwo => self.kill_for(&[next, after], lasts / 2).await,
            Kind::KillAll => self.kill_for(&[0, 1, 2], Duration::ZERO).await,
            Kind::FreezeBriefly => self.freeze(node, LEASE / 4).await,
            Kind::FreezeBeyondLease => self.freeze(node, LEASE * 3 / 2).await,
            Kind::FreezeLeader => {
                let leader = self.cluster.leader().await;
                self.freeze(leader, lasts).await;
            }
            Kind::Stop => {
                self.cluster.nodes[node].signal(Signal::TERM);
                let ended = self.cluster.nodes[node].wait_ended(READY_AGAIN).await;
                assert!(ended.success(), "a planned stop ended with {ended}");
                self.cluster.nodes[node].start(&[]);
            }
            Kind::YieldLeader => self.yield_leader().await,
            Kind::Cut => self.link(lasts, |it| it.set_both(node, next, Link::Cut)).await,
            Kind::CutOneWay => self.link(lasts, |it| it.set(node, next, Link::Cut)).await,
            Kind::AnswersLost => {
                self.link(lasts, |it| it.set(node, next, Link::AnswersLost)).await;
            }
            Kind::IsolateLeader => {
                let leader = self.cluster.leader().await;
                let cut = |links: &Links| {
                    for other in 1..3 {
                        links.set_both(leader, (leader + other) % 3, Link::Cut);
                    }
                };
                self.link(lasts, cut).await;
            }
            Kind::Reset => self.link(lasts, |it| it.set_both(node, next, Link::Reset)).await,
            Kind::Delay => {
                let late = Link::Delayed(Duration::from_millis(60));
                self.link(lasts, |it| it.set_both(node, next, late)).await;
            }
            Kind::Slow => {
                self.link(lasts, |it| it.set_both(node, next, Link::Slow(20_000))).await;
            }
            Kind::Wipe => self.wipe(node).await,
            Kind::Leave => self.leave(node).await,
            Kind::Busy => busy(lasts).await,
            Kind::FullDisk => {
                let disk = self.disk.as_ref().expect("it is no kind of this run without one");
                let junk = disk.fill();
                tokio::time::sleep(lasts).await;
                std::fs::remove_file(junk).unwrap();
            }
            Kind::SlowSync => {
                let inject = "inject=fdatasync:delay_enter=80000";
                let tampering = self.tamper(node, inject).await;
                tokio::time::sleep(lasts).await;
                drop(tampering);
            }
            Kind::FailedSync => {
                let tampering = self.tamper(node, "inject=fdatasync:error=EIO:when=3").await;
                let ended = self.cluster.nodes[node].wait_ended(READY_AGAIN).await;
                drop(tampering);
                assert!(!ended.success(), "a failed sync ended with {ended}");
                self.cluster.nodes[node].start(&[]);
            }
            Kind::ClockJump => self.clock_jump(node, lasts).await,
        }
        let undone = Instant::now();
        self.all_serve().await;
        undone.elapsed()
    }

    /// Waits until every node runs, serves, and follows one leader.
    async fn all_serve(&mut self) {
        let until = Instant::now() + READY_AGAIN;
        loop {
            for node in &mut self.cluster.nodes {
                let Some(ended) = node.ended() else { continue };
                // A disk that fills within a write leaves it half done, and the process ends, as after
                // a failed sync. Whoever watches it starts it again.
                let full = node.last_lines(1).contains("No space left on device");
                assert!(full, "{} ended by itself: {ended:?}", node.name);
                println!("  {} ended on its full disk and is started again", node.name);
                node.start(&[]);
            }
            let mut ready = 0;
            for index in 0..3 {
                ready += usize::from(self.cluster.is_ready(index).await);
            }
            if ready == 3 {
                break;
            }
            let late = Instant::now() >= until;
            assert!(!late, "after {READY_AGAIN:?} {ready} of 3 nodes serve: {}", self.seen().await);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.cluster.wait_settled().await;
    }

    /// What each node says of the group.
    async fn seen(&self) -> String {
        let mut seen = String::new();
        for index in 0..3 {
            seen += &format!("{:?}\n", self.cluster.status(index).await);
        }
        seen
    }

    async fn follower(&self, which: usize) -> usize {
        (self.cluster.leader().await + 1 + which) % 3
    }

    async fn kill_for(&mut self, nodes: &[usize], down: Duration) {
        // All signals first, so that no survivor acts on the death of another.
        for node in nodes {
            self.cluster.nodes[*node].signal(Signal::KILL);
        }
        for node in nodes {
            self.cluster.nodes[*node].kill();
        }
        tokio::time::sleep(down).await;
        for node in nodes {
            self.cluster.nodes[*node].start(&[]);
        }
    }

    async fn kill_holder(&mut self, node: usize, down: Duration) {
        let name = format!("holder-{}", self.chats.len());
        let mut chat = Chat::new(&self.demo, name, 2 * READY_AGAIN);
        chat.say(node, "hold", "echo: hold").await;
        self.kill_for(&[node], down).await;
        chat.say(node + 1, "on", "echo: on").await;
        self.chats.push(chat);
    }

    async fn freeze(&mut self, node: usize, lasts: Duration) {
        self.cluster.nodes[node].signal(Signal::STOP);
        tokio::time::sleep(lasts).await;
        self.cluster.nodes[node].signal(Signal::CONT);
    }

    async fn yield_leader(&mut self) {
        let leader = self.cluster.leader().await;
        let url = format!("{}/cluster/yield-leader", self.cluster.nodes[leader].base());
        let call = reqwest::Client::new().post(url).bearer_auth(&self.cluster.secret);
        // It may have lost leadership meanwhile; that is a yield as well.
        let _ = call.json(&json!({})).timeout(READY_AGAIN).send().await;
    }

    async fn link(&mut self, lasts: Duration, cut: impl FnOnce(&Links)) {
        cut(&self.links);
        tokio::time::sleep(lasts).await;
        self.links.heal();
    }

    async fn wipe(&mut self, node: usize) {
        let (old, via) = (self.cluster.node_id(node).await, (node + 1) % 3);
        self.cluster.nodes[node].kill();
        std::fs::remove_dir_all(&self.cluster.nodes[node].dir).unwrap();
        self.cluster.let_go(via, old).await;
        self.join(node, via);
    }

    async fn leave(&mut self, node: usize) {
        let (old, via) = (self.cluster.node_id(node).await, (node + 1) % 3);
        self.cluster.let_go(via, old).await;
        self.cluster.nodes[node].kill();
        std::fs::remove_dir_all(&self.cluster.nodes[node].dir).unwrap();
        self.join(node, via);
    }

    fn join(&mut self, node: usize, via: usize) {
        let via = self.cluster.nodes[via].cluster.to_string();
        self.cluster.nodes[node].start(&["--join", &via]);
    }

    async fn tamper(&self, node: usize, inject: &str) -> Tampering {
        let said = self.cluster.root().join("strace.said");
        let attached = Tampering::attach(self.cluster.nodes[node].pid(), inject, &said).await;
        attached.unwrap_or_else(|why| panic!("strace did not get hold of n{}: {why}", node + 1))
    }

    async fn clock_jump(&mut self, node: usize, lasts: Duration) {
        let before = self.cluster.nodes[node].env.clone();
        let off = ["+1h", "-1h"][node % 2];
        for (name, value) in [
            ("LD_PRELOAD", FAKETIME),
            ("FAKETIME", off),
            ("DONT_FAKE_MONOTONIC", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ] {
            self.cluster.nodes[node].env.push((name.to_owned(), value.to_owned()));
        }
        self.cluster.nodes[node].kill();
        self.cluster.nodes[node].start(&[]);
        self.all_serve().await;
        tokio::time::sleep(lasts).await;
        self.cluster.nodes[node].env = before;
        self.cluster.nodes[node].kill();
        self.cluster.nodes[node].start(&[]);
    }
}

/// The kinds that can be done.
pub(crate) fn possible(impossible: &[(Kind, String)]) -> Vec<Kind> {
    let is_not = |kind: &Kind| impossible.iter().any(|(other, _)| other == kind);
    ALL.into_iter().filter(|kind| !is_not(kind)).collect()
}

/// Whether strace may make calls fail here.
fn can_trace() -> Result<(), String> {
    let inject = "inject=fdatasync:error=EIO";
    let tried = Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=fdatasync", "-e", inject, "-o", "/dev/null", "true"])
        .output()
        .map_err(|error| format!("strace: {error}"))?;
    let said = String::from_utf8_lossy(&tried.stderr).into_owned();
    if tried.status.success() { Ok(()) } else { Err(said) }
}

/// Spins on every processor.
pub(crate) async fn busy(lasts: Duration) {
    let until = Instant::now() + lasts;
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let spinning: Vec<_> =
        (0..threads).map(|_| std::thread::spawn(move || while Instant::now() < until {})).collect();
    let joined = tokio::task::spawn_blocking(move || {
        spinning.into_iter().for_each(|thread| thread.join().expect("it only spins"));
    });
    joined.await.expect("it only waits");
}
