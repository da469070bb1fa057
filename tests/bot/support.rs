//! A few replicas of one bot on one hub.

use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Events, HandoverOutcome};
use botmesh::clock::ManualClock;
use botmesh::coordinator::CoordinatorOptions;
use botmesh::store::{Authority, Consistency, Expect, Op, RowKey, Store, Table};
use botmesh::testing::{MemoryCoordinator, MemoryHub, ScriptedProvider, ScriptedUser};
use botmesh::types::{ChatKey, ReplicaId};

/// Longer than any wait that is going to succeed.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Longer than a lease, and than the margin of whoever expires it.
pub const PAST_LEASE: Duration = Duration::from_secs(17);

/// One replica.
pub struct Replica {
    pub bot: Bot,
    pub provider: ScriptedProvider,
    pub coordinator: MemoryCoordinator,
}

/// Replicas that share a hub, a clock and the people on the other side.
pub struct Bots {
    pub clock: ManualClock,
    pub hub: MemoryHub,
    provider: ScriptedProvider,
    named: u32,
}

impl Bots {
    pub fn new() -> Self {
        Self::with(ScriptedProvider::new("x"))
    }

    /// Replicas of whose provider only one may be connected.
    pub fn exclusive() -> Self {
        Self::with(ScriptedProvider::exclusive("x"))
    }

    fn with(provider: ScriptedProvider) -> Self {
        let clock = ManualClock::new();
        let hub = MemoryHub::with_clock(clock.clone());
        Self { clock, hub, provider, named: 0 }
    }

    /// Starts another replica of the bot that `make` makes.
    pub async fn start(&mut self, make: impl FnOnce(BotBuilder) -> BotBuilder) -> Replica {
        self.start_with(make, |coordination| coordination).await
    }

    pub async fn start_with(
        &mut self,
        make: impl FnOnce(BotBuilder) -> BotBuilder,
        set: impl FnOnce(Coordination) -> Coordination,
    ) -> Replica {
        self.named += 1;
        let options = CoordinatorOptions {
            replica_id: Some(ReplicaId(format!("r{}", self.named))),
            ..CoordinatorOptions::default()
        };
        let prefix = MemoryHub::default_prefix();
        let coordinator = MemoryCoordinator::with(&self.hub, prefix.clone(), options);
        let provider = self.provider.replica();
        let bot = make(Bot::builder())
            .provider(provider.clone())
            .store(self.hub.store(prefix))
            .coordination(set(Coordination::new(coordinator.clone())))
            .build()
            .await
            .unwrap();
        bot.start().await.unwrap();
        Replica { bot, provider, coordinator }
    }

    /// This replica dies: no goodbye, and its lease has to run out.
    pub async fn kill(&self, replica: Replica) {
        replica.coordinator.crash();
        self.pass(PAST_LEASE).await;
    }

    /// Lets time pass in steps that the living keep up with: they renew in between.
    pub async fn pass(&self, time: Duration) {
        const STEP: Duration = Duration::from_millis(500);
        for _ in 0..time.as_millis().div_ceil(STEP.as_millis()) {
            self.clock.advance(STEP);
            for _ in 0..16 {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The next event that `wanted` picks.
pub async fn next_event<T>(events: &mut Events, mut wanted: impl FnMut(&Event) -> Option<T>) -> T {
    let mut seen = Vec::new();
    let found = tokio::time::timeout(PATIENCE, async {
        loop {
            let event = events.next().await.expect("the bot lives");
            if let Some(found) = wanted(&event) {
                return found;
            }
            seen.push(event);
        }
    });
    match found.await {
        Ok(found) => found,
        Err(_) => panic!("the event did not come; others did: {seen:#?}"),
    }
}

/// Waits until something holds, without an event to wait for.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    });
    assert!(waited.await.is_ok(), "{what}: not within {PATIENCE:?}");
}

/// What became of the next conversation that changed hands.
pub async fn next_outcome(events: &mut Events) -> HandoverOutcome {
    let outcome = |event: &Event| match event {
        Event::Handover { outcome, .. } => Some(*outcome),
        _ => None,
    };
    next_event(events, outcome).await
}

/// The chat's stored conversation.
pub async fn stored(bot: &Bot, chat: &ChatKey) -> Option<serde_json::Value> {
    let row = RowKey::new(Table::Checkpoint, chat.to_string());
    let found = bot.store().read(&row, Consistency::Linearizable).await.unwrap();
    found.map(|row| serde_json::from_slice(&row.value).unwrap())
}

/// Writes a row as if it were the chat's stored conversation.
pub async fn plant(bot: &Bot, user: &ScriptedUser, value: &str) {
    let row = RowKey::new(Table::Checkpoint, user.chat().to_string());
    let value = value.as_bytes().to_vec();
    let put = Op::Put { row, value, expect: Expect::Any, ttl_ms: None };
    bot.store().commit(Authority::Nobody, vec![put]).await.unwrap();
}
