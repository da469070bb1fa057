//! What a bot tells of what goes wrong: events, errors, figures (SPEC B4, G3, H1; cases c3, o7).

use std::sync::Arc;
use std::time::Duration;

use botmesh::bot::{
    Bot, BotBuilder, Coordination, Durability, EnterError, Event, Figure, OnUnknown, ReplyError,
    Route, RuntimeError,
};
use botmesh::cli::demo;
use botmesh::coordinator::{CoordinationError, Coordinator, LostReason, UnavailableCause};
use botmesh::provider::SendError;
use botmesh::store::{CommitError, StoreError};
use botmesh::testing::MemoryCoordinator;
use botmesh::types::{Fence, Incarnation};
use tokio::sync::Semaphore;

use super::support::{Bots, PAST_LEASE, next_event, until};

const WAIT: Duration = Duration::from_secs(10);

/// Handlers that wait for a permit, then say what they did.
fn gated(gate: &Arc<Semaphore>) -> impl Fn(BotBuilder) -> BotBuilder + use<> {
    let gate = gate.clone();
    move |bot| {
        let gate = gate.clone();
        bot.on(Route::Any, async move |ctx| {
            gate.acquire().await?.forget();
            ctx.reply(format!("did {}", ctx.text())).await?;
            Ok(())
        })
    }
}

/// The error of one who waited in vain.
fn overdue(event: &Event) -> Option<CoordinationError> {
    let Event::Error { key, error } = event else { return None };
    let RuntimeError::Coordination(error) = &**error else { return None };
    assert_eq!(key.as_deref(), Some("x:ann"));
    Some(error.clone())
}

fn check_overdue(error: &CoordinationError, holder: Incarnation) {
    let CoordinationError::Unavailable { cause, key, holder: by, fence, age_ms, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!((*cause, key.as_str()), (UnavailableCause::Timeout, "x:ann"));
    assert_eq!(*by, Some(holder));
    assert!(fence.is_some() && (10_000..12_000).contains(age_ms), "{error:?}");
}

/// With durability the message was accepted: it is told of once, and keeps its place.
#[tokio::test]
async fn b4_a_turn_that_does_not_come_is_told_and_keeps_its_place() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let a = bots.start_with(gated(&gate), |c| c.turn_wait(WAIT)).await;
    let mut events = a.bot.events();
    let ann = a.provider.user("ann");
    ann.says("1").await.says("2").await;
    bots.pass(WAIT * 2 + Duration::from_secs(1)).await;
    let error = next_event(&mut events, overdue).await;
    check_overdue(&error, a.coordinator.incarnation().unwrap());
    gate.add_permits(2);
    ann.hears("did 1").await.hears("did 2").await;
    let errors = a.bot.figures().into_iter().find(|figure| figure.name == "errors");
    assert_eq!(errors.unwrap().value, 1, "once");
}

/// Case c3: without durability the ticket is withdrawn, and the message is no duplicate when it
/// comes again: it is handled once, not zero times.
#[tokio::test]
async fn case_c3_a_message_whose_turn_timed_out_is_handled_when_it_comes_again() {
    let mut bots = Bots::new();
    let gate = Arc::new(Semaphore::new(0));
    let off = |c: Coordination| c.turn_wait(WAIT).durability(Durability::Off);
    let a = bots.start_with(gated(&gate), off).await;
    let b = bots.start_with(gated(&gate), off).await;
    a.provider.user("ann").says_as("m1", "1").await;
    until("the chat is busy", || gate.available_permits() == 0 && a.bot.chats_in_memory() == 1)
        .await;
    let mut events = b.bot.events();
    let ann = b.provider.user("ann");
    ann.says_as("m2", "2").await;
    bots.pass(WAIT + Duration::from_secs(1)).await;
    let error = next_event(&mut events, overdue).await;
    check_overdue(&error, a.coordinator.incarnation().unwrap());
    gate.add_permits(1);
    ann.hears("did 1").await;
    // Withdrawn: the free chat is given to nobody on its behalf.
    bots.pass(Duration::from_secs(1)).await;
    assert_eq!(ann.heard_texts(), ["did 1"]);
    gate.add_permits(1);
    assert!(!ann.says_as("m2", "2").await.duplicate);
    ann.hears("did 2").await;
    assert!(ann.says_as("m2", "2").await.duplicate);
    assert_eq!(ann.heard_texts(), ["did 1", "did 2"]);
}

#[tokio::test]
async fn g3_a_send_whose_answer_was_lost_follows_on_unknown() {
    for (on_unknown, heard) in
        [(OnUnknown::Resend, &["echo: 1", "echo: 2"][..]), (OnUnknown::Drop, &["echo: 2"][..])]
    {
        let mut bots = Bots::new();
        let a = bots.start(|bot| demo::flows(bot).on_unknown(on_unknown)).await;
        let mut events = a.bot.events();
        let lost = SendError::OutcomeUnknown { why: "the answer was lost".into() };
        a.provider.fail_next([lost]);
        let ann = a.provider.user("ann");
        ann.says("1").await;
        let unknown = next_event(&mut events, |event| match event {
            Event::SendUnknown { key, .. } => Some(key.clone()),
            _ => None,
        });
        assert_eq!(unknown.await, "x:ann");
        bots.pass(Duration::from_secs(1)).await;
        ann.says("2").await;
        for text in heard {
            ann.hears(text).await;
        }
        assert_eq!(ann.heard_texts(), heard);
    }
}

/// The one send that was in flight when its replica died: the next one tells, and sends it again
/// under the same id, or not at all.
#[tokio::test]
async fn g3_a_send_in_flight_at_a_crash_follows_on_unknown() {
    for (on_unknown, resent) in [(OnUnknown::Resend, 1), (OnUnknown::Drop, 0)] {
        let mut bots = Bots::new();
        let make = |bot| demo::flows(bot).on_unknown(on_unknown);
        let a = bots.start(make).await;
        let b = bots.start(make).await;
        let mut events = b.bot.events();
        a.provider.lose_next_answer();
        let ann = a.provider.user("ann");
        ann.says("1").await.hears("echo: 1").await;
        bots.kill(a).await;
        let unknown = next_event(&mut events, |event| match event {
            Event::SendUnknown { key, .. } => Some(key.clone()),
            _ => None,
        });
        assert_eq!(unknown.await, "x:ann");
        let ann = b.provider.user("ann");
        ann.says("2").await.hears("echo: 2").await;
        assert_eq!(ann.heard_texts(), ["echo: 1", "echo: 2"]);
        assert_eq!(b.provider.resent(), resent, "{on_unknown:?}");
    }
}

/// A replica that gives its session up while a send is in flight: whoever has the outbox next cannot
/// know whether it arrived, as after a crash.
#[tokio::test]
async fn g3_a_send_in_flight_as_a_lease_is_given_up_follows_on_unknown() {
    for (on_unknown, resent) in [(OnUnknown::Resend, 1), (OnUnknown::Drop, 0)] {
        let mut bots = Bots::new();
        let make = |bot| demo::flows(bot).on_unknown(on_unknown);
        let a = bots.start(make).await;
        let b = bots.start(make).await;
        a.provider.lose_next_answer();
        let ann = a.provider.user("ann");
        ann.says("1").await.hears("echo: 1").await;
        // The process was asleep past its lease and wakes up before the group has ended its session.
        let incarnation = botmesh::coordinator::Coordinator::incarnation(&a.coordinator);
        let session = incarnation.unwrap();
        let give_up = botmesh::machine::Command::GiveUpSession { session };
        let group = bots.hub.as_group();
        group.execute(give_up, botmesh::clock::BootInstant::never()).await.unwrap();
        bots.pass(std::time::Duration::from_secs(1)).await;
        let ann = b.provider.user("ann");
        ann.says("2").await.hears("echo: 2").await;
        assert_eq!(ann.heard_texts(), ["echo: 1", "echo: 2"]);
        assert_eq!(b.provider.resent(), resent, "{on_unknown:?}");
    }
}

fn figure(bot: &Bot, name: &str, label: &str) -> u64 {
    let labelled = |found: &Figure| found.label.as_ref().map_or("", |label| &label.1) == label;
    let found = bot.figures().into_iter().find(|found| found.name == name && labelled(found));
    found.unwrap_or_else(|| panic!("no figure {name} {label}")).value
}

/// G1: the same id is handled once, whatever its body; both kinds are counted, with durability and
/// without.
#[tokio::test]
async fn g1_duplicates_are_counted_by_whether_the_body_is_the_same() {
    for durability in [Durability::On, Durability::Off] {
        let mut bots = Bots::new();
        let a = bots.start_with(demo::flows, |c| c.durability(durability)).await;
        let ann = a.provider.user("ann");
        assert!(!ann.says_as("m1", "hi").await.duplicate);
        assert!(ann.says_as("m1", "hi").await.duplicate);
        assert!(ann.says_as("m1", "something else").await.duplicate);
        ann.says("end").await.hears("echo: hi").await.hears("echo: end").await;
        assert_eq!(figure(&a.bot, "duplicates", "same"), 1);
        assert_eq!(figure(&a.bot, "duplicates", "other"), 1);
    }
}

/// H1: a session lost is an event with its reason, a namesake another, and both are figures. The
/// other reasons: c3 (superseded), b5 (settled), d2 (stepped down).
#[tokio::test]
async fn h1_a_lost_session_and_a_namesake_are_events_and_figures() {
    let mut bots = Bots::new();
    let a = bots.start(demo::flows).await;
    let mut events = a.bot.events();
    let namesake = MemoryCoordinator::new(&bots.hub, "r1");
    namesake.open().await.unwrap();
    bots.pass(PAST_LEASE).await;
    let shared = next_event(&mut events, |event| match event {
        Event::ReplicaIdShared { other } => Some(*other),
        _ => None,
    });
    assert_eq!(Some(shared.await), namesake.incarnation());
    namesake.close().await.unwrap();

    // It sleeps through its lease.
    bots.clock.advance(PAST_LEASE);
    let lost = next_event(&mut events, |event| match event {
        Event::LeaseLost { key, reason } if key == "session" => Some(*reason),
        _ => None,
    });
    assert_eq!(lost.await, LostReason::Expired);
    assert_eq!(figure(&a.bot, "lease_lost", "expired"), 1);
    assert_eq!(figure(&a.bot, "replica_id_shared", ""), 1);
    assert_eq!(figure(&a.bot, "dead_letters", ""), 0);
}

/// Case o7: whatever the bot reports names the chat or key it is about, and what to do or what the
/// bot does about it.
#[test]
fn case_o7_every_error_names_what_it_is_about_and_what_to_do() {
    let (chat, why) = (String::from("x:ann"), String::from("it broke"));
    let source: botmesh::bot::SharedError = Arc::new(std::io::Error::other("it broke"));
    let overdue = CoordinationError::Unavailable {
        cause: UnavailableCause::NoQuorum,
        key: chat.clone(),
        holder: Some(Incarnation(7)),
        fence: Some(Fence(42)),
        age_ms: 120_000,
        advice: "no quorum: 1 of 3 voters answer; start or reconnect the others".into(),
    };
    let said = overdue.to_string();
    for part in
        ["x:ann", "incarnation 7", "fence 42", "120000 ms", "NoQuorum", "start or reconnect"]
    {
        assert!(said.contains(part), "{said}");
    }
    let (route, flow, step) = (String::from("any"), String::from("order"), String::from("Item"));
    let commit = CommitError::Unavailable { why: "no leader; ask again".into() };
    let errors = [
        RuntimeError::Coordination(overdue),
        RuntimeError::Handler { chat: chat.clone(), route, attempt: 1, source: source.clone() },
        RuntimeError::Step {
            chat: chat.clone(),
            flow: flow.clone(),
            step,
            attempt: 1,
            source: source.clone(),
        },
        RuntimeError::Panicked {
            chat: chat.clone(),
            place: "handler any".into(),
            attempt: 1,
            what: "it broke".into(),
        },
        RuntimeError::Message { chat: chat.clone(), id: "m1".into(), why: why.clone() },
        RuntimeError::Store {
            chat: chat.clone(),
            source: StoreError::Unavailable { why: "no leader".into() },
        },
        RuntimeError::Commit { chat: chat.clone(), source: commit },
        RuntimeError::Checkpoint { chat: chat.clone(), flow: flow.clone(), why: why.clone() },
        RuntimeError::Enter { chat: chat.clone(), source: EnterError::UnknownFlow { flow } },
        RuntimeError::Send {
            chat: chat.clone(),
            id: "r1".into(),
            source: ReplyError::Provider(SendError::Refused { why: why.clone() }),
        },
        RuntimeError::Job { job: "\"x:ann\"".into(), attempt: 1, source },
        RuntimeError::Provider { provider: "x:ann".into(), why },
    ];
    for error in errors {
        let said = error.to_string();
        assert!(said.contains("x:ann"), "it names what it is about: {said}");
        let (_, advice) = said.rsplit_once("; ").unwrap_or_else(|| panic!("no advice: {said}"));
        assert!(advice.split_whitespace().count() >= 3, "it says what to do: {said}");
    }
}
