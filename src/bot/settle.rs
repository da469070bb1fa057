//! The end of a turn: the one commit of all it did, or none of it.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::checkpoint::{self, Keeping};
use super::error::{EnterError, RuntimeError};
use super::job::{End, Job};
use super::memory::{Held, Live, LiveRow};
use super::outbox::{Sender, back_off};
use super::progress::Progress;
use super::runtime::Phase;
use super::scope::Stored;
use super::timers;
use crate::coordinator::LostReason;
use crate::provider::room;
use crate::store::{CommitError, Expect, Op, Outgoing};
use crate::types::Revision;

/// Longest wait before a message is tried again.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(1);

/// What becomes of the chat's conversation with the turn's last commit.
enum After {
    /// It waits.
    Waits(Box<Live>),
    /// There is none.
    Over,
    /// It is as it was, in memory and in the store.
    Same(Option<Box<Live>>),
}

/// All that a turn did.
struct Effects {
    /// Its release last.
    ops: Vec<Op>,
    /// Whether the first one writes the conversation's row, and whether as a stub.
    wrote: Option<bool>,
    /// What goes out after that.
    said: Vec<Outgoing>,
}

impl Job {
    /// Ends the turn.
    pub(super) async fn finish(&self, end: End, held: &mut Held) {
        // A call that failed for a lost turn may have been swallowed by the step: ask the turn.
        let end = match (end, self.scope.check()) {
            (End::Lost(reason), _) | (_, Err(reason)) => End::Lost(reason),
            (end, Ok(())) => end,
        };
        match end {
            End::Waits(live) => self.commit(After::Waits(live), held).await,
            End::Over | End::Unanswered => self.commit(After::Over, held).await,
            End::Stopped(live) => self.commit(After::Same(live), held).await,
            End::Lost(reason) => self.lost(reason),
            End::Failed(error) => self.failed(error).await,
            End::FailedForGood(error) => {
                self.runtime.events.error(Some(self.chat()), error);
                self.commit(After::Over, held).await;
            }
        }
    }

    /// Keeps a conversation that waits, its timer armed.
    pub(super) fn put(&self, held: &mut Held, mut live: Live) {
        let now = self.runtime.clock.now();
        live.sleeper = timers::arm(&self.runtime, self.scope.chat(), &live, now);
        held.put(live);
    }

    /// Arms its timer anew where what was due could not be done; a little later than now.
    pub(super) fn put_later(&self, held: &mut Held) {
        let Some(mut live) = held.take() else { return };
        let later = self.runtime.clock.now() + RETRY_WAIT_MAX;
        live.sleeper = timers::arm(&self.runtime, self.scope.chat(), &live, later);
        held.put(live);
    }

    /// Ends the turn with all it did, in one commit.
    async fn commit(&self, after: After, held: &mut Held) {
        let turn = self.scope.turn();
        let effects = match self.effects(&after) {
            Ok(effects) => effects,
            Err(error) => {
                drop(after);
                // Nobody is asked what no checkpoint knows.
                drop(self.scope.take_said());
                return self.failed(error).await;
            }
        };
        let Effects { ops, wrote, said } = effects;
        let releases = matches!(ops.last(), Some(Op::Release(_) | Op::Keep { .. }));
        let sends = ops.iter().any(|op| matches!(op, Op::Send { send, .. } if send.deliver));
        let written = match self.written_surely(ops, releases).await {
            Ok(revisions) => revisions.first().copied(),
            Err(error) => return self.refused(error),
        };
        if releases {
            turn.mark_released();
        }
        if sends {
            // The group says so too; this is sooner, and a bot that stops does not miss it.
            Sender::ready(&self.runtime, room(self.scope.chat()));
        }
        self.scope.deliver(&said).await;
        match after {
            After::Waits(live) => {
                let new = |stub| written.map(|revision| LiveRow { revision, stub });
                let row = wrote.map_or_else(|| self.kept_row(&live), new);
                self.put(held, Live { row, stored: None, ..*live });
            }
            After::Same(Some(live)) => self.put(held, *live),
            After::Same(None) | After::Over => {}
        }
        if !releases {
            turn.keep(self.scope.said_so_far());
        }
    }

    /// What ends the turn within its last commit; `None` where it ends after it.
    pub(super) fn ending(&self) -> Option<Op> {
        let turn = self.scope.turn();
        let ticket = turn.ticket();
        match self.runtime.sticky {
            // Rule 6 of DESIGN 4: a fence with a write in doubt does not go on.
            Some(_) if self.runtime.durable && !turn.is_uncertain() => {
                Some(Op::Keep { ticket, said: self.scope.said_so_far() })
            }
            Some(_) if !self.runtime.durable && !turn.to_release() => None,
            _ => Some(Op::Release(ticket)),
        }
    }

    /// The row of a conversation whose turn wrote none.
    fn kept_row(&self, live: &Live) -> Option<LiveRow> {
        match self.runtime.keeping(&live.flow, &live.core) {
            Keeping::Stub(_) => live.row,
            _ => None,
        }
    }

    fn effects(&self, after: &After) -> Result<Effects, RuntimeError> {
        let ticket = self.scope.turn().ticket();
        let (mut ops, mut wrote) = (Vec::new(), None);
        let keeping = match after {
            After::Waits(live) => Some((live, self.runtime.keeping(&live.flow, &live.core))),
            After::Over | After::Same(_) => None,
        };
        match keeping {
            Some((live, Keeping::Persistent | Keeping::Ephemeral)) => {
                wrote = Some(false);
                ops.push(self.checkpoint(live)?);
            }
            Some((live, Keeping::Stub(_))) => {
                // Two writes a conversation: this one, and the one that clears it.
                if !live.row.is_some_and(|row| row.stub) {
                    wrote = Some(true);
                    ops.push(self.checkpoint(live)?);
                }
            }
            None if matches!(after, After::Same(_)) => {}
            None | Some((_, Keeping::Nothing)) => {
                if self.scope.stored() != Stored::Known(None) {
                    let row = checkpoint::row(self.scope.chat());
                    ops.push(Op::Delete { row, expect: self.scope.expect() });
                }
            }
        }
        let said = self.scope.take_said();
        ops.extend(self.scope.sends(&said));
        if self.scope.journaled().is_some() {
            ops.push(Op::Acknowledge(ticket));
        }
        // What is still to be said is said under the turn.
        let silent = self.runtime.durable || !said.iter().any(|send| send.deliver);
        if self.runtime.fenced_store && !ops.is_empty() && silent {
            ops.extend(self.ending());
        }
        Ok(Effects { ops, wrote, said })
    }

    /// The write of a waiting conversation's row.
    fn checkpoint(&self, live: &Live) -> Result<Op, RuntimeError> {
        let progress = Progress {
            runtime: self.runtime.clone(),
            scope: self.scope.clone(),
            core: live.core.clone(),
            flow: live.flow.clone(),
            initial: live.initial.clone(),
            hooked: false,
            stored: parking_lot::Mutex::new(None),
            refused: AtomicBool::new(false),
        };
        progress.put(false).map_err(|why| {
            let flow = live.flow.plan.name.to_owned();
            let source = EnterError::State { flow, why };
            RuntimeError::Enter { chat: self.chat(), source }
        })
    }

    /// As `written`. Without durability nothing comes again, and what the turn said waits for this: so
    /// where the answer is missing and the turn is still held, the same is asked again under its
    /// fence, until there is one.
    async fn written_surely(
        &self,
        mut ops: Vec<Op>,
        releases: bool,
    ) -> Result<Vec<Revision>, CommitError> {
        loop {
            let written = self.written(ops.clone()).await;
            let asks_again = matches!(written, Err(CommitError::OutcomeUnknown { .. }))
                && !self.runtime.durable
                && self.runtime.fenced_store
                && !releases
                && self.scope.check().is_ok();
            if !asks_again {
                return written;
            }
            self.scope.turn().mark_uncertain();
            for op in &mut ops {
                if let Op::Put { expect, .. } | Op::Delete { expect, .. } = op {
                    *expect = Expect::Any;
                }
            }
            self.pause(back_off(0)).await;
        }
    }

    /// Commits, again where it was certainly not written, as long as the turn is held.
    pub(super) async fn written(&self, ops: Vec<Op>) -> Result<Vec<Revision>, CommitError> {
        if ops.is_empty() {
            return Ok(Vec::new());
        }
        let mut attempt = 0;
        loop {
            let error = match self.runtime.store.commit(self.scope.authority(), ops.clone()).await {
                Ok(revisions) => return Ok(revisions),
                Err(error) => error,
            };
            if !error.is_retryable() || self.scope.check().is_err() {
                return Err(error);
            }
            self.pause(back_off(attempt)).await;
            attempt += 1;
        }
    }

    /// The commit that ends the turn was not made, or may not have been: memory goes, nothing else
    /// is written, and the turn's release follows. A message that was not acknowledged comes again.
    pub(super) fn refused(&self, error: CommitError) {
        match error {
            CommitError::Superseded { .. } | CommitError::Fenced { .. } => {
                self.lost(self.scope.check().err().unwrap_or(LostReason::Superseded));
            }
            source => {
                let error = RuntimeError::Commit { chat: self.chat(), source };
                self.runtime.events.error(Some(self.chat()), error);
            }
        }
    }

    fn lost(&self, reason: LostReason) {
        self.scope.turn().revoke(reason);
        self.scope.tell_lost(reason);
    }

    /// Reports a failure and waits a little before the message comes again.
    pub(super) async fn failed(&self, error: RuntimeError) {
        self.runtime.events.error(Some(self.chat()), error);
        if self.scope.journaled().is_none() {
            // It does not come again, and what it said was said.
            let said = self.scope.take_said();
            return self.scope.deliver(&said).await;
        }
        let wait = Duration::from_millis(25) * 2_u32.saturating_pow(self.attempt.min(6));
        self.pause(wait.min(RETRY_WAIT_MAX)).await;
    }

    /// Waits, but not past the turn's loss or the bot's end.
    async fn pause(&self, wait: Duration) {
        let until = self.runtime.clock.now() + wait;
        tokio::select! {
            biased;
            () = self.runtime.clock.sleep_until(until) => {}
            _ = self.scope.turn().lost() => {}
            () = self.runtime.reached(Phase::Cutting) => {}
        }
    }
}
