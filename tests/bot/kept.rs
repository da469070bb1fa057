//! A step cut short keeps its answer, and what no checkpoint holds comes again (SPEC C8, C9, C10).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use botmesh::bot::{
    BotBuilder, Convo, Coordination, Durability, Event, Flow, FlowId, Flows, Handover,
    HandoverOutcome, Pass, Route, RuntimeError,
};
use botmesh::steps;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::Semaphore;

use super::support::{Bots, Replica, next_event, next_outcome, stored, until};

steps! { enum At { Work, Last } }
const WORK: FlowId<Vec<String>> = FlowId::new("work");

/// A step with a question, long work, and a second question. The work of the first `stuck` runs
/// never ends.
#[derive(Clone)]
struct Long {
    stuck: Arc<Semaphore>,
    runs: Arc<AtomicU32>,
    hooks: Arc<AtomicU32>,
}

impl Long {
    fn new() -> Self {
        let stuck = Arc::new(Semaphore::new(0));
        Self { stuck, runs: Arc::default(), hooks: Arc::default() }
    }

    fn bot(&self, bot: BotBuilder, persistent: bool) -> BotBuilder {
        let Self { stuck, runs, .. } = self.clone();
        let work = async move |at: At, c: &mut Convo<Vec<String>>| match at {
            At::Work => {
                let first = c.ask("first?").await?;
                runs.fetch_add(1, Ordering::SeqCst);
                stuck.acquire().await?.forget();
                let second = c.ask("second?").await?;
                c.state.extend([first, second]);
                c.next()
            }
            At::Last => {
                let third = c.ask("third?").await?;
                c.say(format!("{}+{third}", c.state.join("+"))).await?;
                c.end()
            }
        };
        let flow = Flow::new(WORK, work);
        bot.flow(if persistent { flow.persistent() } else { flow })
            .on("work", async |ctx| Ok(ctx.enter(WORK, Vec::new()).await?))
            .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
    }

    fn hooked(&self, bot: BotBuilder) -> BotBuilder {
        let hooks = self.hooks.clone();
        self.bot(bot, true).before_message(async move |ctx| {
            if let Some(text) = ctx.text().strip_prefix("voice:").map(str::to_owned) {
                let run = hooks.fetch_add(1, Ordering::SeqCst) + 1;
                ctx.set_text(format!("{text} ({run})"));
            }
            Ok(Pass::On)
        })
    }

    async fn stuck(&self, runs: u32) {
        until("the work runs", || self.runs.load(Ordering::SeqCst) == runs).await;
    }

    fn go(&self) {
        self.stuck.add_permits(100);
    }
}

/// How the step is cut.
#[derive(Clone, Copy, Debug)]
enum Cut {
    Crash,
    Freeze,
    Settle,
}

const CUTS: [Cut; 3] = [Cut::Crash, Cut::Freeze, Cut::Settle];

impl Cut {
    /// Cuts it, after as much time as an early checkpoint needs.
    async fn cut(self, bots: &Bots, replica: Replica) -> Option<Replica> {
        bots.pass(Duration::from_secs(1)).await;
        match self {
            Self::Crash => {
                bots.kill(replica).await;
                return None;
            }
            Self::Freeze => bots.clock.advance(super::support::PAST_LEASE),
            Self::Settle => bots.pass(Duration::from_secs(6)).await,
        }
        bots.pass(Duration::from_secs(2)).await;
        Some(replica)
    }
}

fn set(durability: Durability, max_answer_bytes: usize) -> impl Fn(Coordination) -> Coordination {
    move |coordination| {
        let flows = Flows::Forward;
        let handover = Handover { flows, max_answer_bytes, ..Handover::default() };
        coordination.durability(durability).settle(Duration::from_secs(5)).handover(handover)
    }
}

#[tokio::test]
async fn c8_without_durability_the_checkpoint_keeps_the_answer_of_a_step_cut_short() {
    for cut in CUTS {
        for persistent in [true, false] {
            let long = Long::new();
            let mut bots = Bots::new();
            let off = set(Durability::Off, 16 * 1024);
            let a = bots.start_with(|bot| long.bot(bot, persistent), &off).await;
            let b = bots.start_with(|bot| long.bot(bot, persistent), &off).await;
            let mut events = b.bot.events();
            let at_a = a.provider.user("ann");
            at_a.says("work").await.hears("first?").await.says("1").await;
            long.stuck(1).await;
            let kept = async || stored(&b.bot, at_a.chat()).await.unwrap();
            assert_eq!(kept().await["answer"]["message"]["text"], "1", "before the step goes on");
            let _a = cut.cut(&bots, a).await;
            assert_eq!(kept().await["answer"]["message"]["text"], "1", "{cut:?}");
            long.go();
            // The next message wakes it: the kept answer is not asked for again, and the message is
            // for the next question.
            let ann = b.provider.user("ann");
            ann.says("2").await.hears("second?").await.hears("third?").await;
            assert_eq!(next_outcome(&mut events).await, HandoverOutcome::Continued);
            ann.says("3").await.hears("1+2+3").await;
            let expected = ["first?", "second?", "third?", "1+2+3"];
            assert_eq!(ann.heard_texts(), expected, "{cut:?}, persistent {persistent}");
        }
    }
}

#[tokio::test]
async fn c8_with_durability_the_answer_itself_comes_again_and_nobody_has_to_wake_the_step() {
    for cut in CUTS {
        for persistent in [true, false] {
            let long = Long::new();
            let mut bots = Bots::new();
            let on = set(Durability::On, 0);
            let a = bots.start_with(|bot| long.bot(bot, persistent), &on).await;
            let b = bots.start_with(|bot| long.bot(bot, persistent), &on).await;
            let ann = b.provider.user("ann");
            a.provider.user("ann").says("work").await.hears("first?").await.says("1").await;
            long.stuck(1).await;
            bots.pass(Duration::from_secs(1)).await;
            // It points at the journaled message: nothing is embedded, however small.
            let kept = stored(&b.bot, ann.chat()).await.unwrap();
            assert!(kept["ticket"].is_u64() && kept["answer"].is_object(), "{kept}");
            assert!(kept["answer"].get("message").is_none(), "{kept}");
            let a = cut.cut(&bots, a).await;
            long.go();
            ann.hears("second?").await;
            // Where it came again: the answer to a later question in memory is good only there.
            let there = a.as_ref().filter(|a| a.bot.chats_in_memory() > 0).unwrap_or(&b);
            there.provider.user("ann").says("2").await.hears("third?").await;
            ann.says("3").await.hears("1+2+3").await;
            let expected = ["first?", "second?", "third?", "1+2+3"];
            assert_eq!(ann.heard_texts(), expected, "{cut:?}, persistent {persistent}");
            assert_eq!(b.bot.store().dead_letters().await.unwrap(), []);
        }
    }
}

#[tokio::test]
async fn c8_what_hooks_made_of_the_answer_travels_and_they_do_not_run_again() {
    for durability in [Durability::On, Durability::Off] {
        let long = Long::new();
        let mut bots = Bots::new();
        let how = set(durability, 16 * 1024);
        let a = bots.start_with(|bot| long.hooked(bot), &how).await;
        let b = bots.start_with(|bot| long.hooked(bot), &how).await;
        let ann = b.provider.user("ann");
        a.provider.user("ann").says("work").await.hears("first?").await.says("voice:1").await;
        long.stuck(1).await;
        bots.kill(a).await;
        long.go();
        if durability == Durability::On {
            ann.hears("second?").await.says("2").await;
        } else {
            ann.says("2").await.hears("second?").await;
        }
        ann.hears("third?").await.says("3").await.hears("1 (1)+2+3").await;
        assert_eq!(long.hooks.load(Ordering::SeqCst), 1, "{durability:?}");
    }
}

#[tokio::test]
async fn c8_what_hooks_made_of_the_answer_is_made_again_where_it_was_too_large_to_keep() {
    let long = Long::new();
    let mut bots = Bots::new();
    let how = set(Durability::On, 0);
    let a = bots.start_with(|bot| long.hooked(bot), &how).await;
    let b = bots.start_with(|bot| long.hooked(bot), &how).await;
    let ann = b.provider.user("ann");
    a.provider.user("ann").says("work").await.hears("first?").await.says("voice:1").await;
    long.stuck(1).await;
    let kept = stored(&b.bot, ann.chat()).await.unwrap();
    assert_eq!((kept["answer"].get("message"), &kept["answer"]["unkept"]), (None, &true.into()));
    bots.kill(a).await;
    long.go();
    ann.hears("second?").await.says("2").await.hears("third?").await.says("3").await;
    ann.hears("1 (2)+2+3").await;
}

#[tokio::test]
async fn c8_an_answer_too_large_to_embed_is_asked_for_again() {
    let long = Long::new();
    let mut bots = Bots::new();
    let off = set(Durability::Off, 100);
    let a = bots.start_with(|bot| long.bot(bot, true), &off).await;
    let b = bots.start_with(|bot| long.bot(bot, true), &off).await;
    let mut events = b.bot.events();
    a.provider.user("ann").says("work").await.hears("first?").await.says(&"1".repeat(200)).await;
    long.stuck(1).await;
    bots.kill(a).await;
    long.go();
    let ann = b.provider.user("ann");
    ann.says("hello?").await.hears("first?").await;
    assert_eq!(next_outcome(&mut events).await, HandoverOutcome::Restarted);
    ann.says("1").await.hears("second?").await.says("2").await.hears("third?").await;
    ann.says("3").await.hears("1+2+3").await;
}

#[tokio::test]
async fn c9_a_later_answer_that_no_checkpoint_holds_comes_again_and_the_step_restarts() {
    steps! { enum One { Both } }
    const BOTH: FlowId<()> = FlowId::new("both");
    let (stuck, runs) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicU32::new(0)));
    let make = |bot: BotBuilder| {
        let (stuck, runs) = (stuck.clone(), runs.clone());
        let both = async move |_: One, c: &mut Convo<()>| {
            let first = c.ask("first?").await?;
            let second = c.ask("second?").await?;
            runs.fetch_add(1, Ordering::SeqCst);
            stuck.acquire().await?.forget();
            c.say(format!("{first}+{second}")).await?;
            c.end()
        };
        bot.flow(Flow::new(BOTH, both).persistent())
            .on("go", async |ctx| Ok(ctx.enter(BOTH, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(&make).await;
    let b = bots.start(&make).await;
    let mut events = b.bot.events();
    let ann = b.provider.user("ann");
    let at_a = a.provider.user("ann");
    at_a.says("go").await.hears("first?").await.says("1").await.hears("second?").await;
    at_a.says("2").await;
    until("it works on the second", || runs.load(Ordering::SeqCst) == 1).await;
    bots.pass(Duration::from_secs(1)).await;
    // The checkpoint is still that of the second question's wait.
    assert_eq!(stored(&b.bot, ann.chat()).await.unwrap()["waits"]["question"], 1);
    bots.kill(a).await;
    stuck.add_permits(10);
    // The answer, unacknowledged, comes again by itself and wakes the step, which asks anew.
    ann.hears("first?").await;
    assert_eq!(next_outcome(&mut events).await, HandoverOutcome::Restarted);
    ann.says("1").await.hears("second?").await.says("2").await.hears("1+2").await;
}

#[tokio::test]
async fn c9_a_step_that_is_always_cut_ends_as_a_dead_letter_and_the_chat_goes_on() {
    let long = Long::new();
    let mut bots = Bots::new();
    let on = set(Durability::On, 0);
    let a = bots.start_with(|bot| long.bot(bot, true), &on).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("work").await.hears("first?").await.says_as("poison", "1").await;
    for run in 1..=5 {
        long.stuck(run).await;
        bots.pass(Duration::from_secs(6)).await;
    }
    let dead = next_event(&mut events, |event| match event {
        Event::DeadLetter { id, .. } => Some(id.clone()),
        _ => None,
    });
    assert_eq!(dead.await, "poison");
    // The question stands: the next message is its answer.
    long.go();
    ann.says("one").await.hears("second?").await.says("2").await.hears("third?").await;
    ann.says("3").await.hears("one+2+3").await;
    assert_eq!(ann.heard_texts()[0..2], ["first?", "second?"]);
}

#[tokio::test]
async fn case_h4_a_step_that_fails_on_its_second_answer_restarts_alone() {
    steps! { enum Part { One, Two, Three } }
    const THREE: FlowId<String> = FlowId::new("three");
    let failures = Arc::new(AtomicU32::new(0));
    let make = |bot: BotBuilder| {
        let failures = failures.clone();
        let three = async move |at: Part, c: &mut Convo<String>| match at {
            Part::One => {
                c.state = c.ask("one?").await?;
                c.next()
            }
            Part::Two => {
                let answer = c.ask("two?").await?;
                c.state += &answer;
                if failures.fetch_add(1, Ordering::SeqCst) < 2 {
                    return Err("the shelf was empty".into());
                }
                c.next()
            }
            Part::Three => {
                let answer = c.ask("three?").await?;
                c.say(format!("{}{answer}", c.state)).await?;
                c.end()
            }
        };
        bot.flow(Flow::new(THREE, three).persistent())
            .on("go", async |ctx| Ok(ctx.enter(THREE, String::new()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(make).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("go").await.hears("one?").await.says("a").await.hears("two?").await.says("b").await;
    let failed = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => match &**error {
            RuntimeError::Step { step, attempt, .. } => Some((step.clone(), *attempt)),
            other => panic!("{other}"),
        },
        _ => None,
    });
    assert_eq!(failed.await, ("Two".to_owned(), 1));
    bots.pass(Duration::from_secs(2)).await;
    // It was tried again from the state at its entry, and asked nothing again.
    ann.hears("three?").await.says("c").await.hears("abc").await;
    assert_eq!(ann.heard_texts(), ["one?", "two?", "three?", "abc"]);
}

#[tokio::test]
async fn c8_a_kept_answer_that_fails_its_step_is_asked_for_again_and_not_fed_for_ever() {
    steps! { enum One { Ask } }
    const PICKY: FlowId<()> = FlowId::new("picky");
    let picky = async |_: One, c: &mut Convo<()>| {
        let answer = c.ask("well?").await?;
        // Long enough for the answer to be kept.
        tokio::task::yield_now().await;
        if answer == "bad" {
            return Err("it was bad".into());
        }
        c.say(format!("good: {answer}")).await?;
        c.end()
    };
    let make = |bot: BotBuilder| {
        bot.flow(Flow::new(PICKY, picky).persistent())
            .on("go", async |ctx| Ok(ctx.enter(PICKY, ()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start_with(make, set(Durability::Off, 16 * 1024)).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("go").await.hears("well?").await.says("bad").await;
    let failed = |event: &Event| matches!(event, Event::Error { .. }).then_some(());
    next_event(&mut events, failed).await;
    // Without durability the message does not come again; the step restarts with the next one.
    ann.says("hello?").await.hears("well?").await.says("fine").await.hears("good: fine").await;
    assert_eq!(stored(&a.bot, ann.chat()).await, None);
}

#[tokio::test]
async fn c6_steps_finished_in_the_same_turn_are_not_run_again_when_a_later_one_is_cut() {
    steps! { enum Chain { Ask, Mark, Work } }
    const CHAIN: FlowId<()> = FlowId::new("chain");
    let (stuck, marks, works) =
        (Arc::new(Semaphore::new(0)), Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let make = |bot: BotBuilder| {
        let (stuck, marks, works) = (stuck.clone(), marks.clone(), works.clone());
        let chain = async move |at: Chain, c: &mut Convo<()>| match at {
            Chain::Ask => {
                c.ask("go?").await?;
                c.next()
            }
            Chain::Mark => {
                marks.fetch_add(1, Ordering::SeqCst);
                c.next()
            }
            Chain::Work => {
                works.fetch_add(1, Ordering::SeqCst);
                stuck.acquire().await?.forget();
                c.say("done").await?;
                c.end()
            }
        };
        bot.flow(Flow::new(CHAIN, chain).persistent())
            .on("chain", async |ctx| Ok(ctx.enter(CHAIN, ()).await?))
    };
    for durability in [Durability::On, Durability::Off] {
        let how = set(durability, 16 * 1024);
        let mut bots = Bots::new();
        let (before, worked) = (marks.load(Ordering::SeqCst), works.load(Ordering::SeqCst));
        let a = bots.start_with(&make, &how).await;
        let b = bots.start_with(&make, &how).await;
        let ann = b.provider.user("ann");
        a.provider.user("ann").says("chain").await.hears("go?").await.says("yes").await;
        until("it works", || works.load(Ordering::SeqCst) == worked + 1).await;
        bots.pass(Duration::from_secs(1)).await;
        bots.kill(a).await;
        stuck.add_permits(1);
        if durability == Durability::Off {
            ann.says("hello?").await;
        }
        ann.hears("done").await;
        assert_eq!(marks.load(Ordering::SeqCst), before + 1, "{durability:?}");
        assert_eq!(ann.heard_texts(), ["go?", "done"], "{durability:?}");
    }
}

#[tokio::test]
async fn m3_a_state_over_the_limit_is_a_typed_error_and_the_chat_goes_on() {
    steps! { enum Two { First, Second } }
    const HUGE: FlowId<String> = FlowId::new("huge");
    let huge = async |at: Two, c: &mut Convo<String>| match at {
        Two::First => {
            let size: usize = c.ask("size?").parse("A number, please.").await?;
            c.state = "x".repeat(size);
            c.next()
        }
        Two::Second => {
            let answer = c.ask("well?").await?;
            c.say(format!("{answer} of {}", c.state.len())).await?;
            c.end()
        }
    };
    let make = |bot: BotBuilder| {
        bot.flow(Flow::new(HUGE, huge).persistent())
            .on("go", async |ctx| Ok(ctx.enter(HUGE, String::new()).await?))
    };
    let mut bots = Bots::new();
    let a = bots.start(make).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("go").await.hears("size?").await.says_as("big", "2000000").await;
    let error = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => Some(error.to_string()),
        _ => None,
    });
    let error = error.await;
    assert!(error.contains("x:ann") && error.contains("bytes of a value"), "{error}");
    let dead = next_event(&mut events, |event| match event {
        Event::DeadLetter { id, .. } => Some(id.clone()),
        _ => None,
    });
    assert_eq!(dead.await, "big");
    // What was stored before still stands, and nothing of the failed turn was said.
    ann.says("20").await.hears("well?").await.says("yes").await.hears("yes of 20").await;
    assert_eq!(ann.heard_texts(), ["size?", "well?", "yes of 20"]);
}

steps! { enum Six { A, B, C, D, E, F } }
const SIX: FlowId<Vec<String>> = FlowId::new("six");
const QUESTIONS: [&str; 6] = ["a?", "b?", "c?", "d?", "e?", "f?"];

/// Six questions: plain, timed, checked, and with work behind them.
async fn six(at: Six, c: &mut Convo<Vec<String>>) -> botmesh::bot::Result<botmesh::bot::Next<Six>> {
    let hour = Duration::from_secs(3600);
    let work = async || {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    };
    let question = QUESTIONS[at as usize];
    let answer = match at {
        Six::A | Six::E => c.ask(question).await?,
        Six::B => c.ask(question).within(hour).await?.unwrap_or_default(),
        Six::C => {
            let checked = c.ask(question).verify(async |_: &String| {
                tokio::task::yield_now().await;
                Ok::<(), String>(())
            });
            checked.await?
        }
        Six::D => {
            work().await;
            let answer = c.ask(question).await?;
            work().await;
            answer
        }
        Six::F => {
            let last = c.ask(question).await?;
            let all = c.state.join("");
            c.say(format!("{all}{last}")).await?;
            return c.end();
        }
    };
    c.state.push(answer);
    c.next()
}

/// Deaths, stops and freezes at any point of a step, while users answer at whichever replica:
/// nothing is lost, nothing is asked twice, and every summary is right.
#[tokio::test]
async fn c8_random_interruptions_leave_every_summary_right() {
    let make = |bot: BotBuilder| {
        bot.flow(Flow::new(SIX, six)).on("six", async |ctx| Ok(ctx.enter(SIX, Vec::new()).await?))
    };
    let how = |coordination: Coordination| {
        let ttl = Some(Duration::from_secs(24 * 3600));
        coordination.handover(Handover { flows: Flows::Forward, ttl, ..Handover::default() })
    };
    for seed in 0..12 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut bots = Bots::new();
        let mut replicas = Vec::new();
        for _ in 0..3 {
            replicas.push(bots.start_with(make, how).await);
        }
        let users: Vec<String> = (0..5).map(|n| format!("u{n}")).collect();
        for (said, text) in ["six", "1", "2", "3", "4", "5", "6"].into_iter().enumerate() {
            for user in &users {
                let at = random.random_range(0..replicas.len());
                let user = replicas[at].provider.user(user);
                while user.heard().len() < said {
                    user.hears_any().await;
                }
                user.says(text).await;
                // At any point of what the message has set going.
                for _ in 0..random.random_range(0..30) {
                    tokio::task::yield_now().await;
                }
                match random.random_range(0..8) {
                    0 => {
                        bots.kill(replicas.remove(at)).await;
                        replicas.push(bots.start_with(make, how).await);
                    }
                    1 => {
                        replicas.remove(at).bot.stop().await.unwrap();
                        replicas.push(bots.start_with(make, how).await);
                    }
                    2 => {
                        bots.clock.advance(super::support::PAST_LEASE);
                        bots.pass(Duration::from_secs(2)).await;
                    }
                    _ => {}
                }
            }
        }
        let mut expected: Vec<&str> = QUESTIONS.to_vec();
        expected.push("123456");
        for user in &users {
            let user = replicas[0].provider.user(user);
            while user.heard().len() < expected.len() {
                user.hears_any().await;
            }
            assert_eq!(user.heard_texts(), expected, "seed {seed}, {}", user.chat());
        }
    }
}
