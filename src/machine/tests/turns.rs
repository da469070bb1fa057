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

#[test]
fn b1_a_withdrawn_ticket_is_passed_over() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (t1, _) = kit.take(a, turn("c"));
    let (t2, _) = kit.take(b, turn("c"));
    let (t3, _) = kit.take(a, turn("c"));
    assert_eq!(kit.release(t2, b), Reply::Done);
    assert_eq!(kit.grants(), []);
    assert_eq!(kit.release(t1, a), Reply::Done);
    assert_eq!(kit.grants()[0].1, t3);
}

#[test]
fn b8_a_batch_sent_twice_is_applied_once() {
    let mut machine = Machine::new(Limits::default());
    let client = ClientId { node: 1, boot: 3 };
    let open = Command::OpenSession {
        prefix: p(),
        kind: SessionKind::Replica,
        replica: "a".into(),
        node: 1,
        lease_ms: 1_000,
    };
    let take = Command::TakeTicket { session: Incarnation(1), queue: turn("c"), if_free: false };
    let batch = |client, serial, command: &Command| Batch {
        client,
        lane: 7,
        serial,
        stamp_ms: 0,
        commands: vec![command.clone()],
    };
    let mut apply = |batch: &Batch| {
        let mut effects = Vec::new();
        let reply = machine.apply(0, batch, &mut effects);
        (reply, effects.len(), machine.remembered(batch.client, 7, batch.serial))
    };

    // A client's first batch is numbered 0; anything else has a gap before it.
    assert_eq!(apply(&batch(client, 1, &open)).0, BatchReply::Gap { next: 0 });
    let (first, ..) = apply(&batch(client, 0, &open));
    assert!(matches!(first, BatchReply::Applied(_)));

    // Again: the same answer, and nothing happens.
    assert_eq!(apply(&batch(client, 0, &open)), (first.clone(), 0, Some(first.clone())));
    let (second, raised, _) = apply(&batch(client, 1, &take));
    assert_eq!(raised, 1, "granted");
    assert_eq!(apply(&batch(client, 1, &take)), (second.clone(), 0, Some(second)));

    // What nobody waits for any more is forgotten, and what skips one is refused.
    assert_eq!(apply(&batch(client, 0, &open)).0, BatchReply::Forgotten);
    assert_eq!(apply(&batch(client, 3, &take)).0, BatchReply::Gap { next: 2 });

    // The next run of the node's process begins anew and ends the earlier one.
    let restarted = ClientId { node: 1, boot: 4 };
    assert_eq!(apply(&batch(restarted, 2, &take)).0, BatchReply::Gap { next: 0 });
    assert!(matches!(apply(&batch(restarted, 0, &take)).0, BatchReply::Applied(_)));
    let late = apply(&batch(client, 2, &take));
    assert_eq!(late.0, BatchReply::Superseded { boot: 4 });
    assert_eq!((late.1, machine.next_serial(client, 7)), (0, 0));
    assert_eq!(machine.next_serial(restarted, 7), 1);
    assert_eq!(machine.turn_counts(), (1, 1), "two tickets were taken in all");
}

#[test]
fn case_c2_random_enqueue_and_release_leave_nothing_behind() {
    let mut kit = Kit::new();
    let sessions = [kit.replica("a"), kit.replica("b"), kit.replica("c")];
    let mut mine: Vec<(TicketId, Incarnation)> = Vec::new();
    let mut effects = Vec::new();
    // A small generator with a fixed seed: the run is the same every time.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    for step in 0..100_000 {
        // Rather more of one in one phase and of the other in the next.
        let enqueue = random(10) < if (step / 1_000) % 2 == 0 { 6 } else { 4 };
        if mine.is_empty() || enqueue && mine.len() < 50 {
            let session = sessions[random(3)];
            let take = Command::TakeTicket { session, queue: turn("c"), if_free: false };
            match kit.machine.run(&take, &mut effects) {
                Reply::Ticket { ticket, .. } => mine.push((ticket, session)),
                other => panic!("no ticket: {other:?}"),
            }
        } else {
            let (ticket, session) = mine.remove(random(mine.len()));
            let release = Command::Release { prefix: p(), ticket, session };
            assert_eq!(kit.machine.run(&release, &mut effects), Reply::Done);
        }
        assert_eq!(kit.machine.holder(&turn("c")).is_none(), mine.is_empty(), "nothing strands");
        if step % 1_000 == 0 {
            kit.machine.check_invariants();
        }
    }
    for (ticket, session) in mine {
        assert_eq!(kit.release(ticket, session), Reply::Done);
        effects.append(&mut kit.effects);
    }
    let granted = effects.iter().filter_map(|effect| match effect {
        Effect::Granted { ticket, .. } => Some(*ticket),
        _ => None,
    });
    let granted: Vec<TicketId> = granted.collect();
    assert_eq!(kit.machine.holder(&turn("c")), None);
    assert_eq!(kit.machine.turn_counts(), (0, 0));
    assert!(granted.is_sorted(), "granted in the order of tickets");
    assert!(granted.len() > 10_000, "{} tickets were granted", granted.len());
}

#[test]
fn e2_a_dead_session_passes_on_what_it_had_in_one_apply() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (held, _) = kit.take(a, turn("c"));
    let (next, _) = kit.take(b, turn("c"));
    let (waiting, _) = kit.take(a, turn("c"));
    kit.take(a, queue(QueueKind::Lead, "l"));
    let (lead, _) = kit.take(b, queue(QueueKind::Lead, "l"));

    // A deadline seen before the last renewal ends nothing.
    kit.run(Command::RenewSession { session: a, seq: None });
    assert_eq!(kit.run(Command::ExpireSession { session: a, seq: 0 }), Reply::Stale);
    assert_eq!(kit.run(Command::ExpireSession { session: a, seq: 1 }), Reply::Done);
    assert_eq!(kit.effects[0], Effect::SessionEnded { session: a, reason: EndReason::Expired });
    let granted: Vec<_> = kit.grants().iter().map(|grant| (grant.0, grant.1)).collect();
    assert_eq!(granted, [(b, next), (b, lead)]);
    assert!(kit.grants().iter().all(|grant| grant.2.previous == Some(a)));
    for ticket in [held, waiting] {
        assert_eq!(kit.machine.ticket(&p(), ticket), TicketState::Gone);
    }

    // The dead do not come back.
    assert_eq!(kit.run(Command::RenewSession { session: a, seq: None }), Reply::SessionExpired);
    assert_eq!(kit.release(held, a), Reply::SessionExpired);
    assert_eq!(kit.run(Command::ExpireSession { session: a, seq: 1 }), Reply::Stale);
}

#[test]
fn e2_a_dead_replicas_messages_keep_their_place_and_move() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (t1, _) = kit.fresh(a, "1", "c");
    let (t2, _) = kit.fresh(b, "2", "c");
    let (t3, _) = kit.fresh(a, "3", "c");
    kit.close(a);
    let adopted = |ticket| Effect::Adopted { session: b, queue: turn("c"), ticket };
    assert_eq!(kit.effects[1..3], [adopted(t1), adopted(t3)]);
    let grant = Grant { fence: Fence(2), previous: Some(a) };
    assert_eq!(kit.grants(), [(b, t1, grant)]);
    assert_eq!(kit.machine.journal(&p(), t1).unwrap().attempts, 0, "a death is no attempt");

    // The last replica dies: they wait for one to open, a program without a bot does not do.
    kit.close(b);
    assert_eq!(kit.grants(), []);
    kit.open(SessionKind::Remote, "");
    assert_eq!(kit.machine.holder(&turn("c")), None);
    let c = kit.replica("c");
    assert_eq!(kit.grants()[0].1, t1);
    let owned: Vec<_> = kit.machine.tickets_of(c).iter().map(|ticket| ticket.0).collect();
    assert_eq!(owned, [t1, t2, t3]);
}

#[test]
fn m5_below_level_4_the_end_of_100_000_turns_is_one_apply() {
    let limits = Limits { idle_keys_max: 200_000, ..Limits::default() };
    let mut machine = Machine::new(limits);
    let mut effects = Vec::new();
    let open = Command::OpenSession {
        prefix: p(),
        kind: SessionKind::Replica,
        replica: String::new(),
        node: 1,
        lease_ms: 1_000,
    };
    // Straight to the commands: walking all of it after each would take the test's time.
    machine.run(&open, &mut effects);
    machine.run(&open, &mut effects);
    for chat in 0..100_000 {
        let queue = turn(&format!("chat {chat}"));
        // Another waits in every hundredth.
        for session in if chat % 100 == 0 { 1..=2 } else { 1..=1 } {
            let (session, queue) = (Incarnation(session), queue.clone());
            machine.run(&Command::TakeTicket { session, queue, if_free: false }, &mut effects);
        }
    }
    effects.clear();
    machine.run(&Command::CloseSession { session: Incarnation(1) }, &mut effects);
    let granted = effects.iter().filter(|effect| matches!(effect, Effect::Granted { .. })).count();
    assert_eq!(granted, 1_000);
    let ended = effects.iter().filter(|effect| matches!(effect, Effect::TicketEnded { .. }));
    assert_eq!(ended.count(), 100_000);
    machine.check_invariants();
}

#[test]
fn a3_the_older_of_two_namesakes_is_told() {
    let mut kit = Kit::new();
    let open = |kit: &mut Kit, replica: &str| {
        let (kind, replica) = (SessionKind::Replica, replica.to_owned());
        kit.run(Command::OpenSession { prefix: p(), kind, replica, node: 1, lease_ms: 1 })
    };
    let renew = |kit: &mut Kit, session| match kit.run(Command::RenewSession { session, seq: None })
    {
        Reply::Renewed { shared_with, .. } => shared_with,
        other => panic!("{other:?}"),
    };
    let (a, b) = (Incarnation(1), Incarnation(2));
    // A lease too short is made as long as the shortest.
    let first = open(&mut kit, "n1");
    assert_eq!(first, Reply::Session { session: a, lease_ms: 500, shared_with: None });
    let second = open(&mut kit, "n1");
    assert_eq!(second, Reply::Session { session: b, lease_ms: 500, shared_with: Some(a) });
    open(&mut kit, "n2");
    assert_eq!(renew(&mut kit, a), Some(b));
    assert_eq!(renew(&mut kit, b), None);
    kit.close(a);
    assert_eq!(renew(&mut kit, b), None);
}

#[test]
fn a4_the_same_key_under_two_prefixes_never_meets() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let other = Prefix::new("other").unwrap();
    let theirs = QueueKey { prefix: other.clone(), ..turn("c") };
    let take = Command::TakeTicket { session: a, queue: theirs.clone(), if_free: false };
    assert_eq!(kit.run(take), Reply::SessionExpired, "a session acts in its own prefix only");
    let (kind, replica) = (SessionKind::Replica, String::from("a"));
    let open = Command::OpenSession { prefix: other, kind, replica, node: 1, lease_ms: 1_000 };
    let Reply::Session { session: b, shared_with: None, .. } = kit.run(open) else { panic!() };
    assert!(kit.take(a, turn("c")).1.is_some());
    let (ticket, grant) = kit.take(b, theirs);
    assert!(grant.is_some());
    assert_eq!(ticket, TicketId(1), "tickets are numbered per prefix");
}

#[test]
fn i2_the_least_recently_used_idle_chats_are_forgotten_and_fences_grow() {
    let mut kit = Kit::with(Limits { idle_keys_max: 2, ..Limits::default() });
    let a = kit.replica("a");
    let mut visit = |chat: &str| {
        let (ticket, grant) = kit.take(a, turn(chat));
        kit.release(ticket, a);
        grant.unwrap()
    };
    let first = visit("one");
    assert_eq!(visit("two").previous, None);
    assert_eq!(visit("one").previous, Some(a));
    // The third pushes out the second, which was idle the longest.
    visit("three");
    assert_eq!(visit("one").previous, Some(a));
    let again = visit("two");
    assert_eq!(again.previous, None);
    assert!(again.fence > first.fence);
}

#[test]
fn f2_a_locks_fence_grows_and_a_stale_token_is_refused() {
    let mut kit = Kit::new();
    let acquire = |kit: &mut Kit| {
        kit.run(Command::AcquireLock { prefix: p(), key: "k".into(), ttl_ms: 50, node: 1 })
    };
    let renew = |token| Command::RenewLock { prefix: p(), key: "k".into(), token, ttl_ms: 70 };
    let release = |token| Command::ReleaseLock { prefix: p(), key: "k".into(), token };
    let (one, two) = (Incarnation(1), Incarnation(2));
    assert_eq!(acquire(&mut kit), Reply::Lock { token: one, fence: Fence(1), ttl_ms: 50 });
    let armed = Effect::SessionArmed { session: one, seq: 0, lease_ms: 50 };
    assert_eq!(kit.effects[0], armed, "every node counts the ttl");
    let held = Holder { session: one, fence: Some(Fence(1)) };
    assert_eq!(acquire(&mut kit), Reply::Held(held));
    let renewed = Reply::Renewed { seq: 1, lease_ms: 70, shared_with: None };
    assert_eq!(kit.run(renew(one)), renewed);

    // It ends with its ttl, like any session; the token is stale even while the lock is free.
    assert_eq!(kit.run(Command::ExpireSession { session: one, seq: 1 }), Reply::Done);
    assert_eq!(kit.run(renew(one)), Reply::Stale);
    assert_eq!(kit.run(release(one)), Reply::Stale);
    assert_eq!(acquire(&mut kit), Reply::Lock { token: two, fence: Fence(2), ttl_ms: 50 });
    assert_eq!(kit.run(release(one)), Reply::Stale);
    let other_key = Command::ReleaseLock { prefix: p(), key: "other".into(), token: two };
    assert_eq!(kit.run(other_key), Reply::Stale);
    assert_eq!(kit.run(release(two)), Reply::Done);
    assert_eq!(kit.machine.sessions(), []);
}

#[test]
fn f3_one_leads_and_the_others_are_told_who() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let lead = queue(QueueKind::Lead, "jobs");
    let try_lead = |kit: &mut Kit, session| {
        kit.run(Command::TakeTicket { session, queue: lead.clone(), if_free: true })
    };
    assert!(matches!(try_lead(&mut kit, a), Reply::Ticket { grant: Some(_), .. }));
    let held = Holder { session: a, fence: Some(Fence(1)) };
    assert_eq!(try_lead(&mut kit, b), Reply::Held(held));
    assert_eq!(kit.machine.leads(), [(lead.clone(), held)]);

    // Who campaigns waits, and leads when the lead is given back by its name.
    let (ticket, grant) = kit.take(b, lead.clone());
    assert_eq!(grant, None);
    let release = Command::ReleaseQueue { queue: lead.clone(), session: a };
    assert_eq!(kit.run(release.clone()), Reply::Done);
    assert_eq!(kit.grants()[0].1, ticket);
    assert_eq!(kit.run(release), Reply::TicketGone);
}

#[test]
fn k6_a_ticket_is_answered_for_by_what_it_is() {
    let mut kit = Kit::new();
    let (a, b) = (kit.open(SessionKind::Remote, ""), kit.open(SessionKind::Remote, ""));
    let (t1, _) = kit.take(a, turn("c"));
    let second = kit.run(Command::TakeTicket { session: a, queue: turn("c"), if_free: false });
    let ticket = TicketId(2);
    assert_eq!(second, Reply::Ticket { ticket, grant: None, ahead: 1 }, "behind its own");
    assert_eq!(kit.release(TicketId(3), a), Reply::UnknownTicket);
    assert_eq!(kit.release(TicketId(0), a), Reply::UnknownTicket);
    assert_eq!(kit.release(t1, b), Reply::NotYours);
    assert_eq!(kit.release(t1, a), Reply::Done);
    assert_eq!(kit.release(t1, a), Reply::TicketGone);
    kit.close(a);
    assert_eq!(kit.release(t1, a), Reply::SessionExpired, "a dead session before all else");
    assert_eq!(kit.machine.ticket(&p(), t1), TicketState::Gone);
    assert_eq!(kit.machine.ticket(&p(), TicketId(3)), TicketState::Unknown);

    // Turns, leads and locks under one name are three queues.
    for kind in [QueueKind::Turn, QueueKind::Lead] {
        assert!(kit.take(b, queue(kind, "c")).1.is_some());
    }
    let lock = Command::AcquireLock { prefix: p(), key: "c".into(), ttl_ms: 50, node: 1 };
    assert!(matches!(kit.run(lock), Reply::Lock { .. }));
}

#[test]
fn m3_bounds_are_named() {
    let limits = Limits {
        tickets_per_queue_max: 1,
        sessions_max: 2,
        prefixes_max: 1,
        outbox_unsent_max: 1,
        ..Limits::default()
    };
    let mut kit = Kit::with(limits);
    let a = kit.replica("a");
    kit.take(a, turn("c"));
    let take = |name: &str| Command::TakeTicket { session: a, queue: turn(name), if_free: false };
    assert_eq!(kit.run(take("c")), Reply::Full(Limit::TicketsPerQueue));
    assert_eq!(kit.run(take(&"x".repeat(KEY_BYTES_MAX + 1))), Reply::Full(Limit::KeyBytes));
    let lock =
        |key: &str| Command::AcquireLock { prefix: p(), key: key.into(), ttl_ms: 1, node: 1 };
    kit.run(lock("k"));
    assert_eq!(kit.run(lock("l")), Reply::Full(Limit::Sessions));
    let foreign = RowKey { prefix: Prefix::new("q").unwrap(), ..row("r") };
    let put = |row, len| Op::Put { row, value: vec![0; len], expect: Expect::Any, ttl_ms: None };
    let full = |op, limit| Reply::Refused(Refusal::Full { op, limit });
    let prefixes = kit.commit(Authority::Nobody, vec![put(foreign, 1)]);
    assert_eq!(prefixes, full(0, Limit::Prefixes));
    let long = kit.commit(Authority::Nobody, vec![put(row("r"), VALUE_BYTES_MAX + 1)]);
    assert_eq!(long, full(0, Limit::ValueBytes));
    let two = vec![send("c", "1", true, 9), send("c", "2", true, 9)];
    assert_eq!(kit.commit(Authority::Nobody, two), full(1, Limit::OutboxEntries));
    assert_eq!(kit.machine.outbox(&p(), "c", 0, 9), [], "refused whole");
}

/// What ends a turn under which it held, in one commit.
fn done(kit: &mut Kit, by: Incarnation, fence: Fence, ticket: TicketId, said: u64) -> Reply {
    let acknowledge = Op::Acknowledge { prefix: p(), ticket };
    let keep = Op::Keep { prefix: p(), ticket, said };
    kit.commit(holder(turn("c"), fence, Some(by)), vec![acknowledge, keep])
}

/// DESIGN 4 rule 5: the holder advances to its own next ticket, whether that waits already or comes
/// later, and no commit is made for the grant.
#[test]
fn b10_a_fence_goes_on_with_the_holders_own_next_ticket() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (t1, g1) = kit.fresh(a, "1", "c");
    let (t2, _) = kit.fresh(a, "2", "c");
    let f = g1.unwrap().fence;
    assert_eq!(done(&mut kit, a, f, t1, 2), Reply::Committed(vec![Revision(0); 2]));
    assert_eq!(kit.grants(), [(a, t2, Grant { fence: f, previous: Some(a) })]);
    assert_eq!(kit.machine.said_under(&turn("c"), f), 2);
    done(&mut kit, a, f, t2, 3);
    assert!(kit.grants().is_empty());

    // Nothing is held meanwhile.
    assert_eq!(kit.machine.turn_counts(), (0, 0));
    let (t3, g3) = kit.fresh(a, "3", "c");
    assert_eq!(g3, Some(Grant { fence: f, previous: Some(a) }));
    assert_eq!(kit.machine.said_under(&turn("c"), f), 3);

    // Another's ticket is next: it has the turn under a new fence, and the old one is dead.
    let (t4, _) = kit.fresh(b, "4", "c");
    let (t5, _) = kit.fresh(a, "5", "c");
    done(&mut kit, a, f, t3, 4);
    let [(session, ticket, g4)] = kit.grants()[..] else { panic!("one is granted") };
    assert_eq!((session, ticket, g4.previous), (b, t4, Some(a)));
    assert!(g4.fence > f);
    let late = kit.commit(holder(turn("c"), f, Some(a)), vec![put("c", "x", Expect::Any)]);
    assert!(matches!(late, Reply::Refused(Refusal::Fenced { .. })), "{late:?}");
    done(&mut kit, b, g4.fence, t4, 1);
    let [(session, ticket, g5)] = kit.grants()[..] else { panic!("one is granted") };
    assert_eq!((session, ticket, g5.previous), (a, t5, Some(b)));
    assert!(g5.fence > g4.fence, "a fence that ended does not come back");
}

/// DESIGN 4 rules 9 and 10: what was released or returned is dead under its fence.
#[test]
fn b10_a_fence_ends_with_a_release_a_return_and_its_session() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let (t1, g1) = kit.fresh(a, "1", "c");
    let f1 = g1.unwrap().fence;
    done(&mut kit, a, f1, t1, 1);
    // Returned unacknowledged: granted again under a new fence.
    let (t2, g2) = kit.fresh(a, "2", "c");
    assert_eq!(g2.unwrap().fence, f1);
    assert_eq!(kit.release(t2, a), Reply::Done);
    let [(_, ticket, g2)] = kit.grants()[..] else { panic!("it is granted again") };
    assert_eq!(ticket, t2);
    assert!(g2.fence > f1);
    done(&mut kit, a, g2.fence, t2, 1);

    // Released plainly.
    let (t3, g3) = kit.take(a, turn("c"));
    assert_eq!(g3.unwrap().fence, g2.fence);
    kit.release(t3, a);
    let (t4, g4) = kit.fresh(a, "4", "c");
    assert!(g4.unwrap().fence > g2.fence);
    done(&mut kit, a, g4.unwrap().fence, t4, 1);

    // Its session ends: nobody goes on under its fence.
    kit.close(a);
    let again = kit.replica("a");
    let (_, g5) = kit.fresh(again, "5", "c");
    assert!(g5.unwrap().fence > g4.unwrap().fence);
    assert_eq!(g5.unwrap().previous, Some(a));
}

#[test]
fn b10_only_the_holder_keeps_a_turn_and_only_once_its_message_is_done() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (t1, g1) = kit.fresh(a, "1", "c");
    let (t2, _) = kit.fresh(a, "2", "c");
    let f = g1.unwrap().fence;
    let keep = |ticket| vec![Op::Keep { prefix: p(), ticket, said: 0 }];
    for (by, ticket) in [(Some(a), t1), (Some(a), t2), (Some(b), t1), (None, t2)] {
        let reply = kit.commit(holder(turn("c"), f, by), keep(ticket));
        assert!(matches!(reply, Reply::Refused(Refusal::Fenced { .. })), "{reply:?}");
    }
    let lead = queue(QueueKind::Lead, "l");
    let (ticket, grant) = kit.take(a, lead.clone());
    let reply = kit.commit(holder(lead, grant.unwrap().fence, Some(a)), keep(ticket));
    assert!(
        matches!(reply, Reply::Refused(Refusal::Fenced { .. })),
        "leads are not kept: {reply:?}"
    );
}

#[test]
fn b10_a_holder_is_told_of_whoever_comes_to_wait() {
    let mut kit = Kit::new();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let (t1, g1) = kit.take(a, turn("c"));
    let fence = g1.unwrap().fence;
    assert!(kit.machine.is_alone(&turn("c"), t1, fence));
    let (t2, _) = kit.take(b, turn("c"));
    let called = Effect::CalledBack { session: a, queue: turn("c") };
    assert_eq!(kit.effects, [called]);
    assert!(!kit.machine.is_alone(&turn("c"), t1, fence));
    kit.release(t2, b);
    assert!(kit.machine.is_alone(&turn("c"), t1, fence));
    assert!(!kit.machine.is_alone(&turn("c"), t1, Fence(fence.0 + 1)));
    assert!(!kit.machine.is_alone(&turn("d"), t1, fence));
}
