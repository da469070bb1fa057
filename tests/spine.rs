//! The spine from end to end, over real processes: tickets through three nodes, one message
//! delivered three times, an order that survives its process, a group killed whole,
//! a reply that was sent and not recorded.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

#[path = "spine/resent.rs"]
mod resent;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream;
use serde_json::json;
use tokio::sync::{Barrier, Mutex};

use support::cluster::{Cluster, Options};
use support::demo::{Demo, Reply};
use support::ledger::Writers;
use support::proxy::{self, Tamper};
use support::session::Prefix;
use support::turnlog::{Held, faults};

const SECOND: Duration = Duration::from_secs(1);
/// A lease that does not run out within a test.
const LONG_MS: u64 = 600_000;

// ------------------------------------------------------------------------------------- tickets

#[tokio::test(flavor = "multi_thread")]
async fn b1_three_thousand_tickets_through_three_nodes_are_granted_in_order() {
    const EACH: usize = 1_000;
    let cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "b1");
    let sessions = join_all((0..3).map(|node| prefix.open(node, LONG_MS))).await;

    // Phase 1: all tickets at once, a thousand at each node.
    let start = Arc::new(Barrier::new(3 * EACH));
    let mut taking = tokio::task::JoinSet::new();
    for (node, &session) in sessions.iter().enumerate() {
        for _ in 0..EACH {
            let (prefix, start) = (prefix.clone(), start.clone());
            taking.spawn(async move {
                start.wait().await;
                (node, prefix.take(node, session, "demo:one").await.ticket)
            });
        }
    }
    let mut tickets: [BTreeSet<u64>; 3] = Default::default();
    while let Some(taken) = taking.join_next().await {
        let (node, ticket) = taken.unwrap();
        tickets[node].insert(ticket);
    }
    let all: BTreeSet<u64> = tickets.iter().flatten().copied().collect();
    assert_eq!(all.len(), 3 * EACH, "distinct tickets");

    // Phase 2: each node waits for its own, some ahead, and holds and releases them, lowest first.
    // That nobody starves shows that grants come in ticket order; the turn log, that they do not
    // overlap.
    let log: Arc<Mutex<Vec<Held>>> = Arc::default();
    let mut handling = tokio::task::JoinSet::new();
    for (node, tickets) in tickets.into_iter().enumerate() {
        let (prefix, session, log) = (prefix.clone(), sessions[node], log.clone());
        handling.spawn(async move {
            let grants = stream::iter(tickets).map(|ticket| {
                let prefix = prefix.clone();
                tokio::spawn(async move {
                    let stand = prefix.granted(node, ticket, 120 * SECOND).await;
                    (ticket, stand.fence.unwrap(), prefix.api.now())
                })
            });
            let mut grants = grants.buffered(16);
            while let Some(granted) = grants.next().await {
                let (ticket, fence, start) = granted.unwrap();
                let (chat, end) = ("demo:one".to_owned(), prefix.api.now());
                log.lock().await.push(Held { chat, ticket, fence, start, end });
                prefix.release(node, session, ticket).await;
            }
        });
    }
    while let Some(handled) = handling.join_next().await {
        handled.unwrap();
    }
    let log = log.lock().await;
    assert_eq!(log.len(), 3 * EACH);
    assert_eq!(faults(&log), []);
    let fences: BTreeSet<u64> = log.iter().map(|held| held.fence).collect();
    assert_eq!(fences.len(), 3 * EACH, "distinct fences");
}

#[tokio::test(flavor = "multi_thread")]
async fn case_c1_a_turn_outlives_its_lease_while_its_session_is_renewed() {
    let cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "c1");
    let holder = prefix.open(0, 1_000).await;
    let other = prefix.open(1, LONG_MS).await;
    let first = prefix.take(0, holder, "demo:c1").await;
    let began = Instant::now();
    assert!(first.fence.is_some());

    // The holder works for ten leases and renews; the second ticket comes at another node at 2 s.
    let mut second = None;
    let mut waiting = None;
    while began.elapsed() < 10 * SECOND {
        let renewed = prefix.renew(0, holder).await;
        assert_eq!(renewed.status, 200, "{}", renewed.body);
        assert_eq!(renewed.number("valid_ms"), 1_000);
        if began.elapsed() >= 2 * SECOND && second.is_none() {
            let stand = prefix.take(1, other, "demo:c1").await;
            assert_eq!((stand.fence, stand.ahead), (None, 1));
            second = Some(stand.ticket);
            let prefix = prefix.clone();
            waiting = Some(tokio::spawn(async move {
                let stand = prefix.granted(1, stand.ticket, 30 * SECOND).await;
                (Instant::now(), stand)
            }));
        }
        assert!(!waiting.as_ref().is_some_and(tokio::task::JoinHandle::is_finished));
        tokio::time::sleep(SECOND / 4).await;
    }
    let released = Instant::now();
    prefix.release(0, holder, first.ticket).await;
    let (granted, stand) = waiting.unwrap().await.unwrap();
    assert!(granted >= released, "the second turn began before the first ended");
    assert!(granted - released < SECOND, "the grant was not pushed");
    assert!(stand.fence > first.fence);
    assert_eq!(stand.previous, Some(holder));
}

#[tokio::test(flavor = "multi_thread")]
async fn e2_a_dead_sessions_turn_passes_on_after_its_lease_and_not_before() {
    let cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "e2");
    const LEASE: Duration = Duration::from_secs(4);
    let dead = prefix.open(0, 4_000).await;
    let live = prefix.open(1, LONG_MS).await;
    let held = prefix.take(0, dead, "demo:e2").await;
    let next = prefix.take(1, live, "demo:e2").await;
    assert_eq!((next.fence, next.ahead), (None, 1));
    let sent = Instant::now();
    assert_eq!(prefix.renew(2, dead).await.status, 200);
    let renewed = Instant::now();

    let stand = prefix.granted(1, next.ticket, 20 * SECOND).await;
    let granted = Instant::now();
    assert!(granted - sent >= LEASE, "ended {:?} after its renewal", granted - sent);
    // Lease + 1 s under a stable leader, two leases where a busy machine elects another (E7).
    assert!(granted - renewed <= 2 * LEASE, "ended {:?} after it", granted - renewed);
    assert!(stand.fence > held.fence);
    assert_eq!(stand.previous, Some(dead));
    for node in 0..3 {
        let refused = prefix.renew(node, dead).await;
        assert_eq!((refused.status, refused.error()), (404, "session_expired"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_c9_ten_thousand_turns_with_every_third_answer_lost_leave_no_orphan() {
    const CHATS: usize = 50;
    const TURNS: usize = 200;
    let cluster = Cluster::start(Options::nodes(3)).await;
    let mut proxies = Vec::new();
    for node in &cluster.nodes {
        proxies.push(proxy::start(Tamper::DropThirdTicket, node.base()).await);
    }
    let bases = proxies.iter().map(proxy::Running::base).collect();
    let api = cluster.api().through(bases);

    // Each chat has two clients that compete, each retrying lost answers under its key.
    let log: Arc<Mutex<Vec<Held>>> = Arc::default();
    let mut running = tokio::task::JoinSet::new();
    for number in 0..2 * CHATS {
        // A prefix holds a bounded number of idempotency keys.
        let prefix = Prefix::new(api.clone(), format!("c9-{}", number % 5));
        let (node, chat) = (number % 3, format!("demo:c9-{}", number % CHATS));
        let log = log.clone();
        running.spawn(async move {
            let session = prefix.open(node, LONG_MS).await;
            for _ in 0..TURNS / 2 {
                let taken = prefix.take(node, session, &chat).await;
                let stand = match taken.fence {
                    Some(_) => taken,
                    None => prefix.granted(node, taken.ticket, 60 * SECOND).await,
                };
                let start = prefix.api.now();
                tokio::task::yield_now().await;
                let (ticket, fence) = (taken.ticket, stand.fence.unwrap());
                let end = prefix.api.now();
                log.lock().await.push(Held { chat: chat.clone(), ticket, fence, start, end });
                prefix.release(node, session, ticket).await;
            }
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
    let dropped: usize = proxies.iter().map(proxy::Running::struck).sum();
    println!("{dropped} answers dropped in {} turns", CHATS * TURNS);
    assert!(dropped >= CHATS * TURNS / 4, "only {dropped} answers were dropped");
    let log = log.lock().await;
    assert_eq!(log.len(), CHATS * TURNS);
    assert_eq!(faults(&log), []);
    assert_idle(&cluster).await;
}

/// Every node says that no turn is held and no ticket waits.
async fn assert_idle(cluster: &Cluster) {
    let until = Instant::now() + 10 * SECOND;
    for node in 0..cluster.nodes.len() {
        loop {
            let turns = cluster.status(node).await.map(|status| status["turns"].clone());
            if turns == Some(json!({ "held": 0, "waiting": 0 })) {
                break;
            }
            assert!(Instant::now() < until, "{} has {turns:?}", cluster.nodes[node].name);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_c13_held_turns_outlast_a_member_that_comes_and_goes() {
    const HELD: usize = 1_000;
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "c13");
    let session = prefix.open(0, LONG_MS).await;
    let takes = (0..HELD).map(|number| {
        let (prefix, key) = (prefix.clone(), format!("demo:c13-{number}"));
        async move { prefix.take(number % 3, session, &key).await }
    });
    let held = join_all(takes).await;
    assert!(held.iter().all(|stand| stand.fence.is_some()));

    let fourth = cluster.add_node();
    let first = cluster.nodes[0].cluster.to_string();
    cluster.nodes[fourth].start(&["--join", &first]);
    cluster.wait_ready(fourth).await;
    let id = cluster.node_id(fourth).await;
    cluster.leave(fourth, id).await;

    for node in 0..3 {
        let asks = held.iter().map(|stand| prefix.ask(node, stand.ticket, Duration::ZERO));
        for (before, after) in held.iter().zip(join_all(asks).await) {
            assert_eq!(before.fence, after.fence);
        }
    }
}

// ------------------------------------------------------------------------------------ messages

#[tokio::test(flavor = "multi_thread")]
async fn g1_one_message_at_three_nodes_at_one_instant_is_one_turn() {
    const MESSAGES: usize = 1_000;
    const CHATS: usize = 50;
    let cluster = Cluster::start(Options::nodes(3)).await;
    let demo = Demo::new(cluster.public());

    let slots = Arc::new(tokio::sync::Semaphore::new(20));
    let mut running = tokio::task::JoinSet::new();
    for number in 0..MESSAGES {
        let (demo, slots) = (demo.clone(), slots.clone());
        running.spawn(async move {
            let _slot = slots.acquire_owned().await;
            let id = format!("g1-{number}");
            let chat = format!("g1-chat-{}", number % CHATS);
            let text = format!("text {number}");
            let start = Barrier::new(3);
            let posts = (0..3).map(|node| {
                let (demo, start, id, chat, text) = (&demo, &start, &id, &chat, &text);
                async move {
                    start.wait().await;
                    demo.post(node, id, chat, text).await
                }
            });
            join_all(posts).await
        });
    }
    let mut without_a_first = 0;
    while let Some(answers) = running.join_next().await {
        let answers = answers.unwrap();
        let first = answers.iter().filter(|duplicate| !**duplicate).count();
        assert!(first <= 1, "of three deliveries, not one but {first} were the first");
        without_a_first += 1 - first;
    }
    // Only where the first's answer was lost may all three have been told of a duplicate.
    let lost = demo.api.counts.open_attempts.load(Ordering::Relaxed);
    assert!(without_a_first <= lost, "{without_a_first} without a first, {lost} answers lost");

    let mut turns = BTreeSet::new();
    for chat in 0..CHATS {
        let chat = format!("g1-chat-{chat}");
        let replies = wait_for_replies(&demo, &chat, MESSAGES / CHATS).await;
        for reply in replies {
            let number = reply.in_reply_to.strip_prefix("g1-").unwrap().to_owned();
            assert_eq!(reply.text, format!("echo: text {number}"));
            assert!(turns.insert(number), "{} was answered twice", reply.in_reply_to);
        }
    }
    assert_eq!(turns.len(), MESSAGES);
    assert_idle(&cluster).await;
}

/// Waits until a chat has so many replies, and then sees that there are not more.
async fn wait_for_replies(demo: &Demo, chat: &str, wanted: usize) -> Vec<Reply> {
    let until = Instant::now() + 30 * SECOND;
    loop {
        let replies = demo.replies(0, chat).await;
        assert!(replies.len() <= wanted, "{chat} has more than {wanted}: {replies:?}");
        if replies.len() == wanted {
            return replies;
        }
        assert!(Instant::now() < until, "{chat} has {} of {wanted}: {replies:?}", replies.len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

const ORDER: [(&str, &str); 4] = [
    ("order", "What would you like?"),
    ("tea, \"green\"", "How many?"),
    ("2", "Where to?"),
    ("12 High Street", "Confirm? (yes/no)"),
];

fn assert_summary(text: &str) {
    for part in ["tea, \"green\"", "2", "12 High Street"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c1_an_order_goes_on_at_the_right_question_after_its_process_was_killed() {
    let mut cluster = Cluster::start(Options::nodes(3).lease("2s")).await;
    let demo = Demo::new(cluster.public());
    let say = async |node: usize, step: usize| {
        let id = format!("c1-{step}");
        demo.post(node, &id, "c1", ORDER[step].0).await;
        demo.answer_to((node + 1) % 3, &id, "c1", 10 * SECOND).await.text
    };

    // The order begins at n1, its second question is answered through n2.
    assert_eq!(say(0, 0).await, ORDER[0].1);
    assert_eq!(say(1, 1).await, ORDER[1].1);
    // n2 has the flow in memory. It dies; the next answers go to the survivors.
    cluster.nodes[1].kill();
    assert_eq!(say(2, 2).await, ORDER[2].1);
    assert_eq!(say(0, 3).await, ORDER[3].1);
    // The killed node comes back, catches up, and takes the last answer itself.
    cluster.restart(1).await;
    cluster.wait_settled().await;
    demo.post(1, "c1-4", "c1", "yes").await;
    let last = demo.answer_to(1, "c1-4", "c1", 10 * SECOND).await;
    assert_summary(&last.text);

    let lists = join_all((0..3).map(|node| demo.replies(node, "c1"))).await;
    assert_eq!(lists[0].len(), 5, "one text a message: {:?}", lists[0]);
    assert!(lists.iter().all(|list| *list == lists[0]), "{lists:?}");
    let fences: Vec<u64> = lists[0].iter().filter_map(|reply| reply.fence).collect();
    assert!(fences.windows(2).all(|pair| pair[0] < pair[1]), "{fences:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn c1_an_order_goes_on_wherever_in_it_its_process_is_killed() {
    let mut cluster = Cluster::start(Options::nodes(3).lease("1s")).await;
    for kill_at in 0..=ORDER.len() {
        let demo = Demo::new(cluster.public());
        let chat = format!("c1-kill-{kill_at}");
        let mut node = kill_at % 3;
        let mut killed = None;
        for step in 0..=ORDER.len() {
            let id = format!("{chat}-{step}");
            let text = ORDER.get(step).map_or("yes", |(text, _)| text);
            demo.post(node, &id, &chat, text).await;
            if step == kill_at {
                // Accepted, and perhaps in the middle of its turn.
                cluster.nodes[node].kill();
                killed = Some(node);
                node = (node + 1) % 3;
            }
            let reply = demo.answer_to(node, &id, &chat, 10 * SECOND).await;
            match ORDER.get(step) {
                Some((_, question)) => assert_eq!(reply.text, *question, "step {step} of {chat}"),
                None => assert_summary(&reply.text),
            }
        }
        let replies = demo.replies(node, &chat).await;
        let answered: BTreeSet<&str> = replies.iter().map(|r| r.in_reply_to.as_str()).collect();
        assert_eq!(replies.len(), ORDER.len() + 1, "{replies:?}");
        assert_eq!(answered.len(), replies.len(), "{replies:?}");
        cluster.restart(killed.unwrap()).await;
        cluster.wait_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn n6_the_order_flow_says_exactly_what_it_says() {
    let cluster = Cluster::start(Options::nodes(1)).await;
    let demo = Demo::new(cluster.public());
    // What is said, what must be heard; `None` = the summary.
    let talks: [&[(&str, Option<&str>)]; 5] = [
        &[("hello", Some("echo: hello"))],
        &[
            ("order", Some("What would you like?")),
            ("order", Some("How many?")),
            ("many", Some("How many?")),
            ("3", Some("Where to?")),
            ("here", Some("Confirm? (yes/no)")),
            ("maybe", Some("Confirm? (yes/no)")),
            ("no", Some("Order dropped.")),
            ("3", Some("echo: 3")),
        ],
        &[("order", Some("What would you like?")), ("cancel", Some("Cancelled."))],
        &[
            ("order", Some("What would you like?")),
            ("tea", Some("How many?")),
            ("cancel", Some("Cancelled.")),
            ("yes", Some("echo: yes")),
        ],
        &[
            ("order", Some("What would you like?")),
            ("tea, \"green\"", Some("How many?")),
            ("2", Some("Where to?")),
            ("12 High Street", Some("Confirm? (yes/no)")),
            ("yes", None),
            ("order", Some("What would you like?")),
        ],
    ];
    for (talk, lines) in talks.into_iter().enumerate() {
        let chat = format!("n6-{talk}");
        for (line, (said, heard)) in lines.iter().enumerate() {
            let id = format!("n6-{talk}-{line}");
            assert!(!demo.post(0, &id, &chat, said).await, "{id} is no duplicate");
            let reply = demo.answer_to(0, &id, &chat, 10 * SECOND).await;
            match heard {
                Some(heard) => assert_eq!(reply.text, *heard, "after {said:?} in talk {talk}"),
                None => assert_summary(&reply.text),
            }
        }
        assert_eq!(demo.replies(0, &chat).await.len(), lines.len(), "one text a message");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn case_c5_messages_keep_coming_while_their_holder_is_killed() {
    const LEASE: Duration = SECOND;
    let mut cluster = Cluster::start(Options::nodes(3).lease("1s")).await;
    let demo = Demo::new(cluster.public());
    let mut accepted = Vec::new();
    let mut killed_at = None;
    for number in 0..150 {
        let id = format!("c5-{number}");
        let node = number % 3;
        demo.post(node, &id, "c5", &format!("m{number}")).await;
        accepted.push(id);
        if number == 61 {
            // n2 has just taken a message: it is in the middle of its turn, or just after it.
            assert_eq!(node, 1);
            cluster.nodes[node].kill();
            killed_at = Some(Instant::now());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // The message that was in the dead process's hands, and all after it, are answered in time.
    let killed_at = killed_at.unwrap();
    let replies = wait_for_replies(&demo, "c5", accepted.len()).await;
    println!("all answered {:?} after the kill", killed_at.elapsed());
    assert!(killed_at.elapsed() < 2 * LEASE + 3 * SECOND, "{:?}", killed_at.elapsed());
    let answered: BTreeMap<&str, usize> =
        replies.iter().enumerate().map(|(at, reply)| (reply.in_reply_to.as_str(), at)).collect();
    assert_eq!(answered.len(), accepted.len(), "each once");
    // One poster, one message after the other: the answers are in that order too.
    let order: Vec<&str> = replies.iter().map(|reply| reply.in_reply_to.as_str()).collect();
    assert_eq!(order, accepted);
    cluster.restart(1).await;
    assert_idle(&cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn g1_nothing_acknowledged_is_missing_after_all_three_were_killed() {
    let mut cluster = Cluster::start(Options::nodes(3).lease("1s")).await;
    let demo = Demo::new(cluster.public());
    let prefix = Prefix::new(cluster.api(), "all");

    // Phase 1: writers through every node, until the processes are gone under them.
    let writers = Writers::start(&demo, &prefix, 12);
    writers.have_written(400).await;
    cluster.kill_all();
    let ledger = writers.stopped().await;
    let (rows, messages) = ledger.len();
    println!("{rows} rows and {messages} messages were acknowledged");

    // Phase 2: all of it is there, and every message is answered once.
    cluster.restart_all().await;
    let missing = ledger.missing_rows(&prefix).await;
    assert!(missing.is_empty(), "{} rows are missing: {missing:?}", missing.len());
    ledger.every_message_is_answered_once(&demo).await;
    cluster.states_are_equal().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn case_c19_a_hundred_waiting_chats_get_one_turn_each_when_all_start_at_once() {
    const CHATS: usize = 100;
    let mut cluster = Cluster::start(Options::nodes(3).lease("1s")).await;
    let demo = Demo::new(cluster.public());
    let posts = (0..CHATS).map(|chat| {
        let demo = &demo;
        async move {
            let (id, chat) = (format!("c19-{chat}"), format!("c19-chat-{chat}"));
            demo.post(id.len() % 3, &id, &chat, "hi").await
        }
    });
    join_all(posts).await;
    cluster.kill_all();
    cluster.restart_all().await;
    for chat in 0..CHATS {
        let (id, chat) = (format!("c19-{chat}"), format!("c19-chat-{chat}"));
        let reply = demo.answer_to(chat.len() % 3, &id, &chat, 30 * SECOND).await;
        assert_eq!(reply.text, "echo: hi");
    }
    assert_idle(&cluster).await;
    for chat in 0..CHATS {
        let replies = demo.replies(0, &format!("c19-chat-{chat}")).await;
        assert_eq!(replies.len(), 1, "one turn: {replies:?}");
    }
}
