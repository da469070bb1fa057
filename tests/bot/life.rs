//! Starting and stopping, alone and among others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use botmesh::bot::{Bot, BotBuilder, BotError, Route};
use botmesh::cli::demo;
use botmesh::provider::DeliverError;
use botmesh::testing::ScriptedProvider;
use botmesh::types::{ChatKey, Message};
use tokio::sync::Semaphore;

use super::support::{Bots, until};

#[tokio::test]
async fn a1_without_coordination_a_bot_is_one_process_in_memory() {
    let provider = ScriptedProvider::new("x");
    let bot = demo::flows(Bot::builder()).provider(provider.clone()).build().await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn({
        let bot = bot.clone();
        async move {
            bot.run_until(async {
                let _ = stopped.await;
            })
            .await
        }
    });
    // A queue per chat, first in first out; chats beside each other.
    let (ann, bob) = (provider.user("ann"), provider.user("bob"));
    ann.says("order").await.says("tea").await.says("3").await;
    bob.says("hi").await.hears("echo: hi").await;
    ann.hears("What would you like?").await.hears("How many?").await.hears("Where to?").await;
    stop.send(()).unwrap();
    running.await.unwrap().unwrap();
    assert!(matches!(bot.start().await, Err(BotError::Started)));
}

#[tokio::test]
async fn a7_a_stop_lets_what_runs_end_and_others_carry_on_at_once() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let entered = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let (gate, entered) = (gate.clone(), entered.clone());
        demo::flows(bot).on("work", async move |ctx| {
            entered.fetch_add(1, Ordering::SeqCst);
            gate.acquire().await?.forget();
            ctx.reply("worked").await?;
            Ok(())
        })
    };
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    let (ann, bob) = (a.provider.user("ann"), a.provider.user("bob"));
    ann.says("order").await.hears("What would you like?").await;
    bob.says("work").await;
    until("the work runs", || entered.load(Ordering::SeqCst) == 1).await;
    let link = a.bot.link();
    let stopping = tokio::spawn({
        let bot = a.bot.clone();
        async move { bot.stop().await }
    });
    // Intake ends at once, with an answer that sends the message elsewhere.
    let message = Message::text("late", ChatKey::new("x", "ann"), "late");
    let refused = async {
        loop {
            let message = vec![message.clone()];
            match link.deliver(message).await {
                Err(DeliverError::Unavailable { .. }) => return,
                Ok(_) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    };
    tokio::time::timeout(super::support::PATIENCE, refused).await.expect("intake ends");
    gate.add_permits(1);
    bob.hears("worked").await;
    stopping.await.unwrap().unwrap();
    // The clock stands still: no lease has run out, and the conversation is b's.
    b.provider.user("ann").says("tea").await;
    until("the next question comes", || ann.heard_texts().contains(&"How many?".to_owned())).await;
}

#[tokio::test]
async fn a1_a_closure_may_own_what_it_captured() {
    let provider = ScriptedProvider::new("x");
    let greeting = String::from("hello, ");
    let bot = Bot::builder()
        .provider(provider.clone())
        .command("greet", async move |ctx| {
            let text = greeting + ctx.args();
            ctx.reply(text).await?;
            Ok(())
        })
        .on(Route::Any, async |_| Ok(()))
        .build()
        .await
        .unwrap();
    bot.start().await.unwrap();
    let ann = provider.user("ann");
    ann.says("/greet you").await.hears("hello, you").await;
    ann.says("/greet  all of you").await.hears("hello, all of you").await;
    bot.stop().await.unwrap();
}
