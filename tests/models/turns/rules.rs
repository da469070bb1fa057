//! The whole protocol holds; without any one of its rules it does not.

use super::{Bounds, Change, PROPERTIES, Rules, Turns, broken};
use crate::check::{self, is_long};

/// Nothing but messages.
const CALM: Bounds =
    Bounds { messages: 2, crashes: 0, cuts: 0, withdrawals: 0, lapses: 0, resends: 0, writes: 0 };

fn model(durable: bool, change: Change, bounds: Bounds) -> Turns {
    Turns { rules: Rules { durable, change }, bounds, judged: u8::MAX }
}

/// Explores the protocol within each of these bounds. The state counts are part of what is shown: a
/// model in which less can happen than before would hold for a bad reason.
fn holds(durable: bool, bounds: &[(Bounds, usize)]) {
    for (bounds, states_min) in bounds {
        let found = check::holds(model(durable, Change::Nothing, *bounds));
        assert!(found.states >= *states_min, "{bounds:?}: only {} states", found.states);
    }
}

/// Shows that a change breaks this property, without durability and with it where both are named.
fn breaks(change: Change, bounds: Bounds, durable: &[bool], property: u8) {
    let name = PROPERTIES.iter().find(|(_, bit)| *bit == property).unwrap().0;
    for durable in durable {
        let variant = Turns { judged: property, ..model(*durable, change, bounds) };
        check::breaks(variant, name);
    }
}

const OFF: &[bool] = &[false];
const ON: &[bool] = &[true];
const BOTH: &[bool] = &[false, true];

#[test]
fn b10_the_turn_protocol_holds_without_durability() {
    let faults = Bounds { crashes: 1, withdrawals: 1, ..CALM };
    let steps = Bounds { messages: 3, cuts: 1, writes: 1, ..CALM };
    holds(false, &[(faults, 60_000), (steps, 40_000)]);
    if is_long() {
        let all = Bounds { crashes: 1, cuts: 1, withdrawals: 1, lapses: 1, writes: 1, ..CALM };
        let four = Bounds { messages: 4, cuts: 1, writes: 1, ..CALM };
        let three = Bounds { messages: 3, crashes: 1, writes: 1, ..CALM };
        holds(false, &[(four, 1_000_000), (three, 10_000_000), (all, 10_000_000)]);
    }
}

#[test]
fn b10_the_turn_protocol_holds_with_durability() {
    let deaths = Bounds { crashes: 1, ..CALM };
    let resent = Bounds { messages: 1, crashes: 1, resends: 1, ..CALM };
    let steps = Bounds { messages: 3, lapses: 1, ..CALM };
    let cuts = Bounds { cuts: 1, resends: 1, ..CALM };
    holds(true, &[(steps, 10_000), (resent, 10_000), (cuts, 10_000), (deaths, 10_000)]);
    if is_long() {
        let deaths = Bounds { crashes: 2, cuts: 1, resends: 1, ..CALM };
        let three = Bounds { messages: 3, crashes: 1, lapses: 1, resends: 1, ..CALM };
        holds(true, &[(deaths, 1_000_000), (three, 10_000_000)]);
    }
}

#[test]
fn model_turn_rule_1_is_necessary() {
    breaks(Change::AnyOrder, CALM, BOTH, broken::ORDER);
    let repeated = Bounds { resends: 1, ..CALM };
    breaks(Change::Repeated, repeated, OFF, broken::STUCK);
    let deaths = Bounds { crashes: 1, ..CALM };
    breaks(Change::TheDeadAreHeard, deaths, BOTH, broken::STUCK);
}

#[test]
fn model_turn_rule_2_is_necessary() {
    let lapses = Bounds { lapses: 1, ..CALM };
    breaks(Change::FenceStays, lapses, BOTH, broken::FENCES);
    breaks(Change::FreeingGrantsNothing, CALM, BOTH, broken::STUCK);
}

#[test]
fn model_turn_rule_3_is_necessary() {
    let three = Bounds { messages: 3, ..CALM };
    breaks(Change::AnswersTaken, three, OFF, broken::OVERLAP);
    breaks(Change::ReleasedTurnsTaken, three, BOTH, broken::OVERLAP);
}

#[test]
fn model_turn_rule_4_is_necessary() {
    let three = Bounds { messages: 3, ..CALM };
    breaks(Change::LocalBeforeOwnTickets, three, OFF, broken::ORDER);
    breaks(Change::LocalBeforeForeignTickets, three, OFF, broken::ORDER);
}

/// Of the own commands only those that take tickets count: it costs a chat nothing to write.
#[test]
fn model_turn_rule_4_may_overlook_own_writes() {
    let bounds = Bounds { messages: 3, cuts: 1, writes: 1, ..CALM };
    check::holds(model(false, Change::LocalBesideWrites, bounds));
}

#[test]
fn model_turn_rule_5_is_necessary() {
    let three = Bounds { messages: 3, ..CALM };
    breaks(Change::LocalThoughDurable, three, ON, broken::ORDER);
}

#[test]
fn model_turn_rule_6_is_necessary() {
    let writes = Bounds { writes: 1, ..CALM };
    breaks(Change::UnansweredWrites, writes, BOTH, broken::INSIDE);
}

#[test]
fn model_turn_rule_7_is_necessary() {
    breaks(Change::CallBackIsAnEvent, CALM, OFF, broken::STUCK);
}

#[test]
fn model_turn_rule_8_is_necessary() {
    let three = Bounds { messages: 3, ..CALM };
    breaks(Change::LocalMoved, three, OFF, broken::ORDER);
}

/// Local messages behind a step that is cut stay local too. Sent to the queue they would come behind
/// a ticket that a later message took after the call-back.
#[test]
fn model_turn_rule_8_holds_for_cuts_too() {
    let four = Bounds { messages: 4, cuts: 1, ..CALM };
    breaks(Change::LocalMovedByACut, four, OFF, broken::ORDER);
}

#[test]
fn model_turn_rule_9_is_necessary() {
    let cuts = Bounds { cuts: 1, ..CALM };
    breaks(Change::CutStepsWrite, cuts, BOTH, broken::CUT);
}

#[test]
fn model_turn_rule_10_is_necessary() {
    let three = Bounds { messages: 3, ..CALM };
    breaks(Change::ReleaseTakenBack, three, BOTH, broken::OVERLAP);
    let withdrawals = Bounds { withdrawals: 1, ..CALM };
    breaks(Change::WithdrawnTurnsTaken, withdrawals, OFF, broken::OVERLAP);
    breaks(Change::WithdrawalSparesGrants, withdrawals, OFF, broken::STUCK);
}

#[test]
fn model_turn_rule_11_is_necessary() {
    let cuts = Bounds { cuts: 1, writes: 1, ..CALM };
    breaks(Change::OnlyOlderFencesRefused, cuts, OFF, broken::CUT);
}

#[test]
fn model_turn_rule_13_is_necessary() {
    let deaths = Bounds { crashes: 1, ..CALM };
    breaks(Change::TheDeadsMessagesGo, deaths, ON, broken::STUCK);
    breaks(Change::TheDeadsMessagesGoLast, deaths, ON, broken::ORDER);
    let three = Bounds { messages: 3, crashes: 1, ..CALM };
    breaks(Change::TheDeadKeepTickets, three, BOTH, broken::STUCK);
}

/// A session that has much ends in one apply, and what it had is freed by later ones: by the next that
/// asks anything of the chat, or by an empty one.
#[test]
fn model_turn_rule_13_holds_where_an_end_goes_on() {
    let deaths = Bounds { crashes: 1, ..CALM };
    let faults = Bounds { withdrawals: 1, ..deaths };
    check::holds(model(false, Change::EndsGoOn, faults));
    check::holds(model(true, Change::EndsGoOn, deaths));
    breaks(Change::EndsStandStill, deaths, BOTH, broken::STUCK);
}

/// A death report that overtakes the opening of its session (DESIGN 5.1) is remembered.
#[test]
fn model_turn_death_reports_are_remembered() {
    let deaths = Bounds { messages: 1, crashes: 2, ..CALM };
    breaks(Change::TheDeadMayOpen, deaths, ON, broken::STUCK);
}
