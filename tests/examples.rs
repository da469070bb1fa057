//! The examples run, to their end, and say what they are there to show.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

#[allow(dead_code, unreachable_pub, reason = "shared with other tests, which use all of it")]
#[path = "support/bot_api.rs"]
mod bot_api;
#[allow(dead_code, unreachable_pub, reason = "shared with other tests, which use all of it")]
#[path = "support/discord_api.rs"]
mod discord_api;
#[allow(dead_code, unreachable_pub, reason = "shared with other tests, which use all of it")]
#[path = "support/discord_rest.rs"]
mod discord_rest;
#[allow(dead_code, unreachable_pub, reason = "shared with other tests, which use all of it")]
#[path = "support/mail.rs"]
mod mail;
#[allow(dead_code, unreachable_pub, reason = "shared with other tests, which use all of it")]
#[path = "support/smtp.rs"]
mod smtp;

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
fn whatsapp_web_goes_on_as_the_same_device() {
    let stops = ["echo: hello", "stops", "echo: are you there", "echo: bye"];
    says("whatsapp_web", &[&stops[..], &["1 code, 2 logins as one device"]].concat());
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

#[test]
fn messenger_and_instagram_share_a_bot() {
    says(
        "messenger",
        &["/webhooks/instagram  200", "messenger heard hello", "messenger heard Menu"],
    );
    says("messenger", &["ig-1 to \"bob\", by \"the account's token\""]);
}

#[test]
fn webhook_understands_what_another_program_posts() {
    says(
        "webhook",
        &["POST  401", "POST  200", "\"taken\":1,\"duplicates\":1", "to \"1\": \"echo: hello\""],
    );
}

#[test]
fn webchat_goes_on_after_the_last_reply_that_was_shown() {
    says("webchat", &["/chat", "bot> echo: hello", "bot> echo: still there?"]);
}

/// A process of an example, one of several; killed with the test.
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

/// What the processes of a group have in common.
struct Group<'a> {
    example: &'a str,
    dir: &'a Path,
    /// How its provider is reached.
    outside: &'a [String],
    /// How often one of them told that a reply may have arrived.
    doubts: Arc<AtomicUsize>,
}

impl Group<'_> {
    fn start(&self, name: &'static str, address: String, join: Option<&str>) -> Replica {
        let own = std::env::current_exe().unwrap();
        let program = own.parent().unwrap().parent().unwrap().join("examples").join(self.example);
        let mut command = Command::new(&program);
        command
            .arg(name)
            .arg(self.dir.join(name))
            .arg(&address)
            .arg("a-secret-of-more-than-thirty-two-letters");
        command.args(self.outside).args(join);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let said = std::io::BufReader::new(child.stdout.take().unwrap());
        let (leads, complete) = (Arc::new(AtomicBool::new(false)), Arc::<AtomicBool>::default());
        let (noted, whole, doubts) = (leads.clone(), complete.clone(), self.doubts.clone());
        std::thread::spawn(move || {
            for line in said.lines().map_while(Result::ok) {
                match line.as_str() {
                    "complete" => whole.store(true, Ordering::Relaxed),
                    "in doubt" => {
                        doubts.fetch_add(1, Ordering::Relaxed);
                    }
                    line => noted.store(line == "leads", Ordering::Relaxed),
                }
            }
        });
        Replica { name, address, child, leads, complete }
    }
}

impl Replica {
    fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    fn is_complete(&self) -> bool {
        self.complete.load(Ordering::Relaxed)
    }
}

fn until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(120);
    while !holds() {
        assert!(Instant::now() < until, "{what}: not within two minutes");
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

/// The people on the other side.
trait People {
    /// One of them says a number.
    fn says(&self, user: u64, number: usize);
    /// What the bot said to them, in order.
    fn heard(&self, user: u64) -> Vec<String>;
    /// Whether the bot is connected, once.
    fn is_listened_to(&self) -> bool;
    /// Whether nothing is left for it to take.
    fn is_done(&self) -> bool;
}

/// Three processes, of which the connected one is stopped, killed and frozen while so many messages
/// are in flight: each is one turn, in order.
fn whatever_becomes_of_the_leader(
    example: &str,
    outside: &[String],
    people: &dyn People,
    messages: usize,
) {
    let dir = tempfile::tempdir().unwrap();
    let doubts = Arc::<AtomicUsize>::default();
    let group = Group { example, dir: dir.path(), outside, doubts: doubts.clone() };
    let doubts = || doubts.load(Ordering::Relaxed);
    let first = group.start("n1", address(), None);
    let join = first.address.clone();
    until("the first one listens", || people.is_listened_to());
    let mut replicas = vec![first];
    for name in ["n2", "n3"] {
        replicas.push(group.start(name, address(), Some(&join)));
    }
    until("three voters", || replicas.iter().all(Replica::is_complete));

    for (user, signal) in (7..).zip([Signal::TERM, Signal::KILL, Signal::STOP]) {
        let leader = || replicas.iter().position(Replica::leads);
        until("one leads", || leader().is_some() && people.is_listened_to());
        let leader = leader().unwrap();
        let before = doubts();
        for n in 0..messages {
            people.says(user, n);
        }
        until("some are answered", || people.heard(user).len() >= messages / 5);
        replicas[leader].signal(signal);
        if signal != Signal::STOP {
            replicas[leader].child.wait().unwrap();
        }
        let turns = || {
            let mut turns = people.heard(user);
            turns.dedup();
            turns
        };
        until("all are answered", || turns().len() >= messages);
        until("nothing is left", || people.is_done());
        // A reply that may have arrived comes again under its fence, and whoever sends it says so.
        let again = || people.heard(user).len() - messages;
        until("what came again was told of", || again() <= doubts() - before);
        let numbers = turns().into_iter().map(|said| {
            let said = said.strip_prefix("echo: ").unwrap();
            said.split(' ').next().unwrap().parse::<usize>().unwrap()
        });
        let wanted: Vec<usize> = (0..messages).collect();
        assert_eq!(numbers.collect::<Vec<_>>(), wanted, "in order, once each");
        if signal == Signal::STOP {
            replicas[leader].signal(Signal::CONT);
            continue;
        }
        let Replica { name, address, .. } = &replicas[leader];
        replicas[leader] = group.start(name, address.clone(), Some(&join));
        until("it is back", || replicas[leader].is_complete());
    }
    people.says(1, 0);
    until("it goes on", || !people.heard(1).is_empty());
}

impl People for bot_api::BotApi {
    fn says(&self, user: u64, number: usize) {
        bot_api::BotApi::says(self, user.try_into().unwrap(), &number.to_string());
    }

    fn heard(&self, user: u64) -> Vec<String> {
        self.sent_to(user.try_into().unwrap())
    }

    fn is_listened_to(&self) -> bool {
        self.polls().0 == 1
    }

    fn is_done(&self) -> bool {
        self.unacknowledged() == 0
    }
}

#[test]
fn case_w23_a_hundred_updates_are_a_hundred_turns_whatever_becomes_of_the_poller() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let api = runtime.block_on(bot_api::BotApi::start());
    let outside = [api.url.clone(), bot_api::TOKEN.to_owned()];
    whatever_becomes_of_the_leader("telegram", &outside, &api, 100);
    assert_eq!(api.polls().1, 1, "never two pollers at once");
}

impl People for discord_api::DiscordApi {
    fn says(&self, user: u64, number: usize) {
        discord_api::DiscordApi::says(self, user, &number.to_string());
    }

    fn heard(&self, user: u64) -> Vec<String> {
        self.sent_to(&discord_api::channel(user))
    }

    fn is_listened_to(&self) -> bool {
        self.connections().0 == 1
    }

    fn is_done(&self) -> bool {
        true
    }
}

#[test]
fn case_w14_processes_that_take_over_resume_and_never_identify() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let api = runtime.block_on(discord_api::DiscordApi::start());
    let outside = [api.url.clone(), discord_api::TOKEN.to_owned()];
    whatever_becomes_of_the_leader("discord", &outside, &api, 60);
    for user in 7..10 {
        assert_eq!(People::heard(&api, user).len(), 60, "the reply in the air came once");
    }
    assert_eq!(api.identified().len(), 1);
    assert!(api.resumed().len() >= 3, "{:?}", api.resumed());
}

/// Dovecot to read from, and a server that takes what is sent.
struct Post {
    dovecot: mail::Dovecot,
    smtp: smtp::Smtp,
}

impl People for Post {
    fn says(&self, user: u64, number: usize) {
        let (from, id) = (format!("u{user}@example.net"), format!("{user}.{number}@example.net"));
        self.dovecot.deliver(smtp::mail(&from, &id, "A number", &number.to_string()));
    }

    fn heard(&self, user: u64) -> Vec<String> {
        self.smtp.texts(&format!("u{user}@example.net"))
    }

    fn is_listened_to(&self) -> bool {
        true
    }

    fn is_done(&self) -> bool {
        true
    }
}

#[test]
fn case_w20_mail_is_answered_once_whatever_becomes_of_the_process_that_reads_it() {
    if !mail::have(&["dovecot"]) {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let post = runtime.block_on(async {
        Post { dovecot: mail::Dovecot::start(false).await, smtp: smtp::Smtp::start().await }
    });
    let ports = [post.dovecot.port, post.smtp.address.port()].map(|port| port.to_string());
    whatever_becomes_of_the_leader("email", &ports, &post, 30);
}
