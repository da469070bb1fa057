//! Leaders that die or hand over, nodes that fall behind, groups that go quiet.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::time::Duration;

use botmesh::clock::{BootInstant, Clock, SystemClock};
use botmesh::group::{ExecuteError, Group, Unavailable};
use botmesh::machine::{Authority, Command, Expect, Op, Reply};
use botmesh::raft::{Node, NodeLimits, NodeOptions, Start};
use botmesh::types::{Incarnation, TicketId};
use tokio::net::TcpListener;

use super::cluster::*;

/// Takes `count` tickets through a node, a few at a time, and returns them.
async fn take_many(node: Node, session: Incarnation, count: usize) -> Vec<TicketId> {
    let mut taken = Vec::new();
    while taken.len() < count {
        let some = (0..8.min(count - taken.len())).map(|_| execute(&node, take(session, "chat")));
        for reply in futures_util::future::join_all(some).await {
            match reply {
                Ok(Reply::Ticket { ticket, .. }) => taken.push(ticket),
                other => panic!("{other:?}"),
            }
        }
    }
    taken.sort();
    taken
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b8_every_command_has_one_effect_while_the_leader_dies() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
    let mut writers = Vec::new();
    for (number, one) in nodes.iter().enumerate().filter(|(number, _)| *number != leader) {
        let session = session(&one.node, &format!("r{number}")).await;
        writers.push((session, tokio::spawn(take_many(one.node.clone(), session, 400))));
    }
    // In the middle of it the leader goes, and its connections with it.
    until("the writers to be under way", || !tickets(&nodes[leader].node, writers[0].0).is_empty())
        .await;
    nodes.remove(leader).crash().await;
    for (session, writer) in writers {
        let answered = writer.await.unwrap();
        assert_eq!(answered.len(), 400);
        for node in &nodes {
            node.node.barrier(SystemClock.now() + SOON).await.unwrap();
            assert_eq!(tickets(&node.node, session), answered, "answered and done are the same");
        }
    }
    converge(&nodes.iter().collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r9_a_command_told_to_go_elsewhere_has_one_effect() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    let mut writers = Vec::new();
    for (number, one) in nodes.iter().enumerate() {
        let session = session(&one.node, &format!("r{number}")).await;
        writers.push((session, tokio::spawn(take_many(one.node.clone(), session, 300))));
    }
    // Leadership moves on again and again under the writers.
    let mut moved = 0;
    while writers.iter().any(|(_, writer)| !writer.is_finished()) || moved < 3 {
        let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
        moved += usize::from(nodes[leader].node.yield_leader(SOON).await.is_some());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for (session, writer) in writers {
        let answered = writer.await.unwrap();
        // An answer comes from the apply of the node that was asked; this one may be behind it.
        nodes[0].node.barrier(SystemClock.now() + SOON).await.unwrap();
        assert_eq!(tickets(&nodes[0].node, session).len(), 300);
        assert_eq!(tickets(&nodes[0].node, session), answered);
    }
    converge(&nodes.iter().collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r8_a_group_of_one_loses_nothing() {
    let lab = Lab::new();
    let node = lab.start("n1", Start::Bootstrap).await;
    let writes = (0..1000).map(|n: u32| put_number(node.node.clone(), n));
    futures_util::future::join_all(writes).await;
    let before = state_hash(&node.node);
    let id = node.id();
    node.crash().await;
    let node = lab.restart("n1").await;
    node.node.barrier(SystemClock.now() + SOON).await.unwrap();
    assert_eq!(node.id(), id);
    assert_eq!(state_hash(&node.node), before);
}

async fn put_number(node: Node, number: u32) {
    let key = format!("k{number}");
    let reply = execute(&node, put(&key, &number.to_le_bytes(), Expect::Absent)).await.unwrap();
    assert!(matches!(reply, Reply::Committed(_)), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r11_one_of_three_alone_says_so() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    execute(&nodes[0].node, put("k", b"v", Expect::Any)).await.unwrap();
    let address = nodes[0].address.clone();
    for node in nodes {
        node.crash().await;
    }
    let listener = TcpListener::bind(&address).await.unwrap();
    let alone = lab.start_on(listener, "n1", Start::Member).await.unwrap();
    let expected = Unavailable::NoQuorum { reachable: 1, voters: 3 };
    let deadline = SystemClock.now() + Duration::from_millis(700);
    let refused = alone.node.execute(put("k", b"w", Expect::Any), deadline).await;
    assert_eq!(refused, Err(ExecuteError::NotExecuted(expected.clone())));
    assert_eq!(
        alone.node.barrier(SystemClock.now() + Duration::from_millis(300)).await,
        Err(expected)
    );
    assert!(!alone.node.readiness().ready());
    assert_eq!(alone.status().leader, None);
    // A second one comes back, on another port as well: the group goes on.
    let second = lab.restart("n2").await;
    assert_eq!(read(&second.node, "k").await.as_deref(), Some(&b"v"[..]));
    until("both to be ready", || alone.node.readiness().ready() && second.node.readiness().ready())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_c16_an_idle_group_only_beats() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    let session = session(&nodes[0].node, "r").await;
    for chat in 0..100 {
        execute(&nodes[1].node, take(session, &format!("chat-{chat}"))).await.unwrap();
    }
    let all: Vec<&Running> = nodes.iter().collect();
    converge(&all).await;
    let leader = leader_of(&all).await;
    let applied = nodes[0].status().applied;
    for node in &nodes {
        node.taken.lock().clear();
    }
    let watched = Duration::from_secs(3);
    tokio::time::sleep(watched).await;
    for (number, node) in nodes.iter().enumerate() {
        let taken = node.taken.lock().clone();
        let beats = taken.get("/raft/append").copied().unwrap_or(0);
        assert!(taken.keys().all(|path| path == "/raft/append"), "{taken:?}");
        // A beat every 50 ms and a little for rounding; the leader takes none.
        let most = if number == leader { 0 } else { watched.as_millis() as u64 / 50 + 5 };
        assert!(beats <= most, "{beats} requests, at most {most}");
        assert!(number == leader || beats > 0);
        assert_eq!(node.status().applied, applied, "nothing was written");
    }
}

/// Starts a node that has these limits.
async fn start_within(lab: &Lab, limits: NodeLimits, name: &str, start: Start) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let options = NodeOptions { limits, ..lab.options(name, &address, start) };
    lab.serve(listener, options).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_learner_that_is_far_behind_catches_up_by_snapshot() {
    let lab = Lab::new();
    let limits = NodeLimits { snapshot_every: 50, entries_kept: 10, ..NodeLimits::default() };
    let start = async |name: &str, start| start_within(&lab, limits, name, start).await;
    let first = start("n1", Start::Bootstrap).await;
    for number in 0..400u32 {
        let value = vec![number as u8; 2000];
        execute(&first.node, put(&format!("k{number}"), &value, Expect::Any)).await.unwrap();
    }
    let second = start("n2", Start::Join(vec![first.address.clone()])).await;
    converge(&[&first, &second]).await;
    let taken = second.taken.lock().clone();
    assert!(taken.get("/raft/snapshot").is_some_and(|count| *count >= 1), "{taken:?}");
    assert_eq!(read(&second.node, "k399").await, Some(vec![399u32 as u8; 2000]));
    // And it answers its own callers.
    execute(&second.node, put("mine", b"x", Expect::Absent)).await.unwrap();
}

/// By the number of its entries alone it would keep all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_a_log_of_large_entries_is_cut_by_its_bytes() {
    let lab = Lab::new();
    let limits = NodeLimits { snapshot_every_bytes: 256 << 10, ..NodeLimits::default() };
    let start = async |name: &str, start| start_within(&lab, limits, name, start).await;
    let first = start("n1", Start::Bootstrap).await;
    // The same few rows again and again: the state stays small.
    for number in 0..200u32 {
        let value = vec![number as u8; 4000];
        execute(&first.node, put(&format!("k{}", number % 4), &value, Expect::Any)).await.unwrap();
    }
    let purged = async {
        while first.node.status().purged < 100 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), purged).await.expect("the log is cut");
    let second = start("n2", Start::Join(vec![first.address.clone()])).await;
    converge(&[&first, &second]).await;
    let taken = second.taken.lock().clone();
    assert!(taken.get("/raft/snapshot").is_some_and(|count| *count >= 1), "{taken:?}");
    assert_eq!(read(&second.node, "k3").await, Some(vec![199u32 as u8; 4000]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b1_commands_of_one_key_are_applied_in_the_order_they_were_asked() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    for node in &nodes {
        let session = session(&node.node, "r").await;
        // All are asked at once; the futures are polled in this order.
        let asked = (0..500).map(|_| execute(&node.node, take(session, "chat")));
        let replies = futures_util::future::join_all(asked).await;
        let found: Vec<TicketId> = replies
            .into_iter()
            .map(|reply| match reply {
                Ok(Reply::Ticket { ticket, .. }) => ticket,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(found.is_sorted(), "{found:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e2_a_session_nobody_renews_ends_also_after_a_leader_change() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    let command = Command::OpenSession {
        prefix: prefix(),
        kind: botmesh::machine::SessionKind::Remote,
        replica: "r".to_owned(),
        node: 1,
        lease_ms: 1500,
    };
    let opened = SystemClock.now();
    let Ok(Reply::Session { session, .. }) = execute(&nodes[0].node, command).await else {
        panic!("no session")
    };
    let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
    for node in &nodes {
        node.node.barrier(SystemClock.now() + SOON).await.unwrap();
    }
    nodes.remove(leader).crash().await;
    let alive =
        |node: &Node| botmesh::group::look(node, |machine| machine.session(session)).is_some();
    until("the session to end on both", || nodes.iter().all(|one| !alive(&one.node))).await;
    assert!(SystemClock.now() - opened >= Duration::from_millis(1500), "never before its lease");
}

/// A wall clock that a test sets.
#[derive(Debug, Default)]
struct Jumping {
    ahead_ms: AtomicI64,
}

impl Clock for Jumping {
    fn now(&self) -> BootInstant {
        SystemClock.now()
    }
    fn wall_ms(&self) -> u64 {
        SystemClock.wall_ms().saturating_add_signed(self.ahead_ms.load(Relaxed))
    }
    fn sleep_until(&self, at: BootInstant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(SystemClock.sleep_until(at))
    }
}

/// One wrong clock expires no data (DESIGN 9), also where it is the leader's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f1_a_row_outlives_an_hour_that_only_the_leaders_clock_saw() {
    let lab = Lab::new();
    let clock = Arc::new(Jumping::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let options = lab.options("n1", &address, Start::Bootstrap);
    let first = lab.serve(listener, NodeOptions { clock: clock.clone(), ..options }).await.unwrap();
    let join = Start::Join(vec![address]);
    let second = lab.start("n2", join.clone()).await;
    let third = lab.start("n3", join).await;
    let nodes = [&first, &second, &third];
    until("three voters", || nodes.iter().all(|one| voters(&one.status()) == 3)).await;
    assert_eq!(nodes[leader_of(&nodes).await].id(), first.id());

    let put = |key: &str| Command::Commit {
        by: Authority::Nobody,
        ops: vec![Op::Put {
            row: row(key),
            value: b"x".to_vec(),
            expect: Expect::Any,
            ttl_ms: Some(600_000),
        }],
    };
    execute(&first.node, put("kept")).await.unwrap();
    for (number, jump_ms) in [3_600_000, -3_600_000, 7_200_000].into_iter().enumerate() {
        clock.ahead_ms.store(jump_ms, Relaxed);
        // By the leader itself, and forwarded to it.
        for (through, node) in nodes.iter().enumerate() {
            execute(&node.node, put(&format!("{number}-{through}"))).await.unwrap();
        }
        for node in nodes {
            assert!(read(&node.node, "kept").await.is_some(), "a jump of {jump_ms} ms ended it");
        }
    }
    // A majority of the clocks is no wrong clock: rows do end.
    let brief = Command::Commit {
        by: Authority::Nobody,
        ops: vec![Op::Put {
            row: row("brief"),
            value: b"x".to_vec(),
            expect: Expect::Any,
            ttl_ms: Some(50),
        }],
    };
    execute(&first.node, brief).await.unwrap();
    let deadline = SystemClock.now() + SOON;
    while read(&first.node, "brief").await.is_some() {
        assert!(SystemClock.now() < deadline, "a row of 50 ms does not end");
        execute(&first.node, put("tick")).await.unwrap();
    }
}
