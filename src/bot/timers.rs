//! The timers of conversations that wait (SPEC B6).
//!
//! Problem: when a wait's time is over, another replica may have the chat, or the answer may be in
//! the queue already.
//! Idea: a timer decides nothing. When it fires it takes a ticket in the chat's queue like a message,
//! and under that turn it is seen whether this memory is still the chat's conversation and still in
//! that wait. If not, the copy is dropped: nothing is said and nothing stored is touched.
//! Where this node already sees that the conversation has moved on elsewhere, the copy is dropped
//! without a ticket: a turn taken for nothing would make the other replica's memory look stale.

use std::sync::{Arc, Weak};

use tokio::task::AbortHandle;

use super::checkpoint;
use super::conversation::core::Core;
use super::memory::{Live, Matching};
use super::outbox::back_off;
use super::runtime::{Phase, Runtime};
use super::scope::Cause;
use super::turns;
use crate::clock::BootInstant;
use crate::store::Consistency;
use crate::types::{ChatKey, Message};

/// Sleeps until a wait is due; dropped, it wakes nothing.
pub(crate) struct Sleeper(AbortHandle);

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Arms the timer of a conversation that waits, to fire at this instant or later; `None` where
/// nothing will be due.
pub(crate) fn arm(
    runtime: &Arc<Runtime>,
    chat: &ChatKey,
    live: &Live,
    earliest: BootInstant,
) -> Option<Sleeper> {
    let (at, number) = live.core.due_at()?;
    let core = Arc::downgrade(&live.core);
    let matches = live.matching();
    let timer = Timer { chat: chat.clone(), core, number, matches };
    let task = runtime.tasks.spawn(sleep(runtime.clone(), timer, at.max(earliest)));
    Some(Sleeper(task.abort_handle()))
}

struct Timer {
    chat: ChatKey,
    /// The conversation, unless it went meanwhile.
    core: Weak<Core>,
    /// Its wait.
    number: u64,
    /// What is stored of it.
    matches: Matching,
}

impl Timer {
    /// Whether the conversation still waits for this.
    fn waits(&self) -> Option<Arc<Core>> {
        self.core.upgrade().filter(|core| core.due_at().is_some_and(|(_, n)| n == self.number))
    }

    /// Whether this node has seen that the conversation went on elsewhere. A look at what it has
    /// applied, which only moves on, and is never behind what this replica itself wrote.
    async fn is_stale(&self, runtime: &Runtime, matches: Matching) -> bool {
        let row = checkpoint::row(&self.chat);
        match runtime.store.read(&row, Consistency::Local).await {
            Ok(row) => !matches.with(row.map(|row| row.revision)),
            Err(_) => false,
        }
    }

    /// Drops the copy, unless a turn of this replica was what moved the stored conversation on: then
    /// the memory that turn left matches it.
    async fn drop_copy(&self, runtime: &Runtime) {
        let mut held = runtime.chats.hold(&self.chat).await;
        let Some(live) = held.take() else { return };
        let same = self.core.as_ptr() == Arc::as_ptr(&live.core);
        let waits = same && self.waits().is_some();
        if !waits || !self.is_stale(runtime, live.matching()).await {
            held.put(live);
        }
    }
}

async fn sleep(runtime: Arc<Runtime>, timer: Timer, at: BootInstant) {
    tokio::select! {
        biased;
        () = runtime.reached(Phase::Closing) => return,
        () = runtime.clock.sleep_until(at) => {}
    }
    // A task of its own: this one ends with the memory it was armed for, and the turn it takes may
    // be what ends that.
    runtime.tasks.spawn(fire(runtime.clone(), timer));
}

async fn fire(runtime: Arc<Runtime>, timer: Timer) {
    let closing = runtime.reached(Phase::Closing);
    tokio::pin!(closing);
    for attempt in 0.. {
        let Some(core) = timer.waits() else { return };
        // In the name of the message that was heard last: what is said now follows from it.
        let Some(heard) = core.heard() else { return };
        drop(core);
        if timer.is_stale(&runtime, timer.matches).await {
            timer.drop_copy(&runtime).await;
            if timer.waits().is_none() {
                return;
            }
        }
        let taking = async {
            let mut ticket = runtime.coordinator.take_ticket(&timer.chat).await?;
            let until = runtime.clock.now() + runtime.turn_wait;
            runtime.coordinator.wait_turn(&mut ticket, until).await
        };
        let turn = tokio::select! {
            biased;
            () = &mut closing => return,
            turn = taking => turn,
        };
        match turn {
            Ok(turn) => {
                let message = Message { text: String::new(), ..Message::clone(&heard) };
                return turns::work(runtime, turn, message, 1, Cause::Timer(timer.number)).await;
            }
            // Without a session nothing acts; where it is lost, so is this memory.
            Err(error) => tracing::debug!(chat = %timer.chat, %error, "a timer waits for its turn"),
        }
        let again = runtime.clock.now() + back_off(attempt);
        tokio::select! {
            biased;
            () = &mut closing => return,
            () = runtime.clock.sleep_until(again) => {}
        }
    }
}
