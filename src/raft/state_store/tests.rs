mod staging;

use std::path::Path;

use bytes::Bytes;
use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use uuid::Uuid;

use super::*;
use crate::machine::{
    Authority, BatchReply, ClientId, Command, Expect, Op, RowKey, Table as RowTable,
};
use crate::raft::identity::Identity;
use crate::raft::log_store::{LogOptions, test_log_id};
use crate::raft::types::Entry;
use crate::types::Prefix;

/// What the hook was told.
#[derive(Debug, Default)]
struct Heard {
    applied: Mutex<Vec<(u64, u64, BatchReply)>>,
    installed: Mutex<u32>,
}

impl ApplyHook for Heard {
    fn applied(&self, index: u64, batch: &Batch, reply: BatchReply, _effects: Vec<Effect>) {
        self.applied.lock().push((index, batch.serial, reply));
    }

    fn installed(&self, _machine: &Machine) {
        *self.installed.lock() += 1;
    }
}

fn stamped(root: &Path) -> DataDir {
    let dir = DataDir::open(root, "test").unwrap();
    let identity =
        Identity { cluster_id: Uuid::nil(), node_id: 1, name: "n1".into(), peers: vec![] };
    dir.stamp(identity).unwrap();
    dir
}

fn try_open(root: &Path) -> Result<(LogStore, StateStore, Arc<Heard>), OpenError> {
    let dir = stamped(root);
    let log = LogStore::open(&dir, LogOptions::default())?;
    let heard = Arc::new(Heard::default());
    // No cut comes by itself: the tests say when.
    let options = StateOptions { cut_every: Duration::from_secs(3600), ..StateOptions::default() };
    let state = StateStore::open(&dir, &log, options, heard.clone(), None)?;
    Ok((log, state, heard))
}

fn open(root: &Path) -> (LogStore, StateStore, Arc<Heard>) {
    try_open(root).unwrap()
}

struct Dirs;

impl StoreBuilder<TypeConfig, LogStore, StateStore, tempfile::TempDir> for Dirs {
    async fn build(
        &self,
    ) -> Result<(tempfile::TempDir, LogStore, StateStore), StorageError<TypeConfig>> {
        let dir = tempfile::tempdir().unwrap();
        let (log, state, _) = open(dir.path());
        Ok((dir, log, state))
    }
}

#[tokio::test]
async fn openrafts_own_suite_passes() {
    Suite::test_all(Dirs).await.unwrap();
}

fn row(key: &str) -> RowKey {
    RowKey { table: RowTable::Kv, prefix: Prefix::new("bot").unwrap(), key: key.to_owned() }
}

fn put(key: &str, value: Vec<u8>) -> Op {
    Op::Put { row: row(key), value, expect: Expect::Any, ttl_ms: None }
}

fn batch(serial: u64, ops: Vec<Op>) -> Batch {
    Batch {
        client: ClientId { node: 1, boot: 1 },
        lane: 0,
        serial,
        stamp_ms: 1_000 + serial,
        commands: vec![Command::Commit { by: Authority::Nobody, ops }],
    }
}

fn entry(index: u64, ops: Vec<Op>) -> Entry {
    let bytes = codec::seal(Kind::Batch, &batch(index - 1, ops));
    Entry {
        log_id: test_log_id(1, index),
        payload: EntryPayload::Normal(Proposal(Bytes::from(bytes))),
    }
}

async fn apply(state: &mut StateStore, entries: Vec<Entry>) {
    let entries = entries.into_iter().map(|entry| Ok((entry, None)));
    state.apply(futures_util::stream::iter(entries)).await.unwrap();
}

fn hash(state: &StateStore) -> u64 {
    state.read(|machine| machine.freeze().hash())
}

fn value(state: &StateStore, key: &str) -> Option<Vec<u8>> {
    state.read(|machine| machine.row(&row(key))).map(|row| row.value)
}

#[tokio::test]
async fn a_restart_goes_on_from_the_cut() {
    let dir = tempfile::tempdir().unwrap();
    let large = vec![7u8; 200_000];
    let (log, mut state, heard) = open(dir.path());
    apply(&mut state, vec![entry(1, vec![put("a", vec![1])])]).await;
    state.cut().await;
    assert_eq!(state.flushed_cut(), Some(test_log_id(1, 1)));
    apply(&mut state, vec![entry(2, vec![put("b", large.clone()), put("c", vec![3])])]).await;
    apply(&mut state, vec![entry(3, vec![Op::Delete { row: row("a"), expect: Expect::Any }])])
        .await;
    state.cut().await;
    // A large record that shrinks leaves nothing of itself.
    apply(&mut state, vec![entry(4, vec![put("b", vec![9; 30_000]), put("d", vec![])])]).await;
    state.cut().await;
    let expected = hash(&state);
    assert_eq!(heard.applied.lock().len(), 4);
    // What was not cut is gone with the process; the log has it.
    apply(&mut state, vec![entry(5, vec![put("lost", vec![5])])]).await;
    drop((log, state));

    let (_log, state, heard) = open(dir.path());
    assert_eq!(state.last_applied(), Some(test_log_id(1, 4)));
    assert_eq!(hash(&state), expected);
    assert_eq!(value(&state, "b"), Some(vec![9; 30_000]));
    assert_eq!((value(&state, "a"), value(&state, "lost")), (None, None));
    assert_eq!(*heard.installed.lock(), 1);
}

#[tokio::test]
async fn a_clean_close_makes_a_last_cut() {
    let dir = tempfile::tempdir().unwrap();
    let (log, mut state, _) = open(dir.path());
    apply(&mut state, vec![entry(1, vec![put("a", vec![1])])]).await;
    let expected = hash(&state);
    state.close().await;
    drop((log, state));
    let (_log, state, _) = open(dir.path());
    assert_eq!((state.last_applied(), hash(&state)), (Some(test_log_id(1, 1)), expected));
}

/// Many rows at once: more than one batch holds.
fn many(from: u64, to: u64, fill: u8) -> Vec<Op> {
    (from..to).map(|row| put(&format!("row-{row:05}"), vec![fill; 40])).collect()
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for found in std::fs::read_dir(from).unwrap() {
        let path = found.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_dir(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// At any instant of large cuts, what lies on the disk opens as the state before or after one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_cut_that_is_cut_off_is_all_or_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let copies = tempfile::tempdir().unwrap();
    let (log, mut state, _) = open(dir.path());
    let mut hashes = std::collections::BTreeMap::new();
    hashes.insert(None, hash(&state));
    let mut taken = 0;
    for index in 1..=4u64 {
        apply(&mut state, vec![entry(index, many(index * 500, index * 500 + 3000, index as u8))])
            .await;
        hashes.insert(Some(test_log_id(1, index)), hash(&state));
        let cutting = state.clone();
        let cut = tokio::spawn(async move { cutting.cut().await });
        while !cut.is_finished() && taken < 40 {
            copy_dir(&dir.path().join("state"), &copies.path().join(format!("{taken}/state")));
            taken += 1;
        }
        cut.await.unwrap();
    }
    assert!(taken > 4, "no copy fell into a cut");
    drop((log, state));
    let mut seen = std::collections::BTreeSet::new();
    for copy in 0..taken {
        let opened = Disk::open(&copies.path().join(copy.to_string()), 1 << 20).unwrap();
        // A copy is not taken at one instant, as a crash would; sled may find that out.
        let Ok(opened) = opened else { continue };
        let (at, found) = match opened.state {
            Some((at, machine)) => (at.last_applied, machine.freeze().hash()),
            None => (None, Machine::default().freeze().hash()),
        };
        assert_eq!(Some(&found), hashes.get(&at), "copy {copy} at {at:?}");
        seen.insert(at);
    }
    assert!(!seen.is_empty());
}

#[tokio::test]
async fn a_restart_begins_from_the_snapshot_where_it_is_newer() {
    let dir = tempfile::tempdir().unwrap();
    let (log, mut state, _) = open(dir.path());
    apply(&mut state, vec![entry(1, vec![put("a", vec![1])])]).await;
    state.cut().await;
    apply(&mut state, vec![entry(2, many(0, 1000, 2))]).await;
    let snapshot = state.get_snapshot_builder().await.build_snapshot().await.unwrap();
    assert_eq!(snapshot.meta.last_log_id, Some(test_log_id(1, 2)));
    let expected = hash(&state);
    drop((log, state));

    let (log, mut state, _) = open(dir.path());
    assert_eq!((state.last_applied(), hash(&state)), (Some(test_log_id(1, 2)), expected));
    // The next cut replaces the records of the older state.
    apply(&mut state, vec![entry(3, vec![put("z", vec![3])])]).await;
    let expected = hash(&state);
    state.cut().await;
    drop((log, state));
    let (_log, mut state, _) = open(dir.path());
    assert_eq!((state.last_applied(), hash(&state)), (Some(test_log_id(1, 3)), expected));
    let current = state.get_current_snapshot().await.unwrap().unwrap();
    assert_eq!(current.meta, snapshot.meta);
}

#[tokio::test]
async fn an_installed_snapshot_replaces_the_state_for_good() {
    let dirs = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (_log, mut leader, _) = open(dirs.0.path());
    apply(&mut leader, vec![entry(1, many(0, 1000, 2)), entry(2, many(500, 1500, 3))]).await;
    let snapshot = leader.get_snapshot_builder().await.build_snapshot().await.unwrap();

    let (log, mut follower, heard) = open(dirs.1.path());
    apply(&mut follower, vec![entry(1, vec![put("stale", vec![1])])]).await;
    follower.cut().await;
    let incoming = dirs.1.path().join("incoming");
    std::fs::copy(&snapshot.snapshot.path, &incoming).unwrap();
    let received = SnapshotFile { path: incoming, bytes: snapshot.snapshot.bytes };
    follower.install_snapshot(&snapshot.meta, received).await.unwrap();
    assert_eq!(hash(&follower), hash(&leader));
    assert_eq!(*heard.installed.lock(), 2);
    assert_eq!(follower.last_applied(), Some(test_log_id(1, 2)));
    follower.cut().await;
    drop((log, follower));

    std::fs::remove_dir_all(dirs.1.path().join("snapshots")).unwrap();
    let (_log, follower, _) = open(dirs.1.path());
    assert_eq!(hash(&follower), hash(&leader));
    assert_eq!(value(&follower, "stale"), None);
}

#[tokio::test]
async fn a_damaged_snapshot_is_neither_installed_nor_offered() {
    let dirs = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (log, mut leader, _) = open(dirs.0.path());
    apply(&mut leader, vec![entry(1, many(0, 300, 2))]).await;
    let snapshot = leader.get_snapshot_builder().await.build_snapshot().await.unwrap();
    let good = std::fs::read(&snapshot.snapshot.path).unwrap();

    let (_log, mut follower, _) = open(dirs.1.path());
    let before = hash(&follower);
    let path = dirs.1.path().join("incoming");
    let step = good.len() / 97;
    let damages = (0..good.len()).step_by(step).map(|at| {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        bad
    });
    let cuts = (0..good.len()).step_by(step).map(|len| good[..len].to_vec());
    let longer = [good.clone(), vec![0]].concat();
    for bad in damages.chain(cuts).chain([longer]) {
        std::fs::write(&path, &bad).unwrap();
        let received = SnapshotFile { path: path.clone(), bytes: bad.len() as u64 };
        follower.install_snapshot(&snapshot.meta, received).await.unwrap_err();
    }
    assert_eq!(hash(&follower), before);
    assert!(follower.get_current_snapshot().await.unwrap().is_none());

    // The leader's own, damaged while it was down: it is not offered again.
    drop((log, leader));
    let mut bad = good;
    bad[step * 50] ^= 1;
    std::fs::write(&snapshot.snapshot.path, bad).unwrap();
    let (_log, mut leader, _) = open(dirs.0.path());
    assert!(leader.get_current_snapshot().await.unwrap().is_none());
}

#[tokio::test]
async fn m4_a_state_that_the_log_does_not_reach_is_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    let (mut log, mut state, _) = open(dir.path());
    apply(&mut state, vec![entry(1, vec![put("a", vec![1])])]).await;
    state.cut().await;
    use openraft::storage::RaftLogStorage;
    log.purge(test_log_id(1, 9)).await.unwrap();
    log.close().await;
    drop((log, state));
    let error = try_open(dir.path()).unwrap_err();
    assert!(matches!(error, OpenError::Quarantined { .. }), "{error}");
}

#[tokio::test]
async fn m4_a_damaged_state_is_set_aside_and_made_again_from_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let (log, mut state, _) = open(dir.path());
    apply(&mut state, vec![entry(1, many(0, 500, 1))]).await;
    state.cut().await;
    drop((log, state));
    let path = dir.path().join("state/db");
    let mut bytes = std::fs::read(&path).unwrap();
    // Keys are stored shortened; a value is found as it is.
    let text = [1; 40];
    let at = bytes.windows(text.len()).position(|found| found == text).unwrap();
    bytes[at] ^= 0x20;
    std::fs::write(&path, bytes).unwrap();
    let (_log, state, _) = open(dir.path());
    // Wherever the flip hit, the state is whole: the cut's, or none yet.
    match state.last_applied() {
        None => assert_eq!(hash(&state), Machine::default().freeze().hash()),
        Some(_) => assert_eq!(value(&state, "row-00250"), Some(vec![1; 40])),
    }
}

/// A program that knows commands up to this level.
fn open_at(root: &Path, level: u32) -> Result<(LogStore, StateStore), OpenError> {
    let dir = stamped(root);
    let log = LogStore::open(&dir, LogOptions::default())?;
    let options =
        StateOptions { cut_every: Duration::from_secs(3600), level, ..StateOptions::default() };
    let state = StateStore::open(&dir, &log, options, Arc::new(Heard::default()), None)?;
    Ok((log, state))
}

fn sealed(index: u64, proposal: Vec<u8>) -> Entry {
    let payload = EntryPayload::Normal(Proposal(proposal.into()));
    Entry { log_id: test_log_id(1, index), payload }
}

fn raise(index: u64, level: u32) -> Entry {
    let mut batch = batch(index - 1, Vec::new());
    batch.commands = vec![Command::RaiseLevel { level }];
    sealed(index, codec::seal(Kind::Batch, &batch))
}

#[tokio::test]
async fn m5_an_entry_that_is_not_understood_halts_and_is_never_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let (_log, mut state, heard) = open(dir.path());
    apply(&mut state, vec![entry(1, vec![put("k", b"v".to_vec())])]).await;
    // A variant that does not exist here, in an envelope without a fault.
    let mut batch = codec::begin(Kind::Batch, 8);
    batch.extend_from_slice(&[1, 1, 0, 1, 0, 1, 250]);
    let unknown = sealed(2, codec::finish(batch));
    let after = entry(3, vec![put("k", b"w".to_vec())]);
    let entries = futures_util::stream::iter([Ok((unknown, None)), Ok((after, None))]);
    let error = state.apply(entries).await.unwrap_err().to_string();
    assert!(error.contains("entry 2") && error.contains("Install the newer version"), "{error}");
    assert_eq!(state.halted().as_deref(), Some(error.as_str()));
    assert_eq!(state.last_applied().map(|last| last.index), Some(1));
    assert_eq!(heard.applied.lock().len(), 1);
    assert_eq!(value(&state, "k"), Some(b"v".to_vec()));
}

#[tokio::test]
async fn m5_a_newer_program_goes_on_where_an_older_one_halted() {
    let dir = tempfile::tempdir().unwrap();
    let (log, mut state) = open_at(dir.path(), 1).unwrap();
    apply(&mut state, vec![entry(1, vec![put("k", b"v".to_vec())])]).await;
    let entries = futures_util::stream::iter([Ok((raise(2, LEVEL), None))]);
    let error = state.apply(entries).await.unwrap_err().to_string();
    let needs = format!("needs level {LEVEL}");
    assert!(error.contains(&needs) && error.contains("up to level 1"), "{error}");
    state.close().await;
    drop((log, state));
    let (_log, mut state) = open_at(dir.path(), LEVEL).unwrap();
    assert_eq!(state.last_applied().map(|last| last.index), Some(1));
    apply(&mut state, vec![raise(2, LEVEL)]).await;
    assert_eq!(state.read(Machine::level), LEVEL);
    assert_eq!(value(&state, "k"), Some(b"v".to_vec()));
}

/// Cut or snapshot, what a newer program wrote is neither set aside nor quarantined.
#[tokio::test]
async fn m5_the_state_of_a_newer_program_is_left_as_it_is() {
    for snapshot in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (log, mut state) = open_at(dir.path(), u32::MAX).unwrap();
        apply(&mut state, vec![entry(1, vec![put("k", b"v".to_vec())])]).await;
        if snapshot {
            state.cut().await;
        }
        apply(&mut state, vec![raise(2, LEVEL + 1)]).await;
        // A store that is only let go makes no last cut.
        if snapshot {
            state.get_snapshot_builder().await.build_snapshot().await.unwrap();
        } else {
            state.close().await;
        }
        drop((log, state));
        for _ in 0..2 {
            let error = open_at(dir.path(), LEVEL).unwrap_err();
            assert!(matches!(error, OpenError::Newer { .. }), "{error}");
            let newer = format!("level {}", LEVEL + 1);
            assert!(error.to_string().contains(&newer), "{error}");
        }
        let names = std::fs::read_dir(dir.path()).unwrap().map(|one| one.unwrap().file_name());
        let names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        assert!(names.iter().all(|name| !name.contains("damaged")), "{names:?}");
        assert!(!dir.path().join("quarantine").exists(), "{names:?}");
    }
}

#[tokio::test]
async fn n4_marks_have_equal_hashes_on_equal_states() {
    let dirs = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let entries: Vec<Entry> = (1..=12u64)
        .map(|index| {
            // Machine time moves by more than the distance of marks; renewals make them.
            let mut batch = batch(index - 1, vec![put(&format!("k{index}"), vec![index as u8])]);
            batch.stamp_ms = index * 60_000;
            batch.commands.push(match index {
                1 => Command::OpenSession {
                    prefix: Prefix::new("bot").unwrap(),
                    kind: crate::machine::SessionKind::Replica,
                    replica: "r1".to_owned(),
                    node: 1,
                    lease_ms: 15_000,
                },
                _ => Command::RenewSession { session: crate::types::Incarnation(1), seq: None },
            });
            Entry {
                log_id: test_log_id(1, index),
                payload: EntryPayload::Normal(Proposal(codec::seal(Kind::Batch, &batch).into())),
            }
        })
        .collect();
    let mut found = Vec::new();
    for dir in [&dirs.0, &dirs.1] {
        let (_log, mut state, _) = open(dir.path());
        apply(&mut state, entries.clone()).await;
        let began = std::time::Instant::now();
        // They are hashed beside each other and may come in any order; the newest ones stay.
        while !state.marks().iter().map(|mark| mark.index).eq(13 - MARKS_MAX as u64..13) {
            assert!(began.elapsed().as_secs() < 20, "{:?}", state.marks());
            tokio::task::yield_now().await;
        }
        found.push(state.marks());
    }
    assert_eq!(found[0], found[1]);
    assert!(found[0].is_sorted_by(|one, two| one.index < two.index));
}

/// Whatever became of a record on the disk: the next scrub finds it and writes the records anew.
#[test]
fn case_o6_a_record_that_changed_on_the_disk_is_found_and_written_anew() {
    let root = tempfile::tempdir().unwrap();
    let mut machine = Machine::default();
    let mut effects = Vec::new();
    for index in 1..40 {
        let ops = vec![put(&format!("key-{index}"), vec![7; 100])];
        machine.apply(index, &batch(index - 1, ops), &mut effects);
    }
    let replica = Replica {
        machine,
        last_applied: Some(test_log_id(1, 39)),
        membership: StoredMembership::default(),
        bytes_since_cut: 0,
        detached: true,
    };
    let mut saver = Saver {
        replica: Arc::new(RwLock::new(replica)),
        disk: Disk::open(root.path(), 1 << 20).unwrap().unwrap().disk,
        flushed: Arc::default(),
        every: Duration::MAX,
        scrub_every: Duration::MAX,
        scrubs: Arc::default(),
        _dir: stamped(root.path()),
    };
    saver.scrub();
    let faults = |saver: &Saver| saver.scrubs.faults.load(Ordering::Relaxed);
    assert_eq!(faults(&saver), 0, "what was written is there");
    type Damage<'a> = &'a dyn Fn(&mut Vec<u8>) -> bool;
    let damages: [Damage<'_>; 3] = [
        // A bit flips; a record goes; it is another one, whole, as an older version would be.
        &|value| {
            *value.last_mut().unwrap() ^= 1;
            true
        },
        &|_| false,
        &|value| {
            *value = codec::finish([codec::begin(Kind::StateRecord, 2), vec![1, 0]].concat());
            true
        },
    ];
    for (nth, damage) in (1..).zip(damages) {
        saver.disk.damage_for_test(b"key-20", damage);
        saver.scrub();
        assert_eq!(faults(&saver), nth);
        saver.scrub();
        assert_eq!(faults(&saver), nth, "it was written anew");
    }
    let hash = saver.replica.read().machine.freeze().hash();
    drop(saver);
    let found = Disk::open(root.path(), 1 << 20).unwrap().unwrap();
    let (at, machine) = found.state.unwrap();
    assert_eq!((at.last_applied, machine.freeze().hash()), (Some(test_log_id(1, 39)), hash));
}
