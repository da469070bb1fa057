//! Certain death (SPEC E6): what the parent of a process knows, the group knows at once. Leases are a
//! minute here, so whatever passes on within seconds did not wait for one.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use reqwest::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::api::{Api, Request};
use crate::support::cluster::Arena;
use crate::{SOON, Up, alive, ask, botmesh, failure, free_range, signal_pid, wait_until};

/// Far below the lease of a minute, and enough for a busy machine.
const AT_ONCE: Duration = Duration::from_secs(20);

/// The sessions of the demo's replicas at a node: their incarnations, as another node sees them.
fn sessions(up: &Up, of: u64, seen_by: usize) -> Option<Vec<u64>> {
    let status = up.status(seen_by)?;
    let all = status["sessions"].as_array().expect("sessions are an array");
    let its = all.iter().filter(|session| session["node_id"] == of);
    Some(its.map(|session| session["incarnation"].as_u64().expect("an integer")).collect())
}

/// The one session of a node's bot.
fn session(up: &Up, of: u64, seen_by: usize) -> u64 {
    wait_until("the session of the node's bot", || sessions(up, of, seen_by)?.first().copied())
}

fn node_id(up: &Up, node: usize) -> u64 {
    wait_until("a status", || up.status(node)?["node_id"].as_u64())
}

/// Waits until a session is gone; how long that took.
fn wait_gone(up: &Up, of: u64, session: u64, seen_by: usize, within: Duration) -> Duration {
    let began = Instant::now();
    while sessions(up, of, seen_by).is_none_or(|all| all.contains(&session)) {
        assert!(began.elapsed() < within, "session {session} is still there after {within:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    began.elapsed()
}

/// What the demo POSTs its replies to. Until it is told to, it answers nothing.
struct Sink {
    address: String,
    /// The texts that came, in order, also those that were not answered.
    came: Arc<Mutex<Vec<String>>>,
    answers: Arc<AtomicBool>,
}

impl Sink {
    fn open() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let came = Arc::new(Mutex::new(Vec::new()));
        let answers = Arc::new(AtomicBool::new(false));
        let shared = (came.clone(), answers.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (came, answers) = shared.clone();
                std::thread::spawn(move || serve(stream, &came, &answers));
            }
        });
        Self { address, came, answers }
    }

    fn count(&self) -> usize {
        self.came.lock().unwrap().len()
    }
}

/// One connection: request after request.
fn serve(stream: std::net::TcpStream, came: &Mutex<Vec<String>>, answers: &AtomicBool) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let lower = line.to_ascii_lowercase();
            if let Some(value) = lower.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        let body: Value = serde_json::from_slice(&body).unwrap();
        came.lock().unwrap().push(body["text"].as_str().unwrap().to_owned());
        while !answers.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
        if (&stream).write_all(answer).is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn e6_what_a_killed_node_held_goes_on_at_once() {
    let _arena = Arena::enter().await;
    let sink = Sink::open();
    let url = format!("http://{}/", sink.address);
    let up = Up::start(&["--lease", "60s", "--no-restart", "--reply-url", &url]);
    let (id, demo) = (node_id(&up, 1), up.demo());
    // n1 handles the chat and is about to send the answer: it owns the chat's outbox.
    demo.post(0, "m1", "ann", "order").await;
    wait_until("n1's attempt to send", || (sink.count() > 0).then_some(()));
    let held = session(&up, id, 2);
    signal_pid(up.pid(1), Signal::KILL);
    wait_gone(&up, id, held, 2, AT_ONCE);
    // Another replica sends it, though n1 would have had a minute.
    let began = Instant::now();
    let before = sink.count();
    sink.answers.store(true, Ordering::Relaxed);
    demo.post(1, "m2", "ann", "tea").await;
    wait_until("the answers of another node", || (sink.count() > before).then_some(()));
    assert_eq!(demo.answer_to(2, "m2", "ann", AT_ONCE).await.text, "How many?");
    let last = || sink.came.lock().unwrap().last().cloned();
    wait_until("the last answer", || (last()? == "How many?").then_some(()));
    assert!(began.elapsed() < AT_ONCE);
}

#[tokio::test(flavor = "multi_thread")]
async fn n1_no_supervise_leaves_a_dead_nodes_session_to_its_lease() {
    let _arena = Arena::enter().await;
    let up = Up::start(&["--lease", "6s", "--no-restart", "--no-supervise"]);
    let id = node_id(&up, 1);
    let held = session(&up, id, 2);
    signal_pid(up.pid(1), Signal::KILL);
    // It was renewed at most a third of the lease before.
    let took = wait_gone(&up, id, held, 2, SOON);
    assert!(took > Duration::from_secs(3), "nobody knew, and yet it ended after {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn e6_the_next_process_on_a_directory_ends_the_dead_ones_session_and_no_other() {
    let _arena = Arena::enter().await;
    let up = Up::start(&["--lease", "60s", "--no-supervise"]);
    let (id, killed) = (node_id(&up, 1), up.pid(1));
    let held = session(&up, id, 2);
    // A program elsewhere has a session that it opened through n1.
    let bases = (1..=3).map(|node| format!("http://{}", up.cluster(node))).collect();
    let api = Api::new(bases, up.secret());
    let open = Request::new(Method::POST, "/v1/shop/sessions")
        .body(json!({ "lease_ms": 120_000 }))
        .key("open");
    let program = api.call(0, &open).await.answer().number("session");

    signal_pid(killed, Signal::KILL);
    wait_until("another process of n1", || (up.pid(1) != killed).then_some(()));
    wait_gone(&up, id, held, 2, SOON);
    let renew = Request::new(Method::POST, format!("/v1/shop/sessions/{program}/renew"));
    let renewed = api.call(1, &renew.body(json!({})).key("renew")).await.answer();
    assert_eq!(renewed.status, 200, "the program lives: {}", renewed.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn e6_a_hanging_node_is_killed_and_its_session_ends_where_asked_for() {
    let _arena = Arena::enter().await;
    let up = Up::start(&["--lease", "60s", "--hang-kill", "2s"]);
    let (id, frozen) = (node_id(&up, 1), up.pid(1));
    let held = session(&up, id, 2);
    signal_pid(frozen, Signal::STOP);
    wait_gone(&up, id, held, 2, AT_ONCE);
    wait_until("the end of the frozen process", || (!alive(frozen)).then_some(()));
    wait_until("another process of n1", || (up.pid(1) != frozen).then_some(()));
}

/// `botmesh supervise` around a fourth node.
struct Supervised {
    child: Child,
    said: Arc<Mutex<Vec<String>>>,
}

impl Supervised {
    /// `command` gets the arguments of a node that joins the group.
    fn start(
        up: &Up,
        (public, cluster): (u16, u16),
        command: impl Fn(&str) -> Vec<String>,
    ) -> Self {
        let join = [
            env!("CARGO_BIN_EXE_botmesh").to_owned(),
            "join".to_owned(),
            up.cluster(1),
            "--name=n4".to_owned(),
            format!("--dir={}", up.data(4, "").display()),
            format!("--public=127.0.0.1:{public}"),
            format!("--cluster=127.0.0.1:{cluster}"),
            format!("--secret-file={}", up.root.path().join("data/secret").display()),
            "--lease=60s".to_owned(),
        ];
        let mut child = botmesh()
            .args(["supervise", "--no-restart", "--"])
            .args(command(&join.join(" ")))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let out: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for out in out {
            let said = said.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    said.lock().unwrap().push(line);
                }
            });
        }
        Self { child, said }
    }

    fn node_id(&self, up: &Up) -> u64 {
        wait_until("n4 in the group", || {
            let status = up.status(2)?;
            let nodes = status["nodes"].as_array()?.clone();
            nodes.iter().find(|node| node["name"] == "n4")?["id"].as_u64()
        })
    }

    fn wait_ended(&mut self) -> ExitStatus {
        wait_until("the end of supervise", || self.child.try_wait().unwrap())
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        // A shell does not die with its parent as a bot does.
        let children = children(self.child.id());
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in children.into_iter().filter(|pid| alive(*pid)) {
            signal_pid(pid, Signal::KILL);
        }
        if std::thread::panicking() {
            eprintln!("supervise and its child said: {:#?}", self.said.lock().unwrap());
        }
    }
}

fn children(pid: u32) -> Vec<u32> {
    let path = format!("/proc/{pid}/task/{pid}/children");
    let list = fs::read_to_string(path).unwrap_or_default();
    list.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn e6_supervise_reports_the_death_of_its_command_and_of_no_other_process() {
    let _arena = Arena::enter().await;
    let up = Up::start(&["--lease", "60s"]);

    // The command is the bot.
    let words = |join: &str| join.split(' ').map(str::to_owned).collect();
    let ports = free_range(1);
    let mut direct = Supervised::start(&up, ports, words);
    let id = direct.node_id(&up);
    let held = session(&up, id, 2);
    let bot = up.pid(4);
    assert_eq!(children(direct.child.id()), [bot]);
    signal_pid(bot, Signal::KILL);
    wait_gone(&up, id, held, 2, AT_ONCE);
    assert_eq!(direct.wait_ended().code(), Some(128 + 9), "the command's own end");

    // The command is a shell, whose death says nothing about the bot. n4 comes back under its id.
    let behind = |join: &str| vec!["sh".to_owned(), "-c".to_owned(), format!("{join} & wait")];
    let mut shell = Supervised::start(&up, ports, behind);
    let held = wait_until("another session of n4", || {
        sessions(&up, id, 2)?.into_iter().find(|session| *session != held)
    });
    wait_until("both sides to say so", || {
        let said = shell.said.lock().unwrap();
        let off = said.iter().filter(|line| line.contains("death reports are off")).count();
        (off >= 2).then_some(())
    });
    let [pid] = children(shell.child.id())[..] else { panic!("supervise has one child") };
    signal_pid(pid, Signal::KILL);
    shell.wait_ended();
    assert_eq!(sessions(&up, id, 2), Some(vec![held]), "nobody was certain");
}

#[test]
fn l3_supervise_passes_output_and_exit_code_through() {
    let output = ask(&["supervise", "--no-restart", "--", "sh", "-c", "echo out; exit 7"]);
    assert_eq!(output.stdout, b"out\n");
    let (code, said) = failure(&output);
    assert!(code == 7 && said.contains("exit status: 7"), "{code} {said}");
    let (code, said) = failure(&ask(&["supervise", "--no-restart", "--", "/no/such/program"]));
    assert!(code == 1 && said.contains("/no/such/program"), "{code} {said}");
    assert_eq!(failure(&ask(&["supervise"])).0, 2, "it needs a command");
}

#[test]
fn e6_as_the_first_process_it_buries_orphans_and_passes_signals_on() {
    let isolate = ["--pid", "--fork", "--kill-child"];
    let allowed = Command::new("unshare").args(isolate).arg("true").status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: this machine lets nobody make a PID namespace");
        return;
    }
    let script = "(sleep 987654 & ) ; trap 'exit 9' TERM; while :; do sleep 0.05; done";
    let mut isolated = Command::new("unshare")
        .args(isolate)
        .arg(env!("CARGO_BIN_EXE_botmesh"))
        .args(["supervise", "--", "sh", "-c", script])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let supervisor = wait_until("the supervisor", || {
        let pid = children(isolated.id()).first().copied()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (name.trim() == "botmesh").then_some(pid)
    });
    let orphan = wait_until("an orphan that it adopted", || {
        children(supervisor).into_iter().find(|pid| {
            // The shell has the number in its command line, too.
            let command = fs::read_to_string(format!("/proc/{pid}/cmdline"));
            command.is_ok_and(|command| command == "sleep\0987654\0")
        })
    });
    signal_pid(orphan, Signal::KILL);
    wait_until("its burial", || {
        // A zombie would still be there.
        (!std::path::Path::new(&format!("/proc/{orphan}")).exists()).then_some(())
    });
    signal_pid(supervisor, Signal::TERM);
    let status = wait_until("the end", || isolated.try_wait().unwrap());
    assert_eq!(status.code(), Some(9), "the command's own answer to the signal");
}
