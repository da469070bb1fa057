//! The tail and sled, each ahead of or behind the other, whole or damaged.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::tail::{Begin, PAGE, Record};
use super::tests::{append, entries, entry, open, options, reopened, try_open};
use super::*;
use crate::codec::{self, hostile};
use crate::raft::marker::Marker;

const HALF: usize = 16 * PAGE;

fn end(index: u64) -> Durable {
    let vote = Some(Vote::new_committed(3, 1));
    Durable { last: Some(test_log_id(3, index)), hash: index * 31, vote }
}

/// The bytes of the file before and after each record; the body says which record it is.
fn images(root: &Path, sizes: &[usize]) -> Vec<Vec<u8>> {
    Tail::create(root, HALF).unwrap();
    let mut tail = Tail::open(root, HALF, 4).unwrap();
    let read = || fs::read(root.join("log.tail")).unwrap();
    let mut images = vec![read()];
    tail.begin();
    for (number, size) in (1..).zip(sizes) {
        let body = vec![number as u8; *size];
        if !tail.fits(size + 4) {
            tail.begin();
        }
        let mut framed = (*size as u32).to_le_bytes().to_vec();
        framed.extend_from_slice(&body);
        tail.write(Begin::Continues, end(number - 1), end(number), None, (1, &framed)).unwrap();
        images.push(read());
    }
    images
}

/// The last bytes of the bodies of what is read.
fn read(root: &Path, image: &[u8]) -> Vec<(u64, Vec<u8>, bool)> {
    fs::write(root.join("log.tail"), image).unwrap();
    let found = tail::read(root, HALF).unwrap().unwrap();
    let body = |record: &Record| *record.body.last().unwrap();
    let generation = |found: tail::Generation| {
        (found.number, found.records.iter().map(body).collect(), found.has_hole)
    };
    found.into_iter().map(generation).collect()
}

/// Format 1 for ever: a change here makes every log quarantine itself.
#[test]
fn golden_bytes_of_a_record_of_the_tail() {
    let dir = tempfile::tempdir().unwrap();
    Tail::create(dir.path(), HALF).unwrap();
    let mut tail = Tail::open(dir.path(), HALF, 4).unwrap();
    tail.begin();
    let committed = Some(test_log_id(3, 6));
    tail.write(Begin::Fresh, end(7), end(8), committed, (1, &[1, 0, 0, 0, 9])).unwrap();
    let image = fs::read(dir.path().join("log.tail")).unwrap();
    assert_eq!(image.len(), 4 * HALF);
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let record = &image[HALF..HALF + PAGE];
    assert_eq!(record, &image[3 * HALF..3 * HALF + PAGE], "both copies");
    // But for the checksum and the nonce, which is another each time.
    let len = u32::from_le_bytes(record[..4].try_into().unwrap()) as usize;
    let (nonce_at, nonce_len) = (13, if record[13] == 0xfd { 9 } else { 5 });
    let rest = [&record[4..8], &record[12..nonce_at], &record[nonce_at + nonce_len..4 + len]];
    assert_eq!(hex(&rest.concat()), GOLDEN);
}

const GOLDEN: &str = "626d0110050001010307d90103010101010308f80103010101010306010100000009";

#[test]
fn a_write_cut_off_anywhere_costs_nothing_that_was_synced() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = [10, 5_000, 9_000, 20, 12_000, 11_000, 12_000, 1, 8_200];
    let images = images(dir.path(), &sizes);
    let synced = |number: usize| read(dir.path(), &images[number]);
    for number in 1..images.len() {
        let (before, after) = (&images[number - 1], &images[number]);
        let pages: Vec<usize> = (0..before.len() / PAGE)
            .filter(|page| {
                let range = page * PAGE..(page + 1) * PAGE;
                before[range.clone()] != after[range]
            })
            .collect();
        assert!(pages.len() <= 8, "the subsets are too many");
        let (was, is) = (synced(number - 1), synced(number));
        for kept in 0u32..1 << pages.len() {
            let mut torn = before.clone();
            for (bit, page) in pages.iter().enumerate() {
                if kept >> bit & 1 == 1 {
                    let range = page * PAGE..(page + 1) * PAGE;
                    torn[range.clone()].copy_from_slice(&after[range]);
                }
            }
            let found = read(dir.path(), &torn);
            // A half that is taken over may be lost: nobody needed it any more.
            let found: Vec<_> =
                found.iter().filter(|(g, ..)| *g + 1 >= is.last().unwrap().0).collect();
            let matches = |whole: &[(u64, Vec<u8>, bool)]| {
                let whole = whole.iter().filter(|(g, ..)| *g + 1 >= is.last().unwrap().0);
                whole.collect::<Vec<_>>() == found
            };
            assert!(matches(&was) || matches(&is), "record {number}, pages {kept:b}: {found:?}");
        }
    }
}

#[test]
fn a_damage_in_one_copy_is_repaired_and_one_in_both_is_seen_where_a_record_follows() {
    let dir = tempfile::tempdir().unwrap();
    let sizes = [10, 5_000, 9_000, 20, 3_000];
    let image = images(dir.path(), &sizes).pop().unwrap();
    let whole = read(dir.path(), &image);
    assert_eq!(whole, [(5, vec![1, 2, 3, 4, 5], false)]);
    let zeroed = |image: &[u8], page: usize| {
        let mut damaged = image.to_vec();
        damaged[page * PAGE..(page + 1) * PAGE].fill(0);
        damaged
    };
    let pages = HALF / PAGE;
    for page in 0..4 * pages {
        assert_eq!(read(dir.path(), &zeroed(&image, page)), whole, "page {page}");
    }
    // Of the odd half: pages 0, 1-2, 3-5, 6, 7.
    for (page, left) in [(0, 0), (1, 1), (2, 1), (4, 2), (6, 3)] {
        let both = zeroed(&zeroed(&image, pages + page), 3 * pages + page);
        assert_eq!(read(dir.path(), &both), [(5, (1..=left).collect(), true)], "page {page}");
    }
}

fn copy(root: &Path, names: &[&str], to: &Path) {
    for name in names {
        let (from, to) = (root.join(name), to.join(name));
        if from.is_dir() {
            let _ = fs::remove_dir_all(&to);
            fs::create_dir(&to).unwrap();
            let inside = fs::read_dir(&from).unwrap().map(|found| found.unwrap());
            let names: Vec<String> =
                inside.map(|found| found.file_name().into_string().unwrap()).collect();
            copy(&from, &names.iter().map(String::as_str).collect::<Vec<_>>(), &to);
        } else {
            fs::copy(&from, &to).unwrap();
        }
    }
}

const SLED: &[&str] = &["log", "log.marker"];

/// A directory whose sled is as it was before the last 30 entries and the vote, and another whose
/// tail is.
async fn halves(root: &Path) -> (PathBuf, PathBuf) {
    let [live, behind, ahead] = ["live", "behind", "ahead"].map(|name| root.join(name));
    let mut log = open(&live);
    append(&mut log, entries(1, 1..200, 500)).await;
    log.close().await;
    drop(log);
    let mut log = open(&live);
    for to in [&behind, &ahead] {
        fs::create_dir(to).unwrap();
        copy(&live, &["identity", "boot", "log", "log.marker", "log.tail"], to);
    }
    append(&mut log, entries(1, 200..229, 500)).await;
    log.save_vote(&Vote::new(7, 1)).await.unwrap();
    append(&mut log, entries(2, 229..230, 500)).await;
    copy(&live, &["log.tail"], &behind);
    log.close().await;
    drop(log);
    copy(&live, SLED, &ahead);
    (behind, ahead)
}

fn written() -> Vec<Entry> {
    [entries(1, 1..229, 500), entries(2, 229..230, 500)].concat()
}

#[tokio::test]
async fn m4_what_only_the_tail_has_comes_back_however_often_it_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let (behind, _) = halves(dir.path()).await;
    for round in 0..4u64 {
        let (mut log, all) = reopened(&behind).await;
        let more: Vec<Entry> = (0..round).map(|more| entry(2, 230 + more, 60_000)).collect();
        assert_eq!(all, [written(), more].concat());
        assert_eq!(log.read_vote().await.unwrap(), Some(Vote::new(7, 1)));
        append(&mut log, vec![entry(2, 230 + round, 60_000)]).await;
    }
}

#[tokio::test]
async fn m4_a_tail_that_is_behind_sled_is_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    let (_, ahead) = halves(dir.path()).await;
    let error = try_open(&ahead).unwrap_err();
    assert!(matches!(error, OpenError::Quarantined { .. }), "{error}");
    assert!(error.to_string().contains("log.tail ends at entry 199"), "{error}");
}

#[tokio::test]
async fn m4_a_tail_of_zeroes_is_quarantined_and_so_is_another_logs() {
    let dir = tempfile::tempdir().unwrap();
    let (behind, _) = halves(dir.path()).await;
    let tail = behind.join("log.tail");
    let good = fs::read(&tail).unwrap();
    fs::write(&tail, vec![0; good.len()]).unwrap();
    let error = try_open(&behind).unwrap_err();
    assert!(error.to_string().contains("must be there"), "{error}");

    // As many entries in as many openings, and yet others.
    let other = dir.path().join("other");
    let mut log = open(&other);
    append(&mut log, entries(1, 1..200, 501)).await;
    log.close().await;
    drop(log);
    let mut log = open(&other);
    append(&mut log, entries(1, 200..229, 500)).await;
    copy(&other, &["log.tail"], &behind);
    let error = try_open(&behind).unwrap_err();
    assert!(error.to_string().contains("is not the one"), "{error}");

    fs::write(&tail, good).unwrap();
    assert_eq!(reopened(&behind).await.1, written());
}

/// A directory of a version without a tail: only the newer slot of the marker knew of one.
#[tokio::test]
async fn m5_a_log_without_a_tail_is_opened_and_gets_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = open(dir.path());
    append(&mut log, entries(1, 1..50, 500)).await;
    log.close().await;
    drop(log);
    fs::remove_file(dir.path().join("log.tail")).unwrap();
    let mut marker = Marker::open(dir.path()).unwrap().unwrap().unwrap();
    let durable = marker.durable().clone();
    marker.set(durable, None).unwrap();
    drop(marker);
    for last in 50..53 {
        let (mut log, all) = reopened(dir.path()).await;
        assert_eq!(all, entries(1, 1..last, 500));
        append(&mut log, entries(1, last..last + 1, 500)).await;
    }
    let marker = Marker::open(dir.path()).unwrap().unwrap().unwrap();
    assert_eq!(marker.tail().unwrap().half_bytes, options().tail_half_bytes as u64);
}

/// A directory's files while they are changed, as `kill -9` would leave them: what was copied
/// within one instant.
fn snapshots(root: &Path, done: &std::sync::mpsc::Receiver<()>) -> Vec<PathBuf> {
    let live = root.join("live");
    let stamp = || ["log.tail", "log.marker", "log/db"].map(|name| fs::read(live.join(name)).ok());
    let mut kept = Vec::new();
    loop {
        let is_last = done.try_recv().is_ok();
        let to = root.join(format!("copy-{}", kept.len()));
        fs::create_dir(&to).unwrap();
        let before = stamp();
        copy(&live, &["identity", "boot", "log", "log.marker", "log.tail"], &to);
        if stamp() == before {
            kept.push(to);
        } else {
            fs::remove_dir_all(&to).unwrap();
        }
        if is_last && !kept.is_empty() {
            return kept;
        }
    }
}

#[tokio::test]
async fn m4_what_sled_does_alone_may_be_cut_off_anywhere() {
    for jump in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut log = open(&dir.path().join("live"));
        append(&mut log, entries(1, 1..100, 500)).await;
        append(&mut log, entries(1, 100..150, 500)).await;
        let (stop, done) = std::sync::mpsc::channel();
        let root = dir.path().to_owned();
        let copies = std::thread::spawn(move || snapshots(&root, &done));
        if jump {
            log.purge(test_log_id(3, 500)).await.unwrap();
        } else {
            log.truncate_after(Some(test_log_id(1, 60))).await.unwrap();
        }
        log.save_vote(&Vote::new(9, 1)).await.unwrap();
        stop.send(()).unwrap();
        for root in copies.join().unwrap() {
            let (mut log, all) = reopened(&root).await;
            let last = log.get_log_state().await.unwrap().last_log_id;
            let before = (Some(test_log_id(1, 149)), entries(1, 1..150, 500));
            let after = match jump {
                true => (Some(test_log_id(3, 500)), vec![]),
                false => (Some(test_log_id(1, 60)), entries(1, 1..61, 500)),
            };
            let what = format!("jump {jump}, {}: {last:?}, {} entries", root.display(), all.len());
            assert!([before, after].contains(&(last, all)), "{what}");
        }
    }
}

/// Acknowledged at once after the first opening: the marker has to know of the tail by then.
#[tokio::test]
async fn m4_the_first_entry_of_a_directory_is_not_lost() {
    for round in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let live = dir.path().join("live");
        let mut log = open(&live);
        append(&mut log, entries(1, 1..2, 10)).await;
        let to = dir.path().join("copy");
        fs::create_dir(&to).unwrap();
        // The marker first: it may only become newer while the rest is copied.
        copy(&live, &["identity", "boot", "log.marker", "log.tail", "log"], &to);
        let (_, all) = reopened(&to).await;
        assert_eq!(all.len(), 1, "round {round}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    #[test]
    fn m4_whatever_the_tail_holds_is_read_without_a_panic(
        records in proptest::collection::vec(hostile::bytes(tail_pages()), 1..4),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut image = vec![0; 4 * HALF];
        for (page, record) in records.iter().enumerate() {
            let at = page * PAGE;
            let len = record.len().min(image.len() - at);
            image[at..at + len].copy_from_slice(&record[..len]);
            // In the copy too, and as a record whose checksum is right.
            let payload = record.get(4 + codec::HEADER_BYTES..).unwrap_or_default();
            let sealed = codec::seal_raw(codec::Kind::LogTail, payload);
            let framed = [&(sealed.len() as u32).to_le_bytes()[..], &sealed].concat();
            let at = 2 * HALF + page * PAGE;
            let len = framed.len().min(image.len() - at);
            image[at..at + len].copy_from_slice(&framed[..len]);
        }
        fs::write(dir.path().join("log.tail"), &image).unwrap();
        for generation in tail::read(dir.path(), HALF).unwrap().unwrap() {
            for record in generation.records {
                let _ = tail::entries(&record.body).count();
            }
        }
        let _ = tail::unused(dir.path(), HALF);
    }
}

/// The pages of three records.
fn tail_pages() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let image = images(dir.path(), &[5, 100, 1]).pop().unwrap();
    let half = &image[HALF..];
    let page = |page: &[u8]| {
        let len = u32::from_le_bytes(std::array::from_fn(|i| page[i])) as usize;
        page[..4 + len].to_vec()
    };
    half.chunks(PAGE).take(3).map(page).collect()
}
