//! What a turn costs: `cargo bench --bench turns [-- [--messages] [--json FILE]]`; with `--messages`
//! only the last part is run.
//!
//! Problem: turns taken through HTTP measure mostly the HTTP client, and figures of one machine say
//! nothing about another. Idea: three nodes on loopback, fsync on. Two of them are real `botmesh
//! run` processes of the release profile; the third is this process, which embeds a node through
//! the library as a bot does, so that it can take turns in process, as leader and as follower. The
//! bare limits of the machine (one fdatasync, one loopback round trip, one bare Raft commit
//! through the same log and transport) are measured in the same run: compare ratios.
//!
//! A turn: take a ticket → the *own* node applies the grant → release, answered after the own node
//! applied it. Every turn is checked: no two of a chat at one instant, fences only grow.
//!
//! Messages go a longer way: a bot on the node of this process journals each, takes it through a
//! step of a persistent flow and sends the reply.
//!
//! It ends by itself in less than four minutes.

/// As the binary.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod cluster;
mod limits;
mod load;
mod messages;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use report::Report;

/// Chats the load is spread over.
const CHATS: usize = 10_000;
/// Chats of a bot that messages are spread over.
const MESSAGE_CHATS: usize = 1_000;
/// Turns in flight.
const IN_FLIGHT: usize = 256;
/// One measurement at full load.
const LOADED: Duration = Duration::from_secs(8);
/// Turns one after the other, for the latency at one client.
const SINGLE: usize = 1_500;
/// One look at an idle group: two renewals of the default lease.
const IDLE: Duration = Duration::from_secs(10);

type Fault = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Fault> {
    // As `botmesh run`.
    rustix::thread::disable_transparent_huge_pages(true)?;
    let Asked { json, messages_only } = Asked::read()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(async {
        // An end that does not come is a failure too.
        tokio::time::timeout(Duration::from_secs(230), run(messages_only)).await?
    })?;
    report.print();
    if let Some(path) = json {
        std::fs::write(&path, report.json())?;
        println!("written: {}", path.display());
    }
    Ok(())
}

/// What the command line asks for; what else cargo passes (`--bench`) is not ours.
struct Asked {
    json: Option<PathBuf>,
    messages_only: bool,
}

impl Asked {
    fn read() -> Result<Self, Fault> {
        let mut asked = Self { json: None, messages_only: false };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--json" => {
                    let file = arguments.next().ok_or("--json needs a file")?;
                    asked.json = Some(PathBuf::from(file));
                }
                "--messages" => asked.messages_only = true,
                _ => {}
            }
        }
        Ok(asked)
    }
}

async fn run(messages_only: bool) -> Result<Report, Fault> {
    let mut report = Report::default();
    let cluster = cluster::Cluster::start().await?;
    report.add("fdatasync", "ms", limits::fdatasync(cluster.dir())?);
    report.add("loopback_round_trip", "ms", limits::round_trip()?);
    if !messages_only {
        turns(&cluster, &mut report).await?;
    }
    // Last: the message ids it leaves remembered are no part of what a turn costs.
    messages(&cluster, &mut report).await?;
    cluster.stop().await?;
    Ok(report)
}

async fn turns(cluster: &cluster::Cluster, report: &mut Report) -> Result<(), Fault> {
    // Idle first: nothing has grown yet.
    report.add("idle_rss", "MiB", cluster.resident_mib()?);
    cluster.lead(cluster::Who::Here).await?;
    let led = cluster.idle(IDLE).await;
    report.add("idle_entries", "1/s", vec![led.entries]);
    report.add("idle_requests_to_leader", "1/s", vec![led.requests]);
    cluster.lead(cluster::Who::There).await?;
    let followed = cluster.idle(IDLE).await;
    report.add("idle_requests_to_follower", "1/s", vec![followed.requests]);

    cluster.lead(cluster::Who::Here).await?;
    let one = load::one_client(cluster, SINGLE).await?;
    report.add("bare_commit_1_client", "ms", one.commits);
    report.add("ticket_to_grant_1_client", "ms", one.grants);
    report.add("whole_turn_1_client", "ms", one.turns);

    let leader = load::many(cluster, CHATS, IN_FLIGHT, LOADED).await?;
    report.add("turns_through_leader", "1/s", leader.per_second);
    report.add("ticket_to_grant_256_clients", "ms", leader.grants);
    report.checked(leader.checks);

    cluster.lead(cluster::Who::There).await?;
    let follower = load::many(cluster, CHATS, IN_FLIGHT, LOADED).await?;
    report.add("turns_through_follower", "1/s", follower.per_second);
    report.checked(follower.checks);

    let http = load::over_http(cluster, CHATS, IN_FLIGHT, LOADED).await?;
    report.add("turns_over_http", "1/s", http.per_second);
    report.checked(http.checks);
    report.add("loaded_rss", "MiB", cluster.resident_mib()?);

    Ok(())
}

async fn messages(cluster: &cluster::Cluster, report: &mut Report) -> Result<(), Fault> {
    cluster.lead(cluster::Who::Here).await?;
    let messages = messages::through_bot(cluster, MESSAGE_CHATS, IN_FLIGHT, LOADED).await?;
    report.add("message_to_reply_1_client", "ms", messages.one);
    report.add("entries_per_message_1_client", "1", vec![messages.entries]);
    report.add("messages_through_leader", "1/s", messages.many.per_second);
    report.add("message_to_reply_256_clients", "ms", messages.many.grants);
    report.checked(messages.many.checks);
    for (name, entries) in messages::costs(cluster).await? {
        report.add(&name, "1", vec![entries]);
    }

    Ok(())
}
