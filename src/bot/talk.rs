//! Conversations under a turn: fed, cancelled, switched, timed out.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::Value;

use super::conversation::core::{Core, Due, Given, Replay};
use super::conversation::{AnyFlow, BeginError, Ended, From};
use super::ctx::{Ctx, Entering};
use super::drive::{Driven, drive};
use super::error::{BoxError, ConvoError, RuntimeError};
use super::job::{End, Found, Job};
use super::memory::{Held, Live};
use super::progress::Progress;

/// Where a conversation's ids begin.
pub(super) struct Fresh {
    /// Its stable name.
    pub(super) id: String,
    /// Steps entered under that name before.
    pub(super) visit: u32,
}

/// A conversation under way, and the record of how far it is stored.
struct Run {
    live: Live,
    progress: Arc<Progress>,
}

impl Job {
    /// A conversation at a step, not run yet.
    pub(super) fn live(
        &self,
        flow: &AnyFlow,
        fresh: Fresh,
        replay: Option<Replay>,
        from: From,
        initial: Option<Value>,
    ) -> Result<Live, BeginError> {
        let timeout = flow.plan.timeout.or(self.runtime.conversation_timeout);
        let core = Core::new(fresh.id, fresh.visit, replay, timeout);
        let running = flow.begin(core.clone(), from)?;
        let flow = flow.clone();
        Ok(Live { flow, core, running, row: None, initial, stored: None, sleeper: None })
    }

    /// Gives the message to the conversation that waits in memory.
    pub(super) async fn answered(&self, live: Live, ctx: &Ctx) -> End {
        if let Some(end) = self.cancelled(&live.flow, &live.core.id, ctx).await {
            self.let_go(live, ConvoError::Cancelled).await;
            return end;
        }
        let again = live.row.is_some_and(|row| !row.stub);
        let given = vec![Given::Message(ctx.heard())];
        self.converse(live, given, again, ctx.is_changed()).await
    }

    /// Where the message is the flow's cancelling word, says so.
    pub(super) async fn cancelled(&self, flow: &AnyFlow, id: &str, ctx: &Ctx) -> Option<End> {
        let cancel = flow.plan.cancel.as_ref().filter(|(word, _)| word == ctx.text());
        let (_, reply) = cancel?.clone();
        let id = format!("{}/{id}/cancel", self.scope.chat());
        // Who hears that it is over is not asked on.
        self.scope.hold();
        Some(match self.scope.send(id.clone(), reply).await {
            Ok(()) => End::Over,
            Err(source) => End::Failed(RuntimeError::Send { chat: self.chat(), id, source }),
        })
    }

    /// Lets a conversation's own code see why it ends; it can say nothing any more.
    async fn let_go(&self, mut live: Live, why: ConvoError) {
        live.core.interrupt(why);
        let early = self.scope.clone();
        let run = drive(&self.runtime, &self.scope, live.running.as_mut(), || false, early);
        if let Driven::Panicked(what) = run.await {
            let place = format!("step {} of flow {}", live.core.step().0, live.flow.plan.name);
            if let End::Failed(error) = self.panicked(place, what) {
                self.runtime.events.error(Some(self.chat()), error);
            }
        }
    }

    /// Runs a conversation until it waits or ends; `again` = what fails can be tried again.
    pub(super) async fn converse(
        &self,
        live: Live,
        mut given: Vec<Given>,
        again: bool,
        hooked: bool,
    ) -> End {
        let mut run = self.start(live, hooked);
        loop {
            let (driven, left) = self.drive(&mut run, given).await;
            match driven {
                Driven::Done(Ended::Switch) => match self.switched(&run.live) {
                    Ok(next) => (run, given) = (self.start(next, hooked), left),
                    Err(error) => return step_failed(again, error),
                },
                Driven::Done(Ended::End) if left.iter().any(|g| matches!(g, Given::Message(_))) => {
                    return End::Unanswered;
                }
                driven => {
                    let progress = run.progress.clone();
                    let end = self.ended(run, driven, again);
                    if matches!(end, End::Failed(_)) {
                        progress.failed().await;
                    }
                    return end;
                }
            }
        }
    }

    fn start(&self, live: Live, hooked: bool) -> Run {
        self.hold_for(&live.flow, &live.core);
        let progress = Progress {
            runtime: self.runtime.clone(),
            scope: self.scope.clone(),
            core: live.core.clone(),
            flow: live.flow.clone(),
            initial: live.initial.clone(),
            hooked,
            stored: parking_lot::Mutex::new(live.stored),
            refused: AtomicBool::new(false),
        };
        Run { live, progress: Arc::new(progress) }
    }

    /// What a conversation says goes out after the write that holds how far it is.
    pub(super) fn hold_for(&self, flow: &AnyFlow, core: &Core) {
        if self.runtime.keeping(flow, core).is_checkpointed() {
            self.scope.hold();
        }
    }

    async fn drive(&self, run: &mut Run, given: Vec<Given>) -> (Driven<Ended>, Vec<Given>) {
        let core = run.live.core.clone();
        core.lend(self.scope.clone(), given);
        // With durability the message that enters a flow is its first checkpoint: it comes again.
        if self.scope.journaled().is_none()
            && core.midway().is_some()
            && let Err(reason) = run.progress.enter().await
        {
            return (Driven::Cut(reason), core.take_back());
        }
        let waits = || core.waits();
        let early = run.progress.clone();
        let running = run.live.running.as_mut();
        let driven = drive(&self.runtime, &self.scope, running, waits, early).await;
        let left = core.take_back();
        run.live.stored = *run.progress.stored.lock();
        (driven, left)
    }

    /// The conversation a step went on to.
    fn switched(&self, live: &Live) -> Result<Live, RuntimeError> {
        // The way of a switch is made together with where it leads.
        let Some(Entering { flow, state }) = live.core.take_switch() else {
            let (flow, step) = (live.flow.plan.name, live.core.step().0);
            return Err(self.step_error(flow, step, "it switched to nothing".into()));
        };
        // Two conversations begun by one message have one name: their visits tell them apart.
        let fresh = Fresh { id: self.scope.origin().to_owned(), visit: live.core.step().1 };
        self.begin(Entering { flow, state }, fresh)
            .map_err(|source| RuntimeError::Enter { chat: self.chat(), source })
    }

    fn step_error(&self, flow: &str, step: &str, source: BoxError) -> RuntimeError {
        let (flow, step) = (flow.to_owned(), step.to_owned());
        let (chat, attempt, source) = (self.chat(), self.attempt, source.into());
        RuntimeError::Step { chat, flow, step, attempt, source }
    }

    fn ended(&self, run: Run, driven: Driven<Ended>, again: bool) -> End {
        let Run { live, .. } = run;
        let core = live.core.clone();
        let (flow, step) = (live.flow.plan.name, core.step().0);
        match driven {
            Driven::Waits => End::Waits(Box::new(live)),
            Driven::Cut(reason) => {
                core.interrupt(ConvoError::LeaseLost { chat: self.chat(), reason });
                End::Lost(reason)
            }
            Driven::Done(Ended::End | Ended::Switch) => End::Over,
            Driven::Done(Ended::Failed(source)) => match core.interrupted() {
                Some(ConvoError::LeaseLost { reason, .. }) => End::Lost(reason),
                _ if core.gave_up() => {
                    tracing::info!(chat = %self.scope.chat(), %source, "a conversation gave up");
                    End::Over
                }
                _ => step_failed(again, self.step_error(flow, step, source)),
            },
            Driven::Done(Ended::Endless) => {
                let max = super::scope::STEPS_MAX;
                let why = format!("{max} steps in one turn and no question; let one of them ask");
                step_failed(again, self.step_error(flow, step, why.into()))
            }
            Driven::Panicked(what) => {
                let place = format!("step {step} of flow {flow}");
                match self.panicked(place, what) {
                    End::Failed(error) => step_failed(again, error),
                    end => end,
                }
            }
        }
    }

    /// A wait is due for something (SPEC B6): the copy in memory acts only where it still is the
    /// chat's conversation, and is dropped otherwise.
    pub(super) async fn timer(&self, held: &mut Held, wait: u64) {
        let live = match self.look(held).await {
            Ok(Found::Memory(live)) => live,
            Ok(_) => return,
            Err(error) => {
                self.runtime.events.error(Some(self.chat()), error);
                return self.put_later(held);
            }
        };
        self.hold_for(&live.flow, &live.core);
        let end = match live.core.due(wait, self.runtime.clock.now()) {
            Due::Nothing => {
                self.put(held, live);
                return self.scope.turn().keep(self.scope.said_so_far());
            }
            Due::Idle(text) => {
                self.say_for(live.flow.plan.name, live.core.clone(), text).await;
                End::Waits(Box::new(live))
            }
            Due::IdleEnd(text) => self.timed_out(live, Some(text)).await,
            Due::Over => {
                let text = live.flow.plan.timeout_text.clone();
                self.timed_out(live, text).await
            }
            Due::NoAnswer => {
                let again = live.row.is_some_and(|row| !row.stub);
                self.converse(live, vec![Given::Nothing], again, false).await
            }
        };
        self.finish(end, held).await;
    }

    /// Says something that the conversation arranged to have said. Where that cannot be, it is
    /// reported, and changes nothing about the rest.
    async fn say_for(&self, flow: &'static str, core: Arc<Core>, text: String) {
        if let Err(source) = core.say_in(&self.scope, text).await {
            let error = self.step_error(flow, core.step().0, source.into());
            self.runtime.events.error(Some(self.chat()), error);
        }
    }

    async fn timed_out(&self, live: Live, text: Option<String>) -> End {
        if let Some(text) = text {
            self.say_for(live.flow.plan.name, live.core.clone(), text).await;
        }
        self.let_go(live, ConvoError::TimedOut).await;
        End::Over
    }
}

/// A failed step is tried again: from its checkpoint, or by the handler that began it. One that
/// lived in memory only is gone, and its message would meet nothing that failed.
fn step_failed(again: bool, error: RuntimeError) -> End {
    if again { End::Failed(error) } else { End::FailedForGood(error) }
}
