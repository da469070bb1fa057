//! What the tail has beyond sled, and whether the two fit together.
//!
//! Either may have lost its end to a bad page. Sled's state says how far it had come, the tail's
//! records say where each begins and ends, and the marker says which generation must be there: so
//! an end that is missing from one shows in the other, and the log is quarantined.

use std::cmp::Ordering::{Equal, Greater};

use super::chunk;
use super::tail::{Begin, Generation, Record, entries};
use super::{LogId, Vote};
use crate::raft::marker::{Durable, TailFrom};

/// What follows sled's end.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// The newest generation of the tail; 0 where there was no tail yet.
    pub(super) newest: u64,
    /// Index of the first entry there is.
    pub(super) first: Option<u64>,
    /// Entries as in a record's body, and the log's end after them.
    pub(super) bodies: Vec<(Vec<u8>, Durable)>,
    /// What was known to be committed.
    pub(super) committed: Option<LogId>,
}

fn next(last: Option<LogId>) -> u64 {
    last.map_or(0, |last| last.index + 1)
}

fn text(last: Option<LogId>) -> String {
    last.map_or_else(|| "none".to_owned(), |last| last.index.to_string())
}

/// Whether a vote is as new as another; what cannot be compared is not.
pub(super) fn is_as_new(vote: Option<&Vote>, other: Option<&Vote>) -> bool {
    match (vote, other) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(vote), Some(other)) => matches!(vote.partial_cmp(other), Some(Equal | Greater)),
    }
}

/// Joins sled's log, which ends at `sled`, and the generations found in the tail.
pub(super) fn join(
    sled: &Durable,
    from: TailFrom,
    found: Vec<Generation>,
) -> Result<Replay, String> {
    let live: Vec<Generation> =
        found.into_iter().filter(|found| found.number >= from.generation).collect();
    let numbers: Vec<u64> = live.iter().map(|found| found.number).collect();
    let g = from.generation;
    if !(numbers == [g] || numbers == [g, g + 1]) {
        return Err(format!("log.tail has generations {numbers:?}; {g} must be there"));
    }
    let mut replay = Replay { newest: *numbers.last().unwrap_or(&g), ..Replay::default() };
    let begin = |found: &Generation| found.records.first().map(|record| record.head.begin);
    let counts_from = live.iter().rposition(|found| begin(found) != Some(Begin::Continues));
    let counted = &live[counts_from.unwrap_or(0)..];
    if counted.first().and_then(begin) == Some(Begin::Direct) {
        return match counted {
            [_] => Ok(replay), // Sled was being changed; what it has is what there is.
            _ => Err("log.tail goes on where only sled could".to_owned()),
        };
    }
    if let Some(found) = counted.iter().find(|found| found.has_hole) {
        return Err(format!(
            "log.tail lacks record {} of generation {}, which had been synced",
            found.records.len(),
            found.number
        ));
    }
    let records: Vec<&Record> = counted.iter().flat_map(|found| &found.records).collect();
    let (Some(begins), Some(ends)) = (records.first(), records.last()) else {
        return Err("log.tail has no records".to_owned()); // A generation has its first.
    };
    let (begins, ends) = (&begins.head.before, &ends.head.after);
    if next(sled.last) < next(begins.last) {
        return Err(format!(
            "the log ends at entry {}, but entries up to {} were acknowledged",
            text(sled.last),
            text(begins.last)
        ));
    }
    if next(sled.last) > next(ends.last) || !is_as_new(ends.vote.as_ref(), sled.vote.as_ref()) {
        return Err(format!(
            "log.tail ends at entry {}, vote {:?}, but it had reached entry {}, vote {:?}",
            text(ends.last),
            ends.vote,
            text(sled.last),
            sled.vote
        ));
    }
    if next(sled.last) == next(begins.last) {
        fits(sled, begins.last, begins.hash)?;
    }
    let mut before = begins;
    for record in &records {
        if record.head.before != *before {
            return Err(format!("the records of log.tail at entry {} part", text(before.last)));
        }
        let body = beyond(sled, record, &mut replay.first)?;
        let after = &record.head.after;
        if next(after.last) >= next(sled.last) {
            replay.bodies.push((body, Durable { vote: ends.vote, ..after.clone() }));
        }
        replay.committed = record.head.committed.max(replay.committed);
        before = &record.head.after;
    }
    Ok(replay)
}

fn fits(sled: &Durable, last: Option<LogId>, hash: u64) -> Result<(), String> {
    if (sled.last, sled.hash) == (last, hash) {
        return Ok(());
    }
    Err(format!("entry {} of the log is not the one in log.tail", text(last)))
}

/// The entries of a record that sled does not have; all of them are checked.
fn beyond(sled: &Durable, record: &Record, first: &mut Option<u64>) -> Result<Vec<u8>, String> {
    let Durable { mut last, mut hash, .. } = record.head.before;
    let mut body = Vec::new();
    let mut count = 0;
    for entry in entries(&record.body) {
        let entry = entry?;
        let log_id = chunk::log_id(entry)?;
        if last.is_some_and(|last| last.index + 1 != log_id.index || last > log_id) {
            return Err(format!("entry {} of log.tail follows {}", log_id.index, text(last)));
        }
        first.get_or_insert(log_id.index);
        count += 1;
        last = Some(log_id);
        hash = chunk::chain(hash, entry);
        if next(last) == next(sled.last) {
            fits(sled, last, hash)?;
        }
        if next(last) > next(sled.last) {
            body.extend_from_slice(&(entry.len() as u32).to_le_bytes());
            body.extend_from_slice(entry);
        }
    }
    let after = &record.head.after;
    if (last, hash, count) != (after.last, after.hash, record.head.count) {
        return Err(format!(
            "the record of log.tail before entry {} is another's",
            text(after.last)
        ));
    }
    Ok(body)
}
