//! Leaders of real processes that are killed or frozen (SPEC E6, E7; DESIGN 5.3).

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use crate::support::cluster::{Cluster, Options};
use crate::support::session::Prefix;

/// A leader's lease; behind it comes an election timeout of half of that at the least.
const LEASE: Duration = Duration::from_millis(300);

/// How long a survivor that lags is stopped, from a moment before the leader dies.
const PAUSE: Duration = Duration::from_millis(300);

async fn term(cluster: &Cluster, index: usize) -> u64 {
    cluster.status(index).await.expect("the node answers")["term"].as_u64().unwrap()
}

/// Kills leaders, again and again, in every third round with a survivor that is stopped meanwhile.
/// What each round took until a write was answered, and how many terms.
async fn fail_over(nodes: usize, rounds: usize) -> Vec<(Duration, u64)> {
    let mut cluster = Cluster::start(Options::nodes(nodes)).await;
    let prefix = Prefix::new(cluster.api(), "r26");
    let mut all = Vec::new();
    for round in 0..rounds {
        cluster.wait_settled().await;
        let leader = cluster.leader().await;
        let (lagging, writer) = ((leader + 1) % nodes, (leader + 2) % nodes);
        let create = |what| {
            let path = format!("demo:{what}-{round}");
            prefix.create(&path, &json!({ "round": round }))
        };
        assert_eq!(prefix.write(writer, create("before")).await.status, 200);
        let before = term(&cluster, writer).await;
        let lags = round % 3 == 2;
        if lags {
            cluster.nodes[lagging].signal(Signal::STOP);
            if nodes > 3 || round % 2 == 0 {
                // What it misses now it has to be given by the next leader.
                assert_eq!(prefix.write(leader, create("missed")).await.status, 200);
            }
        }
        let mut since = Instant::now();
        cluster.nodes[leader].kill();
        if lags {
            tokio::time::sleep(PAUSE).await;
            cluster.nodes[lagging].signal(Signal::CONT);
            if nodes == 3 {
                // Without it there is no majority.
                since = Instant::now();
            }
        }
        assert_eq!(prefix.write(writer, create("after")).await.status, 200);
        let took = since.elapsed();
        all.push((took, term(&cluster, writer).await - before));
        cluster.restart(leader).await;
    }
    cluster.states_are_equal().await;
    all
}

/// None waits for a whole lease, and a term is enough. A few rounds on a machine that does other things
/// as well can only show that most do not.
fn judge(what: &str, all: &[(Duration, u64)]) {
    let late = all.iter().filter(|(took, _)| *took >= LEASE + LEASE / 2).count();
    let more = all.iter().filter(|(_, terms)| *terms > 1).count();
    let mut times: Vec<Duration> = all.iter().map(|(took, _)| *took).collect();
    times.sort();
    let at = |part: usize| times[(times.len() - 1) * part / 100];
    println!(
        "{what}: {} fail-overs, p50 {:?}, p99 {:?}, max {:?}; {more} took more than a term",
        all.len(),
        at(50),
        at(99),
        at(100)
    );
    if all.len() < 50 {
        assert!(late * 2 <= all.len(), "{late} waited for a lease: {all:?}");
        let terms: u64 = all.iter().map(|(_, terms)| terms).sum();
        assert!(terms <= 3 * all.len() as u64, "{terms} terms: {all:?}");
    } else {
        assert_eq!(late, 0, "so many waited for a lease: {all:?}");
        assert!(more * 20 <= all.len(), "{more} took more than a term: {all:?}");
    }
}

/// `TEST_FAILOVERS=1000` is the case at its full length.
fn rounds(short: usize) -> usize {
    let asked = std::env::var("TEST_FAILOVERS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(short)
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r26_no_fail_over_of_three_waits_for_a_whole_lease() {
    judge("3 nodes", &fail_over(3, rounds(6)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r26_no_fail_over_of_five_waits_for_a_whole_lease() {
    judge("5 nodes", &fail_over(5, rounds(6)).await);
}

/// A frozen process looks like a slow one. Nobody's connection ends, so nobody suspects it.
#[tokio::test(flavor = "multi_thread")]
async fn e7_a_frozen_leader_is_left_to_the_election_timer() {
    let cluster = Cluster::start(Options::nodes(3)).await;
    let leader = cluster.leader().await;
    let others: Vec<usize> = (0..3).filter(|index| *index != leader).collect();
    let before = term(&cluster, others[0]).await;
    let suspected = |cluster: &Cluster| -> usize {
        let printed = others.iter().map(|index| cluster.nodes[*index].printed());
        printed.map(|text| text.matches("the leader may be dead").count()).sum()
    };
    let told_before = suspected(&cluster);
    cluster.nodes[leader].signal(Signal::STOP);
    let frozen = Instant::now();
    while term(&cluster, others[0]).await == before {
        assert!(frozen.elapsed() < Duration::from_secs(30), "nobody else was elected");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let took = frozen.elapsed();
    // Its last heartbeat may have come 50 ms before.
    assert!(took >= LEASE, "it was given up after {took:?}");
    assert_eq!(suspected(&cluster), told_before);
    cluster.nodes[leader].signal(Signal::CONT);
    cluster.wait_settled().await;
}
