//! The public suites on the carriers this crate has (SPEC F1).

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use botmesh::coordinator::{Coordinator, CoordinatorOptions, MemoryCoordinator, RaftCoordinator};
use botmesh::group::MemoryHub;
use botmesh::raft::{Node, NodeOptions, Secret, Start};
use botmesh::store::{MemoryStore, RaftStore, Store};
use botmesh::types::Prefix;
use botmesh::{coordinator, store};

#[tokio::test]
async fn f1_memory_store_conforms() {
    store::conformance::suite(|| async {
        let hub = MemoryHub::new();
        let first = hub.store(MemoryHub::default_prefix());
        let coordinator = first.coordinator(CoordinatorOptions::default());
        coordinator.open().await.unwrap();
        let second: Arc<dyn Store> = Arc::new(hub.store(MemoryHub::default_prefix()));
        store::conformance::Rig {
            stores: vec![Arc::new(first), second],
            other: Some(Arc::new(hub.store(Prefix::new("other").unwrap()))),
            coordinator: Some(Arc::new(coordinator)),
        }
    })
    .await;
}

async fn memory_replicas() -> coordinator::conformance::Rig {
    let hub = MemoryHub::new();
    let mut replicas = Vec::new();
    for name in ["a", "b", "c"] {
        let options = CoordinatorOptions {
            lease: Duration::from_millis(500),
            replica_id: Some(botmesh::types::ReplicaId(name.to_owned())),
        };
        let replica = MemoryCoordinator::with(&hub, MemoryHub::default_prefix(), options);
        replica.open().await.unwrap();
        replicas.push(replica);
    }
    let store: MemoryStore = hub.store(MemoryHub::default_prefix());
    let mortal = replicas.clone();
    coordinator::conformance::Rig {
        replicas: replicas.into_iter().map(|one| Arc::new(one) as Arc<dyn Coordinator>).collect(),
        store: Some(Arc::new(store)),
        die: Some(Arc::new(move |nth| mortal[nth].crash())),
    }
}

#[tokio::test]
async fn f1_memory_coordinator_conforms() {
    coordinator::conformance::suite(memory_replicas).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn f1_memory_coordinator_conforms_on_several_threads() {
    coordinator::conformance::suite(memory_replicas).await;
}

/// Three nodes in this process, on sled and HTTP over loopback. Dropping it ends the listeners.
struct Group {
    nodes: Vec<Node>,
    listeners: tokio::task::JoinSet<()>,
    /// Every rig has a prefix of its own, so one group serves all checks.
    rigs: AtomicU32,
    _dirs: tempfile::TempDir,
}

impl Group {
    async fn start() -> Self {
        let dirs = tempfile::tempdir().unwrap();
        let secret = Secret::random();
        let (mut nodes, mut listeners) = (Vec::new(), tokio::task::JoinSet::new());
        let mut founder = None;
        for nth in 1..=3 {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let start = founder.clone().map_or(Start::Bootstrap, |peer| Start::Join(vec![peer]));
            founder.get_or_insert(address.clone());
            let name = format!("n{nth}");
            let dir = dirs.path().join(&name);
            let options =
                NodeOptions { start, ..NodeOptions::new(name, dir, address, secret.clone()) };
            let node = Node::open(options).await.unwrap();
            let router = node.router::<()>();
            listeners.spawn(async move { axum::serve(listener, router).await.unwrap() });
            node.joined(Duration::from_secs(60)).await.unwrap();
            nodes.push(node);
        }
        Self { nodes, listeners, rigs: AtomicU32::new(0), _dirs: dirs }
    }

    fn prefix(&self, name: &str) -> Prefix {
        Prefix::new(format!("{name}{}", self.rigs.fetch_add(1, Ordering::Relaxed))).unwrap()
    }

    async fn stop(mut self) {
        for node in &self.nodes {
            node.shutdown().await;
        }
        self.listeners.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn f1_raft_store_conforms() {
    let group = Group::start().await;
    store::conformance::suite(|| async {
        let prefix = group.prefix("store");
        let all = group.nodes.iter().map(|node| RaftStore::new(node.as_group(), prefix.clone()));
        let stores: Vec<RaftStore> = all.collect();
        let coordinator = stores[0].coordinator(CoordinatorOptions::default());
        coordinator.open().await.unwrap();
        let other = RaftStore::new(group.nodes[1].as_group(), group.prefix("other"));
        store::conformance::Rig {
            stores: stores.into_iter().map(|one| Arc::new(one) as Arc<dyn Store>).collect(),
            other: Some(Arc::new(other)),
            coordinator: Some(Arc::new(coordinator)),
        }
    })
    .await;
    group.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn f1_raft_coordinator_conforms() {
    let group = Group::start().await;
    coordinator::conformance::suite(|| async {
        let prefix = group.prefix("turns");
        let mut replicas = Vec::new();
        for node in &group.nodes {
            let lease = Duration::from_secs(3);
            let options = CoordinatorOptions { lease, ..CoordinatorOptions::default() };
            let replica = RaftCoordinator::new(node.as_group(), prefix.clone(), options);
            replica.open().await.unwrap();
            replicas.push(replica);
        }
        let store = RaftStore::new(group.nodes[2].as_group(), prefix);
        let mortal = replicas.clone();
        coordinator::conformance::Rig {
            replicas: replicas
                .into_iter()
                .map(|one| Arc::new(one) as Arc<dyn Coordinator>)
                .collect(),
            store: Some(Arc::new(store)),
            die: Some(Arc::new(move |nth| mortal[nth].crash())),
        }
    })
    .await;
    group.stop().await;
}
