//! Transports of which only one replica may be connected (SPEC D1 to D3).

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use botmesh::bot::{
    Bot, BotBuilder, Coordination, Durability, Event, FollowReason, ReplyError, Route,
};
use botmesh::cli::demo;
use botmesh::coordinator::LostReason;
use botmesh::provider::{
    Capabilities, Closed, DeliverError, Delivery, Link, Provider, ProviderError, SendError, SentId,
    Webhook,
};
use botmesh::testing::{CoordinatorOptions, ManualClock, MemoryCoordinator, MemoryHub};
use botmesh::types::{ChatKey, Message};
use parking_lot::Mutex;

use super::support::{Bots, Replica, next_event, until};

async fn connected(replica: &Replica) {
    until("it connects", || replica.provider.is_connected()).await;
}

/// Whether it is ready at this very moment.
async fn is_ready(replica: &Replica) -> bool {
    let ready = replica.bot.ready();
    tokio::pin!(ready);
    std::future::poll_fn(|cx| std::task::Poll::Ready(ready.as_mut().poll(cx).is_ready())).await
}

#[tokio::test]
async fn d1_one_replica_connects_and_a_standby_takes_over() {
    let mut bots = Bots::exclusive();
    let a = bots.start(demo::flows).await;
    connected(&a).await;
    let (b, c) = (bots.start(demo::flows).await, bots.start(demo::flows).await);
    bots.pass(Duration::from_secs(20)).await;
    assert_eq!([&a, &b, &c].map(|one| one.provider.is_connected()), [true, false, false]);
    a.provider.user("ann").says("order").await.hears("What would you like?").await;

    // It dies: the first in line takes over after the lease, and the conversation goes on there.
    bots.kill(a).await;
    connected(&b).await;
    assert!(!c.provider.is_connected());
    let ann = b.provider.user("ann");
    ann.says("tea").await.hears("How many?").await;
    // It stops: the next takes over at once, on a clock that stands still.
    b.bot.stop().await.unwrap();
    connected(&c).await;
    c.provider.user("ann").says("3").await.hears("Where to?").await;
}

#[tokio::test]
async fn d2_a_transport_that_stays_closed_is_stepped_down_from() {
    let mut bots = Bots::exclusive();
    let down = Duration::from_secs(10);
    let a = bots.start_with(demo::flows, |c| c.provider_down(down)).await;
    connected(&a).await;
    let mut events = a.bot.events();
    let b = bots.start_with(demo::flows, |c| c.provider_down(down)).await;

    a.provider.set_up(false);
    bots.pass(Duration::from_secs(5)).await;
    assert!(!b.provider.is_connected(), "not at the first sign of trouble");
    bots.pass(Duration::from_secs(10)).await;
    connected(&b).await;
    let lost = next_event(&mut events, |event| match event {
        Event::LeaseLost { key, reason } if key == "provider:x" => Some(*reason),
        _ => None,
    });
    assert_eq!(lost.await, LostReason::SteppedDown);
    // It waits a few seconds, then stands by again.
    bots.pass(Duration::from_secs(5)).await;
    let follows = next_event(&mut events, |event| match event {
        Event::Follower { name, reason } if name == "provider:x" => Some(*reason),
        _ => None,
    });
    assert_eq!(follows.await, FollowReason::SteppedDown);

    a.provider.set_up(true);
    b.provider.set_up(false);
    bots.pass(Duration::from_secs(20)).await;
    connected(&a).await;
    let leads = next_event(&mut events, |event| match event {
        Event::Leader { name, fence } if name == "provider:x" => Some(*fence),
        _ => None,
    });
    leads.await;
    a.provider.user("ann").says("hi").await.hears("echo: hi").await;
}

#[tokio::test]
async fn d3_a_standby_is_not_ready_and_sends_nothing() {
    let mut bots = Bots::exclusive();
    let refused: Arc<Mutex<Vec<ReplyError>>> = Arc::default();
    let make = |bot: BotBuilder| {
        let refused = refused.clone();
        bot.on(Route::Any, async move |ctx| {
            if let Err(error) = ctx.reply("an answer").await {
                refused.lock().push(error);
            }
            Ok(())
        })
    };
    let a = bots.start_with(&make, |c| c.durability(Durability::Off)).await;
    connected(&a).await;
    let b = bots.start_with(&make, |c| c.durability(Durability::Off)).await;
    assert!(is_ready(&a).await);
    assert!(!is_ready(&b).await, "pending");

    let message = Message::text("m1", ChatKey::new("x", "ann"), "hello");
    b.bot.link().deliver(vec![message]).await.unwrap();
    until("it is handled", || !refused.lock().is_empty()).await;
    let error = refused.lock()[0].clone();
    assert!(
        matches!(&error, ReplyError::Provider(SendError::ProviderNotLeader { leader })
            if leader.as_deref() == Some("r1")),
        "{error:?}"
    );
    let said = error.to_string();
    assert!(said.contains("r1 does") && said.contains("Bot::ready()"), "{said}");
    assert_eq!(a.provider.user("ann").heard(), []);

    bots.kill(a).await;
    connected(&b).await;
    b.bot.ready().await;
    b.provider.user("ann").says("hello").await.hears("an answer").await;
}

/// An exclusive provider whose link a test gets hold of, also after it lost its lead.
#[derive(Clone, Default)]
struct Stash {
    links: Arc<Mutex<Vec<Link>>>,
}

#[async_trait]
impl Provider for Stash {
    fn id(&self) -> &str {
        "x"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: true, listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        link.connected("x", true);
        self.links.lock().push(link.clone());
        link.closing().await;
        Ok(Closed::Asked)
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        Ok(SentId(delivery.id.clone()))
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}

async fn stashed(hub: &MemoryHub, provider: Stash) -> (Bot, MemoryCoordinator) {
    let prefix = MemoryHub::default_prefix();
    let coordinator = MemoryCoordinator::with(hub, prefix.clone(), CoordinatorOptions::default());
    let bot = Bot::builder()
        .provider(provider)
        .store(hub.store(prefix))
        .coordination(Coordination::new(coordinator.clone()))
        .on(Route::Any, async |_| Ok(()))
        .build()
        .await
        .unwrap();
    bot.start().await.unwrap();
    (bot, coordinator)
}

#[tokio::test]
async fn d6_what_a_deposed_replica_still_receives_is_dropped_and_moves_no_cursor() {
    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    let (one, two) = (Stash::default(), Stash::default());
    let (a, of_a) = stashed(&hub, one.clone()).await;
    until("the first connects", || one.links.lock().len() == 1).await;
    let (b, _) = stashed(&hub, two.clone()).await;
    let message = |id: &str| vec![Message::text(id, ChatKey::new("x", "ann"), "hi")];
    let old = one.links.lock()[0].clone();
    assert_eq!(old.cursor("x").await.unwrap(), None);
    old.deliver_past("x", message("1"), b"one".to_vec()).await.unwrap();
    assert_eq!(old.cursor("x").await.unwrap(), Some(b"one".to_vec()));

    // The group passes its lead on, and its connection lives on.
    of_a.crash();
    for _ in 0..40 {
        clock.advance(Duration::from_millis(500));
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
    }
    until("the second connects", || two.links.lock().len() == 1).await;
    let new = two.links.lock()[0].clone();
    assert_eq!(new.cursor("x").await.unwrap(), Some(b"one".to_vec()), "it goes on there");
    new.deliver_past("x", message("2"), b"two".to_vec()).await.unwrap();
    let late = old.deliver_past("x", message("3"), b"late".to_vec()).await;
    assert!(matches!(late, Err(DeliverError::Deposed)), "{late:?}");
    assert!(matches!(old.deliver(message("4")).await, Err(DeliverError::Deposed)));
    assert_eq!(new.cursor("x").await.unwrap(), Some(b"two".to_vec()));
    let fresh = new.deliver(message("3")).await.unwrap();
    assert!(!fresh[0].duplicate, "nothing of it was taken");
    drop((a, b));
}

#[tokio::test]
async fn d6_journaled_messages_go_to_whoever_leads_the_transport() {
    let mut bots = Bots::exclusive();
    let handled: Arc<Mutex<Vec<(&'static str, String)>>> = Arc::default();
    let gate = Arc::new(tokio::sync::Semaphore::new(0));
    let make = |name: &'static str| {
        let (handled, gate) = (handled.clone(), gate.clone());
        move |bot: BotBuilder| {
            bot.on(Route::Any, async move |ctx| {
                if name == "a" {
                    gate.acquire().await?.forget();
                }
                handled.lock().push((name, ctx.text().to_owned()));
                let said = format!("{name} heard {}", ctx.text());
                Ok(ctx.reply(said).await?)
            })
        }
    };
    let down = Duration::from_secs(10);
    let a = bots.start_with(make("a"), |c| c.provider_down(down)).await;
    connected(&a).await;
    let b = bots.start_with(make("b"), |c| c.provider_down(down)).await;
    let c = bots.start_with(make("c"), |c| c.provider_down(down)).await;
    // Each user says two things: the first is at work at the leader, the second waits.
    let users: Vec<String> = (0..8).map(|n| format!("user{n}")).collect();
    for user in &users {
        a.provider.user(user).says("one").await.says("two").await;
    }
    // It steps down and lives on: what waits is the next leader's, what runs ends where it runs.
    a.provider.set_up(false);
    bots.pass(Duration::from_secs(25)).await;
    connected(&b).await;
    gate.add_permits(users.len());
    for user in &users {
        b.provider.user(user).hears("a heard one").await.hears("b heard two").await;
    }
    assert!(handled.lock().iter().all(|(name, _)| *name != "c"), "{:?}", handled.lock());
    // It dies: what it was at is the next leader's, not just anybody's.
    bots.kill(b).await;
    connected(&c).await;
    c.provider.user("ann").says("three").await.hears("c heard three").await;
    // What is posted anywhere is said where it can be sent.
    a.bot.handle().post(&ChatKey::new("x", "bob"), "hello").await.unwrap();
    c.provider.user("bob").hears("hello").await;
}
