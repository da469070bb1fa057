use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use bytes::Bytes;
use openraft::EntryPayload;
use openraft::storage::RaftLogStorageExt;
use openraft::type_config::TypeConfigExt;
use uuid::Uuid;

use super::*;
use crate::raft::identity::Identity;
use crate::raft::types::Proposal;

pub(super) fn stamped(root: &Path) -> DataDir {
    let dir = DataDir::open(root, "test").unwrap();
    let identity =
        Identity { cluster_id: Uuid::nil(), node_id: 1, name: "n1".into(), peers: vec![] };
    dir.stamp(identity).unwrap();
    dir
}

pub(super) fn open(root: &Path) -> LogStore {
    try_open(root).unwrap()
}

/// With a tail so small that everything about it happens.
pub(super) fn options() -> LogOptions {
    LogOptions { tail_half_bytes: 128 << 10, ..LogOptions::default() }
}

pub(super) fn try_open(root: &Path) -> Result<LogStore, OpenError> {
    LogStore::open(&stamped(root), options())
}

pub(super) fn entry(term: u64, index: u64, bytes: usize) -> Entry {
    let fill = (index % 251) as u8;
    Entry {
        log_id: test_log_id(term, index),
        payload: EntryPayload::Normal(Proposal(Bytes::from(vec![fill; bytes]))),
    }
}

pub(super) fn entries(term: u64, range: std::ops::Range<u64>, bytes: usize) -> Vec<Entry> {
    range.map(|index| entry(term, index, bytes)).collect()
}

/// All entries, after a restart: from the disk alone.
pub(super) async fn reopened(root: &Path) -> (LogStore, Vec<Entry>) {
    let mut log = open(root);
    let all = log.try_get_log_entries(..).await.unwrap();
    (log, all)
}

pub(super) async fn append(log: &mut LogStore, entries: Vec<Entry>) {
    log.blocking_append(entries).await.unwrap();
}

#[tokio::test]
async fn entries_of_every_size_come_back_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let sizes =
        [0, 1, 100, 1000, 32_000, 32_700, 32_768, 33_000, 65_536, 100_000, 1 << 20, 5 << 20, 7];
    let all: Vec<Entry> = (1..).zip(sizes).map(|(index, bytes)| entry(1, index, bytes)).collect();
    let mut log = open(dir.path());
    append(&mut log, all[..4].to_vec()).await;
    for one in &all[4..] {
        append(&mut log, vec![one.clone()]).await;
    }
    log.close().await;
    drop(log);
    let (_, found) = reopened(dir.path()).await;
    assert_eq!(found, all);
    assert_eq!(blobs(dir.path()), 0, "nothing may lie where sled does not sync it");
}

fn blobs(root: &Path) -> usize {
    std::fs::read_dir(root.join("log/blobs")).unwrap().count()
}

#[tokio::test]
async fn entries_are_readable_before_they_are_durable_and_read_back_from_both_halves() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions { recent_bytes_max: 20_000, ..options() };
    let mut log = LogStore::open(&stamped(dir.path()), options).unwrap();
    for first in (1..1001).step_by(10) {
        log.append(entries(1, first..first + 10, 300), IOFlushed::noop()).await.unwrap();
        let found = log.try_get_log_entries(first..first + 10).await.unwrap();
        assert_eq!(found.len(), 10);
    }
    append(&mut log, entries(1, 1001..1002, 300)).await;
    for range in [1..1002, 5..7, 1..2, 900..1001, 1001..1002, 3..950] {
        let found = log.try_get_log_entries(range.clone()).await.unwrap();
        assert_eq!(found, entries(1, range, 300));
    }
    assert!(log.try_get_log_entries(1002..2000).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_limited_read_returns_something_and_not_everything() {
    let dir = tempfile::tempdir().unwrap();
    let options = LogOptions { read_bytes_max: 10_000, recent_bytes_max: 0, ..options() };
    let mut log = LogStore::open(&stamped(dir.path()), options).unwrap();
    append(&mut log, entries(1, 1..1000, 1000)).await;
    append(&mut log, vec![entry(1, 1000, 200_000)]).await;
    let mut next = 1;
    let mut reads = 0;
    while next < 1001 {
        let found = log.limited_get_log_entries(next, 1001).await.unwrap();
        assert!(!found.is_empty());
        assert_eq!(found[0].log_id.index, next);
        next = found.last().unwrap().log_id.index + 1;
        reads += 1;
    }
    assert!(reads > 10, "{reads}");
}

#[tokio::test]
async fn truncation_keeps_the_entries_before_and_takes_others_after() {
    let dir = tempfile::tempdir().unwrap();
    for keep in [0u64, 1, 5, 99, 100, 250, 299, 300, 301] {
        let root = dir.path().join(keep.to_string());
        let mut log = open(&root);
        append(&mut log, entries(1, 1..300, 500)).await;
        append(&mut log, vec![entry(1, 300, 100_000)]).await;
        log.truncate_after((keep > 0).then(|| test_log_id(1, keep))).await.unwrap();
        let kept = keep.min(300);
        let state = log.get_log_state().await.unwrap();
        assert_eq!(state.last_log_id.map_or(0, |last| last.index), kept);
        append(&mut log, entries(2, kept + 1..kept + 50, 400)).await;
        let expected = {
            let (_, mut all) = (0, entries(1, 1..kept.min(299) + 1, 500));
            if kept == 300 {
                all.push(entry(1, 300, 100_000));
            }
            all.extend(entries(2, kept + 1..kept + 50, 400));
            all
        };
        assert_eq!(log.try_get_log_entries(..).await.unwrap(), expected, "keep {keep}");
        log.close().await;
        drop(log);
        assert_eq!(reopened(&root).await.1, expected, "keep {keep}, reopened");
    }
}

#[tokio::test]
async fn a_truncation_of_many_chunks_that_was_cut_off_is_finished_at_the_next_opening() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    for index in 1..400 {
        append(&mut log, vec![entry(1, index, 20_000)]).await;
    }
    log.close().await;
    drop(log);
    let log = open(dir.path());
    let db = log.shared.db.clone().unwrap();
    // As the keeper does it: the tail counts no more, the marker is lowered, the intent stated, and
    // it comes as far as the first batch.
    let plan = recover::plan_truncation(&db, Some(20)).unwrap().unwrap();
    assert_eq!(plan.last.unwrap().0, test_log_id(1, 20));
    log.close().await;
    let keep = Some(test_log_id(1, 20));
    db.insert(chunk::key::TRUNCATION, codec_seal(&keep)).unwrap();
    for index in (300..400).rev() {
        db.remove(chunk::key::chunk(index, 0)).unwrap().unwrap();
    }
    db.flush().unwrap();
    drop((db, log, plan));
    let mut marker = crate::raft::marker::Marker::open(dir.path()).unwrap().unwrap().unwrap();
    let mut from = marker.tail().unwrap();
    let mut tail = Tail::open(dir.path(), from.half_bytes as usize, from.generation).unwrap();
    from.generation = tail.begin();
    let end = Durable::default();
    tail.write(tail::Begin::Direct, end.clone(), end.clone(), None, (0, &[])).unwrap();
    marker.set(end, Some(from)).unwrap();
    drop((marker, tail));

    let (log, all) = reopened(dir.path()).await;
    assert_eq!(all, entries(1, 1..21, 20_000));
    assert!(log.shared.db.as_ref().unwrap().get(chunk::key::TRUNCATION).unwrap().is_none());
}

fn codec_seal(keep: &Option<LogId>) -> Vec<u8> {
    crate::codec::seal(crate::codec::Kind::LogTruncation, keep)
}

#[tokio::test]
async fn purging_forgets_whole_chunks_and_leaves_the_rest_readable() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    for first in (1..2001).step_by(5) {
        log.append(entries(1, first..first + 5, 200), IOFlushed::noop()).await.unwrap();
    }
    append(&mut log, entries(1, 2001..2002, 1)).await;
    for upto in [3, 1000, 1777] {
        log.purge(test_log_id(1, upto)).await.unwrap();
        let found = log.try_get_log_entries(..).await.unwrap();
        assert_eq!(found.first().unwrap().log_id.index, upto + 1);
        assert_eq!(found.last().unwrap().log_id.index, 2001);
    }
    append(&mut log, entries(1, 2002..2003, 1)).await;
    log.close().await;
    drop(log);
    for _ in 0..2 {
        let (mut log, all) = reopened(dir.path()).await;
        assert_eq!(all.len(), 2002 - 1777);
        let state = log.get_log_state().await.unwrap();
        assert_eq!(state.last_purged_log_id, Some(test_log_id(1, 1777)));
        assert_eq!(state.last_log_id, Some(test_log_id(1, 2002)));
        // The sweep needs no further request; it goes on while nothing else is to do.
        let db = log.shared.db.clone().unwrap();
        wait_until(|| db.range(..chunk::key::chunk(1700, 0).to_vec()).count() <= 3).await;
    }
}

async fn wait_until(mut met: impl FnMut() -> bool) {
    let began = Instant::now();
    while !met() {
        assert!(began.elapsed().as_secs() < 20, "it never came");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_purge_beyond_the_end_starts_the_log_anew() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    append(&mut log, entries(1, 1..11, 100)).await;
    log.purge(test_log_id(3, 500)).await.unwrap();
    assert_eq!(
        log.get_log_state().await.unwrap(),
        LogState {
            last_purged_log_id: Some(test_log_id(3, 500)),
            last_log_id: Some(test_log_id(3, 500))
        }
    );
    log.close().await;
    drop(log);
    let (mut log, all) = reopened(dir.path()).await;
    assert!(all.is_empty());
    append(&mut log, entries(3, 501..505, 100)).await;
    log.close().await;
    drop(log);
    assert_eq!(reopened(dir.path()).await.1, entries(3, 501..505, 100));
}

#[tokio::test]
async fn a_hole_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    append(&mut log, entries(1, 1..3, 10)).await;
    let refused = log.append(entries(1, 4..5, 10), IOFlushed::noop()).await.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
}

#[tokio::test]
async fn vote_and_committed_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    assert!(log.is_pristine());
    log.save_vote(&Vote::new(4, 2)).await.unwrap();
    log.save_committed(Some(test_log_id(1, 2))).await.unwrap();
    append(&mut log, entries(1, 1..3, 10)).await;
    log.close().await;
    drop(log);
    let mut log = open(dir.path());
    assert!(!log.is_pristine());
    assert_eq!(log.read_vote().await.unwrap(), Some(Vote::new(4, 2)));
    assert_eq!(log.read_committed().await.unwrap(), Some(test_log_id(1, 2)));
}

#[tokio::test]
async fn case_r14_a_hundred_openings_in_one_process() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..100u64 {
        let mut log = open(dir.path());
        assert_eq!(log.try_get_log_entries(..).await.unwrap().len() as u64, round);
        append(&mut log, entries(1, round + 1..round + 2, 50)).await;
        if round % 2 == 0 {
            log.close().await;
        }
    }
}

#[tokio::test]
async fn a_torn_page_table_of_sled_does_not_keep_the_log_shut() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    append(&mut log, entries(1, 1..3, 10)).await;
    drop(log);
    std::fs::write(dir.path().join("log/snap.00000000000FFFFF.generating"), b"torn").unwrap();
    assert_eq!(reopened(dir.path()).await.1.len(), 2);
}

#[tokio::test]
async fn m4_a_lost_log_marker_or_tail_is_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    append(&mut log, entries(1, 1..3, 10)).await;
    drop(log);
    let hidden = dir.path().join("hidden");
    for name in ["log", "log.marker", "log.tail"] {
        std::fs::rename(dir.path().join(name), &hidden).unwrap();
        let data = DataDir::open(dir.path(), "test").unwrap();
        let error = LogStore::open(&data, LogOptions::default()).unwrap_err();
        assert!(matches!(error, OpenError::Quarantined { .. }), "{error}");
        let _ = std::fs::remove_dir_all(dir.path().join(name));
        std::fs::rename(&hidden, dir.path().join(name)).unwrap();
    }
    assert_eq!(reopened(dir.path()).await.1.len(), 2);
}

#[tokio::test]
async fn m4_a_quarantined_directory_stays_shut() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    let data = stamped(dir.path());
    data.quarantine("a test said so").unwrap();
    let error = LogStore::open(&data, LogOptions::default()).unwrap_err();
    assert!(error.to_string().contains("a test said so"), "{error}");
}

/// How fast it is: `cargo test --release --lib appends_per_second -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn appends_per_second() {
    let dir =
        tempfile::tempdir_in(std::env::var("BENCH_DIR").unwrap_or("/var/tmp".into())).unwrap();
    let mut log = open(dir.path());
    for (in_flight, bytes, total) in [(1usize, 200, 3_000usize), (512, 200, 200_000)] {
        let start = log.get_log_state().await.unwrap().last_log_id.map_or(1, |last| last.index + 1);
        let done = Arc::new(AtomicUsize::new(0));
        let began = Instant::now();
        let semaphore = Arc::new(tokio::sync::Semaphore::new(in_flight));
        for index in start..start + total as u64 {
            let permit = semaphore.clone().acquire_owned().await.unwrap();
            let (sender, flushed) = TypeConfig::oneshot();
            log.append(vec![entry(1, index, bytes)], IOFlushed::signal(sender)).await.unwrap();
            let done = done.clone();
            tokio::spawn(async move {
                flushed.await.unwrap().unwrap();
                done.fetch_add(1, Ordering::Relaxed);
                drop(permit);
            });
        }
        let _all = semaphore.acquire_many(in_flight as u32).await.unwrap();
        let seconds = began.elapsed().as_secs_f64();
        let size = std::fs::metadata(dir.path().join("log/db")).unwrap().len();
        println!(
            "{in_flight} in flight, {bytes} B: {:.0} appends/s, {:.3} ms each; db {} MiB",
            total as f64 / seconds,
            seconds * 1000.0 * in_flight as f64 / total as f64,
            size >> 20,
        );
    }
}
