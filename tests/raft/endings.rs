//! A session with many turns ends in slices, which the group goes on with by itself (SPEC E2, E6).

use botmesh::group::look;
use botmesh::machine::{Command, Reply};
use botmesh::types::Incarnation;
use futures_util::StreamExt;

use super::cluster::*;

/// More than one entry frees.
const TURNS: usize = 4_000;
/// Commands asked for at once.
const AT_ONCE: usize = 256;

async fn take_all(by: &Running, session: Incarnation) {
    let takes = (0..TURNS).map(|chat| {
        let node = by.node.clone();
        async move { execute(&node, take(session, &format!("test:{chat}"))).await.unwrap() }
    });
    let mut taken = futures_util::stream::iter(takes).buffer_unordered(AT_ONCE);
    while let Some(reply) = taken.next().await {
        assert!(matches!(reply, Reply::Ticket { .. }), "{reply:?}");
    }
}

fn counts(of: &Running) -> (bool, (u64, u64)) {
    look(&*of.node.as_group(), |machine| (machine.is_ending(), machine.turn_counts()))
}

/// Nobody asks anything of the group after the end, and the leader that would have gone on with it is
/// killed: whoever waits gets all of its turns, on every node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e2_what_a_session_with_many_turns_left_is_freed_also_by_the_next_leader() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    until("the level is agreed", || nodes.iter().all(|one| one.status().command_level >= 4)).await;
    let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
    let leads = nodes.remove(leader);
    let holder = session(&nodes[0].node, "holder").await;
    let next = session(&nodes[1].node, "next").await;
    take_all(&nodes[0], holder).await;
    take_all(&nodes[1], next).await;
    let all = TURNS as u64;
    until("both know all of it", || nodes.iter().all(|one| counts(one) == (false, (all, all))))
        .await;

    let reply = execute(&nodes[0].node, Command::CloseSession { session: holder }).await;
    leads.crash().await;
    assert_eq!(reply.unwrap(), Reply::Done);
    until("all is freed and granted", || nodes.iter().all(|one| counts(one) == (false, (all, 0))))
        .await;
    let held = tickets(&nodes[0].node, next);
    assert_eq!(held.len(), TURNS);
    converge(&nodes.iter().collect::<Vec<_>>()).await;
}
