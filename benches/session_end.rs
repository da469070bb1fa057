//! How long the end of a session keeps others waiting: `cargo bench --bench session_end [-- TURNS]`.
//!
//! Problem: the entry that ends a session also frees every turn it held and grants the next ones, and
//! while a node applies that entry it applies no other. Idea: a group of one node, embedded through the
//! library, log and fsync as ever. One session takes 100,000 turns; another commits one command after
//! the other all the while. Its slowest commit around the end, less its usual one, is the stall. Twice:
//! with nobody waiting for those turns, and with somebody waiting for each.
//!
//! It takes about two minutes.

/// As the binary.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use std::sync::Arc;
use std::time::{Duration, Instant};

use botmesh::clock::{Clock, SystemClock};
use botmesh::group::Group;
use botmesh::machine::{Command, QueueKey, QueueKind, Reply, SessionKind};
use botmesh::raft::{Node, NodeOptions, Secret, Start};
use botmesh::types::{Incarnation, Prefix};
use futures_util::StreamExt;
use tokio::sync::watch;

type Fault = Box<dyn std::error::Error + Send + Sync>;

/// How often each is measured.
const ROUNDS: usize = 5;
/// Tickets asked for at once.
const IN_FLIGHT: usize = 512;
/// How long the usual commit is looked at.
const CALM: Duration = Duration::from_secs(1);
/// No command of a bench waits longer.
const PATIENCE: Duration = Duration::from_secs(60);
/// A lease that does not end by itself.
const LEASE_MS: u64 = 3_600_000;

fn main() -> Result<(), Fault> {
    let given = std::env::args().skip(1).find_map(|argument| argument.parse().ok());
    let turns: usize = given.unwrap_or(100_000);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let root =
            tempfile::Builder::new().prefix("bench-").tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let node = start(root.path()).await?;
        println!("{:<44} {:>9} {:>9}", "stall of other commits (ms)", "median", "max");
        for (what, waiting) in [("nobody waits", false), ("each turn is waited for", true)] {
            let mut stalls = Vec::new();
            for round in 0..ROUNDS {
                let name = format!("{}-{round}", if waiting { "waited" } else { "alone" });
                stalls.push(end_of_session(&node.as_group(), turns, waiting, &name).await?);
            }
            stalls.sort_by(f64::total_cmp);
            let (median, max) = (stalls[ROUNDS / 2], stalls[ROUNDS - 1]);
            let what = format!("a session ends, {turns} turns, {what}");
            println!("{what:<44} {median:>9.1} {max:>9.1}");
        }
        node.shutdown().await;
        Ok(())
    })
}

async fn start(root: &std::path::Path) -> Result<Node, Fault> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let options = NodeOptions {
        start: Start::Bootstrap,
        ..NodeOptions::new("n1", root.join("n1"), &address, Secret::random())
    };
    let node = Node::open(options).await?;
    let router = node.router::<()>();
    tokio::spawn(async move { axum::serve(listener, router).await });
    node.joined(PATIENCE).await?;
    Ok(node)
}

async fn ask(group: &Arc<dyn Group>, command: Command) -> Result<Reply, Fault> {
    Ok(group.execute(command, SystemClock.now() + PATIENCE).await?)
}

async fn open(group: &Arc<dyn Group>, name: &str) -> Result<Incarnation, Fault> {
    let open = Command::OpenSession {
        prefix: Prefix::new("bench")?,
        kind: SessionKind::Remote,
        replica: name.to_owned(),
        node: group.node_id(),
        lease_ms: LEASE_MS,
    };
    match ask(group, open).await? {
        Reply::Session { session, .. } => Ok(session),
        other => Err(format!("no session: {other:?}").into()),
    }
}

/// Takes a ticket of each chat.
async fn take(
    group: &Arc<dyn Group>,
    session: Incarnation,
    chats: usize,
    name: &str,
) -> Result<(), Fault> {
    let prefix = Prefix::new("bench")?;
    let all = (0..chats).map(|chat| {
        let queue = QueueKey {
            kind: QueueKind::Turn,
            prefix: prefix.clone(),
            name: format!("bench:{name}-{chat}"),
        };
        ask(group, Command::TakeTicket { session, queue, if_free: false })
    });
    let mut taken = futures_util::stream::iter(all).buffer_unordered(IN_FLIGHT);
    while let Some(reply) = taken.next().await {
        match reply? {
            Reply::Ticket { .. } => {}
            other => return Err(format!("no ticket: {other:?}").into()),
        }
    }
    Ok(())
}

/// The stall of others while a session of so many turns ends, in ms.
async fn end_of_session(
    group: &Arc<dyn Group>,
    turns: usize,
    waiting: bool,
    name: &str,
) -> Result<f64, Fault> {
    let holder = open(group, "holder").await?;
    take(group, holder, turns, name).await?;
    let next = open(group, "next").await?;
    if waiting {
        take(group, next, turns, name).await?;
    }
    let (over, mut is_over) = watch::channel(false);
    let beside = {
        let group = group.clone();
        tokio::spawn(async move {
            let mut took = Vec::new();
            while !*is_over.borrow_and_update() {
                let began = Instant::now();
                ask(&group, Command::Noop).await?;
                took.push((began, began.elapsed().as_secs_f64() * 1_000.0));
            }
            Ok::<_, Fault>(took)
        })
    };
    tokio::time::sleep(CALM).await;
    let asked = Instant::now();
    let ended = ask(group, Command::CloseSession { session: holder }).await?;
    if ended != Reply::Done {
        return Err(format!("the session did not end: {ended:?}").into());
    }
    // What the end makes others do afterwards counts as well.
    tokio::time::sleep(CALM).await;
    over.send_replace(true);
    let took = beside.await??;
    let (before, after): (Vec<_>, Vec<_>) =
        took.into_iter().partition(|(began, took)| *began + ms(*took) < asked);
    let mut usual: Vec<f64> = before.into_iter().map(|(_, took)| took).collect();
    usual.sort_by(f64::total_cmp);
    let usual = usual.get(usual.len() / 2).copied().ok_or("no commit before the end")?;
    let slowest = after.into_iter().map(|(_, took)| took).fold(0.0, f64::max);
    ask(group, Command::CloseSession { session: next }).await?;
    Ok((slowest - usual).max(0.0))
}

fn ms(time: f64) -> Duration {
    Duration::from_secs_f64(time / 1_000.0)
}
