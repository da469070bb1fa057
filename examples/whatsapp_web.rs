//! A bot on WhatsApp as a linked device, on two replicas: one is connected, the other stands by and goes on
//! as the same device, without a code to scan again. Both talk to a fake of WhatsApp in this process, whose
//! phone scans the code that the first one shows. `cargo run --example whatsapp_web`
//!
//! For the real WhatsApp nothing is to be said but `WhatsAppWeb::new("wa")`, and its code is shown on the
//! terminal; read what the module says of the terms of service first. An example is not the program to do
//! it with: examples are built with what the tests need, and that client skips a check of the server's
//! certificate.

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{Bot, Coordination, Result, Route};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::provider::whatsapp_web::{Pairing, WhatsAppWeb};
use botmesh::store::GroupStore;
use botmesh::testing::MemoryHub;

#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/whatsapp_api.rs"]
mod whatsapp_api;
#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/whatsapp_people.rs"]
mod whatsapp_people;
#[allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared with the tests")]
#[path = "../tests/support/whatsapp_wire.rs"]
mod whatsapp_wire;

use whatsapp_api::WhatsAppApi;
use whatsapp_people::text;

const ANN: &str = "15550001";

/// One replica.
async fn replica(api: &Arc<WhatsAppApi>, hub: &MemoryHub) -> Result<Bot> {
    let phone = api.clone();
    let whatsapp = WhatsAppWeb::new("wa")
        .base_url(&api.url)
        .version((2, 3000, 1))
        .one_time_keys(16)
        .on_pairing(move |step| match step {
            Pairing::Qr { code, .. } => {
                println!(
                    "     (a code of {} letters is shown, and the phone scans it)",
                    code.len()
                );
                phone.scans(code);
            }
            step => println!("     ({step:?})"),
        });
    let bot = Bot::builder()
        .provider(whatsapp)
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?));
    let store = GroupStore::new(hub.as_group(), MemoryHub::default_prefix());
    let coordination = Coordination::new(store.coordinator(CoordinatorOptions::default()));
    let bot = bot.store(store).coordination(coordination).build().await?;
    bot.start().await?;
    Ok(bot)
}

/// What Ann hears next.
async fn hears(api: &WhatsAppApi) -> String {
    loop {
        if let Some((_, text)) = api.heard(ANN).await.pop() {
            return text;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::main]
async fn main() -> Result {
    let (api, hub) = (Arc::new(WhatsAppApi::start().await), MemoryHub::new());
    api.person(ANN);
    let first = replica(&api, &hub).await?;
    first.ready().await;
    while !api.has_keys() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let second = replica(&api, &hub).await?;
    for (n, said) in ["hello", "are you there", "bye"].into_iter().enumerate() {
        if n == 1 {
            println!("     (the replica that is connected stops)");
            first.stop().await?;
        }
        println!("ann> {said}");
        api.says(ANN, None, &format!("A{n}"), &text(said)).await;
        println!("bot> {}", hears(&api).await);
    }
    let logins = api.logins();
    let devices = logins.iter().filter(|login| login.user.is_none()).count();
    println!("     ({devices} code, {} logins as one device)", logins.len() - devices);
    second.stop().await?;
    Ok(())
}
