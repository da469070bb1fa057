//! The demo bot (SPEC N6): takes an order in four questions, echoes everything else.

use serde::{Deserialize, Serialize};

use crate::bot::{
    Bot, BotBuilder, BuildError, Convo, Coordination, Ctx, Flow, FlowId, Next, Result, Route,
};
use crate::provider::webchat::Webchat;
use crate::provider::webhook::{ReplyUrlError, WebhookProvider};
use crate::steps;
use crate::store::Store;

/// The id of the demo's webhook.
pub const WEBHOOK: &str = "demo";

/// What is ordered. The quantity is kept as it was written: the summary repeats it verbatim.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Order {
    item: String,
    quantity: String,
    address: String,
}

steps! {
    enum At { Item = "item", Quantity = "quantity", Address = "address", Confirm = "confirm" }
}

/// The order flow.
pub const ORDER: FlowId<Order> = FlowId::new("order");

/// A question that an unfit answer repeats verbatim.
const HOW_MANY: &str = "How many?";

async fn order(at: At, c: &mut Convo<Order>) -> Result<Next<At>> {
    match at {
        At::Item => {
            c.state.item = c.ask("What would you like?").await?;
            c.next()
        }
        At::Quantity => {
            c.state.quantity = c.ask(HOW_MANY).check(|text| is_number(text)).await?;
            c.next()
        }
        At::Address => {
            c.state.address = c.ask("Where to?").await?;
            c.next()
        }
        At::Confirm => {
            let yes = c.ask("Confirm? (yes/no)").choice([("yes", true), ("no", false)]).await?;
            let last = if yes { summary(&c.state) } else { "Order dropped.".to_owned() };
            c.say(last).await?;
            c.end()
        }
    }
}

/// Anything that reads as a number is one: `3`, `2.5`, `-1`.
fn is_number(text: &str) -> std::result::Result<(), &'static str> {
    match text.trim().parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(()),
        _ => Err(HOW_MANY),
    }
}

fn summary(order: &Order) -> String {
    format!("Ordered: {} × {}, to {}.", order.quantity, order.item, order.address)
}

async fn begin(ctx: &mut Ctx) -> Result {
    Ok(ctx.enter(ORDER, Order::default()).await?)
}

async fn echo(ctx: &mut Ctx) -> Result {
    let text = format!("echo: {}", ctx.text());
    Ok(ctx.reply(text).await?)
}

/// The demo's flow and handlers, for any provider.
pub fn flows(bot: BotBuilder) -> BotBuilder {
    bot.flow(Flow::new(ORDER, order).persistent().cancel_on("cancel", "Cancelled."))
        .on("order", begin)
        .on(Route::Any, echo)
}

/// Why the demo bot was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DemoError {
    /// The reply URL is not usable.
    #[error(transparent)]
    ReplyUrl(#[from] ReplyUrlError),
    /// The bot cannot be built.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// A bot of these flows on this store and coordination, with the webhook `demo` and the chat page.
pub async fn bot(
    store: impl Store,
    coordination: Coordination,
    reply_url: Option<String>,
    flows: impl FnOnce(BotBuilder) -> BotBuilder,
) -> Result<Bot, DemoError> {
    let mut webhook = WebhookProvider::new(WEBHOOK);
    if let Some(url) = reply_url {
        webhook = webhook.reply_url(&url)?;
    }
    let bot = flows(Bot::builder())
        .provider(webhook)
        .provider(Webchat)
        .store(store)
        .coordination(coordination);
    Ok(bot.build().await?)
}
