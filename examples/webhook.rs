//! A bot that another program talks to by webhooks: signed, in that program's own JSON, and with the
//! replies posted back. `cargo run --example webhook`

use std::time::Duration;

use axum::Json;
use axum::routing::post;
use botmesh::bot::{Bot, Result, Route};
use botmesh::provider::Secret;
use botmesh::provider::webhook::{Mapping, WebhookProvider};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

#[tokio::main]
async fn main() -> Result {
    // The other program: it takes replies.
    let (replied, mut replies) = mpsc::channel::<Value>(16);
    let take = post(async move |Json(reply): Json<Value>| drop(replied.send(reply).await));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let reply_url = format!("http://{}/replies", listener.local_addr()?);
    let other = axum::serve(listener, axum::Router::new().route("/replies", take));
    let other = tokio::spawn(async move { other.await });

    // The bot. Several events come in one request; those that are no messages are counted and left.
    let secret = Secret::new("what both know");
    let mapping = Mapping::new("$.id", "$.room.id", "$.body.text")?
        .each("$.events")?
        .participant("$.from")?
        .only("$.type", "message")?;
    let desk = WebhookProvider::new("desk")
        .signed(secret.clone(), "x-desk-signature")
        .mapping(mapping)
        .reply_url(&reply_url)?;
    let bot = Bot::builder()
        .provider(desk)
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
        .build()
        .await?;
    bot.start().await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let webhook = format!("http://{}/webhooks/desk", listener.local_addr()?);
    let routes = bot.router();
    let server = tokio::spawn(async move { axum::serve(listener, routes).await });

    // What the other program posts: the second event is the first one again.
    let hello = json!({
        "id": 1, "type": "message", "room": { "id": "lobby" }, "from": "ann",
        "body": { "text": "hello" },
    });
    let joined = json!({ "id": 2, "type": "joined", "room": { "id": "lobby" }, "from": "ann" });
    let body = json!({ "events": [hello, hello, joined] }).to_string();
    let client = reqwest::Client::new();
    for signature in ["forged".to_owned(), secret.sign(body.as_bytes())] {
        let request = client.post(&webhook).header("x-desk-signature", signature);
        let answer = request.body(body.clone()).send().await?;
        println!("POST  {}  {}", answer.status().as_u16(), answer.text().await?);
    }
    let reply = tokio::time::timeout(Duration::from_secs(20), replies.recv()).await?;
    let reply = reply.unwrap_or_default();
    println!("reply {} to {}: {}", reply["chat"], reply["in_reply_to"], reply["text"]);
    bot.stop().await?;
    server.abort();
    other.abort();
    Ok(())
}
