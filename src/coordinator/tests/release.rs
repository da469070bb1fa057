//! Releases, withdrawals and orphans: nothing a live replica gave up keeps a chat waiting.

use super::*;
use crate::coordinator::{CoordinationError, JournaledTurn, LostReason};
use crate::machine::TicketState;
use crate::store::{self, CommitError, Store};

/// E4: a release that was lost on its way is repaired within lease / 3.
#[tokio::test]
async fn e4_a_lost_release_is_repaired_within_a_third_of_the_lease() {
    for fault in [Fault::Lose, Fault::LoseAnswer, Fault::Refuse] {
        let Scene { clock, a, b, .. } = scene();
        let (first, second) = (open(&a, "a").await, open(&b, "b").await);
        let held = turn(&first, &chat("c")).await;
        let mut next = second.take_ticket(&chat("c")).await.unwrap();
        let mut once = Some(fault);
        a.faults(move |command| is_commit(command).then(|| once.take()).flatten());
        drop(held);
        pass(&clock, LEASE / 3).await;
        second.wait_turn(&mut next, clock.now()).await.unwrap().check().unwrap();
    }
}

/// A watched release answers once the group has released, and only then.
#[tokio::test]
async fn e4_a_watched_release_answers_when_it_is_done() {
    let Scene { clock, a, .. } = scene();
    let replica = open(&a, "a").await;
    let held = turn(&replica, &chat("c")).await;
    let queue = held.queue().clone();
    let mut once = Some(Fault::Lose);
    a.faults(move |command| is_commit(command).then(|| once.take()).flatten());
    let release = tokio::spawn(held.release());
    pass(&clock, SECOND).await;
    assert!(!release.is_finished(), "nobody knows yet");
    pass(&clock, SECOND * 4).await;
    release.await.unwrap().unwrap();
    assert_eq!(a.look(|machine| machine.holder(&queue)), None);
}

/// DESIGN 4 rule 10: asking again for a release never ends a later grant of the same ticket.
#[tokio::test]
async fn e4_a_repeated_release_spares_the_next_grant() {
    let Scene { clock, a, .. } = scene();
    let replica = open(&a, "a").await;
    replica.admit(vec![message(&chat("c"), "m")]).await.unwrap();
    let JournaledTurn { turn: first, record } = replica.next_journaled().await.unwrap();
    assert_eq!(record.attempts, 0);
    a.faults(|command| is_commit(command).then_some(Fault::LoseAnswer));
    let fence = first.fence();
    // Not acknowledged: the message is returned and granted again at once.
    drop(first);
    let JournaledTurn { turn: second, record } = replica.next_journaled().await.unwrap();
    assert!(second.fence() > fence);
    assert_eq!(record.attempts, 1);
    pass(&clock, LEASE * 2).await;
    assert!(a.asked(is_commit).len() > 3, "the release was asked for again and again");
    second.check().unwrap();
    match a.look(|machine| machine.ticket(&prefix(), second.ticket())) {
        TicketState::Granted { grant, .. } => assert_eq!(grant.fence, second.fence()),
        other => panic!("the second grant was ended: {other:?}"),
    }
}

/// Case c9: a ticket whose answer was lost is nobody's; it does not hold the chat.
#[tokio::test]
async fn e4_a_ticket_whose_answer_was_lost_holds_nobody_up() {
    let Scene { clock, a, b, .. } = scene();
    let (first, second) = (open(&a, "a").await, open(&b, "b").await);
    a.faults(|command| is_take(command).then_some(Fault::LoseAnswer));
    let asking = tokio::spawn({
        let first = first.clone();
        async move { first.take_ticket(&chat("c")).await.map(drop) }
    });
    settle().await;
    let mut next = second.take_ticket(&chat("c")).await.unwrap();
    // As long as its answer may come, the ticket is kept.
    let none = second.wait_turn(&mut next, clock.now()).await;
    assert!(matches!(none, Err(CoordinationError::Unavailable { .. })));
    pass(&clock, LEASE + SECOND).await;
    assert!(matches!(asking.await.unwrap(), Err(CoordinationError::Unavailable { .. })));
    second.wait_turn(&mut next, clock.now()).await.unwrap().check().unwrap();
    assert_eq!(a.look(|machine| machine.turn_counts()), (1, 0), "no orphan is left");
}

/// A caller that goes away while its ticket is being taken leaves none behind, whether the group
/// takes it before or after.
#[tokio::test]
async fn e4_a_ticket_whose_caller_went_away_is_given_back() {
    for late in [Fault::HoldAnswer(gate()), Fault::Hold(gate())] {
        let Scene { a, b, .. } = scene();
        let (first, second) = (open(&a, "a").await, open(&b, "b").await);
        let fault = late.clone();
        a.faults(move |command| is_take(command).then(|| fault.clone()));
        let asking = tokio::spawn({
            let first = first.clone();
            async move { first.take_ticket(&chat("c")).await.map(drop) }
        });
        settle().await;
        asking.abort();
        settle().await;
        let (Fault::HoldAnswer(gate) | Fault::Hold(gate)) = late else { unreachable!() };
        gate.send_replace(true);
        settle().await;
        assert_eq!(a.look(|machine| machine.turn_counts()), (0, 0));
        turn(&second, &chat("c")).await.check().unwrap();
    }
}

/// An answer that did not come stays unknown; a release it may have held makes the turn dead here,
/// and the guard sees to it that it is released in the group.
#[tokio::test]
async fn b8_an_unknown_commit_that_releases_ends_the_turn_here() {
    for fault in [Fault::Lose, Fault::LoseAnswer] {
        let Scene { clock, a, b, .. } = scene();
        let (first, second) = (open(&a, "a").await, open(&b, "b").await);
        let (held, store) = (turn(&first, &chat("c")).await, a.store());
        let mut next = second.take_ticket(&chat("c")).await.unwrap();
        let mut once = Some(fault);
        a.faults(move |command| is_commit(command).then(|| once.take()).flatten());
        let commit = tokio::spawn(async move {
            let ops = vec![store::Op::Release(held.ticket())];
            let answer = store.commit(store::Authority::Turn(&held), ops).await;
            (held, answer)
        });
        pass(&clock, SECOND * 6).await;
        let (held, answer) = commit.await.unwrap();
        assert!(matches!(answer, Err(CommitError::OutcomeUnknown { .. })), "{answer:?}");
        assert!(!answer.unwrap_err().is_retryable(), "it may have been done");
        assert_eq!(held.check(), Err(LostReason::SteppedDown));
        drop(held);
        settle().await;
        second.wait_turn(&mut next, clock.now()).await.unwrap().check().unwrap();
    }
}

/// A commit that certainly was not made leaves the turn as it was.
#[tokio::test]
async fn b8_a_commit_that_was_not_made_may_be_made_again() {
    let Scene { a, .. } = scene();
    let replica = open(&a, "a").await;
    let (held, store) = (turn(&replica, &chat("c")).await, a.store());
    let ops = || vec![store::Op::Release(held.ticket())];
    a.faults(|command| is_commit(command).then_some(Fault::Refuse));
    let answer = store.commit(store::Authority::Turn(&held), ops()).await;
    assert!(answer.as_ref().is_err_and(CommitError::is_retryable), "{answer:?}");
    held.check().unwrap();
    a.heal();
    store.commit(store::Authority::Turn(&held), ops()).await.unwrap();
    assert_eq!(held.check(), Err(LostReason::SteppedDown));
    a.forget_asked();
    drop(held);
    settle().await;
    assert_eq!(a.asked(|_| true).len(), 0, "what the commit released is not released again");
}
