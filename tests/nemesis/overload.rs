//! More to do than the machine can (SPEC M3): leases hold, what is too much is refused at once, and
//! what was taken is finished.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::load::{Doors, Load, PATIENCE};
use super::strike::busy;
use crate::support::cluster::{Cluster, Options};
use crate::support::demo::Demo;

/// How many messages are posted at once: more than a node takes at a time.
const FLOOD: usize = 3_000;
/// Over so many chats.
const CHATS: usize = 200;

/// Each replica's session, as a node sees it.
async fn sessions(cluster: &Cluster) -> BTreeMap<String, u64> {
    let status = cluster.status(0).await.expect("n1 answers");
    let sessions = status["sessions"].as_array().expect("sessions are an array");
    let one = |it: &Value| (it["replica"].to_string(), it["incarnation"].as_u64().unwrap());
    sessions.iter().map(one).collect()
}

/// Raises the bound of open files, for this process and those it starts; its new value.
fn many_open_files() -> u64 {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
    maximum.unwrap_or(u64::MAX)
}

#[tokio::test(flavor = "multi_thread")]
async fn m3_no_lease_ends_while_every_processor_is_busy() {
    let seconds = std::env::var("TEST_OVERLOAD_SECONDS").ok();
    let seconds = seconds.map_or(20, |seconds| seconds.parse().expect("a number of seconds"));
    let cluster = Cluster::start(Options::nodes(3)).await;
    let before = sessions(&cluster).await;
    assert_eq!(before.len(), 3, "a session a replica: {before:?}");
    let doors = Doors { demo: Demo::new(cluster.public()), api: cluster.api() };
    let mut load = Load::start(&doors, 1, 6, 3);
    busy(Duration::from_secs(seconds)).await;
    load.check();
    let mut seen = load.stop().await;
    assert!(seen.violations.is_empty(), "{:#?}", seen.violations);
    assert!(seen.messages > 0 && seen.histories > 0, "nothing was done: {seen:?}");
    assert_eq!(sessions(&cluster).await, before, "a lease ended though its replica lives");
    seen.waits.sort_unstable();
    println!(
        "{seconds} s with every processor busy: {} messages, {} histories; a user waited {:.1?} \
         (p50), {:.1?} (max); no lease ended",
        seen.messages,
        seen.histories,
        seen.waits[seen.waits.len() / 2],
        seen.waits[seen.waits.len() - 1]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn m3_a_flood_is_shed_with_when_to_come_again_and_what_was_taken_is_finished() {
    let files = many_open_files();
    if files < 2 * FLOOD as u64 {
        eprintln!("SKIPPED m3_a_flood: a process may open {files} files only");
        return;
    }
    let cluster = Cluster::start(Options::nodes(3)).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{}/webhooks/demo", cluster.nodes[0].public_base());

    // Phase 1: without a majority nothing is committed, so what comes piles up at the door.
    for node in [1, 2] {
        cluster.nodes[node].signal(Signal::STOP);
    }
    let mut flood = JoinSet::new();
    for number in 0..FLOOD {
        let (id, chat) = (format!("f{number}"), format!("flood-{}", number % CHATS));
        let body = json!({ "id": id, "chat": chat, "text": "hello" });
        let call = http.post(&url).json(&body).timeout(PATIENCE);
        flood.spawn(async move {
            let answer = call.send().await.expect("every request is answered");
            let after = answer.headers().get("retry-after").cloned();
            let after = after.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
            (number, answer.status().as_u16(), after)
        });
    }
    let (mut taken, mut shed) = (vec![false; FLOOD], 0);
    let mut note = |answered: Result<(usize, u16, Option<u64>), _>| {
        let (number, status, after) = answered.expect("the request is made");
        match (status, after) {
            (200, _) => taken[number] = true,
            (429 | 503, Some(1..)) => shed += 1,
            other => panic!("f{number} was answered {other:?}"),
        }
        shed
    };
    while note(flood.join_next().await.expect("some are refused")) == 0 {}

    // Phase 2: with a majority what was let in is taken, or refused as what was not.
    for node in [1, 2] {
        cluster.nodes[node].signal(Signal::CONT);
    }
    while let Some(answered) = flood.join_next().await {
        note(answered);
    }
    let accepted = taken.iter().filter(|taken| **taken).count();
    println!("{FLOOD} messages at once: {accepted} taken, {shed} refused with Retry-After");
    assert!(shed > 0, "nothing was shed");

    // Phase 3: every message that was taken is answered, once; the bot serves as before.
    let demo = Demo::new(cluster.public());
    assert!(!demo.post(0, "after", "after", "hello").await);
    demo.answer_to(1, "after", "after", PATIENCE).await;
    let until = Instant::now() + PATIENCE;
    for chat in 0..CHATS {
        let name = format!("flood-{chat}");
        let wanted: Vec<String> = (chat..FLOOD)
            .step_by(CHATS)
            .filter(|number| taken[*number])
            .map(|number| format!("f{number}"))
            .collect();
        loop {
            let replies = demo.replies(0, &name).await;
            let times = |id: &str| replies.iter().filter(|reply| reply.in_reply_to == id).count();
            assert!(wanted.iter().all(|id| times(id) <= 1), "answered twice: {replies:?}");
            let missing: Vec<&String> = wanted.iter().filter(|id| times(id) == 0).collect();
            if missing.is_empty() {
                break;
            }
            assert!(Instant::now() < until, "{name}: taken and not answered: {missing:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
