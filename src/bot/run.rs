//! A bot's life: start, run, stop (SPEC A7).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::broadcast;
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
use crate::store::{Authority, CommitError, Op};
use crate::watch;

/// Wait before a provider that ended is started again.
const RESTART_WAIT: Duration = Duration::from_secs(3);
/// Longest wait of a replica whose session another took, before it campaigns again.
const EVICTED_WAIT_MAX: Duration = Duration::from_secs(300);

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
        let inbox = Arc::new(BotInbox { runtime: runtime.clone(), lead: None });
        let link = Link::new(inbox, runtime.closing.subscribe());
        let started = AtomicBool::new(false);
        let ready = watch::channel(false).0;
        let listener = Mutex::default();
        Self { runtime, link, provider_session, provider_down, started, ready, listener }
    }

    pub(super) async fn ready(&self) {
        // The sender is `self`'s own.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
        let mut connected = self.runtime.connected.subscribe();
        // So is this one. Nobody is connected that does not lead.
        let _ = connected.wait_for(|all| all.values().all(|connected| *connected)).await;
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
            if exclusive {
                self.runtime.leads(provider.id(), false);
                self.runtime.connected(provider.id(), false);
                self.runtime.tasks.spawn(leading(runtime, provider, self.provider_down));
            } else {
                self.runtime.tasks.spawn(providing(runtime, provider, self.link.clone()));
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
        runtime.parting.lock().clear();
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
        CoordinatorEvent::OutboxAdopted { chat } => {
            tracing::debug!(%chat, "an outbox is this replica's now");
            runtime.sender.doubt(chat);
        }
        CoordinatorEvent::OutboxReady { chat } => Sender::ready(runtime, chat),
        CoordinatorEvent::DeadLettered { chat, ticket, id } => {
            runtime.events.emit(Event::DeadLetter { key: chat, ticket, id });
        }
    }
}

/// Runs a provider, again when it ends, until the bot closes.
async fn providing(runtime: Arc<Runtime>, provider: Arc<dyn Provider>, link: Link) {
    let running = async {
        loop {
            run_once(&runtime, &provider, &link).await;
            if !waited(&runtime, RESTART_WAIT).await {
                return;
            }
        }
    };
    tokio::join!(settle_home(&runtime, provider.id(), false), running);
}

/// Says whose the provider's journaled messages and replies are, once at the start: the elected
/// replica's, or any replica's (SPEC D6).
async fn settle_home(runtime: &Runtime, provider: &str, elected: bool) {
    if !runtime.durable {
        return;
    }
    loop {
        let lead = elected.then(|| lead_of(provider));
        let home = Op::Home { channel: provider.to_owned(), lead };
        match runtime.store.commit(Authority::Nobody, vec![home]).await {
            // A store of the user's own that knows no homes leaves messages where they came in.
            Ok(_) | Err(CommitError::Unsupported { .. }) => return,
            Err(error) => tracing::warn!(%provider, %error, "its home is not settled yet"),
        }
        if !waited(runtime, RESTART_WAIT).await {
            return;
        }
    }
}

/// Runs a provider to its end; reports an end that nobody asked for.
async fn run_once(runtime: &Runtime, provider: &Arc<dyn Provider>, link: &Link) -> Closed {
    let (closed, why) = match provider.run(link.clone()).await {
        Ok(Closed::Asked) => return Closed::Asked,
        Ok(Closed::Replaced) => (Closed::Replaced, "another session took its place".to_owned()),
        Ok(Closed::Unlinked) => {
            (Closed::Unlinked, "its account is no longer known there; link it again".to_owned())
        }
        Ok(Closed::Refused(why)) => (Closed::Refused(why), format!("it is refused there: {why}")),
        Ok(closed) => (closed, "the other side closed it".to_owned()),
        Err(error) => (Closed::ByPeer, error.why),
    };
    if runtime.phase() == Phase::Open {
        let provider = provider.id().to_owned();
        runtime.events.error(None, RuntimeError::Provider { provider, why });
    }
    closed
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

/// Runs a provider again and again, until it is no use here (SPEC D2): another session took its place,
/// its account is gone or refused, it was not connected for `down`, or the bot closes.
async fn keep_open(
    runtime: &Runtime,
    provider: &Arc<dyn Provider>,
    link: &Link,
    down: Duration,
) -> Closed {
    let again = async {
        loop {
            let closed = run_once(runtime, provider, link).await;
            runtime.connected(provider.id(), false);
            if !matches!(closed, Closed::ByPeer) || !waited(runtime, RESTART_WAIT.min(down)).await {
                return closed;
            }
        }
    };
    tokio::select! {
        biased;
        closed = again => closed,
        () = deaf(runtime, provider.id(), down) => Closed::ByPeer,
    }
}

/// Resolves once a provider was not connected for `down`. A connection that does not last for longer
/// than the wait between two tries is none.
async fn deaf(runtime: &Runtime, provider: &str, down: Duration) {
    let mut all = runtime.connected.subscribe();
    let is = |all: &BTreeMap<String, bool>| all.get(provider).copied().unwrap_or(true);
    loop {
        // The sender is the runtime's own, here and below.
        let _ = all.wait_for(|all| !is(all)).await;
        let due = runtime.clock.now() + down;
        loop {
            tokio::select! {
                biased;
                _ = all.wait_for(is) => {}
                () = runtime.clock.sleep_until(due) => return,
            }
            let lasts = runtime.clock.now() + RESTART_WAIT;
            tokio::select! {
                biased;
                _ = all.wait_for(|all| !is(all)) => {}
                () = runtime.clock.sleep_until(lasts) => break,
            }
        }
    }
}

/// Runs an exclusive provider while this replica leads it (SPEC D1), and steps down when it stays
/// closed for `down`.
async fn leading(runtime: Arc<Runtime>, provider: Arc<dyn Provider>, down: Duration) {
    let name = lead_of(provider.id());
    settle_home(&runtime, provider.id(), true).await;
    let mut reason = FollowReason::Waiting;
    let mut evictions = 0_u32;
    loop {
        runtime.events.emit(Event::Follower { name: name.clone(), reason });
        let lead = tokio::select! {
            biased;
            () = runtime.reached(Phase::Closing) => return,
            lead = runtime.coordinator.campaign(&name) => lead,
        };
        let lead = match lead {
            Ok(lead) => Arc::new(lead),
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
        let inbox = BotInbox { runtime: runtime.clone(), lead: Some(Arc::downgrade(&lead)) };
        let link = Link::new(Arc::new(inbox), runtime.closing.subscribe());
        let mut closed = None;
        tokio::select! {
            biased;
            lost = lead.lost() => {
                reason = FollowReason::Expired;
                runtime.events.emit(Event::LeaseLost { key: name.clone(), reason: lost });
            }
            how = keep_open(&runtime, &provider, &link, down) => {
                closed = Some(how);
                reason = FollowReason::SteppedDown;
            }
        }
        runtime.connected(provider.id(), false);
        if closed == Some(Closed::Asked) && lead.check().is_ok() {
            // What still runs may have something to say: the lead goes with the session.
            return runtime.parting.lock().push(lead);
        }
        runtime.leads(provider.id(), false);
        if reason == FollowReason::SteppedDown && runtime.phase() == Phase::Open {
            let lost = LostReason::SteppedDown;
            runtime.events.emit(Event::LeaseLost { key: name.clone(), reason: lost });
        }
        drop(lead);
        // Two that evict each other in turn are to do so ever more seldom (case w11).
        evictions = match closed {
            Some(Closed::Replaced | Closed::Unlinked | Closed::Refused(_)) => evictions + 1,
            _ => 0,
        };
        let wait = RESTART_WAIT * 2_u32.saturating_pow(evictions.min(16));
        if !waited(&runtime, wait.min(EVICTED_WAIT_MAX)).await {
            return;
        }
    }
}
