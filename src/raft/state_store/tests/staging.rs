//! Large cuts, cut off at any point and in either form of staging.

use super::*;

/// What changed since the last cut, and up to where.
fn changes(state: &StateStore) -> (crate::machine::Cut, CutAt) {
    let mut replica = state.shared.replica.write();
    let membership = replica.membership.clone();
    (replica.machine.cut(), CutAt { last_applied: replica.last_applied, membership })
}

#[tokio::test]
async fn a_committed_cut_is_finished_and_an_uncommitted_one_forgotten() {
    for (committed, packed) in [(true, true), (false, true), (true, false), (false, false)] {
        let dir = tempfile::tempdir().unwrap();
        let (log, mut state, _) = open(dir.path());
        apply(&mut state, vec![entry(1, many(0, 2000, 1))]).await;
        state.cut().await;
        let before = hash(&state);
        apply(&mut state, vec![entry(2, many(1000, 3000, 2))]).await;
        let after = hash(&state);
        let (changes, at) = changes(&state);
        // The store itself must not cut any more: its machine believes it has.
        *state.shared.flushed.lock() = at.last_applied;
        drop((log, state));
        let mut opened = Disk::open(dir.path(), 1 << 20).unwrap().unwrap();
        match packed {
            true => opened.disk.stage_for_test(changes.records(), at, committed),
            false => opened.disk.stage_singly_for_test(changes.records(), at, committed),
        }
        drop(opened);

        let (_log, state, _) = open(dir.path());
        assert_eq!(hash(&state), if committed { after } else { before });
        assert_eq!(state.last_applied(), Some(test_log_id(1, if committed { 2 } else { 1 })));
    }
}

/// What an interrupted cut of one program staged and never stated is not moved with what another one
/// stated in its own form.
#[tokio::test]
async fn what_was_staged_in_the_other_form_and_never_counted_is_not_moved() {
    for packed in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let (log, mut state, _) = open(dir.path());
        apply(&mut state, vec![entry(1, many(0, 2000, 1))]).await;
        state.cut().await;
        // A cut that nobody will state, of values that nobody will see again.
        apply(&mut state, vec![entry(2, many(0, 1500, 2))]).await;
        let (forgotten, at) = changes(&state);
        apply(&mut state, vec![entry(3, many(1000, 3000, 3))]).await;
        let expected = hash(&state);
        // The second cut holds everything of the first anew, as the log would bring it.
        let replica = state.shared.replica.read().machine.freeze();
        let (_, later) = changes(&state);
        *state.shared.flushed.lock() = later.last_applied;
        drop((log, state));
        let mut opened = Disk::open(dir.path(), 1 << 20).unwrap().unwrap();
        let whole = || replica.records().map(|(key, value)| (key, Some(value)));
        let gone = |(key, _): crate::machine::Change| ([&key[..], b"!"].concat(), Some(vec![1]));
        match packed {
            true => {
                opened.disk.stage_singly_for_test(forgotten.records().map(gone), at, false);
                opened.disk.stage_for_test(whole(), later, true);
            }
            false => {
                opened.disk.stage_for_test(forgotten.records().map(gone), at, false);
                opened.disk.stage_singly_for_test(whole(), later, true);
            }
        }
        drop(opened);
        let (_log, state, _) = open(dir.path());
        assert_eq!((hash(&state), state.last_applied()), (expected, Some(test_log_id(1, 3))));
    }
}

/// A block that is gone is a damaged state, which is made again from the log.
#[tokio::test]
async fn m4_a_cut_that_counts_and_misses_a_block_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let (log, mut state, _) = open(dir.path());
    apply(&mut state, vec![entry(1, many(0, 2000, 1))]).await;
    state.cut().await;
    apply(&mut state, vec![entry(2, many(0, 2000, 2))]).await;
    let (changed, at) = changes(&state);
    *state.shared.flushed.lock() = at.last_applied;
    drop((log, state));
    let mut opened = Disk::open(dir.path(), 1 << 20).unwrap().unwrap();
    opened.disk.stage_for_test(changed.records(), at, true);
    opened.disk.lose_block_for_test(1);
    drop(opened);
    let why = Disk::open(dir.path(), 1 << 20).unwrap().err().unwrap();
    assert!(why.contains("block 1"), "{why}");
}

/// What cannot be written is not lost: the log has it, and the next cut brings it once there is room.
#[tokio::test]
async fn m4_no_cut_is_begun_on_a_disk_that_is_nearly_full() {
    let dir = tempfile::tempdir().unwrap();
    let (log, mut state) = {
        let dir = stamped(dir.path());
        let log = LogStore::open(&dir, LogOptions::default()).unwrap();
        // No disk has as much room.
        let room = Some(Arc::new(Room::new(dir.root(), 1 << 60)));
        let heard = Arc::new(Heard::default());
        let options = StateOptions::default();
        (log.clone(), StateStore::open(&dir, &log, options, heard, room).unwrap())
    };
    apply(&mut state, vec![entry(1, many(0, 2000, 1))]).await;
    let expected = hash(&state);
    state.cut().await;
    assert_eq!(*state.shared.flushed.lock(), None);
    state.close().await;
    assert_eq!(*state.shared.flushed.lock(), None);
    drop((log, state));
    let (_log, mut state, _) = open(dir.path());
    assert_eq!(state.last_applied(), None, "the entries come from the log");
    apply(&mut state, vec![entry(1, many(0, 2000, 1))]).await;
    state.cut().await;
    drop((_log, state));
    let (_log, state, _) = open(dir.path());
    assert_eq!((hash(&state), state.last_applied()), (expected, Some(test_log_id(1, 1))));
}
