//! What happened between a death and the next act, by the survivors' own logs.
//!
//! The nodes log the turning points of a failover with the wall clock of the machine they all run on.
//! The entry that ends the dead session grants what it held in the same apply; *declared* is the instant
//! at which whoever asked for it has applied it, *granted* the one at which the next owner has.

use std::time::{Duration, SystemTime};

/// A turning point, and the words of a log line that tells it; all in one alternative have to be there.
const POINTS: [(&str, &[&[&str]]); 4] = [
    (
        "detected",
        &[
            &["the leader may be dead"],
            &["told that a process is dead"],
            // By its silence: the election timer, or the lease.
            &["leader changed", "leader=None"],
            &["session ran out"],
        ],
    ),
    ("elected", &[&["leader changed", "state=Leader"]]),
    (
        "declared",
        &[
            &["what it held passes on"],
            &["the process before this one is dead"],
            &["session ran out", "done=Ok"],
        ],
    ),
    ("granted", &[&["an outbox is this replica's now"]]),
];

/// How long after `died` each point was first reached in what was logged since; only those that were.
pub(super) fn since(died: SystemTime, logs: &[String]) -> Vec<(&'static str, Duration)> {
    let lines = || logs.iter().flat_map(|log| log.lines());
    let first = |ways: &[&[&str]]| {
        let tells = |line: &&str| ways.iter().any(|way| way.iter().all(|word| line.contains(word)));
        lines().filter(tells).filter_map(|line| logged_at(line)?.duration_since(died).ok()).min()
    };
    POINTS.iter().filter_map(|(name, ways)| Some((*name, first(ways)?))).collect()
}

/// Whether nothing more is to be logged: every death is declared, and what was held granted; where
/// nobody had to be elected, there is no election.
pub(super) fn are_whole(points: &[(&str, Duration)]) -> bool {
    ["declared", "granted"].iter().all(|wanted| points.iter().any(|(name, _)| name == wanted))
}

/// The instant at the head of a line.
fn logged_at(line: &str) -> Option<SystemTime> {
    let stamp: jiff::Timestamp = line.split_whitespace().next()?.parse().ok()?;
    Some(stamp.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l6_points_are_read_off_the_logs_and_only_those_after_the_death() {
        let died = "2026-01-01T00:00:00.100Z".parse::<jiff::Timestamp>().unwrap();
        let logs = [
            "2026-01-01T00:00:00.050000Z  INFO x: leader changed leader=Some(1) state=Leader\n\
             2026-01-01T00:00:00.104000Z  INFO x: the leader may be dead: refused\n\
             no line of ours: leader changed state=Leader\n"
                .to_owned(),
            "2026-01-01T00:00:00.103000Z  INFO x: told that a process is dead\n\
             2026-01-01T00:00:00.120000Z  INFO x: leader changed leader=Some(2) state=Leader\n\
             2026-01-01T00:00:00.110000Z  INFO x: leader changed leader=None state=Candidate\n"
                .to_owned(),
        ];
        let ms = Duration::from_millis;
        let found = since(died.into(), &logs);
        assert_eq!(found, [("detected", ms(3)), ("elected", ms(20))]);
        assert!(!are_whole(&found));
        let passed = "2026-01-01T00:00:00.130Z  INFO x: session ran out session=7 done=Ok(())\n\
                      2026-01-01T00:00:00.140Z DEBUG x: an outbox is this replica's now chat=c\n";
        let found = since(died.into(), &[passed.to_owned()]);
        assert_eq!(found, [("detected", ms(30)), ("declared", ms(30)), ("granted", ms(40))]);
        assert!(are_whole(&found));
    }
}
