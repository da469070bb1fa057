//! Chats whose key changes (SPEC B2).

use super::kit::*;
use crate::machine::*;

fn rekey(from: &str, to: &str) -> Command {
    let (from, to) = (from.to_owned(), to.to_owned());
    Command::Rekey { prefix: p(), from, to, users: Vec::new(), keep_new: false }
}

fn row_of(table: Table, key: &str) -> RowKey {
    RowKey { table, prefix: p(), key: key.to_owned() }
}

fn put_in(table: Table, key: &str) -> Op {
    let row = row_of(table, key);
    Op::Put { row, value: key.into(), expect: Expect::Absent, ttl_ms: None }
}

#[test]
fn b2_everything_kept_of_a_room_moves_with_all_its_participants() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let (t1, g1) = kit.fresh(a, "1", "x:old:ann");
    let (t2, _) = kit.fresh(a, "2", "x:old:ann");
    let (t3, _) = kit.fresh(a, "3", "x:older");
    let ops = vec![
        put_in(Table::Checkpoint, "x:old:ann"),
        put_in(Table::Chat, "x:old"),
        put_in(Table::Checkpoint, "x:older"),
        put_in(Table::User, "x:old"),
        send("x:old", "s1", true, 10),
        send("x:old", "s2", true, 10),
    ];
    kit.commit(holder(turn("x:old:ann"), g1.unwrap().fence, Some(a)), ops);
    let mut command = rekey("x:old", "x:new");
    if let Command::Rekey { users, .. } = &mut command {
        users.push(("x:old".into(), "x:new".into()));
    }
    assert_eq!(kit.run(command.clone()), Reply::Done);

    // The turn at work is lost, and its message comes again, before the next, as the first attempt.
    let [(session, ticket, grant)] = kit.grants()[..] else { panic!("one is granted") };
    assert_eq!((session, ticket), (a, t1));
    assert!(grant.fence > g1.unwrap().fence);
    let message = kit.machine.journal(&p(), t1).unwrap();
    assert_eq!((message.chat.as_str(), message.attempts), ("x:new:ann", 0));
    let late = vec![Op::Acknowledge { prefix: p(), ticket: t1 }];
    let late = kit.commit(holder(turn("x:old:ann"), g1.unwrap().fence, Some(a)), late);
    assert!(matches!(late, Reply::Refused(Refusal::Fenced { .. })), "{late:?}");
    let waits = kit.machine.ticket(&p(), t2);
    assert!(
        matches!(waits, TicketState::Waiting { queue, ahead: 1, .. } if queue == turn("x:new:ann"))
    );

    for (table, key) in
        [(Table::Checkpoint, "x:new:ann"), (Table::Chat, "x:new"), (Table::User, "x:new")]
    {
        assert!(kit.machine.row(&row_of(table, key)).is_some(), "{table:?} {key}");
    }
    assert!(kit.machine.row(&row_of(Table::Checkpoint, "x:old:ann")).is_none());
    let outbox = kit.machine.outbox(&p(), "x:new", 0, 10).into_iter();
    assert!(
        outbox
            .map(|entry| (entry.number, entry.id, entry.unsent))
            .eq([(1, "s1".to_owned(), true), (2, "s2".to_owned(), true)])
    );
    assert_eq!(kit.machine.outbox_owner(&p(), "x:new"), Some(a));
    assert!(kit.machine.outbox(&p(), "x:old", 0, 10).is_empty());

    // A name that only begins alike is another chat.
    assert!(matches!(kit.machine.ticket(&p(), t3), TicketState::Granted { .. }));
    assert!(kit.machine.row(&row_of(Table::Checkpoint, "x:older")).is_some());
    // Once more moves nothing more.
    assert_eq!(kit.run(command), Reply::Done);
    assert!(kit.effects.is_empty());
}

#[test]
fn b2_messages_of_both_keys_wait_in_the_order_of_their_tickets() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (t1, _) = kit.fresh(a, "1", "old");
    let (t2, g2) = kit.fresh(b, "2", "new");
    let (t3, _) = kit.fresh(a, "3", "old");
    let (t4, _) = kit.take(b, turn("old"));
    let (t5, _) = kit.fresh(b, "5", "new");
    assert_eq!(kit.run(rekey("old", "new")), Reply::Done);
    // Who waited without a message is told that its ticket ended.
    assert_eq!(kit.machine.ticket(&p(), t4), TicketState::Gone);
    let (mut granted, mut order) = (kit.grants()[0], Vec::new());
    for _ in 0..4 {
        let (session, ticket, grant) = granted;
        order.push(ticket);
        let acknowledge = Op::Acknowledge { prefix: p(), ticket };
        let release = Op::Release { prefix: p(), ticket };
        let by = holder(turn("new"), grant.fence, Some(session));
        let reply = kit.commit(by, vec![acknowledge, release]);
        assert!(matches!(reply, Reply::Committed(_)), "{reply:?}");
        granted = kit.grants().first().copied().unwrap_or(granted);
    }
    assert_eq!(order, [t1, t2, t3, t5]);
    let late = kit.commit(holder(turn("new"), g2.unwrap().fence, Some(b)), vec![]);
    assert!(matches!(late, Reply::Refused(_)), "the later one of the new key lost its turn");
}

#[test]
fn b2_where_both_keys_have_a_row_nothing_moves_or_the_new_one_stays() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    kit.commit(Authority::Nobody, vec![put("old", "1", Expect::Any), put("new", "2", Expect::Any)]);
    let (ticket, _) = kit.fresh(a, "1", "old");
    assert_eq!(kit.run(rekey("old", "new")), Reply::Taken { row: row("new") });
    assert!(kit.effects.is_empty(), "nothing was done");
    assert_eq!(kit.machine.journal(&p(), ticket).unwrap().chat, "old");
    let mut command = rekey("old", "new");
    if let Command::Rekey { keep_new, .. } = &mut command {
        *keep_new = true;
    }
    assert_eq!(kit.run(command), Reply::Done);
    assert_eq!(kit.machine.row(&row("new")).unwrap().value, b"2");
    assert!(kit.machine.row(&row("old")).is_none());
    assert_eq!(kit.run(rekey("new", "new:ann")), Reply::Stale, "a room is not its participant");
}
