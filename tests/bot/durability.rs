//! What is not lost, not doubled and not reordered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use botmesh::bot::{BotBuilder, Convo, Durability, Event, Flow, FlowId, Route, RuntimeError};
use botmesh::cli::demo;
use botmesh::provider::SendError;
use botmesh::steps;
use tokio::sync::Semaphore;

use super::support::{Bots, next_event, stored, until};

#[tokio::test]
async fn g1_the_same_id_is_handled_once_whichever_replica_it_reaches() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let b = bots.start(demo::flows).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    let (first, second) = tokio::join!(at_a.says_as("m1", "hi"), at_b.says_as("m1", "hi"));
    assert_ne!(first.duplicate, second.duplicate, "one of the two is the first");
    assert!(at_b.says_as("m1", "another body").await.duplicate);
    at_a.says("end").await;
    at_a.hears("echo: hi").await.hears("echo: end").await;
}

#[tokio::test]
async fn g2_a_message_of_a_dead_replica_is_handled_by_another() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let entered = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let (gate, entered) = (gate.clone(), entered.clone());
        bot.on(Route::Any, async move |ctx| {
            entered.fetch_add(1, Ordering::SeqCst);
            gate.acquire().await?.forget();
            ctx.reply(format!("did {}", ctx.text())).await?;
            Ok(())
        })
    };
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    // One at work and two waiting when their replica dies.
    let ann = a.provider.user("ann");
    ann.says("1").await.says("2").await.says("3").await;
    until("the first is at work", || entered.load(Ordering::SeqCst) == 1).await;
    bots.kill(a).await;
    gate.add_permits(10);
    b.provider.user("ann").hears("did 1").await.hears("did 2").await.hears("did 3").await;
}

#[tokio::test]
async fn g3_a_step_that_runs_again_says_nothing_twice() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let make = |bot: BotBuilder| {
        let gate = gate.clone();
        bot.on(Route::Any, async move |ctx| {
            ctx.reply("working").await?;
            gate.acquire().await?.forget();
            ctx.reply("done").await?;
            Ok(())
        })
    };
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    let ann = a.provider.user("ann");
    ann.says("go").await;
    // A longer step's words leave before it ends, on the clock's word.
    let early = async {
        loop {
            bots.clock.advance(Duration::from_millis(50));
            tokio::task::yield_now().await;
            if !ann.heard().is_empty() {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), early).await.expect("it leaves early");
    ann.hears("working").await;
    bots.kill(a).await;
    gate.add_permits(1);
    // `b` runs the handler again: the first reply is known, the second is new.
    b.provider.user("ann").hears("done").await;
    assert_eq!(ann.heard_texts(), ["working", "done"]);
    assert_eq!(a_resent(&b.provider), 0);
}

fn a_resent(provider: &botmesh::testing::ScriptedProvider) -> u64 {
    provider.resent()
}

#[tokio::test]
async fn g3_order_is_kept_through_rate_limits_and_lost_connections() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let ann = a.provider.user("ann");
    a.provider.fail_next([
        SendError::Transport { why: "connection refused".into() },
        SendError::RateLimited { retry_after: Duration::from_secs(3) },
        SendError::OutcomeUnknown { why: "the answer was lost".into() },
    ]);
    let mut events = a.bot.events();
    for n in 0..10 {
        ann.says(&n.to_string()).await;
    }
    // The clock runs while the sender backs off.
    let clock = bots.clock.clone();
    let running = tokio::spawn(async move {
        loop {
            clock.advance(Duration::from_millis(100));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    for n in 0..10 {
        ann.hears(&format!("echo: {n}")).await;
    }
    next_event(&mut events, |event| matches!(event, Event::SendUnknown { .. }).then_some(())).await;
    running.abort();
}

#[tokio::test]
async fn c9_a_poisonous_message_becomes_a_dead_letter_and_the_chat_goes_on() {
    let mut bots = Bots::new();
    let tries = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let tries = tries.clone();
        bot.on("poison", async move |ctx| {
            ctx.reply("half of it").await?;
            if tries.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
                panic!("it was poisonous");
            }
            Err("it was refused".into())
        })
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
    };
    let a = bots.start(make).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says_as("m1", "poison").await;
    ann.says("after").await;
    let clock = bots.clock.clone();
    let running = tokio::spawn(async move {
        loop {
            clock.advance(Duration::from_millis(20));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    ann.hears("echo: after").await;
    running.abort();
    assert_eq!(tries.load(Ordering::SeqCst), 5, "as often as attempts are allowed");
    assert_eq!(ann.heard().len(), 1, "nothing of a failed attempt is said");
    let (mut panics, mut errors) = (0, 0);
    let dead = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => {
            match &**error {
                RuntimeError::Panicked { .. } => panics += 1,
                RuntimeError::Handler { .. } => errors += 1,
                other => panic!("{other}"),
            }
            None
        }
        Event::DeadLetter { key, id, .. } => Some((key.clone(), id.clone())),
        _ => None,
    });
    assert_eq!(dead.await, ("x:ann".to_owned(), "m1".to_owned()));
    assert_eq!((panics, errors), (3, 2));
    assert_eq!(a.bot.store().dead_letters().await.unwrap().len(), 1);
}

#[tokio::test]
async fn g5_a_post_is_said_under_the_chats_turn() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let ann = a.provider.user("ann");
    ann.says("order").await.hears("What would you like?").await;
    // Not an answer to the question, though the chat is in a conversation.
    a.bot.handle().post(ann.chat(), "The shop closes at nine.").await.unwrap();
    ann.hears("The shop closes at nine.").await;
    ann.says("tea").await.hears("How many?").await;
}

#[tokio::test]
async fn a2_without_durability_a_flow_still_changes_hands() {
    let mut bots = Bots::new();
    let off = |c: botmesh::bot::Coordination| c.durability(Durability::Off);
    let a = bots.start_with(demo::flows, off).await;
    let b = bots.start_with(demo::flows, off).await;
    let ann = a.provider.user("ann");
    assert!(!ann.says_as("m1", "order").await.duplicate);
    assert!(ann.says_as("m1", "order").await.duplicate);
    ann.hears("What would you like?").await;
    bots.kill(a).await;
    let ann = b.provider.user("ann");
    ann.says("tea").await.hears("How many?").await;
    for text in ["3", "here", "yes"] {
        ann.says(text).await;
    }
    ann.hears("Where to?").await.hears("Confirm? (yes/no)").await;
    ann.hears("Ordered: 3 × tea, to here.").await;
}

#[tokio::test]
async fn c9_after_a_dead_letter_what_is_said_to_another_answer_is_heard() {
    steps! { enum One { Look } }
    const LOOK: FlowId<()> = FlowId::new("look");
    let runs = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let runs = runs.clone();
        let look = async move |_: One, c: &mut Convo<()>| {
            let what = c.ask("What?").await?;
            c.say(format!("Looking for {what}.")).await?;
            runs.fetch_add(1, Ordering::SeqCst);
            // Long enough for that to leave.
            c.sleep(Duration::from_secs(1)).await?;
            if what == "salt" {
                return Err("the shelf fell down".into());
            }
            c.say(format!("Found {what}.")).await?;
            c.end()
        };
        bot.flow(Flow::new(LOOK, look).persistent())
            .on("go", async |ctx| Ok(ctx.enter(LOOK, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(make).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("go").await.hears("What?").await.says("salt").await;
    for run in 1..=5 {
        until("it looks", || runs.load(Ordering::SeqCst) >= run).await;
        bots.pass(Duration::from_secs(3)).await;
    }
    let dead = |event: &Event| matches!(event, Event::DeadLetter { .. }).then_some(());
    next_event(&mut events, dead).await;
    ann.says("tea").await;
    until("it looks", || runs.load(Ordering::SeqCst) == 6).await;
    bots.pass(Duration::from_secs(3)).await;
    ann.hears("Looking for salt.").await.hears("Looking for tea.").await.hears("Found tea.").await;
    assert_eq!(stored(&a.bot, ann.chat()).await, None);
}

#[tokio::test]
async fn c9_after_a_wait_whose_end_was_cut_what_is_said_to_the_answer_is_heard() {
    steps! { enum One { City } }
    const CITY: FlowId<()> = FlowId::new("city");
    let (stuck, runs) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicU32::new(0)));
    let make = |bot: BotBuilder| {
        let (stuck, runs) = (stuck.clone(), runs.clone());
        let city = async move |_: One, c: &mut Convo<()>| {
            match c.ask("City?").within(Duration::from_secs(60)).await? {
                Some(city) => c.say(format!("To {city}.")).await?,
                None => {
                    c.say("Later, then.").await?;
                    runs.fetch_add(1, Ordering::SeqCst);
                    stuck.acquire().await?.forget();
                }
            }
            c.end()
        };
        bot.flow(Flow::new(CITY, city).persistent())
            .on("go", async |ctx| Ok(ctx.enter(CITY, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    let ann = b.provider.user("ann");
    a.provider.user("ann").says("go").await.hears("City?").await;
    bots.pass(Duration::from_secs(61)).await;
    until("its time is over", || runs.load(Ordering::SeqCst) == 1).await;
    bots.pass(Duration::from_secs(1)).await;
    ann.hears("Later, then.").await;
    bots.kill(a).await;
    // It still waits by its checkpoint.
    ann.says("Graz").await.hears("To Graz.").await;
    assert_eq!(stored(&b.bot, ann.chat()).await, None);
}
