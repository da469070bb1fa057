//! Chats whose key changes (SPEC B2).

use std::sync::Arc;

use botmesh::bot::{BotBuilder, Event, Route};
use botmesh::cli::demo;
use botmesh::coordinator::LostReason;
use botmesh::store::{RekeyError, Taken};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::support::{Bots, next_event, stored, until};

#[derive(Default, Serialize, Deserialize)]
struct Visits(u32);

fn visits(bot: BotBuilder) -> BotBuilder {
    demo::flows(bot).on("visit", async |ctx| {
        let count = ctx
            .user::<Visits>()
            .update(|visits| {
                visits.0 += 1;
                visits.0
            })
            .await?;
        Ok(ctx.reply(format!("visit {count}")).await?)
    })
}

#[tokio::test]
async fn b2_a_conversation_and_its_user_go_on_under_the_new_key() {
    let mut bots = Bots::new();
    let a = bots.start(visits).await;
    let b = bots.start(visits).await;
    let old = a.provider.user("group");
    old.says("visit").await.hears("visit 1").await;
    old.says("order").await.hears("What would you like?").await;
    let new = b.provider.user("supergroup");
    a.bot.link().rekey(old.chat(), new.chat(), Taken::Refuse).await.unwrap();
    new.says("tea").await.hears("How many?").await;
    // At the replica that had it in memory under the old key, too.
    let at_a = a.provider.user("supergroup");
    at_a.says("3").await.hears("Where to?").await.says("cancel").await.hears("Cancelled.").await;
    new.says("visit").await.hears("visit 2").await;
    // The old key is a chat of which nothing is known.
    old.says("tea").await.hears("echo: tea").await;
    old.says("visit").await.hears("visit 1").await;
}

#[tokio::test]
async fn b2_messages_at_work_and_in_line_come_under_the_new_key_in_their_order() {
    let mut bots = Bots::new();
    let (entered, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let make = |bot: BotBuilder| {
        let (entered, go) = (entered.clone(), go.clone());
        bot.on(Route::Any, async move |ctx| {
            entered.add_permits(1);
            go.acquire().await?.forget();
            let text = format!("did {}", ctx.text());
            Ok(ctx.reply(text).await?)
        })
    };
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    let mut events = a.bot.events();
    let (old, new) = (a.provider.user("old"), b.provider.user("new"));
    old.says("1").await.says("2").await;
    entered.acquire().await.unwrap().forget();
    new.says("3").await;
    entered.acquire().await.unwrap().forget();
    old.says("4").await;
    b.bot.handle().rekey(old.chat(), new.chat(), Taken::Refuse).await.unwrap();
    go.add_permits(100);
    until("all are answered", || new.heard().len() == 4).await;
    assert_eq!(new.heard_texts(), ["did 1", "did 2", "did 3", "did 4"]);
    assert!(old.heard().is_empty(), "what lost its turn says nothing");
    let lost = |event: &Event| match event {
        Event::LeaseLost { key, reason } => Some((key.clone(), *reason)),
        _ => None,
    };
    let expected = (old.chat().to_string(), LostReason::Superseded);
    assert_eq!(next_event(&mut events, lost).await, expected);
}

#[tokio::test]
async fn b2_where_both_keys_have_a_conversation_the_caller_decides() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let (old, new) = (a.provider.user("old"), a.provider.user("new"));
    old.says("order").await.hears("What would you like?").await.says("tea").await;
    old.hears("How many?").await;
    new.says("order").await.hears("What would you like?").await;
    until("both wait", || a.bot.chats_in_memory() == 2).await;
    let handle = a.bot.handle();
    let refused = handle.rekey(old.chat(), new.chat(), Taken::Refuse).await.unwrap_err();
    assert!(matches!(&refused, RekeyError::Taken { key, .. } if *key == new.chat().to_string()));
    assert!(refused.to_string().contains(&new.chat().to_string()), "{refused}");
    old.says("3").await.hears("Where to?").await;
    handle.rekey(old.chat(), new.chat(), Taken::KeepNew).await.unwrap();
    assert!(stored(&a.bot, old.chat()).await.is_none());
    new.says("soup").await.hears("How many?").await;
    old.says("hi").await.hears("echo: hi").await;

    let room = botmesh::types::ChatKey::new("x", "room").participant("ann");
    let other = botmesh::types::ChatKey::new("y", "new");
    for key in [&room, &other] {
        let refused = handle.rekey(old.chat(), key, Taken::Refuse).await.unwrap_err();
        assert!(matches!(refused, RekeyError::Keys { .. }), "{refused}");
    }
}
