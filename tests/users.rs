//! Two hundred users in one flow each, while its processes die: what the user sees, judged from the
//! provider's side (issue *the conversation runtime*).
//!
//! A user answers six questions through whichever node, sends two answers at once now and then,
//! and lets one question wait past its time. Meanwhile, every few seconds, one of the three
//! processes of `up` is killed or stopped; its parent starts it again. `TEST_USERS=1000` plays
//! more of them; the figures are printed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use rand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::sync::watch;

use support::api::Api;
use support::cluster::Arena;
use support::demo::Demo;

const SECOND: Duration = Duration::from_secs(1);
/// How long a user waits for any one question. Far more than a lease and an election.
const PATIENCE: Duration = Duration::from_secs(90);
/// Between two deaths.
const CALM: std::ops::Range<u64> = 1_500..3_500;

/// What the provider got for one chat, in the order of first receipt.
#[derive(Clone, Debug, Default)]
struct Heard {
    /// (reply's id, the message it answers, text)
    replies: Vec<(String, String, String)>,
}

#[derive(Default)]
struct Provider {
    chats: Mutex<BTreeMap<String, watch::Sender<Heard>>>,
    /// Deliveries of a reply that had been delivered before.
    again: AtomicU64,
}

impl Provider {
    fn chat(&self, chat: &str) -> watch::Receiver<Heard> {
        let mut chats = self.chats.lock().unwrap();
        chats.entry(chat.to_owned()).or_default().subscribe()
    }

    async fn take(State(provider): State<Arc<Self>>, Json(reply): Json<Value>) {
        let text = |name: &str| reply[name].as_str().unwrap().to_owned();
        let (id, chat) = (text("id"), text("chat"));
        let mut chats = provider.chats.lock().unwrap();
        chats.entry(chat).or_default().send_modify(|heard| {
            if heard.replies.iter().any(|(known, ..)| *known == id) {
                provider.again.fetch_add(1, SeqCst);
            } else {
                heard.replies.push((id, text("in_reply_to"), text("text")));
            }
        });
    }
}

/// The survey bot under `up`. Dropping it ends everything it started.
struct Up {
    child: Child,
    root: tempfile::TempDir,
    public: u16,
}

/// First ports of two ranges that are free now.
fn free_ranges() -> (u16, u16) {
    let free = |base: u16| (base..base + 3).all(|p| TcpListener::bind(("127.0.0.1", p)).is_ok());
    loop {
        let base = rand::rng().random_range(14_000..31_000);
        if free(base) && free(base + 500) {
            return (base, base + 500);
        }
    }
}

impl Up {
    fn start(reply_url: &str) -> Self {
        // target/<profile>/deps/users-… → target/<profile>/examples/survey
        let own = std::env::current_exe().unwrap();
        let survey = own.parent().unwrap().parent().unwrap().join("examples/survey");
        let root =
            tempfile::Builder::new().prefix("users-").tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let root = root.unwrap();
        let (public, cluster) = free_ranges();
        let mut child = Command::new(&survey)
            .args(["up", "--lease", "3s", "--reply-url", reply_url])
            .arg("--dir")
            .arg(root.path().join("data"))
            .args(["--public", &format!("127.0.0.1:{public}")])
            .args(["--cluster", &format!("127.0.0.1:{cluster}")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{}: {error}; `cargo build --examples` makes it", survey.display())
            });
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(
            lines.by_ref().any(|line| line.unwrap() == "ready"),
            "up ended before it was ready"
        );
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, root, public }
    }

    fn file(&self, node: usize, name: &str) -> PathBuf {
        self.root.path().join(format!("data/n{node}/{name}"))
    }

    fn pid(&self, node: usize) -> Option<Pid> {
        let text = std::fs::read_to_string(self.file(node, "pid")).ok()?;
        Pid::from_raw(text.trim().parse().ok()?)
    }

    fn api(&self) -> Api {
        let bases = (0..3).map(|node| format!("http://127.0.0.1:{}", self.public + node));
        // The public listeners ask for no secret.
        Api::new(bases.collect(), "")
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for node in 1..=3 {
                let log = std::fs::read_to_string(self.file(node, "output.log"));
                let log = log.unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(40).collect();
                for line in tail.into_iter().rev() {
                    eprintln!("n{node}: {line}");
                }
            }
        }
        let pid = Pid::from_child(&self.child);
        // It may have ended already.
        let _ = kill_process(pid, Signal::TERM);
        let until = Instant::now() + 20 * SECOND;
        while Instant::now() < until {
            if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // Its nodes are killed with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills or stops one process after the other, only ever while all three run.
async fn unrest(up: Arc<Up>, over: Arc<AtomicBool>) -> (u32, u32) {
    let (mut killed, mut stopped) = (0, 0);
    let ready = |node: usize| {
        let url =
            format!("http://127.0.0.1:{}/webhooks/demo/replies?chat=x", up.public + node as u16);
        async move { reqwest::get(url).await.is_ok_and(|answer| answer.status().is_success()) }
    };
    while !over.load(SeqCst) {
        let calm = rand::rng().random_range(CALM);
        tokio::time::sleep(Duration::from_millis(calm)).await;
        if !(ready(0).await && ready(1).await && ready(2).await) {
            continue;
        }
        let node = rand::rng().random_range(1..=3);
        let Some(pid) = up.pid(node) else { continue };
        let hard = rand::rng().random_bool(0.6);
        if kill_process(pid, if hard { Signal::KILL } else { Signal::TERM }).is_ok() {
            *(if hard { &mut killed } else { &mut stopped }) += 1;
        }
    }
    (killed, stopped)
}

struct User {
    number: usize,
    demo: Demo,
    heard: watch::Receiver<Heard>,
    sent: usize,
    /// How long each question took, from the answer before it.
    waits: Vec<Duration>,
}

impl User {
    fn chat(&self) -> String {
        format!("user-{}", self.number)
    }

    /// Says something through any node, until one has taken it.
    async fn say(&mut self, text: &str) {
        self.sent += 1;
        let id = format!("u{}-{}", self.number, self.sent);
        let node = rand::rng().random_range(0..3);
        self.demo.post(node, &id, &self.chat(), text).await;
    }

    /// Waits until the provider has got a text that begins so.
    async fn hears(&mut self, beginning: &str) -> String {
        let began = Instant::now();
        let text = self.hears_within(beginning, PATIENCE).await;
        self.waits.push(began.elapsed());
        text.unwrap_or_else(|| {
            let (chat, so_far) = (self.chat(), &self.heard.borrow().replies);
            panic!("{chat} waited {PATIENCE:?} for {beginning:?}; it has {so_far:?}")
        })
    }

    async fn hears_within(&mut self, beginning: &str, within: Duration) -> Option<String> {
        let found = |heard: &Heard| {
            heard
                .replies
                .iter()
                .map(|(_, _, text)| text)
                .find(|t| t.starts_with(beginning))
                .cloned()
        };
        let waited =
            tokio::time::timeout(within, self.heard.wait_for(|heard| found(heard).is_some()));
        waited.await.ok().and_then(|heard| found(&heard.unwrap()))
    }

    async fn thinks(&self) {
        let ms = rand::rng().random_range(0..1_200);
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    /// The whole survey. Returns what the summary has to be.
    async fn plays(mut self) -> (Self, String) {
        let (n, age) = (self.number, 20 + self.number % 60);
        let (name, city, color) = (format!("name{n}"), format!("city{n}"), format!("color{n}"));
        let pet = format!("pet{n}");
        self.say("survey").await;
        self.hears("1.").await;
        self.thinks().await;
        if n % 3 == 0 {
            // Both at once: the second is the answer to a question not asked yet.
            self.say(&name).await;
            self.say(&city).await;
        } else {
            self.say(&name).await;
            self.hears("2.").await;
            self.thinks().await;
            self.say(&city).await;
        }
        self.hears("3.").await;
        self.thinks().await;
        self.say(&age.to_string()).await;
        self.hears("4.").await;
        self.thinks().await;
        self.say(&color).await;
        self.hears("5.").await;
        if n % 4 == 0 {
            // Past its time. The timer dies with the replica that asked (SPEC C11), and then the
            // answer is simply late.
            self.hears_within("5. Take", 6 * SECOND).await;
        }
        self.thinks().await;
        self.say(&pet).await;
        self.hears("6.").await;
        self.thinks().await;
        self.say("yes").await;
        let summary = format!("Summary: {name}, {city}, {age}, {color}, {pet}.");
        assert_eq!(self.hears("Summary").await, summary, "user {n}");
        (self, summary)
    }
}

/// What is wrong with what one user got: each question once and in order, the summary last.
fn faults(chat: &str, heard: &Heard, summary: &str) -> Vec<String> {
    let texts: Vec<&str> = heard.replies.iter().map(|(_, _, text)| text.as_str()).collect();
    let mut faults = Vec::new();
    let mut expected = vec![
        "1. What is your name?",
        "2. Where do you live?",
        "3. How old are you?",
        "4. Which color?",
        "5. Which pet?",
        "6. Is that all right? (yes/no)",
        summary,
    ];
    // A user who thought too long, or whose answer met a dead process, is asked in other words.
    if texts.contains(&"5. Take your time: which pet?") {
        expected.insert(5, "5. Take your time: which pet?");
    }
    if texts != expected {
        faults.push(format!("{chat} was told {texts:?}"));
    }
    let ids: BTreeSet<&String> = heard.replies.iter().map(|(id, ..)| id).collect();
    if ids.len() != heard.replies.len() {
        faults.push(format!("{chat}: an id twice in {:?}", heard.replies));
    }
    faults
}

#[tokio::test(flavor = "multi_thread")]
async fn g2_two_hundred_users_notice_no_death() {
    let _arena = Arena::enter().await;
    let users: usize =
        std::env::var("TEST_USERS").map_or(200, |users| users.parse().expect("a number"));
    let provider = Arc::new(Provider::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/replies", listener.local_addr().unwrap());
    let app = Router::new().route("/replies", post(Provider::take)).with_state(provider.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let up = tokio::task::spawn_blocking(move || Up::start(&url)).await.unwrap();
    let up = Arc::new(up);

    let over = Arc::new(AtomicBool::new(false));
    let unrest = tokio::spawn(unrest(up.clone(), over.clone()));
    let began = Instant::now();
    let demo = Demo::new(up.api());
    let mut playing = tokio::task::JoinSet::new();
    for number in 0..users {
        let heard = provider.chat(&format!("user-{number}"));
        let user = User { number, demo: demo.clone(), heard, sent: 0, waits: Vec::new() };
        playing.spawn(user.plays());
    }
    let mut wrong = Vec::new();
    let (mut messages, mut replies, mut waits) = (0, 0, Vec::new());
    while let Some(played) = playing.join_next().await {
        let (user, summary) = played.unwrap();
        let heard = user.heard.borrow().clone();
        wrong.extend(faults(&user.chat(), &heard, &summary));
        messages += user.sent;
        replies += heard.replies.len();
        waits.extend(user.waits);
    }
    let took = began.elapsed();
    over.store(true, SeqCst);
    let (killed, stopped) = unrest.await.unwrap();
    waits.sort_unstable();
    let at = |part: f64| waits[((waits.len() - 1) as f64 * part) as usize];
    println!(
        "{users} users, {messages} messages, {replies} replies in {took:.1?}; {killed} processes \
         killed, {stopped} stopped; a question came within {:.0?} (p50), {:.0?} (p99), {:.0?} \
         (max); {} deliveries were repeated under the same id; faults: {}",
        at(0.5),
        at(0.99),
        at(1.0),
        provider.again.load(SeqCst),
        wrong.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(killed > 0, "nothing was killed: the test showed nothing");
}
