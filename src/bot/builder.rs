//! How a bot is put together; every fault is found here, at once, and none later.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use super::Bot;
use super::conversation::{AnyFlow, Convo, Dialogue, Flow, FlowId, State};
use super::ctx::Ctx;
use super::error::{BuildError, Fault, Result};
use super::events::Emitter;
use super::handler::{AnyHandler, Cloned, Handler, Route};
use super::handover::Handover;
use super::hooks::{AnyHook, ClonedHook, Hook, Pass};
use super::inbox::Intake;
use super::memory::Chats;
use super::outbox::Sender;
use super::runtime::{Phase, Runtime, TURNS_AT_ONCE_MAX};
use super::schedule::{AnyJobHandler, Job, JobHandler, Scheduled, Tick};
use super::watch::Watch;
use crate::clock::SystemClock;
use crate::coordinator::{Coordinator, CoordinatorOptions, MemoryCoordinator, Sticky};
use crate::group::{Limits, MemoryHub};
use crate::provider::Provider;
use crate::store::{Feature, Store};
use crate::watch;

/// Whether messages are journaled before they are acknowledged to the outside (SPEC G).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// No message is lost, doubled or reordered, and no reply that was recorded goes out twice.
    On,
    /// A message waits in memory for its turn; the process's death loses it.
    Off,
}

/// What becomes of a reply of which nobody knows whether it arrived: its answer was lost, or its
/// sender died over it (SPEC G3). The event `SendUnknown` tells of it in either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnUnknown {
    /// It is sent again, under the same id: providers that know ids take it once (default).
    #[default]
    Resend,
    /// It is not sent again: rather never than twice.
    Drop,
}

/// Which replicas connect a provider that allows one session only (SPEC D1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProviderSession {
    /// One elected replica for providers that say they are exclusive, all for the others.
    #[default]
    Auto,
    /// One elected replica for every provider.
    Leader,
    /// All replicas.
    Shared,
}

/// How a bot shares its chats with its other replicas (SPEC A2).
#[derive(Clone)]
pub struct Coordination {
    coordinator: Arc<dyn Coordinator>,
    turn_wait: Duration,
    settle: Duration,
    provider_session: ProviderSession,
    provider_down: Duration,
    durability: Option<Durability>,
    handover: Handover,
    sticky: Option<Sticky>,
}

impl fmt::Debug for Coordination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coordination")
            .field("replica", self.coordinator.replica())
            .field("turn_wait", &self.turn_wait)
            .field("settle", &self.settle)
            .field("provider_session", &self.provider_session)
            .field("provider_down", &self.provider_down)
            .field("durability", &self.durability)
            .field("handover", &self.handover)
            .field("sticky", &self.sticky)
            .finish()
    }
}

impl Coordination {
    /// Coordination by this coordinator, everything else as by default.
    pub fn new(coordinator: impl Coordinator) -> Self {
        Self {
            coordinator: Arc::new(coordinator),
            turn_wait: Duration::from_secs(120),
            settle: Duration::from_secs(60),
            provider_session: ProviderSession::Auto,
            provider_down: Duration::from_secs(60),
            durability: None,
            handover: Handover::default(),
            sticky: Some(Sticky::default()),
        }
    }

    /// How the turn of a chat that no other replica wants stays with this one (default: it does, see
    /// [`Sticky`]); `None` gives each message a turn of its own. Without durability a message that
    /// finds its turn here costs no commit for it; with durability nothing stays held, and the
    /// chat's messages go on under one fence (SPEC B10).
    #[must_use]
    pub fn sticky(mut self, sticky: impl Into<Option<Sticky>>) -> Self {
        self.sticky = sticky.into();
        self
    }

    /// What becomes of conversations whose chat goes to another replica (default: persistent flows
    /// continue, the others are gone).
    #[must_use]
    pub fn handover(mut self, handover: Handover) -> Self {
        self.handover = handover;
        self
    }

    /// How long a message waits for its chat's turn before an error tells (default 2 min).
    #[must_use]
    pub fn turn_wait(mut self, turn_wait: Duration) -> Self {
        self.turn_wait = turn_wait;
        self
    }

    /// The longest a step may run (default 1 min); a longer one is stopped and its turn released.
    #[must_use]
    pub fn settle(mut self, settle: Duration) -> Self {
        self.settle = settle;
        self
    }

    /// Who connects providers that allow one session only (default `Auto`).
    #[must_use]
    pub fn provider_session(mut self, provider_session: ProviderSession) -> Self {
        self.provider_session = provider_session;
        self
    }

    /// How long an elected replica's transport may stay closed before it steps down (1 min).
    #[must_use]
    pub fn provider_down(mut self, provider_down: Duration) -> Self {
        self.provider_down = provider_down;
        self
    }

    /// Whether messages are journaled (default: `On` where store and coordinator can).
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = Some(durability);
        self
    }
}

/// Collects what a bot is made of. See [`Bot`] for a whole example.
#[must_use = "a bot is made by build()"]
#[derive(Default)]
pub struct BotBuilder {
    providers: Vec<Arc<dyn Provider>>,
    store: Option<Arc<dyn Store>>,
    coordination: Option<Coordination>,
    routes: Vec<(Route, Box<dyn AnyHandler>)>,
    hooks: Vec<Box<dyn AnyHook>>,
    flows: Vec<AnyFlow>,
    conversation_timeout: Option<Duration>,
    jobs: Vec<(Job, Box<dyn AnyJobHandler>)>,
    scheduler: Option<Arc<dyn Coordinator>>,
    on_unknown: OnUnknown,
}

impl fmt::Debug for BotBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BotBuilder")
            .field("routes", &self.routes.iter().map(|(route, _)| route).collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl BotBuilder {
    /// Adds a transport. An `Arc` of one is one too.
    pub fn provider(mut self, provider: impl Provider) -> Self {
        self.providers.push(Arc::new(provider));
        self
    }

    /// What it keeps its data in; a private one in memory where none is given.
    pub fn store(mut self, store: impl Store) -> Self {
        self.store = Some(Arc::new(store));
        self
    }

    /// Shares its chats with other replicas (SPEC A2). Without it the bot is one process.
    pub fn coordination(mut self, coordination: Coordination) -> Self {
        self.coordination = Some(coordination);
        self
    }

    /// Adds a flow.
    pub fn flow<S: State>(mut self, flow: Flow<S>) -> Self {
        self.flows.push(flow.into_any());
        self
    }

    /// Adds a conversation that is one async function from beginning to end. It is entered like a
    /// flow and lives in the memory of the replica that entered it: where another one takes the
    /// chat, the [`Handover`]'s fallback decides. See [`Flow::of_one_piece`] for its options.
    ///
    /// ```
    /// use botmesh::bot::{Bot, FlowId, Route};
    ///
    /// const FEEDBACK: FlowId<()> = FlowId::new("feedback");
    ///
    /// let bot = Bot::builder()
    ///     .conversation(FEEDBACK, async |c| {
    ///         let answer = c.ask("How was it?").await?;
    ///         c.say(format!("Noted: {answer}")).await?;
    ///         Ok(())
    ///     })
    ///     .on(Route::Any, async |ctx| Ok(ctx.enter(FEEDBACK, ()).await?));
    /// ```
    pub fn conversation<S, F>(self, id: FlowId<S>, dialogue: F) -> Self
    where
        S: State,
        F: Clone + AsyncFnOnce(&mut Convo<S>) -> Result + for<'a> Dialogue<'a, S>,
    {
        self.flow(Flow::of_one_piece(id, dialogue))
    }

    /// How long a question waits for its answer where neither it nor its flow says anything else;
    /// then the conversation ends. Without it, for ever.
    pub fn conversation_timeout(mut self, timeout: Duration) -> Self {
        self.conversation_timeout = Some(timeout);
        self
    }

    /// Adds a hook: it sees every message under its turn, before the conversation or the handler,
    /// may change what they see ([`Ctx::set_text`] and others), and may stop it. Hooks run in the
    /// order they were added; what they made of an answer that a checkpoint keeps travels with it,
    /// and they do not run for it again.
    ///
    /// ```
    /// use botmesh::bot::{Bot, Pass};
    ///
    /// let bot = Bot::builder()
    ///     .before_message(async |ctx| Ok(if ctx.text() == "/mute" { Pass::Stop } else { Pass::On }));
    /// ```
    pub fn before_message<F>(mut self, hook: F) -> Self
    where
        F: Clone + AsyncFnOnce(&mut Ctx) -> Result<Pass> + for<'a> Hook<'a>,
    {
        self.hooks.push(Box::new(ClonedHook(hook)));
        self
    }

    /// Adds a handler: an async function or closure of `&mut Ctx`.
    pub fn on<F>(mut self, route: impl Into<Route>, handler: F) -> Self
    where
        F: Clone + AsyncFnOnce(&mut Ctx) -> Result + for<'a> Handler<'a>,
    {
        self.routes.push((route.into(), Box::new(Cloned(handler))));
        self
    }

    /// Adds a handler for the command `/name`.
    pub fn command<F>(self, name: impl Into<String>, handler: F) -> Self
    where
        F: Clone + AsyncFnOnce(&mut Ctx) -> Result + for<'a> Handler<'a>,
    {
        self.on(Route::command(name), handler)
    }

    /// Runs this on every replica at multiples of a period: `30s`, `5m`. Shorthand for
    /// [`BotBuilder::job`] with [`Job::every`].
    pub fn every<F>(self, period: impl Into<String>, handler: F) -> Self
    where
        F: Clone + AsyncFnOnce(&mut Tick) -> Result + for<'a> JobHandler<'a>,
    {
        self.job(Job::every(period), handler)
    }

    /// Runs this on every replica at the times of a cron expression in UTC. Shorthand for
    /// [`BotBuilder::job`] with [`Job::cron`].
    pub fn schedule<F>(self, cron: impl Into<String>, handler: F) -> Self
    where
        F: Clone + AsyncFnOnce(&mut Tick) -> Result + for<'a> JobHandler<'a>,
    {
        self.job(Job::cron(cron), handler)
    }

    /// Adds a job: an async function or closure of `&mut Tick`. One with an id is durable: each
    /// occurrence runs on one replica (SPEC G4). See [`Job`].
    pub fn job<F>(mut self, job: Job, handler: F) -> Self
    where
        F: Clone + AsyncFnOnce(&mut Tick) -> Result + for<'a> JobHandler<'a>,
    {
        self.jobs.push((job, Box::new(Cloned(handler))));
        self
    }

    /// What becomes of replies that may have arrived (default [`OnUnknown::Resend`]).
    pub fn on_unknown(mut self, on_unknown: OnUnknown) -> Self {
        self.on_unknown = on_unknown;
        self
    }

    /// By whose sessions durable jobs are claimed, where it is not the coordinator of the chats: one
    /// with a longer lease, say, for a replica that may freeze. It is opened and closed with the
    /// bot, and belongs to the store's group and prefix.
    pub fn scheduler(mut self, coordinator: impl Coordinator) -> Self {
        self.scheduler = Some(Arc::new(coordinator));
        self
    }

    /// Makes the bot, or says everything that is wrong with it.
    pub async fn build(mut self) -> Result<Bot, BuildError> {
        let mut faults = Vec::new();
        let providers = self.check_providers(&mut faults);
        let flows = self.check_flows(&mut faults);
        self.check_routes(&mut faults);
        let carriers = self.carriers(&mut faults);
        let jobs = self.check_jobs(carriers.as_ref(), &mut faults);
        let Some(carriers) = carriers.filter(|_| faults.is_empty()) else {
            return Err(BuildError { faults });
        };
        if !carriers.store.is_shared() && self.coordination.is_some() {
            tracing::warn!("the store is not shared: each replica sees data of its own");
        }
        if !carriers.store.supports(Feature::CheckpointCas) {
            tracing::warn!(
                "the store has no compare-and-set checkpoints: they are fenced locally only"
            );
        }
        let runtime = Runtime {
            providers,
            clock: carriers.coordinator.clock(),
            scheduler: self.scheduler.unwrap_or_else(|| carriers.coordinator.clone()),
            jobs,
            store: carriers.store,
            coordinator: carriers.coordinator,
            routes: self.routes,
            hooks: self.hooks,
            flows,
            conversation_timeout: self.conversation_timeout,
            coordinated: self.coordination.is_some(),
            handover: carriers.handover,
            durable: carriers.durable,
            fenced_store: carriers.fenced_store,
            turn_wait: carriers.turn_wait,
            settle: carriers.settle,
            sticky: carriers.sticky,
            watch: Watch::new(carriers.settle),
            on_unknown: self.on_unknown,
            leads: watch::channel(BTreeMap::new()).0,
            connected: watch::channel(BTreeMap::new()).0,
            parting: parking_lot::Mutex::default(),
            events: Emitter::new(),
            chats: Chats::default(),
            intake: Intake::new(),
            sender: Sender::default(),
            phase: watch::channel(Phase::Open).0,
            closing: tokio::sync::watch::channel(false).0,
            turns: Arc::new(Semaphore::new(TURNS_AT_ONCE_MAX)),
            tasks: TaskTracker::new(),
        };
        Ok(Bot::new(runtime, carriers.provider_session, carriers.provider_down))
    }

    fn check_providers(&self, faults: &mut Vec<Fault>) -> BTreeMap<String, Arc<dyn Provider>> {
        let mut providers: BTreeMap<String, Arc<dyn Provider>> = BTreeMap::new();
        for provider in &self.providers {
            let id = provider.id().to_owned();
            if let Err(error) = crate::types::check_name("a provider's id", &id) {
                faults.push(Fault::ProviderName { id, why: error.to_string() });
            } else if providers.insert(id.clone(), provider.clone()).is_some() {
                faults.push(Fault::ProviderTwice { id });
            }
        }
        if self.providers.is_empty() {
            faults.push(Fault::NoProvider);
        }
        providers
    }

    fn check_flows(&self, faults: &mut Vec<Fault>) -> HashMap<&'static str, AnyFlow> {
        let mut flows = HashMap::new();
        for flow in &self.flows {
            let name = flow.plan.name;
            let steps = flow.steps();
            let mut seen = HashSet::new();
            if let Some(twice) = steps.iter().find(|step| !seen.insert(**step)) {
                let why = format!("two steps are named {twice:?}");
                faults.push(Fault::FlowSteps { flow: name.to_owned(), why });
            }
            if steps.is_empty() {
                let why = "it has no steps".to_owned();
                faults.push(Fault::FlowSteps { flow: name.to_owned(), why });
            }
            if flows.insert(name, flow.clone()).is_some() {
                faults.push(Fault::FlowTwice { flow: name.to_owned() });
            }
        }
        flows
    }

    fn check_routes(&self, faults: &mut Vec<Fault>) {
        let mut seen = HashSet::new();
        for (route, _) in &self.routes {
            if !seen.insert(route) {
                faults.push(Fault::RouteTwice { route: route.to_string() });
            }
        }
    }

    fn check_jobs(
        &mut self,
        carriers: Option<&Carriers>,
        faults: &mut Vec<Fault>,
    ) -> Vec<Arc<Scheduled>> {
        let clock = carriers.map_or_else(SystemClock::shared, |found| found.coordinator.clock());
        if let (Some(scheduler), Some(carriers)) = (&self.scheduler, carriers)
            && scheduler.prefix() != carriers.store.prefix()
        {
            let (scheduler, store) = (scheduler.prefix(), carriers.store.prefix());
            let (scheduler, store) = (scheduler.to_string(), store.to_string());
            faults.push(Fault::SchedulerPrefix { scheduler, store });
        }
        let keeps = carriers.is_none_or(|carriers| carriers.store.supports(Feature::Tasks));
        let (mut jobs, mut ids) = (Vec::new(), HashSet::new());
        for (job, handler) in std::mem::take(&mut self.jobs) {
            if let Some(id) = job.durable_id().map(str::to_owned) {
                if !keeps {
                    faults.push(Fault::JobNotDurable { job: job.to_string() });
                }
                if !ids.insert(id.clone()) {
                    faults.push(Fault::JobTwice { id });
                }
            }
            if let Some(schedule) = job.check(clock.wall_ms(), faults) {
                jobs.push(Arc::new(Scheduled { job, schedule, handler }));
            }
        }
        jobs
    }

    /// Who coordinates and who stores; `None` where a fault says why not.
    fn carriers(&self, faults: &mut Vec<Fault>) -> Option<Carriers> {
        let carriers = match &self.coordination {
            Some(coordination) => self.shared_carriers(coordination, faults)?,
            None => Carriers::private(self.store.clone()),
        };
        let keeps = carriers.store.supports(Feature::Durability);
        for provider in self.providers.iter().filter(|p| p.capabilities().listed > 0 && !keeps) {
            faults.push(Fault::NotListed { id: provider.id().to_owned() });
        }
        Some(carriers)
    }

    fn shared_carriers(
        &self,
        coordination: &Coordination,
        faults: &mut Vec<Fault>,
    ) -> Option<Carriers> {
        let ttl = coordination.handover.ttl.unwrap_or(Duration::MAX);
        let timeout = self.conversation_timeout.unwrap_or(Duration::MAX);
        for (option, given) in [
            ("turn_wait", coordination.turn_wait),
            ("settle", coordination.settle),
            ("handover.ttl", ttl),
            ("conversation_timeout", timeout),
        ] {
            if given.is_zero() {
                let allowed = "give it a time above zero";
                faults.push(Fault::Option { option, given: format!("{given:?}"), allowed });
            }
        }
        let Some(store) = self.store.clone() else {
            faults.push(Fault::NoStore);
            return None;
        };
        let coordinator = coordination.coordinator.clone();
        if coordinator.prefix() != store.prefix() {
            faults.push(Fault::PrefixesDiffer {
                coordinator: coordinator.prefix().to_string(),
                store: store.prefix().to_string(),
            });
        }
        let stores = store.supports(Feature::Durability) && store.supports(Feature::AtomicCommit);
        let can = stores && coordinator.journals();
        if coordination.durability == Some(Durability::On) && !can {
            let lacking = if stores { "the coordinator" } else { "the store" };
            faults.push(Fault::NotDurable { lacking });
        }
        Some(Carriers {
            durable: can && coordination.durability != Some(Durability::Off),
            fenced_store: store.supports(Feature::AtomicCommit),
            store,
            coordinator,
            turn_wait: coordination.turn_wait,
            settle: coordination.settle,
            sticky: coordination.sticky,
            handover: coordination.handover.clone(),
            provider_session: coordination.provider_session,
            provider_down: coordination.provider_down,
        })
    }
}

/// Chats a private hub remembers the last holder of; past it the least recently used forget what
/// conversation they had in memory.
const PRIVATE_CHATS_MAX: u32 = 1_000_000;

impl Carriers {
    /// One process (SPEC A1): turns by a hub of its own. It is durable in the sense that one commit
    /// ends a turn, though nothing survives the process. A store of the user's own cannot judge
    /// that hub's fences; it is written under the local check and compare-and-set alone.
    fn private(store: Option<Arc<dyn Store>>) -> Self {
        let limits = Limits { idle_keys_max: PRIVATE_CHATS_MAX, ..Limits::default() };
        let hub = MemoryHub::with_limits(limits);
        let prefix = store.as_ref().map_or_else(MemoryHub::default_prefix, |s| s.prefix().clone());
        let own = store.is_none();
        let store = store.unwrap_or_else(|| Arc::new(hub.store(prefix.clone())));
        let options = CoordinatorOptions::default();
        Self {
            coordinator: Arc::new(MemoryCoordinator::with(&hub, prefix, options)),
            store,
            durable: own,
            fenced_store: own,
            turn_wait: Duration::from_secs(120),
            settle: Duration::from_secs(60),
            // Nobody else is there, and a turn costs no commit.
            sticky: None,
            handover: Handover::default(),
            provider_session: ProviderSession::Shared,
            provider_down: Duration::from_secs(60),
        }
    }
}

/// Who carries the bot.
pub(super) struct Carriers {
    pub(super) store: Arc<dyn Store>,
    pub(super) coordinator: Arc<dyn Coordinator>,
    pub(super) durable: bool,
    pub(super) fenced_store: bool,
    pub(super) turn_wait: Duration,
    pub(super) settle: Duration,
    pub(super) sticky: Option<Sticky>,
    pub(super) handover: Handover,
    pub(super) provider_session: ProviderSession,
    pub(super) provider_down: Duration,
}
