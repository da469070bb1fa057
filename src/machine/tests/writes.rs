//! Rows, messages, replies, tasks and idempotency keys, row by row of the SPEC.

use super::kit::*;
use crate::machine::*;
use crate::types::*;

fn committed(reply: Reply) -> Vec<Revision> {
    match reply {
        Reply::Committed(revisions) => revisions,
        other => panic!("not committed: {other:?}"),
    }
}

fn superseded(op: u32, found: Option<u64>) -> Reply {
    Reply::Refused(Refusal::Superseded { op, found: found.map(Revision) })
}

#[test]
fn c3_checkpoints_are_compared_and_set_on_their_revision() {
    let mut kit = Kit::new();
    kit.replica("a");
    let mut write = |op| kit.commit(Authority::Nobody, vec![op]);
    let delete = |expect| Op::Delete { row: row("c"), expect };
    assert_eq!(committed(write(put("c", "1", Expect::Absent))), [Revision(1)]);
    assert_eq!(write(put("c", "2", Expect::Absent)), superseded(0, Some(1)));
    assert_eq!(committed(write(put("c", "2", Expect::Revision(Revision(1))))), [Revision(2)]);

    // A refused clear leaves the newer row.
    assert_eq!(write(delete(Expect::Revision(Revision(1)))), superseded(0, Some(2)));
    assert_eq!(committed(write(delete(Expect::Revision(Revision(2))))), [Revision(0)]);
    assert_eq!(write(delete(Expect::Revision(Revision(2)))), superseded(0, None));
    assert_eq!(committed(write(delete(Expect::Any))), [Revision(0)]);

    // A revision never comes again, also across a delete.
    assert_eq!(committed(write(put("c", "3", Expect::Any))), [Revision(3)]);
    assert_eq!(kit.machine.row(&row("c")).unwrap().value, b"3");
}

#[test]
fn c10_a_write_needs_exactly_the_holder() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let b = kit.replica("b");
    let (t1, g1) = kit.take(a, turn("c"));
    let (f1, write) = (g1.unwrap().fence, || vec![put("c", "x", Expect::Any)]);
    let by = |fence, session| holder(turn("c"), fence, session);
    let fenced = |session, fence| {
        let holder = Some(Holder { session, fence: Some(fence) });
        Reply::Refused(Refusal::Fenced { holder })
    };
    committed(kit.commit(by(f1, Some(a)), write()));
    committed(kit.commit(by(f1, None), write()));
    assert_eq!(kit.commit(by(f1, Some(b)), write()), fenced(a, f1), "another's session");
    assert_eq!(kit.commit(by(Fence(f1.0 + 1), Some(a)), write()), fenced(a, f1), "not yet given");

    // After the release the fence is worth nothing, though nobody else holds the turn.
    kit.release(t1, a);
    let nobody = Reply::Refused(Refusal::Fenced { holder: None });
    assert_eq!(kit.commit(by(f1, Some(a)), write()), nobody);

    // Nor when the same replica has the chat again.
    let (_, g2) = kit.take(a, turn("c"));
    let f2 = g2.unwrap().fence;
    assert_eq!(kit.commit(by(f1, Some(a)), write()), fenced(a, f2));

    kit.close(a);
    let dead = Reply::Refused(Refusal::SessionExpired);
    assert_eq!(kit.commit(by(f2, Some(a)), write()), dead);
    assert_eq!(kit.commit(by(f2, None), write()), nobody);
}

#[test]
fn f5_a_commit_is_done_whole_or_not_at_all() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let (ticket, grant) = kit.fresh(a, "1", "c");
    let by = || holder(turn("c"), grant.unwrap().fence, Some(a));
    let ops = |last| {
        vec![
            put("c", "1", Expect::Absent),
            // Conditions see what the earlier operations of the commit leave.
            put("c", "2", Expect::Revision(Revision(1))),
            Op::Delete { row: row("c"), expect: Expect::Revision(Revision(2)) },
            put("c", "3", Expect::Absent),
            send("c", "s", true, 9),
            Op::Post { prefix: p(), message: message("2", "d", "x"), session: None },
            Op::Acknowledge { prefix: p(), ticket },
            Op::Release { prefix: p(), ticket },
            last,
        ]
    };
    let before = kit.machine.freeze();
    let refused = kit.commit(by(), ops(put("other", "x", Expect::Revision(Revision(9)))));
    assert_eq!(refused, superseded(8, None));
    assert_eq!(kit.effects, []);
    let changed: Vec<_> = before
        .records()
        .zip(kit.machine.freeze().records())
        .filter(|(old, new)| old != new)
        .map(|(old, _)| old.0[0])
        .collect();
    assert_eq!(changed, [3], "only the remembered answer changed");

    let revisions = committed(kit.commit(by(), ops(put("other", "x", Expect::Absent))));
    let written: Vec<u64> = revisions.iter().map(|revision| revision.0).collect();
    assert_eq!(written, [1, 2, 0, 3, 0, 0, 0, 0, 4]);
    assert_eq!(kit.machine.ticket(&p(), ticket), TicketState::Gone);
    assert_eq!(kit.machine.journal(&p(), TicketId(2)).unwrap().chat, "d");
    assert_eq!(kit.machine.outbox(&p(), "c", 0, 9).len(), 1);
    let again = kit.commit(by(), vec![Op::Acknowledge { prefix: p(), ticket }]);
    assert!(matches!(again, Reply::Refused(Refusal::Fenced { .. })));
}

#[test]
fn f1_rows_end_and_are_listed_in_order() {
    let mut kit = Kit::new();
    kit.replica("a");
    let short = Op::Put { row: row("b"), value: vec![1], expect: Expect::Any, ttl_ms: Some(100) };
    let ops = vec![put("c", "", Expect::Any), short, put("a", "", Expect::Any)];
    kit.commit(Authority::Nobody, ops);
    let names = |kit: &Kit, first: &str, after| -> Vec<String> {
        kit.machine.scan(&row(first), after, 10).into_iter().map(|found| found.0.key).collect()
    };
    assert_eq!(names(&kit, "", false), ["a", "b", "c"]);
    assert_eq!(names(&kit, "a", true), ["b", "c"]);
    assert_eq!(kit.machine.scan(&row(""), false, 1).len(), 1);
    kit.now_ms += 100;
    kit.run(Command::Noop);
    assert_eq!(kit.effects, [Effect::RowChanged(row("b"))]);
    assert_eq!(names(&kit, "", false), ["a", "c"]);
    assert_eq!(kit.machine.row(&row("b")), None);
    assert!(kit.commit(Authority::Nobody, vec![put("b", "", Expect::Absent)]) != Reply::Done);
}

#[test]
fn f1_much_that_ends_at_once_counts_as_absent_and_goes_bit_by_bit() {
    let mut kit = Kit::new();
    kit.replica("a");
    let name = |n: u32| format!("{n:03}");
    let short = |n: u32| Op::Put {
        row: row(&name(n)),
        value: vec![1],
        expect: Expect::Any,
        ttl_ms: Some(100),
    };
    kit.commit(Authority::Nobody, (0..100).map(short).collect());
    kit.now_ms += 100;
    kit.run(Command::Noop);
    assert_eq!(kit.effects.len(), 64, "one apply stays short");
    assert_eq!(kit.machine.row(&row(&name(99))), None);
    assert_eq!(kit.machine.scan(&row(""), false, 1_000).len(), 0);
    let absent = kit.commit(Authority::Nobody, vec![put(&name(99), "", Expect::Absent)]);
    committed(absent);
    assert_eq!(kit.machine.scan(&row(""), false, 1_000).len(), 1);
}

#[test]
fn g1_a_message_id_is_handled_once_within_the_window() {
    let limits = Limits { dedupe_ms: 100, tickets_per_queue_max: 2, ..Limits::default() };
    let mut kit = Kit::with(limits);
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    kit.fresh(a, "1", "c");
    let mut again =
        |session, body: &str| kit.admit(session, vec![message("1", "c", body)]).remove(0);
    assert_eq!(again(b, "body"), Admission::Duplicate { same_body: true });
    assert_eq!(again(b, "other"), Admission::Duplicate { same_body: false });
    assert_eq!(kit.effects, [Effect::BodyDiffers { prefix: p(), id: "1".into() }]);

    // Another channel's ids are others.
    let elsewhere = Admit { channel: "mail".into(), ..message("1", "c", "body") };
    assert!(matches!(kit.admit(a, vec![elsewhere])[0], Admission::Fresh { .. }));

    // What was not taken may come again.
    let full = Admission::Full(Limit::TicketsPerQueue);
    assert_eq!(kit.admit(a, vec![message("2", "c", "x")]), [full]);
    let held = kit.machine.holder(&turn("c")).unwrap();
    let ticket = TicketId(1);
    let done = vec![Op::Acknowledge { prefix: p(), ticket }, Op::Release { prefix: p(), ticket }];
    committed(kit.commit(holder(turn("c"), held.fence.unwrap(), Some(a)), done));
    kit.fresh(a, "2", "c");

    // After the window the id is another message's.
    kit.now_ms += 100;
    assert!(matches!(kit.admit(a, vec![message("1", "d", "x")])[0], Admission::Fresh { .. }));
}

#[test]
fn g1_the_oldest_ids_are_forgotten_beyond_the_bound() {
    let mut kit = Kit::with(Limits { dedupe_ids_max: 2, ..Limits::default() });
    let a = kit.replica("a");
    for id in ["1", "2", "3"] {
        kit.fresh(a, id, "c");
    }
    let known = kit.admit(a, vec![message("3", "c", "body"), message("2", "c", "body")]);
    let duplicate = Admission::Duplicate { same_body: true };
    assert_eq!(known, [duplicate.clone(), duplicate]);
    kit.fresh(a, "1", "c");
}

#[test]
fn case_c3_a_message_whose_turn_failed_is_handled_not_dropped_as_seen() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    kit.take(b, turn("c"));
    let (ticket, grant) = kit.fresh(a, "m", "c");
    assert_eq!(grant, None, "the chat is busy");

    // Its turn does not come in time and it cannot be withdrawn; delivered again it is known.
    assert_eq!(kit.release(ticket, a), Reply::Stale);
    let again = kit.admit(b, vec![message("m", "c", "body")]);
    assert_eq!(again, [Admission::Duplicate { same_body: true }]);
    kit.run(Command::ReleaseQueue { queue: turn("c"), session: b });
    assert_eq!(kit.grants()[0].1, ticket, "handled once, not zero times");
}

#[test]
fn c9_a_returned_message_is_granted_again_and_given_up_in_the_end() {
    let mut kit = Kit::with(Limits { attempts_max: 3, ..Limits::default() });
    let a = kit.replica("a");
    let (ticket, first) = kit.fresh(a, "m", "c");
    let (next, _) = kit.fresh(a, "n", "c");
    for attempt in 1..3 {
        assert_eq!(kit.release(ticket, a), Reply::Done);
        let (_, granted, grant) = kit.grants()[0];
        assert_eq!(granted, ticket, "in its place");
        assert!(grant.fence > first.unwrap().fence);
        assert_eq!(kit.machine.journal(&p(), ticket).unwrap().attempts, attempt);
    }
    assert_eq!(kit.release(ticket, a), Reply::Done);
    let (prefix, chat, id) = (p(), "c".to_owned(), "m".to_owned());
    assert_eq!(kit.effects[0], Effect::DeadLettered { prefix, chat, ticket, id });
    assert_eq!(kit.grants()[0].1, next, "the chat goes on");
    assert_eq!(kit.machine.dead_letters(&p())[0].ticket, ticket);

    // Retried, it comes at the end; dropped, it is gone.
    let retry = |ticket, retry| Command::DeadLetter { prefix: p(), ticket, retry };
    assert_eq!(kit.run(retry(ticket, true)), Reply::Done);
    let queue = turn("c");
    let called = Effect::CalledBack { session: a, queue: queue.clone() };
    let adopted = Effect::Adopted { session: a, queue, ticket: TicketId(3) };
    assert_eq!(kit.effects, [called, adopted]);
    assert_eq!(kit.machine.journal(&p(), TicketId(3)).unwrap().attempts, 0);
    assert_eq!(kit.run(retry(ticket, false)), Reply::UnknownTicket);
}

#[test]
fn d5_a_cursor_moves_with_its_messages_or_not_at_all() {
    let mut kit = Kit::with(Limits { tickets_per_queue_max: 1, ..Limits::default() });
    let session = kit.replica("a");
    let mut admit = |messages, expect| {
        let ops = vec![put("cursor", "7", expect)];
        let cursor = Some(Box::new(Command::Commit { by: Authority::Nobody, ops }));
        kit.run(Command::Admit { prefix: p(), session, messages, cursor })
    };
    let moved = admit(vec![message("1", "c", "x")], Expect::Absent);
    assert!(matches!(moved, Reply::Admitted(_)));
    let refused = admit(vec![message("2", "d", "x")], Expect::Absent);
    assert_eq!(refused, superseded(0, Some(1)));
    // One message would not be taken: it would be lost behind the cursor.
    let full = admit(vec![message("3", "e", "x"), message("4", "c", "x")], Expect::Any);
    assert_eq!(full, Reply::Full(Limit::TicketsPerQueue));
    assert_eq!(kit.machine.row(&row("cursor")).unwrap().revision, Revision(1));
    assert_eq!(kit.machine.turn_counts(), (1, 0));
}

#[test]
fn g3_a_step_run_again_sends_nothing_twice_and_order_is_kept() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let (_, grant) = kit.take(a, turn("c"));
    let by = || holder(turn("c"), grant.unwrap().fence, Some(a));
    let ready = Effect::OutboxReady { session: a, prefix: p(), chat: "c".into() };
    let replied = Effect::Replied { prefix: p(), chat: "c".into() };
    let all = || vec![send("c", "1", true, 2), send("c", "2", false, 2), send("c", "3", true, 2)];
    committed(kit.commit(by(), all()));
    let once = [&replied, &ready];
    assert_eq!(kit.effects, [once[0], once[1], &replied, &replied, &ready].map(Clone::clone));
    committed(kit.commit(by(), all()));
    assert_eq!(kit.effects, [], "the same step again");
    let listed = |kit: &Kit| -> Vec<(u64, bool)> {
        let entries = kit.machine.outbox(&p(), "c", 0, 9);
        entries.into_iter().map(|entry| (entry.number, entry.unsent)).collect()
    };
    assert_eq!(listed(&kit), [(1, true), (2, false), (3, true)]);

    // What only has to be listed waits for its predecessors, then counts as sent with them.
    let b = kit.replica("b");
    let mark = |session, up_to| Command::MarkSent { prefix: p(), chat: "c".into(), up_to, session };
    assert_eq!(kit.run(mark(b, 1)), Reply::NotYours);
    assert_eq!(kit.run(mark(a, 1)), Reply::Done);
    assert_eq!(kit.effects, [ready], "more is there");
    assert_eq!(kit.machine.outboxes_of(a).len(), 1);

    // The sender dies: another takes over, and what is sent stays listed as long as asked.
    kit.close(a);
    let ready = Effect::OutboxReady { session: b, prefix: p(), chat: "c".into() };
    assert_eq!(kit.effects.last(), Some(&ready));
    assert_eq!(kit.run(mark(b, 3)), Reply::Done);
    assert_eq!(kit.effects, []);
    assert_eq!(listed(&kit), [(2, false), (3, false)]);
    assert_eq!(kit.machine.outboxes_of(b), []);
    let known = kit.commit(Authority::Nobody, vec![send("c", "1", true, 2)]);
    committed(known);
    assert_eq!(kit.effects, [], "an id is known after its entry is gone");
    assert_eq!(kit.machine.outbox(&p(), "c", 2, 9).len(), 1);
}

#[test]
fn g3_the_next_turns_sends_queue_behind_what_is_unsent() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let mut say = |session, id: &str| {
        let (ticket, grant) = kit.take(session, turn("c"));
        let by = holder(turn("c"), grant.unwrap().fence, Some(session));
        committed(
            kit.commit(by, vec![send("c", id, true, 9), Op::Release { prefix: p(), ticket }]),
        );
        kit.effects.clone()
    };
    say(a, "1");
    let ready = Effect::OutboxReady { session: a, prefix: p(), chat: "c".into() };
    assert!(say(b, "2").contains(&ready), "the first sender goes on");
}

#[test]
fn g4_an_occurrence_is_claimed_by_one_at_a_time() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let put = |due_ms| Command::PutTask { prefix: p(), id: "t".into(), due_ms, body: vec![] };
    let claim =
        |session, due_ms| Command::ClaimTask { prefix: p(), id: "t".into(), due_ms, session };
    assert_eq!(kit.run(put(50)), Reply::Done);
    assert_eq!(kit.machine.tasks_due(&p(), 49, 9), []);
    assert_eq!(kit.machine.tasks_due(&p(), 50, 9)[0].id, "t");
    assert_eq!(kit.run(claim(a, 49)), Reply::Stale);
    assert_eq!(kit.run(claim(a, 50)), Reply::Claimed { fence: Fence(1), attempt: 1 });
    assert_eq!(kit.run(claim(b, 50)), Reply::Stale);
    assert_eq!(kit.run(put(60)), Reply::Stale, "not under a running one");
    kit.close(a);
    assert_eq!(kit.run(claim(b, 50)), Reply::Claimed { fence: Fence(2), attempt: 2 });
    let finish = |session, next_ms| {
        let id = "t".into();
        Command::FinishTask { prefix: p(), id, due_ms: 50, session, next_ms }
    };
    assert_eq!(kit.run(finish(b, Some(90))), Reply::Done);
    assert_eq!(kit.run(finish(b, Some(90))), Reply::Stale);
    assert_eq!(kit.machine.tasks_due(&p(), 99, 9)[0].due_ms, 90);
}

#[test]
fn g4_an_occurrence_that_is_given_back_counts_its_attempts() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let ensure = |due_ms, body: &str| Command::EnsureTask {
        prefix: p(),
        id: "t".into(),
        due_ms,
        body: body.into(),
    };
    let claim =
        |session, due_ms| Command::ClaimTask { prefix: p(), id: "t".into(), due_ms, session };
    let back =
        |session, due_ms| Command::ReturnTask { prefix: p(), id: "t".into(), due_ms, session };
    let changed = Effect::TaskChanged { prefix: p(), id: "t".into() };
    assert_eq!(kit.run(ensure(50, "v1")), Reply::Done);
    assert_eq!(kit.effects, std::slice::from_ref(&changed));
    assert_eq!(kit.run(ensure(70, "v1")), Reply::Done);
    assert_eq!(kit.effects, [], "another replica that starts later moves nothing");
    assert_eq!(kit.run(claim(a, 50)), Reply::Claimed { fence: Fence(1), attempt: 1 });
    assert_eq!(kit.run(ensure(70, "v2")), Reply::Stale, "not under a running one");
    assert_eq!(kit.run(back(b, 50)), Reply::Stale, "only whoever claimed it");
    assert_eq!(kit.run(back(a, 50)), Reply::Done);
    assert_eq!(kit.effects, std::slice::from_ref(&changed));
    assert_eq!(kit.run(claim(b, 50)), Reply::Claimed { fence: Fence(2), attempt: 2 });
    kit.close(b);
    assert!(kit.effects.contains(&changed), "the end of a session frees its claims");
    assert_eq!(kit.run(ensure(2_000, "v2")), Reply::Done, "a new definition, a new instant");
    assert_eq!(kit.run(claim(a, 2_000)), Reply::Stale, "not before its time");
    kit.now_ms = 2_000;
    assert_eq!(kit.run(claim(a, 2_000)), Reply::Claimed { fence: Fence(3), attempt: 1 });
}

#[test]
fn k6_an_idempotency_key_runs_its_command_once() {
    let limits = Limits { idempotency_keys_max: 2, idempotency_ms: 100, ..Limits::default() };
    let mut kit = Kit::with(limits);
    let session = kit.open(SessionKind::Remote, "");
    let keyed = |key: &str, print: u8, command: &Command| Command::Keyed {
        key: IdempotencyKey { prefix: p(), session: Some(session), key: key.into() },
        fingerprint: [print; 16],
        command: Box::new(command.clone()),
    };
    let take = Command::TakeTicket { session, queue: turn("c"), if_free: false };
    let first = kit.run(keyed("1", 1, &take));
    assert_eq!(kit.run(keyed("1", 1, &take)), first);
    assert_eq!(kit.machine.turn_counts(), (1, 0));
    assert_eq!(kit.run(keyed("1", 2, &take)), Reply::KeyReused);

    // Refusals are answers too.
    let gone = Command::Release { prefix: p(), ticket: TicketId(9), session };
    assert_eq!(kit.run(keyed("2", 1, &gone)), Reply::UnknownTicket);
    for _ in 0..8 {
        kit.take(session, turn("d"));
    }
    assert_eq!(kit.run(keyed("2", 1, &gone)), Reply::UnknownTicket, "as it was answered then");

    // At capacity new keys wait until old ones end; none ends early.
    assert_eq!(kit.run(keyed("3", 1, &take)), Reply::Full(Limit::IdempotencyKeys));
    assert_eq!(kit.run(keyed("1", 1, &take)), first);
    kit.now_ms += 100;
    let anew = kit.run(keyed("1", 1, &take));
    assert!(anew != first, "{anew:?}");
}

#[test]
fn n4_marks_follow_renewals_at_most_one_an_interval() {
    let mut kit = Kit::with(Limits { mark_every_ms: 100, ..Limits::default() });
    let session = kit.replica("a");
    let renew = || Command::RenewSession { session, seq: None };
    kit.run_all(vec![renew(), renew(), Command::Noop]);
    let marks = |kit: &Kit| kit.effects.iter().filter(|e| **e == Effect::Mark).count();
    assert_eq!((marks(&kit), kit.effects.last()), (1, Some(&Effect::Mark)));
    kit.now_ms += 99;
    kit.run(renew());
    assert_eq!(marks(&kit), 0);
    kit.now_ms += 1;
    kit.run(Command::Noop);
    assert_eq!(marks(&kit), 0);
    kit.run(renew());
    assert_eq!(marks(&kit), 1);
}
