//! The examples run, to their end, and say what they are there to show.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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
