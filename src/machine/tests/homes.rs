//! Channels that belong to whoever leads them (SPEC D6).

use super::kit::*;
use crate::machine::{Admission, Command, Op, QueueKind, Reply, SessionKind};
use crate::types::{Incarnation, TicketId};

/// A machine with three replicas, of which the first leads `x`, the second waits, and `x` is at home.
fn homed() -> (Kit, [Incarnation; 3]) {
    let mut kit = Kit::new();
    let replicas = ["a", "b", "c"].map(|name| kit.open(SessionKind::Replica, name));
    for replica in &replicas[..2] {
        kit.take(*replica, queue(QueueKind::Lead, "provider:x"));
    }
    let home = Op::Home { prefix: p(), channel: "x".into(), lead: Some("provider:x".into()) };
    assert!(matches!(
        kit.commit(crate::machine::Authority::Nobody, vec![home]),
        Reply::Committed(_)
    ));
    (kit, replicas)
}

fn admitted(kit: &mut Kit, session: Incarnation, id: &str, chat: &str) -> TicketId {
    match kit.admit(session, vec![message(id, chat, "body")])[0] {
        Admission::Fresh { ticket, .. } => ticket,
        ref other => panic!("{other:?}"),
    }
}

fn owner(kit: &Kit, ticket: TicketId) -> Option<Incarnation> {
    match kit.machine.ticket(&p(), ticket) {
        crate::machine::TicketState::Waiting { session, .. } => session,
        crate::machine::TicketState::Granted { session, .. } => Some(session),
        other => panic!("{other:?}"),
    }
}

#[test]
fn d6_a_message_belongs_to_the_leader_whoever_admits_it() {
    let (mut kit, [a, b, c]) = homed();
    let tickets: Vec<TicketId> =
        (0..8).map(|n| admitted(&mut kit, c, &n.to_string(), &format!("x:{n}"))).collect();
    assert!(tickets.iter().all(|ticket| owner(&kit, *ticket) == Some(a)));
    let elsewhere = admitted(&mut kit, c, "y", "y:1");
    assert_eq!(owner(&kit, elsewhere), Some(c), "other channels are as ever");
    // The leader dies: all of it goes to the next one, not to just any.
    kit.close(a);
    assert!(tickets.iter().all(|ticket| owner(&kit, *ticket) == Some(b)));
    // Nobody is left who leads: it waits, though replicas live.
    kit.close(b);
    assert!(tickets.iter().all(|ticket| owner(&kit, *ticket).is_none()));
    let d = kit.open(SessionKind::Replica, "d");
    assert!(tickets.iter().all(|ticket| owner(&kit, *ticket).is_none()), "also for one that comes");
    kit.take(d, queue(QueueKind::Lead, "provider:x"));
    assert!(tickets.iter().all(|ticket| owner(&kit, *ticket) == Some(d)));
}

#[test]
fn d6_what_waits_moves_with_a_step_down_and_a_running_turn_does_not() {
    let (mut kit, [a, b, c]) = homed();
    let first = admitted(&mut kit, a, "1", "x:1");
    let second = admitted(&mut kit, a, "2", "x:1");
    kit.commit(crate::machine::Authority::Nobody, vec![send("x:9", "s", true, 0)]);
    assert_eq!(kit.machine.outbox_owner(&p(), "x:9"), Some(a));
    let lead = Command::ReleaseQueue { queue: queue(QueueKind::Lead, "provider:x"), session: a };
    assert_eq!(kit.run(lead), Reply::Done);
    assert_eq!(owner(&kit, first), Some(a), "it is at work");
    assert_eq!(owner(&kit, second), Some(b));
    assert_eq!(kit.machine.outbox_owner(&p(), "x:9"), Some(b));
    // The running turn is given back unacknowledged: it is tried again where it belongs now.
    kit.release(first, a);
    assert_eq!(owner(&kit, first), Some(b));
    // The channel is no longer exclusive: what nobody could have is anybody's.
    kit.close(b);
    assert_eq!(owner(&kit, second), None);
    let anybody = Op::Home { prefix: p(), channel: "x".into(), lead: None };
    kit.commit(crate::machine::Authority::Nobody, vec![anybody]);
    assert!([a, c].contains(&owner(&kit, second).unwrap()));
    assert!(kit.machine.outbox_owner(&p(), "x:9").is_some());
}
