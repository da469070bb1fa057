//! Discord's gateway: who listens, from where on, and what becomes of a session.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Route};
use botmesh::clock::{Clock, ManualClock};
use botmesh::coordinator::LostReason;
use botmesh::provider::discord::{Discord, intents};
use botmesh::provider::{
    Capabilities, Closed, Delivery, Link, Provider, ProviderError, SendError, SentId, Webhook,
};
use botmesh::testing::{CoordinatorOptions, MemoryCoordinator, MemoryHub};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Notify;
use twilight_gateway::{
    ConfigBuilder, Event as Heard, EventTypeFlags, Intents, Session, Shard, ShardId, StreamExt,
};

use super::discord_api::{Budget, DiscordApi, TOKEN, channel, message};
use super::support::{PAST_LEASE, PATIENCE, next_event, until};

pub(super) struct Replica {
    pub(super) bot: Bot,
    pub(super) coordinator: MemoryCoordinator,
}

pub(super) fn discord(api: &DiscordApi) -> Discord {
    Discord::new("dc", TOKEN).base_url(&api.url).identify_every(Duration::ZERO)
}

pub(super) async fn start(
    hub: &MemoryHub,
    provider: impl Provider,
    make: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Replica {
    let prefix = MemoryHub::default_prefix();
    let coordinator = MemoryCoordinator::with(hub, prefix.clone(), CoordinatorOptions::default());
    let bot = make(Bot::builder()).provider(provider).store(hub.store(prefix));
    let bot = bot.coordination(Coordination::new(coordinator.clone())).build().await.unwrap();
    bot.start().await.unwrap();
    Replica { bot, coordinator }
}

pub(super) fn echo(bot: BotBuilder) -> BotBuilder {
    bot.on(Route::Any, async |ctx| {
        let said = format!("echo: {}", ctx.text());
        Ok(ctx.reply(said).await?)
    })
}

/// Waits until something holds while the clock of the bots runs, faster than any other.
pub(super) async fn passing(clock: &ManualClock, what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            clock.advance(Duration::from_millis(50));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}: not within {PATIENCE:?}");
}

/// Somebody listens, and is let in.
pub(super) async fn listens(api: &DiscordApi) {
    until("somebody listens", || api.connections().0 == 1).await;
}

/// A replica dies, and what it had connected with it.
pub(super) async fn kill(api: &DiscordApi, clock: &ManualClock, replica: &Replica) {
    replica.coordinator.crash();
    until("it is gone", || api.connections().1 == 0).await;
    past_lease(clock).await;
}

/// Lets the lease of whoever died run out.
async fn past_lease(clock: &ManualClock) {
    for _ in 0..PAST_LEASE.as_millis() / 500 {
        clock.advance(Duration::from_millis(500));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn hears(shard: &mut Shard, wanted: impl Fn(&Heard) -> bool) -> Heard {
    let heard = async {
        loop {
            match shard.next_event(EventTypeFlags::all()).await {
                Some(Ok(event)) if wanted(&event) => return event,
                Some(Ok(_)) => {}
                other => panic!("instead it heard {other:?}"),
            }
        }
    };
    tokio::time::timeout(PATIENCE, heard).await.expect("it hears it")
}

#[tokio::test]
async fn d4_an_independent_client_listens_to_the_fake_discord() {
    let api = DiscordApi::start().await;
    api.heartbeat_every(500);
    let wanted = Intents::DIRECT_MESSAGES | Intents::MESSAGE_CONTENT;
    let config = || ConfigBuilder::new(TOKEN.to_owned(), wanted).proxy_url(api.gateway.clone());
    let mut shard = Shard::with_config(ShardId::ONE, config().build());
    hears(&mut shard, |event| matches!(event, Heard::Ready(_))).await;
    api.says(7, "hello");
    let said = |text: &'static str| move |event: &Heard| matches!(event, Heard::MessageCreate(m) if m.content == text);
    hears(&mut shard, said("hello")).await;
    while !api.heartbeats().contains(&Some(2)) {
        hears(&mut shard, |event| matches!(event, Heard::GatewayHeartbeatAck)).await;
    }
    api.asks(7, 2, &json!({ "id": "5", "name": "order", "type": 1 }));
    hears(&mut shard, |event| matches!(event, Heard::InteractionCreate(_))).await;

    // Another process resumes what this one leaves, and hears what was said between.
    let session: Session = shard.session().unwrap().clone();
    let url = shard.resume_url().unwrap().to_owned();
    assert_eq!((session.sequence(), &url), (3, &api.gateway));
    drop(shard);
    until("it is gone", || api.connections().1 == 0).await;
    api.says(7, "missed");
    let resuming = config().session(session).resume_url(url).build();
    let mut shard = Shard::with_config(ShardId::ONE, resuming);
    hears(&mut shard, said("missed")).await;
    hears(&mut shard, |event| matches!(event, Heard::Resumed)).await;
    assert_eq!((api.identified().len(), api.resumed()), (1, vec![3]));
    api.to_all(&Ok(json!({ "op": 7, "d": null })));
    hears(&mut shard, |event| matches!(event, Heard::GatewayReconnect)).await;
    hears(&mut shard, |event| matches!(event, Heard::Resumed)).await;
    api.refuse_next(Ok(false));
    api.to_all(&Err(4_000));
    hears(&mut shard, |event| matches!(event, Heard::GatewayInvalidateSession(false))).await;

    // What it may not have ends it.
    api.deny_content();
    let mut shard = Shard::with_config(ShardId::ONE, config().build());
    let closed = hears(&mut shard, |event| matches!(event, Heard::GatewayClose(Some(_)))).await;
    assert!(matches!(closed, Heard::GatewayClose(Some(frame)) if frame.code == 4_014));
}

#[tokio::test]
async fn d5_another_replica_resumes_the_session_wherever_the_first_was_killed() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
    let (at_work, gate) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let turns: Arc<Mutex<Vec<String>>> = Arc::default();
    let slow = |bot: BotBuilder| {
        let (at_work, gate, turns) = (at_work.clone(), gate.clone(), turns.clone());
        bot.on(Route::Any, async move |ctx| {
            turns.lock().push(ctx.text().to_owned());
            if ctx.text() == "slow" {
                at_work.notify_one();
                gate.notified().await;
            }
            let said = format!("echo: {}", ctx.text());
            Ok(ctx.reply(said).await?)
        })
    };
    let a = start(&hub, discord(&api), slow).await;
    listens(&api).await;
    let b = start(&hub, discord(&api), slow).await;
    // Between commit and reply.
    api.says(1, "slow");
    tokio::time::timeout(PATIENCE, at_work.notified()).await.expect("it is at work");
    kill(&api, &clock, &a).await;
    // While nobody listens.
    api.says(2, "missed");
    passing(&clock, "the other answers", || {
        gate.notify_waiters();
        api.sent().len() == 2
    })
    .await;
    assert_eq!(api.sent_to(&channel(1)), ["echo: slow"]);
    assert_eq!(api.sent_to(&channel(2)), ["echo: missed"]);
    assert_eq!(*turns.lock(), ["slow", "slow", "missed"], "one was cut, none came twice");
    assert_eq!((api.identified().len(), api.resumed()), (1, vec![2]));
    drop((a, b));
}

#[tokio::test]
async fn case_w14_fifty_leader_changes_are_one_identify_and_fifty_resumes() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
    // What a turn says names its fence: two turns of one message would say two things.
    let fenced = |bot: BotBuilder| {
        bot.on(Route::Any, async |ctx| {
            let said = format!("{} {}", ctx.text(), ctx.fence());
            Ok(ctx.reply(said).await?)
        })
    };
    let mut said = 0;
    let mut says = || {
        api.says(7, &said.to_string());
        said += 1;
        said
    };
    let mut leader = start(&hub, discord(&api), fenced).await;
    listens(&api).await;
    for change in 0..50 {
        let next = start(&hub, discord(&api), fenced).await;
        for _ in 0..3 {
            says();
        }
        // Every other one dies in the middle of it, the others stop.
        match change % 2 {
            0 => leader.bot.stop().await.unwrap(),
            _ => kill(&api, &clock, &leader).await,
        }
        says();
        passing(&clock, "the next resumes", || api.resumed().len() == change + 1).await;
        leader = next;
    }
    let all = says();
    let last = format!("{} ", all - 1);
    passing(&clock, "the last one is answered", || {
        api.sent_to(&channel(7)).last().is_some_and(|text| text.starts_with(&last))
    })
    .await;
    // A reply that was in the air comes again under its nonce, and is made once.
    let numbers: Vec<i32> = api
        .sent_to(&channel(7))
        .iter()
        .map(|text| text.split(' ').next().unwrap().parse().unwrap())
        .collect();
    assert_eq!(numbers, (0..all).collect::<Vec<i32>>(), "in order, each in one turn");
    assert_eq!((api.identified().len(), api.resumed().len()), (1, 50));
    assert!(api.resumed().is_sorted(), "none started over: {:?}", api.resumed());
    assert_eq!(api.asked_for_gateway(), 1, "only whoever identifies asks");
}

#[tokio::test]
async fn case_w14_an_identify_waits_until_there_is_one_left() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let none = Budget { total: 1_000, remaining: 0, reset_after_ms: 50 };
    api.set_budget(none);
    let a = start(&hub, discord(&api), echo).await;
    until("it asks again and again", || api.asked_for_gateway() >= 3).await;
    assert_eq!((api.identified().len(), api.connections()), (0, (0, 0)));
    api.set_budget(Budget { remaining: 1_000, ..none });
    listens(&api).await;
    assert_eq!(api.identified().len(), 1);

    // Few are left: they are spread over the time until there are more, from the last one on.
    api.set_budget(Budget { total: 1_000, remaining: 2, reset_after_ms: 4_000 });
    api.forget_sessions();
    api.to_all(&Err(4_000));
    until("it identifies anew", || api.identified().len() == 2).await;
    let pause = api.identified()[1] - api.identified()[0];
    assert!(pause >= Duration::from_secs(1), "{pause:?}");
    drop(a);
}

/// A process that is frozen while its connection is not: what it had begun runs on, whoever leads.
struct Frozen(Discord);

#[async_trait]
impl Provider for Frozen {
    fn id(&self) -> &str {
        self.0.id()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        let inner = self.0.clone();
        let run = tokio::spawn(async move { inner.run(link).await });
        run.await.expect("it does not panic")
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        self.0.send(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}

#[tokio::test]
async fn case_w15_what_the_socket_of_a_frozen_leader_still_hears_is_dropped() {
    let clock = ManualClock::new();
    let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
    // The first heartbeat, at a random instant within this, would tell the old one that it is.
    api.heartbeat_every(600_000);
    let turns: Arc<Mutex<Vec<String>>> = Arc::default();
    let noting = |bot: BotBuilder| {
        let turns = turns.clone();
        bot.on(Route::Any, async move |ctx| {
            turns.lock().push(ctx.text().to_owned());
            Ok(ctx.reply("heard").await?)
        })
    };
    let a = start(&hub, Frozen(discord(&api)), noting).await;
    listens(&api).await;
    let b = start(&hub, discord(&api), noting).await;
    api.says(7, "one");
    until("it is answered", || api.sent().len() == 1).await;
    // The group passes the lead on; Discord lets the old connection live.
    api.keep_old();
    a.coordinator.crash();
    past_lease(&clock).await;
    passing(&clock, "the next resumes", || api.resumed().len() == 1).await;
    assert_eq!(api.connections().0, 1, "and the old one is connected, but has the session no more");
    let late = message("1", &channel(7), "7", "late");
    api.tell_old(900, "MESSAGE_CREATE", &late);
    api.says(7, "two");
    passing(&clock, "the new leader answers", || api.sent().len() == 2).await;
    until("the old one notices", || api.connections() == (1, 1)).await;

    // It moved nothing: whoever is next goes on after "two", and the late one was never taken.
    let c = start(&hub, discord(&api), noting).await;
    let last = api.last();
    b.bot.stop().await.unwrap();
    api.says(7, "three");
    passing(&clock, "the third answers", || api.sent().len() == 3).await;
    assert!(api.resumed().iter().all(|seq| *seq <= last), "{:?} of {last}", api.resumed());
    assert_eq!(*turns.lock(), ["one", "two", "three"]);
    assert_eq!(api.identified().len(), 1);
    drop((a, c));
}

#[tokio::test]
async fn d4_a_connection_that_ends_is_resumed_and_a_session_that_ends_is_told_of() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let a = start(&hub, discord(&api), echo).await;
    listens(&api).await;
    let mut events = a.bot.events();
    // Each of these ends the connection and not the session.
    let ends: [Result<Value, u16>; 4] = [
        Ok(json!({ "op": 7, "d": null })),
        Ok(json!({ "op": 9, "d": true })),
        Err(4_000),
        Err(1_001),
    ];
    for (n, end) in ends.iter().enumerate() {
        api.to_all(end);
        let text = format!("before {n}");
        api.says(7, &text);
        until("it resumes", || api.resumed().len() == n + 1).await;
        let answer = format!("echo: {text}");
        until("and answers", || api.sent_to(&channel(7)).last() == Some(&answer)).await;
    }
    assert_eq!(api.identified().len(), 1);

    // The session is forgotten: another one, and whoever runs the bot hears of it.
    api.forget_sessions();
    api.to_all(&Err(4_000));
    let told = next_event(&mut events, |event| match event {
        Event::Error { error, .. } if error.to_string().contains("session is over") => Some(()),
        _ => None,
    });
    told.await;
    until("it identifies anew", || api.identified().len() == 2).await;
    listens(&api).await;
    api.says(8, "after");
    until("it answers", || api.sent_to(&channel(8)) == ["echo: after"]).await;
}

#[tokio::test]
async fn d4_a_connection_whose_heartbeats_are_not_answered_is_left_and_resumed() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    api.heartbeat_every(100);
    let _a = start(&hub, discord(&api), echo).await;
    listens(&api).await;
    api.deaf(true);
    until("it resumes", || !api.resumed().is_empty()).await;
    api.deaf(false);
    api.says(7, "still there?");
    until("it answers", || api.sent_to(&channel(7)) == ["echo: still there?"]).await;
    assert_eq!(api.identified().len(), 1);
}

#[tokio::test]
async fn d5_a_heartbeat_acknowledges_what_is_stored_and_nothing_else() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    api.heartbeat_every(100);
    let a = start(&hub, discord(&api), |bot| bot.on(Route::Any, async |_| Ok(()))).await;
    listens(&api).await;
    // What is nothing to journal is stored with the next heartbeat, and acknowledged after that.
    for _ in 0..3 {
        api.dispatch("TYPING_START", &json!({}));
    }
    let last = api.last();
    until("all is acknowledged", || api.heartbeats().last() >= Some(&Some(last))).await;
    assert!(api.heartbeats().iter().flatten().is_sorted(), "{:?}", api.heartbeats());
    // The next replica begins after it.
    a.bot.stop().await.unwrap();
    let _b = start(&hub, discord(&api), echo).await;
    until("it resumes", || api.resumed().last() >= Some(&last)).await;
}

#[tokio::test]
async fn d2_what_discord_refuses_is_told_apart_and_not_asked_for_in_a_loop() {
    for (code, wanted) in [(4_014, "MESSAGE_CONTENT"), (4_013, "intents"), (4_004, "link it again")]
    {
        let clock = ManualClock::new();
        let (hub, api) = (MemoryHub::with_clock(clock.clone()), DiscordApi::start().await);
        for _ in 0..8 {
            api.refuse_next(Err(code));
        }
        let a = start(&hub, discord(&api), echo).await;
        let mut events = a.bot.events();
        let told = next_event(&mut events, |event| match event {
            Event::Error { error, .. } => Some(error.to_string()),
            _ => None,
        });
        let told = told.await;
        assert!(told.contains(wanted), "{told}");
        let down = next_event(&mut events, |event| match event {
            Event::LeaseLost { key, reason } if key == "provider:dc" => Some(*reason),
            _ => None,
        });
        assert_eq!(down.await, LostReason::SteppedDown);
        // On a clock that stands still nothing is tried again; after that, ever more seldom.
        assert_eq!(api.identified().len(), 1, "{code}");
        let began = clock.wall_ms();
        passing(&clock, "it tries again", || api.identified().len() == 3).await;
        assert!(clock.wall_ms() - began >= 18_000, "6 s and 12 s");
    }
}

#[tokio::test]
async fn d4_other_intents_begin_another_session() {
    let (hub, api) = (MemoryHub::new(), DiscordApi::start().await);
    let a = start(&hub, discord(&api), echo).await;
    listens(&api).await;
    a.bot.stop().await.unwrap();
    let b = start(&hub, discord(&api).intents(intents::DIRECT_MESSAGES), echo).await;
    until("it identifies", || api.identified().len() == 2).await;
    b.bot.stop().await.unwrap();
    assert_eq!(api.resumed(), [0_u64; 0]);
}
