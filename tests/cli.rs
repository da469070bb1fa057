//! The command line over real processes: what `up` starts, keeps and leaves behind, and what each
//! verb says when it cannot do what it was asked.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

mod cli {
    mod bench;
    mod supervise;
}

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rand::Rng;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use support::api::Api;
use support::cluster::Arena;
use support::demo::Demo;

const SOON: Duration = Duration::from_secs(30);

fn botmesh() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_botmesh"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BOTMESH_")) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Runs a verb that ends by itself.
fn ask(arguments: &[&str]) -> Output {
    botmesh().args(arguments).output().unwrap()
}

/// The one line it failed with, and the code.
fn failure(output: &Output) -> (i32, String) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().expect("it ended by itself"), text)
}

/// First ports of two ranges that are free now, below those of outgoing connections.
fn free_range(count: u16) -> (u16, u16) {
    let free =
        |base: u16| (base..base + count).all(|p| TcpListener::bind(("127.0.0.1", p)).is_ok());
    loop {
        let base = rand::rng().random_range(14_000..31_000);
        if free(base) && free(base + 500) {
            return (base, base + 500);
        }
    }
}

/// A running `botmesh up`.
struct Up {
    child: Child,
    root: tempfile::TempDir,
    ports: (u16, u16),
    lines: mpsc::Receiver<String>,
    printed: Vec<String>,
}

impl Up {
    fn prepare() -> (tempfile::TempDir, (u16, u16)) {
        let root =
            tempfile::Builder::new().prefix("up-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        (root, free_range(3))
    }

    fn spawn(root: tempfile::TempDir, ports: (u16, u16), more: &[&str]) -> Self {
        let mut child = botmesh()
            .arg("up")
            .arg("--dir")
            .arg(root.path().join("data"))
            .args(["--public", &format!("127.0.0.1:{}", ports.0)])
            .args(["--cluster", &format!("127.0.0.1:{}", ports.1)])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let (sender, lines) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, root, ports, lines, printed: Vec::new() }
    }

    /// Starts and waits for `ready`.
    fn start(more: &[&str]) -> Self {
        let (root, ports) = Self::prepare();
        let mut up = Self::spawn(root, ports, more);
        up.wait_for("ready");
        up
    }

    /// Starts again on the same data.
    fn again(self, more: &[&str]) -> Self {
        let (root, ports) = self.end();
        let mut up = Self::spawn(root, ports, more);
        up.wait_for("ready");
        up
    }

    /// What is left once the process has ended.
    fn end(mut self) -> (tempfile::TempDir, (u16, u16)) {
        self.wait_ended();
        let empty = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        (std::mem::replace(&mut self.root, empty), self.ports)
    }

    /// Waits for a line of its own.
    fn wait_for(&mut self, wanted: &str) {
        let until = Instant::now() + SOON;
        while let Ok(line) =
            self.lines.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            self.printed.push(line.clone());
            if line == wanted {
                return;
            }
        }
        let logs: Vec<String> = (1..=3).map(|i| self.log(i)).collect();
        panic!(
            "no line {wanted:?}; it printed {:?}\nlogs:\n{}",
            self.printed,
            logs.join("\n---\n")
        );
    }

    fn data(&self, node: usize, file: &str) -> PathBuf {
        self.root.path().join(format!("data/n{node}/{file}"))
    }

    fn log(&self, node: usize) -> String {
        fs::read_to_string(self.data(node, "output.log")).unwrap_or_default()
    }

    /// The bot process of a node, once it has written its pid.
    fn pid(&self, node: usize) -> u32 {
        let path = self.data(node, "pid");
        wait_until("a pid file", || {
            fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok())
        })
    }

    fn pids(&self) -> Vec<u32> {
        (1..=3).map(|node| self.pid(node)).collect()
    }

    fn signal(&self, signal: Signal) {
        signal_pid(self.child.id(), signal);
    }

    fn wait_ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_until("the end of up", || child.try_wait().unwrap())
    }

    fn secret(&self) -> String {
        fs::read_to_string(self.root.path().join("data/secret")).unwrap().trim().to_owned()
    }

    fn demo(&self) -> Demo {
        let base = |i: u16| format!("http://127.0.0.1:{}", self.ports.0 + i);
        Demo::new(Api::new((0..3).map(base).collect(), ""))
    }

    fn cluster(&self, node: usize) -> String {
        format!("127.0.0.1:{}", self.ports.1 + node as u16 - 1)
    }

    /// Runs a verb against a node, with the secret of the data directory.
    fn ask(&self, node: usize, verb: &[&str]) -> Output {
        let dir = self.root.path().join("data");
        let cluster = self.cluster(node);
        let mut arguments = verb.to_vec();
        arguments.extend(["--cluster", &cluster, "--dir", dir.to_str().unwrap()]);
        ask(&arguments)
    }

    fn status(&self, node: usize) -> Option<Value> {
        let output = self.ask(node, &["status", "--json"]);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // Its nodes end with it; that they do is what one of the tests proves.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            self.printed.extend(self.lines.try_iter());
            eprintln!("up printed: {:#?}", self.printed);
            let last = |log: String| log.lines().rev().take(20).collect::<Vec<_>>().join("\n");
            (1..=3).for_each(|i| eprintln!("n{i}, latest first:\n{}", last(self.log(i))));
        }
    }
}

fn signal_pid(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).unwrap();
    kill_process(pid, signal).expect("the process is there");
}

fn alive(pid: u32) -> bool {
    // A zombie has ended; it only waits to be asked how.
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().starts_with(" Z"))
}

fn wait_until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + SOON;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "{what} did not come within {SOON:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

// ------------------------------------------------------------------------------------------- up

#[tokio::test(flavor = "multi_thread")]
async fn l1_up_forms_a_group_and_a_second_up_continues_from_its_data() {
    let _arena = Arena::enter().await;
    let up = Up::start(&[]);
    let status = up.status(2).expect("n2 answers");
    assert_eq!(status["nodes"].as_array().unwrap().len(), 3);
    let cluster_id = status["cluster_id"].clone();
    let secret = up.secret();

    // Every node serves: the page of each, and a message through each.
    for node in 0..3 {
        let page = reqwest::get(format!("http://127.0.0.1:{}/", up.ports.0 + node)).await.unwrap();
        assert!(page.status().is_success(), "the page of n{}", node + 1);
        assert!(page.text().await.unwrap().contains("<html"), "a page");
    }
    up.demo().post(0, "m1", "ann", "order").await;
    up.demo().answer_to(1, "m1", "ann", SOON).await;

    // Ctrl-C: exit code 0, no process, no pid file, no port left.
    let pids = up.pids();
    let ports = up.ports;
    let mut up = up;
    up.signal(Signal::INT);
    assert_eq!(up.wait_ended().code(), Some(0));
    for (node, pid) in (1..=3).zip(pids) {
        assert!(!alive(pid), "n{node} is gone when up is");
        assert!(!up.data(node, "pid").exists(), "so is its pid file");
    }
    for port in (ports.0..ports.0 + 3).chain(ports.1..ports.1 + 3) {
        TcpListener::bind(("127.0.0.1", port)).expect("the port is free");
    }

    // The second one: the same group, the same secret, the conversation where it was.
    let up = up.again(&[]);
    assert_eq!(up.status(1).expect("n1 answers")["cluster_id"], cluster_id);
    assert_eq!(up.secret(), secret);
    let demo = up.demo();
    demo.post(2, "m2", "ann", "tea").await;
    assert_eq!(demo.answer_to(0, "m2", "ann", SOON).await.text, "How many?");
    assert_eq!(demo.replies(1, "ann").await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a5_an_order_survives_kill_nine_of_its_node_which_then_rejoins() {
    let _arena = Arena::enter().await;
    let up = Up::start(&["--lease", "1s"]);
    let demo = up.demo();
    demo.post(0, "m1", "bob", "order").await;
    assert_eq!(demo.answer_to(0, "m1", "bob", SOON).await.text, "What would you like?");
    demo.post(0, "m2", "bob", "tea").await;
    assert_eq!(demo.answer_to(0, "m2", "bob", SOON).await.text, "How many?");

    // The node that handled both answers dies; the next one goes to a survivor.
    let killed = up.pid(1);
    signal_pid(killed, Signal::KILL);
    demo.post(2, "m3", "bob", "2").await;
    assert_eq!(demo.answer_to(2, "m3", "bob", SOON).await.text, "Where to?");

    // The supervisor starts it again: another process, the same member, caught up.
    wait_until("another process of n1", || (up.pid(1) != killed).then_some(()));
    let caught_up = || {
        let (one, two) = (up.status(1)?, up.status(2)?);
        // Asked of n1 itself: followers do not talk to each other while nothing happens.
        (one["node_id"] == 1 && one["applied"].as_u64() >= two["applied"].as_u64()).then_some(())
    };
    wait_until("n1 caught up", caught_up);
    demo.post(0, "m4", "bob", "12 High Street").await;
    assert_eq!(demo.answer_to(1, "m4", "bob", SOON).await.text, "Confirm? (yes/no)");
    demo.post(1, "m5", "bob", "yes").await;
    let end = demo.answer_to(0, "m5", "bob", SOON).await.text;
    assert!(["tea", "2", "12 High Street"].iter().all(|part| end.contains(part)), "{end}");
}

#[tokio::test(flavor = "multi_thread")]
async fn l1_kill_nine_of_all_at_once_loses_nothing_acknowledged() {
    let _arena = Arena::enter().await;
    let up = Up::start(&["--lease", "1s"]);
    let demo = up.demo();
    for i in 0..60 {
        assert!(!demo.post(i % 3, &format!("m{i}"), &format!("chat{}", i % 20), "hello").await);
    }
    let pids = up.pids();
    up.signal(Signal::KILL);
    for pid in pids {
        wait_until("the end of a node whose parent was killed", || (!alive(pid)).then_some(()));
    }
    let up = up.again(&["--lease", "1s"]);
    let demo = up.demo();
    for i in 0..60 {
        let (id, chat) = (format!("m{i}"), format!("chat{}", i % 20));
        assert!(demo.post(0, &id, &chat, "hello").await, "{id} was acknowledged before");
        assert_eq!(demo.answer_to(1, &id, &chat, SOON).await.text, "echo: hello");
    }
    for chat in 0..20 {
        assert_eq!(demo.replies(2, &format!("chat{chat}")).await.len(), 3, "one answer each");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn n1_no_restart_leaves_a_node_down_and_a_second_ctrl_c_kills() {
    let _arena = Arena::enter().await;
    let mut up = Up::start(&["--no-restart", "--no-supervise"]);
    signal_pid(up.pid(1), Signal::KILL);
    wait_until("the pid file to go", || (!up.data(1, "pid").exists()).then_some(()));
    let demo = up.demo();
    demo.post(1, "m1", "cy", "hello").await;
    assert_eq!(demo.answer_to(2, "m1", "cy", SOON).await.text, "echo: hello");
    assert!(!up.data(1, "pid").exists(), "it stays down");

    // A node that does not listen to SIGTERM: frozen.
    let (frozen, other) = (up.pid(2), up.pid(3));
    signal_pid(frozen, Signal::STOP);
    up.signal(Signal::INT);
    wait_until("n3 to end", || (!alive(other)).then_some(()));
    assert!(alive(frozen) && up.child.try_wait().unwrap().is_none(), "up waits for n2");
    up.signal(Signal::INT);
    assert_eq!(up.wait_ended().code(), Some(130));
    assert!(!alive(frozen));
}

#[tokio::test(flavor = "multi_thread")]
async fn a7_sigterm_ends_a_node_with_code_0_and_others_carry_on_before_its_lease() {
    let _arena = Arena::enter().await;
    let mut up = Up::start(&["--lease", "60s", "--no-restart"]);
    let demo = up.demo();
    demo.post(0, "m1", "dee", "order").await;
    demo.answer_to(0, "m1", "dee", SOON).await;
    // The node that handled the chat stops on request.
    signal_pid(up.pid(1), Signal::TERM);
    let began = Instant::now();
    demo.post(2, "m2", "dee", "tea").await;
    assert_eq!(demo.answer_to(2, "m2", "dee", SOON).await.text, "How many?");
    assert!(began.elapsed() < Duration::from_secs(20), "not after the lease of 60 s");
    wait_until("n1 to end", || (!up.data(1, "pid").exists()).then_some(()));
    let line = wait_until("the line about n1's end", || {
        up.printed.extend(up.lines.try_iter());
        up.printed.iter().find(|line| line.starts_with("n1 ended")).cloned()
    });
    assert!(line.contains("exit status: 0"), "{line}");
}

// ---------------------------------------------------------------------------- verbs on a group

#[tokio::test(flavor = "multi_thread")]
async fn k1_the_verbs_show_yield_and_leave() {
    let _arena = Arena::enter().await;
    let up = Up::start(&[]);
    let table = String::from_utf8(up.ask(1, &["status"]).stdout).unwrap();
    for part in ["NODE", "n1", "n2", "n3", "leader", "turns: 0 held"] {
        assert!(table.contains(part), "{part} in\n{table}");
    }

    let leader = up.status(1).unwrap()["leader"].clone();
    let yielded = up.ask(1, &["yield-leader"]);
    assert!(yielded.status.success(), "{:?}", failure(&yielded));
    wait_until("another leader", || {
        let now = up.status(1)?["leader"].clone();
        (now.is_u64() && now != leader).then_some(())
    });

    let unknown = failure(&up.ask(1, &["leave", "n9"]));
    assert!(unknown.0 == 2 && unknown.1.contains("n1, n2, n3"), "{unknown:?}");
    let left = up.ask(1, &["leave", "n3"]);
    assert!(left.status.success(), "{:?}", failure(&left));
    wait_until("two nodes", || (up.status(1)?["nodes"].as_array()?.len() == 2).then_some(()));

    // The wrong secret, and nobody there.
    let wrong = up.root.path().join("wrong");
    fs::write(&wrong, "0123456789abcdef0123456789abcdef").unwrap();
    let refused =
        ask(&["status", "--cluster", &up.cluster(1), "--secret-file", wrong.to_str().unwrap()]);
    let (code, text) = failure(&refused);
    assert!(code == 6 && text.contains("401") && text.contains("--secret-file"), "{code} {text}");
    let silent = up.root.path().join("data/secret");
    let nobody =
        ask(&["status", "--cluster", "127.0.0.1:1", "--secret-file", silent.to_str().unwrap()]);
    let (code, text) = failure(&nobody);
    assert!(code == 5 && text.contains("127.0.0.1:1"), "{code} {text}");
}

// -------------------------------------------------------------------------- what cannot be done

#[tokio::test(flavor = "multi_thread")]
async fn l1_a_port_already_taken_is_named_with_its_owner_before_anything_starts() {
    let _arena = Arena::enter().await;
    let (root, ports) = Up::prepare();
    let held = TcpListener::bind(("127.0.0.1", ports.1 + 2)).unwrap();
    let dir = root.path().join("data");
    let output = ask(&[
        "up",
        "--dir",
        dir.to_str().unwrap(),
        "--public",
        &format!("127.0.0.1:{}", ports.0),
        "--cluster",
        &format!("127.0.0.1:{}", ports.1),
    ]);
    let (code, text) = failure(&output);
    assert_eq!(code, 3, "{text}");
    for part in
        ["n3".to_owned(), format!("port {}", ports.1 + 2), format!("pid {}", std::process::id())]
    {
        assert!(text.contains(&part), "{part} in {text}");
    }
    assert!(!dir.join("n1").exists(), "nothing was started");
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn l1_a_second_up_on_one_directory_is_told_the_firsts_pid() {
    let _arena = Arena::enter().await;
    let up = Up::start(&["--nodes", "1"]);
    let (public, cluster) = free_range(1);
    let output = ask(&[
        "up",
        "--dir",
        up.root.path().join("data").to_str().unwrap(),
        "--public",
        &format!("127.0.0.1:{public}"),
        "--cluster",
        &format!("127.0.0.1:{cluster}"),
    ]);
    let (code, text) = failure(&output);
    assert!(code == 4 && text.contains(&format!("pid {}", up.child.id())), "{code} {text}");
}

#[test]
fn l4_configuration_errors_name_key_and_line_and_end_with_code_2() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("botmesh.toml");
    let run = |text: &str, more: &[&str]| {
        fs::write(&file, text).unwrap();
        let mut arguments = vec!["run", "--config", file.to_str().unwrap()];
        arguments.extend(more);
        failure(&ask(&arguments))
    };
    for (text, parts) in [
        ("name = \"n1\"\nleese = \"1s\"\n", ["line 2", "`leese`", "`lease`"]),
        ("\n\nlease = \"1\"\n", ["line 3", "`lease`", "\"15s\""]),
        ("name = \n", ["line 1", "TOML", "botmesh.toml"]),
    ] {
        let (code, said) = run(text, &[]);
        assert_eq!(code, 2, "{said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        assert_eq!(said.lines().count(), 1, "one readable line: {said}");
    }
    let (code, said) = run("", &["--bootstrap", "--join", "127.0.0.1:9"]);
    assert!(code == 2 && said.contains("--bootstrap") && said.contains("--join"), "{said}");
    let output = botmesh().args(["status"]).env("BOTMESH_LEESE", "1s").output().unwrap();
    let (code, said) = failure(&output);
    assert!(code == 2 && said.contains("BOTMESH_LEESE"), "{said}");
}

#[test]
fn n2_an_empty_directory_without_a_way_to_begin_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (public, cluster) = free_range(1);
    let secret = dir.path().join("secret");
    fs::write(&secret, "0123456789abcdef0123456789abcdef").unwrap();
    let output = ask(&[
        "run",
        "--name",
        "n1",
        "--dir",
        dir.path().join("n1").to_str().unwrap(),
        "--public",
        &format!("127.0.0.1:{public}"),
        "--cluster",
        &format!("127.0.0.1:{cluster}"),
        "--secret-file",
        secret.to_str().unwrap(),
    ]);
    let (code, said) = failure(&output);
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("--bootstrap") && said.contains("--join"), "{said}");
}

#[test]
fn l3_help_lists_verbs_settings_and_exit_codes() {
    let output = ask(&["--help"]);
    assert!(output.status.success());
    let mut text = String::new();
    output.stdout.as_slice().read_to_string(&mut text).unwrap();
    for part in [
        "up",
        "run",
        "supervise",
        "join",
        "leave",
        "yield-leader",
        "status",
        "lease",
        "130",
        "Exit codes",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    assert_eq!(failure(&ask(&["frobnicate"])).0, 2);
}
