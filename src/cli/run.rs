//! `botmesh run`: one node and the demo bot on it (SPEC A5, A7, N2).
//!
//! In order of starting: tie to the parent → ports → data directory → cluster listener (peers find
//! each other by it) → group → bot → public listener. Stopping goes the other way round, so that
//! what stops later still serves what stops earlier: intake and running turns first, then the
//! public listener, then leadership and the disk, the cluster listener last.

use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::bot::{Bot, BotBuilder, BotError, Coordination};
use crate::config::{Beginning, HostPort, Settings};
use crate::coordinator::{CoordinatorOptions, Sticky};
use crate::http;
use crate::raft::{Node, NodeError, NodeOptions, OpenError, Secret, Start};
use crate::raft::{NodeLimits, Timing};
use crate::store::GroupStore;
use crate::supervise;
use crate::types::{Prefix, ReplicaId};

use super::failure::Failure;
use super::health::Health;
use super::{demo, ports, say, secret};

/// The demo bot's prefix in the group.
const PREFIX: &str = "demo";
/// How long the bot may take to end what it does and give it back, beyond `settle`.
const BOT_STOP: Duration = Duration::from_secs(5);
/// How long a node stays, once its own bot has stopped, for peers that are being stopped too:
/// without its vote they could not close their sessions.
const LINGER: Duration = Duration::from_millis(500);
/// Longer than any process runs.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// How long leadership and disk may take.
const NODE_STOP: Duration = Duration::from_secs(5);

pub(super) fn run(
    settings: &Settings,
    flows: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Result<(), Failure> {
    supervise::attach().map_err(|error| Failure::Other(error.to_string()))?;
    // The allocator's regions in huge pages make an idle node 100 MiB instead of 43, and the kernel
    // frees a killed process's memory before it closes its sockets: lean is fast to fail over. A
    // kernel that cannot say so has none.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::Other(format!("cannot start a runtime: {error}")))?;
    let done = runtime.block_on(life(settings, flows));
    // What still blocks on a disk is not waited for: everything acknowledged is synced.
    runtime.shutdown_timeout(Duration::from_secs(1));
    done
}

/// The listeners, bound before anything else: a port that is taken is the commonest mistake.
struct Ports {
    public: TcpListener,
    cluster: TcpListener,
    advertise: HostPort,
}

async fn life(
    settings: &Settings,
    flows: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let name = name(settings)?;
    let ports = bind(settings)?;
    let node = open(settings, &name, &ports.advertise).await?;
    // The directory is ours now, and with it the file that says so.
    let pid_file = PidFile::write(&settings.dir)?;
    let mut parts = Parts::start(settings, node, ports, flows).await?;
    say(&format!("{name} serves: public http://{}, cluster {}", parts.public, parts.cluster));
    let ended = tokio::select! {
        () = signals.next() => Ok(()),
        ended = parts.ended() => Err(ended),
    };
    if ended.is_ok() {
        tracing::info!("stopping");
        // Whoever asks twice does not want to wait.
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(130);
        });
    }
    // Where the node cannot commit any more, waiting for what runs saves nothing.
    let halted = matches!(ended, Err(Failure::TooOld(_)));
    parts.stop(if halted { BOT_STOP } else { settings.settle + BOT_STOP }).await;
    drop(pid_file);
    ended
}

fn name(settings: &Settings) -> Result<String, Failure> {
    if let Some(name) = &settings.name {
        return Ok(name.clone());
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim().to_owned();
    crate::types::check_name("name", &host)
        .map_err(|error| Failure::Usage(format!("the host's {error}; give the node a --name")))?;
    Ok(host)
}

fn bind(settings: &Settings) -> Result<Ports, Failure> {
    let public = ports::bind("public listener", &settings.public)?;
    let cluster = ports::bind("cluster listener", &settings.cluster)?;
    let advertise = match &settings.advertise {
        Some(advertise) => advertise.clone(),
        None if settings.cluster.is_unspecified() => {
            return Err(Failure::Usage(format!(
                "cluster listener {}: peers cannot dial that address; say with --advertise \
                 HOST:PORT how they reach this node",
                settings.cluster
            )));
        }
        None => HostPort { port: local(&cluster)?.1, ..settings.cluster.clone() },
    };
    Ok(Ports { public, cluster, advertise })
}

/// The address and port a listener got.
fn local(listener: &TcpListener) -> Result<(String, u16), Failure> {
    let address = listener
        .local_addr()
        .map_err(|error| Failure::Other(format!("a listener has no address: {error}")))?;
    Ok((address.to_string(), address.port()))
}

async fn open(settings: &Settings, name: &str, advertise: &HostPort) -> Result<Node, Failure> {
    let path = secret::path(settings);
    if settings.beginning == Beginning::Bootstrap {
        secret::make(&path)?;
    }
    let secret: Secret = secret::read(&path)?;
    let start = match &settings.beginning {
        Beginning::Bootstrap => Start::Bootstrap,
        Beginning::Join(member) => Start::Join(vec![member.to_string()]),
        Beginning::Expect(count, peers) => {
            Start::Expect { count: *count, peers: peers.iter().map(HostPort::to_string).collect() }
        }
        Beginning::Member => Start::Member,
    };
    let options = NodeOptions {
        start,
        timing: Timing::of(settings.beat),
        limits: NodeLimits {
            disk_low_water: settings.disk_low_water,
            snapshot_every_bytes: settings.snapshot_every_bytes,
            ..NodeLimits::snapshots_every(settings.snapshot_every)
        },
        machine: crate::machine::Limits {
            dedupe_ids_max: settings.dedupe_ids,
            // At most a year.
            dedupe_ms: settings.dedupe_window.as_millis() as u64,
            ..crate::machine::Limits::default()
        },
        ..NodeOptions::new(name, &settings.dir, advertise.to_string(), secret)
    };
    Node::open(options).await.map_err(refused)
}

fn refused(error: NodeError) -> Failure {
    let text = error.to_string();
    match error {
        NodeError::Options(_) | NodeError::NotAMember { .. } => Failure::Usage(text),
        NodeError::Open(OpenError::Io { .. } | OpenError::InUse { .. }) => Failure::Directory(text),
        NodeError::Open(OpenError::Newer { .. }) | NodeError::Halted { .. } => {
            Failure::TooOld(text)
        }
        NodeError::Open(_) => Failure::Directory(text),
        NodeError::NotJoined { .. } => Failure::Refused(text),
        _ => Failure::Other(text),
    }
}

/// What runs, and what stops it.
struct Parts {
    node: Node,
    bot: JoinHandle<Result<(), BotError>>,
    public_listener: JoinHandle<io::Result<()>>,
    cluster_listener: JoinHandle<io::Result<()>>,
    public: String,
    cluster: String,
    stop: Stop,
}

/// In the order they are used.
#[derive(Default)]
struct Stop {
    bot: CancellationToken,
    public: CancellationToken,
    calls: CancellationToken,
    cluster: CancellationToken,
}

impl Parts {
    async fn start(
        settings: &Settings,
        node: Node,
        ports: Ports,
        flows: impl FnOnce(BotBuilder) -> BotBuilder,
    ) -> Result<Self, Failure> {
        let stop = Stop::default();
        let (public, _) = local(&ports.public)?;
        let (cluster, _) = local(&ports.cluster)?;
        let secret = secret::read(&secret::path(settings))?;
        let health = Arc::new(Health::new(node.clone()));
        let app = http::cluster::router(http::cluster::Parts {
            group: node.as_group(),
            routes: node.router(),
            probe: health.clone(),
            secret,
            options: http::coordination::Options { stop: stop.calls.clone(), ..Default::default() },
            calls_max: http::cluster::CALLS_MAX,
        });
        // Peers have to reach this node before it can belong to a group.
        let cluster_listener = listen(ports.cluster, app, &stop.cluster)?;

        let bot = bot(settings, &node, flows).await?;
        health.watch(bot.clone());
        let app = public_app(settings, &bot, &public, &stop)?;
        let public_listener = listen(ports.public, app, &stop.public)?;
        let asked = stop.bot.clone();
        let running = bot.clone();
        let running = tokio::spawn(async move { running.run_until(asked.cancelled()).await });
        tokio::spawn(async move {
            bot.ready().await;
            health.bot_is_ready();
            tracing::info!("the bot takes messages");
        });
        let bot = running;
        Ok(Self { node, bot, public_listener, cluster_listener, public, cluster, stop })
    }

    /// Returns when something ended that should not have.
    async fn ended(&mut self) -> Failure {
        let fault = |what: &str, ended: Result<io::Result<()>, tokio::task::JoinError>| {
            let why = match ended {
                Ok(Ok(())) => "it stopped".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            Failure::Other(format!("the {what} listener ended: {why}"))
        };
        tokio::select! {
            ended = &mut self.public_listener => fault("public", ended),
            ended = &mut self.cluster_listener => fault("cluster", ended),
            ended = &mut self.bot => match ended {
                Ok(Ok(())) => Failure::Other("the bot ended by itself".to_owned()),
                Ok(Err(error)) => Failure::Other(format!("the bot ended: {error}")),
                Err(error) => Failure::Other(format!("the bot ended: {error}")),
            },
            refused = never_joined(&self.node) => refused,
            why = halted(&self.node) => Failure::TooOld(why),
        }
    }

    async fn stop(mut self, bot_within: Duration) {
        self.stop.bot.cancel();
        match tokio::time::timeout(bot_within, &mut self.bot).await {
            Ok(Ok(Ok(()))) => tracing::info!("the bot has stopped; its chats are the others'"),
            Ok(Ok(Err(error))) => tracing::warn!(%error, "the bot did not stop cleanly"),
            Ok(Err(error)) => tracing::warn!(%error, "the bot did not stop cleanly"),
            Err(_) => tracing::warn!("the bot did not stop in time; its lease will end"),
        }
        self.stop.public.cancel();
        self.stop.calls.cancel();
        self.linger().await;
        if tokio::time::timeout(NODE_STOP, self.node.shutdown()).await.is_err() {
            tracing::warn!("the node did not shut down in time");
        }
        self.stop.cluster.cancel();
        for listener in [self.public_listener, self.cluster_listener] {
            // The listeners' own grace bounds this.
            let _ = listener.await;
        }
    }

    /// See [`LINGER`].
    async fn linger(&self) {
        let others = || {
            let status = self.node.status();
            status.sessions.iter().any(|session| Some(session.node_id) != status.node_id)
        };
        let gone = async {
            while others() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let _ = tokio::time::timeout(LINGER, gone).await;
    }
}

/// Resolves when this node is certain never to belong to a group.
async fn never_joined(node: &Node) -> Failure {
    match node.joined(FOREVER).await {
        Ok(()) => std::future::pending().await,
        Err(error) => refused(error),
    }
}

/// Resolves when this node met what only a newer version understands.
async fn halted(node: &Node) -> String {
    if node.joined(FOREVER).await.is_err() {
        return std::future::pending().await;
    }
    node.halted().await
}

fn listen(
    listener: TcpListener,
    app: axum::Router,
    stop: &CancellationToken,
) -> Result<JoinHandle<io::Result<()>>, Failure> {
    let listener = listener
        .set_nonblocking(true)
        .and_then(|()| tokio::net::TcpListener::from_std(listener))
        .map_err(|error| Failure::Other(format!("cannot use a listener: {error}")))?;
    let limits = http::listen::Limits { grace: Duration::from_secs(1), ..Default::default() };
    Ok(tokio::spawn(http::listen::serve(listener, app, limits, stop.clone())))
}

async fn bot(
    settings: &Settings,
    node: &Node,
    flows: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Result<Bot, Failure> {
    let prefix = Prefix::new(PREFIX).map_err(|error| Failure::Other(error.to_string()))?;
    let store = GroupStore::new(node.as_group(), prefix);
    let options =
        CoordinatorOptions { lease: settings.lease, replica_id: Some(ReplicaId::random()) };
    let coordination = Coordination::new(store.coordinator(options))
        .turn_wait(settings.turn_wait)
        .settle(settings.settle)
        .sticky(settings.sticky.then(Sticky::default));
    demo::bot(store, coordination, settings.reply_url.clone(), flows)
        .await
        .map_err(|error| Failure::Other(format!("the demo bot cannot be built: {error}")))
}

fn public_app(
    settings: &Settings,
    bot: &Bot,
    own: &str,
    stop: &Stop,
) -> Result<axum::Router, Failure> {
    let mut nodes = Vec::new();
    let named: Vec<String> = settings.public_peers.iter().map(HostPort::to_string).collect();
    for address in std::iter::once(own.to_owned()).chain(named) {
        let origin = format!("http://{address}");
        let origin: http::webchat::Origin =
            origin.parse().map_err(|error| Failure::Usage(format!("{origin}: {error}")))?;
        if !nodes.contains(&origin) {
            nodes.push(origin);
        }
    }
    let webhooks = http::public::Webhooks {
        hooks: bot.webhooks().into_iter().collect(),
        link: bot.link(),
        store: bot.store(),
    };
    let page = http::webchat::Options {
        channel: demo::WEBHOOK.to_owned(),
        nodes: nodes.clone(),
        stop: stop.public.clone(),
    };
    Ok(http::public::webhooks(webhooks)
        .merge(http::webchat::router(bot.store(), page))
        .layer(http::webchat::cors(nodes)))
}

/// The process id, for scripts; gone with a clean end (and removed by `up` otherwise).
struct PidFile(PathBuf);

impl PidFile {
    fn write(dir: &Path) -> Result<Self, Failure> {
        let path = dir.join("pid");
        // Renamed into place: a reader sees the whole number or none.
        let draft = dir.join("pid.new");
        std::fs::write(&draft, format!("{}\n", std::process::id()))
            .and_then(|()| std::fs::rename(&draft, &path))
            .map_err(|error| Failure::Directory(format!("{}: {error}", path.display())))?;
        Ok(Self(path))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn catch() -> Result<Self, Failure> {
        let catch = |kind| {
            signal(kind).map_err(|error| Failure::Other(format!("cannot catch signals: {error}")))
        };
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
