//! Nothing is acknowledged before it would survive a power cut.
//!
//! Shown twice: by counting the system calls of a node, and by cutting the power. For the second,
//! nodes run with a library preloaded (`tests/support/power.c`) that keeps, beside the data
//! directory, the image a disk would hold that lost all that was not synced.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use support::cluster::{Arena, Cluster, Options};
use support::demo::Demo;
use support::ledger::Writers;
use support::session::Prefix;

const SECOND: Duration = Duration::from_secs(1);

// -------------------------------------------------------------------------- counting system calls

/// `strace` at work on a process.
struct Strace {
    child: Child,
    output: PathBuf,
}

impl Strace {
    /// Attaches to a process; an error where the machine forbids it or has no `strace`.
    async fn attach(pid: u32, output: &Path) -> Result<Self, String> {
        let said = output.with_extension("said");
        let child = Command::new("strace")
            .args(["-f", "-y", "-e", "trace=fsync,fdatasync", "-p", &pid.to_string(), "-o"])
            .arg(output)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&said).unwrap())
            .spawn()
            .map_err(|fault| fault.to_string())?;
        let mut strace = Self { child, output: output.to_owned() };
        let until = Instant::now() + 10 * SECOND;
        loop {
            let text = fs::read_to_string(&said).unwrap_or_default();
            if text.contains("attached") {
                return Ok(strace);
            }
            if strace.child.try_wait().unwrap().is_some() || Instant::now() > until {
                return Err(text);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Detaches, and counts the syncs by file.
    fn counted(mut self) -> BTreeMap<String, usize> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).unwrap();
        kill_process(pid, Signal::INT).unwrap();
        self.child.wait().unwrap();
        let mut counts = BTreeMap::new();
        for line in fs::read_to_string(&self.output).unwrap().lines() {
            // 4711 fdatasync(12</data/n1/log.tail>) = 0; a call that was interrupted in the record
            // has a second line, without the file.
            let call = line.contains("fdatasync(") || line.contains("fsync(");
            if let Some(file) = line.split_once('<').and_then(|(_, rest)| rest.split_once('>'))
                && call
            {
                *counts.entry(file.0.to_owned()).or_insert(0) += 1;
            }
        }
        counts
    }
}

impl Drop for Strace {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r24_every_acknowledged_write_has_a_sync_of_its_own() {
    const WRITES: usize = 200;
    let cluster = Cluster::start(Options::nodes(1)).await;
    let prefix = Prefix::new(cluster.api(), "sync");
    let pid = cluster.nodes[0].pid();
    let traced = Strace::attach(pid, &cluster.root().join("writes.strace")).await;
    let traced = match traced {
        Ok(traced) => traced,
        Err(why) => {
            eprintln!("SKIPPED: syncs cannot be counted on this machine, strace says: {why}");
            return;
        }
    };
    // One after the other: no two writes can share a sync.
    let began = Instant::now();
    for number in 0..WRITES {
        let request = prefix.create(&format!("demo:sync-{number}"), &json!({ "n": number }));
        assert_eq!(prefix.write(0, request).await.status, 200);
    }
    let took = began.elapsed();
    let busy = traced.counted();

    // As long again without a write, to see what the node syncs by itself.
    let traced = Strace::attach(pid, &cluster.root().join("idle.strace")).await.unwrap();
    tokio::time::sleep(took).await;
    let idle = traced.counted();

    println!("{WRITES} writes in {took:?}: {busy:?}; idle: {idle:?}");
    let root = cluster.nodes[0].dir.to_str().unwrap().to_owned();
    let of_the_log = |counts: &BTreeMap<String, usize>| {
        let ours = counts.iter().filter(|(file, _)| file.starts_with(&root));
        ours.filter(|(file, _)| file.ends_with("/log.tail")).map(|(_, count)| *count).sum::<usize>()
    };
    assert!(of_the_log(&busy) >= WRITES, "{busy:?}");
    assert!(of_the_log(&idle) < WRITES / 4, "{idle:?}");
}

// ------------------------------------------------------------------------------ cutting the power

/// Builds the library that keeps the images.
fn library() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/power.c");
    let library =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("power-{}.so", uuid::Uuid::new_v4()));
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&library)
        .arg(source)
        .arg("-ldl")
        .status()
        .expect("a C compiler is there: Rust's linker is one");
    assert!(status.success());
    library
}

/// A group whose nodes' images are kept, and the library that keeps them.
struct Powered {
    cluster: Cluster,
    library: PathBuf,
}

impl Drop for Powered {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.library);
    }
}

impl Powered {
    async fn start() -> Self {
        let arena = Arena::enter().await;
        let library = library();
        let options = Options::nodes(3).lease("2s");
        let cluster = Cluster::start_prepared(&options, arena, |cluster| {
            for index in 0..cluster.nodes.len() {
                let image = image(cluster, index);
                for part in ["inodes", "tree"] {
                    fs::create_dir_all(image.join(part)).unwrap();
                }
                let node = &mut cluster.nodes[index];
                fs::create_dir_all(&node.dir).unwrap();
                let root = node.dir.canonicalize().unwrap();
                let text = |path: &Path| path.to_str().unwrap().to_owned();
                node.env = vec![
                    ("LD_PRELOAD".to_owned(), text(&library)),
                    ("POWER_ROOT".to_owned(), text(&root)),
                    ("POWER_IMAGE".to_owned(), text(&image)),
                ];
            }
        })
        .await;
        Self { cluster, library }
    }

    /// How many syncs of files were mirrored.
    fn syncs(&self) -> usize {
        (0..self.cluster.nodes.len())
            .map(|index| fs::read(image(&self.cluster, index).join("syncs")).unwrap())
            .map(|syncs| syncs.iter().filter(|kind| **kind == b'f').count())
            .sum()
    }

    /// Cuts the power of all nodes at one instant and gives them the disks they come back to.
    fn cut(&mut self, disk: Disk) {
        self.cluster.kill_all();
        for index in 0..self.cluster.nodes.len() {
            let image = image(&self.cluster, index).join("tree");
            let node = &mut self.cluster.nodes[index];
            node.env.clear();
            let before = node.dir.with_extension("before");
            fs::rename(&node.dir, &before).unwrap();
            match disk {
                Disk::Nothing => copy(&image, &node.dir),
                Disk::AllButDatabases => {
                    copy(&before, &node.dir);
                    for log in directories_with(&image, "db") {
                        let there = node.dir.join(log.strip_prefix(&image).unwrap());
                        let _ = fs::remove_dir_all(&there);
                        copy(&log, &there);
                    }
                }
                Disk::AllButTail => {
                    copy(&before, &node.dir);
                    fs::copy(image.join("log.tail"), node.dir.join("log.tail")).unwrap();
                }
            }
        }
    }
}

/// What a disk kept of what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    /// Nothing.
    Nothing,
    /// All of it but in the databases: files are not written back in the order of the writes.
    AllButDatabases,
    /// All of it but in the tail of the log, in which everything acknowledged has to be.
    AllButTail,
}

/// Where a node's image is kept.
fn image(cluster: &Cluster, index: usize) -> PathBuf {
    cluster.root().join(format!("{}.image", cluster.nodes[index].name))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else if entry.file_type().unwrap().is_file() {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The directories below `root` that hold a file of this name.
fn directories_with(root: &Path, name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            found.extend(directories_with(&entry.path(), name));
        } else if entry.file_name() == name {
            found.push(root.to_owned());
        }
    }
    found
}

async fn acknowledged_survives(disk: Disk) {
    let mut group = Powered::start().await;
    let demo = Demo::new(group.cluster.public());
    let prefix = Prefix::new(group.cluster.api(), "power");
    let writers = Writers::start(&demo, &prefix, 9);
    writers.have_written(300).await;
    group.cut(disk);
    let ledger = writers.stopped().await;
    let (rows, messages) = ledger.len();
    println!("{rows} rows and {messages} messages acknowledged; {} syncs", group.syncs());

    group.cluster.restart_all().await;
    let missing = ledger.missing_rows(&prefix).await;
    assert!(missing.is_empty(), "{} rows are missing: {missing:?}", missing.len());
    ledger.every_message_is_answered_once(&demo).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r24_everything_acknowledged_is_in_the_power_loss_images() {
    acknowledged_survives(Disk::Nothing).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r24_other_files_may_be_ahead_of_the_log() {
    acknowledged_survives(Disk::AllButDatabases).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_r24_other_files_may_be_ahead_of_the_tail() {
    acknowledged_survives(Disk::AllButTail).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn museum_a_sync_that_lies_loses_what_was_acknowledged() {
    let mut group = Powered::start().await;
    let demo = Demo::new(group.cluster.public());
    let prefix = Prefix::new(group.cluster.api(), "lie");
    // From here on no sync reaches the images, and every one claims that it did.
    for index in 0..3 {
        fs::write(image(&group.cluster, index).join("lie"), "").unwrap();
    }
    let writers = Writers::start(&demo, &prefix, 9);
    writers.have_written(100).await;
    group.cut(Disk::Nothing);
    let ledger = writers.stopped().await;

    group.cluster.restart_all().await;
    let missing = ledger.missing_rows(&prefix).await;
    println!("{} of {} rows are missing", missing.len(), ledger.len().0);
    assert!(!missing.is_empty(), "a disk that keeps nothing went unseen");
}

#[test]
fn museum_the_images_hold_what_was_synced_and_nothing_else() {
    let library = library();
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let root = place.path().canonicalize().unwrap().join("data");
    let image = place.path().join("image");
    for dir in [&root, &image.join("inodes"), &image.join("tree")] {
        fs::create_dir_all(dir).unwrap();
    }
    let run = |script: &str| {
        let status = Command::new("sh")
            .args(["-ec", script])
            .current_dir(&root)
            .env("LD_PRELOAD", &library)
            .env("POWER_ROOT", &root)
            .env("POWER_IMAGE", &image)
            .status()
            .unwrap();
        assert!(status.success(), "{script}");
    };
    let kept = |name: &str| fs::read_to_string(image.join("tree").join(name)).ok();
    let some = |text: &str| Some(text.to_owned());

    run("printf one > a; sync a; printf two > b");
    assert_eq!((kept("a"), kept("b")), (None, None), "no name without a sync of the directory");
    run("sync .");
    assert_eq!((kept("a"), kept("b")), (some("one"), some("")), "no content without a sync");
    run("printf more >> a; sync b");
    assert_eq!((kept("a"), kept("b")), (some("one"), some("two")));
    run("mv a c; rm b; mkdir d; printf deep > d/e; sync d/e");
    assert_eq!((kept("a"), kept("b"), kept("c")), (some("one"), some("two"), None));
    run("sync . d");
    assert_eq!((kept("a"), kept("b"), kept("c")), (None, None, some("one")));
    assert_eq!(kept("d/e"), some("deep"));
    fs::write(image.join("lie"), "").unwrap();
    run("printf more >> c; sync c; mv c f; sync .");
    assert_eq!((kept("c"), kept("f")), (some("one"), None), "a lie mirrors nothing");
    fs::remove_file(library).unwrap();
}
