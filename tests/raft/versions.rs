//! Groups whose nodes run programs of different versions (SPEC M5, case r19). A node that is told to
//! know a lower level of commands announces and applies what an older program would.

use std::time::Duration;

use botmesh::clock::{Clock, SystemClock};
use botmesh::group::{ExecuteError, Group, Unavailable};
use botmesh::machine::{Command, Expect, LEVEL, Reply};
use botmesh::raft::{NodeOptions, Role, Start};
use botmesh::types::NodeId;
use tokio::net::TcpListener;

use super::cluster::*;

const OLD: u32 = 1;

async fn start(lab: &Lab, name: &str, start: Start, command_level: u32) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let options = NodeOptions { command_level, ..lab.options(name, &address, start) };
    lab.serve(listener, options).await.unwrap()
}

/// A command that an older program does not know; its effect can be had any number of times.
fn newer() -> Command {
    let (from, to) = ("test:from".to_owned(), "test:to".to_owned());
    Command::Rekey { prefix: prefix(), from, to, users: Vec::new(), keep_new: true }
}

/// The newer command is refused, and one of these is named. One that was upgraded a moment ago may be
/// named until its new process was heard.
async fn is_refused(by: &Running, old: &[NodeId]) {
    let deadline = SystemClock.now() + SOON;
    loop {
        match execute(&by.node, newer()).await {
            Err(ExecuteError::NotExecuted(Unavailable::TooNew { needs, node, knows })) => {
                assert_eq!((needs, knows), (2, OLD));
                if old.contains(&node) {
                    return;
                }
                assert!(SystemClock.now() < deadline, "node {node} is named, {old:?} are old");
            }
            other => panic!("{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(super) async fn three_old(lab: &Lab) -> Vec<Running> {
    let first = start(lab, "n1", Start::Bootstrap, OLD).await;
    let join = Start::Join(vec![first.address.clone()]);
    let second = start(lab, "n2", join.clone(), OLD).await;
    let third = start(lab, "n3", join, OLD).await;
    let nodes = vec![first, second, third];
    until("three voters", || nodes.iter().all(|one| voters(&one.status()) == 3)).await;
    nodes
}

/// One node after another gets the newer version. Until the last has, what only newer programs know
/// is refused, by name, and everything else goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r19_a_newer_command_is_refused_until_every_voter_has_announced_it() {
    let lab = Lab::new();
    let mut nodes = three_old(&lab).await;
    for upgraded in 0..3 {
        for (number, one) in nodes.iter().enumerate() {
            let old: Vec<NodeId> = nodes[upgraded..].iter().map(Running::id).collect();
            is_refused(one, &old).await;
            let key = format!("{upgraded}-{number}");
            let reply = execute(&one.node, put(&key, b"x", Expect::Absent)).await.unwrap();
            assert!(matches!(reply, Reply::Committed(_)), "{reply:?}");
        }
        let all: Vec<&Running> = nodes.iter().collect();
        let leader = leader_of(&all).await;
        assert_eq!(nodes[leader].status().command_level, OLD);
        // The next one: stopped, and started as the newer version.
        let (name, id) = (format!("n{}", upgraded + 1), nodes[upgraded].id());
        nodes.remove(upgraded).stop().await;
        nodes.insert(upgraded, start(&lab, &name, Start::Member, LEVEL).await);
        assert_eq!(nodes[upgraded].id(), id);
        converge(&nodes.iter().collect::<Vec<_>>()).await;
    }
    // The leader has to hear it from the last one, and the others from their logs.
    until("all to know the level", || nodes.iter().all(|one| one.status().command_level == LEVEL))
        .await;
    for one in &nodes {
        let reply = execute(&one.node, newer()).await.unwrap();
        assert_eq!(reply, Reply::Done);
    }
    // Agreed is agreed: with one voter away, and a leader that never heard of it, the level stays.
    nodes.pop().unwrap().crash().await;
    let deadline = SystemClock.now() + SOON;
    loop {
        let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
        if nodes[leader].node.yield_leader(SOON).await.is_some() {
            break;
        }
        assert!(SystemClock.now() < deadline, "leadership does not move");
    }
    for one in &nodes {
        assert_eq!(execute(&one.node, newer()).await.unwrap(), Reply::Done);
    }
}

/// A node that comes back with a program older than its group: it halts at the first entry it does
/// not know, says which and what to do, and the newer program goes on in the same directory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r19_an_unknown_committed_entry_halts_and_is_never_passed_over() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    execute(&nodes[0].node, put("k", b"before", Expect::Any)).await.unwrap();
    let third = nodes.pop().unwrap();
    let (id, dir) = (third.id(), third.dir.clone());
    converge(&[&nodes[0], &third]).await;
    third.stop().await;

    let old = start(&lab, "n3", Start::Member, OLD).await;
    until("it to follow", || old.status().leader.is_some()).await;
    execute(&nodes[0].node, newer()).await.unwrap();
    execute(&nodes[0].node, put("k", b"after", Expect::Any)).await.unwrap();
    let why = tokio::time::timeout(SOON, old.node.halted()).await.unwrap();
    assert!(why.contains("needs level 2") && why.contains("Install the newer version"), "{why}");
    let named: u64 = why.split(' ').nth(2).unwrap().parse().unwrap();
    until("the others to be past it", || nodes[0].status().applied > named).await;
    assert!(old.status().applied < named, "nothing after it was applied");
    assert_eq!(local(&old.node, "k").as_deref(), Some(&b"before"[..]));
    assert!(!old.node.readiness().ready());
    match execute(&old.node, put("k", b"x", Expect::Any)).await {
        Err(ExecuteError::NotExecuted(Unavailable::NotServing { why: told })) => {
            assert_eq!(told, why);
        }
        other => panic!("{other:?}"),
    }
    old.crash().await;

    // Started again as it was, it halts again, and is not taken for damaged.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let options = NodeOptions { command_level: OLD, ..lab.options("n3", &address, Start::Member) };
    match lab.serve(listener, options).await {
        Ok(again) => {
            let again_why = tokio::time::timeout(SOON, again.node.halted()).await.unwrap();
            assert_eq!(again_why, why);
            again.crash().await;
        }
        Err(error) => assert!(error.to_string().contains(&format!("entry {named} ")), "{error}"),
    }
    assert!(!dir.join("quarantine").exists());

    // The others went on, and so does the newer program in the same place.
    execute(&nodes[1].node, newer()).await.unwrap();
    let third = start(&lab, "n3", Start::Member, LEVEL).await;
    converge(&[&nodes[0], &nodes[1], &third]).await;
    assert_eq!(third.id(), id);
    assert_eq!(read(&third.node, "k").await.as_deref(), Some(&b"after"[..]));
}

/// Who joins with a program that is too old is told so, and takes no place in the group. One that
/// says nothing of its level is taken in, and votes as little.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m5_a_program_older_than_the_group_is_not_taken_in() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    execute(&nodes[0].node, newer()).await.unwrap();
    let join = Start::Join(vec![nodes[1].address.clone()]);
    let old = start(&lab, "n4", join.clone(), OLD).await;
    until("it to be told", || {
        let deadline = botmesh::clock::BootInstant::default();
        let refused = futures_util::FutureExt::now_or_never(old.node.barrier(deadline));
        let said = format!("{refused:?}");
        said.contains(&format!("commands of level {LEVEL}"))
            && said.contains("start a newer version")
    })
    .await;
    assert_eq!(nodes[0].status().nodes.len(), 3);
    old.stop().await;
    let again = start(&lab, "n4", join, LEVEL).await;
    again.node.joined(SOON).await.unwrap();
    converge(&[&nodes[0], &again]).await;
}

/// A learner that falls behind its group's level never becomes a voter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m5_a_learner_below_the_level_gets_no_vote() {
    let lab = Lab::new();
    let first = lab.start("n1", Start::Bootstrap).await;
    execute(&first.node, newer()).await.unwrap();
    let join = Start::Join(vec![first.address.clone()]);
    // A single learner does not vote yet; it comes back as an older program.
    let second = start(&lab, "n2", join.clone(), LEVEL).await;
    second.node.joined(SOON).await.unwrap();
    converge(&[&first, &second]).await;
    second.stop().await;
    let second = start(&lab, "n2", Start::Member, OLD).await;
    let level = |id: NodeId| {
        let status = first.status();
        status.nodes.iter().find(|node| node.id == id).and_then(|node| node.level)
    };
    until("its new process to be heard", || level(second.id()) == Some(OLD)).await;
    let third = start(&lab, "n3", join.clone(), LEVEL).await;
    third.node.joined(SOON).await.unwrap();
    converge(&[&first, &second, &third]).await;
    until("the other's level to be known", || level(third.id()) == Some(LEVEL)).await;
    // With a third learner there are two that may vote, and these get it.
    let fourth = lab.start("n4", join).await;
    until("three voters", || voters(&first.status()) == 3).await;
    let status = first.status();
    let role = |id| status.nodes.iter().find(|node| node.id == id).unwrap().role;
    assert_eq!(role(second.id()), Role::Learner);
    assert!([&third, &fourth].iter().all(|one| role(one.id()) == Role::Follower));
}
