//! A Discord bot on two replicas: one listens at the gateway, the other stands by and resumes its
//! session. Both talk to a fake of Discord in this process. `cargo run --example discord`
//!
//! As one of several processes, each with a node of the group:
//! `discord NAME DIR CLUSTER_ADDRESS SECRET API_URL TOKEN [JOIN_ADDRESS]`

use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Result, Route};
use botmesh::provider::discord::Discord;
use botmesh::store::GroupStore;
use botmesh::testing::MemoryHub;

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/discord_api.rs"]
mod discord_api;
#[allow(unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/discord_rest.rs"]
mod discord_rest;
#[allow(unreachable_pub, reason = "shared with other examples")]
#[path = "../tests/support/member.rs"]
mod member;

use discord_api::{DiscordApi, TOKEN, channel};
use member::Member;

/// It takes `/order` and repeats the rest, naming the fence of the turn: one message, one turn, one fence.
fn bot(discord: Discord) -> BotBuilder {
    Bot::builder()
        .provider(discord)
        .on(Route::command("order"), async |ctx| Ok(ctx.reply("Ordered.").await?))
        .on(Route::Any, async |ctx| {
            let said = format!("echo: {} under {}", ctx.text(), ctx.fence());
            Ok(ctx.reply(said).await?)
        })
}

async fn replica(api: &DiscordApi, hub: &MemoryHub) -> Result<Bot> {
    let store = GroupStore::new(hub.as_group(), MemoryHub::default_prefix());
    let bot =
        member::replica(bot(Discord::new("discord", TOKEN).base_url(&api.url)), store).await?;
    bot.start().await?;
    Ok(bot)
}

async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Two replicas on a hub, one after the other.
async fn show() -> Result {
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

/// One process of several.
async fn member(name: &str, dir: &str, address: &str, rest: &[String]) -> Result {
    let [secret, api, token, join @ ..] = rest else { return Err("too few arguments".into()) };
    let discord = Discord::new("discord", token.as_str()).base_url(api);
    Member { name, dir, address, secret, join }.run(bot(discord)).await
}

#[tokio::main]
async fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [] => show().await,
        [name, dir, address, rest @ ..] => member(name, dir, address, rest).await,
        _ => Err("discord NAME DIR CLUSTER_ADDRESS SECRET API_URL TOKEN [JOIN_ADDRESS]".into()),
    }
}
