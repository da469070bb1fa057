//! What a decoder may meet, for the property tests beside each codec.
//!
//! Bytes drawn at random hardly ever get past a magic number or a length. So most of what is drawn
//! here is something valid with a part of it changed: bits, lengths that lie, a piece cut off, put in
//! or repeated; in JSON, a value in the place of another.

use std::fmt::Debug;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// One change of valid bytes.
#[derive(Clone, Debug)]
enum Change {
    Flip(u8),
    Insert(Vec<u8>),
    /// A length as bincode writes it, larger than anything that is there.
    Length(u64),
    CutFrom,
    Remove(usize),
    Repeat(usize),
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (1u8..).prop_map(Change::Flip),
        2 => vec(any::<u8>(), 1..12).prop_map(Change::Insert),
        2 => (0..64u32).prop_map(|bits| Change::Length(u64::MAX >> bits)),
        1 => Just(Change::CutFrom),
        1 => (1..9usize).prop_map(Change::Remove),
        1 => (1..32usize).prop_map(Change::Repeat),
    ]
}

fn changed(bytes: &mut Vec<u8>, at: usize, change: Change) {
    let end = |more: usize| (at + more).min(bytes.len());
    match change {
        Change::Flip(mask) => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= mask),
        Change::Insert(more) => drop(bytes.splice(at..at, more)),
        Change::Length(length) => {
            let written = std::iter::once(253).chain(length.to_le_bytes());
            bytes.splice(at..end(1), written);
        }
        Change::CutFrom => bytes.truncate(at),
        Change::Remove(len) => drop(bytes.drain(at..end(len))),
        Change::Repeat(len) => {
            let piece = bytes[at..end(len)].to_vec();
            bytes.splice(at..at, piece);
        }
    }
}

/// Anything, or one of these with up to four changes.
pub(crate) fn bytes(valid: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        1 => vec(any::<u8>(), 0..300),
        7 => (select(valid), vec((any::<Index>(), change()), 0..5))
            .prop_map(|(mut bytes, changes)| {
                for (place, change) in changes {
                    let at = place.index(bytes.len() + 1);
                    changed(&mut bytes, at, change);
                }
                bytes
            }),
    ]
}

/// What decodes says the same after it was encoded and decoded once more.
pub(crate) fn settles<T: Serialize + DeserializeOwned>(payload: &[u8]) {
    let Ok(value) = super::decode::<T>(payload) else { return };
    let encode = |value: &T| {
        let mut bytes = Vec::new();
        super::encode_onto(value, &mut bytes);
        bytes
    };
    let once = encode(&value);
    let again: T = super::decode(&once).expect("what was encoded decodes");
    assert_eq!(encode(&again), once);
}

/// Values that stand where others are expected.
fn odd_value() -> impl Strategy<Value = Value> {
    let odd = vec![
        Value::Null,
        json!(true),
        json!(0),
        json!(-1),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1.5e300),
        json!(""),
        json!("\u{0}:%/\u{10ffff}"),
        json!([]),
        json!({}),
        json!([[[{}]]]),
        json!({ "id": { "id": [] }, "text": 7, "type": null }),
    ];
    prop_oneof![4 => select(odd), 1 => "\\PC{0,40}".prop_map(Value::from)]
}

fn places(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(places).sum(),
        Value::Object(fields) => fields.values().map(places).sum(),
        _ => 0,
    }
}

/// Puts `odd` at the nth place, counted from the root; `None` takes the place away.
fn put(value: &mut Value, nth: &mut usize, odd: &Option<Value>) {
    if *nth == 0 {
        *value = odd.clone().unwrap_or_default();
    }
    let Some(left) = nth.checked_sub(1) else { return *nth = usize::MAX };
    *nth = left;
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| put(item, nth, odd)),
        Value::Object(fields) if *nth == 0 && odd.is_none() => {
            let first = fields.keys().next().cloned();
            first.map(|name| fields.remove(&name));
        }
        Value::Object(fields) => fields.values_mut().for_each(|field| put(field, nth, odd)),
        _ => {}
    }
}

/// One of these JSON texts with some of its values replaced or taken away.
pub(crate) fn json_of(valid: &[&str]) -> impl Strategy<Value = Value> + use<> {
    let parsed = valid.iter().map(|text| serde_json::from_str(text).expect("the sample is JSON"));
    let parsed: Vec<Value> = parsed.collect();
    let swap = (any::<Index>(), proptest::option::weighted(0.8, odd_value()));
    (select(parsed), vec(swap, 0..4)).prop_map(|(mut value, swaps)| {
        for (place, odd) in swaps {
            let mut nth = place.index(places(&value));
            put(&mut value, &mut nth, &odd);
        }
        value
    })
}

/// Address space this process has claimed at most so far.
fn claimed() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells");
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).expect("so it does");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number") << 10
}

/// Runs `decode` on these bytes, with every length in them a lie, and sees that it claims little.
pub(crate) fn lies_claim_no_memory(valid: &[u8], mut decode: impl FnMut(&[u8])) {
    let before = claimed();
    for at in 0..valid.len() {
        for bits in [0, 4, 24, 30] {
            let mut lying = valid.to_vec();
            changed(&mut lying, at, Change::Length(u64::MAX >> bits));
            decode(&lying);
        }
    }
    // Far above what other threads of a test process take, far below the smallest lie.
    assert!(claimed() - before < 3 << 30, "a length was believed");
}
