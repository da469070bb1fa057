//! A Discord bot on two replicas: one listens at the gateway, the other stands by and resumes its
//! session. Both talk to a fake of Discord in this process. `cargo run --example discord`

use std::time::Duration;

use botmesh::bot::{Bot, Coordination, Result, Route};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::provider::discord::Discord;
use botmesh::store::GroupStore;
use botmesh::testing::MemoryHub;

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/discord_api.rs"]
mod discord_api;
#[allow(unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/discord_rest.rs"]
mod discord_rest;

use discord_api::{DiscordApi, TOKEN, channel};

/// A replica of the bot: it takes `/order` and repeats the rest.
async fn replica(api: &DiscordApi, hub: &MemoryHub) -> Result<Bot> {
    let store = GroupStore::new(hub.as_group(), MemoryHub::default_prefix());
    let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
    let bot = Bot::builder()
        .provider(Discord::new("discord", TOKEN).base_url(&api.url))
        .store(store)
        .coordination(coordination)
        .on(Route::command("order"), async |ctx| Ok(ctx.reply("Ordered.").await?))
        .on(Route::Any, async |ctx| {
            let said = format!("echo: {}", ctx.text());
            Ok(ctx.reply(said).await?)
        })
        .build()
        .await?;
    bot.start().await?;
    Ok(bot)
}

async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::main]
async fn main() -> Result {
    let api = DiscordApi::start().await;
    let hub = MemoryHub::new();
    let first = replica(&api, &hub).await?;
    first.ready().await;
    let second = replica(&api, &hub).await?;
    for (n, text) in ["hello", "are you there", "bye"].into_iter().enumerate() {
        if n == 1 {
            println!("     (the replica that listens stops)");
            first.stop().await?;
        }
        println!("ann> {text}");
        api.says(7, text);
        until(|| api.sent().len() > n).await;
        println!("bot> {}", api.sent_to(&channel(7))[n]);
    }
    println!("ann> /order");
    let asked = api.asks(7, 2, &serde_json::json!({ "id": "5", "name": "order" }));
    until(|| !api.interaction(&asked).answers.is_empty()).await;
    println!("bot> {}", api.interaction(&asked).answers[0]);
    println!("     ({} identify, {} resume)", api.identified().len(), api.resumed().len());
    second.stop().await?;
    Ok(())
}
