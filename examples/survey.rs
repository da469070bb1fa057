//! A bot of your own with everything the `botmesh` binary can do: `up`, `run`, `join`, `status`, …
//! Six questions; the one about a pet waits two seconds and then asks again in other words.
//!
//! `cargo run --example survey -- up`, then say `survey` in the page it prints.

use std::time::Duration;

use botmesh::bot::{BotBuilder, Convo, Flow, FlowId, Next, Result, Route};
use botmesh::steps;
use serde::{Deserialize, Serialize};

#[derive(Default, Serialize, Deserialize)]
struct Survey {
    name: String,
    city: String,
    age: u32,
    color: String,
    pet: String,
}

steps! { enum At { Name, City, Age, Color, Pet, PetAgain, Confirm } }

const SURVEY: FlowId<Survey> = FlowId::new("survey");

/// How long the question about a pet waits.
const PATIENCE: Duration = Duration::from_secs(2);

async fn survey(at: At, c: &mut Convo<Survey>) -> Result<Next<At>> {
    match at {
        At::Name => {
            c.state.name = c.ask("1. What is your name?").await?;
            c.next()
        }
        At::City => {
            c.state.city = c.ask("2. Where do you live?").await?;
            c.next()
        }
        At::Age => {
            c.state.age = c.ask("3. How old are you?").parse("3. A number, please.").await?;
            c.next()
        }
        At::Color => {
            c.state.color = c.ask("4. Which color?").await?;
            c.next()
        }
        At::Pet => match c.ask("5. Which pet?").within(PATIENCE).await? {
            Some(pet) => {
                c.state.pet = pet;
                c.goto(At::Confirm)
            }
            None => c.next(),
        },
        At::PetAgain => {
            c.state.pet = c.ask("5. Take your time: which pet?").await?;
            c.next()
        }
        At::Confirm => {
            let yes = c.ask("6. Is that all right? (yes/no)");
            let yes = yes.choice([("yes", true), ("no", false)]).await?;
            let Survey { name, city, age, color, pet } = &c.state;
            let text = match yes {
                true => format!("Summary: {name}, {city}, {age}, {color}, {pet}."),
                false => "Forgotten.".to_owned(),
            };
            c.say(text).await?;
            c.end()
        }
    }
}

fn flows(bot: BotBuilder) -> BotBuilder {
    bot.flow(Flow::new(SURVEY, survey).persistent().cancel_on("cancel", "Cancelled."))
        .on("survey", async |ctx| Ok(ctx.enter(SURVEY, Survey::default()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply("Say `survey`.").await?))
}

fn main() -> std::process::ExitCode {
    botmesh::cli::main_with(flows)
}
