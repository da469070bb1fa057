//! A bot inside an axum application that has routes of its own: the bot's webhook nests below
//! `/bot`, and no port is bound but the application's.
//!
//! `cargo run --example mount_in_axum`

use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use botmesh::bot::{Bot, Result, Route};
use botmesh::provider::webhook::WebhookProvider;
use serde_json::{Value, json};

/// What the application's own routes share.
#[derive(Clone)]
struct App {
    name: &'static str,
}

async fn serve() -> Result<SocketAddr> {
    let bot = Bot::builder()
        .provider(WebhookProvider::new("shop"))
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
        .build()
        .await?;
    bot.start().await?;
    let app = Router::new()
        .route("/", get(async |State(app): State<App>| format!("this is {}", app.name)))
        .nest("/bot", bot.router())
        .with_state(App { name: "the shop" });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

#[tokio::main]
async fn main() -> Result {
    let base = format!("http://{}", serve().await?);
    println!("GET  /                      {}", reqwest::get(&base).await?.text().await?);

    let message = json!({ "id": "m1", "chat": "ann", "text": "hello" });
    let client = reqwest::Client::new();
    let answer = client.post(format!("{base}/bot/webhooks/shop")).json(&message).send().await?;
    println!("POST /bot/webhooks/shop     {}", answer.text().await?);

    let replies = format!("{base}/bot/webhooks/shop/replies?chat=ann");
    loop {
        let list: Vec<Value> = client.get(&replies).send().await?.json().await?;
        if let Some(reply) = list.first() {
            println!("GET  /bot/webhooks/shop/replies  {}", reply["text"]);
            return Ok(());
        }
        tokio::task::yield_now().await;
    }
}
