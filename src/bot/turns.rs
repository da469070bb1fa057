//! The turn driver: from a granted turn to the one commit that ends it.
//!
//! Problem: a message's effect is several things (a checkpoint, replies, the message's own record,
//! the turn), and a process may die between any two of them.
//! Idea: gather them all and make one commit, accepted only while this turn is held.
//! Invariants:
//! 1. Nothing of a turn is written after it was lost: every write is fenced, and a step is cut by
//!    dropping it, with what it could say (SPEC C10).
//! 2. A chat's conversation is resumed in memory only where this incarnation held the turn before
//!    and the stored checkpoint is the one this memory matches (SPEC C2, DESIGN 4).
//! 3. A message that had no effect is not acknowledged: it returns to its place and is tried again,
//!    until it becomes a dead letter (SPEC C9).

use std::sync::Arc;

use super::error::RuntimeError;
use super::job::Job;
use super::runtime::{Phase, Runtime};
use super::scope::{Cause, Scope};
use crate::coordinator::{JournaledTurn, Ticket, Turn};
use crate::store::JournalRecord;
use crate::types::Message;

/// Handles journaled messages as their turns are granted, until the bot closes.
pub(crate) async fn journaled(runtime: Arc<Runtime>) {
    let closing = runtime.reached(Phase::Closing);
    tokio::pin!(closing);
    loop {
        // The semaphore is never closed.
        let Ok(permit) = runtime.turns.clone().acquire_owned().await else { return };
        let next = tokio::select! {
            biased;
            () = &mut closing => return,
            next = runtime.coordinator.next_journaled() => next,
        };
        let Some(JournaledTurn { turn, record }) = next else { return };
        runtime.intake.came(turn.ticket());
        let work = journaled_turn(runtime.clone(), turn, record);
        runtime.tasks.spawn(async move {
            work.await;
            drop(permit);
        });
    }
}

async fn journaled_turn(runtime: Arc<Runtime>, turn: Turn, record: JournalRecord) {
    let attempt = record.attempts.saturating_add(1);
    match serde_json::from_slice::<Message>(&record.body) {
        Ok(mut message) => {
            // It may have come under a key that the chat has no more (SPEC B2).
            message.chat.clone_from(turn.key());
            work(runtime, turn, message, attempt, Cause::Journaled).await;
        }
        Err(error) => {
            let why = error.to_string();
            let error = RuntimeError::Message { chat: record.chat.clone(), id: record.id, why };
            runtime.events.error(Some(record.chat), error);
            // Dropping the turn returns the record; after its last attempt it is a dead letter.
        }
    }
}

/// Without durability: waits for the ticket's turn, then handles the message.
pub(crate) async fn ticketed(runtime: Arc<Runtime>, mut ticket: Ticket, message: Message) {
    let until = runtime.clock.now() + runtime.turn_wait;
    let turn = tokio::select! {
        biased;
        () = runtime.reached(Phase::Cutting) => return,
        turn = runtime.coordinator.wait_turn(&mut ticket, until) => turn,
    };
    match turn {
        Ok(turn) => work(runtime, turn, message, 1, Cause::Message).await,
        // The dropped ticket is withdrawn (SPEC B4).
        Err(error) => {
            runtime.intake.forget(&message);
            runtime.events.error(Some(message.chat.to_string()), error);
        }
    }
}

/// Does the work of one turn, to its end.
pub(crate) async fn work(
    runtime: Arc<Runtime>,
    turn: Turn,
    message: Message,
    attempt: u32,
    cause: Cause,
) {
    let mut held = runtime.chats.hold(&message.chat).await;
    let scope = Scope::new(runtime.clone(), turn, message, cause);
    Job { runtime, scope, attempt }.run(&mut held).await;
}
