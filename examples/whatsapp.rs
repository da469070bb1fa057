//! A WhatsApp bot by the Cloud API, against a fake of the Graph API: what Meta posts to the webhook,
//! signed, and what the bot sends back. `cargo run --example whatsapp`
//!
//! Messenger and Instagram differ in the constructor: `Meta::messenger`, `Meta::instagram`.

use std::time::Duration;

use botmesh::bot::{Bot, Coordination, Event, Result, Route};
use botmesh::provider::Secret;
use botmesh::provider::meta::Meta;
use botmesh::testing::{CoordinatorOptions, MemoryHub, MemoryStore};
use serde_json::{Value, json};

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/graph_api.rs"]
mod graph_api;

/// What Meta posts.
fn posted(what: &str, item: Value) -> String {
    let value = json!({ "metadata": { "phone_number_id": "1055" }, what: [item] });
    let change = json!({ "field": "messages", "value": value });
    let entry = json!({ "id": "account", "changes": [change] });
    json!({ "object": "whatsapp_business_account", "entry": [entry] }).to_string()
}

#[tokio::main]
async fn main() -> Result {
    let graph = graph_api::GraphApi::start().await;
    let secret = Secret::new("the app's secret");
    let whatsapp = Meta::whatsapp("whatsapp", secret.clone(), Secret::new("the verify token"))
        .account("1055", "an access token")
        .base_url(&graph.url); // leave it out for the real one
    let store = MemoryStore::new(MemoryHub::default_prefix()); // a node's, to be one of several
    let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
    let bot = Bot::builder()
        .provider(whatsapp)
        .store(store)
        .coordination(coordination)
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
        .build()
        .await?;
    let mut events = bot.events();
    bot.start().await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let webhook = format!("http://{}/webhooks/whatsapp", listener.local_addr()?);
    let routes = bot.router();
    let server = tokio::spawn(async move { axum::serve(listener, routes).await });

    let client = reqwest::Client::new();
    let post = async |body: String, signature: String| -> Result<u16> {
        let request = client.post(&webhook).header("x-hub-signature-256", signature).body(body);
        Ok(request.send().await?.status().as_u16())
    };
    println!("ann> hello");
    let text = json!({
        "id": "wamid.1", "from": "491701234567", "timestamp": "1700000000",
        "type": "text", "text": { "body": "hello" },
    });
    let body = posted("messages", text);
    let signature = format!("sha256={}", secret.sign(body.as_bytes()));
    println!("     (a forged one: {})", post(body.clone(), "sha256=00".to_owned()).await?);
    println!("     (taken: {})", post(body, signature).await?);
    while graph.calls().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("bot> {}", graph.texts()[0]);

    let read = json!({
        "id": "wamid.out1", "recipient_id": "491701234567", "status": "read", "timestamp": "1700000009",
    });
    let body = posted("statuses", read);
    let signature = secret.sign(body.as_bytes());
    post(body, signature).await?;
    while let Some(event) = events.next().await {
        if let Event::Receipt { receipt } = event {
            println!("     ({} was {:?})", receipt.sent, receipt.state);
            break;
        }
    }
    bot.stop().await?;
    server.abort();
    Ok(())
}
