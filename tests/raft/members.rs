//! Who may be in: bootstrap, join, leave, and directories that must not come back.

use botmesh::group::Group;
use botmesh::machine::{Command, Expect, Reply, SessionKind};
use botmesh::raft::{DataDir, Node, NodeError, OpenError, Role, Start};
use serde_json::json;
use tokio::net::TcpListener;

use super::cluster::*;

async fn listeners() -> (Vec<TcpListener>, Vec<String>) {
    let mut listeners = Vec::new();
    for _ in 0..3 {
        listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
    }
    let addresses =
        listeners.iter().map(|one| one.local_addr().unwrap().to_string()).collect::<Vec<_>>();
    (listeners, addresses)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k1_voters_stay_odd_and_a_leave_to_two_is_warned_of() {
    let lab = Lab::new();
    let first = lab.start("n1", Start::Bootstrap).await;
    let join = Start::Join(vec![first.address.clone()]);
    let second = lab.start("n2", join.clone()).await;
    // One voter and a learner: two voters would tolerate no more than one.
    second.node.joined(SOON).await.unwrap();
    converge(&[&first, &second]).await;
    assert_eq!(voters(&first.status()), 1);
    assert_eq!(second.status().role, Role::Learner);

    let third = lab.start("n3", join.clone()).await;
    until("both to vote", || voters(&first.status()) == 3).await;

    // A fourth stays a learner and takes the place of the one that leaves.
    let fourth = lab.start("n4", join).await;
    fourth.node.joined(SOON).await.unwrap();
    converge(&[&first, &fourth]).await;
    assert_eq!(voters(&first.status()), 3);
    let (status, answer) =
        post(&lab, &fourth, "/cluster/leave", json!({"node_id": third.id()})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["voters"].as_array().unwrap().len(), 3);
    assert!(answer["warning"].is_null());
    third.stop().await;

    // From three without a substitute two are left, and that is said.
    let (status, answer) =
        post(&lab, &second, "/cluster/leave", json!({"node_id": fourth.id()})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["voters"].as_array().unwrap().len(), 2);
    assert!(answer["warning"].as_str().unwrap().contains("tolerate 0 failures"), "{answer}");
    let (status, answer) = post(&lab, &first, "/cluster/leave", json!({"node_id": 999})).await;
    assert_eq!((status, answer["error"].as_str()), (404, Some("unknown_node")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k1_a_leader_that_leaves_hands_over_first() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    let all: Vec<&Running> = nodes.iter().collect();
    let leader = leader_of(&all).await;
    let id = nodes[leader].id();
    let (status, answer) =
        post(&lab, &nodes[leader], "/cluster/leave", json!({"node_id": id})).await;
    assert_eq!(status, 200, "{answer}");
    let left: Vec<&Running> = nodes.iter().filter(|one| one.id() != id).collect();
    execute(&left[0].node, put("k", b"v", Expect::Any)).await.unwrap();
    assert_eq!(read(&left[1].node, "k").await.as_deref(), Some(&b"v"[..]));
    assert!(left[0].status().nodes.iter().all(|node| node.id != id));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k1_the_same_nonce_is_the_same_member() {
    let lab = Lab::new();
    let first = lab.start("n1", Start::Bootstrap).await;
    let body = json!({
        "name": "n2",
        "address": "127.0.0.1:9",
        "nonce": "6f9619ff-8b86-d011-b42d-00c04fc964ff",
    });
    until("the founder to lead", || first.status().leader.is_some()).await;
    let (status, once) = post(&lab, &first, "/cluster/join", body.clone()).await;
    assert_eq!(status, 200, "{once}");
    let (_, again) = post(&lab, &first, "/cluster/join", body.clone()).await;
    assert_eq!(once["node_id"], again["node_id"]);
    assert_eq!(first.status().nodes.len(), 2);
    // It never comes, so it never votes: that is refused clearly, by its deadline.
    let mut waiting = body;
    waiting["wait_ms"] = json!(300);
    let (status, late) = post(&lab, &first, "/cluster/join", waiting).await;
    assert_eq!((status, late["error"].as_str()), (504, Some("not_caught_up")));
    for (bad, code) in [
        (json!({"name": "", "address": "a:1", "nonce": uuid::Uuid::new_v4()}), "bad_name"),
        (json!({"name": "x", "address": "a", "nonce": uuid::Uuid::new_v4()}), "bad_address"),
        (json!({"name": "x"}), "bad_request"),
    ] {
        let (status, answer) = post(&lab, &first, "/cluster/join", bad).await;
        assert!((400..500).contains(&status), "{answer}");
        assert_eq!(answer["error"], code);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k1_leadership_goes_where_it_is_sent() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    for to in &nodes {
        let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
        if nodes[leader].id() == to.id() {
            continue;
        }
        let asked = json!({"to": to.id()});
        let (status, answer) = post(&lab, to, "/cluster/yield-leader", asked).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["to"], to.id());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r6_expected_replicas_found_one_group_whatever_starts_first() {
    let lab = Lab::new();
    let (mut listeners, peers) = listeners().await;
    let expect = Start::Expect { count: 3, peers: peers.clone() };
    // Cut off from the others (nobody answers there), the first two found nothing.
    let n3 = lab.start_on(listeners.pop().unwrap(), "n3", expect.clone()).await.unwrap();
    let n1 = lab.start_on(listeners.remove(0), "n1", expect.clone()).await.unwrap();
    let waiting = n1.node.joined(std::time::Duration::from_secs(2)).await;
    assert!(matches!(waiting, Err(NodeError::NotJoined { .. })), "{waiting:?}");
    assert_eq!((n1.status().cluster_id, n3.status().cluster_id), (None, None));
    let n2 = lab.start_on(listeners.remove(0), "n2", expect).await.unwrap();
    let nodes = [&n1, &n2, &n3];
    until("three voters", || nodes.iter().all(|one| voters(&one.status()) == 3)).await;
    assert!(nodes.iter().all(|one| one.status().cluster_id == n1.status().cluster_id));
    assert_eq!(n1.id(), 1, "the first by name founded it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r6_three_that_bootstrap_are_three_groups() {
    let lab = Lab::new();
    let a = lab.start("a", Start::Bootstrap).await;
    let b = lab.start("b", Start::Bootstrap).await;
    until("both to lead", || [&a, &b].iter().all(|one| one.status().leader == Some(1))).await;
    assert_ne!(a.status().cluster_id, b.status().cluster_id);
    // Group a takes b's address for a member of its own; b refuses what comes from there.
    let body = json!({"name": "b", "address": b.address, "nonce": uuid::Uuid::new_v4()});
    let (status, _) = post(&lab, &a, "/cluster/join", body).await;
    assert_eq!(status, 200);
    until("a to have tried", || b.taken.lock().contains_key("/raft/append")).await;
    execute(&b.node, put("k", b"b", Expect::Any)).await.unwrap();
    execute(&a.node, put("k", b"a", Expect::Any)).await.unwrap();
    assert_eq!(read(&b.node, "k").await.as_deref(), Some(&b"b"[..]));
    assert_eq!(b.status().nodes.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r5_a_member_that_restarts_with_its_join_flag_is_recognised() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    let id = nodes[1].id();
    nodes.remove(1).crash().await;
    execute(&nodes[0].node, put("k", b"v", Expect::Any)).await.unwrap();
    let again = lab.start("n2", Start::Join(vec![nodes[0].address.clone()])).await;
    assert_eq!(again.id(), id, "the same member, at another port");
    converge(&[&nodes[0], &nodes[1], &again]).await;
    assert_eq!(again.status().nodes.len(), 3);
    // The group learns the new address (K4).
    until("the new address to be known", || {
        let status = nodes[0].status();
        status.nodes.iter().any(|node| node.id == id && node.address == again.address)
    })
    .await;
    // And with the bootstrap flag it founds nothing.
    let cluster = again.status().cluster_id;
    again.crash().await;
    let again = lab.start("n2", Start::Bootstrap).await;
    assert_eq!((again.id(), again.status().cluster_id), (id, cluster));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r2_a_wiped_node_does_not_come_back_under_its_id() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    let id = nodes[2].id();
    let third = nodes.remove(2);
    let dir = third.dir.clone();
    third.crash().await;
    std::fs::remove_dir_all(&dir).unwrap();
    // An empty directory is no member …
    let address = "127.0.0.1:1";
    let refused = Node::open(lab.options("n3", address, Start::Member)).await;
    assert!(matches!(refused, Err(NodeError::NotAMember { .. })), "{refused:?}");
    // … nor may it ask for the id …
    let body = json!({
        "name": "n3", "address": address, "nonce": uuid::Uuid::new_v4(), "node_id": id,
    });
    let (status, answer) = post(&lab, &nodes[0], "/cluster/join", body).await;
    assert_eq!((status, answer["error"].as_str()), (409, Some("node_id_not_free")), "{answer}");
    // … a fresh id works.
    let (status, answer) = post(&lab, &nodes[1], "/cluster/leave", json!({"node_id": id})).await;
    assert_eq!(status, 200, "{answer}");
    let fresh = lab.start("n3", Start::Join(vec![nodes[0].address.clone()])).await;
    until("three voters again", || voters(&nodes[0].status()) == 3).await;
    assert!(fresh.id() > id, "never reused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r3_an_address_of_another_node_gives_no_vote() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    // n2 goes, and the membership then names n3's address for it.
    let second = nodes.remove(1);
    let (id, dir) = (second.id(), second.dir.clone());
    second.crash().await;
    let nonce = DataDir::open(&dir, "the test").unwrap().boot().join_nonce;
    let swapped = json!({"name": "n2", "address": nodes[1].address, "nonce": nonce});
    leader_of(&nodes.iter().collect::<Vec<_>>()).await;
    let (status, answer) = post(&lab, &nodes[0], "/cluster/join", swapped).await;
    assert_eq!((status, answer["node_id"].as_u64()), (200, Some(id)), "{answer}");
    // With n1 gone n3 could only win by counting its own voice for n2's.
    converge(&[&nodes[0], &nodes[1]]).await;
    nodes.remove(0).crash().await;
    let third = &nodes[0];
    until("the old leader to be given up", || third.status().leader.is_none()).await;
    until("n3 to have asked itself for n2's vote", || {
        third.taken.lock().contains_key("/raft/pre-vote")
    })
    .await;
    let began = std::time::Instant::now();
    while began.elapsed() < std::time::Duration::from_secs(2) {
        assert_eq!(third.status().leader, None);
        assert_ne!(third.status().role, Role::Leader);
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    // n2 itself, wherever it is now, brings the majority back.
    let second = lab.restart("n2").await;
    execute(&second.node, put("k", b"v", Expect::Any)).await.unwrap();
    assert_eq!(read(&third.node, "k").await.as_deref(), Some(&b"v"[..]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k3_a_restored_directory_is_refused() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    let third = nodes.remove(2);
    let dir = third.dir.clone();
    third.stop().await;
    let backup = lab.dir("backup");
    copy(&dir, &backup);
    // The original lives on for a while, and is then replaced by its older self.
    let third = lab.restart("n3").await;
    converge(&[&nodes[0], &third]).await;
    third.stop().await;
    std::fs::remove_dir_all(&dir).unwrap();
    copy(&backup, &dir);
    let restored = lab.restart("n3").await;
    until("its peers to refuse it", || {
        let deadline = botmesh::clock::BootInstant::default();
        let refused = futures_util::FutureExt::now_or_never(restored.node.barrier(deadline));
        format!("{refused:?}").contains("restored or copied")
    })
    .await;
    assert!(!restored.node.readiness().ready());
    // The others carry on.
    execute(&nodes[0].node, put("k", b"v", Expect::Any)).await.unwrap();
}

fn copy(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r14_a_directory_opens_again_and_never_twice() {
    let lab = Lab::new();
    let node = lab.start("n1", Start::Bootstrap).await;
    execute(&node.node, put("k", b"v", Expect::Any)).await.unwrap();
    let refused = Node::open(lab.options("n1", "127.0.0.1:1", Start::Member)).await;
    match refused {
        Err(error @ NodeError::Open(OpenError::InUse { .. })) => {
            assert!(error.to_string().contains("node n1 at"), "it names the holder: {error}");
        }
        other => panic!("{other:?}"),
    }
    node.stop().await;
    for _ in 0..100 {
        let node = lab.restart("n1").await;
        assert_eq!(node.id(), 1);
        node.stop().await;
    }
    let node = lab.restart("n1").await;
    assert_eq!(read(&node.node, "k").await.as_deref(), Some(&b"v"[..]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k5_every_route_demands_the_secret() {
    let lab = Lab::new();
    let node = lab.start("n1", Start::Bootstrap).await;
    let stranger = reqwest::Client::builder().no_proxy().build().unwrap();
    for path in ["/raft/append", "/raft/vote", "/raft/snapshot", "/cluster/join", "/cluster/leave"]
    {
        let url = format!("http://{}{path}", node.address);
        for client in [stranger.post(&url), stranger.post(&url).bearer_auth("0123456789abcdef0")] {
            assert_eq!(client.body("x").send().await.unwrap().status().as_u16(), 401, "{path}");
        }
        // With the secret, what does not decode is refused and changes nothing.
        let known = lab.client().post(&url).body("garbage").send().await.unwrap();
        assert!(known.status().is_client_error() || known.status().is_server_error());
        assert_ne!(known.status().as_u16(), 401);
    }
    assert_eq!(node.status().nodes.len(), usize::from(node.status().leader.is_some()));
}

/// Two processes under one replica id show in the status of every node, once both are seen to live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a3_the_status_shows_a_replica_id_that_two_processes_share() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    let open = |node: u64| Command::OpenSession {
        prefix: prefix(),
        kind: SessionKind::Replica,
        replica: "same".to_owned(),
        node,
        lease_ms: 600_000,
    };
    let mut both = Vec::new();
    for one in &nodes[..2] {
        match execute(&one.node, open(one.id())).await.unwrap() {
            Reply::Session { session, .. } => both.push(session),
            other => panic!("{other:?}"),
        }
    }
    let shared = |one: &Running| -> Vec<Option<u64>> {
        one.status().sessions.iter().map(|session| session.shared_with).collect()
    };
    let renew = async |which: usize| {
        let command = Command::RenewSession { session: both[which], seq: None };
        let reply = execute(&nodes[which].node, command).await.unwrap();
        assert!(matches!(reply, Reply::Renewed { .. }), "{reply:?}");
    };
    // Only the newer one renews: the other may be what a dead process left.
    renew(1).await;
    converge(&nodes.iter().collect::<Vec<_>>()).await;
    assert!(nodes.iter().all(|one| shared(one) == [None, None]));
    renew(0).await;
    let expected = [Some(both[1].0), Some(both[0].0)];
    until("all to show it", || nodes.iter().all(|one| shared(one) == expected)).await;
}

/// Whoever decided on a leave has looked at the group before. What it decided on is named by ids that
/// are never used again, and by the membership it saw.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r22_a_leave_made_for_an_older_membership_is_refused() {
    let lab = Lab::new();
    let mut nodes = lab.three().await;
    let (old, seen) = (nodes[2].id(), nodes[0].status().membership.unwrap());
    // Meanwhile n3 is replaced: the same name, another directory, another id.
    let third = nodes.remove(2);
    let dir = third.dir.clone();
    third.crash().await;
    std::fs::remove_dir_all(&dir).unwrap();
    let (status, answer) = post(&lab, &nodes[0], "/cluster/leave", json!({"node_id": old})).await;
    assert_eq!(status, 200, "{answer}");
    let fresh = lab.start("n3", Start::Join(vec![nodes[0].address.clone()])).await;
    until("three voters again", || voters(&nodes[0].status()) == 3).await;

    // The stale order arrives: by the id of then, and by the name, which is another node's now.
    let (status, answer) = post(&lab, &nodes[1], "/cluster/leave", json!({"node_id": old})).await;
    assert_eq!((status, answer["error"].as_str()), (404, Some("unknown_node")), "{answer}");
    let stale = json!({"node_id": fresh.id(), "membership": seen});
    let (status, answer) = post(&lab, &nodes[1], "/cluster/leave", stale).await;
    assert_eq!((status, answer["error"].as_str()), (409, Some("membership_changed")), "{answer}");
    let members = || nodes[0].status().nodes.iter().map(|node| node.id).collect::<Vec<_>>();
    assert!(members().contains(&fresh.id()), "it is still a member");

    // For the membership of now it is done. A join may be followed by a change that makes it a voter.
    let began = std::time::Instant::now();
    loop {
        let now = nodes[0].status().membership.unwrap();
        assert!(now > seen);
        let order = json!({"node_id": fresh.id(), "membership": now});
        let (status, answer) = post(&lab, &nodes[1], "/cluster/leave", order).await;
        if status == 200 {
            break;
        }
        assert_eq!(answer["error"].as_str(), Some("membership_changed"), "{answer}");
        assert!(began.elapsed() < SOON, "refused for {SOON:?}: {answer}");
    }
    until("it has left", || !members().contains(&fresh.id())).await;
}
