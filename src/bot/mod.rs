//! The runtime a bot author meets.
//!
//! Handlers answer messages; flows hold dialogues. Both are async functions that are *lent* what
//! they act with, `&mut Ctx` and `&mut Convo<S>`, for as long as their chat's turn lasts; so nothing
//! they started can answer a chat that meanwhile belongs to another replica.
//!
//! A whole bot, which asks two questions and greets:
//!
//! ```
//! use botmesh::bot::{Bot, Convo, Flow, FlowId, Next, Result, Route};
//! use botmesh::provider::webchat::Webchat;
//! use botmesh::steps;
//! use serde::{Deserialize, Serialize};
//!
//! // What the flow keeps between its questions. It is stored, so it is plain data.
//! #[derive(Default, Serialize, Deserialize)]
//! struct Visit { name: String, guests: u32 }
//!
//! // Its steps, in order. A step without code below does not compile.
//! steps! { enum At { Name, Guests, Greet } }
//!
//! // Its name, with the type of its state: entering it with another does not compile.
//! const VISIT: FlowId<Visit> = FlowId::new("visit");
//!
//! async fn visit(at: At, c: &mut Convo<Visit>) -> Result<Next<At>> {
//!     match at {
//!         At::Name => { c.state.name = c.ask("Your name?").await?; c.next() }
//!         At::Guests => {
//!             c.state.guests = c.ask("How many are you?").parse("A number, please.").await?;
//!             c.next()
//!         }
//!         At::Greet => {
//!             let Visit { name, guests } = &c.state;
//!             let text = format!("Welcome, {name} and {} more!", guests.saturating_sub(1));
//!             c.say(text).await?;
//!             c.end()
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result {
//! let bot = Bot::builder()
//!     .provider(Webchat)
//!     .flow(Flow::new(VISIT, visit).persistent().cancel_on("cancel", "Cancelled."))
//!     .on("visit", async |ctx| Ok(ctx.enter(VISIT, Visit::default()).await?))
//!     .on(Route::Any, async |ctx| { ctx.reply("Say `visit`.").await?; Ok(()) })
//!     .build() // one process, in memory; add `.store(..)` and `.coordination(..)` for replicas
//!     .await?;
//! let stop = async {}; // Ctrl-C, say
//! bot.run_until(stop).await?;
//! # Ok(()) }
//! ```
//!
//! What holds (with a [`Coordination`] that has durability):
//! - a message is handled once, in the order of its chat, by one replica at a time;
//! - a step is a transaction: its replies, the state it leaves, the acknowledgement of the message
//!   and the release of the turn are one commit, or none of it happened and the message comes again;
//! - a step that runs again says nothing that was said: replies have ids made of chat, conversation,
//!   step and number;
//! - a conversation whose replica goes away continues at another one: a [`Flow`] that is
//!   [`persistent`](Flow::persistent) or forwarded ([`Handover`]) at its step, any other by the bot's
//!   [`Fallback`];
//! - a wait's timeout and its watchdog act under the chat's turn only, or not at all;
//! - code that ran is not undone: a step that calls the outside calls it again when it runs again.
//!   Give it [`Ctx::fence`] to tell an old call from a new one.

mod builder;
mod checkpoint;
mod conversation;
mod ctx;
mod drive;
mod error;
mod events;
mod handle;
mod handler;
mod handover;
mod hooks;
mod inbox;
mod job;
mod memory;
mod metrics;
mod outbox;
mod progress;
mod resume;
mod run;
mod runtime;
mod schedule;
mod scope;
mod settle;
mod talk;
mod timers;
mod turns;
mod user;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use builder::{BotBuilder, Coordination, Durability, OnUnknown, ProviderSession};
pub use conversation::{
    Ask, Convo, Dialogue, Flow, FlowId, Idle, Next, Script, State, Steps, Verify, Within,
};
pub use ctx::Ctx;
pub use error::{
    BotError, BoxError, BuildError, ConvoError, EnterError, Fault, ReplyError, Result,
    RuntimeError, SharedError, UserError,
};
pub use events::{Event, Events, FollowReason};
pub use handle::{BotHandle, PostError};
pub use handler::{Handler, Route};
pub use handover::{
    Fallback, FallbackFn, Flows, Handover, HandoverOutcome, Interrupted, Interruption, Migration,
};
pub use hooks::{Hook, Pass};
pub use metrics::Figure;
pub use schedule::{Job, JobHandler, Missed, Tick};
pub use user::UserState;

use crate::provider::{Link, Webhook};
use crate::store::Store;
use run::Life;
use runtime::Runtime;

/// A bot. Cheap to clone; all clones are one bot.
#[derive(Clone)]
pub struct Bot {
    life: Arc<Life>,
}

impl fmt::Debug for Bot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bot")
            .field("replica", self.life.runtime.coordinator.replica())
            .finish_non_exhaustive()
    }
}

impl Bot {
    /// Begins a bot.
    pub fn builder() -> BotBuilder {
        BotBuilder::default()
    }

    fn new(runtime: Runtime, session: ProviderSession, provider_down: Duration) -> Self {
        Self { life: Arc::new(Life::new(runtime, session, provider_down)) }
    }

    /// Opens the session and connects the providers. Once.
    pub async fn start(&self) -> Result<(), BotError> {
        self.life.start().await
    }

    /// Stops taking messages, lets what runs end (or cuts it after `settle`), gives turns and leads
    /// back and closes the session: other replicas carry on at once (SPEC A7).
    pub async fn stop(&self) -> Result<(), BotError> {
        self.life.stop().await
    }

    /// Starts, runs until the signal resolves, stops.
    pub async fn run_until(&self, signal: impl Future<Output = ()>) -> Result<(), BotError> {
        tokio::pin!(signal);
        tokio::select! {
            biased;
            started = self.start() => started?,
            () = &mut signal => return self.stop().await,
        }
        signal.await;
        self.stop().await
    }

    /// Resolves once the bot was started and leads every provider that only an elected replica
    /// connects: on a standby it stays pending (SPEC D3).
    pub async fn ready(&self) {
        self.life.ready().await;
    }

    /// What happens from now on.
    pub fn events(&self) -> Events {
        self.life.runtime.events.subscribe()
    }

    /// What was counted since the bot was built: its events, by kind and reason.
    pub fn figures(&self) -> Vec<Figure> {
        self.life.runtime.events.counts.figures()
    }

    /// A way in for what outlives a turn.
    pub fn handle(&self) -> BotHandle {
        BotHandle { runtime: self.life.runtime.clone() }
    }

    /// The way messages come in: what webhooks are given.
    pub fn link(&self) -> Link {
        self.life.link.clone()
    }

    /// The store.
    pub fn store(&self) -> Arc<dyn Store> {
        self.life.runtime.store.clone()
    }

    /// The webhooks of its providers: (provider's id, webhook).
    pub fn webhooks(&self) -> Vec<(String, Arc<dyn Webhook>)> {
        let providers = &self.life.runtime.providers;
        providers.iter().filter_map(|(id, p)| p.webhook().map(|hook| (id.clone(), hook))).collect()
    }

    /// Whether it has a provider of this id.
    pub fn has_provider(&self, id: &str) -> bool {
        self.life.runtime.providers.contains_key(id)
    }

    /// Chats with a conversation in this process's memory, or a turn at work.
    pub fn chats_in_memory(&self) -> usize {
        self.life.runtime.chats.len()
    }
}
