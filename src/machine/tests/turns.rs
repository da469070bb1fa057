//! Queues, sessions and locks, row by row of the SPEC.

use super::kit::*;
use crate::machine::*;
use crate::types::*;

#[test]
fn b1_turns_are_granted_in_ticket_order_to_one_at_a_time() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (t1, g1) = kit.take(a, turn("c"));
    let (t2, g2) = kit.take(b, turn("c"));
    let (t3, g3) = kit.take(a, turn("c"));
    assert!(t1 < t2 && t2 < t3);
    assert_eq!(g1, Some(Grant { fence: Fence(1), previous: None }));
    assert_eq!((g2, g3), (None, None));

    // Another chat does not wait.
    assert!(kit.take(b, turn("other")).1.is_some());

    assert_eq!(kit.release(t1, a), Reply::Done);
    let grants = kit.grants();
    assert_eq!(grants, [(b, t2, Grant { fence: Fence(3), previous: Some(a) })]);
    assert_eq!(kit.release(t2, b), Reply::Done);
    assert_eq!(kit.grants(), [(a, t3, Grant { fence: Fence(4), previous: Some(b) })]);
}

#[test]
fn b9_one_entry_journals_a_message_and_takes_its_ticket() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let admissions =
        kit.admit(a, vec![message("1", "c", "x"), message("2", "c", "y"), message("1", "c", "x")]);
    let grant = Some(Grant { fence: Fence(1), previous: None });
    assert_eq!(
        admissions,
        [
            Admission::Fresh { ticket: TicketId(1), grant },
            Admission::Fresh { ticket: TicketId(2), grant: None },
            Admission::Duplicate { same_body: true },
        ]
    );
    assert_eq!(kit.machine.journal(&p(), TicketId(2)).unwrap().body, b"y");

    // One commit writes, answers, acknowledges and releases.
    let reply = kit.commit(
        holder(turn("c"), Fence(1), Some(a)),
        vec![
            put("c", "state", Expect::Absent),
            send("c", "s1", true, 10),
            Op::Acknowledge { prefix: p(), ticket: TicketId(1) },
            Op::Release { prefix: p(), ticket: TicketId(1) },
        ],
    );
    assert!(matches!(reply, Reply::Committed(_)), "{reply:?}");
    assert_eq!(kit.machine.journal(&p(), TicketId(1)), None);
    assert_eq!(kit.grants().len(), 1, "the next message has its turn");
}
