//! The runtime a bot author meets.

mod builder;
mod checkpoint;
mod conversation;
mod ctx;
mod drive;
mod error;
mod events;
mod handle;
mod handler;
mod inbox;
mod memory;
mod outbox;
mod run;
mod runtime;
mod scope;
mod turns;
mod user;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub use builder::{BotBuilder, Coordination, Durability, ProviderSession};
pub use conversation::{Ask, Convo, Flow, FlowId, Next, Script, State, Steps};
pub use ctx::Ctx;
pub use error::{
    BotError, BoxError, BuildError, ConvoError, EnterError, Fault, ReplyError, Result,
    RuntimeError, SharedError, UserError,
};
pub use events::{Event, Events, FollowReason, HandoverOutcome};
pub use handle::{BotHandle, PostError};
pub use handler::{Handler, Route};
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
            started = self.start() => started?,
            () = &mut signal => return self.stop().await,
        }
        signal.await;
        self.stop().await
    }

    /// Resolves once the bot was started.
    pub async fn ready(&self) {
        self.life.ready().await;
    }

    /// What happens from now on.
    pub fn events(&self) -> Events {
        self.life.runtime.events.subscribe()
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
