//! A flow of four questions whose replica dies in the middle: another one goes on at the right
//! question, with the state intact. Two replicas share a hub in this process; no port, no disk.
//!
//! `cargo run --example order_flow --features test-util`

use std::time::Duration;

use botmesh::bot::{Bot, Convo, Coordination, Flow, FlowId, Next, Result, Route};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::steps;
use botmesh::testing::{MemoryCoordinator, MemoryHub, ScriptedProvider};
use serde::{Deserialize, Serialize};

#[derive(Default, Serialize, Deserialize)]
struct Order {
    item: String,
    quantity: u32,
    address: String,
}

steps! { enum At { Item, Quantity, Address, Confirm } }

const ORDER: FlowId<Order> = FlowId::new("order");

async fn order(at: At, c: &mut Convo<Order>) -> Result<Next<At>> {
    match at {
        At::Item => {
            c.state.item = c.ask("What would you like?").await?;
            c.next()
        }
        At::Quantity => {
            let count = c.ask("How many?").parse("A number, please.");
            let count = count.check(|n| if *n > 0 { Ok(()) } else { Err("At least one.") });
            c.state.quantity = count.await?;
            c.next()
        }
        At::Address => {
            c.state.address = c.ask("Where to?").await?;
            c.next()
        }
        At::Confirm => {
            let yes = c.ask("Confirm? (yes/no)").choice([("yes", true), ("no", false)]).await?;
            let Order { item, quantity, address } = &c.state;
            let text = match yes {
                true => format!("{quantity} × {item} to {address}: on its way."),
                false => "Order dropped.".to_owned(),
            };
            c.say(text).await?;
            c.end()
        }
    }
}

async fn replica(
    coordinator: MemoryCoordinator,
    hub: &MemoryHub,
    provider: &ScriptedProvider,
) -> Result<Bot> {
    let bot = Bot::builder()
        .provider(provider.clone())
        .store(hub.store(MemoryHub::default_prefix()))
        .coordination(Coordination::new(coordinator))
        .flow(Flow::new(ORDER, order).persistent().cancel_on("cancel", "Cancelled."))
        .on("order", async |ctx| Ok(ctx.enter(ORDER, Order::default()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply("Say `order`.").await?))
        .build()
        .await?;
    bot.start().await?;
    Ok(bot)
}

#[tokio::main]
async fn main() -> Result {
    let hub = MemoryHub::new();
    let lease = Duration::from_millis(500);
    let options = CoordinatorOptions { lease, ..CoordinatorOptions::default() };
    let prefix = MemoryHub::default_prefix();
    let first = MemoryCoordinator::with(&hub, prefix.clone(), options.clone());
    let second = MemoryCoordinator::with(&hub, prefix, options);
    // Two connections to one service: what a dead replica has sent and not noted is sent again under
    // the same id, and the service shows it once.
    let at_first = ScriptedProvider::new("phone");
    let at_second = at_first.replica();
    let _dies = replica(first.clone(), &hub, &at_first).await?;
    let bot = replica(second, &hub, &at_second).await?;

    let mut ann = at_first.user("ann");
    let answers = ["order", "tea", "many", "3", "221b Baker Street", "yes"];
    for (said, answer) in answers.into_iter().enumerate() {
        if said == 4 {
            println!("     (the replica that asked dies)");
            first.crash();
            ann = at_second.user("ann");
        }
        println!("ann> {answer}");
        println!("bot> {}", ann.says(answer).await.hears_any().await.text);
    }
    bot.stop().await?;
    Ok(())
}
