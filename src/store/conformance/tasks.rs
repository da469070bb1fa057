//! Scheduled tasks.

use tokio::time::timeout;

use super::{PATIENCE, Rig, fresh};
use crate::store::Feature;
use crate::types::Incarnation;

/// A task is there once however many replicas see to it; each occurrence is claimed by one live
/// session at a time, not before it is due, and its attempts are counted.
pub async fn g4_an_occurrence_is_one_replicas_until_it_is_finished(rig: &Rig) {
    let Some(coordinator) = rig.coordinator.as_deref() else { return };
    if !rig.supports(Feature::Tasks) {
        return;
    }
    let (store, id) = (rig.store(), fresh("task"));
    let me = coordinator.incarnation().unwrap();
    assert_eq!(store.task(&id).await.unwrap(), None);
    let due = store.now_ms().saturating_sub(10);
    assert!(store.ensure_task(&id, due, b"v1".to_vec()).await.unwrap());
    assert!(store.ensure_task(&id, due + 5, b"v1".to_vec()).await.unwrap());
    let task = store.task(&id).await.unwrap().unwrap();
    assert_eq!((task.due_ms, task.attempt, task.claimed_by), (due, 0, None));

    let (watching, name, seen) = (rig.stores[0].clone(), id.clone(), task);
    let changed = tokio::spawn(async move { watching.task_changed(&name, Some(&seen)).await });
    let stranger = Incarnation(u64::MAX);
    assert_eq!(store.claim_task(&id, due, stranger).await.unwrap(), None, "no such session");
    let first = store.claim_task(&id, due, me).await.unwrap().expect("it is free and due");
    assert_eq!(first.attempt, 1);
    timeout(PATIENCE, changed).await.expect("a claim wakes").unwrap().unwrap();
    assert_eq!(store.claim_task(&id, due, me).await.unwrap(), None, "claimed is claimed");
    assert!(!store.ensure_task(&id, due, b"v2".to_vec()).await.unwrap(), "not under a claim");

    assert!(!store.return_task(&id, due, stranger).await.unwrap());
    assert!(store.return_task(&id, due, me).await.unwrap());
    let second = store.claim_task(&id, due, me).await.unwrap().expect("it was given back");
    assert_eq!(second.attempt, 2);
    assert!(second.fence > first.fence, "fences grow");

    let far = store.now_ms() + 3_600_000;
    assert!(store.finish_task(&id, due, me, Some(far)).await.unwrap());
    assert!(!store.finish_task(&id, due, me, Some(far)).await.unwrap(), "it is over");
    assert_eq!(store.claim_task(&id, far, me).await.unwrap(), None, "not before its time");
    assert_eq!(store.task(&id).await.unwrap().unwrap().attempt, 0);
    assert!(store.ensure_task(&id, due, b"v2".to_vec()).await.unwrap());
    assert!(store.claim_task(&id, due, me).await.unwrap().is_some());
    assert!(store.finish_task(&id, due, me, None).await.unwrap());
    assert_eq!(store.task(&id).await.unwrap(), None);
}
