//! Three nodes elect, commit and carry on.

use botmesh::group::Group;
use botmesh::machine::{Expect, Reply};
use botmesh::raft::{Role, Start};

use super::cluster::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_through_any_node_is_seen_by_a_barrier_on_every_other() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    for (number, node) in nodes.iter().enumerate() {
        let key = format!("by-{number}");
        let reply = execute(&node.node, put(&key, b"x", Expect::Absent)).await.unwrap();
        assert!(matches!(reply, Reply::Committed(_)), "{reply:?}");
        // The own machine has it when the answer comes …
        assert_eq!(local(&node.node, &key).as_deref(), Some(&b"x"[..]));
        // … and any other after a barrier.
        for other in &nodes {
            assert_eq!(read(&other.node, &key).await.as_deref(), Some(&b"x"[..]));
        }
    }
    let all: Vec<&Running> = nodes.iter().collect();
    let leader = leader_of(&all).await;
    assert_eq!(nodes[leader].status().role, Role::Leader);
    assert!(nodes.iter().all(|one| one.node.is_durable()));
    converge(&all).await;
}

/// A reader waits for a barrier and then looks. A shutdown in between must not show it an empty state:
/// it would take what is there for absent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_a_read_that_a_shutdown_overtakes_finds_the_last_state() {
    let lab = Lab::new();
    let node = lab.start("n1", Start::Bootstrap).await;
    node.node.joined(SOON).await.unwrap();
    execute(&node.node, put("row", b"x", Expect::Absent)).await.unwrap();
    let handle = node.node.clone();
    assert_eq!(read(&handle, "row").await.as_deref(), Some(&b"x"[..]));
    node.stop().await;
    assert_eq!(local(&handle, "row").as_deref(), Some(&b"x"[..]));
    assert!(handle.barrier(handle.clock().now() + SOON).await.is_err());
    // What is kept is memory only: the directory is free.
    let again = lab.restart("n1").await;
    assert_eq!(read(&again.node, "row").await.as_deref(), Some(&b"x"[..]));
}
