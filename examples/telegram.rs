//! A Telegram bot by long polling, on several replicas: one polls, the others stand by.
//!
//! Without arguments: two replicas in one process against a fake of the Bot API; the one that polls
//! stops, and the other goes on from its offset. `cargo run --example telegram`
//!
//! As one of several processes, each with a node of the group:
//! `telegram NAME DIR CLUSTER_ADDRESS SECRET API_URL TOKEN [JOIN_ADDRESS]`

use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Result, Route};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::provider::telegram::Telegram;
use botmesh::raft::{Node, NodeOptions, Role, Secret, Start};
use botmesh::store::GroupStore;
use botmesh::testing::MemoryHub;
use botmesh::types::Prefix;
use tokio::net::TcpListener;

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/bot_api.rs"]
mod bot_api;

/// What it says names the fence of the turn that says it: one message, one turn, one fence.
fn bot(telegram: Telegram) -> BotBuilder {
    Bot::builder().provider(telegram).on(Route::Any, async |ctx| {
        let said = format!("echo: {} under {}", ctx.text(), ctx.fence());
        Ok(ctx.reply(said).await?)
    })
}

async fn replica(telegram: Telegram, store: GroupStore) -> Result<Bot> {
    let lease = CoordinatorOptions { lease: Duration::from_secs(1), ..Default::default() };
    let coordination = Coordination::new(store.coordinator(lease));
    Ok(bot(telegram).store(store).coordination(coordination).build().await?)
}

/// Two replicas on a hub, one after the other.
async fn show() -> Result {
    let api = bot_api::BotApi::start().await;
    let telegram = || Telegram::new("telegram", bot_api::TOKEN).base_url(&api.url);
    let hub = MemoryHub::new();
    let store = || GroupStore::new(hub.as_group(), MemoryHub::default_prefix());
    let first = replica(telegram(), store()).await?;
    first.start().await?;
    first.ready().await;
    let second = replica(telegram(), store()).await?;
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
    let start = match join {
        [] => Start::Bootstrap,
        join => Start::Join(join.to_vec()),
    };
    let listener = TcpListener::bind(address).await?;
    let options = NodeOptions::new(name, dir, address.to_owned(), Secret::new(secret)?);
    let node = Node::open(NodeOptions { start, ..options }).await?;
    let peers = node.router();
    let peers = tokio::spawn(async move { axum::serve(listener, peers).await });
    node.joined(Duration::from_secs(30)).await?;
    let whole = node.clone();
    tokio::spawn(async move {
        // Three voters: any one of them may go.
        while whole.status().nodes.iter().filter(|n| n.role != Role::Learner).count() < 3 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        println!("complete");
    });
    let telegram = Telegram::new("telegram", token.as_str()).base_url(api).poll_seconds(2);
    let bot = replica(telegram, GroupStore::new(node.as_group(), Prefix::new("telegram")?)).await?;
    let mut events = bot.events();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            match event {
                Event::Leader { .. } => println!("leads"),
                Event::Follower { .. } => println!("stands by"),
                _ => {}
            }
        }
    });
    let mut end = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let ended = async move {
        end.recv().await;
    };
    bot.run_until(ended).await?;
    node.shutdown().await;
    peers.abort();
    Ok(())
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
