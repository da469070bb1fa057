//! Turns and conversations: who may speak, what is kept, what is cut.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use botmesh::bot::{
    Bot, BotBuilder, Convo, Event, Flow, FlowId, HandoverOutcome, Interruption, Next, Result, Route,
};
use botmesh::coordinator::LostReason;
use botmesh::steps;
use botmesh::store::{Authority, Consistency, Expect, Op, RowKey, Store, Table};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::support::{Bots, next_event, plant, until};

steps! { enum At { Two, Rest } }

/// Two questions in one step, then one more.
const TALK: FlowId<Vec<String>> = FlowId::new("talk");

async fn talk(at: At, c: &mut Convo<Vec<String>>) -> Result<Next<At>> {
    match at {
        At::Two => {
            c.say("hello").await?;
            let first = c.ask("first?").await?;
            c.say(format!("{first}, yes")).await?;
            let second = c.ask("second?").await?;
            c.state.extend([first, second]);
            c.next()
        }
        At::Rest => {
            let third = c.ask("third?").await?;
            c.state.push(third);
            c.say(c.state.join("+")).await?;
            c.end()
        }
    }
}

fn talking(bot: BotBuilder) -> BotBuilder {
    bot.flow(Flow::new(TALK, talk).persistent())
        .on("talk", async |ctx| Ok(ctx.enter(TALK, Vec::new()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
}

fn forgetting(bot: BotBuilder) -> BotBuilder {
    bot.flow(Flow::new(TALK, talk))
        .on("talk", async |ctx| Ok(ctx.enter(TALK, Vec::new()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
}

#[tokio::test]
async fn c1_parked_on_a_later_question_the_step_runs_again_from_its_start() {
    let mut bots = Bots::new();
    let a = bots.start(talking).await;
    let b = bots.start(talking).await;
    let ann = a.provider.user("ann");
    ann.says("talk").await.hears("hello").await.hears("first?").await;
    ann.says("1").await.hears("1, yes").await.hears("second?").await;
    bots.kill(a).await;
    // The message that wakes the step is not an answer: its first question was answered in memory
    // that is gone, so it is asked again, with all that is said before it.
    let ann = b.provider.user("ann");
    ann.says("2").await.hears("hello").await.hears("first?").await;
    ann.says("one").await.hears("one, yes").await.hears("second?").await;
    ann.says("two").await.hears("third?").await;
    ann.says("three").await.hears("one+two+three").await;
}

#[tokio::test]
async fn c1_parked_on_the_first_question_nothing_before_it_is_said_again() {
    let mut bots = Bots::new();
    let a = bots.start(talking).await;
    let b = bots.start(talking).await;
    a.provider.user("ann").says("talk").await.hears("hello").await.hears("first?").await;
    bots.kill(a).await;
    b.provider.user("ann").says("1").await.hears("1, yes").await.hears("second?").await;
}

#[tokio::test]
async fn c2_memory_of_another_holder_is_dropped_without_a_checkpoint_too() {
    let mut bots = Bots::new();
    let a = bots.start(forgetting).await;
    let b = bots.start(forgetting).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("talk").await.hears("hello").await.hears("first?").await;
    // Not persistent: at another replica it is an ordinary message, and it ends the copy at `a`.
    at_b.says("1").await.hears("echo: 1").await;
    at_a.says("1").await.hears("echo: 1").await;
}

#[tokio::test]
async fn c3_a_checkpoint_written_by_another_supersedes_the_conversation() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let entered = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let (gate, entered) = (gate.clone(), entered.clone());
        bot.flow(Flow::new(TALK, talk).persistent()).on("slow", async move |ctx| {
            entered.fetch_add(1, Ordering::SeqCst);
            gate.acquire().await?.forget();
            Ok(ctx.enter(TALK, Vec::new()).await?)
        })
    };
    let a = bots.start(make).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("slow").await;
    until("the handler runs", || entered.load(Ordering::SeqCst) == 1).await;
    // Somebody writes the chat's checkpoint behind the holder's back.
    let store = a.bot.store();
    let row = RowKey::new(Table::Checkpoint, ann.chat().to_string());
    let put =
        Op::Put { row: row.clone(), value: b"theirs".to_vec(), expect: Expect::Any, ttl_ms: None };
    store.commit(Authority::Nobody, vec![put]).await.unwrap();
    gate.add_permits(1);
    let reason = next_event(&mut events, |event| match event {
        Event::LeaseLost { key, reason } if *key == ann.chat().to_string() => Some(*reason),
        _ => None,
    });
    assert_eq!(reason.await, LostReason::Superseded);
    // Nothing of the refused turn was written or said; theirs is there.
    let found = store.read(&row, Consistency::Linearizable).await.unwrap().unwrap();
    assert_eq!(found.value, b"theirs");
    assert_eq!(ann.heard(), []);
    // The message was not acknowledged, so it comes again. Their row does not decode: it is handed
    // over as such, cleared, and the message routes.
    gate.add_permits(1);
    let outcome = next_event(&mut events, |event| match event {
        Event::Handover { outcome, .. } => Some(*outcome),
        _ => None,
    });
    assert_eq!(outcome.await, HandoverOutcome::Dropped(Interruption::Undecodable));
    ann.hears("hello").await.hears("first?").await;
}

#[tokio::test]
async fn c5_a_persistent_flow_is_checkpointed_with_its_first_question() {
    let mut bots = Bots::new();
    let a = bots.start(talking).await;
    let ann = a.provider.user("ann");
    ann.says("talk").await.hears("hello").await;
    let row = RowKey::new(Table::Checkpoint, ann.chat().to_string());
    let found = a.bot.store().read(&row, Consistency::Linearizable).await.unwrap();
    let value: serde_json::Value = serde_json::from_slice(&found.unwrap().value).unwrap();
    assert_eq!(value["flow"], "talk");
    assert_eq!(value["step"], "Two");
    assert_eq!(value["waits"]["question"], 0);
    // Its end clears it.
    for text in ["1", "2", "3"] {
        ann.says(text).await;
    }
    while ann.hears_any().await.text != "1+2+3" {}
    let gone = a.bot.store().read(&row, Consistency::Linearizable).await.unwrap();
    assert_eq!(gone, None);
}

#[tokio::test]
async fn c10_a_cut_step_says_nothing_more() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let runs = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let (gate, runs) = (gate.clone(), runs.clone());
        bot.on("work", async move |ctx| {
            let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
            gate.acquire().await?.forget();
            ctx.reply(format!("done in run {run}")).await?;
            Ok(())
        })
    };
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    let ann = a.provider.user("ann");
    ann.says("work").await;
    until("it runs at a", || runs.load(Ordering::SeqCst) == 1).await;
    // `a` loses its lease in the middle of the work. The message goes to `b`.
    let mut events = a.bot.events();
    bots.kill(a).await;
    until("it runs at b", || runs.load(Ordering::SeqCst) == 2).await;
    let lost = next_event(&mut events, |event| match event {
        Event::LeaseLost { key, .. } if key == "x:ann" => Some(()),
        _ => None,
    });
    lost.await;
    gate.add_permits(2);
    b.provider.user("ann").hears("done in run 2").await;
    assert_eq!(ann.heard().len(), 1);
}

#[tokio::test]
async fn b3_a_turn_is_held_across_goto_until_the_conversation_waits() {
    steps! { enum Hop { Start, Over, Ask } }
    const HOPS: FlowId<u32> = FlowId::new("hops");
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let entered = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let (gate, entered) = (gate.clone(), entered.clone());
        let hops = async move |at: Hop, c: &mut Convo<u32>| match at {
            Hop::Start => c.goto(Hop::Over),
            Hop::Over => {
                entered.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await?.forget();
                c.goto(Hop::Ask)
            }
            Hop::Ask => {
                let answer = c.ask("well?").await?;
                c.say(format!("you said {answer}")).await?;
                c.end()
            }
        };
        bot.flow(Flow::new(HOPS, hops).persistent())
            .on("go", async |ctx| Ok(ctx.enter(HOPS, 0).await?))
            .on(Route::Any, async |ctx| Ok(ctx.reply("routed").await?))
    };
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    a.provider.user("ann").says("go").await;
    until("the step in the middle runs", || entered.load(Ordering::SeqCst) == 1).await;
    // The next message arrives at the other replica in the middle of the jump: it must wait, and
    // then be the answer.
    let ann = b.provider.user("ann");
    ann.says("this").await;
    assert_eq!(ann.heard(), []);
    gate.add_permits(1);
    ann.hears("well?").await.hears("you said this").await;
}

#[tokio::test]
async fn b5_settle_cuts_a_long_step_and_keeps_its_checkpoint() {
    steps! { enum Long { Ask, Work } }
    const LONG: FlowId<String> = FlowId::new("long");
    let mut bots = Bots::new();
    let runs = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let runs = runs.clone();
        let long = async move |at: Long, c: &mut Convo<String>| match at {
            Long::Ask => {
                c.state = c.ask("what?").await?;
                // The first run never ends by itself.
                if runs.fetch_add(1, Ordering::SeqCst) == 0 {
                    std::future::pending::<()>().await;
                }
                c.next()
            }
            Long::Work => {
                c.say(format!("worked on {}", c.state)).await?;
                c.end()
            }
        };
        bot.flow(Flow::new(LONG, long).persistent())
            .on("long", async |ctx| Ok(ctx.enter(LONG, String::new()).await?))
    };
    let a = bots.start_with(&make, |c| c.settle(Duration::from_secs(5))).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("long").await.hears("what?").await.says("this").await;
    until("the step runs", || runs.load(Ordering::SeqCst) == 1).await;
    // Past `settle`, within the lease, which is renewed meanwhile.
    bots.pass(Duration::from_secs(6)).await;
    let reason = next_event(&mut events, |event| match event {
        Event::LeaseLost { key, reason } if key == "x:ann" => Some(*reason),
        _ => None,
    });
    assert_eq!(reason.await, LostReason::Settled);
    // The message comes again and is the answer to the same question.
    ann.hears("worked on this").await;
    assert_eq!(ann.heard().len(), 2);
}

#[derive(Default, Serialize, Deserialize)]
struct Profile {
    visits: u32,
}

#[tokio::test]
async fn c10_user_state_is_changed_by_compare_and_set_from_all_sides() {
    let mut bots = Bots::new();
    let make = |bot: BotBuilder| {
        bot.on(Route::Any, async |ctx| {
            let profile = ctx.user::<Profile>();
            let visits = profile.update(|p| {
                p.visits += 1;
                p.visits
            });
            let visits = visits.await?;
            ctx.reply(format!("visit {visits}")).await?;
            Ok(())
        })
    };
    let a = bots.start(make).await;
    let b = bots.start(make).await;
    // One person in many groups at once, at two replicas.
    for n in 0..20 {
        let replica = if n % 2 == 0 { &a } else { &b };
        replica.provider.participant(&format!("group{n}"), "ann").says("hi").await;
    }
    let mut seen = Vec::new();
    for n in 0..20 {
        seen.push(a.provider.participant(&format!("group{n}"), "ann").hears_any().await.text);
    }
    seen.sort_by_key(|text| text["visit ".len()..].parse::<u32>().unwrap());
    let expected: Vec<String> = (1..=20).map(|n| format!("visit {n}")).collect();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn h2_a_bot_that_cannot_be_built_says_everything_that_is_wrong() {
    let flow = || Flow::new(TALK, talk);
    let error = Bot::builder()
        .flow(flow())
        .flow(flow())
        .on("a", async |_| Ok(()))
        .on("a", async |_| Ok(()))
        .build()
        .await
        .unwrap_err();
    let text = error.to_string();
    for fault in ["no provider", "two flows are named \"talk\"", "two handlers for \"a\""] {
        assert!(text.contains(fault), "{text:?} lacks {fault:?}");
    }
    assert_eq!(error.faults.len(), 3);
}

#[tokio::test]
async fn c12_an_answer_to_a_question_that_is_gone_answers_no_other_one() {
    steps! { enum Buy { Confirm, Pay } }
    const BUY: FlowId<()> = FlowId::new("buy");
    const CARD: FlowId<()> = FlowId::new("card");
    async fn pay(c: &mut Convo<()>) -> Result<Next<Buy>> {
        let card = c.ask("Card number?").await?;
        c.say(format!("Paid with {card}.")).await?;
        c.end()
    }
    let old = async |at: Buy, c: &mut Convo<()>| match at {
        Buy::Confirm => {
            c.ask("Sure?").await?;
            c.next()
        }
        Buy::Pay => pay(c).await,
    };
    let shorter = async |at: Buy, c: &mut Convo<()>| match at {
        Buy::Confirm => {
            c.say("No need to be sure.").await?;
            c.next()
        }
        Buy::Pay => pay(c).await,
    };
    let switching = async |_: Buy, c: &mut Convo<()>| c.switch(CARD, ());
    let card = async |_: Buy, c: &mut Convo<()>| pay(c).await;
    let with = move |bot: BotBuilder, flow: Flow<()>| {
        bot.flow(flow.persistent())
            .flow(Flow::new(CARD, card).persistent())
            .on("buy", async |ctx| Ok(ctx.enter(BUY, ()).await?))
    };
    let new: [Box<dyn Fn(BotBuilder) -> BotBuilder>; 2] = [
        Box::new(move |bot| with(bot, Flow::new(BUY, shorter))),
        Box::new(move |bot| with(bot, Flow::new(BUY, switching))),
    ];
    for new in new {
        let mut bots = Bots::new();
        let a = bots.start(|bot| with(bot, Flow::new(BUY, old))).await;
        let b = bots.start(new).await;
        a.provider.user("ann").says("buy").await.hears("Sure?").await;
        let ann = b.provider.user("ann");
        ann.says("yes").await.hears("Card number?").await;
        ann.says("4711").await.hears("Paid with 4711.").await;
        // Of an answer that was kept and the message that woke it, the second goes on.
        let bob = b.provider.user("bob");
        plant(
            &b.bot,
            &bob,
            r#"{"format":1,"flow":"buy","fingerprint":"","conversation":"m1.7","step":"Confirm",
                "visit":1,"state":null,"sends":1,"answer":{"sends":1,"message":{"id":"m2",
                "chat":"x:bob","text":"yes"}}}"#,
        )
        .await;
        bob.says("4711").await.hears("Card number?").await.hears("Paid with 4711.").await;
    }
}
