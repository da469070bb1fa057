//! Turns that stay (SPEC B10): by the rules of DESIGN 4, one after another.

use super::*;
use crate::coordinator::{CoordinationError, LostReason, Sticky, Ticket};
use crate::machine::Expect;
use crate::store::{self, RowKey, Store, Table};

async fn open_sticky(node: &Arc<Node>, name: &str) -> GroupCoordinator {
    let coordinator = node.coordinator(name, LEASE);
    coordinator.keep_turns(Some(Sticky::default()));
    coordinator.open().await.unwrap();
    coordinator
}

async fn wait(coordinator: &GroupCoordinator, ticket: &mut Ticket) -> Turn {
    coordinator.wait_turn(ticket, BootInstant::never()).await.unwrap()
}

/// The turn a ticket has by now, if it has it.
async fn now(coordinator: &GroupCoordinator, ticket: &mut Ticket) -> Option<Turn> {
    settle().await;
    coordinator.wait_turn(ticket, coordinator.clock().now()).await.ok()
}

fn is_release(command: &Command) -> bool {
    let releases = |op: &crate::machine::Op| matches!(op, crate::machine::Op::Release { .. });
    matches!(command, Command::Commit { ops, .. } if ops.iter().any(releases))
}

#[tokio::test]
async fn b10_the_next_message_costs_no_commit() {
    let Scene { a, .. } = scene();
    let replica = open_sticky(&a, "a").await;
    let first = turn(&replica, &chat("c")).await;
    assert_eq!((first.nth(), first.said_before(), first.previous_holder()), (0, 0, None));
    let fence = first.fence();
    first.keep(2);
    first.check().expect_err("a message that is done acts no more");
    a.forget_asked();
    for nth in 1..5 {
        let next = turn(&replica, &chat("c")).await;
        next.check().unwrap();
        assert_eq!((next.fence(), next.nth(), next.said_before()), (fence, nth, nth + 1));
        assert_eq!(next.previous_holder(), replica.incarnation(), "memory is fresh (C2)");
        next.keep(nth + 2);
    }
    settle().await;
    assert!(a.asked(|_| true).is_empty(), "nothing was asked of the group");
    assert_eq!(a.look(|machine| machine.turn_counts()), (1, 0), "it is held");
}

/// Rules 7 and 8: the local messages already taken come first, then who called, then who came later.
#[tokio::test]
async fn b10_a_call_back_waits_for_what_was_taken_and_for_nothing_later() {
    let Scene { a, b, .. } = scene();
    let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
    let at_work = turn(&holder, &chat("c")).await;
    let fence = at_work.fence();
    let mut taken = holder.take_ticket(&chat("c")).await.unwrap();
    let mut called = other.take_ticket(&chat("c")).await.unwrap();
    settle().await;
    a.forget_asked();
    let mut later = holder.take_ticket(&chat("c")).await.unwrap();
    assert_eq!(a.asked(is_take).len(), 1, "somebody waits: it takes a ticket at once");
    assert!(now(&holder, &mut taken).await.is_none(), "one at a time");
    at_work.check().expect("it is called back at its end and not before");

    at_work.keep(0);
    let local = wait(&holder, &mut taken).await;
    assert_eq!((local.fence(), local.nth()), (fence, 1));
    assert!(now(&other, &mut called).await.is_none());
    local.keep(0);
    let theirs = wait(&other, &mut called).await;
    assert!(theirs.fence() > fence);
    assert_eq!(theirs.previous_holder(), holder.incarnation());
    assert!(now(&holder, &mut later).await.is_none());
    theirs.keep(0);
    let last = wait(&holder, &mut later).await;
    assert!(last.fence() > theirs.fence());
    assert_eq!(last.previous_holder(), other.incarnation(), "its memory is stale (C2)");
}

/// Rule 4: a call-back this node has applied and not been told of yet. The local message that races
/// it takes a ticket, behind the one that called.
#[tokio::test]
async fn b10_a_local_message_does_not_overtake_a_call_back_it_races() {
    let Scene { a, b, .. } = scene();
    let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
    let first = turn(&holder, &chat("c")).await;
    first.keep(0);
    a.applies(Applies::Held);
    let mut called = other.take_ticket(&chat("c")).await.unwrap();
    let mut racing = holder.take_ticket(&chat("c")).await.unwrap();
    assert!(now(&other, &mut called).await.is_none(), "the holder was not told");
    a.applies(Applies::Shown);
    let theirs = wait(&other, &mut called).await;
    assert!(now(&holder, &mut racing).await.is_none());
    theirs.keep(0);
    assert!(wait(&holder, &mut racing).await.fence() > theirs.fence());
}

/// Rule 7: the level is read again where the news of it was lost.
#[tokio::test]
async fn b10_a_call_back_that_nobody_told_of_is_read_off_the_machine() {
    let Scene { a, b, .. } = scene();
    let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
    turn(&holder, &chat("c")).await.keep(0);
    a.applies(Applies::Lost);
    let mut called = other.take_ticket(&chat("c")).await.unwrap();
    assert!(now(&other, &mut called).await.is_none());
    a.applies(Applies::Shown);
    a.wakeups.raise_all();
    wait(&other, &mut called).await.check().unwrap();
}

/// Rules 9 and 10: an end that is not clean gives the turn back; what waited for it takes tickets,
/// in order, and what comes meanwhile comes behind.
#[tokio::test]
async fn b10_what_waited_for_a_turn_that_was_cut_keeps_its_order() {
    let Scene { clock, a, .. } = scene();
    let replica = open_sticky(&a, "a").await;
    let cut = turn(&replica, &chat("c")).await;
    let fence = cut.fence();
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.push(replica.take_ticket(&chat("c")).await.unwrap());
    }
    // One of them goes away.
    drop(waiting.remove(1));
    let held = gate();
    let mut once = Some(Fault::HoldAnswer(held.clone()));
    a.faults(move |command| is_take(command).then(|| once.take()).flatten());
    cut.revoke(LostReason::Settled);
    drop(cut);
    settle().await;
    // The first of them has no answer yet; this one must not overtake the others.
    waiting.push(replica.take_ticket(&chat("c")).await.unwrap());
    held.send_replace(true);
    let mut last = fence;
    for (nth, mut ticket) in waiting.into_iter().enumerate() {
        let next = wait(&replica, &mut ticket).await;
        assert!(next.fence() > last, "number {nth}: a grant that was given back is dead");
        assert_eq!(next.nth(), 0);
        last = next.fence();
        drop(next);
    }
    pass(&clock, LEASE).await;
    assert_eq!(a.look(|machine| machine.turn_counts()), (0, 0), "no ticket is left");
}

/// Rules 8 and 9: a message that came after the call-back has a ticket, and one that came before it
/// and waited has none when the step before it is cut. They share that ticket's turn, in order.
#[tokio::test]
async fn b10_after_a_cut_a_ticket_serves_who_came_before_it() {
    let Scene { a, b, .. } = scene();
    let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
    let cut = turn(&holder, &chat("c")).await;
    let mut first = holder.take_ticket(&chat("c")).await.unwrap();
    let mut second = holder.take_ticket(&chat("c")).await.unwrap();
    let mut called = other.take_ticket(&chat("c")).await.unwrap();
    settle().await;
    let mut later = holder.take_ticket(&chat("c")).await.unwrap();
    let mut behind = other.take_ticket(&chat("c")).await.unwrap();
    a.forget_asked();
    cut.revoke(LostReason::Settled);
    drop(cut);
    let theirs = wait(&other, &mut called).await;
    assert!(a.asked(is_take).is_empty(), "the ticket it has will do");
    theirs.keep(0);
    let one = wait(&holder, &mut first).await;
    assert_eq!(one.previous_holder(), other.incarnation(), "its memory is stale (C2)");
    assert!(now(&holder, &mut second).await.is_none());
    assert!(now(&holder, &mut later).await.is_none());
    one.keep(1);
    let two = wait(&holder, &mut second).await;
    assert_eq!((two.fence(), two.nth(), two.said_before()), (one.fence(), 1, 1));
    assert_eq!(two.previous_holder(), holder.incarnation());
    two.keep(1);
    let three = wait(&holder, &mut later).await;
    assert_eq!((three.fence(), three.nth()), (one.fence(), 2));
    assert!(now(&other, &mut behind).await.is_none(), "its ticket came after");
    three.keep(1);
    wait(&other, &mut behind).await.check().unwrap();
}

/// Rule 10 beside that: who took the ticket goes away. Before its turn, it serves the others; in
/// their turn, it ends nothing.
#[tokio::test]
async fn b10_after_a_cut_a_withdrawal_ends_no_other_messages_turn() {
    for granted in [false, true] {
        let Scene { a, b, .. } = scene();
        let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
        let cut = turn(&holder, &chat("c")).await;
        let mut first = holder.take_ticket(&chat("c")).await.unwrap();
        let mut second = holder.take_ticket(&chat("c")).await.unwrap();
        let mut called = other.take_ticket(&chat("c")).await.unwrap();
        settle().await;
        let later = holder.take_ticket(&chat("c")).await.unwrap();
        cut.revoke(LostReason::Settled);
        drop(cut);
        let theirs = wait(&other, &mut called).await;
        let mut later = Some(later);
        drop(later.take_if(|_| !granted));
        settle().await;
        theirs.keep(0);
        let one = wait(&holder, &mut first).await;
        drop(later);
        settle().await;
        one.check().unwrap();
        let held = a.look(|machine| machine.turn_counts());
        assert_eq!(held.0, 1, "the turn is held by whoever has it");
        one.keep(0);
        let two = wait(&holder, &mut second).await;
        assert_eq!(two.fence(), one.fence(), "one ticket serves both");
        two.keep(0);
        drop(turn(&other, &chat("c")).await);
    }
}

/// Rule 10 once more: a ticket whose withdrawal is on its way when the turn is cut is nobody's, also
/// where its turn comes first.
#[tokio::test]
async fn b10_after_a_cut_a_ticket_that_is_being_withdrawn_serves_nobody() {
    let Scene { clock, a, b, .. } = scene();
    let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
    let cut = turn(&holder, &chat("c")).await;
    let mut first = holder.take_ticket(&chat("c")).await.unwrap();
    let mut called = other.take_ticket(&chat("c")).await.unwrap();
    settle().await;
    let later = holder.take_ticket(&chat("c")).await.unwrap();
    let mut behind = other.take_ticket(&chat("c")).await.unwrap();
    let withdrawn = later.id();
    // The withdrawal has to be asked for again.
    let mut refused = Some(Fault::Refuse);
    a.faults(move |command| {
        let withdraws = matches!(command, Command::Release { .. });
        withdraws.then(|| refused.take()).flatten()
    });
    drop(later);
    settle().await;
    cut.revoke(LostReason::Settled);
    drop(cut);
    wait(&other, &mut called).await.keep(0);
    // Its turn comes; whoever waits has to go on waiting for a ticket of its own.
    assert!(now(&holder, &mut first).await.is_none());
    pass(&clock, LEASE).await;
    let theirs = wait(&other, &mut behind).await;
    theirs.check().unwrap();
    theirs.keep(0);
    let one = wait(&holder, &mut first).await;
    assert_ne!(one.ticket(), withdrawn);
    pass(&clock, LEASE).await;
    one.check().unwrap();
    assert_eq!(a.look(|machine| machine.turn_counts()), (1, 0));
}

/// Where nothing will come of the ticket that is being taken, another is taken for who waits.
#[tokio::test]
async fn b10_after_a_cut_a_ticket_that_is_refused_leaves_nobody_waiting() {
    let Scene { clock, a, .. } = scene();
    let holder = open_sticky(&a, "a").await;
    let cut = turn(&holder, &chat("c")).await;
    let mut first = holder.take_ticket(&chat("c")).await.unwrap();
    a.forget_asked();
    let mut faults = [Fault::Refuse, Fault::Lose, Fault::LoseAnswer].into_iter();
    a.faults(move |command| is_take(command).then(|| faults.next()).flatten());
    cut.revoke(LostReason::Settled);
    drop(cut);
    pass(&clock, LEASE * 4).await;
    assert_eq!(a.asked(is_take).len(), 4, "one at a time");
    let one = wait(&holder, &mut first).await;
    one.check().unwrap();
}

/// A local message whose asker goes away passes the turn on, before it has it and after.
#[tokio::test]
async fn b10_a_local_message_that_goes_away_passes_the_turn_on() {
    let Scene { a, b, .. } = scene();
    let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
    let at_work = turn(&holder, &chat("c")).await;
    let waiting = holder.take_ticket(&chat("c")).await.unwrap();
    let granted = holder.take_ticket(&chat("c")).await.unwrap();
    drop(waiting);
    at_work.keep(0);
    // It has the turn, and never took it out.
    drop(granted);
    let idle = turn(&holder, &chat("c")).await;
    assert_eq!(idle.fence(), at_work.fence());
    idle.keep(0);
    drop(holder.take_ticket(&chat("c")).await.unwrap());
    turn(&other, &chat("c")).await.check().unwrap();
}

/// Rule 6: where a write of the message has no answer, nothing follows under its fence.
#[tokio::test]
async fn b10_a_fence_with_a_write_in_doubt_does_not_go_on() {
    let Scene { clock, a, .. } = scene();
    let replica = open_sticky(&a, "a").await;
    let doubtful = turn(&replica, &chat("c")).await;
    let mut once = Some(Fault::LoseAnswer);
    a.faults(move |command| is_commit(command).then(|| once.take()).flatten());
    let writing = tokio::spawn({
        let store = a.store();
        async move {
            let row = RowKey::new(Table::Kv, "r");
            let put = store::Op::Put { row, value: vec![1], expect: Expect::Any, ttl_ms: None };
            let outcome = store.commit(store::Authority::Turn(&doubtful), vec![put]).await;
            outcome.expect_err("its answer is lost");
            doubtful.keep(0);
            doubtful.fence()
        }
    });
    pass(&clock, SECOND * 6).await;
    let fence = writing.await.unwrap();
    assert!(turn(&replica, &chat("c")).await.fence() > fence);
}

#[tokio::test]
async fn b10_unused_turns_lapse_together() {
    let Scene { clock, a, .. } = scene();
    let replica = open_sticky(&a, "a").await;
    for name in ["c", "d", "e"] {
        turn(&replica, &chat(name)).await.keep(0);
    }
    pass(&clock, SECOND * 40).await;
    // This one is used once more.
    turn(&replica, &chat("d")).await.keep(0);
    a.forget_asked();
    pass(&clock, SECOND * 18).await;
    assert!(a.asked(is_release).is_empty(), "a minute has not passed");
    pass(&clock, SECOND * 12).await;
    let released = a.asked(is_release);
    assert_eq!(released.len(), 2);
    assert_eq!(released[0].at, released[1].at, "in one go");
    assert_eq!(a.look(|machine| machine.turn_counts()), (1, 0));
    pass(&clock, SECOND * 40).await;
    assert_eq!(a.look(|machine| machine.turn_counts()), (0, 0));
}

#[tokio::test]
async fn b10_beyond_the_bound_the_least_recently_used_goes() {
    let Scene { a, .. } = scene();
    let replica = open_sticky(&a, "a").await;
    replica.keep_turns(Some(Sticky { chats_max: 2, ..Sticky::default() }));
    let mut fences = Vec::new();
    for name in ["c", "d", "c", "e"] {
        let next = turn(&replica, &chat(name)).await;
        fences.push(next.fence());
        next.keep(0);
        settle().await;
    }
    assert_eq!(fences[0], fences[2]);
    assert_eq!(a.look(|machine| machine.turn_counts()), (2, 0));
    assert_eq!(turn(&replica, &chat("c")).await.fence(), fences[0], "used after d");
    assert!(turn(&replica, &chat("d")).await.fence() > fences[1], "d was given back");
}

#[tokio::test]
async fn b10_a_chat_called_back_twice_within_a_minute_rests_for_a_minute() {
    let Scene { clock, a, b, .. } = scene();
    let holder = open_sticky(&a, "a").await;
    let other = open(&b, "b").await;
    let stays = async || {
        let next = turn(&holder, &chat("c")).await;
        next.keep(0);
        settle().await;
        a.look(|machine| machine.turn_counts()) == (1, 0)
    };
    let calls = async || drop(turn(&other, &chat("c")).await);
    assert!(stays().await);
    calls().await;
    assert!(stays().await, "once is no pattern");
    pass(&clock, SECOND * 50).await;
    calls().await;
    assert!(!stays().await, "twice within a minute is");
    pass(&clock, SECOND * 50).await;
    assert!(!stays().await);
    pass(&clock, SECOND * 12).await;
    assert!(stays().await);
    // Calls a minute apart change nothing.
    pass(&clock, SECOND * 58).await;
    calls().await;
    assert!(stays().await);
}

#[tokio::test]
async fn b10_turned_off_or_stopped_nothing_stays() {
    let Scene { a, b, .. } = scene();
    let (replica, other) = (open_sticky(&a, "a").await, open(&b, "b").await);
    for name in ["c", "d"] {
        turn(&replica, &chat(name)).await.keep(0);
    }
    let at_work = turn(&replica, &chat("e")).await;
    replica.keep_turns(None);
    settle().await;
    assert_eq!(a.look(|machine| machine.turn_counts()), (1, 0), "but what is at work");
    at_work.check().unwrap();
    at_work.keep(0);
    settle().await;
    assert_eq!(a.look(|machine| machine.turn_counts()), (0, 0));
    let plain = turn(&other, &chat("c")).await;
    plain.keep(0);
    settle().await;
    assert_eq!(a.look(|machine| machine.turn_counts()), (0, 0), "as in the beginning");
}

/// A holder that dies, and one that loses its lease: its chats go on elsewhere after the lease, and
/// nothing it had taken is handled under the lost turn.
#[tokio::test]
async fn b10_a_turn_that_stayed_ends_with_its_session() {
    let Scene { clock, a, b, .. } = scene();
    let (holder, other) = (open_sticky(&a, "a").await, open_sticky(&b, "b").await);
    let at_work = turn(&holder, &chat("c")).await;
    let lost = holder.incarnation();
    let mut local = holder.take_ticket(&chat("c")).await.unwrap();
    a.faults(|_| Some(Fault::Lose));
    let mut next = other.take_ticket(&chat("c")).await.unwrap();
    pass(&clock, SECOND * 14).await;
    at_work.check().expect_err("its holder gave it up in time");
    at_work.keep(0);
    let fault = holder.wait_turn(&mut local, BootInstant::never()).await.unwrap_err();
    assert!(matches!(fault, CoordinationError::LeaseLost { .. }), "{fault}");
    assert!(fault.to_string().contains(&chat("c").to_string()), "it names the chat: {fault}");
    assert!(now(&other, &mut next).await.is_none(), "not before its lease ended");
    pass(&clock, SECOND * 2).await;
    let theirs = wait(&other, &mut next).await;
    assert_eq!(theirs.previous_holder(), lost);
    a.heal();
    pass(&clock, SECOND * 10).await;
    // It comes back as another incarnation, and has to queue.
    let mut back = holder.take_ticket(&chat("c")).await.unwrap();
    assert!(now(&holder, &mut back).await.is_none());
    theirs.keep(0);
    let back = wait(&holder, &mut back).await;
    assert!(back.fence() > theirs.fence() && holder.incarnation() != lost);

    holder.crash();
    drop(back);
    let mut after = other.take_ticket(&chat("c")).await.unwrap();
    assert!(now(&other, &mut after).await.is_none());
    pass(&clock, SECOND * 16).await;
    wait(&other, &mut after).await.check().unwrap();
}
