//! The lease rules hold; without any one of the first seven they do not.

use super::{Change, Lease, PROPERTIES, broken};
use crate::check::{self, is_long};

/// One renewal in a life, and nothing goes wrong but time.
const CALM: Lease = Lease {
    change: Change::Nothing,
    lease: 5,
    margin: 2,
    renewals: 1,
    horizon: 11,
    deaths: false,
    restarts: false,
    any_rates: false,
    judged: u8::MAX,
};

fn breaks(model: Lease, change: Change, property: u8) {
    let name = PROPERTIES.iter().find(|(_, bit)| *bit == property).unwrap().0;
    check::breaks(Lease { change, judged: property, ..model }, name);
}

/// The state counts are part of what is shown: a model in which less can happen than before would
/// hold for a bad reason.
fn holds(model: Lease, states_min: usize) {
    let found = check::holds(model);
    assert!(found.states >= states_min, "only {} states", found.states);
}

#[test]
fn e7_the_lease_rules_hold() {
    holds(Lease { any_rates: true, ..CALM }, 1_000);
    holds(Lease { renewals: 2, horizon: 12, ..CALM }, 10_000);
    holds(Lease { restarts: true, ..CALM }, 10_000);
    holds(Lease { deaths: true, horizon: 7, ..CALM }, 10_000);
    if is_long() {
        holds(Lease { restarts: true, renewals: 2, any_rates: true, ..CALM }, 1_000_000);
        holds(Lease { deaths: true, restarts: true, horizon: 9, ..CALM }, 10_000_000);
        holds(Lease { lease: 10, horizon: 22, renewals: 2, restarts: true, ..CALM }, 1_000_000);
    }
}

/// Twice the error of the clocks is what the margin is for (DESIGN 3).
#[test]
fn model_lease_margin_is_necessary() {
    breaks(Lease { margin: 0, ..CALM }, Change::Nothing, broken::OVERLAP);
}

#[test]
fn model_lease_rule_1_is_necessary() {
    breaks(CALM, Change::AnsweredAtReceipt, broken::OVERLAP);
}

#[test]
fn model_lease_rule_2_is_necessary() {
    let twice = || Lease { renewals: 2, ..CALM };
    breaks(CALM, Change::RetriesCountAnew, broken::OVERLAP);
    breaks(twice(), Change::NumbersStay, broken::EARLY);
    breaks(twice(), Change::NumbersStay, broken::OVERLAP);
}

#[test]
fn model_lease_rule_3_is_necessary() {
    let restarts = || Lease { restarts: true, ..CALM };
    breaks(restarts(), Change::InstantsStored, broken::EARLY);
    breaks(restarts(), Change::InstantsStored, broken::OVERLAP);
}

#[test]
fn model_lease_rule_4_is_necessary() {
    breaks(CALM, Change::ClockStopsAsleep, broken::OVERLAP);
    breaks(CALM, Change::TimerTrusted, broken::OVERLAP);
}

#[test]
fn model_lease_rule_5_is_necessary() {
    let deaths = || Lease { deaths: true, ..CALM };
    breaks(deaths(), Change::IncarnationStays, broken::EARLY);
    breaks(deaths(), Change::IncarnationStays, broken::OVERLAP);
}

#[test]
fn model_lease_rule_6_is_necessary() {
    breaks(CALM, Change::EndPassesNothingOn, broken::HELD_BY_DEAD);
}

#[test]
fn model_lease_rule_7_is_necessary() {
    breaks(CALM, Change::SendsWithoutDeadline, broken::OVERLAP);
}
