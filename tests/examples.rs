//! The examples run, to their end, and say what they are there to show.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[allow(dead_code, unreachable_pub, reason = "shared with other tests, which use all of it")]
#[path = "support/bot_api.rs"]
mod bot_api;

/// Runs an example; what it printed.
fn run(name: &str) -> String {
    // target/<profile>/deps/examples-… → target/<profile>/examples/…
    let own = std::env::current_exe().unwrap();
    let program = own.parent().unwrap().parent().unwrap().join("examples").join(name);
    let mut child =
        Command::new(&program).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap_or_else(
            |error| panic!("{}: {error}; `cargo build --examples` makes it", program.display()),
        );
    let until = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            child.kill().unwrap();
            let said = child.wait_with_output().unwrap();
            panic!("{name} did not end; it said {}", String::from_utf8_lossy(&said.stdout));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{name}: {}; it said\n{said}", done.status);
    said
}

/// It says all of these, in this order.
fn says(name: &str, wanted: &[&str]) {
    let said = run(name);
    let mut rest = said.as_str();
    for line in wanted {
        let at = rest.find(line).unwrap_or_else(|| panic!("{name} does not say {line:?}:\n{said}"));
        rest = &rest[at + line.len()..];
    }
}

#[test]
fn echo_answers() {
    says("echo", &["echo: hello", "IS ANYBODY THERE", "echo: bye"]);
}

#[test]
fn order_flow_goes_on_after_a_death() {
    says("order_flow", &["Where to?", "dies", "Confirm?", "3 × tea to 221b Baker Street"]);
}

#[test]
fn handover_continues_tells_and_stays_silent() {
    says(
        "handover",
        &["Which city?", "dies", "Which street?", "On the way to Ringstraße 1, Graz."],
    );
}

#[test]
fn three_nodes_carry_on_without_one() {
    says("three_nodes", &["What is your name?", "And your age?", "lost", "A number", "Ann, 20"]);
}

#[test]
fn l9_a_bot_mounts_in_an_axum_application() {
    says("mount_in_axum", &["this is the shop", r#""duplicate":false"#, "echo: hello"]);
}

#[test]
fn scheduler_runs_each_occurrence_once_and_what_failed_again() {
    says("scheduler", &["attempt 2", "What do you plan today?", "Noted."]);
}

#[test]
fn telegram_goes_on_where_the_other_replica_stopped() {
    says("telegram", &["echo: hello", "stops", "echo: are you there", "echo: bye"]);
}

#[test]
fn discord_resumes_the_session_of_the_other_replica() {
    let stops = ["echo: hello", "stops", "echo: are you there", "echo: bye"];
    says("discord", &[&stops[..], &["Ordered.", "1 identify, 1 resume"]].concat());
}

#[test]
fn email_answers_in_the_thread_and_once() {
    says(
        "email",
        &[
            "first replica: Taken",
            "again: Duplicate",
            "absence note: Silent",
            "<1@example.net>",
            "Re: Tea: You wrote \"How much is it?\" about \"Tea\".",
        ],
    );
}

#[test]
fn whatsapp_answers_what_is_signed() {
    says("whatsapp", &["forged one: 401", "taken: 200", "echo: hello", "wamid.out1 was Read"]);
}

/// A process of the `telegram` example; killed with the test.
struct Replica {
    name: &'static str,
    address: String,
    child: Child,
    leads: Arc<AtomicBool>,
    complete: Arc<AtomicBool>,
}

impl Drop for Replica {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Replica {
    fn start(
        name: &'static str,
        dir: &Path,
        address: String,
        api: &str,
        join: Option<&str>,
    ) -> Self {
        let own = std::env::current_exe().unwrap();
        let program = own.parent().unwrap().parent().unwrap().join("examples").join("telegram");
        let mut command = Command::new(&program);
        command
            .arg(name)
            .arg(dir.join(name))
            .arg(&address)
            .arg("a-secret-of-more-than-thirty-two-letters");
        command.arg(api).arg(bot_api::TOKEN).args(join);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let said = std::io::BufReader::new(child.stdout.take().unwrap());
        let (leads, complete) = (Arc::new(AtomicBool::new(false)), Arc::<AtomicBool>::default());
        let (noted, whole) = (leads.clone(), complete.clone());
        std::thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                match line.as_str() {
                    "complete" => whole.store(true, Ordering::Relaxed),
                    line => noted.store(line == "leads", Ordering::Relaxed),
                }
            }
        });
        Self { name, address, child, leads, complete }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < until, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A port that was free a moment ago, below those of outgoing connections: it has to be free again
/// when its process comes back.
fn address() -> String {
    loop {
        let port = rand::random_range(14_000..32_000);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return format!("127.0.0.1:{port}");
        }
    }
}

#[test]
fn case_w23_a_hundred_updates_are_a_hundred_turns_whatever_becomes_of_the_poller() {
    use rustix::process::Signal;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let api = runtime.block_on(bot_api::BotApi::start());
    let dir = tempfile::tempdir().unwrap();
    let first = Replica::start("n1", dir.path(), address(), &api.url, None);
    let join = first.address.clone();
    until("the first polls", || api.polls().0 == 1);
    let mut replicas = vec![first];
    for name in ["n2", "n3"] {
        replicas.push(Replica::start(name, dir.path(), address(), &api.url, Some(&join)));
    }
    let complete = |one: &Replica| one.complete.load(Ordering::Relaxed);
    until("three voters", || replicas.iter().all(complete));

    for (round, signal) in [Signal::TERM, Signal::KILL, Signal::STOP].into_iter().enumerate() {
        let round = i64::try_from(round).unwrap();
        let user = 7 + round;
        let poller = || replicas.iter().position(|one| one.leads.load(Ordering::Relaxed));
        until("one leads", || poller().is_some() && api.polls().0 == 1);
        let poller = poller().unwrap();
        for n in 0..100 {
            api.says(user, &n.to_string());
        }
        until("some are answered", || api.sent_to(user).len() >= 20);
        replicas[poller].signal(signal);
        if signal != Signal::STOP {
            replicas[poller].child.wait().unwrap();
        }
        let turns = || {
            let mut turns: Vec<String> = api.sent_to(user);
            turns.dedup();
            turns
        };
        until("all are answered", || turns().len() >= 100);
        until("all are acknowledged", || api.unacknowledged() == 0);
        // One reply at most was in the air, and came again under the same fence.
        assert!(api.sent_to(user).len() <= 101, "{:?}", api.sent_to(user));
        let numbers = turns().into_iter().map(|said| {
            said.strip_prefix("echo: ").unwrap().split(' ').next().unwrap().parse::<u32>().unwrap()
        });
        assert_eq!(
            numbers.collect::<Vec<_>>(),
            (0..100).collect::<Vec<_>>(),
            "in order, once each"
        );
        if signal == Signal::STOP {
            replicas[poller].signal(Signal::CONT);
            continue;
        }
        let Replica { name, address, .. } = &replicas[poller];
        let again = Replica::start(name, dir.path(), address.clone(), &api.url, Some(&join));
        replicas[poller] = again;
        until("it is back", || complete(&replicas[poller]));
    }
    assert_eq!(api.polls().1, 1, "never two pollers at once");
    let before = api.sent().len();
    api.says(1, "still there?");
    until("it goes on", || api.sent().len() > before);
}
