//! Transports of which only one replica may be connected (SPEC D1 to D3).

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{BotBuilder, Durability, Event, FollowReason, ReplyError, Route};
use botmesh::cli::demo;
use botmesh::coordinator::LostReason;
use botmesh::provider::SendError;
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
