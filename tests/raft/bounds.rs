//! The group's bounds are agreed by the log (SPEC G1, M3).

use botmesh::group::look;
use botmesh::machine::{Admission, Admit, Command, Limits, Reply, SessionKind};
use botmesh::raft::{NodeError, NodeOptions, Start};
use botmesh::types::Incarnation;
use tokio::net::TcpListener;

use super::cluster::*;

async fn start(lab: &Lab, name: &str, start: Start, machine: Limits) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let options = NodeOptions { machine, ..lab.options(name, &address, start) };
    lab.serve(listener, options).await.unwrap()
}

fn bounds(of: &Running) -> Limits {
    let group = of.node.as_group();
    look(&*group, |machine| *machine.limits())
}

async fn is_fresh(by: &Running, session: Incarnation, id: &str) -> bool {
    let message = Admit {
        id: id.to_owned(),
        channel: "test".to_owned(),
        chat: "test:chat".to_owned(),
        body: b"x".to_vec(),
    };
    let (prefix, messages) = (prefix(), vec![message]);
    let admit = Command::Admit { prefix, session, messages, cursor: None };
    match execute(&by.node, admit).await.unwrap() {
        Reply::Admitted(admissions) => matches!(admissions[..], [Admission::Fresh { .. }]),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g1_the_number_of_message_ids_remembered_is_set_for_the_whole_group() {
    let lab = Lab::new();
    let few = Limits { dedupe_ids_max: 2, ..Limits::default() };
    let first = start(&lab, "n1", Start::Bootstrap, few).await;
    let join = Start::Join(vec![first.address.clone()]);
    let second = start(&lab, "n2", join.clone(), few).await;
    until("both keep the bound", || [&first, &second].iter().all(|one| bounds(one) == few)).await;
    let open = Command::OpenSession {
        prefix: prefix(),
        kind: SessionKind::Replica,
        replica: "r".to_owned(),
        node: first.id(),
        lease_ms: 600_000,
    };
    let Reply::Session { session, .. } = execute(&first.node, open).await.unwrap() else {
        panic!("no session");
    };
    for id in ["1", "2", "3"] {
        assert!(is_fresh(&first, session, id).await, "{id}");
    }
    assert!(!is_fresh(&second, session, "3").await);
    assert!(is_fresh(&second, session, "1").await, "only the last two are remembered");

    // One that was told nothing, and does not lead, follows the group.
    let third = start(&lab, "n3", join, Limits::default()).await;
    until("it has caught up", || bounds(&third) == few).await;
    until("three voters", || voters(&first.status()) == 3).await;
    assert!(!is_fresh(&third, session, "1").await);
    converge(&[&first, &second, &third]).await;
    assert_eq!([&first, &second, &third].map(bounds), [few; 3]);

    // Whoever leads gets its own bounds.
    let all = [&first, &second, &third];
    while leader_of(&all).await != 2 {
        all[leader_of(&all).await].node.yield_leader(SOON).await;
    }
    until("the leader's bounds", || all.iter().all(|one| bounds(one) == Limits::default())).await;
    converge(&all).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m3_bounds_that_nothing_fits_into_are_refused_by_name() {
    let lab = Lab::new();
    let none = |set: fn(&mut Limits)| {
        let mut limits = Limits::default();
        set(&mut limits);
        limits
    };
    for (machine, name) in [
        (none(|limits| limits.attempts_max = 0), "attempts_max"),
        (none(|limits| limits.sessions_max = 0), "sessions_max"),
        (none(|limits| limits.lease_ms_min = limits.lease_ms_max + 1), "lease_ms_min"),
    ] {
        let start = Start::Bootstrap;
        let options = NodeOptions { machine, ..lab.options("n1", "127.0.0.1:1", start) };
        match botmesh::raft::Node::open(options).await {
            Err(NodeError::Options(why)) => assert!(why.contains(name), "{why}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}
