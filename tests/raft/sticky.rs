//! Turns that stay with their replica (SPEC B10), on three nodes: what a message costs in log entries,
//! and that order and memory hold wherever it is delivered.

use std::time::{Duration, Instant};

use botmesh::bot::{Bot, Convo, Coordination, Durability, Flow, FlowId, Next, Result, Route};
use botmesh::coordinator::{CoordinatorOptions, GroupCoordinator, Sticky};
use botmesh::group::look;
use botmesh::machine::{Authority, Command, Op};
use botmesh::steps;
use botmesh::store::GroupStore;
use botmesh::testing::ScriptedProvider;
use botmesh::types::{ReplicaId, TicketId};

use super::cluster::*;

steps! { enum At { Again } }

const COUNT: FlowId<Vec<String>> = FlowId::new("count");

async fn count(_at: At, c: &mut Convo<Vec<String>>) -> Result<Next<At>> {
    let heard = c.state.join("+");
    let text = c.ask(format!("so far {heard}")).await?;
    c.state.push(text);
    c.goto(At::Again)
}

struct Replica {
    bot: Bot,
    provider: ScriptedProvider,
    coordinator: GroupCoordinator,
}

async fn replica(
    on: &Running,
    provider: &ScriptedProvider,
    durability: Durability,
    sticky: bool,
) -> Replica {
    let store = GroupStore::new(on.node.as_group(), prefix());
    let lease = Duration::from_secs(3);
    let replica_id = Some(ReplicaId(format!("on-{}", on.id())));
    let coordinator = store.coordinator(CoordinatorOptions { lease, replica_id });
    let provider = provider.replica();
    let coordination = Coordination::new(coordinator.clone())
        .durability(durability)
        .sticky(sticky.then(Sticky::default));
    let bot = Bot::builder()
        .flow(Flow::new(COUNT, count).persistent())
        .on(Route::Any, async |ctx| Ok(ctx.enter(COUNT, Vec::new()).await?))
        .provider(provider.clone())
        .store(store)
        .coordination(coordination)
        .build()
        .await
        .unwrap();
    bot.start().await.unwrap();
    Replica { bot, provider, coordinator }
}

fn so_far(upto: usize) -> String {
    let heard: Vec<String> = (1..=upto).map(|n| n.to_string()).collect();
    format!("so far {}", heard.join("+"))
}

/// One message after another, each to the next of the replicas; answers log entries a message.
async fn talk(on: &Running, replicas: &[&Replica], name: &str, messages: usize) -> f64 {
    let (before, began) = (on.status().applied, Instant::now());
    for n in 0..messages {
        let user = replicas[n % replicas.len()].provider.user(name);
        let text = if n == 0 { "hello".to_owned() } else { n.to_string() };
        user.says(&text).await;
        user.hears(&so_far(n)).await;
    }
    let entries = (on.status().applied - before) as f64;
    // Each of the three replicas renews once a second, however slow the machine.
    let renewals = 3.0 * (began.elapsed().as_secs_f64() + 1.0);
    (entries - renewals) / messages as f64
}

/// What else is in the log now and then.
const OTHERS: f64 = 0.5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b10_on_nodes_a_message_costs_what_is_promised_and_order_holds() {
    const MESSAGES: usize = 40;
    let lab = Lab::new();
    let nodes = lab.three().await;
    for (durability, sticky, affine_costs) in [
        (Durability::Off, true, 1.0),
        (Durability::Off, false, 2.0),
        (Durability::On, true, 2.0),
        (Durability::On, false, 2.0),
    ] {
        let people = ScriptedProvider::new("x");
        let mut replicas = Vec::new();
        for node in &nodes {
            replicas.push(replica(node, &people, durability, sticky).await);
        }
        let case = format!("{durability:?}-{sticky}");
        let affine = talk(&nodes[0], &[&replicas[1]], &format!("affine-{case}"), MESSAGES).await;
        println!("{case}: affine {affine:.2}");
        assert!(affine <= affine_costs + OTHERS, "{case}: {affine}");
        // That the last reply was sent is recorded without another message, too.
        let room = replicas[1].provider.user(&format!("affine-{case}")).chat().to_string();
        let group = nodes[1].node.as_group();
        until("the outbox to be at its end", || {
            look(&*group, |machine| machine.outbox_owner(&prefix(), &room).is_none())
        })
        .await;
        let all: Vec<&Replica> = replicas.iter().collect();
        let turns = talk(&nodes[0], &all, &format!("round-{case}"), MESSAGES).await;
        println!("{case}: round robin {turns:.2}");
        // Ticket, call-back, checkpoint; or message, commit, and that it was sent.
        assert!(turns <= 3.0 + OTHERS, "{case}: {turns}");
        for replica in &replicas {
            replica.bot.stop().await.unwrap();
        }
        let held = look(&*nodes[0].node.as_group(), |machine| machine.turn_counts());
        assert_eq!(held, (0, 0), "{case}: a stop leaves nothing behind");
    }
    converge(&nodes.iter().collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b10_on_nodes_a_dead_holders_chats_go_on_after_its_lease() {
    let lab = Lab::new();
    let nodes = lab.three().await;
    for durability in [Durability::Off, Durability::On] {
        let people = ScriptedProvider::new("x");
        let holder = replica(&nodes[1], &people, durability, true).await;
        let other = replica(&nodes[2], &people, durability, true).await;
        let name = format!("{durability:?}");
        talk(&nodes[0], &[&holder], &name, 5).await;
        holder.coordinator.crash();
        let user = other.provider.user(&name);
        user.says("5").await.hears(&so_far(5)).await;
        user.says("6").await.hears(&so_far(6)).await;
        other.bot.stop().await.unwrap();
    }
}

/// What has an older way takes it: where a voter knows no fences that go on, each message's turn is
/// released, and the conversation is none the worse.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m5_a_conversation_goes_on_in_a_group_with_older_programs() {
    let lab = Lab::new();
    let nodes = super::versions::three_old(&lab).await;
    let keep = Op::Keep { prefix: prefix(), ticket: TicketId(1), said: 0 };
    let commit = Command::Commit { by: Authority::Nobody, ops: vec![keep] };
    let refused = execute(&nodes[0].node, commit).await.unwrap_err().to_string();
    assert!(refused.contains("has announced level 1"), "{refused}");

    let people = ScriptedProvider::new("x");
    let first = replica(&nodes[0], &people, Durability::On, true).await;
    let second = replica(&nodes[1], &people, Durability::On, true).await;
    talk(&nodes[0], &[&first], "affine", 5).await;
    talk(&nodes[0], &[&first, &second], "round", 6).await;
    for one in [first, second] {
        one.bot.stop().await.unwrap();
    }
    converge(&nodes.iter().collect::<Vec<_>>()).await;
    assert!(nodes.iter().all(|one| one.status().command_level == 1));
}
