//! Jobs over replicas that share a hub and a manual clock (SPEC G4).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Event, Fault, Job, Missed, RuntimeError};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::testing::{MemoryCoordinator, MemoryHub, ScriptedProvider};
use botmesh::types::ChatKey;
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::support::{Bots, PAST_LEASE, Replica, next_event, until};

/// Which replica ran which occurrence, in order.
type Runs = Arc<Mutex<Vec<(u32, u64)>>>;

fn by(runs: &Runs) -> BTreeMap<u64, Vec<u32>> {
    let mut occurrences: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (replica, due) in runs.lock().iter() {
        occurrences.entry(*due).or_default().push(*replica);
    }
    occurrences
}

/// Lets time pass in steps that jobs keep up with.
async fn pass(bots: &Bots, time: Duration) {
    let step = Duration::from_millis(250);
    for _ in 0..time.as_millis() / step.as_millis() {
        bots.clock.advance(step);
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn g4_a_job_without_an_id_runs_on_every_replica() {
    let mut bots = Bots::new();
    let runs = Runs::default();
    let mut replicas = Vec::new();
    for nth in 0..3 {
        let runs = runs.clone();
        let make = |bot: BotBuilder| {
            bot.every("5s", async move |tick| {
                runs.lock().push((nth, tick.due_ms()));
                Ok(())
            })
        };
        replicas.push(bots.start(make).await);
    }
    pass(&bots, SECOND * 21).await;
    let by = by(&runs);
    assert_eq!(by.len(), 4, "{by:?}");
    for (due, mut replicas) in by {
        replicas.sort_unstable();
        assert_eq!((due % 5_000, replicas), (0, vec![0, 1, 2]));
    }
}

/// Three replicas with the job `tick` every second; what it runs is noted.
async fn second_by_second(bots: &mut Bots, runs: &Runs) -> Vec<Replica> {
    let mut replicas = Vec::new();
    for nth in 0..3 {
        let runs = runs.clone();
        let job = Job::every("1s").id("tick").missed(Missed::All(100));
        let make = |bot: BotBuilder| {
            bot.job(job, async move |tick| {
                assert_eq!(tick.id(), Some("tick"));
                runs.lock().push((nth, tick.due_ms()));
                Ok(())
            })
        };
        replicas.push(bots.start(make).await);
    }
    replicas
}

/// Case s3: a job every second for 60 s with one crash is 60 claims and no double.
#[tokio::test]
async fn case_s3_a_minute_of_seconds_with_a_crash_is_sixty_runs() {
    let mut bots = Bots::new();
    let runs = Runs::default();
    let mut replicas = second_by_second(&mut bots, &runs).await;
    pass(&bots, SECOND * 20).await;
    // The one that ran last, so that it was not idle all the time.
    let last = runs.lock().last().expect("it runs").0;
    replicas.remove(last as usize).coordinator.crash();
    let crashed_at = runs.lock().len();
    pass(&bots, SECOND * 40).await;
    let by = by(&runs);
    let dues: Vec<u64> = by.keys().copied().collect();
    assert_eq!(dues.len(), 60, "one a second");
    assert!(dues.is_sorted_by(|a, b| a + 1_000 == *b), "none is left out: {dues:?}");
    let doubled: Vec<_> = by.iter().filter(|(_, runs)| runs.len() != 1).collect();
    assert!(doubled.is_empty(), "{doubled:?}");
    assert!(runs.lock()[crashed_at..].iter().all(|(replica, _)| *replica != last));
}

/// Case s6: what failed on one replica is run again on another, at once; there, too, a bounded
/// number of times.
#[tokio::test]
async fn case_s6_what_panics_on_one_replica_runs_again_on_another() {
    let mut bots = Bots::new();
    let runs: Arc<Mutex<Vec<(u32, u32)>>> = Arc::default();
    let mut replicas = Vec::new();
    for nth in 0..2 {
        let runs = runs.clone();
        let make = |bot: BotBuilder| {
            bot.job(Job::every("10s").id("deliver"), async move |tick| {
                runs.lock().push((nth, tick.attempt()));
                if tick.attempt() == 1 {
                    panic!("the first delivery fails");
                }
                Ok(())
            })
        };
        replicas.push(bots.start(make).await);
    }
    let (mut a, mut b) = (replicas[0].bot.events(), replicas[1].bot.events());
    pass(&bots, SECOND * 10).await;
    let ran = runs.lock().clone();
    let [(first, 1), (second, 2)] = ran[..] else { panic!("{ran:?}") };
    assert_ne!(first, second, "elsewhere");
    let events = if first == 0 { &mut a } else { &mut b };
    let said = next_event(events, |event| match event {
        Event::Error { error, .. } => Some(error.to_string()),
        _ => None,
    })
    .await;
    assert!(said.contains("deliver") && said.contains("the first delivery fails"), "{said}");
    pass(&bots, SECOND * 10).await;
    assert_eq!(runs.lock().len(), 4, "the next occurrence begins anew");
}

#[tokio::test]
async fn g4_an_occurrence_that_fails_for_good_is_given_up_and_the_job_goes_on() {
    let mut bots = Bots::new();
    let runs = Runs::default();
    let noted = runs.clone();
    let job = Job::every("60s").id("poison").attempts(3);
    let make = |bot: BotBuilder| {
        bot.job(job, async move |tick| {
            noted.lock().push((tick.attempt(), tick.due_ms()));
            Err("no such table".into())
        })
    };
    let only = bots.start(make).await;
    let mut events = only.bot.events();
    pass(&bots, SECOND * 75).await;
    let attempts: Vec<u32> = runs.lock().iter().map(|run| run.0).collect();
    assert_eq!(attempts, [1, 2, 3], "again after a while, where nobody else can");
    let mut errors = 0;
    let given_up = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => {
            assert!(matches!(**error, RuntimeError::Job { .. }));
            errors += 1;
            None
        }
        Event::JobGivenUp { id, due_ms, attempts } => Some((id.clone(), *due_ms, *attempts)),
        _ => None,
    })
    .await;
    assert_eq!(given_up, ("poison".to_owned(), runs.lock()[0].1, 3));
    assert_eq!(errors, 3);
    pass(&bots, SECOND * 60).await;
    assert!(runs.lock().iter().any(|run| run.1 > given_up.1), "the next one comes in time");
}

/// A run whose replica dies is run again by another after the lease; one that takes too long is cut.
#[tokio::test]
async fn g4_a_run_of_a_dead_replica_is_anothers() {
    let mut bots = Bots::new();
    let runs = Runs::default();
    let gate = Arc::new(Semaphore::new(0));
    let mut replicas = Vec::new();
    for nth in 0..2 {
        let (runs, gate) = (runs.clone(), gate.clone());
        let make = |bot: BotBuilder| {
            bot.job(Job::cron("* * * * *").id("slow"), async move |tick| {
                runs.lock().push((nth, tick.due_ms()));
                let check = tick.check();
                assert!(check.is_ok(), "{check:?}");
                gate.acquire().await?.forget();
                Ok(())
            })
        };
        replicas.push(Some(bots.start(make).await));
    }
    pass(&bots, SECOND * 60).await;
    let first = runs.lock()[0];
    assert_eq!(runs.lock().len(), 1, "one at a time");
    replicas[first.0 as usize].take().unwrap().coordinator.crash();
    pass(&bots, PAST_LEASE).await;
    assert_eq!(runs.lock()[..], [first, (1 - first.0, first.1)]);
    gate.add_permits(2);
    pass(&bots, SECOND).await;

    let late = Job::every("1m").id("late").within(SECOND * 2);
    let make = |bot: BotBuilder| bot.job(late, async |_| std::future::pending().await);
    let one = bots.start(make).await;
    let mut events = one.bot.events();
    pass(&bots, SECOND * 65).await;
    let said = next_event(&mut events, |event| match event {
        Event::Error { error, .. } => Some(error.to_string()),
        _ => None,
    })
    .await;
    assert!(said.contains("late") && said.contains("longer than it may"), "{said}");
}

/// What an occurrence posts is posted once, also where it runs again.
#[tokio::test]
async fn g4_a_job_that_runs_again_posts_nothing_twice() {
    let mut bots = Bots::new();
    let mut replicas = Vec::new();
    for _ in 0..2 {
        let chat = ChatKey::new("x", "ann");
        let make = |bot: BotBuilder| {
            bot.job(Job::every("10s").id("news"), async move |tick| {
                tick.post(&chat, "news").await?;
                if tick.attempt() == 1 {
                    return Err("after the post".into());
                }
                tick.post(&chat, "end of the news").await?;
                Ok(())
            })
        };
        replicas.push(bots.start(make).await);
    }
    pass(&bots, SECOND * 10).await;
    let ann = replicas[0].provider.user("ann");
    ann.hears("news").await.hears("end of the news").await;
    assert_eq!(ann.heard().len(), 2);
}

/// A new release changes the times: its definition holds, and what is claimed under the old one
/// ends first.
#[tokio::test]
async fn g4_a_new_definition_replaces_the_old_one() {
    let mut bots = Bots::new();
    let runs = Runs::default();
    for (nth, period) in ["10s", "4s"].into_iter().enumerate() {
        let runs = runs.clone();
        let make = |bot: BotBuilder| {
            bot.job(Job::every(period).id("job"), async move |tick| {
                runs.lock().push((nth as u32, tick.due_ms()));
                Ok(())
            })
        };
        let replica = bots.start(make).await;
        pass(&bots, SECOND * 12).await;
        replica.bot.stop().await.unwrap();
    }
    let by = by(&runs);
    let old: Vec<_> =
        by.iter().filter(|(_, who)| who[0] == 0).map(|(due, _)| due % 10_000).collect();
    assert_eq!(old, [0]);
    let new: Vec<_> =
        by.iter().filter(|(_, who)| who[0] == 1).map(|(due, _)| due % 4_000).collect();
    assert_eq!(new, [0, 0, 0], "{by:?}");
}

/// Jobs claimed by another coordinator than the chats' (`scheduler.lease` of the reference).
#[tokio::test]
async fn g4_jobs_may_be_claimed_by_a_coordinator_of_their_own() {
    let bots = Bots::new();
    let prefix = MemoryHub::default_prefix();
    let options = CoordinatorOptions { lease: SECOND * 60, ..CoordinatorOptions::default() };
    let own = MemoryCoordinator::with(&bots.hub, prefix.clone(), options);
    let chats = MemoryCoordinator::new(&bots.hub, "chats");
    let runs = Runs::default();
    let noted = runs.clone();
    let bot = Bot::builder()
        .provider(ScriptedProvider::new("x"))
        .store(bots.hub.store(prefix))
        .coordination(botmesh::bot::Coordination::new(chats.clone()))
        .scheduler(own.clone())
        .job(Job::every("5s").id("j"), async move |tick| {
            noted.lock().push((0, tick.due_ms()));
            Ok(())
        })
        .build()
        .await
        .unwrap();
    bot.start().await.unwrap();
    chats.crash();
    pass(&bots, SECOND * 11).await;
    assert_eq!(runs.lock().len(), 2, "the chats' session has nothing to do with it");
    bot.stop().await.unwrap();
    until("it is closed too", || {
        use botmesh::coordinator::Coordinator;
        own.incarnation().is_none()
    })
    .await;
}

#[tokio::test]
async fn g4_jobs_that_cannot_be_are_all_named_when_the_bot_is_built() {
    let built = Bot::builder()
        .provider(ScriptedProvider::new("x"))
        .schedule("0 0 30 2 *", async |_| Ok(()))
        .job(Job::cron("0 9 * * *").zone("Mars/Olympus"), async |_| Ok(()))
        .job(Job::every("1m").id("twice"), async |_| Ok(()))
        .job(Job::every("2m").id("twice"), async |_| Ok(()))
        .build()
        .await;
    let error = built.unwrap_err();
    assert!(matches!(
        &error.faults[..],
        [Fault::JobNever { .. }, Fault::JobZone { .. }, Fault::JobTwice { .. }]
    ));
    let said = error.to_string();
    for part in ["0 0 30 2 *", "Mars/Olympus", "twice"] {
        assert!(said.contains(part), "{said}");
    }
}
