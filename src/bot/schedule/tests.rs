//! Which instants a schedule means. Pure: no bot, no clock.

use std::process::Command;

use super::job::{Next, Plan};
use super::{Job, Missed, Schedule};
use crate::bot::error::Fault;

/// 2026-01-01T00:00:00Z.
const NEW_YEAR: u64 = 1_767_225_600_000;

fn schedule(job: &Job) -> Schedule {
    let mut faults = Vec::new();
    let schedule = job.check(NEW_YEAR, &mut faults);
    assert_eq!(faults, []);
    schedule.unwrap()
}

fn faults(job: &Job) -> String {
    let mut faults = Vec::new();
    assert!(job.check(NEW_YEAR, &mut faults).is_none() || !faults.is_empty());
    let said: Vec<String> = faults.iter().map(Fault::to_string).collect();
    said.join("; ")
}

fn ms(instant: &str) -> u64 {
    u64::try_from(instant.parse::<jiff::Timestamp>().unwrap().as_millisecond()).unwrap()
}

/// The next instants after one, in UTC.
fn next(schedule: &Schedule, after: &str, count: usize) -> Vec<String> {
    let mut at = ms(after);
    let mut found = Vec::new();
    while found.len() < count {
        at = schedule.after(at).expect("it goes on");
        let stamp = jiff::Timestamp::from_millisecond(i64::try_from(at).unwrap()).unwrap();
        found.push(stamp.to_string());
    }
    found
}

#[test]
fn g4_a_period_counts_from_the_epoch() {
    let every = schedule(&Job::every("5m"));
    let wanted = ["2026-01-01T00:05:00Z", "2026-01-01T00:10:00Z"];
    assert_eq!(next(&every, "2026-01-01T00:00:00Z", 2), wanted);
    assert_eq!(next(&every, "2026-01-01T00:04:59.999Z", 2), wanted);
}

/// Case s2: a host in London, a job in Tokyo. The zone of the host counts for nothing, so the test
/// runs itself again in a process whose zone is London's.
#[test]
fn case_s2_a_job_keeps_its_zone_wherever_the_host_is() {
    if std::env::var_os("TZ").is_none_or(|zone| zone != "Europe/London") {
        let name = "bot::schedule::tests::case_s2_a_job_keeps_its_zone_wherever_the_host_is";
        let itself = std::env::current_exe().unwrap();
        let in_london =
            Command::new(itself).args(["--exact", name]).env("TZ", "Europe/London").output();
        let output = in_london.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let tokyo = schedule(&Job::cron("0 9 * * *").zone("Asia/Tokyo"));
    let wanted = ["2026-06-01T00:00:00Z", "2026-06-02T00:00:00Z"];
    assert_eq!(next(&tokyo, "2026-05-31T12:00:00Z", 2), wanted, "nine in Tokyo, summer or not");
    let unnamed = schedule(&Job::cron("0 9 * * *"));
    assert_eq!(next(&unnamed, "2026-05-31T12:00:00Z", 1), ["2026-06-01T09:00:00Z"], "else UTC");
}

#[test]
fn g4_daylight_saving_goes_by_the_stated_rules() {
    // Berlin, 29 March 2026: 02:00 becomes 03:00 at 01:00Z. 25 October: 03:00 becomes 02:00 at 01:00Z.
    let berlin = |cron: &str| schedule(&Job::cron(cron).zone("Europe/Berlin"));
    let fixed = berlin("30 2 * * *");
    let gap = ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"];
    assert_eq!(next(&fixed, "2026-03-27T12:00:00Z", 3), gap, "right after the gap");
    let twice = ["2026-10-24T00:30:00Z", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"];
    assert_eq!(next(&fixed, "2026-10-23T12:00:00Z", 3), twice, "once, the first time");

    let steps = berlin("*/30 * * * *");
    let gap = ["2026-03-29T00:30:00Z", "2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z"];
    assert_eq!(next(&steps, "2026-03-29T00:00:00Z", 3), gap, "nothing is in the gap");
    let both = ["00:30:00", "01:00:00", "01:30:00", "02:00:00"];
    let both = both.map(|time| format!("2026-10-25T{time}Z"));
    assert_eq!(next(&steps, "2026-10-25T00:00:00Z", 4), both, "both passes of the hour");
}

#[test]
fn g4_what_is_missed_is_skipped_run_once_or_made_up_for() {
    let every = schedule(&Job::every("10s"));
    let at = |seconds: u64| NEW_YEAR + seconds * 1_000;
    let plan = |now, missed, attempt| every.plan(at(10), at(now), missed, attempt);
    let run = |next| Plan::Run { next: Next::Is(Some(at(next))) };
    // In time, if late: the one after it is not due yet.
    assert_eq!(plan(19, Missed::Skip, 1), Plan::Run { next: Next::AfterTheRun });
    assert_eq!(plan(19, Missed::Once, 1), run(20));
    assert_eq!(plan(19, Missed::All(3), 1), run(20));
    // 20, 30 and 40 came meanwhile.
    assert_eq!(plan(45, Missed::Skip, 1), Plan::Pass { next: Some(at(50)) });
    assert_eq!(plan(45, Missed::Once, 1), run(50));
    assert_eq!(plan(45, Missed::All(9), 1), run(20));
    assert_eq!(plan(45, Missed::All(4), 1), run(20), "four with itself");
    assert_eq!(plan(45, Missed::All(3), 1), Plan::Pass { next: Some(at(20)) });
    assert_eq!(plan(45, Missed::All(1), 1), Plan::Pass { next: Some(at(40)) });
    // What has begun is not missed.
    assert_eq!(plan(45, Missed::Skip, 2), Plan::Run { next: Next::AfterTheRun });
    assert_eq!(plan(45, Missed::All(1), 2), run(20));

    let daily = schedule(&Job::cron("0 9 * * *").zone("Asia/Tokyo"));
    let (due, now) = (ms("2026-05-01T00:00:00Z"), ms("2026-05-20T12:00:00Z"));
    let two = Plan::Pass { next: Some(ms("2026-05-19T00:00:00Z")) };
    assert_eq!(daily.plan(due, now, Missed::All(2), 1), two);
}

#[test]
fn g4_a_job_that_cannot_be_is_named_with_what_is_wrong() {
    let never = faults(&Job::cron("0 0 30 2 *").id("a"));
    assert!(never.contains("0 0 30 2 *") && never.contains("never comes"), "{never}");
    let past = faults(&Job::cron("0 0 0 1 1 * 2020"));
    assert!(past.contains("never comes"), "{past}");
    let zone = faults(&Job::cron("0 9 * * *").zone("Mars/Olympus"));
    assert!(zone.contains("Mars/Olympus") && zone.contains("IANA"), "{zone}");
    let both = faults(&Job::cron("61 * * * *").zone("Nowhere"));
    assert!(both.contains("61 * * * *") && both.contains("Nowhere"), "{both}");
    for period in ["", "soon", "0s", "1ms"] {
        let said = faults(&Job::every(period));
        assert!(said.contains(&format!("{period:?}")), "{said}");
    }
    assert!(faults(&Job::every("5m").zone("Asia/Tokyo")).contains("no zone"));
    assert!(faults(&Job::every("5m").id("")).contains("empty"));
    assert!(faults(&Job::every("5m").id("x".repeat(600))).contains("job id"));
    assert!(faults(&Job::every("5m").attempts(0)).contains("attempts"));
    assert!(faults(&Job::every("5m").missed(Missed::All(0))).contains("All(0)"));
}
