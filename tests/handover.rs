//! Hand-over between real processes (SPEC C): conversations of every kind, begun at one replica, which
//! then crashes, stops, freezes or cuts its step, are continued at another of a newer release, and at
//! the first one again. What the user hears is compared whole: nothing lost, nothing said twice.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

#[path = "handover/replica.rs"]
mod replica;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use replica::{NOTICE, Role, SETTLE, WORKS};
use support::cluster::{Arena, free_address};

/// How long anything that is going to happen may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// The process that the others start.
#[test]
#[ignore = "runs as the child of the other tests here"]
fn replica() {
    let role = std::env::var(replica::ROLE).expect("started by a test of this file");
    let role: Role = serde_json::from_str(&role).unwrap();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(replica::run(role)).unwrap();
}

struct Process {
    role: Role,
    child: Option<Child>,
}

impl Process {
    fn start(&mut self) {
        std::fs::create_dir_all(&self.role.dir).unwrap();
        let log = self.role.dir.join("log");
        let log = File::options().create(true).append(true).open(log).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "replica", "--nocapture"])
            .env(replica::ROLE, serde_json::to_string(&self.role).unwrap())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.child = Some(child);
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().unwrap().id().cast_signed();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    async fn stop(&mut self) {
        self.signal(Signal::TERM);
        let mut child = self.child.take().unwrap();
        let ended = tokio::task::spawn_blocking(move || child.wait().unwrap());
        assert!(ended.await.unwrap().success(), "{} stops by itself", self.role.name);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.role.dir.join("log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(40)..];
            eprintln!("--- {}\n{}", self.role.name, last.join("\n"));
        }
    }
}

/// How the first replica goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    Crash,
    Stop,
    Freeze,
    /// It stays, and cuts the step that takes too long.
    Settle,
}

struct Group {
    processes: Vec<Process>,
    http: reqwest::Client,
    _root: tempfile::TempDir,
    _arena: Arena,
}

impl Group {
    async fn start(durable: bool) -> Self {
        let arena = Arena::enter().await;
        let root = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let founder = free_address();
        let mut processes = Vec::new();
        for number in 1..=3 {
            let name = format!("n{number}");
            let (cluster, join) = match number {
                1 => (founder, None),
                _ => (free_address(), Some(founder)),
            };
            let role = Role {
                dir: root.path().join(&name),
                name,
                secret: "a-secret-of-sixteen-and-more".to_owned(),
                cluster,
                public: free_address(),
                join,
                durable,
                release: if number == 1 { 1 } else { 2 },
            };
            let mut process = Process { role, child: None };
            process.start();
            processes.push(process);
        }
        let http = reqwest::Client::builder().no_proxy().timeout(PATIENCE / 6).build().unwrap();
        let group = Self { processes, http, _root: root, _arena: arena };
        for node in 0..3 {
            let mut talk = Talk::new(&group, format!("ready-{node}"));
            talk.say(node, "hi").await;
            talk.hears(&["echo: hi"]).await;
        }
        group
    }

    fn dir(&self) -> &Path {
        &self.processes[0].role.dir
    }

    async fn goes(&mut self, away: Away) {
        match away {
            Away::Crash => self.processes[0].kill(),
            Away::Stop => self.processes[0].stop().await,
            Away::Freeze => {
                self.processes[0].signal(Signal::STOP);
                // When it wakes its session has ended, and its work is done.
                tokio::time::sleep(WORKS).await;
            }
            Away::Settle => tokio::time::sleep(SETTLE).await,
        }
    }

    async fn comes_back(&mut self, away: Away) {
        match away {
            Away::Crash | Away::Stop => self.processes[0].start(),
            Away::Freeze => self.processes[0].signal(Signal::CONT),
            Away::Settle => {}
        }
    }
}

/// One chat, and how much of it was heard.
struct Talk {
    chat: String,
    bases: Vec<String>,
    http: reqwest::Client,
    said: usize,
    heard: Vec<String>,
}

impl Talk {
    fn new(group: &Group, chat: String) -> Self {
        let base = |process: &Process| format!("http://{}/webhooks/web", process.role.public);
        let bases = group.processes.iter().map(base).collect();
        Self { chat, bases, http: group.http.clone(), said: 0, heard: Vec::new() }
    }

    /// Says something at a node, until that has taken it.
    async fn say(&mut self, node: usize, text: &str) {
        self.said += 1;
        let id = format!("{}-{}", self.chat, self.said);
        let message = json!({ "id": id, "chat": self.chat, "text": text });
        let until = Instant::now() + PATIENCE;
        loop {
            let sent = self.http.post(&self.bases[node]).json(&message).send().await;
            if sent.as_ref().is_ok_and(|answer| answer.status() == StatusCode::OK) {
                return;
            }
            assert!(Instant::now() < until, "{}: {text:?} is not taken: {sent:?}", self.chat);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// All that was said to it, as a living node lists it.
    async fn listed(&self) -> Option<Vec<String>> {
        let url = format!("{}/replies?chat={}", self.bases[1], self.chat);
        let answer = self.http.get(url).send().await.ok()?;
        let replies: Vec<Value> = answer.json().await.ok()?;
        Some(replies.iter().map(|reply| reply["text"].as_str().unwrap().to_owned()).collect())
    }

    /// Hears these next, and has heard nothing else.
    async fn hears(&mut self, texts: &[&str]) {
        self.heard.extend(texts.iter().map(|text| (*text).to_owned()));
        let until = Instant::now() + PATIENCE;
        let mut last = None;
        while Instant::now() < until {
            let now = self.listed().await;
            if now.as_ref().is_some_and(|now| now.len() >= self.heard.len()) {
                assert_eq!(now.unwrap(), self.heard, "{}", self.chat);
                return;
            }
            last = now.or(last);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{}: heard {last:?} and not {:?}", self.chat, self.heard);
    }
}

/// What a user says (`>`) and hears, line by line.
type Lines = &'static [&'static str];

/// One kind of conversation: at the first replica, at another after it went away, and at the first
/// again.
struct Row {
    name: &'static str,
    first: Lines,
    then: Lines,
    back: Lines,
}

const fn row(name: &'static str, first: Lines, then: Lines, back: Lines) -> Row {
    Row { name, first, then, back }
}

/// What does not depend on how the replica goes away.
const ROWS: &[Row] = &[
    // C1, C2, C5: parked on the first question of its step, stored before it was asked; and the copy
    // that the first replica still has is dropped.
    row(
        "c1-first",
        &[">order", "What?"],
        &[">tea", "How many?"],
        &[">3", "3 × tea", ">x", "echo: x"],
    ),
    // C1, C11: parked on a later question the step runs again, and the wait begins anew.
    row(
        "c1-later",
        &[">pair", "first?", ">1", "second?"],
        &[">2", "first?", ">one", "second?", "one and no second"],
        &[">x", "echo: x"],
    ),
    // C6: forwarded, though not persistent; and changed in the other release.
    row("c6-forwarded", &[">forwarded", "What?"], &[">tea", "How many?"], &[">3", "3 × tea"]),
    row("c6-changed", &[">changed", "What?"], &[">tea", NOTICE], &[">x", "echo: x"]),
    // C7: one piece leaves a note.
    row("c7-note", &[">talk", "first?", ">1", "second?"], &[">2", NOTICE], &[">x", "echo: x"]),
    // C12: a new field has its default; a step that is gone leads to the fallback.
    row(
        "c12-field",
        &[">profile", "Name?", ">Ann", "Age?"],
        &[">30", "Ann, 30, no color"],
        &[">x", "echo: x"],
    ),
    row("c12-gone", &[">gone", "What?", ">tea", "Extra?"], &[">no", NOTICE], &[">x", "echo: x"]),
];

/// C8 and C10: a step cut short keeps its answer, and says nothing afterwards. With durability the
/// answer comes again by itself; without, the next message wakes the step.
fn cut_short(away: Away, durable: bool) -> Row {
    let then: Lines = match durable {
        true => &["second?", ">2", "long+2"],
        false => &[">2", "second?", "long+2"],
    };
    let late: Lines = match durable {
        true => &["second?", ">2", "late+2"],
        false => &[">2", "second?", "late+2"],
    };
    match away {
        // Its work ends while it is frozen: it goes on as soon as it may.
        Away::Freeze => {
            row("c10-late", &[">work", "first?", ">late", "!"], late, &[">x", "echo: x"])
        }
        _ => row("c8-cut", &[">work", "first?", ">long", "!"], then, &[">x", "echo: x"]),
    }
}

/// C9: a message that always fails becomes a dead letter, wherever it is tried, and the chat goes on.
const POISON: Row = row("c9-poison", &[">poison"], &[">x", "echo: x"], &[">y", "echo: y"]);

/// Speaks some lines at a node; `!` waits until the work of the chat has begun.
async fn speak(talk: &mut Talk, dir: &Path, node: usize, lines: Lines) {
    let mut hears = Vec::new();
    for line in lines {
        match line.strip_prefix('>') {
            Some(text) => {
                if !hears.is_empty() {
                    talk.hears(&std::mem::take(&mut hears)).await;
                }
                talk.say(node, text).await;
            }
            None if *line == "!" => {
                let begun = replica::begun(dir, &talk.chat);
                let until = Instant::now() + PATIENCE;
                while !begun.exists() {
                    assert!(Instant::now() < until, "{}: its work does not begin", talk.chat);
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
            None => hears.push(*line),
        }
    }
    talk.hears(&hears).await;
}

async fn table(durable: bool) {
    let mut group = Group::start(durable).await;
    for away in [Away::Settle, Away::Freeze, Away::Stop, Away::Crash] {
        let mut talks = Vec::new();
        let cut = cut_short(away, durable);
        let poison = durable.then_some(&POISON);
        for row in ROWS.iter().chain(poison).chain([&cut]) {
            let mut talk = Talk::new(&group, format!("{}-{away:?}", row.name));
            speak(&mut talk, group.dir(), 0, row.first).await;
            talks.push((row, talk));
        }
        group.goes(away).await;
        // The step that was cut first: what comes of it by itself is next in its chat.
        for (row, talk) in talks.iter_mut().rev() {
            speak(talk, group.dir(), 1, row.then).await;
        }
        group.comes_back(away).await;
        for (row, talk) in &mut talks {
            speak(talk, group.dir(), 0, row.back).await;
        }
        println!("{away:?}, durable {durable}: {} conversations went on", talks.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c1_to_c12_conversations_change_hands_between_processes_with_durability() {
    table(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c1_to_c12_conversations_change_hands_between_processes_without_durability() {
    table(false).await;
}
