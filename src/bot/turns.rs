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
use std::time::Duration;

use super::checkpoint::{self, Checkpoint};
use super::conversation::core::{Core, Replay};
use super::conversation::{BeginError, Ended, From};
use super::ctx::{Ctx, Entering};
use super::drive::{Driven, drive};
use super::error::{ConvoError, EnterError, RuntimeError};
use super::events::{Event, HandoverOutcome};
use super::inbox;
use super::memory::{Held, Live};
use super::outbox::Sender;
use super::runtime::{Phase, Runtime};
use super::scope::Scope;
use crate::coordinator::{JournaledTurn, LostReason, Ticket, Turn};
use crate::provider::room;
use crate::store::{CommitError, Consistency, Expect, JournalRecord, Op};
use crate::types::{Message, Revision};

/// Longest wait before a message is tried again.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(1);

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
        Ok(message) => work(runtime, turn, message, attempt).await,
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
        turn = runtime.coordinator.wait_turn(&mut ticket, until) => turn,
        () = runtime.reached(Phase::Cutting) => return,
    };
    match turn {
        Ok(turn) => work(runtime, turn, message, 1).await,
        // The dropped ticket is withdrawn (SPEC B4).
        Err(error) => runtime.events.error(Some(message.chat.to_string()), error),
    }
}

async fn work(runtime: Arc<Runtime>, turn: Turn, message: Message, attempt: u32) {
    let mut held = runtime.chats.hold(&message.chat).await;
    let scope = Scope::new(runtime.clone(), turn, message);
    Job { runtime, scope, attempt }.run(&mut held).await;
}

/// How a turn's work ended.
enum End {
    /// The conversation waits for the next message.
    Waits(Live),
    /// There is no conversation (any more).
    Over,
    /// The turn is lost, or the step was cut.
    Lost(LostReason),
    /// It failed; the message has had no effect.
    Failed(RuntimeError),
    /// It failed, and trying again would not find the conversation that failed.
    FailedForGood(RuntimeError),
}

/// What the message meets.
enum Before {
    /// No conversation.
    Nothing,
    /// One that waits; `answers` = the message is the answer to its question.
    Conversation { live: Live, answers: bool },
}

struct Job {
    runtime: Arc<Runtime>,
    scope: Arc<Scope>,
    attempt: u32,
}

impl Job {
    async fn run(&self, held: &mut Held) {
        if self.scope.message().kind == inbox::KIND_POST {
            return self.post(held).await;
        }
        let (before, stored) = match self.before(held.take()).await {
            Ok(found) => found,
            Err(error) => return self.failed(error).await,
        };
        let end = match before {
            Before::Nothing => self.route().await,
            Before::Conversation { live, answers } => self.converse(live, answers).await,
        };
        // A call that failed for a lost turn may have been swallowed by the step: ask the turn.
        let end = match (end, self.scope.check()) {
            (End::Lost(reason), _) | (_, Err(reason)) => End::Lost(reason),
            (end, Ok(())) => end,
        };
        match end {
            End::Waits(live) => self.commit(Some(live), stored, held).await,
            End::Over => self.commit(None, stored, held).await,
            End::Lost(reason) => self.lost(reason),
            End::Failed(error) => self.failed(error).await,
            End::FailedForGood(error) => {
                self.runtime.events.error(Some(self.chat()), error);
                self.commit(None, stored, held).await;
            }
        }
    }

    fn chat(&self) -> String {
        self.scope.chat().to_string()
    }

    /// Looks at memory and checkpoint. The revision is that of the stored row, whatever it holds.
    async fn before(&self, live: Option<Live>) -> Result<(Before, Option<Revision>), RuntimeError> {
        let turn = self.scope.turn();
        let mine = turn.previous_holder() == Some(turn.incarnation());
        let how = match self.runtime.fenced_store {
            true => Consistency::Under(turn),
            false => Consistency::Linearizable,
        };
        let row = self.runtime.store.read(&checkpoint::row(self.scope.chat()), how).await;
        let row = row.map_err(|source| RuntimeError::Store { chat: self.chat(), source })?;
        let stored = row.as_ref().map(|row| row.revision);
        if let Some(live) = live.filter(|live| mine && live.revision == stored) {
            return Ok((Before::Conversation { live, answers: true }, stored));
        }
        let before = match row {
            Some(row) => self.revive(&row.value, row.revision),
            None => Before::Nothing,
        };
        Ok((before, stored))
    }

    /// Continues from a checkpoint (SPEC C1), or says why not and lets the message route.
    fn revive(&self, value: &[u8], revision: Revision) -> Before {
        let checkpoint = match Checkpoint::decode(value) {
            Ok(checkpoint) => checkpoint,
            Err(why) => return self.not_revived("?", HandoverOutcome::Undecodable, why),
        };
        let name = checkpoint.flow.clone();
        let Some(flow) = self.runtime.flows.get(name.as_str()) else {
            let why = "this bot has no such flow".to_owned();
            return self.not_revived(&name, HandoverOutcome::Changed, why);
        };
        // Not waiting: it was entered and had not asked. Waiting at its first question: up to there
        // the step runs silently. At a later one: the step runs again, a visit of its own, so that
        // what it asks again is not taken for what was asked.
        let (visit, replay, answers) = match checkpoint.waits {
            None => (checkpoint.visit.saturating_sub(1), None, false),
            Some(waits) if waits.question == 0 => {
                let replay = Replay { sends: checkpoint.sends };
                (checkpoint.visit.saturating_sub(1), Some(replay), true)
            }
            Some(_) => (checkpoint.visit, None, false),
        };
        let core = Core::new(checkpoint.conversation, visit, replay);
        let from = From::Checkpoint { step: checkpoint.step, state: checkpoint.state };
        match flow.begin(core.clone(), from) {
            Ok(running) => {
                let outcome = match answers {
                    true => HandoverOutcome::Continued,
                    false => HandoverOutcome::Restarted,
                };
                self.handover(&name, outcome);
                let live = Live { flow: flow.clone(), core, running, revision: Some(revision) };
                Before::Conversation { live, answers }
            }
            Err(BeginError::Undecodable(why)) => {
                self.not_revived(&name, HandoverOutcome::Undecodable, why)
            }
            Err(BeginError::UnknownStep | BeginError::OtherState) => {
                let why = "it has no such step any more".to_owned();
                self.not_revived(&name, HandoverOutcome::Changed, why)
            }
        }
    }

    fn handover(&self, name: &str, outcome: HandoverOutcome) {
        let (key, name) = (self.chat(), name.to_owned());
        self.runtime.events.emit(Event::Handover { key, name, outcome });
    }

    fn not_revived(&self, name: &str, outcome: HandoverOutcome, why: String) -> Before {
        self.handover(name, outcome);
        let (chat, flow) = (self.chat(), name.to_owned());
        self.runtime.events.error(Some(self.chat()), RuntimeError::Checkpoint { chat, flow, why });
        Before::Nothing
    }

    /// Hands the message to the handler its route leads to.
    async fn route(&self) -> End {
        let message = self.scope.message();
        let text = message.text.as_str();
        let found = self.runtime.routes.iter().find(|(route, _)| route.takes(text));
        let any = || self.runtime.routes.iter().find(|(r, _)| *r == super::Route::Any);
        let Some((route, handler)) = found.or_else(any) else {
            tracing::debug!(chat = %self.scope.chat(), "no route takes this message");
            return End::Over;
        };
        let mut ctx = Ctx::new(self.scope.clone(), self.runtime.clone());
        let driven = {
            let mut running = handler.call(&mut ctx);
            drive(&self.runtime, &self.scope, running.as_mut(), || false).await
        };
        match driven {
            Driven::Done(Ok(())) => match ctx.take_entering() {
                Some(entering) => self.enter(entering).await,
                None => End::Over,
            },
            Driven::Done(Err(source)) => End::Failed(RuntimeError::Handler {
                chat: self.chat(),
                route: route.to_string(),
                attempt: self.attempt,
                source: source.into(),
            }),
            Driven::Panicked(what) => self.panicked(format!("handler {route}"), what),
            Driven::Cut(reason) => End::Lost(reason),
            // A handler has nothing to wait at.
            Driven::Waits => End::Over,
        }
    }

    /// Says what the bot itself posted (SPEC G5). The chat's conversation is none the wiser: what of
    /// it is in memory stays, unless another replica held the turn in between.
    async fn post(&self, held: &mut Held) {
        let turn = self.scope.turn();
        if turn.previous_holder() != Some(turn.incarnation()) {
            drop(held.take());
        }
        let id = format!("{}/{}/post", self.scope.chat(), self.scope.origin());
        if let Err(source) = self.scope.send(id.clone(), self.scope.message().text.clone()).await {
            let error = RuntimeError::Send { chat: self.chat(), id, source };
            self.runtime.events.error(Some(self.chat()), error);
        }
        let mut ops = self.scope.sends();
        ops.extend([Op::Acknowledge(turn.ticket()), Op::Release(turn.ticket())]);
        match self.written(ops).await {
            Ok(_) => {
                turn.mark_released();
                Sender::ready(&self.runtime, room(self.scope.chat()));
            }
            Err(error) => self.refused(error),
        }
    }

    fn panicked(&self, place: String, what: String) -> End {
        let (chat, attempt) = (self.chat(), self.attempt);
        End::Failed(RuntimeError::Panicked { chat, place, attempt, what })
    }

    /// Begins the conversation the handler asked for.
    async fn enter(&self, entering: Entering) -> End {
        let name = entering.flow.to_owned();
        let refused = |source| End::Failed(RuntimeError::Enter { chat: self.chat(), source });
        let Some(flow) = self.runtime.flows.get(entering.flow) else {
            return refused(EnterError::UnknownFlow { flow: name });
        };
        let core = Core::new(self.scope.origin().to_owned(), 0, None);
        let running = match flow.begin(core.clone(), From::Entry(entering.state)) {
            Ok(running) => running,
            Err(_) => return refused(EnterError::OtherState { flow: name }),
        };
        let live = Live { flow: flow.clone(), core, running, revision: None };
        self.converse_from(live, None, true).await
    }

    /// Feeds the message to a conversation.
    async fn converse(&self, live: Live, answers: bool) -> End {
        let text = &self.scope.message().text;
        let cancel = live.flow.plan.cancel.as_ref().filter(|(word, _)| word == text);
        if let Some((_, reply)) = cancel.cloned() {
            live.core.interrupt(ConvoError::Cancelled);
            let id = format!("{}/{}/cancel", self.scope.chat(), live.core.id);
            drop(live);
            return match self.scope.send(id.clone(), reply).await {
                Ok(()) => End::Over,
                Err(source) => End::Failed(RuntimeError::Send { chat: self.chat(), id, source }),
            };
        }
        let answer = answers.then(|| text.clone());
        let stored = live.revision.is_some();
        self.converse_from(live, answer, stored).await
    }

    /// Runs a conversation until it waits or ends; `again` = what fails can be tried again.
    async fn converse_from(&self, mut live: Live, answer: Option<String>, again: bool) -> End {
        let core = live.core.clone();
        core.lend(self.scope.clone(), answer);
        let waits = || core.waits();
        let driven = drive(&self.runtime, &self.scope, live.running.as_mut(), waits).await;
        core.take_back();
        let interrupted = core.interrupted();
        match driven {
            Driven::Waits => End::Waits(live),
            Driven::Cut(reason) => {
                core.interrupt(ConvoError::LeaseLost { reason });
                End::Lost(reason)
            }
            Driven::Done(Ended::End) => End::Over,
            Driven::Done(Ended::Failed(source)) => match interrupted {
                Some(ConvoError::LeaseLost { reason }) => End::Lost(reason),
                _ => {
                    let (flow, step) = (live.flow.plan.name.to_owned(), core.stand().step);
                    let (chat, attempt, step) = (self.chat(), self.attempt, step.to_owned());
                    let source = source.into();
                    let error = RuntimeError::Step { chat, flow, step, attempt, source };
                    Self::step_failed(again, error)
                }
            },
            Driven::Done(Ended::Unserialisable(why)) => {
                let source = EnterError::State { flow: live.flow.plan.name.to_owned(), why };
                let error = RuntimeError::Enter { chat: self.chat(), source };
                Self::step_failed(again, error)
            }
            Driven::Panicked(what) => {
                let (flow, step) = (live.flow.plan.name, core.stand().step);
                match self.panicked(format!("step {step} of flow {flow}"), what) {
                    End::Failed(error) => Self::step_failed(again, error),
                    end => end,
                }
            }
        }
    }

    /// A failed step is tried again: from its checkpoint, or by the handler that began it. One that
    /// lived in memory only is gone, and its message would meet nothing that failed.
    fn step_failed(again: bool, error: RuntimeError) -> End {
        if again { End::Failed(error) } else { End::FailedForGood(error) }
    }

    /// Ends the turn with all it did, in one commit.
    async fn commit(&self, live: Option<Live>, stored: Option<Revision>, held: &mut Held) {
        let turn = self.scope.turn();
        let (ops, wrote) = match self.effects(live.as_ref(), stored) {
            Ok(effects) => effects,
            Err(error) => {
                drop(live);
                return self.failed(error).await;
            }
        };
        let releases = matches!(ops.last(), Some(Op::Release(_)));
        let sends = ops.iter().any(|op| matches!(op, Op::Send { send, .. } if send.deliver));
        let revision = match self.written(ops).await {
            Ok(revisions) => revisions.first().copied().filter(|_| wrote),
            Err(error) => return self.refused(error),
        };
        if releases {
            turn.mark_released();
        }
        if sends {
            // The group says so too; this is sooner, and a bot that stops does not miss it.
            Sender::ready(&self.runtime, room(self.scope.chat()));
        }
        if let Some(live) = live {
            held.put(Live { revision, ..live });
        }
    }

    /// All that the turn did, its release last; and whether its first operation is the checkpoint.
    fn effects(
        &self,
        live: Option<&Live>,
        stored: Option<Revision>,
    ) -> Result<(Vec<Op>, bool), RuntimeError> {
        let ticket = self.scope.turn().ticket();
        let keeps = live.filter(|live| live.flow.plan.persistent);
        let mut ops = Vec::new();
        if let Some(live) = keeps {
            ops.push(self.checkpoint(live, stored)?);
        } else if let Some(revision) = stored {
            let row = checkpoint::row(self.scope.chat());
            ops.push(Op::Delete { row, expect: Expect::Revision(revision) });
        }
        ops.extend(self.scope.sends());
        if self.runtime.durable {
            ops.push(Op::Acknowledge(ticket));
        }
        if self.runtime.fenced_store && !ops.is_empty() {
            ops.push(Op::Release(ticket));
        }
        Ok((ops, keeps.is_some()))
    }

    /// The write of a waiting conversation's checkpoint.
    fn checkpoint(&self, live: &Live, stored: Option<Revision>) -> Result<Op, RuntimeError> {
        let value = Checkpoint::of(&live.flow, &live.core).encode().map_err(|error| {
            let flow = live.flow.plan.name.to_owned();
            let source = EnterError::State { flow, why: error.to_string() };
            RuntimeError::Enter { chat: self.chat(), source }
        })?;
        let expect = stored.map_or(Expect::Absent, Expect::Revision);
        Ok(Op::Put { row: checkpoint::row(self.scope.chat()), value, expect, ttl_ms: None })
    }

    /// Commits, again where it was certainly not written, as long as the turn is held.
    async fn written(&self, ops: Vec<Op>) -> Result<Vec<Revision>, CommitError> {
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
            self.pause(super::outbox::back_off(attempt)).await;
            attempt += 1;
        }
    }

    /// The commit that ends the turn was not made, or may not have been: memory goes, nothing else
    /// is written, and the turn's release follows. A message that was not acknowledged comes again.
    fn refused(&self, error: CommitError) {
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
        self.runtime.events.emit(Event::LeaseLost { key: self.chat(), reason });
    }

    /// Reports a failure and waits a little before the message comes again.
    async fn failed(&self, error: RuntimeError) {
        self.runtime.events.error(Some(self.chat()), error);
        if self.runtime.durable {
            let wait = Duration::from_millis(25) * 2_u32.saturating_pow(self.attempt.min(6));
            self.pause(wait.min(RETRY_WAIT_MAX)).await;
        }
    }

    /// Waits, but not past the turn's loss or the bot's end.
    async fn pause(&self, wait: Duration) {
        let until = self.runtime.clock.now() + wait;
        tokio::select! {
            () = self.runtime.clock.sleep_until(until) => {}
            _ = self.scope.turn().lost() => {}
            () = self.runtime.reached(Phase::Cutting) => {}
        }
    }
}
