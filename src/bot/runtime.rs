//! What all parts of a running bot share.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use super::builder::OnUnknown;
use super::conversation::AnyFlow;
use super::events::Emitter;
use super::handler::{AnyHandler, Route};
use super::handover::Handover;
use super::hooks::AnyHook;
use super::inbox::Intake;
use super::memory::Chats;
use super::outbox::Sender;
use super::schedule::Scheduled;
use super::watch::Watch;
use crate::clock::Clock;
use crate::coordinator::{Coordinator, Lead, Sticky};
use crate::provider::{Provider, SendError};
use crate::store::Store;
use crate::watch;

/// Chats handled at once; further turns wait, granted, until one is done.
pub(crate) const TURNS_AT_ONCE_MAX: usize = 4096;

/// How far a stop has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Takes messages.
    Open,
    /// Takes none; what runs may end.
    Closing,
    /// What still runs is cut.
    Cutting,
}

/// See the module.
pub(crate) struct Runtime {
    pub(crate) providers: BTreeMap<String, Arc<dyn Provider>>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) coordinator: Arc<dyn Coordinator>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) routes: Vec<(Route, Box<dyn AnyHandler>)>,
    /// What sees every message first.
    pub(crate) hooks: Vec<Box<dyn AnyHook>>,
    pub(crate) flows: HashMap<&'static str, AnyFlow>,
    /// How long a question waits whose flow says nothing else.
    pub(crate) conversation_timeout: Option<Duration>,
    /// Whether other replicas may take a chat.
    pub(crate) coordinated: bool,
    pub(crate) handover: Handover,
    /// Journal, outbox and acknowledgement by the group (SPEC G).
    pub(crate) durable: bool,
    /// Whether the store can judge the coordinator's fences.
    pub(crate) fenced_store: bool,
    /// Whose sessions claim the occurrences of durable jobs: the coordinator, where nothing else is
    /// said.
    pub(crate) scheduler: Arc<dyn Coordinator>,
    pub(crate) jobs: Vec<Arc<Scheduled>>,
    pub(crate) turn_wait: Duration,
    pub(crate) settle: Duration,
    /// How turns stay with this replica (SPEC B10).
    pub(crate) sticky: Option<Sticky>,
    /// Looks after steps that block their thread.
    pub(crate) watch: Watch,
    /// What is done with a reply that may have arrived.
    pub(crate) on_unknown: OnUnknown,
    /// Of each provider that only an elected replica connects: whether this one leads it.
    pub(crate) leads: watch::Sender<BTreeMap<String, bool>>,
    /// Of each such provider: whether the outside has let this replica in.
    pub(crate) connected: watch::Sender<BTreeMap<String, bool>>,
    /// Leads kept until the session closes, while what still runs ends.
    pub(crate) parting: Mutex<Vec<Arc<Lead>>>,
    pub(crate) events: Emitter,
    /// Conversations that wait in this process's memory.
    pub(crate) chats: Chats,
    pub(crate) intake: Intake,
    pub(crate) sender: Sender,
    pub(crate) phase: watch::Sender<Phase>,
    /// True once providers are to stop; what [`crate::provider::Link::closing`] waits for.
    pub(crate) closing: tokio::sync::watch::Sender<bool>,
    /// One permit a running turn.
    pub(crate) turns: Arc<Semaphore>,
    /// Every task of this bot, so that a stop can await them.
    pub(crate) tasks: TaskTracker,
}

/// The lead of a provider that allows one session.
pub(crate) fn lead_of(provider: &str) -> String {
    format!("provider:{provider}")
}

impl Runtime {
    /// Resolves once the bot is in this phase or past it.
    pub(crate) fn reached(&self, phase: Phase) -> impl Future<Output = ()> + Send + use<> {
        let mut now = self.phase.subscribe();
        async move {
            // A sender that is gone means that the bot is: past every phase.
            let _ = now.wait_for(|now| *now >= phase).await;
        }
    }

    /// Refuses what only the replica that leads the provider may do (SPEC D3).
    pub(crate) fn check_lead(&self, provider: &str) -> Result<(), SendError> {
        match self.leads.borrow().get(provider) {
            Some(false) => {}
            Some(true) | None => return Ok(()),
        }
        let leader = self.coordinator.leader(&lead_of(provider));
        Err(SendError::ProviderNotLeader { leader: leader.map(|replica| replica.0) })
    }

    /// Notes whether this replica leads a provider.
    pub(crate) fn leads(&self, provider: &str, leads: bool) {
        self.leads.send_modify(|all| {
            all.insert(provider.to_owned(), leads);
        });
    }

    /// Notes whether a provider is connected.
    pub(crate) fn connected(&self, provider: &str, connected: bool) {
        self.connected
            .send_if_modified(|all| all.insert(provider.to_owned(), connected) != Some(connected));
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }
}
