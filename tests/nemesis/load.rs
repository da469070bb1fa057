//! What the group has to do while things fail: users who talk, and programs that use its turns,
//! locks and checkpoints. What they saw is judged as soon as it is whole.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinSet;

use crate::support::api::Api;
use crate::support::demo::Demo;
use crate::support::histories::History;
use crate::support::talk::Chat;
use crate::support::workload::Size;

/// Longest wait of a user for an answer, and of a ticket for its grant.
pub(crate) const PATIENCE: Duration = Duration::from_secs(240);
/// A user takes a new chat after so many messages: a list holds the last thousand replies.
const MESSAGES_A_CHAT: usize = 60;
/// What each history holds.
const SIZE: Size = Size { clients: 3, rounds: 4, stall: PATIENCE };

/// What was seen so far.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Messages taken and answered.
    pub(crate) messages: usize,
    /// Chats judged.
    pub(crate) chats: usize,
    /// Histories judged.
    pub(crate) histories: usize,
    /// Calls in them.
    pub(crate) calls: usize,
    /// Calls in them whose outcome stayed unknown.
    pub(crate) unknown: usize,
    /// Turns in them.
    pub(crate) turns: usize,
    /// How long users waited for answers.
    pub(crate) waits: Vec<Duration>,
    /// What is wrong.
    pub(crate) violations: Vec<String>,
}

/// Users and programs at work.
pub(crate) struct Load {
    /// What they have seen so far.
    pub(crate) seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    tasks: JoinSet<()>,
}

/// Where the load comes in.
#[derive(Clone)]
pub(crate) struct Doors {
    /// The bot's webhook, at all nodes.
    pub(crate) demo: Demo,
    /// The coordination API, at all nodes.
    pub(crate) api: Api,
}

impl Load {
    /// Puts so many users and so many programs to work.
    pub(crate) fn start(doors: &Doors, seed: u64, users: u64, programs: u64) -> Self {
        let (seen, stop) = (Arc::<Mutex<Seen>>::default(), Arc::<AtomicBool>::default());
        let mut tasks = JoinSet::new();
        for user in 0..users {
            let random = StdRng::seed_from_u64(seed.wrapping_mul(1_000) + user);
            tasks.spawn(talk(doors.demo.clone(), user, random, seen.clone(), stop.clone()));
        }
        for program in 0..programs {
            let numbers = (program..).step_by(programs as usize);
            tasks.spawn(work(doors.api.clone(), numbers, seen.clone(), stop.clone()));
        }
        Self { seen, stop, tasks }
    }

    /// Panics if one of them could not go on, or saw what must not be.
    pub(crate) fn check(&mut self) {
        while let Some(ended) = self.tasks.try_join_next() {
            ended.unwrap_or_else(|fault| std::panic::resume_unwind(fault.into_panic()));
        }
        let seen = self.seen.lock().unwrap();
        assert!(seen.violations.is_empty(), "violations: {:#?}", seen.violations);
    }

    /// Lets them end what they do, and returns what they saw.
    pub(crate) async fn stop(mut self) -> Seen {
        self.stop.store(true, Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap_or_else(|fault| std::panic::resume_unwind(fault.into_panic()));
        }
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

async fn talk(
    demo: Demo,
    user: u64,
    mut random: StdRng,
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
) {
    for number in 0.. {
        let mut chat = Chat::new(&demo, format!("u{user}-{number}"), PATIENCE);
        while chat.said() < MESSAGES_A_CHAT && !stop.load(Relaxed) {
            if random.random_bool(0.4) {
                chat.order(&mut random).await;
            } else {
                chat.chatter(&mut random).await;
            }
            let thinks = Duration::from_millis(random.random_range(0..150));
            tokio::time::sleep(thinks).await;
        }
        let faults = chat.faults().await;
        let mut seen = seen.lock().unwrap();
        seen.messages += chat.said();
        seen.chats += 1;
        seen.waits.append(&mut chat.waits);
        seen.violations.extend(faults);
        if stop.load(Relaxed) {
            return;
        }
    }
}

async fn work(
    api: Api,
    numbers: impl Iterator<Item = u64>,
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
) {
    for number in numbers {
        if stop.load(Relaxed) {
            return;
        }
        let history = History::take(&api, "nemesis", number, (SIZE, SIZE)).await;
        let judged = tokio::task::spawn_blocking(move || (history.fault(), history)).await;
        let (fault, history) = judged.expect("the checker does not panic");
        let mut seen = seen.lock().unwrap();
        seen.histories += 1;
        seen.calls += history.len();
        seen.unknown += history.unknown();
        seen.turns += history.turns().len();
        seen.violations.extend(fault);
    }
}
