//! Two replicas of a bot and their jobs, offline, on a clock that is moved by hand. It ends by itself.
//!
//! `cargo run --example scheduler --features test-util`

use std::time::Duration;

use botmesh::bot::{Bot, Coordination, Job, Missed, Result, Route};
use botmesh::testing::{ManualClock, MemoryCoordinator, MemoryHub, ScriptedProvider};
use botmesh::types::ChatKey;

async fn replica(hub: &MemoryHub, chat: &ScriptedProvider, name: &'static str) -> Result<Bot> {
    let team = ChatKey::new("terminal", "team");
    let standup =
        Job::cron("0 9 * * MON-FRI").zone("Asia/Tokyo").id("standup").missed(Missed::Once);
    let bot = Bot::builder()
        .provider(chat.clone())
        .store(hub.store(MemoryHub::default_prefix()))
        .coordination(Coordination::new(MemoryCoordinator::new(hub, name)))
        // Without an id: on every replica.
        .every("6h", async move |tick| {
            println!("{name}: still here at {} h", tick.due_ms() / 3_600_000 % 24);
            Ok(())
        })
        // With an id: each occurrence on one replica; another one if it fails there.
        .job(standup, async move |tick| {
            if tick.attempt() == 1 {
                println!("{name}: claimed the stand-up, and fails");
                return Err("the network is down here".into());
            }
            println!("{name}: runs it instead, attempt {}", tick.attempt());
            tick.post(&team, "What do you plan today?").await?;
            Ok(())
        })
        .on(Route::Any, async |ctx| Ok(ctx.reply("Noted.").await?))
        .build()
        .await?;
    bot.start().await?;
    Ok(bot)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    // The clock starts on Thursday, 1 January 2026, 01:00 UTC: in Tokyo it is ten.
    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    let chat = ScriptedProvider::new("terminal");
    let a = replica(&hub, &chat, "a").await?;
    let b = replica(&hub, &chat.replica(), "b").await?;
    for _ in 0..24 * 60 * 12 {
        clock.advance(Duration::from_secs(5));
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
    let team = chat.user("team");
    println!("bot> {}", team.hears_any().await.text);
    println!("team> tea\nbot> {}", team.says("tea").await.hears_any().await.text);
    a.stop().await?;
    b.stop().await?;
    Ok(())
}
