//! What a conversation can do at its questions: wait only so long, check, give up, nudge, go on as
//! another one. And what its timers must not do (SPEC B5, B6).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use botmesh::bot::{
    BotBuilder, Convo, ConvoError, Event, Flow, FlowId, Idle, Next, Pass, Result, Route,
    RuntimeError,
};
use botmesh::coordinator::LostReason;
use botmesh::steps;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::support::{Bots, next_event, stored, until};

const MIN: Duration = Duration::from_secs(60);

steps! { enum At { City, Street } }
const TRIP: FlowId<String> = FlowId::new("trip");

/// The city's question waits two minutes and goes on without; the street's waits for ever.
async fn trip(at: At, c: &mut Convo<String>) -> Result<Next<At>> {
    match at {
        At::City => {
            let city = c.ask("City?").within(2 * MIN).await?;
            if city.is_none() {
                c.say("No city, then.").await?;
            }
            c.state = city.unwrap_or_else(|| "nowhere".into());
            c.next()
        }
        At::Street => {
            let street = c.ask("Street?").await?;
            c.say(format!("{street}, {}", c.state)).await?;
            c.end()
        }
    }
}

fn trips(bot: BotBuilder) -> BotBuilder {
    bot.flow(Flow::new(TRIP, trip).persistent())
        .on("trip", async |ctx| Ok(ctx.enter(TRIP, String::new()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
}

#[tokio::test]
async fn b6_a_wait_that_ends_goes_on_without_an_answer() {
    let mut bots = Bots::new();
    let a = bots.start(trips).await;
    let ann = a.provider.user("ann");
    ann.says("trip").await.hears("City?").await;
    bots.pass(2 * MIN - Duration::from_secs(1)).await;
    assert_eq!(ann.heard_texts(), ["City?"]);
    bots.pass(Duration::from_secs(2)).await;
    ann.hears("No city, then.").await.hears("Street?").await;
    // What it went on with is stored like an answer.
    assert_eq!(stored(&a.bot, ann.chat()).await.unwrap()["step"], "Street");
    ann.says("Main St").await.hears("Main St, nowhere").await;
    // An answer in time ends the wait: nothing is due any more.
    ann.says("trip").await.hears("City?").await.says("Graz").await.hears("Street?").await;
    bots.pass(5 * MIN).await;
    ann.says("Ring 1").await.hears("Ring 1, Graz").await;
}

#[tokio::test]
async fn case_c8_a_timeout_that_is_due_while_another_has_the_chat_says_nothing() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let entered = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let (gate, entered) = (gate.clone(), entered.clone());
        // Slow at the second step, so that the timer fires in the middle of it.
        let slow = async move |at: At, c: &mut Convo<String>| match at {
            At::City => trip(At::City, c).await,
            At::Street => {
                entered.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await?.forget();
                trip(At::Street, c).await
            }
        };
        bot.flow(Flow::new(TRIP, slow).persistent())
            .on("trip", async |ctx| Ok(ctx.enter(TRIP, String::new()).await?))
    };
    let long = |c: botmesh::bot::Coordination| c.settle(10 * MIN);
    let a = bots.start_with(&make, long).await;
    let b = bots.start_with(&make, long).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("trip").await.hears("City?").await;
    // The answer reaches the other replica, which is at work on it when the time is over.
    at_b.says("Graz").await;
    until("b works", || entered.load(Ordering::SeqCst) == 1).await;
    bots.pass(3 * MIN).await;
    gate.add_permits(1);
    at_b.hears("Street?").await;
    until("a drops its copy", || a.bot.chats_in_memory() == 0).await;
    assert_eq!(at_b.heard_texts(), ["City?", "Street?"]);
    assert_eq!(stored(&b.bot, at_b.chat()).await.unwrap()["step"], "Street");
    at_b.says("Ring 1").await.hears("Ring 1, Graz").await;
}

#[tokio::test]
async fn c11_a_waits_timeout_restarts_with_the_code_that_runs_again() {
    steps! { enum One { Both } }
    const BOTH: FlowId<()> = FlowId::new("both");
    let both = async |_: One, c: &mut Convo<()>| {
        let name = c.ask("Name?").await?;
        c.idle(MIN, Idle::say("Still there?"));
        let city = c.ask("City?").within(3 * MIN).await?;
        c.say(format!("{name} of {}", city.unwrap_or_else(|| "nowhere".into()))).await?;
        c.end()
    };
    let make = |bot: BotBuilder| {
        bot.flow(Flow::new(BOTH, both).persistent())
            .on("go", async |ctx| Ok(ctx.enter(BOTH, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(make).await;
    let b = bots.start(make).await;
    a.provider.user("ann").says("go").await.hears("Name?").await;
    let ann = b.provider.user("ann");
    a.provider.user("ann").says("Ann").await.hears("City?").await;
    bots.kill(a).await;
    // Nobody runs the code that would time: neither the wait nor its watchdog acts.
    bots.pass(5 * MIN).await;
    assert_eq!(ann.heard_texts(), ["Name?", "City?"]);
    // The step runs again, and only with its second question both are armed again.
    ann.says("hello?").await.hears("Name?").await;
    bots.pass(2 * MIN).await;
    ann.says("Ann").await.hears("City?").await;
    bots.pass(MIN + Duration::from_secs(1)).await;
    ann.hears("Still there?").await;
    bots.pass(2 * MIN).await;
    ann.hears("Ann of nowhere").await;
}

#[tokio::test]
async fn b6_a_watchdog_speaks_once_in_each_wait_and_may_end_it() {
    steps! { enum One { Ask, Last } }
    const NUDGED: FlowId<()> = FlowId::new("nudged");
    let nudged = async |at: One, c: &mut Convo<()>| match at {
        One::Ask => {
            c.idle(MIN, Idle::say("Still there?"));
            let first = c.ask("First?").await?;
            let second = c.ask("Second?").await?;
            c.say(first + "+" + &second).await?;
            c.next()
        }
        One::Last => {
            c.idle(MIN, Idle::end("Another time, then."));
            c.ask("Third?").await?;
            c.end()
        }
    };
    let mut bots = Bots::new();
    let a = bots
        .start(|bot| {
            bot.flow(Flow::new(NUDGED, nudged).persistent())
                .on("go", async |ctx| Ok(ctx.enter(NUDGED, ()).await?))
                .on(Route::Any, async |ctx| Ok(ctx.reply("routed").await?))
        })
        .await;
    let ann = a.provider.user("ann");
    ann.says("go").await.hears("First?").await;
    bots.pass(3 * MIN).await;
    ann.hears("Still there?").await;
    assert_eq!(ann.heard().len(), 2, "once in a wait");
    ann.says("1").await.hears("Second?").await;
    bots.pass(3 * MIN).await;
    ann.hears("Still there?").await.says("2").await.hears("1+2").await.hears("Third?").await;
    bots.pass(3 * MIN).await;
    ann.hears("Another time, then.").await;
    assert_eq!(stored(&a.bot, ann.chat()).await, None);
    ann.says("3").await.hears("routed").await;
}

#[tokio::test]
async fn b6_the_conversations_own_timeout_ends_it_under_the_turn() {
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut bots = Bots::new();
    let make = |bot: BotBuilder| {
        let seen = seen.clone();
        let asks = async move |_: At, c: &mut Convo<String>| {
            let answer = c.ask("Well?").await;
            if let Err(why) = &answer {
                // Its own code sees why, and can say nothing any more.
                seen.lock().push(why.to_string());
                assert!(c.say("never said").await.is_err());
            }
            answer?;
            c.end()
        };
        bot.flow(Flow::new(TRIP, asks).persistent().say_on_timeout("Too late."))
            .conversation_timeout(MIN)
            .on("trip", async |ctx| Ok(ctx.enter(TRIP, String::new()).await?))
            .on(Route::Any, async |ctx| Ok(ctx.reply("routed").await?))
    };
    let a = bots.start(make).await;
    let ann = a.provider.user("ann");
    ann.says("trip").await.hears("Well?").await;
    bots.pass(MIN + Duration::from_secs(1)).await;
    ann.hears("Too late.").await;
    until("its code saw it", || !seen.lock().is_empty()).await;
    assert_eq!(*seen.lock(), [ConvoError::TimedOut.to_string()]);
    ann.says("hm").await.hears("routed").await;
    assert_eq!(stored(&a.bot, ann.chat()).await, None);
}

#[tokio::test]
async fn b5_a_sleep_as_long_as_settle_is_refused_and_a_shorter_one_sleeps() {
    steps! { enum One { Nap } }
    const NAP: FlowId<u64> = FlowId::new("nap");
    let nap = async |_: One, c: &mut Convo<u64>| {
        let time = Duration::from_secs(c.state);
        match c.sleep(time).await {
            Ok(()) => c.say("slept").await?,
            Err(error) => c.say(error.to_string()).await?,
        }
        c.end()
    };
    let mut bots = Bots::new();
    let make = |bot: BotBuilder| {
        bot.flow(Flow::new(NAP, nap).persistent())
            .on("long", async |ctx| Ok(ctx.enter(NAP, 5).await?))
            .on("short", async |ctx| Ok(ctx.enter(NAP, 4).await?))
    };
    let a = bots.start_with(make, |c| c.settle(Duration::from_secs(5))).await;
    let ann = a.provider.user("ann");
    let refused = ann.says("long").await.hears_any().await.text;
    assert!(refused.contains("5s") && refused.contains("settle"), "{refused}");
    ann.says("short").await;
    bots.pass(Duration::from_secs(5)).await;
    ann.hears("slept").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn b5_a_step_that_blocks_its_thread_is_fenced_off_and_reported() {
    steps! { enum One { Block } }
    const BLOCK: FlowId<()> = FlowId::new("block");
    let (let_go, runs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let late: Arc<Mutex<Vec<String>>> = Arc::default();
    let make = |bot: BotBuilder| {
        let (let_go, runs, late) = (let_go.clone(), runs.clone(), late.clone());
        let block = async move |_: One, c: &mut Convo<()>| {
            let answer = c.ask("Well?").await?;
            if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                while !let_go.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                // The same replica has gone on with the chat meanwhile: nothing of this may count.
                let said = c.say("late").await;
                late.lock().push(format!("{said:?}"));
            }
            c.say(format!("done with {answer}")).await?;
            c.end()
        };
        bot.flow(Flow::new(BLOCK, block).persistent())
            .on("go", async |ctx| Ok(ctx.enter(BLOCK, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start_with(make, |c| c.settle(Duration::from_secs(2))).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("go").await.hears("Well?").await.says("this").await;
    until("it blocks", || runs.load(Ordering::SeqCst) == 1).await;
    bots.pass(Duration::from_secs(3)).await;
    let lost = next_event(&mut events, |event| match event {
        Event::LeaseLost { key, reason } if key == "x:ann" => Some(*reason),
        _ => None,
    });
    assert_eq!(lost.await, LostReason::Settled);
    let blocked = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => {
            matches!(&**error, RuntimeError::Blocked { .. }).then(|| error.to_string())
        }
        _ => None,
    });
    let blocked = blocked.await;
    assert!(blocked.contains("x:ann") && blocked.contains("spawn_blocking"), "{blocked}");
    // Its message came again, and the chat goes on, at this very replica, while it still blocks.
    ann.hears("done with this").await;
    assert_eq!(stored(&a.bot, ann.chat()).await, None);
    let_go.store(true, Ordering::SeqCst);
    until("it wakes", || !late.lock().is_empty()).await;
    assert!(late.lock()[0].contains("LeaseLost"), "{:?}", late.lock());
    ann.says("go").await.hears("Well?").await;
    assert_eq!(ann.heard_texts(), ["Well?", "done with this", "Well?"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn b5_a_step_that_blocks_past_its_session_keeps_no_later_turn_waiting() {
    steps! { enum One { Block } }
    const BLOCK: FlowId<()> = FlowId::new("block");
    // However the test ends, the thread is let go.
    struct LetGo(Arc<AtomicBool>);
    impl Drop for LetGo {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let (let_go, runs) = (LetGo(Arc::default()), Arc::new(AtomicU32::new(0)));
    let make = |bot: BotBuilder| {
        let (let_go, runs) = (let_go.0.clone(), runs.clone());
        let block = async move |_: One, c: &mut Convo<()>| {
            let answer = c.ask("Well?").await?;
            if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                while !let_go.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            c.say(format!("done with {answer}")).await?;
            c.end()
        };
        bot.flow(Flow::new(BLOCK, block).persistent())
            .on("go", async |ctx| Ok(ctx.enter(BLOCK, ()).await?))
    };
    let mut bots = Bots::new();
    // Its session ends long before `settle`: nobody has to fence it off any more.
    let a = bots.start_with(make, |c| c.settle(10 * MIN)).await;
    let ann = a.provider.user("ann");
    ann.says("go").await.hears("Well?").await.says("this").await;
    until("it blocks", || runs.load(Ordering::SeqCst) == 1).await;
    bots.clock.advance(super::support::PAST_LEASE);
    bots.pass(Duration::from_secs(5)).await;
    // The same replica, under its next session, has the chat again.
    ann.hears("done with this").await;
    drop(let_go);
    ann.says("go").await.hears("Well?").await;
    assert_eq!(ann.heard_texts(), ["Well?", "done with this", "Well?"]);
}

#[tokio::test]
async fn c1_answers_are_checked_and_the_attempts_are_counted_across_replicas() {
    steps! { enum One { Street, Again } }
    const STREETS: FlowId<()> = FlowId::new("streets");
    async fn exists(street: &String) -> Result<(), String> {
        tokio::task::yield_now().await;
        if street.ends_with("St") { Ok(()) } else { Err(format!("{street}? Which one?")) }
    }
    let streets = async |at: One, c: &mut Convo<()>| match at {
        One::Street => {
            match c.ask("Street?").verify(exists).attempts(3).await {
                Ok(street) => c.say(format!("to {street}")).await?,
                Err(ConvoError::AttemptsExhausted { attempts }) => {
                    c.say(format!("{attempts} are enough")).await?;
                    return c.goto(One::Again);
                }
                Err(error) => return Err(error.into()),
            }
            c.end()
        }
        One::Again => {
            c.ask("Number?").parse::<u32>("A number, please.").attempts(2).await?;
            c.end()
        }
    };
    let make = |bot: BotBuilder| {
        bot.flow(Flow::new(STREETS, streets).persistent())
            .on("go", async |ctx| Ok(ctx.enter(STREETS, ()).await?))
            .on(Route::Any, async |ctx| Ok(ctx.reply("routed").await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(make).await;
    let b = bots.start(make).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("go").await.hears("Street?").await.says("Main St").await.hears("to Main St").await;
    at_a.says("go").await.hears("Street?").await.says("Elm").await.hears("Elm? Which one?").await;
    // The third attempt is the third wherever it is made.
    at_b.says("Oak").await.hears("Oak? Which one?").await;
    at_a.says("Ash").await.hears("3 are enough").await.hears("Number?").await;
    // Given up for good, the conversation ends: nothing fails, and nothing is tried again.
    at_a.says("one").await.hears("A number, please.").await.says("two").await;
    at_a.says("three").await.hears("routed").await;
    assert_eq!(stored(&a.bot, at_a.chat()).await, None);
}

#[tokio::test]
async fn b3_a_switch_goes_on_as_another_conversation_under_the_same_turn() {
    steps! { enum One { Ask } }
    const HELP: FlowId<String> = FlowId::new("help");
    let help = async |_: One, c: &mut Convo<String>| {
        let what = c.ask(format!("Help with {}?", c.state)).await?;
        c.say(format!("On it: {what}")).await?;
        c.end()
    };
    let ask = async |_: One, c: &mut Convo<()>| {
        let what = c.ask("Order or help?").await?;
        c.switch(HELP, what)
    };
    const ASK: FlowId<()> = FlowId::new("ask");
    let make = |bot: BotBuilder| {
        bot.flow(Flow::new(ASK, ask).persistent())
            .flow(Flow::new(HELP, help).persistent())
            .on("go", async |ctx| Ok(ctx.enter(ASK, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(make).await;
    let b = bots.start(make).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("go").await.hears("Order or help?").await;
    // Both messages at once: the second waits until the other flow has asked.
    at_a.says("orders").await;
    at_b.says("a late one").await.hears("Help with orders?").await.hears("On it: a late one").await;
}

#[tokio::test]
async fn b5_steps_in_a_circle_that_never_ask_fail_instead_of_running_for_ever() {
    steps! { enum One { Ping, Pong } }
    const CIRCLE: FlowId<()> = FlowId::new("circle");
    let circle = async |at: One, c: &mut Convo<()>| match at {
        One::Ping => c.goto(One::Pong),
        One::Pong => c.goto(One::Ping),
    };
    let mut bots = Bots::new();
    let a = bots
        .start(|bot| {
            bot.flow(Flow::new(CIRCLE, circle))
                .on("go", async |ctx| Ok(ctx.enter(CIRCLE, ()).await?))
        })
        .await;
    let mut events = a.bot.events();
    a.provider.user("ann").says("go").await;
    let failed = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => Some(error.to_string()),
        _ => None,
    });
    let failed = failed.await;
    assert!(failed.contains("circle") && failed.contains("no question"), "{failed}");
}

#[tokio::test]
async fn c8_hooks_see_each_message_first_change_it_and_may_stop_it() {
    let mut bots = Bots::new();
    let a = bots
        .start(|bot| {
            trips(bot)
                .before_message(async |ctx| {
                    Ok(if ctx.text() == "/mute" { Pass::Stop } else { Pass::On })
                })
                .before_message(async |ctx| {
                    if let Some(text) = ctx.text().strip_prefix("voice:").map(str::to_owned) {
                        ctx.set_text(text);
                        ctx.set_lang("de");
                    }
                    Ok(Pass::On)
                })
                .on("lang", async |ctx| {
                    let lang = ctx.lang().unwrap_or("none").to_owned();
                    Ok(ctx.reply(lang).await?)
                })
        })
        .await;
    let ann = a.provider.user("ann");
    ann.says("lang").await.hears("none").await.says("voice:lang").await.hears("de").await;
    ann.says("voice:trip").await.hears("City?").await;
    // Stopped, it is no answer, and the conversation waits on.
    ann.says("/mute").await.says("voice:Graz").await.hears("Street?").await;
    ann.says("/mute").await.says("Ring 1").await.hears("Ring 1, Graz").await;
}

#[tokio::test]
async fn b6_a_stale_timer_leaves_the_other_replicas_memory_alone() {
    const CHAT: FlowId<()> = FlowId::new("chat");
    let make = |bot: BotBuilder| {
        trips(bot)
            .conversation(CHAT, async |c| {
                let first = c.ask("first?").await?;
                let second = c.ask("second?").await?;
                c.say(format!("{first}+{second}")).await?;
                Ok(())
            })
            .on("chat", async |ctx| Ok(ctx.enter(CHAT, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(make).await;
    let b = bots.start(make).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("trip").await.hears("City?").await;
    at_b.says("Graz").await.hears("Street?").await.says("Ring 1").await.hears("Ring 1, Graz").await;
    // A conversation that only b's memory has. A turn of a's timer would take the chat from b.
    at_b.says("chat").await.hears("first?").await.says("1").await.hears("second?").await;
    bots.pass(3 * MIN).await;
    until("a drops its copy", || a.bot.chats_in_memory() == 0).await;
    at_b.says("2").await.hears("1+2").await;
}
