//! Turns that stay with their replica (SPEC B10), as a bot meets them: what they cost, and that
//! nobody can tell them from others.

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{
    BotBuilder, Convo, Coordination, Durability, Event, Flow, FlowId, Next, Result, Route,
};
use botmesh::coordinator::{LostReason, Sticky};
use botmesh::steps;
use tokio::sync::Semaphore;

use super::support::{Bots, Replica, next_event, until};

steps! { enum At { Again } }

const COUNT: FlowId<Vec<String>> = FlowId::new("count");

async fn count(_at: At, c: &mut Convo<Vec<String>>) -> Result<Next<At>> {
    let heard = c.state.join("+");
    let text = c.ask(format!("so far {heard}")).await?;
    c.state.push(text);
    c.goto(At::Again)
}

/// Repeats all it heard, from a persistent flow.
fn counting(bot: BotBuilder) -> BotBuilder {
    bot.flow(Flow::new(COUNT, count).persistent().cancel_on("cancel", "Cancelled."))
        .on(Route::Any, async |ctx| Ok(ctx.enter(COUNT, Vec::new()).await?))
}

fn how(durability: Durability, sticky: bool) -> impl Fn(Coordination) -> Coordination {
    move |c| c.durability(durability).sticky(sticky.then(Sticky::default))
}

fn so_far(upto: usize) -> String {
    let heard: Vec<String> = (1..=upto).map(|n| n.to_string()).collect();
    format!("so far {}", heard.join("+"))
}

/// Says `hello` and then the numbers, each to the next of the replicas, and hears each answer.
/// Answers the entries each message took in the second half, and the fences.
async fn talk(bots: &Bots, replicas: &[&Replica], messages: usize) -> (f64, Vec<u64>) {
    let (mut before, mut fences) = (0, Vec::new());
    for n in 0..messages {
        if n == messages / 2 {
            before = bots.hub.applied();
        }
        let ann = replicas[n % replicas.len()].provider.user("ann");
        let text = if n == 0 { "hello".to_owned() } else { n.to_string() };
        ann.says(&text).await;
        ann.hears(&so_far(n)).await;
        // The turn's end follows what it says.
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        fences.push(ann.heard().last().unwrap().fence);
    }
    let heard = replicas[0].provider.user("ann").heard();
    let places: Vec<(u64, u64)> = heard.iter().map(|said| (said.fence, said.turn_seq)).collect();
    assert!(places.is_sorted_by(|a, b| a < b), "turn_seq goes on under a fence (N5): {places:?}");
    let entries = bots.hub.applied() - before;
    (entries as f64 / (messages - messages / 2) as f64, fences)
}

fn distinct(fences: &[u64]) -> usize {
    let mut all = fences.to_vec();
    all.dedup();
    assert!(all.is_sorted(), "{all:?}");
    all.len()
}

#[tokio::test]
async fn b10_without_durability_a_message_to_the_same_replica_costs_its_checkpoint_alone() {
    // Checkpoint; or ticket, checkpoint and release, of which the last shares the next ticket's entry
    // where entries cost something.
    for (sticky, costs, fences) in [(true, 1.0, 1), (false, 3.0, 20)] {
        let mut bots = Bots::new();
        let a = bots.start_with(counting, how(Durability::Off, sticky)).await;
        let b = bots.start_with(counting, how(Durability::Off, sticky)).await;
        let (cost, under) = talk(&bots, &[&a], 20).await;
        assert_eq!(cost, costs, "sticky: {sticky}");
        assert_eq!(distinct(&under), fences, "sticky: {sticky}");
        // Another replica gets the next message: it goes on where the first one was.
        let ann = b.provider.user("ann");
        ann.says("20").await.hears(&so_far(20)).await;
    }
}

#[tokio::test]
async fn b10_with_durability_a_message_costs_two_commits_and_none_for_the_grant() {
    for (sticky, fences) in [(true, 1), (false, 20)] {
        let mut bots = Bots::new();
        let a = bots.start_with(counting, how(Durability::On, sticky)).await;
        let _b = bots.start_with(counting, how(Durability::On, sticky)).await;
        let (cost, under) = talk(&bots, &[&a], 20).await;
        // Journal and ticket; checkpoint, reply, acknowledgement and release; that it was sent.
        assert_eq!(cost, 3.0, "sticky: {sticky}");
        assert_eq!(distinct(&under), fences, "sticky: {sticky}");
    }
}

#[tokio::test]
async fn b10_round_robin_keeps_the_order_and_every_memory_fresh() {
    for durability in [Durability::On, Durability::Off] {
        for sticky in [true, false] {
            let mut bots = Bots::new();
            let set = how(durability, sticky);
            let a = bots.start_with(counting, &set).await;
            let b = bots.start_with(counting, &set).await;
            let c = bots.start_with(counting, &set).await;
            let (cost, under) = talk(&bots, &[&a, &b, &c], 30).await;
            assert_eq!(distinct(&under), 30, "each replica's turn has a fence of its own");
            // Ticket, checkpoint and release; or message, commit, and that it was sent.
            assert!(cost <= 3.0, "{durability:?}, sticky {sticky}: {cost}");
        }
    }
}

#[tokio::test]
async fn c8_whoever_heard_a_question_has_the_answer_taken_for_it() {
    for durability in [Durability::On, Durability::Off] {
        for sticky in [true, false] {
            let mut bots = Bots::new();
            let a = bots.start_with(counting, how(durability, sticky)).await;
            let b = bots.start_with(counting, how(durability, sticky)).await;
            let ann = a.provider.user("ann");
            ann.says("hello").await.hears("so far ").await;
            ann.says("1").await.hears("so far 1").await;
            // The replica dies right after the next question arrived.
            a.provider.lose_next_answer();
            ann.says("2").await.hears("so far 1+2").await;
            bots.kill(a).await;
            let ann = b.provider.user("ann");
            ann.says("3").await.hears("so far 1+2+3").await;
            // Whoever heard that it is over is not asked on.
            let c = bots.start_with(counting, how(durability, sticky)).await;
            b.provider.lose_next_answer();
            ann.says("cancel").await.hears("Cancelled.").await;
            bots.kill(b).await;
            c.provider.user("ann").says("hello").await.hears("so far ").await;
        }
    }
}

/// A handler that waits until it is let go.
struct Slow {
    entered: Arc<Semaphore>,
    go: Arc<Semaphore>,
}

impl Slow {
    fn new() -> Self {
        Self { entered: Arc::new(Semaphore::new(0)), go: Arc::new(Semaphore::new(0)) }
    }

    fn bot(&self, bot: BotBuilder) -> BotBuilder {
        let (entered, go) = (self.entered.clone(), self.go.clone());
        bot.on("slow", async move |ctx| {
            entered.add_permits(1);
            go.acquire().await?.forget();
            Ok(ctx.reply("slow").await?)
        })
        .on(Route::Any, async |ctx| {
            let text = format!("echo: {}", ctx.text());
            Ok(ctx.reply(text).await?)
        })
    }
}

#[tokio::test]
async fn b10_a_call_back_during_a_message_waits_for_its_end_and_keeps_the_order() {
    for durability in [Durability::On, Durability::Off] {
        let slow = Slow::new();
        let mut bots = Bots::new();
        let set = how(durability, true);
        let a = bots.start_with(|bot| slow.bot(bot), &set).await;
        let b = bots.start_with(|bot| slow.bot(bot), &set).await;
        let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
        at_a.says("hi").await.hears("echo: hi").await;
        at_a.says("slow").await;
        slow.entered.acquire().await.unwrap().forget();
        at_a.says("1").await;
        at_b.says("2").await;
        at_a.says("3").await;
        at_b.says("4").await;
        slow.go.add_permits(1);
        until("all are answered", || at_b.heard().len() == 6).await;
        let expected = ["echo: hi", "slow", "echo: 1", "echo: 2", "echo: 3", "echo: 4"];
        assert_eq!(at_b.heard_texts(), expected, "{durability:?}");
    }
}

#[tokio::test]
async fn b10_a_dead_holders_chat_goes_on_after_its_lease() {
    for durability in [Durability::On, Durability::Off] {
        let mut bots = Bots::new();
        let a = bots.start_with(counting, how(durability, true)).await;
        let b = bots.start_with(counting, how(durability, true)).await;
        talk(&bots, &[&a], 4).await;
        bots.kill(a).await;
        let ann = b.provider.user("ann");
        ann.says("4").await.hears(&so_far(4)).await;
        ann.says("5").await.hears(&so_far(5)).await;
    }
}

/// A holder whose session ends comes back as another, whose memory of the chat is gone; what others
/// did meanwhile it reads.
#[tokio::test]
async fn b10_a_holder_that_loses_its_lease_starts_from_the_checkpoint() {
    let mut bots = Bots::new();
    let a = bots.start_with(counting, how(Durability::Off, true)).await;
    let b = bots.start_with(counting, how(Durability::Off, true)).await;
    talk(&bots, &[&a], 4).await;
    let mut events = a.bot.events();
    // Its session is ended by the group, as after a freeze.
    let incarnation = botmesh::coordinator::Coordinator::incarnation(&a.coordinator).unwrap();
    let group = bots.hub.as_group();
    let seq = botmesh::group::look(&*group, |m| m.session(incarnation).unwrap().seq);
    let expire = botmesh::machine::Command::ExpireSession { session: incarnation, seq };
    group.execute(expire, botmesh::clock::BootInstant::never()).await.unwrap();
    let lost = |event: &Event| match event {
        Event::LeaseLost { reason, .. } => Some(*reason),
        _ => None,
    };
    assert_eq!(next_event(&mut events, lost).await, LostReason::Expired);
    b.provider.user("ann").says("4").await.hears(&so_far(4)).await;
    let ann = a.provider.user("ann");
    ann.says("5").await.hears(&so_far(5)).await;
}

#[tokio::test]
async fn b10_a_stop_gives_back_at_once_what_stayed() {
    let mut bots = Bots::new();
    let slow = Slow::new();
    let a = bots.start_with(|bot| slow.bot(bot), how(Durability::Off, true)).await;
    let b = bots.start_with(|bot| slow.bot(bot), how(Durability::Off, true)).await;
    let (ann, bob) = (a.provider.user("ann"), a.provider.user("bob"));
    ann.says("hi").await.hears("echo: hi").await;
    bob.says("slow").await;
    slow.entered.acquire().await.unwrap().forget();
    let stopping = tokio::spawn({
        let bot = a.bot.clone();
        async move { bot.stop().await }
    });
    let group = bots.hub.as_group();
    let held = || botmesh::group::look(&*group, |machine| machine.turn_counts().0);
    until("only what is at work is held", || held() == 1).await;
    b.provider.user("ann").says("there?").await.hears("echo: there?").await;
    assert!(!stopping.is_finished(), "it waits for what is at work");
    slow.go.add_permits(1);
    bob.hears("slow").await;
    stopping.await.unwrap().unwrap();
}

/// DESIGN 4 rule 9: a step that is cut, or fails, ends the turn that stayed; what came behind it is
/// handled under another one.
#[tokio::test]
async fn b10_a_message_that_is_cut_ends_the_turn_and_not_what_waits() {
    let mut bots = Bots::new();
    let slow = Slow::new();
    let set = |c: Coordination| {
        c.durability(Durability::Off).settle(Duration::from_secs(5)).sticky(Sticky::default())
    };
    let a = bots.start_with(|bot| slow.bot(bot), set).await;
    let ann = a.provider.user("ann");
    ann.says("hi").await.hears("echo: hi").await;
    let first = ann.heard()[0].fence;
    ann.says("slow").await;
    slow.entered.acquire().await.unwrap().forget();
    ann.says("1").await.says("2").await;
    bots.pass(Duration::from_secs(6)).await;
    ann.hears("echo: 1").await.hears("echo: 2").await;
    assert!(ann.heard()[1].fence > first);
    assert_eq!(ann.heard_texts(), ["echo: hi", "echo: 1", "echo: 2"], "the cut one says nothing");
}
