//! Disks that fill, fail and hang, under real nodes (SPEC M4).
//!
//! They need root: a small disk is a loop-mounted file, and failing and hanging system calls are
//! `strace`'s. Where the machine forbids it, the tests say `SKIPPED` by name.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::json;
use support::api::Outcome;
use support::cluster::{Arena, Cluster, Options};
use support::disks::{SmallDisk, Tampering};
use support::session::Prefix;

const SECOND: Duration = Duration::from_secs(1);
const MIB: u64 = 1 << 20;

/// Waits until `met` answers something.
async fn until<T>(what: &str, within: Duration, mut met: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + within;
    loop {
        if let Some(found) = met().await {
            return found;
        }
        assert!(Instant::now() < end, "{what}: not within {within:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A client of one node alone.
fn only(cluster: &Cluster, node: usize) -> Prefix {
    let api = cluster.api();
    Prefix::new(api.through(vec![cluster.nodes[node].base()]), "faults")
}

/// Writes rows through a node; all are taken.
async fn write(prefix: &Prefix, numbers: Range<usize>) {
    for number in numbers {
        let request = prefix.create(&format!("demo:row-{number}"), &json!({ "n": number }));
        assert_eq!(prefix.write(0, request).await.status, 200, "row {number}");
    }
}

/// One attempt at a row.
async fn attempt(prefix: &Prefix, row: &str) -> Outcome {
    let request = prefix.create(&format!("demo:{row}"), &json!(1)).key(row);
    prefix.api.call(0, &request.once(3 * SECOND)).await
}

/// Whether a node has a row, as far as it has applied.
async fn has(prefix: &Prefix, number: usize) -> bool {
    let path = format!("checkpoints/demo:row-{number}?consistency=local");
    let request = prefix.request(Method::GET, &path).once(3 * SECOND);
    matches!(prefix.api.call(0, &request).await, Outcome::Answered(answer) if answer.status == 200)
}

// ----------------------------------------------------------------------------------- a small disk

#[tokio::test(flavor = "multi_thread")]
async fn case_r15_a_leader_whose_disk_fills_hands_over_and_heals_without_a_restart() {
    let mut disk = None;
    let arena = Arena::enter().await;
    let options = Options::nodes(3).lease("2s");
    let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    match SmallDisk::mount(root.path(), 256 * MIB) {
        Ok(mounted) => disk = Some(mounted),
        Err(why) => eprintln!("SKIPPED case_r15: no small disk on this machine: {why}"),
    }
    let Some(disk) = disk else { return };
    let at = disk.at.join("n1");
    let mut cluster = Cluster::start_prepared(&options, arena, |cluster| {
        let _ = fs::remove_dir_all(&at);
        cluster.nodes[0].dir = at.clone();
        // Snapshots are due again and again, on the full disk too.
        let env = [("BOTMESH_DISK_LOW_WATER", "48MiB"), ("BOTMESH_SNAPSHOT_EVERY", "50")];
        cluster.nodes[0].env = env.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    })
    .await;
    // The founder leads; it is the one on the small disk.
    assert_eq!(cluster.leader().await, 0);
    let pid = cluster.nodes[0].pid();
    let [first, second, third] = [0, 1, 2].map(|node| only(&cluster, node));
    write(&first, 0..50).await;

    let junk = disk.fill();
    until("another leads", 15 * SECOND, async || (cluster.leader().await != 0).then_some(())).await;
    // Service goes on through the others, and the full one says why it refuses.
    write(&second, 50..250).await;
    write(&third, 250..300).await;
    let refused =
        until("n1 refuses", 15 * SECOND, async || match attempt(&first, "refused").await {
            Outcome::NotExecuted { why } => Some(why),
            _ => None,
        })
        .await;
    assert!(refused.contains("nearly full"), "{refused}");

    fs::remove_file(junk).unwrap();
    until("n1 has caught up", 30 * SECOND, async || has(&first, 299).await.then_some(())).await;
    assert_eq!(cluster.nodes[0].pid(), pid, "it healed without a restart");
    write(&first, 300..320).await;
    cluster.states_are_equal().await;
    cluster.kill_all();
    drop(disk);
}

/// To openraft whatever fails its stores is the end. A process that outlived it would answer for ever
/// that it does not serve, and nobody would start it again.
#[tokio::test(flavor = "multi_thread")]
async fn m4_a_node_whose_raft_has_ended_ends_too_and_comes_back() {
    let arena = Arena::enter().await;
    let options = Options::nodes(3).lease("2s");
    let mut cluster = Cluster::start_prepared(&options, arena, |cluster| {
        cluster.nodes[2].env = vec![("BOTMESH_SNAPSHOT_EVERY".to_owned(), "50".to_owned())];
    })
    .await;
    let [first, third] = [0, 2].map(|node| only(&cluster, node));
    // No snapshot can be written any more.
    let snapshots = cluster.nodes[2].dir.join("snapshots");
    fs::remove_dir_all(&snapshots).unwrap();
    fs::write(&snapshots, b"in the way").unwrap();
    write(&first, 0..200).await;
    cluster.nodes[2].wait_ended(30 * SECOND).await;
    let printed = cluster.nodes[2].printed();
    assert!(printed.contains("Raft has ended by itself"), "{printed}");

    fs::remove_file(&snapshots).unwrap();
    cluster.restart(2).await;
    until("n3 has caught up", 30 * SECOND, async || has(&third, 199).await.then_some(())).await;
    write(&third, 200..220).await;
    cluster.states_are_equal().await;
}

// -------------------------------------------------------------------------- failing system calls

#[tokio::test(flavor = "multi_thread")]
async fn case_r23_a_failed_sync_ends_the_process_and_nothing_after_it_was_acknowledged() {
    let mut cluster = Cluster::start(Options::nodes(1)).await;
    let prefix = only(&cluster, 0);
    write(&prefix, 0..20).await;
    let (pid, said) = (cluster.nodes[0].pid(), cluster.root().join("strace.said"));
    let inject = "inject=fdatasync:error=EIO:when=9";
    let tampering = match Tampering::attach(pid, inject, &said).await {
        Ok(tampering) => tampering,
        Err(why) => {
            eprintln!("SKIPPED case_r23: calls cannot be made to fail on this machine: {why}");
            return;
        }
    };
    let mut written = 20;
    let end = Instant::now() + 20 * SECOND;
    while cluster.nodes[0].ended().is_none() {
        assert!(Instant::now() < end, "the process goes on after a failed sync");
        if let Outcome::Answered(answer) = attempt(&prefix, &format!("row-{written}")).await {
            assert_eq!(answer.status, 200);
            written += 1;
        }
    }
    drop(tampering);
    let printed = cluster.nodes[0].printed();
    assert!(printed.contains("nothing after this was acknowledged"), "{printed}");

    cluster.restart(0).await;
    for number in 0..written {
        assert!(has(&prefix, number).await, "row {number} of {written} was acknowledged");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r16_a_leader_whose_disk_hangs_hands_leadership_on() {
    let cluster = Cluster::start(Options::nodes(3).lease("4s")).await;
    let leader = cluster.leader().await;
    write(&only(&cluster, leader), 0..20).await;
    let was = cluster.node_id(leader).await;
    let (pid, said) = (cluster.nodes[leader].pid(), cluster.root().join("strace.said"));
    let inject = "inject=fdatasync:delay_enter=60000000";
    let tampering = match Tampering::attach(pid, inject, &said).await {
        Ok(tampering) => tampering,
        Err(why) => {
            eprintln!("SKIPPED case_r16: calls cannot be made to hang on this machine: {why}");
            return;
        }
    };
    let others = [1, 2].map(|next| only(&cluster, (leader + next) % 3));
    let began = Instant::now();
    // Its own renewals make the disk show itself; this is sooner.
    let _ = attempt(&others[0], "first").await;
    until("another leads", 20 * SECOND, async || {
        let status = cluster.status((leader + 1) % 3).await?;
        status["leader"].as_u64().filter(|leads| *leads != was)
    })
    .await;
    println!("another leads after {:?}", began.elapsed());
    write(&others[0], 20..70).await;
    write(&others[1], 70..120).await;
    drop(tampering);
}

/// A disk that takes 150 ms for a sync: the node says which beat would do, and with that one the
/// leader stays.
#[tokio::test(flavor = "multi_thread")]
async fn case_r21_a_slow_disk_is_warned_of_and_the_leader_is_stable_at_the_advised_beat() {
    const SLOW: &str = "inject=fdatasync:delay_enter=150000";
    let cluster = Cluster::start(Options::nodes(1)).await;
    let (pid, said) = (cluster.nodes[0].pid(), cluster.root().join("strace.said"));
    let tampering = match Tampering::attach(pid, SLOW, &said).await {
        Ok(tampering) => tampering,
        Err(why) => {
            eprintln!("SKIPPED case_r21: calls cannot be made slow on this machine: {why}");
            return;
        }
    };
    write(&only(&cluster, 0), 0..12).await;
    let advised = until("it says which beat", 30 * SECOND, async || {
        let printed = cluster.nodes[0].printed();
        let (_, rest) = printed.split_once("--beat ")?;
        Some(rest.split(')').next()?.to_owned())
    })
    .await;
    println!("the advice: --beat {advised}");
    drop(tampering);
    drop(cluster);

    let mut options = Options::nodes(3);
    options.args.extend(["--beat".to_owned(), advised]);
    let cluster = Cluster::start(options).await;
    let mut slow = Vec::new();
    for node in &cluster.nodes {
        let said = cluster.root().join(format!("{}.strace", node.name));
        slow.push(Tampering::attach(node.pid(), SLOW, &said).await.unwrap());
    }
    let leads = async || {
        let status = cluster.status(0).await?;
        Some((status["term"].as_u64()?, status["leader"].as_u64()?))
    };
    let before = until("a leader", 30 * SECOND, leads).await;
    write(&only(&cluster, 0), 0..15).await;
    write(&only(&cluster, 1), 15..30).await;
    let after = until("a leader", 30 * SECOND, leads).await;
    assert_eq!(after, before, "the leader changed");
    let warned = cluster.nodes.iter().any(|node| node.printed().contains("--beat"));
    assert!(!warned, "at the advised beat there is nothing to warn of");
    drop(slow);
}
