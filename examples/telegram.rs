//! A Telegram bot by long polling, on several replicas: one polls, the others stand by.
//!
//! Without arguments: two replicas in one process against a fake of the Bot API; the one that polls
//! stops, and the other goes on from its offset. `cargo run --example telegram`
//!
//! As one of several processes, each with a node of the group:
//! `telegram NAME DIR CLUSTER_ADDRESS SECRET API_URL TOKEN [JOIN_ADDRESS]`

use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Result, Route};
use botmesh::provider::telegram::Telegram;
use botmesh::store::GroupStore;
use botmesh::testing::MemoryHub;

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/bot_api.rs"]
mod bot_api;
#[allow(unreachable_pub, reason = "shared with other examples")]
#[path = "../tests/support/member.rs"]
mod member;

use member::{Member, replica};

/// What it says names the fence of the turn that says it: one message, one turn, one fence.
fn bot(telegram: Telegram) -> BotBuilder {
    Bot::builder().provider(telegram).on(Route::Any, async |ctx| {
        let said = format!("echo: {} under {}", ctx.text(), ctx.fence());
        Ok(ctx.reply(said).await?)
    })
}

/// Two replicas on a hub, one after the other.
async fn show() -> Result {
    let api = bot_api::BotApi::start().await;
    let telegram = || Telegram::new("telegram", bot_api::TOKEN).base_url(&api.url);
    let hub = MemoryHub::new();
    let store = || GroupStore::new(hub.as_group(), MemoryHub::default_prefix());
    let first = replica(bot(telegram()), store()).await?;
    first.start().await?;
    first.ready().await;
    let second = replica(bot(telegram()), store()).await?;
    second.start().await?;
    for (n, text) in ["hello", "are you there", "bye"].into_iter().enumerate() {
        if n == 1 {
            println!("     (the replica that polls stops)");
            first.stop().await?;
        }
        println!("ann> {text}");
        api.says(7, text);
        while api.sent().len() <= n {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        println!("bot> {}", api.sent()[n].text);
    }
    second.stop().await?;
    Ok(())
}

/// One process of several.
async fn member(name: &str, dir: &str, address: &str, rest: &[String]) -> Result {
    let [secret, api, token, join @ ..] = rest else { return Err("too few arguments".into()) };
    let telegram = Telegram::new("telegram", token.as_str()).base_url(api).poll_seconds(2);
    Member { name, dir, address, secret, join }.run(bot(telegram)).await
}

#[tokio::main]
async fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [] => show().await,
        [name, dir, address, rest @ ..] => member(name, dir, address, rest).await,
        _ => Err("telegram NAME DIR CLUSTER_ADDRESS SECRET API_URL TOKEN [JOIN_ADDRESS]".into()),
    }
}
