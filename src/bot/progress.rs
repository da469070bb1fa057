//! A step under way, and what of it is committed before it ends (SPEC C6, C8).
//!
//! Problem: a step that goes on for a while after its answer may be cut, and its replica may die;
//! the answer must not be lost with it, nor the steps that were finished before it in this turn.
//! Idea: where the step still runs after its first poll, its checkpoint is written: the step it is
//! in, with the answer to its first question. With durability the answer is in the journal, whose
//! message returns to the head of the chat's queue, so this may ride in the early commit of a step
//! that takes long; without, and where hooks have worked on the answer, the step goes on only after.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde_json::Value;

use super::checkpoint::{self, Checkpoint, Keeping, Stub, Writing};
use super::conversation::AnyFlow;
use super::conversation::core::{Core, Midway};
use super::drive::{Early, Flush, Wants};
use super::handover::{Fallback, Flows, TTL};
use super::runtime::Runtime;
use super::scope::{Scope, Stored};
use crate::coordinator::LostReason;
use crate::store::{CommitError, Op};

impl Runtime {
    /// How this conversation is kept.
    pub(crate) fn keeping(&self, flow: &AnyFlow, core: &Core) -> Keeping {
        if flow.plan.persistent {
            return Keeping::Persistent;
        }
        if !self.coordinated {
            return Keeping::Nothing;
        }
        if flow.plan.stackful || self.handover.flows == Flows::Keep {
            return Keeping::Stub(Stub::NotForwarded);
        }
        match core.stand().state {
            Ok(_) => Keeping::Ephemeral,
            Err(_) => Keeping::Stub(Stub::Unserialisable),
        }
    }

    /// Whether a conversation's first state is kept, for a fallback that may want it.
    pub(crate) fn keeps_initial(&self) -> bool {
        matches!(self.handover.fallback, Fallback::Restart | Fallback::Function(_))
    }

    /// How long an ephemeral checkpoint lives that is written now: never shorter than its wait.
    pub(crate) fn ttl_ms(&self, flow: &AnyFlow, core: &Core) -> u64 {
        let timeout = flow.plan.timeout.or(self.conversation_timeout);
        let ttl = self.handover.ttl.or(timeout).unwrap_or(TTL);
        let wait = core.waits_until().map(|until| until - self.clock.now()).unwrap_or_default();
        u64::try_from(ttl.max(wait).as_millis()).unwrap_or(u64::MAX).max(1)
    }
}

/// One run of a conversation under a turn.
pub(crate) struct Progress {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) scope: Arc<Scope>,
    pub(crate) core: Arc<Core>,
    pub(crate) flow: AnyFlow,
    pub(crate) initial: Option<Value>,
    /// Whether hooks changed the message.
    pub(crate) hooked: bool,
    // What the stored checkpoint says of the step; the writer sets it, the driver asks.
    pub(crate) stored: Mutex<Option<(u32, Midway)>>,
    /// Whether a write was not made: what it holds is said with the turn's last one.
    pub(crate) refused: AtomicBool,
}

impl Progress {
    /// What the checkpoint would say that it does not; `None` where there is nothing.
    fn unwritten(&self) -> Option<(u32, Midway)> {
        let now = self.core.midway()?;
        (*self.stored.lock() != Some(now)).then_some(now)
    }

    fn is_checkpointed(&self) -> bool {
        self.runtime.keeping(&self.flow, &self.core).is_checkpointed()
    }

    /// The write of the conversation's row, as it stands. `ticket`: the message at work, where this
    /// write does not acknowledge it.
    pub(crate) fn put(&self, midway: bool) -> Result<Op, String> {
        self.put_as(midway, |checkpoint| checkpoint)
    }

    fn put_as(
        &self,
        midway: bool,
        change: impl FnOnce(Checkpoint) -> Checkpoint,
    ) -> Result<Op, String> {
        let keeping = self.runtime.keeping(&self.flow, &self.core);
        let writing = Writing {
            keeping,
            ticket: self.scope.journaled().filter(|_| midway),
            hooked: self.hooked,
            answer_bytes_max: self.runtime.handover.max_answer_bytes,
            initial: self.initial.as_ref(),
        };
        let value = change(Checkpoint::of(&self.flow, &self.core, &writing)?).encode()?;
        let ephemeral = keeping == Keeping::Ephemeral;
        let ttl_ms = ephemeral.then(|| self.runtime.ttl_ms(&self.flow, &self.core));
        let row = checkpoint::row(self.scope.chat());
        Ok(Op::Put { row, value, expect: self.scope.expect(), ttl_ms })
    }

    /// Writes the entry of a step before anything of it runs (SPEC C5).
    pub(crate) async fn enter(self: &Arc<Self>) -> Result<(), LostReason> {
        if self.unwritten().is_some() && self.is_checkpointed() {
            self.clone().commit().await?;
        }
        Ok(())
    }

    /// The step failed. Where its checkpoint keeps the answer it failed with, and no journal will give
    /// up on that, the next run asks anew: else each message would fail it again.
    pub(crate) async fn failed(&self) {
        let kept = matches!(*self.stored.lock(), Some((_, Midway::Answered)));
        if !kept || self.scope.journaled().is_some() || !self.is_checkpointed() {
            return;
        }
        let written = match self.put_as(false, Checkpoint::asking_again) {
            Ok(put) => self.scope.commit_said(Some(put), &[]).await.map_err(|e| e.to_string()),
            Err(why) => Err(why),
        };
        if let Err(why) = written {
            tracing::warn!(chat = %self.scope.chat(), %why, "a failed step keeps its answer");
        }
    }

    async fn commit(self: Arc<Self>) -> Result<(), LostReason> {
        let now = self.unwritten().filter(|_| self.is_checkpointed());
        // Marked first: what cannot be written now is not tried again at every wait.
        if let Some(now) = now {
            *self.stored.lock() = Some(now);
        }
        let put = match now.map(|_| self.put(true)) {
            Some(Ok(put)) => Some(put),
            Some(Err(why)) => {
                tracing::warn!(chat = %self.scope.chat(), %why, "a step's checkpoint cannot be made");
                self.refused.store(true, Ordering::Release);
                None
            }
            None => None,
        };
        if put.is_none() && self.refused.load(Ordering::Acquire) && self.scope.is_holding() {
            return Ok(());
        }
        let puts = put.is_some();
        let said = self.scope.take_said();
        match self.scope.commit_said(put, &said).await {
            Ok(revisions) => {
                if let Some(revision) = revisions.first().filter(|_| puts) {
                    self.scope.set_stored(Stored::Known(Some(*revision)));
                }
                Ok(())
            }
            Err(CommitError::Fenced { .. } | CommitError::Superseded { .. }) => {
                Err(self.scope.check().err().unwrap_or(LostReason::Superseded))
            }
            Err(error) => {
                tracing::warn!(chat = %self.scope.chat(), %error, "a step's progress is not committed");
                self.scope.put_back(said);
                self.refused.store(puts, Ordering::Release);
                match error {
                    CommitError::OutcomeUnknown { .. } if puts && !self.runtime.fenced_store => {
                        // Without a fence, what is there can only be learned by another turn.
                        return Err(LostReason::Superseded);
                    }
                    CommitError::OutcomeUnknown { .. } if puts => {
                        self.scope.set_stored(Stored::Unknown);
                    }
                    _ => {}
                }
                Ok(())
            }
        }
    }
}

impl Early for Progress {
    fn wants(&self) -> Wants {
        if self.refused.load(Ordering::Acquire) && self.scope.is_holding() {
            return Wants::Nothing;
        }
        let unwritten = self.unwritten().is_some() && self.is_checkpointed();
        // Hooks that have run do not run again, whatever they made of the message.
        let at_once = !self.runtime.hooks.is_empty() || self.scope.journaled().is_none();
        match (unwritten, self.scope.has_said()) {
            (true, _) if at_once => Wants::Now,
            (true, _) | (_, true) => Wants::Soon,
            _ => Wants::Nothing,
        }
    }

    fn write(self: Arc<Self>) -> Flush {
        Box::pin(self.commit())
    }
}
