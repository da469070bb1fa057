//! A bot's life: start, run, stop (SPEC A7).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

use super::builder::ProviderSession;
use super::error::{BotError, RuntimeError};
use super::events::{Event, FollowReason};
use super::inbox::{self, BotInbox};
use super::outbox::Sender;
use super::runtime::{Phase, Runtime, lead_of};
use super::{schedule, turns};
use crate::coordinator::{CoordinatorEvent, LostReason};
use crate::provider::{Closed, Link, Provider};

/// Wait before a provider that ended is started again.
const RESTART_WAIT: Duration = Duration::from_secs(3);

/// What [`super::Bot`] holds.
pub(super) struct Life {
    pub(super) runtime: Arc<Runtime>,
    pub(super) link: Link,
    pub(super) provider_session: ProviderSession,
    pub(super) provider_down: Duration,
    started: AtomicBool,
    ready: watch::Sender<bool>,
    // Not among the bot's tasks: it goes on until the last of them has ended.
    listener: Mutex<Option<JoinHandle<()>>>,
}

impl Life {
    pub(super) fn new(
        runtime: Runtime,
        provider_session: ProviderSession,
        provider_down: Duration,
    ) -> Self {
        let runtime = Arc::new(runtime);
        let inbox = Arc::new(BotInbox { runtime: runtime.clone() });
        let link = Link::new(inbox, runtime.closing.subscribe());
        let started = AtomicBool::new(false);
        let ready = watch::channel(false).0;
        let listener = Mutex::default();
        Self { runtime, link, provider_session, provider_down, started, ready, listener }
    }

    pub(super) async fn ready(&self) {
        // The sender is `self`'s own.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
        let mut leads = self.runtime.leads.subscribe();
        // So is this one.
        let _ = leads.wait_for(|leads| leads.values().all(|leads| *leads)).await;
    }

    pub(super) async fn start(&self) -> Result<(), BotError> {
        if self.started.swap(true, Ordering::AcqRel) {
            return Err(BotError::Started);
        }
        let runtime = &self.runtime;
        // Subscribed before the session opens, so that nothing it is told falls in between.
        let events = runtime.coordinator.events();
        *self.listener.lock() = Some(tokio::spawn(listening(runtime.clone(), events)));
        // With durability every message has a ticket in the log, and nothing stays held.
        runtime.coordinator.keep_turns(runtime.sticky.filter(|_| !runtime.durable));
        runtime.coordinator.open().await?;
        runtime.scheduler.open().await?;
        if runtime.durable {
            runtime.tasks.spawn(inbox::admitting(runtime.clone()));
            runtime.tasks.spawn(inbox::watching(runtime.clone()));
            runtime.tasks.spawn(turns::journaled(runtime.clone()));
        }
        for provider in runtime.providers.values() {
            let exclusive = match self.provider_session {
                ProviderSession::Auto => provider.capabilities().exclusive_session,
                ProviderSession::Leader => true,
                ProviderSession::Shared => false,
            };
            let (runtime, provider) = (runtime.clone(), provider.clone());
            let link = self.link.clone();
            if exclusive {
                self.runtime.leads(provider.id(), false);
                self.runtime.tasks.spawn(leading(runtime, provider, link, self.provider_down));
            } else {
                self.runtime.tasks.spawn(providing(runtime, provider, link));
            }
        }
        for job in &runtime.jobs {
            let (shared, job) = (runtime.clone(), job.clone());
            match job.job.durable_id() {
                Some(_) => runtime.tasks.spawn(schedule::durable(shared, job)),
                None => runtime.tasks.spawn(schedule::local(shared, job)),
            };
        }
        self.ready.send_replace(true);
        Ok(())
    }

    /// Stops intake, lets what runs end or settle, gives everything back and closes the session.
    pub(super) async fn stop(&self) -> Result<(), BotError> {
        let runtime = &self.runtime;
        runtime.phase.send_if_modified(|phase| {
            let first = *phase < Phase::Closing;
            *phase = (*phase).max(Phase::Closing);
            first
        });
        runtime.closing.send_replace(true);
        runtime.coordinator.keep_turns(None);
        runtime.tasks.close();
        if tokio::time::timeout(runtime.settle, runtime.tasks.wait()).await.is_err() {
            runtime.phase.send_replace(Phase::Cutting);
            if tokio::time::timeout(CUT_WAIT, runtime.tasks.wait()).await.is_err() {
                tracing::error!("a handler or step blocks its thread; its turn is given up");
            }
        }
        runtime.phase.send_replace(Phase::Cutting);
        let closed = runtime.coordinator.close().await;
        // The same one, as a rule; closing twice is closing once.
        let closed = closed.and(runtime.scheduler.close().await);
        let listener = self.listener.lock().take();
        if let Some(listener) = listener {
            // It ends by the phase alone, and cannot fail.
            let _ = listener.await;
        }
        runtime.chats.clear();
        Ok(closed?)
    }
}

/// How long what was cut may take to end.
const CUT_WAIT: Duration = Duration::from_secs(2);

/// Passes on what the coordinator tells.
async fn listening(runtime: Arc<Runtime>, mut events: broadcast::Receiver<CoordinatorEvent>) {
    let ended = runtime.reached(Phase::Cutting);
    tokio::pin!(ended);
    loop {
        let event = tokio::select! {
            biased;
            () = &mut ended => return,
            event = events.recv() => event,
        };
        match event {
            Ok(event) => told(&runtime, event),
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                tracing::error!(%missed, "events of the coordinator were missed");
            }
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

fn told(runtime: &Arc<Runtime>, event: CoordinatorEvent) {
    match event {
        CoordinatorEvent::Opened { incarnation } => tracing::info!(%incarnation, "session open"),
        CoordinatorEvent::Lost { incarnation, reason } => {
            tracing::warn!(%incarnation, ?reason, "session lost");
            runtime.events.emit(Event::LeaseLost { key: "session".to_owned(), reason });
            // What others handle meanwhile makes this memory stale; its checkpoints stay (SPEC E3).
            runtime.chats.clear();
        }
        CoordinatorEvent::ReplicaIdShared { other } => {
            runtime.events.emit(Event::ReplicaIdShared { other });
        }
        CoordinatorEvent::OutboxAdopted { chat } => runtime.sender.doubt(chat),
        CoordinatorEvent::OutboxReady { chat } => Sender::ready(runtime, chat),
        CoordinatorEvent::DeadLettered { chat, ticket, id } => {
            runtime.events.emit(Event::DeadLetter { key: chat, ticket, id });
        }
    }
}

/// Runs a provider, again when it ends, until the bot closes.
async fn providing(runtime: Arc<Runtime>, provider: Arc<dyn Provider>, link: Link) {
    loop {
        run_once(&runtime, &provider, &link).await;
        if !waited(&runtime, RESTART_WAIT).await {
            return;
        }
    }
}

/// Runs a provider to its end; reports an end that nobody asked for.
async fn run_once(runtime: &Runtime, provider: &Arc<dyn Provider>, link: &Link) {
    let why = match provider.run(link.clone()).await {
        Ok(Closed::Asked) => return,
        Ok(_) => "the other side closed it".to_owned(),
        Err(error) => error.why,
    };
    if runtime.phase() == Phase::Open {
        let provider = provider.id().to_owned();
        runtime.events.error(None, RuntimeError::Provider { provider, why });
    }
}

/// `false` when the bot closes first.
async fn waited(runtime: &Runtime, wait: Duration) -> bool {
    let until = runtime.clock.now() + wait;
    tokio::select! {
        biased;
        () = runtime.reached(Phase::Closing) => false,
        () = runtime.clock.sleep_until(until) => true,
    }
}

/// Runs a provider again and again until it has been closed for `down` without having been open for
/// longer than the wait between two tries (SPEC D2), or the bot closes.
async fn keep_open(runtime: &Runtime, provider: &Arc<dyn Provider>, link: &Link, down: Duration) {
    let mut closed_since = None;
    loop {
        let began = runtime.clock.now();
        run_once(runtime, provider, link).await;
        let ended = runtime.clock.now();
        if ended - began > RESTART_WAIT {
            closed_since = None;
        }
        let since = *closed_since.get_or_insert(ended);
        if ended - since >= down || !waited(runtime, RESTART_WAIT.min(down)).await {
            return;
        }
    }
}

/// Runs an exclusive provider while this replica leads it (SPEC D1), and steps down when it stays
/// closed for `down`.
async fn leading(runtime: Arc<Runtime>, provider: Arc<dyn Provider>, link: Link, down: Duration) {
    let name = lead_of(provider.id());
    let mut reason = FollowReason::Waiting;
    loop {
        runtime.events.emit(Event::Follower { name: name.clone(), reason });
        let lead = tokio::select! {
            biased;
            () = runtime.reached(Phase::Closing) => return,
            lead = runtime.coordinator.campaign(&name) => lead,
        };
        let lead = match lead {
            Ok(lead) => lead,
            Err(error) => {
                runtime.events.error(None, error);
                if !waited(&runtime, RESTART_WAIT).await {
                    return;
                }
                continue;
            }
        };
        runtime.leads(provider.id(), true);
        runtime.events.emit(Event::Leader { name: name.clone(), fence: lead.fence() });
        tokio::select! {
            () = keep_open(&runtime, &provider, &link, down) => {
                reason = FollowReason::SteppedDown;
            }
            lost = lead.lost() => {
                reason = FollowReason::Expired;
                runtime.events.emit(Event::LeaseLost { key: name.clone(), reason: lost });
            }
        }
        runtime.leads(provider.id(), false);
        if reason == FollowReason::SteppedDown && runtime.phase() == Phase::Open {
            let lost = LostReason::SteppedDown;
            runtime.events.emit(Event::LeaseLost { key: name.clone(), reason: lost });
        }
        drop(lead);
        if !waited(&runtime, RESTART_WAIT).await {
            return;
        }
    }
}
