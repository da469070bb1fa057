//! One turn's work: what the message meets, and what becomes of it.
//!
//! The order: what is in memory and in the store; the hooks; then the conversation that waits, or
//! the route; then the one commit that ends the turn ([`Job::finish`], in `settle`).

use std::sync::Arc;

use super::checkpoint::{self, Checkpoint};
use super::conversation::BeginError;
use super::ctx::{Ctx, Entering};
use super::drive::{Driven, drive};
use super::error::{EnterError, RuntimeError};
use super::hooks::Pass;
use super::inbox;
use super::memory::{Held, Live};
use super::outbox::Sender;
use super::runtime::Runtime;
use super::scope::{Cause, Scope, Stored};
use super::talk::Fresh;
use crate::coordinator::LostReason;
use crate::provider::room;
use crate::store::{Consistency, Op};
use crate::types::Message;

/// How a turn's work ended.
pub(super) enum End {
    /// The conversation waits for the next message.
    Waits(Box<Live>),
    /// There is no conversation (any more).
    Over,
    /// The conversation is over, and did not take the message: it is routed.
    Unanswered,
    /// A hook stopped the message; what waits goes on waiting, and what is stored stays.
    Stopped(Option<Box<Live>>),
    /// The turn is lost, or the step was cut.
    Lost(LostReason),
    /// It failed; the message has had no effect.
    Failed(RuntimeError),
    /// It failed, and trying again would not find the conversation that failed.
    FailedForGood(RuntimeError),
}

/// What the message meets.
pub(super) enum Found {
    /// No conversation.
    Nothing,
    /// One that waits in this memory.
    Memory(Live),
    /// One of another replica, or of an earlier life.
    Stored(Checkpoint),
    /// A row that does not decode.
    Garbage(String),
}

/// See the module.
pub(super) struct Job {
    pub(super) runtime: Arc<Runtime>,
    pub(super) scope: Arc<Scope>,
    /// Which attempt at this message, from 1.
    pub(super) attempt: u32,
}

impl Job {
    pub(super) async fn run(&self, held: &mut Held) {
        if let Cause::Timer(wait) = self.scope.cause() {
            return self.timer(held, wait).await;
        }
        if self.scope.message().kind == inbox::KIND_POST {
            return self.post(held).await;
        }
        let found = match self.look(held).await {
            Ok(found) => found,
            Err(error) => return self.failed(error).await,
        };
        let mut ctx = Ctx::new(self.scope.clone(), self.runtime.clone());
        let end = match self.hooks(self.hooked(&found), &mut ctx).await {
            Ok(Pass::On) => self.handle(found, &mut ctx).await,
            Ok(Pass::Stop) => End::Stopped(found.into_live().map(Box::new)),
            Err(end) => {
                // The conversation has not seen the message, and is there for its next attempt.
                if let (Found::Memory(live), End::Failed(_)) = (found, &end) {
                    self.put(held, live);
                }
                end
            }
        };
        let end = match end {
            End::Unanswered => self.route(&mut ctx).await,
            end => end,
        };
        self.finish(end, held).await;
    }

    pub(super) fn chat(&self) -> String {
        self.scope.chat().to_string()
    }

    /// Looks at memory and store. Where the store cannot be read, what is in memory stays there: the
    /// next turn looks again whether it still is the chat's conversation.
    pub(super) async fn look(&self, held: &mut Held) -> Result<Found, RuntimeError> {
        let turn = self.scope.turn();
        let mine = turn.previous_holder() == Some(turn.incarnation());
        let how = match self.runtime.fenced_store {
            true => Consistency::Under(turn),
            false => Consistency::Linearizable,
        };
        let row = self.runtime.store.read(&checkpoint::row(self.scope.chat()), how).await;
        let row = row.map_err(|source| RuntimeError::Store { chat: self.chat(), source })?;
        let stored = row.as_ref().map(|row| row.revision);
        self.scope.set_stored(Stored::Known(stored));
        if let Some(live) = held.take().filter(|live| mine && live.matching().with(stored)) {
            return Ok(Found::Memory(live));
        }
        Ok(match row.map(|row| Checkpoint::decode(&row.value)) {
            None => Found::Nothing,
            Some(Ok(checkpoint)) => Found::Stored(checkpoint),
            Some(Err(why)) => Found::Garbage(why),
        })
    }

    /// What an earlier attempt at this message kept of the hooks' work; `Some(None)` = they ran and
    /// nothing has to be kept.
    fn hooked(&self, found: &Found) -> Option<Option<Message>> {
        let Found::Stored(checkpoint) = found else { return None };
        Some(checkpoint.hooked(self.scope.journaled()?)?.cloned())
    }

    /// Runs the hooks, unless an earlier attempt at this message did.
    async fn hooks(&self, done: Option<Option<Message>>, ctx: &mut Ctx) -> Result<Pass, End> {
        if let Some(message) = done {
            if let Some(message) = message {
                ctx.set_heard(message);
            }
            return Ok(Pass::On);
        }
        for hook in &self.runtime.hooks {
            let driven = {
                let mut running = hook.call(ctx);
                let early = self.scope.clone();
                drive(&self.runtime, &self.scope, running.as_mut(), || false, early).await
            };
            match self.handled("before_message", driven)? {
                Pass::On => {}
                Pass::Stop => return Ok(Pass::Stop),
            }
        }
        Ok(Pass::On)
    }

    /// What a handler, hook or fallback returned, or how the turn ends without.
    pub(super) fn handled<T>(
        &self,
        what: &str,
        driven: Driven<super::error::Result<T>>,
    ) -> Result<T, End> {
        match driven {
            Driven::Done(Ok(value)) => Ok(value),
            Driven::Done(Err(source)) => Err(End::Failed(RuntimeError::Handler {
                chat: self.chat(),
                route: what.to_owned(),
                attempt: self.attempt,
                source: source.into(),
            })),
            Driven::Panicked(panic) => Err(self.panicked(format!("handler {what}"), panic)),
            Driven::Cut(reason) => Err(End::Lost(reason)),
            // It has nothing to wait at.
            Driven::Waits => Err(End::Over),
        }
    }

    pub(super) fn panicked(&self, place: String, what: String) -> End {
        let (chat, attempt) = (self.chat(), self.attempt);
        End::Failed(RuntimeError::Panicked { chat, place, attempt, what })
    }

    async fn handle(&self, found: Found, ctx: &mut Ctx) -> End {
        match found {
            Found::Nothing => self.route(ctx).await,
            Found::Memory(live) => self.answered(live, ctx).await,
            Found::Stored(checkpoint) => self.resume(checkpoint, ctx).await,
            Found::Garbage(why) => self.garbage(why, ctx).await,
        }
    }

    /// Hands the message to the handler its route leads to.
    pub(super) async fn route(&self, ctx: &mut Ctx) -> End {
        let message = ctx.heard();
        let text = message.text.as_str();
        let found = self.runtime.routes.iter().find(|(route, _)| route.takes(text));
        let any = || self.runtime.routes.iter().find(|(r, _)| *r == super::Route::Any);
        let Some((route, handler)) = found.or_else(any) else {
            tracing::debug!(chat = %self.scope.chat(), "no route takes this message");
            return End::Over;
        };
        let driven = {
            let mut running = handler.call(ctx);
            let early = self.scope.clone();
            drive(&self.runtime, &self.scope, running.as_mut(), || false, early).await
        };
        match self.handled(&route.to_string(), driven) {
            Ok(()) => match ctx.take_entering() {
                Some(entering) => self.enter(entering, ctx).await,
                None => End::Over,
            },
            Err(end) => end,
        }
    }

    /// Begins the conversation a handler asked for.
    pub(super) async fn enter(&self, entering: Entering, ctx: &Ctx) -> End {
        let fresh = Fresh { id: self.scope.origin().to_owned(), visit: 0 };
        match self.begin(entering, fresh) {
            Ok(live) => self.converse(live, Vec::new(), true, ctx.is_changed()).await,
            Err(source) => End::Failed(RuntimeError::Enter { chat: self.chat(), source }),
        }
    }

    /// A conversation at its beginning.
    pub(super) fn begin(&self, entering: Entering, fresh: Fresh) -> Result<Live, EnterError> {
        let name = entering.flow.to_owned();
        let Some(flow) = self.runtime.flows.get(entering.flow) else {
            return Err(EnterError::UnknownFlow { flow: name });
        };
        let keeps = self.runtime.keeps_initial() && self.runtime.coordinated;
        let initial = keeps.then(|| flow.encode(&*entering.state)).flatten();
        let from = super::conversation::From::Entry(entering.state);
        self.live(flow, fresh, None, from, initial).map_err(|error| match error {
            BeginError::Undecodable(why) => EnterError::State { flow: name, why },
            _ => EnterError::OtherState { flow: name },
        })
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
        let mut ops = self.scope.sends(&self.scope.take_said());
        ops.push(Op::Acknowledge(turn.ticket()));
        // A post is journaled, so it is this commit that ends its turn.
        ops.push(self.ending().unwrap_or(Op::Release(turn.ticket())));
        match self.written(ops).await {
            Ok(_) => {
                turn.mark_released();
                Sender::ready(&self.runtime, room(self.scope.chat()));
            }
            Err(error) => self.refused(error),
        }
    }
}

impl Found {
    fn into_live(self) -> Option<Live> {
        match self {
            Self::Memory(live) => Some(live),
            _ => None,
        }
    }
}
