//! What becomes of conversations when their replica goes away: a flow is forwarded and continues, a
//! conversation of one piece cannot be and its user is told, a timer of the dead replica stays
//! silent. Two replicas share a hub and a clock that is moved by hand; no port, no disk.
//!
//! `cargo run --example handover --features test-util`

use std::time::Duration;

use botmesh::bot::{
    Bot, Convo, Coordination, Event, Fallback, Flow, FlowId, Flows, Handover, Next, Result, Route,
};
use botmesh::steps;
use botmesh::testing::{ManualClock, MemoryCoordinator, MemoryHub, ScriptedProvider, ScriptedUser};

steps! { enum At { City, Street } }

const TRIP: FlowId<String> = FlowId::new("trip");

async fn trip(at: At, c: &mut Convo<String>) -> Result<Next<At>> {
    match at {
        At::City => {
            let city = c.ask("Which city?").within(Duration::from_secs(120)).await?;
            let Some(city) = city else {
                c.say("Another time, then.").await?;
                return c.end();
            };
            c.state = city;
            c.next()
        }
        At::Street => {
            let street = c.ask("Which street?").await?;
            c.say(format!("On the way to {street}, {}.", c.state)).await?;
            c.end()
        }
    }
}

const FEEDBACK: FlowId<()> = FlowId::new("feedback");

async fn feedback(c: &mut Convo<()>) -> Result {
    let stars = c.ask("How many stars?").parse::<u8>("A number, please.").await?;
    let why = c.ask("Why?").await?;
    c.say(format!("{stars} stars, because {why}. Thank you!")).await?;
    Ok(())
}

async fn replica(
    name: &str,
    hub: &MemoryHub,
    provider: &ScriptedProvider,
) -> Result<(Bot, MemoryCoordinator)> {
    let coordinator = MemoryCoordinator::new(hub, name);
    let handover = Handover {
        flows: Flows::Forward,      // continue what can be stored
        fallback: Fallback::Notify, // tell the user about the rest
        ..Handover::default()
    };
    let bot = Bot::builder()
        .provider(provider.clone())
        .store(hub.store(MemoryHub::default_prefix()))
        .coordination(Coordination::new(coordinator.clone()).handover(handover))
        .flow(Flow::new(TRIP, trip))
        .conversation(FEEDBACK, feedback)
        .on("trip", async |ctx| Ok(ctx.enter(TRIP, String::new()).await?))
        .on("feedback", async |ctx| Ok(ctx.enter(FEEDBACK, ()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply("Say `trip` or `feedback`.").await?))
        .build()
        .await?;
    bot.start().await?;
    Ok((bot, coordinator))
}

async fn say(user: &ScriptedUser, text: &str) {
    println!("{}> {text}", user.chat().chat);
    println!("bot> {}", user.says(text).await.hears_any().await.text);
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    let clock = ManualClock::new();
    let hub = MemoryHub::with_clock(clock.clone());
    // Two connections to one service.
    let at_first = ScriptedProvider::new("phone");
    let at_second = at_first.replica();
    let (_dies, dies) = replica("first", &hub, &at_first).await?;
    let (bot, _) = replica("second", &hub, &at_second).await?;
    let mut events = bot.events();

    say(&at_first.user("ann"), "trip").await;
    say(&at_first.user("bob"), "feedback").await;
    say(&at_first.user("bob"), "5").await;
    println!("     (their replica dies, and its lease runs out)");
    dies.crash();
    for _ in 0..34 {
        // In steps, so that the one that lives renews in between.
        clock.advance(Duration::from_millis(500));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    say(&at_second.user("ann"), "Graz").await;
    say(&at_second.user("bob"), "because it was quick").await;
    say(&at_second.user("ann"), "Ringstraße 1").await;
    for _ in 0..2 {
        while let Some(event) = events.next().await {
            if let Event::Handover { key, name, outcome } = event {
                println!("     ({key}: {name} → {outcome:?})");
                break;
            }
        }
    }
    bot.stop().await?;
    Ok(())
}
