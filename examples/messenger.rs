//! A Messenger page and an Instagram account in one bot, against a fake of the Graph API: two
//! providers, one set of handlers. `cargo run --example messenger`

use std::time::Duration;

use botmesh::bot::{Bot, Result, Route};
use botmesh::provider::Secret;
use botmesh::provider::meta::Meta;
use serde_json::{Value, json};

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/graph_api.rs"]
mod graph_api;

/// What Meta posts: an event between a user and an account.
fn posted(object: &str, account: &str, user: &str, what: Value) -> String {
    let mut event = json!({
        "sender": { "id": user }, "recipient": { "id": account }, "timestamp": 1_700_000_000_000_u64,
    });
    for (name, value) in what.as_object().into_iter().flatten() {
        event[name] = value.clone();
    }
    json!({ "object": object, "entry": [{ "id": account, "messaging": [event] }] }).to_string()
}

#[tokio::main]
async fn main() -> Result {
    let graph = graph_api::GraphApi::start().await;
    let (secret, verify) = (Secret::new("the app's secret"), Secret::new("the verify token"));
    let messenger = Meta::messenger("messenger", secret.clone(), verify.clone())
        .account("page-1", "the page's token")
        .base_url(&graph.url); // leave it out for the real one
    let instagram = Meta::instagram("instagram", secret.clone(), verify)
        .account("ig-1", "the account's token")
        .base_url(&graph.url);
    let bot = Bot::builder()
        .provider(messenger)
        .provider(instagram)
        .on(Route::Any, async |ctx| {
            let (channel, text) = (ctx.chat().channel.clone(), ctx.text().to_owned());
            Ok(ctx.reply(format!("{channel} heard {text}")).await?)
        })
        .build()
        .await?;
    bot.start().await?;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let base = format!("http://{}/webhooks", listener.local_addr()?);
    let routes = bot.router();
    let server = tokio::spawn(async move { axum::serve(listener, routes).await });

    let client = reqwest::Client::new();
    let text = json!({ "message": { "mid": "m.1", "text": "hello" } });
    let button = json!({ "postback": { "mid": "m.2", "title": "Menu", "payload": "SHOW_MENU" } });
    for (provider, body) in [
        ("messenger", posted("page", "page-1", "ann", text.clone())),
        ("messenger", posted("page", "page-1", "ann", button)),
        ("instagram", posted("instagram", "ig-1", "bob", text)),
    ] {
        let signature = format!("sha256={}", secret.sign(body.as_bytes()));
        let request = client.post(format!("{base}/{provider}")).body(body);
        let answer = request.header("x-hub-signature-256", signature).send().await?;
        println!("POST /webhooks/{provider}  {}", answer.status().as_u16());
    }
    let sent = async {
        while graph.calls().len() < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), sent).await?;
    for call in graph.calls() {
        let (to, said) = (&call.body["recipient"]["id"], &call.body["message"]["text"]);
        println!("{} to {to}, by {:?}: {said}", call.account, call.token);
    }
    bot.stop().await?;
    server.abort();
    Ok(())
}
