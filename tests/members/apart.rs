//! Members that do not hear each other, or whose clocks are set (cases c11, c15, o4).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::PATIENCE;
use crate::support::cluster::{Arena, Cluster, Options};
use crate::support::demo::Demo;
use crate::support::links::{Link, Links};
use crate::support::session::Prefix;

const SECOND: Duration = Duration::from_secs(1);

/// Waits until `met` answers something.
async fn until<T>(what: &str, mut met: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = met().await {
            return found;
        }
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Three nodes, each behind a proxy.
async fn linked(lease: &str) -> (Cluster, Links) {
    let arena = Arena::enter().await;
    let links = Links::start(3).await;
    let options = Options::nodes(3).lease(lease);
    let cluster = Cluster::start_prepared(&options, arena, |cluster| links.lead_to(cluster)).await;
    (cluster, links)
}

/// All sessions, as a node sees them: the node each runs on, and its incarnation.
async fn sessions(cluster: &Cluster, seen_by: usize) -> Option<BTreeSet<(u64, u64)>> {
    let status = cluster.status(seen_by).await?;
    let number = |session: &Value, name: &str| session[name].as_u64().expect("an integer");
    let all = status["sessions"].as_array().expect("sessions are an array").iter();
    Some(all.map(|it| (number(it, "node_id"), number(it, "incarnation"))).collect())
}

async fn leader_and_term(cluster: &Cluster, seen_by: usize) -> Option<(u64, u64)> {
    let status = cluster.status(seen_by).await?;
    Some((status["leader"].as_u64()?, status["term"].as_u64()?))
}

// ------------------------------------------------------------------------------ a silent peer

/// The leader takes every connection and says nothing more. A renewal that is on its way to it must not
/// wait for its own deadline where another leads already.
#[tokio::test(flavor = "multi_thread")]
async fn case_c15_a_renewal_that_is_not_answered_goes_another_way() {
    // An election that takes longer than this shows nothing about the renewals after it.
    const ELECTED_SOON: Duration = Duration::from_millis(1_200);
    for _ in 0..10 {
        let (mut cluster, links) = linked("4s").await;
        let leader = cluster.leader().await;
        let others = [(leader + 1) % 3, (leader + 2) % 3];
        let led = until("a leader", async || leader_and_term(&cluster, others[0]).await).await;
        let before = until("all sessions", async || {
            sessions(&cluster, others[0]).await.filter(|all| all.len() == 3)
        })
        .await;
        for other in others {
            links.set_both(leader, other, Link::Cut);
        }
        let silent = Instant::now();
        until("another leads", async || {
            let now = leader_and_term(&cluster, others[0]).await?;
            (now.0 != led.0).then_some(())
        })
        .await;
        let elected = silent.elapsed();
        if elected > ELECTED_SOON {
            eprintln!("an election of {elected:?}: once more");
            continue;
        }
        // The one that was cut off is given up; the two others keep what they have for longer than any
        // renewal that was on its way could have waited.
        let survivors = until("the end of the silent one's session", async || {
            sessions(&cluster, others[0])
                .await
                .filter(|all| all.iter().all(|(node, _)| *node != led.0))
        })
        .await;
        let kept: BTreeSet<(u64, u64)> =
            before.iter().filter(|(node, _)| *node != led.0).copied().collect();
        assert_eq!(survivors, kept, "a session ended though its replica renews it");
        for node in &mut cluster.nodes {
            assert!(node.ended().is_none(), "{} ended", node.name);
        }
        links.heal();
        cluster.wait_settled().await;
        cluster.states_are_equal().await;
        return;
    }
    panic!("ten times an election took longer than {ELECTED_SOON:?}");
}

// ------------------------------------------------------------------------ a cut that heals

/// `TEST_OUTAGE_SECONDS=60` is the case at its full length.
#[tokio::test(flavor = "multi_thread")]
async fn case_o4_a_node_that_was_cut_off_comes_back_with_one_election_at_most() {
    let asked = std::env::var("TEST_OUTAGE_SECONDS").ok().and_then(|text| text.parse().ok());
    let outage = Duration::from_secs(asked.unwrap_or(8));
    let (cluster, links) = linked("15s").await;
    let leader = cluster.leader().await;
    let (cut, stays) = ((leader + 1) % 3, (leader + 2) % 3);
    let demo = Demo::new(cluster.public());
    let before = until("a leader", async || leader_and_term(&cluster, stays).await).await;
    // A turn that is held over HTTP, and one that waits for it.
    let prefix = Prefix::new(cluster.api().through(vec![cluster.nodes[stays].base()]), "o4");
    let holder = prefix.open(0, 60_000).await;
    let held = prefix.take(0, holder, "demo:held").await;
    assert!(held.fence.is_some());

    for other in [leader, stays] {
        links.set_both(cut, other, Link::Cut);
    }
    let began = Instant::now();
    let mut said = 0;
    // Chats go on meanwhile, through the others.
    while began.elapsed() < outage {
        let (id, chat) = (format!("o4-{said}"), format!("chat-{}", said % 5));
        demo.post(stays, &id, &chat, "hello").await;
        assert_eq!(demo.answer_to(stays, &id, &chat, PATIENCE).await.text, "echo: hello");
        said += 1;
    }
    assert!(said > 0);
    links.heal();
    cluster.wait_settled().await;
    until("the node that was cut off serves", async || cluster.is_ready(cut).await.then_some(()))
        .await;
    let after = until("a leader", async || leader_and_term(&cluster, stays).await).await;
    assert!(after.1 <= before.1 + 1, "from term {} to {}", before.1, after.1);
    // The turn is where it was, under its fence, and passes on when it is released.
    assert_eq!(prefix.ask(0, held.ticket, SECOND).await.fence, held.fence);
    prefix.release(0, holder, held.ticket).await;
    for chat in 0..5.min(said) {
        let chat = format!("chat-{chat}");
        let replies = demo.replies(cut, &chat).await;
        let fences: Vec<_> = replies.iter().map(|reply| (reply.fence, reply.turn_seq)).collect();
        assert!(fences.is_sorted_by(|one, next| one < next), "{chat}: {fences:?}");
    }
    cluster.states_are_equal().await;
}

// ------------------------------------------------------------------------- clocks that are set

/// Where libfaketime is, if it is installed.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// The wall clocks of a group, each set by a file that is read at every look.
struct Clocks(Vec<PathBuf>);

impl Clocks {
    fn prepare(cluster: &mut Cluster) -> Self {
        let root = cluster.root().to_owned();
        let files = cluster.nodes.iter_mut().map(|node| {
            let file = root.join(format!("{}.clock", node.name));
            set(&file, "+0");
            let environment = [
                ("LD_PRELOAD", FAKETIME),
                ("FAKETIME_TIMESTAMP_FILE", file.to_str().expect("a path of the test's own")),
                ("FAKETIME_NO_CACHE", "1"),
                ("DONT_FAKE_MONOTONIC", "1"),
                ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
            ];
            node.env.extend(environment.map(|(name, value)| (name.to_owned(), value.to_owned())));
            file
        });
        Self(files.collect())
    }

    fn set(&self, node: usize, off: &str) {
        set(&self.0[node], off);
    }
}

fn set(file: &Path, off: &str) {
    // Renamed into place: a node sees one or the other.
    let draft = file.with_extension("draft");
    std::fs::write(&draft, off).unwrap();
    std::fs::rename(&draft, file).unwrap();
}

/// How far a node's wall clock was off when it logged its last line.
fn off_by(cluster: &Cluster, node: usize) -> Option<i64> {
    let printed = cluster.nodes[node].printed();
    let stamps = printed.lines().filter_map(|line| line.split_whitespace().next());
    let last: jiff::Timestamp = stamps.filter_map(|stamp| stamp.parse().ok()).next_back()?;
    Some(last.as_second() - jiff::Timestamp::now().as_second())
}

#[tokio::test(flavor = "multi_thread")]
async fn case_c11_a_clock_that_jumps_by_an_hour_ends_no_lease_and_extends_none() {
    const LEASE: Duration = Duration::from_secs(6);
    const HOUR: i64 = 3_600;
    if !Path::new(FAKETIME).exists() {
        eprintln!("SKIPPED case_c11: there is no {FAKETIME}");
        return;
    }
    let arena = Arena::enter().await;
    let clocks = std::sync::Mutex::new(None);
    let mut options = Options::nodes(3).lease("6s");
    options.args.extend(["--log".to_owned(), "info,openraft=warn".to_owned()]);
    let cluster = Cluster::start_prepared(&options, arena, |cluster| {
        *clocks.lock().unwrap() = Some(Clocks::prepare(cluster));
    })
    .await;
    let clocks = clocks.into_inner().unwrap().expect("the group was prepared");
    let leader = cluster.leader().await;
    let others = [(leader + 1) % 3, (leader + 2) % 3];
    let before = until("all sessions", async || {
        sessions(&cluster, others[0]).await.filter(|all| all.len() == 3)
    })
    .await;
    let prefix = Prefix::new(cluster.api(), "c11");

    // One clock goes an hour ahead and another an hour back, the leader's among them, then the other
    // way round.
    for (ahead, back) in [(leader, others[0]), (others[1], leader)] {
        // A lease that nobody renews, and somebody who waits for what it holds.
        let (sent, silent) = (Instant::now(), prefix.open(others[1], 6_000).await);
        let answered = Instant::now();
        let waiting = prefix.open(others[1], 600_000).await;
        let key = format!("demo:c11-{ahead}");
        let held = prefix.take(others[1], silent, &key).await;
        let next = prefix.take(others[1], waiting, &key).await;
        assert!(held.fence.is_some() && next.fence.is_none());
        clocks.set(ahead, "+3600");
        clocks.set(back, "-3600");
        let granted = prefix.granted(others[1], next.ticket, PATIENCE).await;
        // It came by the end of that lease: not before it, and not an hour later.
        assert_eq!(granted.previous, Some(silent));
        assert!(sent.elapsed() >= LEASE, "it ended after {:?}", sent.elapsed());
        assert!(answered.elapsed() < PATIENCE, "it was extended");
        for (node, off) in [(ahead, HOUR), (back, -HOUR)] {
            // Whatever it logs next shows its clock.
            until("a line by a clock that jumped", async || {
                prefix.renew(node, waiting).await;
                let _ = cluster.status(node).await;
                yield_leader(&cluster).await;
                off_by(&cluster, node).filter(|seen| (seen - off).abs() < HOUR / 2)
            })
            .await;
        }
        clocks.set(ahead, "+0");
        clocks.set(back, "+0");
    }
    // Whoever renewed has what it had.
    let after = until("the sessions", async || sessions(&cluster, others[0]).await).await;
    let lost: Vec<_> = before.difference(&after).collect();
    assert!(lost.is_empty(), "a lease ended though its replica lives: {lost:?}");
    cluster.states_are_equal().await;
}

/// A change of leader, which every node logs.
async fn yield_leader(cluster: &Cluster) {
    let url = format!("{}/cluster/yield-leader", cluster.nodes[0].base());
    let call = reqwest::Client::new().post(url).bearer_auth(&cluster.secret);
    // Where nobody leads at the moment, a change is under way.
    let _ = call.timeout(10 * SECOND).send().await;
}
