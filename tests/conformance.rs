//! The public suites on the carriers this crate has (SPEC F1).

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use botmesh::coordinator::{Coordinator, CoordinatorOptions, MemoryCoordinator};
use botmesh::group::MemoryHub;
use botmesh::store::{MemoryStore, Store};
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
