//! The demo's order flow, alone and across replicas that die.

use botmesh::bot::{Event, HandoverOutcome};
use botmesh::cli::demo;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::support::{Bots, next_event};

const QUESTIONS: [&str; 4] =
    ["What would you like?", "How many?", "Where to?", "Confirm? (yes/no)"];
const ANSWERS: [&str; 4] = ["tea", "3", "Baker St 221b", "yes"];
const SUMMARY: &str = "Ordered: 3 × tea, to Baker St 221b.";

#[tokio::test]
async fn n6_the_order_flow_word_for_word() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let ann = a.provider.user("ann");

    // Outside a flow everything but `order` is echoed.
    ann.says("hello").await.hears("echo: hello").await;
    ann.says("yes").await.hears("echo: yes").await;

    // To the end; what is no number repeats the question, and so does neither yes nor no.
    ann.says("order").await.hears("What would you like?").await;
    ann.says("order").await.hears("How many?").await;
    ann.says("many").await.hears("How many?").await;
    ann.says("3 or so").await.hears("How many?").await;
    ann.says("03").await.hears("Where to?").await;
    ann.says("Baker St 221b").await.hears("Confirm? (yes/no)").await;
    ann.says("perhaps").await.hears("Confirm? (yes/no)").await;
    let last = ann.says("yes").await.hears_any().await.text;
    for answer in ["order", "03", "Baker St 221b"] {
        assert!(last.contains(answer), "{last:?} lacks {answer:?}");
    }

    // `no` drops it, and the flow is over.
    ann.says("order").await;
    for answer in ["tea", "1", "here", "no"] {
        ann.hears_any().await;
        ann.says(answer).await;
    }
    ann.hears("Order dropped.").await;
    ann.says("no").await.hears("echo: no").await;
}

#[tokio::test]
async fn n6_cancel_ends_it_at_any_question() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    for (answered, _) in QUESTIONS.iter().enumerate() {
        let user = a.provider.user(&format!("u{answered}"));
        user.says("order").await;
        for (question, answer) in QUESTIONS.iter().zip(ANSWERS).take(answered) {
            user.hears(question).await.says(answer).await;
        }
        user.hears(QUESTIONS[answered]).await.says("cancel").await.hears("Cancelled.").await;
        user.says("cancel").await.hears("echo: cancel").await;
    }
}

#[tokio::test]
async fn c1_a_crash_between_any_two_questions_asks_nothing_twice() {
    for crash_after in 0..QUESTIONS.len() {
        let mut bots = Bots::new();
        let a = bots.start(demo::flows).await;
        let b = bots.start(demo::flows).await;
        let ann = b.provider.user("ann");
        a.provider.user("ann").says("order").await;
        let mut a = Some(a);
        for (n, (question, answer)) in QUESTIONS.iter().zip(ANSWERS).enumerate() {
            ann.hears(question).await;
            let asker = a.as_ref().map_or(&b, |a| a);
            if n == crash_after {
                // The replica that asked dies with the conversation in its memory.
                let mut events = b.bot.events();
                bots.kill(a.take().expect("it is killed once")).await;
                ann.says(answer).await;
                let outcome = next_event(&mut events, |event| match event {
                    Event::Handover { name, outcome, .. } if name == "order" => Some(*outcome),
                    _ => None,
                });
                assert_eq!(outcome.await, HandoverOutcome::Continued);
            } else {
                asker.provider.user("ann").says(answer).await;
            }
        }
        ann.hears(SUMMARY).await;
        assert_eq!(ann.heard().len(), QUESTIONS.len() + 1, "{:?}", ann.heard_texts());
    }
}

#[tokio::test]
async fn c2_the_replica_that_had_the_flow_drops_its_copy() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let b = bots.start(demo::flows).await;
    // Question by question at the other replica: each time the one that comes back has an old copy
    // of the conversation in memory, which must not answer.
    let (at_a, at_b) = (a.provider.user("ann"), b.provider.user("ann"));
    at_a.says("order").await.hears(QUESTIONS[0]).await;
    at_b.says("tea").await.hears(QUESTIONS[1]).await;
    at_a.says("3").await.hears(QUESTIONS[2]).await;
    at_b.says("Baker St 221b").await.hears(QUESTIONS[3]).await;
    at_a.says("yes").await.hears(SUMMARY).await;
    assert_eq!(at_a.heard().len(), 5);
}

#[tokio::test]
async fn b1_double_messages_keep_their_order() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let ann = a.provider.user("ann");
    // All at once, without waiting for the questions.
    for text in ["order", "tea", "3", "Baker St 221b", "yes", "thanks"] {
        ann.says(text).await;
    }
    for question in QUESTIONS {
        ann.hears(question).await;
    }
    ann.hears(SUMMARY).await.hears("echo: thanks").await;
}

/// Many users, two replicas of which one dies every few messages and comes back as a new one.
#[tokio::test]
async fn c1_random_kills_leave_every_summary_right() {
    for seed in 0..8 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut bots = Bots::new();
        let mut replicas = vec![bots.start(demo::flows).await, bots.start(demo::flows).await];
        let users: Vec<String> = (0..6).map(|n| format!("u{n}")).collect();
        for (said, text) in ["order"].into_iter().chain(ANSWERS).enumerate() {
            for user in &users {
                let at = random.random_range(0..replicas.len());
                let user = replicas[at].provider.user(user);
                if said > 0 && random.random_bool(0.7) {
                    // Mostly they wait for the question, sometimes they are ahead of it.
                    while user.heard().len() < said {
                        user.hears_any().await;
                    }
                }
                user.says(text).await;
                if random.random_bool(0.3) {
                    let dead = random.random_range(0..replicas.len());
                    bots.kill(replicas.remove(dead)).await;
                    replicas.push(bots.start(demo::flows).await);
                }
            }
        }
        for user in &users {
            let user = replicas[0].provider.user(user);
            while user.heard().len() < 5 {
                user.hears_any().await;
            }
            let mut expected: Vec<&str> = QUESTIONS.to_vec();
            expected.push(SUMMARY);
            assert_eq!(user.heard_texts(), expected, "seed {seed}, {}", user.chat());
        }
    }
}
