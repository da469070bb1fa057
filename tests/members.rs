//! Members that start, stop, come back, are wiped and start all at once (SPEC K1 to K4, A6, A7).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;
mod members {
    mod apart;
    mod elections;
    mod orders;
}

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use support::cluster::{Arena, Cluster, Options};
use support::demo::Demo;
use support::session::Prefix;

const SECOND: Duration = Duration::from_secs(1);
/// How long anything that is going to happen may take.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn case_r5_a_member_restarted_with_its_join_flag_is_the_member_it_was() {
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "r5");
    let before = cluster.status(1).await.unwrap();
    cluster.nodes[1].kill();
    for number in 0..50 {
        let write = prefix.create(&format!("demo:r5-{number}"), &json!({ "n": number }));
        assert_eq!(prefix.write(0, write).await.status, 200);
    }
    let first = cluster.nodes[0].cluster.to_string();
    cluster.nodes[1].start(&["--join", &first]);
    cluster.wait_ready(1).await;
    cluster.wait_settled().await;
    let after = cluster.status(1).await.unwrap();
    assert_eq!(after["node_id"], before["node_id"]);
    assert_eq!(after["cluster_id"], before["cluster_id"]);
    assert_eq!(after["nodes"].as_array().unwrap().len(), 3, "{}", after["nodes"]);
    cluster.states_are_equal().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r8_a_group_of_one_comes_back_with_all_it_acknowledged() {
    const WRITES: usize = 1_000;
    let mut cluster = Cluster::start(Options::nodes(1)).await;
    let prefix = Prefix::new(cluster.api(), "r8");
    let mut revisions = Vec::new();
    for number in 0..WRITES {
        let write = prefix.create(&format!("demo:r8-{number}"), &json!({ "n": number }));
        let answer = prefix.write(0, write).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        revisions.push(answer.number("revision"));
    }
    let before = cluster.status(0).await.unwrap();
    cluster.nodes[0].kill();
    cluster.restart(0).await;
    let after = cluster.status(0).await.unwrap();
    assert_eq!(after["cluster_id"], before["cluster_id"]);
    assert_eq!(after["node_id"], before["node_id"]);
    for (number, revision) in revisions.into_iter().enumerate() {
        let found = prefix.read(0, &format!("demo:r8-{number}")).await;
        assert_eq!(found, Some((json!({ "n": number }), revision)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r11_one_of_three_alone_runs_and_says_that_it_has_no_quorum() {
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    cluster.kill_all();
    let printed_before = cluster.nodes[0].printed().len();
    cluster.nodes[0].start(&[]);
    let until = Instant::now() + 10 * SECOND;
    loop {
        assert!(cluster.nodes[0].ended().is_none(), "it ended:\n{}", cluster.nodes[0].printed());
        let said = cluster.nodes[0].printed().split_off(printed_before).to_lowercase();
        if said.contains("no quorum") && said.contains("1/3") {
            break;
        }
        assert!(Instant::now() < until, "within 10 s it said only:\n{said}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!cluster.is_ready(0).await, "ready without a quorum");
    let live = reqwest::get(format!("{}/livez", cluster.nodes[0].base())).await.unwrap();
    assert_eq!(live.status().as_u16(), 200);
    // What cannot be committed is refused as such, in bounded time.
    let prefix = Prefix::new(cluster.api(), "r11");
    let write = prefix.create("demo:r11", &json!(1)).once(20 * SECOND);
    let outcome = prefix.api.call(0, &write).await;
    assert!(!matches!(outcome, support::api::Outcome::Answered(_)), "{outcome:?}");
    assert!(!cluster.nodes[0].printed().contains("panicked"));
    cluster.restart_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r2_a_wiped_member_is_not_taken_for_the_one_it_was() {
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let old = cluster.node_id(2).await;
    let first = cluster.nodes[0].cluster.to_string();
    cluster.leave(2, old).await;
    std::fs::remove_dir_all(&cluster.nodes[2].dir).unwrap();
    // Without a word how to begin, an empty directory is no member.
    cluster.nodes[2].start(&[]);
    let ended = cluster.nodes[2].wait_ended(30 * SECOND).await;
    assert!(!ended.success());
    // With one, it becomes a new member, under an id that nobody had.
    cluster.nodes[2].start(&["--join", &first]);
    cluster.wait_ready(2).await;
    cluster.wait_settled().await;
    let new = cluster.node_id(2).await;
    assert!(new > old, "{new} after {old}");
    let nodes = cluster.status(0).await.unwrap()["nodes"].clone();
    let ids: BTreeSet<u64> =
        nodes.as_array().unwrap().iter().map(|node| node["id"].as_u64().unwrap()).collect();
    assert!(!ids.contains(&old) && ids.contains(&new) && ids.len() == 3, "{nodes}");
    cluster.states_are_equal().await;
}

/// A member whose log is gone has forgotten its vote and what it acknowledged. It must come back as
/// another (SPEC K3), and its flags must not make it found a second group while it asks (SPEC K2).
#[tokio::test(flavor = "multi_thread")]
async fn k3_a_damaged_founder_rejoins_as_new_and_founds_no_group_meanwhile() {
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "k3");
    for number in 0..20 {
        let write = prefix.create(&format!("demo:k3-{number}"), &json!({ "n": number }));
        assert_eq!(prefix.write(1, write).await.status, 200);
    }
    let old = cluster.node_id(0).await;
    let group = cluster.status(0).await.unwrap()["cluster_id"].clone();

    // The end of its log is lost, and for now nobody answers it.
    cluster.nodes[0].kill();
    let dir = cluster.nodes[0].dir.clone();
    let tail = std::fs::File::options().write(true).open(dir.join("log.tail")).unwrap();
    tail.set_len(0).unwrap();
    for other in [1, 2] {
        cluster.nodes[other].kill();
    }
    cluster.nodes[0].start(&["--bootstrap"]);
    until("its state to be set aside", || {
        cluster.nodes[0].printed().contains("waiting to join") && !dir.join("identity").exists()
    })
    .await;
    // Started again, it has nothing but its flags and what it wrote down of itself.
    cluster.nodes[0].kill();
    let said = cluster.nodes[0].printed().len();
    cluster.nodes[0].start(&["--bootstrap"]);
    until("it to ask again", || {
        cluster.nodes[0].printed().split_off(said).contains("waiting to join")
    })
    .await;
    let status = cluster.status(0).await.unwrap();
    assert!(status["cluster_id"].is_null() && status["node_id"].is_null(), "{status}");

    for other in [1, 2] {
        cluster.nodes[other].start(&[]);
    }
    cluster.wait_ready(0).await;
    cluster.wait_settled().await;
    let status = cluster.status(0).await.unwrap();
    assert_eq!(status["cluster_id"], group);
    assert!(cluster.node_id(0).await > old, "{status}");
    gone(&cluster, 0, old).await;
    for number in 0..20 {
        let found = prefix.read(0, &format!("demo:k3-{number}")).await;
        assert_eq!(found.map(|(value, _)| value), Some(json!({ "n": number })));
    }
    cluster.states_are_equal().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn k3_a_damaged_member_takes_its_own_place_as_another_while_the_group_runs() {
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "k3b");
    let write = prefix.create("demo:k3b", &json!("kept"));
    assert_eq!(prefix.write(0, write).await.status, 200);
    let old = cluster.node_id(2).await;
    cluster.nodes[2].kill();
    let tail = cluster.nodes[2].dir.join("log.tail");
    std::fs::File::options().write(true).open(tail).unwrap().set_len(0).unwrap();
    cluster.nodes[2].start(&[]);
    cluster.wait_ready(2).await;
    cluster.wait_settled().await;
    let status = cluster.status(2).await.unwrap();
    assert!(cluster.node_id(2).await > old, "{status}");
    gone(&cluster, 2, old).await;
    assert_eq!(prefix.read(2, "demo:k3b").await.map(|(value, _)| value), Some(json!("kept")));
    cluster.states_are_equal().await;
}

/// Waits until the change that makes the new member a voter has let the old one go; until then it is
/// a learner beside it, and serves.
async fn gone(cluster: &Cluster, at: usize, old: u64) {
    let deadline = Instant::now() + 30 * SECOND;
    loop {
        let status = cluster.status(at).await.unwrap();
        let nodes = status["nodes"].as_array().unwrap();
        let ids: Vec<u64> = nodes.iter().map(|one| one["id"].as_u64().unwrap()).collect();
        if ids.len() == 3 && !ids.contains(&old) {
            return;
        }
        assert!(Instant::now() < deadline, "node {old} is still a member: {ids:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn until(what: &str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + 30 * SECOND;
    while !look() {
        assert!(Instant::now() < deadline, "waited 30 s for {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r6_three_that_expect_each_other_found_one_group_whenever_they_start() {
    let _arena = Arena::enter().await;
    let mut cluster = Cluster::prepare(&Options::nodes(3));
    let peers: Vec<String> = cluster.nodes.iter().map(|node| node.cluster.to_string()).collect();
    let peers = peers.join(",");
    let flags = ["--bootstrap-expect", "3", "--peers", &peers];
    // Two of three do not found anything, for as long as the third is away.
    cluster.nodes[2].start(&flags);
    cluster.nodes[0].start(&flags);
    let alone = Instant::now();
    while alone.elapsed() < 3 * SECOND {
        for index in [0, 2] {
            assert!(!cluster.is_ready(index).await, "two of three founded a group");
            assert!(cluster.nodes[index].ended().is_none());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    cluster.nodes[1].start(&flags);
    for index in 0..3 {
        cluster.wait_ready(index).await;
    }
    cluster.wait_settled().await;
    let mut groups = BTreeSet::new();
    for index in 0..3 {
        groups.insert(cluster.status(index).await.unwrap()["cluster_id"].to_string());
    }
    assert_eq!(groups.len(), 1, "{groups:?}");
    // Started again with the same flags, they are the group they were.
    cluster.kill_all();
    for node in &mut cluster.nodes {
        node.start(&flags);
    }
    for index in 0..3 {
        cluster.wait_ready(index).await;
        groups.insert(cluster.status(index).await.unwrap()["cluster_id"].to_string());
    }
    assert_eq!(groups.len(), 1, "{groups:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a6_a_group_of_one_grows_to_three_without_a_stop() {
    let mut cluster = Cluster::start(Options::nodes(1)).await;
    let prefix = Prefix::new(cluster.api(), "a6");
    let writes = tokio::spawn({
        let prefix = prefix.clone();
        async move {
            let mut longest = Duration::ZERO;
            for number in 0..400 {
                let began = Instant::now();
                let write = prefix.create(&format!("demo:a6-{number}"), &json!(number));
                assert_eq!(prefix.write(0, write).await.status, 200);
                longest = longest.max(began.elapsed());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            longest
        }
    });
    let first = cluster.nodes[0].cluster.to_string();
    for _ in 0..2 {
        let index = cluster.add_node();
        cluster.nodes[index].start(&["--join", &first]);
        cluster.wait_ready(index).await;
    }
    cluster.wait_settled().await;
    let longest = writes.await.unwrap();
    println!("the longest write while two nodes joined took {longest:?}");
    assert!(longest < 3 * SECOND, "{longest:?}");
    // Any of the three may die now.
    cluster.nodes[0].kill();
    let prefix = Prefix::new(cluster.api(), "a6");
    for number in [0, 200, 399] {
        let found = prefix.read(1, &format!("demo:a6-{number}")).await;
        assert_eq!(found.map(|(value, _)| value), Some(json!(number)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a7_a_stopped_node_hands_on_at_once_and_exits_with_zero() {
    // The lease is long: what passes on within the test was given back, not taken.
    let mut cluster = Cluster::start(Options::nodes(3).lease("60s")).await;
    let demo = Demo::new(cluster.public());
    let leader = cluster.leader().await;
    let other = (leader + 1) % 3;
    demo.post(leader, "a7-0", "a7", "order").await;
    assert_eq!(demo.answer_to(other, "a7-0", "a7", 10 * SECOND).await.text, "What would you like?");
    let stopped = Instant::now();
    cluster.nodes[leader].signal(Signal::TERM);
    let ended = cluster.nodes[leader].wait_ended(15 * SECOND).await;
    assert_eq!(ended.code(), Some(0), "{ended}\n{}", cluster.nodes[leader].last_lines(20));
    let took = stopped.elapsed();
    demo.post(other, "a7-1", "a7", "tea").await;
    let reply = demo.answer_to(other, "a7-1", "a7", 10 * SECOND).await;
    assert_eq!(reply.text, "How many?");
    println!("stopped in {took:?}; the next answer came {:?} after the signal", stopped.elapsed());
    assert!(stopped.elapsed() < 15 * SECOND);
    // Its session is closed, not left to run out.
    let status = cluster.status(other).await.unwrap();
    assert_eq!(status["sessions"].as_array().unwrap().len(), 2, "{}", status["sessions"]);
    cluster.restart(leader).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn n2_a_join_flag_that_leads_to_another_group_is_said_and_ignored() {
    let _arena = Arena::enter().await;
    let mut cluster = Cluster::prepare(&Options::nodes(2));
    for index in 0..2 {
        cluster.nodes[index].start(&["--bootstrap"]);
        cluster.wait_ready(index).await;
    }
    let own = cluster.status(1).await.unwrap()["cluster_id"].clone();
    let first = cluster.nodes[0].cluster.to_string();
    cluster.nodes[1].kill();
    cluster.nodes[1].start(&["--join", &first]);
    cluster.wait_ready(1).await;
    let until = Instant::now() + 10 * SECOND;
    while !cluster.nodes[1].printed().contains("leads to group") {
        assert!(Instant::now() < until, "it only said:\n{}", cluster.nodes[1].printed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(cluster.status(1).await.unwrap()["cluster_id"], own);
    // Both groups are named, and what to do to change over.
    let other = cluster.status(0).await.unwrap()["cluster_id"].clone();
    let said = cluster.nodes[1].printed();
    let line = said.lines().find(|line| line.contains("leads to group")).unwrap();
    for part in [own.as_str().unwrap(), other.as_str().unwrap(), &first, "an empty directory"] {
        assert!(line.contains(part), "{part} in {line}");
    }
}

/// A founder whose identity file is gone has a log and a vote: it refuses every way to begin, and
/// with the file back it is who it was (SPEC K2).
#[tokio::test(flavor = "multi_thread")]
async fn k2_a_directory_with_a_log_and_no_identity_begins_nothing() {
    let _arena = Arena::enter().await;
    let mut cluster = Cluster::prepare(&Options::nodes(2));
    for index in 0..2 {
        cluster.nodes[index].start(&["--bootstrap"]);
        cluster.wait_ready(index).await;
    }
    let own = cluster.status(0).await.unwrap()["cluster_id"].clone();
    let (first, second) =
        (cluster.nodes[0].cluster.to_string(), cluster.nodes[1].cluster.to_string());
    let peers = format!("{first},{second}");
    cluster.nodes[0].kill();
    let identity = cluster.nodes[0].dir.join("identity");
    let kept = std::fs::read(&identity).unwrap();
    std::fs::remove_file(&identity).unwrap();
    let begins: [&[&str]; 3] =
        [&["--bootstrap"], &["--join", &second], &["--bootstrap-expect", "2", "--peers", &peers]];
    for flags in begins {
        cluster.nodes[0].start(flags);
        assert!(!cluster.nodes[0].wait_ended(30 * SECOND).await.success(), "{flags:?}");
        assert!(!identity.exists(), "{flags:?} made it a member");
    }
    let said = cluster.nodes[0].printed();
    assert!(said.contains("the directory holds a log"), "{said}");
    std::fs::write(&identity, kept).unwrap();
    cluster.nodes[0].start(&[]);
    cluster.wait_ready(0).await;
    assert_eq!(cluster.status(0).await.unwrap()["cluster_id"], own);
}

/// A directory that a newer version has used is left as it is, and says so (SPEC M5).
#[tokio::test(flavor = "multi_thread")]
async fn m5_a_directory_of_a_newer_version_is_refused_and_left_alone() {
    use botmesh::raft::{Node, NodeOptions, Secret, Start};
    let _arena = Arena::enter().await;
    let mut cluster = Cluster::prepare(&Options::nodes(1));
    let secret = Secret::new(&cluster.secret).unwrap();
    let (dir, address) = (cluster.nodes[0].dir.clone(), cluster.nodes[0].cluster.to_string());
    let newer = Node::open(NodeOptions {
        start: Start::Bootstrap,
        command_level: 99,
        ..NodeOptions::new("n1", &dir, &address, secret)
    });
    let newer = newer.await.unwrap();
    until("its group to agree", || newer.status().command_level == 99).await;
    newer.shutdown().await;
    for _ in 0..2 {
        cluster.nodes[0].start(&[]);
        let ended = cluster.nodes[0].wait_ended(30 * SECOND).await;
        assert_eq!(ended.code(), Some(7), "{}", cluster.nodes[0].printed());
    }
    let said = cluster.nodes[0].printed();
    assert!(said.contains("level 99") && said.contains("install that version"), "{said}");
    assert!(!dir.join("quarantine").exists(), "{said}");
    assert!(dir.join("identity").exists(), "{said}");
}

/// Every node in turn is stopped and started again under users who talk on; each hears every answer
/// once and in order.
#[tokio::test(flavor = "multi_thread")]
async fn case_o2_a_rolling_deploy_under_load_loses_doubles_and_reorders_nothing() {
    const USERS: usize = 6;
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let demo = Demo::new(cluster.public());
    let stop = Arc::new(AtomicBool::new(false));
    let answered = Arc::new(AtomicUsize::new(0));
    let mut users = tokio::task::JoinSet::new();
    for user in 0..USERS {
        let (demo, stop, answered) = (demo.clone(), stop.clone(), answered.clone());
        users.spawn(async move {
            let chat = format!("o2-{user}");
            let mut said = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let text = format!("{chat}-{}", said.len());
                // A node that stops sends its caller to another, which may know the message already.
                demo.post((user + said.len()) % 3, &text, &chat, &text).await;
                said.push(text);
                if said.len() % 4 == 0 {
                    let last = said.last().unwrap();
                    demo.answer_to(user % 3, last, &chat, PATIENCE).await;
                    answered.fetch_add(4, Ordering::Relaxed);
                }
            }
            (chat, said)
        });
    }
    let more = async |than: usize| {
        let begun = Instant::now();
        while answered.load(Ordering::Relaxed) < than {
            assert!(begun.elapsed() < PATIENCE, "the users are not answered any more");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    more(4 * USERS).await;
    for index in 0..3 {
        cluster.nodes[index].signal(Signal::TERM);
        let status = cluster.nodes[index].wait_ended(PATIENCE).await;
        assert!(status.success(), "n{} ended with {status}", index + 1);
        more(answered.load(Ordering::Relaxed) + 4 * USERS).await;
        cluster.restart(index).await;
        more(answered.load(Ordering::Relaxed) + 4 * USERS).await;
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(user) = users.join_next().await {
        let (chat, said) = user.unwrap();
        let last = said.last().unwrap();
        demo.answer_to(0, last, &chat, PATIENCE).await;
        let heard = demo.replies(1, &chat).await;
        let heard: Vec<String> = heard.into_iter().map(|reply| reply.text).collect();
        let expected: Vec<String> = said.iter().map(|text| format!("echo: {text}")).collect();
        let from = expected.len() - heard.len();
        assert_eq!(heard, expected[from..], "{chat}");
        assert!(from == 0 || heard.len() == 1_000, "{chat}: only {} are listed", heard.len());
    }
    cluster.states_are_equal().await;
}
