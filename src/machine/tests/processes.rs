//! Certain death: what dies with a process, and how long that is remembered (SPEC E6).

use super::kit::*;
use crate::machine::*;
use crate::types::*;

fn open(kit: &mut Kit, process: u128, name: &str) -> Reply {
    let (kind, replica) = (SessionKind::Replica, name.to_owned());
    let open = Command::OpenSession { prefix: p(), kind, replica, node: 1, lease_ms: 1_000 };
    kit.run(Command::ForProcess { process: ProcessToken(process), command: open.into() })
}

fn opened(kit: &mut Kit, process: u128, name: &str) -> Incarnation {
    match open(kit, process, name) {
        Reply::Session { session, .. } => session,
        other => panic!("no session: {other:?}"),
    }
}

fn die(kit: &mut Kit, process: u128) {
    assert_eq!(kit.run(Command::DeclareDead { process: ProcessToken(process) }), Reply::Done);
}

fn ended(kit: &Kit) -> Vec<(Incarnation, EndReason)> {
    let ended = |effect: &Effect| match effect {
        Effect::SessionEnded { session, reason } => Some((*session, *reason)),
        _ => None,
    };
    kit.effects.iter().filter_map(ended).collect()
}

#[test]
fn e6_all_a_dead_process_held_passes_on_in_one_apply() {
    let mut kit = Kit::new();
    let a = opened(&mut kit, 1, "a");
    let b = opened(&mut kit, 1, "b");
    let other = opened(&mut kit, 2, "c");
    let program = kit.open(SessionKind::Remote, "");
    kit.take(a, turn("ann"));
    kit.take(b, turn("ann"));
    let (next, _) = kit.take(other, turn("ann"));
    kit.take(b, queue(QueueKind::Lead, "jobs"));
    let (lead, _) = kit.take(program, queue(QueueKind::Lead, "jobs"));
    let (message, _) = kit.fresh(a, "m1", "bob");

    die(&mut kit, 1);
    assert_eq!(ended(&kit), [(a, EndReason::Dead), (b, EndReason::Dead)]);
    let grants: Vec<_> = kit.grants().into_iter().map(|grant| (grant.0, grant.1)).collect();
    assert_eq!(grants, [(other, next), (other, message), (program, lead)], "none went to the dead");
    let left: Vec<_> = kit.machine.sessions().iter().map(|view| view.session).collect();
    assert_eq!(left, [other, program], "another process, and a program that named none, live");

    // Said twice, it is said once.
    die(&mut kit, 1);
    assert_eq!(kit.effects, []);
}

#[test]
fn e6_a_report_that_overtakes_the_opening_counts() {
    let mut kit = Kit::new();
    die(&mut kit, 1);
    assert_eq!(open(&mut kit, 1, "a"), Reply::SessionExpired);
    assert_eq!(kit.machine.sessions(), []);
    // The next life of the same replica is another process.
    opened(&mut kit, 2, "a");
}

#[test]
fn e6_the_oldest_deaths_are_forgotten_beyond_the_bound() {
    let mut kit = Kit::new();
    for process in 1..=4 {
        die(&mut kit, process);
    }
    let dead: Vec<u128> = (1..=4).filter(|p| kit.machine.is_dead(ProcessToken(*p))).collect();
    assert_eq!(dead, [2, 3, 4], "three are remembered in tests");
    // Also across a restart, and the numbering goes on.
    kit.machine = Machine::read(&mut kit.bytes().as_slice()).unwrap();
    die(&mut kit, 5);
    let dead: Vec<u128> = (1..=5).filter(|p| kit.machine.is_dead(ProcessToken(*p))).collect();
    assert_eq!(dead, [3, 4, 5]);
}

#[test]
fn e6_a_session_that_ended_before_its_process_is_not_ended_again() {
    let mut kit = Kit::new();
    let a = opened(&mut kit, 1, "a");
    assert_eq!(kit.machine.process_of(a), Some(ProcessToken(1)));
    kit.close(a);
    assert_eq!(kit.machine.process_of(a), None);
    die(&mut kit, 1);
    assert_eq!(ended(&kit), []);
}

#[test]
fn only_openings_are_in_the_name_of_a_process() {
    let mut kit = Kit::new();
    die(&mut kit, 1);
    let noop = Command::Noop;
    let reply = kit.run(Command::ForProcess { process: ProcessToken(1), command: noop.into() });
    assert_eq!(reply, Reply::Done);
}
