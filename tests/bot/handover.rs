//! What becomes of a conversation when another replica takes its chat (SPEC C6, C7, C12).

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{
    BotBuilder, Convo, Coordination, Ctx, Durability, Fallback, Flow, FlowId, Flows, Handover,
    HandoverOutcome, Interrupted, Interruption, Next, Result, Route,
};
use botmesh::steps;
use botmesh::store::{Consistency, RowKey, Store, Table};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::support::{Bots, Replica, next_outcome, plant, stored};

const MIN: Duration = Duration::from_secs(60);

steps! { enum At { Item, Count } }

#[derive(Default, Serialize, Deserialize)]
struct Order {
    item: String,
}

const ORDER: FlowId<Order> = FlowId::new("order");

async fn order(at: At, c: &mut Convo<Order>) -> Result<Next<At>> {
    match at {
        At::Item => {
            c.state.item = c.ask("What?").await?;
            c.next()
        }
        At::Count => {
            let count = c.ask("How many?").await?;
            c.say(format!("{count} × {}", c.state.item)).await?;
            c.end()
        }
    }
}

const TALK: FlowId<String> = FlowId::new("talk");

async fn talk(c: &mut Convo<String>) -> Result {
    let begun = c.state.clone();
    let first = c.ask(format!("{begun} first?")).await?;
    let second = c.ask("second?").await?;
    c.say(format!("{first}+{second}")).await?;
    Ok(())
}

/// An order that is not persistent, a conversation of one piece, and an echo.
fn plain(bot: BotBuilder) -> BotBuilder {
    with_order(bot, Flow::new(ORDER, order))
}

fn with_order(bot: BotBuilder, flow: Flow<Order>) -> BotBuilder {
    others(bot.flow(flow).on("order", async |ctx| Ok(ctx.enter(ORDER, Order::default()).await?)))
}

fn others(bot: BotBuilder) -> BotBuilder {
    bot.conversation(TALK, talk)
        .on("talk", async |ctx| Ok(ctx.enter(TALK, "the".to_owned()).await?))
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
}

fn forward(coordination: Coordination) -> Coordination {
    coordination.handover(Handover { flows: Flows::Forward, ..Handover::default() })
}

fn falls(fallback: Fallback) -> impl Fn(Coordination) -> Coordination {
    move |coordination| {
        let fallback = fallback.clone();
        coordination.handover(Handover { flows: Flows::Forward, fallback, ..Handover::default() })
    }
}

/// How a replica goes away in the middle of a conversation.
#[derive(Clone, Copy, Debug)]
enum Away {
    /// It dies.
    Crash,
    /// It is stopped for a deploy.
    Stop,
    /// It stands still for longer than its lease, like all the others.
    Freeze,
    /// It lives, and the next message reaches another.
    Lives,
}

const AWAY: [Away; 4] = [Away::Crash, Away::Stop, Away::Freeze, Away::Lives];

impl Away {
    async fn go(self, bots: &Bots, replica: Replica) -> Option<Replica> {
        match self {
            Self::Crash => bots.kill(replica).await,
            Self::Stop => replica.bot.stop().await.unwrap(),
            Self::Freeze => {
                bots.clock.advance(super::support::PAST_LEASE);
                bots.pass(Duration::from_secs(2)).await;
                return Some(replica);
            }
            Self::Lives => return Some(replica),
        }
        None
    }
}

#[tokio::test]
async fn c6_what_is_persistent_or_forwarded_continues_however_its_replica_went_away() {
    for away in AWAY {
        for persistent in [true, false] {
            for durability in [Durability::On, Durability::Off] {
                let make = |bot: BotBuilder| {
                    let flow = Flow::new(ORDER, order);
                    with_order(bot, if persistent { flow.persistent() } else { flow })
                };
                let set = |c: Coordination| forward(c).durability(durability);
                let mut bots = Bots::new();
                let a = bots.start_with(make, set).await;
                let b = bots.start_with(make, set).await;
                let mut events = b.bot.events();
                a.provider.user("ann").says("order").await.hears("What?").await;
                let a = away.go(&bots, a).await;
                let ann = b.provider.user("ann");
                ann.says("tea").await.hears("How many?").await;
                assert_eq!(next_outcome(&mut events).await, HandoverOutcome::Continued);
                // And back again, where there is still somebody to go back to.
                let last = a.as_ref().unwrap_or(&b).provider.user("ann");
                last.says("3").await.hears("3 × tea").await;
                let told = format!("{away:?}, persistent {persistent}, {durability:?}");
                assert_eq!(ann.heard_texts(), ["What?", "How many?", "3 × tea"], "{told}");
                assert_eq!(stored(&b.bot, ann.chat()).await, None, "{told}");
            }
        }
    }
}

#[tokio::test]
async fn c6_a_forwarded_checkpoint_ends_with_its_time_and_not_before_its_wait() {
    let mut bots = Bots::new();
    let a = bots.start_with(plain, forward).await;
    let b = bots.start_with(plain, forward).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    // Five minutes where nothing else is said, from the last write on.
    at_a.says("order").await.hears("What?").await;
    bots.pass(4 * MIN).await;
    at_b.says("tea").await.hears("How many?").await;
    bots.pass(4 * MIN).await;
    at_a.says("3").await.hears("3 × tea").await;
    at_a.says("order").await.hears("What?").await;
    bots.pass(5 * MIN).await;
    at_b.says("tea").await.hears("echo: tea").await;
    // Where it is still in memory, and nobody else had the chat, it goes on.
    let bob = a.provider.user("bob");
    bob.says("order").await.hears("What?").await;
    bots.pass(10 * MIN).await;
    bob.says("tea").await.hears("How many?").await;

    // A wait of its own that lasts longer keeps it longer.
    let patient = async |at: At, c: &mut Convo<Order>| match at {
        At::Item => {
            c.state.item = c.ask("What?").within(20 * MIN).await?.unwrap_or_default();
            c.next()
        }
        At::Count => order(at, c).await,
    };
    let make = |bot: BotBuilder| with_order(bot, Flow::new(ORDER, patient));
    let short = |c: Coordination| {
        let ttl = Some(MIN);
        c.handover(Handover { flows: Flows::Forward, ttl, ..Handover::default() })
    };
    let c = bots.start_with(make, short).await;
    let d = bots.start_with(make, short).await;
    c.provider.user("cid").says("order").await.hears("What?").await;
    bots.pass(15 * MIN).await;
    let cid = d.provider.user("cid");
    cid.says("tea").await.hears("How many?").await;
    bots.pass(2 * MIN).await;
    c.provider.user("cid").says("3").await.hears("echo: 3").await;
}

#[tokio::test]
async fn c6_a_replica_that_does_not_forward_resumes_what_another_forwarded_and_clears_it() {
    let mut bots = Bots::new();
    let a = bots.start_with(plain, forward).await;
    let b = bots.start(plain).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("order").await.hears("What?").await;
    at_b.says("tea").await.hears("How many?").await;
    // Now only a note says that it is in b's memory.
    assert_eq!(stored(&b.bot, at_b.chat()).await.unwrap()["stub"], "not_forwarded");
    at_b.says("3").await.hears("3 × tea").await;
    assert_eq!(stored(&b.bot, at_b.chat()).await, None);
}

type Make = Box<dyn Fn(BotBuilder) -> BotBuilder>;

/// The same order in another release.
fn other_releases() -> Vec<(&'static str, Make)> {
    #[derive(Default, Serialize, Deserialize)]
    struct Wider {
        item: String,
        #[serde(default)]
        size: u8,
    }
    const WIDER: FlowId<Wider> = FlowId::new("order");
    steps! { enum Fewer { Item } }
    steps! { enum Turned { Count, Item } }
    let wider = async |_: At, c: &mut Convo<Wider>| c.end();
    let fewer = async |_: Fewer, c: &mut Convo<Order>| c.end();
    let turned = async |_: Turned, c: &mut Convo<Order>| c.end();
    vec![
        ("a field more", Box::new(move |bot| others(bot.flow(Flow::new(WIDER, wider))))),
        ("a step fewer", Box::new(move |bot| with_order(bot, Flow::new(ORDER, fewer)))),
        ("another order", Box::new(move |bot| with_order(bot, Flow::new(ORDER, turned)))),
        ("a version", Box::new(|bot| with_order(bot, Flow::new(ORDER, order).version(2)))),
        ("no such flow", Box::new(others)),
    ]
}

#[tokio::test]
async fn c6_a_changed_flow_never_resumes_at_the_wrong_step() {
    for (what, release) in other_releases() {
        let mut bots = Bots::new();
        let a = bots.start_with(plain, forward).await;
        let b = bots.start_with(release, forward).await;
        let mut events = b.bot.events();
        a.provider.user("ann").says("order").await.hears("What?").await;
        b.provider.user("ann").says("tea").await.hears("echo: tea").await;
        let outcome = next_outcome(&mut events).await;
        assert_eq!(outcome, HandoverOutcome::Dropped(Interruption::Changed), "{what}");
    }
}

#[tokio::test]
async fn case_h2_only_a_changed_text_changes_nothing() {
    let texts = async |at: At, c: &mut Convo<Order>| match at {
        At::Item => {
            c.state.item = c.ask("What would you like today?").await?;
            c.next()
        }
        At::Count => {
            let count = c.ask("How many pieces?").await?;
            c.say(format!("{count} pieces of {}", c.state.item)).await?;
            c.end()
        }
    };
    let mut bots = Bots::new();
    let a = bots.start_with(plain, forward).await;
    let new = |bot: BotBuilder| with_order(bot, Flow::new(ORDER, texts));
    let b = bots.start_with(new, forward).await;
    a.provider.user("ann").says("order").await.hears("What?").await;
    bots.kill(a).await;
    let ann = b.provider.user("ann");
    ann.says("tea").await.hears("How many pieces?").await;
    ann.says("3").await.hears("3 pieces of tea").await;
}

/// A state that serialises only while it is empty.
#[derive(Default)]
struct Opaque(Option<String>);

impl Serialize for Opaque {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            None => serializer.serialize_none(),
            Some(_) => Err(serde::ser::Error::custom("a connection cannot be stored")),
        }
    }
}

impl<'de> Deserialize<'de> for Opaque {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Ok(Self(Option::deserialize(from)?))
    }
}

#[tokio::test]
async fn c6_a_state_that_does_not_serialise_goes_on_in_memory_and_else_to_the_fallback() {
    const OPAQUE: FlowId<Opaque> = FlowId::new("opaque");
    let opaque = async |at: At, c: &mut Convo<Opaque>| match at {
        At::Item => {
            c.state.0 = Some(c.ask("What?").await?);
            c.next()
        }
        At::Count => {
            let count = c.ask("How many?").await?;
            c.say(format!("{count} × {}", c.state.0.clone().unwrap_or_default())).await?;
            c.end()
        }
    };
    let make = |bot: BotBuilder| {
        others(bot.flow(Flow::new(OPAQUE, opaque)))
            .on("opaque", async |ctx| Ok(ctx.enter(OPAQUE, Opaque::default()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start_with(make, falls(Fallback::Notify)).await;
    let b = bots.start_with(make, falls(Fallback::Notify)).await;
    let mut events = b.bot.events();
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("opaque").await.hears("What?").await.says("tea").await.hears("How many?").await;
    at_a.says("3").await.hears("3 × tea").await;
    at_a.says("opaque").await.hears("What?").await.says("tea").await.hears("How many?").await;
    at_b.says("3").await.hears("Our conversation was interrupted. Please start again.").await;
    let outcome = next_outcome(&mut events).await;
    assert_eq!(outcome, HandoverOutcome::Notified(Interruption::Unserialisable));
}

#[tokio::test]
async fn c7_a_conversation_of_one_piece_leaves_a_note_in_two_writes() {
    let mut bots = Bots::new();
    let a = bots.start(plain).await;
    let ann = a.provider.user("ann");
    let row = RowKey::new(Table::Checkpoint, ann.chat().to_string());
    let store = a.bot.store();
    let revision = async || {
        let row = store.read(&row, Consistency::Linearizable).await.unwrap();
        row.map(|row| row.revision)
    };
    assert_eq!(revision().await, None);
    ann.says("talk").await.hears("the first?").await;
    let written = revision().await;
    assert!(written.is_some(), "at its first wait");
    ann.says("1").await.hears("second?").await;
    assert_eq!(revision().await, written, "its next wait writes nothing");
    ann.says("2").await.hears("1+2").await;
    assert_eq!(revision().await, None, "its end clears it");
}

/// What each fallback says and leaves, at the replica that takes the chat.
#[tokio::test]
async fn c7_each_fallback_does_what_it_says_however_the_replica_went_away() {
    async fn migrated(lost: Interrupted, ctx: &mut Ctx) -> Result<bool> {
        if ctx.text() == "else" {
            return Ok(false);
        }
        let initial = lost.initial.as_ref().and_then(|state| state.as_str()).unwrap_or("?");
        ctx.reply(format!("{} began with {initial:?}", lost.name)).await?;
        Ok(true)
    }
    async fn entered(lost: Interrupted, ctx: &mut Ctx) -> Result<bool> {
        ctx.enter(TALK, format!("after {}, the", lost.name)).await?;
        Ok(false)
    }
    let notice = "Our conversation was interrupted. Please start again.";
    let why = Interruption::NotForwarded;
    let cases: [(Fallback, &str, &str, HandoverOutcome); 6] = [
        (Fallback::Drop, "1", "echo: 1", HandoverOutcome::Dropped(why)),
        (Fallback::Notify, "1", notice, HandoverOutcome::Notified(why)),
        (Fallback::Restart, "1", "the first?", HandoverOutcome::Reentered(why)),
        (
            Fallback::function(migrated),
            "1",
            "talk began with \"the\"",
            HandoverOutcome::Handled(why),
        ),
        (Fallback::function(migrated), "else", "echo: else", HandoverOutcome::Dropped(why)),
        (Fallback::function(entered), "1", "after talk, the first?", HandoverOutcome::Handled(why)),
    ];
    for (fallback, says, hears, outcome) in cases {
        for away in AWAY {
            let mut bots = Bots::new();
            let a = bots.start_with(plain, falls(fallback.clone())).await;
            let b = bots.start_with(plain, falls(fallback.clone())).await;
            let mut events = b.bot.events();
            a.provider.user("ann").says("talk").await.hears("the first?").await;
            let _a = away.go(&bots, a).await;
            let ann = b.provider.user("ann");
            ann.says(says).await.hears(hears).await;
            assert_eq!(next_outcome(&mut events).await, outcome, "{fallback:?}, {away:?}");
            // What began again is a conversation like any other; else there is none left.
            let again = hears.ends_with("first?");
            assert_eq!(stored(&b.bot, ann.chat()).await.is_some(), again);
            let next = if again { "second?" } else { "echo: x" };
            ann.says("x").await.hears(next).await;
        }
    }
}

#[tokio::test]
async fn c7_a_note_cancels_like_the_conversation_would_have() {
    let make = |bot: BotBuilder| {
        let talk = Flow::of_one_piece(TALK, talk).cancel_on("stop", "Stopped.");
        bot.flow(talk).on("talk", async |ctx| Ok(ctx.enter(TALK, "the".to_owned()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start_with(make, falls(Fallback::Notify)).await;
    let b = bots.start_with(make, falls(Fallback::Notify)).await;
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("talk").await.hears("the first?").await;
    at_b.says("stop").await.hears("Stopped.").await;
    assert_eq!(stored(&b.bot, at_b.chat()).await, None);
}

/// A row as the first release stored it, at the second question of a persistent order.
const OLD: &str = r#"{"format":1,"flow":"order","fingerprint":"1:Item,Count",
    "conversation":"m1.7","step":"Count","visit":2,"state":{"item":"tea"},"sends":1,
    "waits":{"question":0}}"#;

#[tokio::test]
async fn c12_a_stored_state_decodes_migrates_or_goes_to_the_fallback() {
    #[derive(Default, Serialize, Deserialize)]
    struct New {
        item: String,
        #[serde(default)]
        size: u8,
        items: Option<Vec<String>>,
    }
    const NEW: FlowId<New> = FlowId::new("order");
    #[derive(Serialize, Deserialize)]
    struct Many {
        items: Vec<String>,
    }
    const MANY: FlowId<Many> = FlowId::new("order");
    let new = async |_: At, c: &mut Convo<New>| {
        let count = c.ask("How many?").await?;
        c.say(format!("{count} × {} of size {}", c.state.item, c.state.size)).await?;
        c.end()
    };
    let many = async |_: At, c: &mut Convo<Many>| {
        let count = c.ask("How many?").await?;
        c.say(format!("{count} × {}", c.state.items.join(","))).await?;
        c.end()
    };
    let migrate =
        |old: serde_json::Value| Some(Many { items: vec![old.get("item")?.as_str()?.to_owned()] });
    let dropped = |why| Some(HandoverOutcome::Dropped(why));
    let cases: Vec<(Make, &str, &str, Option<HandoverOutcome>)> = vec![
        // A new field with a default decodes (case h7).
        (
            Box::new(move |bot| others(bot.flow(Flow::new(NEW, new).persistent()))),
            OLD,
            "3 × tea of size 0",
            Some(HandoverOutcome::Continued),
        ),
        (
            Box::new(move |bot| others(bot.flow(Flow::new(MANY, many).persistent()))),
            OLD,
            "echo: 3",
            dropped(Interruption::Undecodable),
        ),
        (
            Box::new(move |bot| {
                others(bot.flow(Flow::new(MANY, many).persistent().migrate(migrate)))
            }),
            OLD,
            "3 × tea",
            Some(HandoverOutcome::Continued),
        ),
        // Another version is migrated though it would decode, and else not continued.
        (
            Box::new(move |bot| {
                let flow = Flow::new(MANY, many).persistent().version(2);
                others(bot.flow(flow.migrate(migrate)))
            }),
            OLD,
            "3 × tea",
            Some(HandoverOutcome::Continued),
        ),
        // A migration that panics is one that makes nothing of it.
        (
            Box::new(move |bot| {
                let flow = Flow::new(MANY, many).persistent().version(2);
                others(bot.flow(flow.migrate(|_| panic!("no items"))))
            }),
            OLD,
            "echo: 3",
            dropped(Interruption::Undecodable),
        ),
        (
            Box::new(|bot| with_order(bot, Flow::new(ORDER, order).persistent().version(2))),
            OLD,
            "echo: 3",
            dropped(Interruption::Changed),
        ),
        // Rows that are no checkpoint at all.
        (Box::new(plain), "{}", "echo: 3", dropped(Interruption::Undecodable)),
        (Box::new(plain), "\u{0}\u{1}", "echo: 3", dropped(Interruption::Undecodable)),
    ];
    for (n, (make, row, hears, outcome)) in cases.into_iter().enumerate() {
        let mut bots = Bots::new();
        let a = bots.start(make).await;
        let mut events = a.bot.events();
        let ann = a.provider.user("ann");
        plant(&a.bot, &ann, row).await;
        ann.says("3").await.hears(hears).await;
        assert_eq!(Some(next_outcome(&mut events).await), outcome, "case {n}");
        // No error loop: the row is gone, and the next message is an ordinary one.
        assert_eq!(stored(&a.bot, ann.chat()).await, None, "case {n}");
        ann.says("next").await.hears("echo: next").await;
    }
}

#[tokio::test]
async fn c12_a_persistent_flow_whose_steps_changed_goes_on_at_the_step_of_the_same_name() {
    steps! { enum More { Size, Count, Item } }
    let more = async |at: More, c: &mut Convo<Order>| match at {
        More::Count => {
            let count = c.ask("How many?").await?;
            c.say(format!("{count} × {}, in the middle", c.state.item)).await?;
            c.end()
        }
        More::Size | More::Item => c.end(),
    };
    steps! { enum Gone { Item } }
    let gone = async |_: Gone, c: &mut Convo<Order>| c.end();
    let mut bots = Bots::new();
    let a = bots.start(|bot| with_order(bot, Flow::new(ORDER, more).persistent())).await;
    let ann = a.provider.user("ann");
    plant(&a.bot, &ann, OLD).await;
    ann.says("3").await.hears("3 × tea, in the middle").await;
    let b = bots.start(|bot| with_order(bot, Flow::new(ORDER, gone).persistent())).await;
    let mut events = b.bot.events();
    let bob = b.provider.user("bob");
    plant(&b.bot, &bob, OLD).await;
    bob.says("3").await.hears("echo: 3").await;
    let outcome = next_outcome(&mut events).await;
    assert_eq!(outcome, HandoverOutcome::Dropped(Interruption::Changed));
}

#[tokio::test]
async fn c5_without_durability_too_a_flow_is_stored_before_its_first_question() {
    let seen: Arc<Mutex<Vec<serde_json::Value>>> = Arc::default();
    let mut bots = Bots::new();
    let hub = bots.hub.clone();
    let make = |bot: BotBuilder| {
        let seen = seen.clone();
        let looks = async move |_: At, c: &mut Convo<Order>| {
            let store = hub.store(botmesh::testing::MemoryHub::default_prefix());
            let row = RowKey::new(Table::Checkpoint, c.chat()?.to_string());
            if let Some(row) = store.read(&row, Consistency::Linearizable).await? {
                seen.lock().push(serde_json::from_slice(&row.value)?);
            }
            c.ask("What?").await?;
            c.end()
        };
        with_order(bot, Flow::new(ORDER, looks).persistent())
    };
    let a = bots.start_with(make, |c| c.durability(Durability::Off)).await;
    a.provider.user("ann").says("order").await.hears("What?").await;
    let seen = seen.lock().clone();
    assert_eq!(seen.len(), 1, "it was there before the step ran");
    assert_eq!((&seen[0]["step"], seen[0].get("waits")), (&"Item".into(), None));
}
