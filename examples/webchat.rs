//! A chat page of one's own: what the page in the browser does, done by hand. It posts a message, and
//! its stream goes on after the last reply it showed, at whichever node.
//!
//! `cargo run --example webchat`; with `-- --stay` it goes on until Ctrl-C, to be looked at in a
//! browser.

use std::time::Duration;

use botmesh::bot::{Bot, Coordination, Result, Route};
use botmesh::provider::webchat::{CHANNEL, Webchat};
use botmesh::testing::{CoordinatorOptions, MemoryHub, MemoryStore};
use futures_util::{Stream, StreamExt};
use serde_json::json;
use tokio::net::TcpListener;

/// The next reply of a stream: its number, and its text.
async fn reply(
    stream: &mut (impl Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin),
) -> Result<(String, String)> {
    let mut read = String::new();
    loop {
        let chunk = tokio::time::timeout(Duration::from_secs(20), stream.next()).await?;
        read.push_str(&String::from_utf8_lossy(&chunk.ok_or("the stream ended")??));
        while let Some((event, rest)) = read.split_once("\n\n") {
            let field = |name| event.lines().find_map(|line| line.strip_prefix(name));
            let data = field("data:").and_then(|data| serde_json::from_str(data).ok());
            let data: serde_json::Value = data.unwrap_or_default();
            if let (Some(id), Some(text)) = (field("id:"), data["text"].as_str()) {
                return Ok((id.trim().to_owned(), text.to_owned()));
            }
            read = rest.to_owned();
        }
    }
}

#[tokio::main]
async fn main() -> Result {
    let store = MemoryStore::new(MemoryHub::default_prefix()); // a node's, to be one of several
    let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
    let bot = Bot::builder()
        .provider(Webchat)
        .store(store)
        .coordination(coordination)
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
        .build()
        .await?;
    bot.start().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let base = format!("http://{}", listener.local_addr()?);
    let routes = bot.router(); // the page is among them
    let server = tokio::spawn(async move { axum::serve(listener, routes).await });
    println!("the page is at {base}/chat");

    let client = reqwest::Client::new();
    let mut last = "0".to_owned();
    for (id, text) in [("1", "hello"), ("2", "still there?")] {
        println!("you> {text}");
        let message = json!({ "id": id, "chat": "ann", "text": text });
        client.post(format!("{base}/webhooks/{CHANNEL}")).json(&message).send().await?;
        // A new connection each time, as after a node's death.
        let events = format!("{base}/webchat/events?chat=ann&after={last}");
        let mut stream = client.get(events).send().await?.bytes_stream();
        let (number, said) = reply(&mut stream).await?;
        println!("bot> {said}   (number {number})");
        last = number;
    }
    if std::env::args().any(|argument| argument == "--stay") {
        tokio::signal::ctrl_c().await?;
    }
    bot.stop().await?;
    server.abort();
    Ok(())
}
