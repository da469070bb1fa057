//! What a crash, and a bad disk after it, may do to a log (SPEC M4, case r12).
//!
//! The writer runs in a child process that says on its standard output what it has been promised,
//! and is killed at a random moment. Then the log is opened as it is, and opened with bytes flipped
//! or cut away: it is whole, or it is quarantined. `BOTMESH_KILLS` and `BOTMESH_DAMAGES` set how
//! often.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use bytes::Bytes;
use openraft::EntryPayload;
use openraft::storage::RaftLogStorageExt;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::raft::identity::Identity;
use crate::raft::types::Proposal;

const CHILD_DIR: &str = "BOTMESH_TEST_LOG_DIR";

fn times(name: &str, usual: u32) -> u32 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

fn open(root: &Path) -> Result<LogStore, OpenError> {
    let dir = DataDir::open(root, "test")?;
    let identity =
        Identity { cluster_id: uuid::Uuid::nil(), node_id: 1, name: "n1".into(), peers: vec![] };
    dir.stamp(identity)?;
    LogStore::open(&dir, super::tests::options())
}

/// An entry whose content follows from its log id.
fn entry(term: u64, index: u64) -> Entry {
    let bytes = match (index * 7 + term) % 23 {
        0 => 70_000,
        1..4 => 9_000,
        other => other as usize * 20,
    };
    let fill = (term * 31 + index) as u8;
    Entry {
        log_id: test_log_id(term, index),
        payload: EntryPayload::Normal(Proposal(Bytes::from(vec![fill; bytes]))),
    }
}

/// What the child was promised: the terms of the entries up to the last one acknowledged, and the
/// vote's term.
#[derive(Debug, Default, Clone)]
struct Promised {
    terms: BTreeMap<u64, u64>,
    vote: u64,
    purged: u64,
}

impl Promised {
    fn hear(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match words[0] {
            "acked" => {
                for index in number(2)..=number(3) {
                    self.terms.insert(index, number(1));
                }
            }
            "voted" => self.vote = number(1),
            "truncating" => self.terms.retain(|index, _| *index <= number(1)),
            "purging" => self.purged = number(1),
            other => panic!("the child said {other}"),
        }
    }

    /// The log keeps every promise.
    async fn check(&self, log: &mut LogStore, what: &str) {
        let vote = log.read_vote().await.unwrap().map_or(0, |vote| vote.leader_id.term);
        assert!(vote >= self.vote, "{what}: vote {vote}, promised {}", self.vote);
        let all = log.try_get_log_entries(..).await.unwrap();
        let by_index: BTreeMap<u64, &Entry> =
            all.iter().map(|entry| (entry.log_id.index, entry)).collect();
        let purged = log.last_purged().map_or(0, |purged| purged.index);
        assert!(purged <= self.purged, "{what}: purged {purged}, asked {}", self.purged);
        for (&index, &term) in self.terms.range(purged + 1..) {
            let found = by_index.get(&index).unwrap_or_else(|| {
                panic!("{what}: entry {index} is missing, of {:?}", self.terms.last_key_value())
            });
            assert_eq!(**found, entry(term, index), "{what}: entry {index}");
        }
        for pair in all.windows(2) {
            assert_eq!(pair[0].log_id.index + 1, pair[1].log_id.index, "{what}: a hole");
        }
    }
}

/// The child: not a test of its own.
#[tokio::test]
#[ignore = "runs as the child of the other tests here"]
async fn child_writes_until_it_is_killed() {
    let Ok(root) = std::env::var(CHILD_DIR) else { return };
    let say = |text: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}").unwrap();
        out.flush().unwrap();
    };
    let mut log = open(Path::new(&root)).unwrap();
    let mut random = StdRng::from_os_rng();
    let mut last = log.get_log_state().await.unwrap().last_log_id.map_or(0, |last| last.index);
    let mut term = log.read_vote().await.unwrap().map_or(0, |vote| vote.leader_id.term) + 1;
    log.save_vote(&Vote::new(term, 1)).await.unwrap();
    say(format!("voted {term}"));
    loop {
        let count = random.random_range(1..20);
        let entries: Vec<Entry> = (last + 1..=last + count).map(|i| entry(term, i)).collect();
        log.blocking_append(entries).await.unwrap();
        say(format!("acked {term} {} {}", last + 1, last + count));
        last += count;
        match random.random_range(0..20) {
            0 => {
                let purged = log.last_purged().map_or(0, |purged| purged.index);
                let keep = last.saturating_sub(random.random_range(0..40)).max(purged + 1);
                let kept = log.try_get_log_entries(keep..=keep).await.unwrap();
                say(format!("truncating {keep}"));
                log.truncate_after(Some(kept[0].log_id)).await.unwrap();
                last = keep;
                term += 1;
                log.save_vote(&Vote::new(term, 1)).await.unwrap();
                say(format!("voted {term}"));
            }
            1 if last > 150 + log.last_purged().map_or(0, |purged| purged.index) => {
                let upto = last - 150;
                let there = log.try_get_log_entries(upto..=upto).await.unwrap();
                say(format!("purging {upto}"));
                log.purge(there[0].log_id).await.unwrap();
            }
            _ => {}
        }
    }
}

fn spawn_child(root: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "--test-threads=1"])
        .arg("raft::log_store::crash::child_writes_until_it_is_killed")
        .env(CHILD_DIR, root)
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(root.with_extension("stderr")).unwrap())
        .spawn()
        .unwrap()
}

/// Lets a child write until it has said `lines` things, kills it, and returns what it was promised.
fn write_and_kill(root: &Path, promised: &mut Promised, lines: u32) {
    let mut child = spawn_child(root);
    let out = BufReader::new(child.stdout.take().unwrap());
    let mut heard = 0;
    for line in out.lines() {
        let Ok(line) = line else { break };
        // The test harness says things too, and begins a line that ours then ends.
        let Some(at) = ["acked ", "voted ", "truncating ", "purging "]
            .iter()
            .filter_map(|word| line.find(word))
            .min()
        else {
            continue;
        };
        promised.hear(&line[at..]);
        heard += 1;
        if heard == lines {
            child.kill().unwrap();
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let said = || std::fs::read_to_string(root.with_extension("stderr")).unwrap();
    assert!(heard >= lines, "the child stopped after {heard} lines: {}", said());
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

#[tokio::test]
async fn case_r12_what_was_acknowledged_survives_kill_9() {
    let holder = tempfile::tempdir().unwrap();
    let dir = holder.path().join("data");
    let mut random = StdRng::seed_from_u64(12);
    let mut promised = Promised::default();
    for round in 0..times("BOTMESH_KILLS", 12) {
        write_and_kill(&dir, &mut promised, random.random_range(2..120));
        let mut log = open(&dir).unwrap();
        promised.check(&mut log, &format!("after kill {round}")).await;
        log.close().await;
    }
}

/// One way of damaging a file.
#[derive(Debug)]
enum Damage {
    Flip { at: u64, bit: u8 },
    Cut { len: u64 },
    Zero { at: u64, len: u64 },
}

fn damage(path: &Path, random: &mut StdRng) -> Damage {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let len = file.metadata().unwrap().len();
    // Where the data ends; behind it sled has only reserved room.
    let bytes = std::fs::read(path).unwrap();
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(len, |at| at as u64 + 1);
    // Mostly near the end, where sled would quietly end its recovery.
    let from = if random.random_bool(0.7) { used.saturating_sub(20_000) } else { 0 };
    let at = random.random_range(from..used.max(from + 1));
    let damage = match random.random_range(0..10) {
        0..6 => Damage::Flip { at, bit: random.random_range(0..8) },
        6..8 => Damage::Cut { len: at },
        _ => Damage::Zero { at, len: random.random_range(1..600).min(len - at) },
    };
    match &damage {
        Damage::Flip { at, bit } => {
            file.write_all_at(&[bytes[*at as usize] ^ (1 << bit)], *at).unwrap();
        }
        Damage::Cut { len } => file.set_len(*len).unwrap(),
        Damage::Zero { at, len } => file.write_all_at(&vec![0; *len as usize], *at).unwrap(),
    }
    damage
}

#[tokio::test]
async fn case_r12_a_damaged_log_is_whole_or_quarantined() {
    let dir = tempfile::tempdir().unwrap();
    let mut promised = Promised::default();
    let original = dir.path().join("original");
    // Not opened in between: recovery would write the page table anew.
    write_and_kill(&original, &mut promised, 150);
    write_and_kill(&original, &mut promised, 60);
    let mut random = StdRng::seed_from_u64(times("BOTMESH_SEED", 4) as u64);
    let (mut whole, mut quarantined) = (0, 0);
    for round in 0..times("BOTMESH_DAMAGES", 60) {
        let copy = dir.path().join("copy");
        copy_dir(&original, &copy);
        let mut files: Vec<_> = std::fs::read_dir(copy.join("log"))
            .unwrap()
            .map(|found| found.unwrap().path())
            .filter(|path| path.is_file())
            .collect();
        files.sort();
        let db = copy.join("log/db");
        let marker = copy.join("log.marker");
        let tail = copy.join("log.tail");
        let path = match random.random_range(0..16) {
            0 => &files[random.random_range(0..files.len())],
            1 => &marker,
            2..6 => &tail,
            _ => &db,
        };
        let done = damage(path, &mut random);
        let what = format!("round {round}, {}: {done:?}", path.display());
        match open(&copy) {
            Ok(mut log) => {
                whole += 1;
                promised.check(&mut log, &what).await;
                log.close().await;
            }
            Err(OpenError::Quarantined { why, .. }) => {
                let one_copy = path == &tail && !matches!(done, Damage::Cut { .. });
                assert!(!one_copy, "{what}: the other copy was whole: {why}");
                quarantined += 1;
            }
            Err(other) => panic!("{what}: {other}"),
        }
        std::fs::remove_dir_all(&copy).unwrap();
    }
    println!("{whole} whole, {quarantined} quarantined");
    assert!(whole > 0 && quarantined > 0, "{whole} whole, {quarantined} quarantined");
}
