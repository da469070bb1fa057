//! What a message costs: in at a provider, journaled, through a step of a persistent flow, and the
//! reply out at the provider again, with durability.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use botmesh::bot::{Bot, BotBuilder, Convo, Coordination, Durability, Flow, FlowId, Next, Route};
use botmesh::coordinator::{CoordinatorOptions, Sticky};
use botmesh::provider::{
    Capabilities, Closed, Delivery, Link, Provider, ProviderError, SendError, SentId,
};
use botmesh::steps;
use botmesh::store::GroupStore;
use botmesh::types::{ChatKey, Message, Prefix};
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::Fault;
use super::cluster::Cluster;
use super::load::{Many, Meter};
use super::report::Checks;

/// A reply that does not come within this is lost.
const PATIENCE: Duration = Duration::from_secs(10);

steps! { enum At { Again } }

const COUNT: FlowId<u64> = FlowId::new("count");

/// One step, again and again: each message is an answer, a checkpoint and a question.
async fn count(_at: At, c: &mut Convo<u64>) -> botmesh::bot::Result<Next<At>> {
    c.ask("And?").await?;
    c.state += 1;
    c.goto(At::Again)
}

/// A transport that hands each reply to whoever waits for its chat.
#[derive(Clone, Default)]
struct Ears(Arc<Mutex<HashMap<ChatKey, mpsc::UnboundedSender<String>>>>);

#[async_trait]
impl Provider for Ears {
    fn id(&self) -> &str {
        "bench"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: false, listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        link.closing().await;
        Ok(Closed::Asked)
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        if let Some(ear) = self.0.lock().get(&delivery.chat) {
            // Whoever listened may have given up.
            let _ = ear.send(delivery.in_reply_to.clone());
        }
        Ok(SentId(delivery.id.clone()))
    }

    fn webhook(&self) -> Option<Arc<dyn botmesh::provider::Webhook>> {
        None
    }
}

fn flows(bot: BotBuilder) -> BotBuilder {
    bot.flow(Flow::new(COUNT, count).persistent())
        .on(Route::Any, async |ctx| Ok(ctx.enter(COUNT, 0).await?))
}

/// A user of one chat, whose messages go to these replicas in turn.
struct User {
    links: Vec<Link>,
    chat: ChatKey,
    heard: mpsc::UnboundedReceiver<String>,
    said: u64,
}

impl User {
    fn new(links: Vec<Link>, ears: &Ears, name: String) -> Self {
        let chat = ChatKey::new("bench", name);
        let (ear, heard) = mpsc::unbounded_channel();
        ears.0.lock().insert(chat.clone(), ear);
        Self { links, chat, heard, said: 0 }
    }

    /// One message and its reply.
    async fn says(&mut self) -> Result<(), Fault> {
        self.said += 1;
        let id = format!("{}-{}", self.chat.chat, self.said);
        let link = &self.links[self.said as usize % self.links.len()];
        link.deliver(vec![Message::text(&id, self.chat.clone(), "go on")]).await?;
        match tokio::time::timeout(PATIENCE, self.heard.recv()).await? {
            Some(answered) if answered == id => Ok(()),
            other => Err(format!("{id} was answered by {other:?}").into()),
        }
    }
}

/// What was measured.
pub(crate) struct Messages {
    /// Message → reply at one client, in ms.
    pub(crate) one: Vec<f64>,
    /// Log entries a message took there.
    pub(crate) entries: f64,
    /// Many at a time.
    pub(crate) many: Many,
}

/// Runs a bot on the node of this process and talks to it.
pub(crate) async fn through_bot(
    cluster: &Cluster,
    chats: usize,
    in_flight: usize,
    length: Duration,
) -> Result<Messages, Fault> {
    let store = GroupStore::new(cluster.group(), Prefix::new("messages")?);
    let coordinator = store.coordinator(CoordinatorOptions::default());
    let ears = Ears::default();
    let bot = flows(Bot::builder())
        .provider(ears.clone())
        .store(store)
        .coordination(Coordination::new(coordinator))
        .build()
        .await?;
    bot.start().await?;

    let mut alone = User::new(vec![bot.link()], &ears, "alone".to_owned());
    alone.says().await?;
    let (before, mut one) = (cluster.applied(), Vec::new());
    for _ in 0..500 {
        let began = Instant::now();
        alone.says().await?;
        one.push(began.elapsed().as_secs_f64() * 1_000.0);
    }
    let entries = (cluster.applied() - before) as f64 / one.len() as f64;

    let meter = Arc::new(Meter::new(length));
    let workers = (0..in_flight).map(|worker| {
        // Each worker has chats of its own, so that a chat has one message in flight.
        let users: Vec<User> = (worker..chats)
            .step_by(in_flight)
            .map(|chat| User::new(vec![bot.link()], &ears, format!("chat-{chat}")))
            .collect();
        let talking = talk(users, meter.clone());
        async { tokio::spawn(talking).await? }
    });
    let took: Vec<Vec<f64>> = try_join_all(workers).await?;
    bot.stop().await?;
    let meter = Arc::into_inner(meter).ok_or("a worker is still there")?;
    // An answer of another message, or none, has ended the run with an error.
    let checks = Checks::default();
    let many = Many { per_second: meter.per_second(), grants: took.concat(), checks };
    Ok(Messages { one, entries, many })
}

async fn talk(mut users: Vec<User>, meter: Arc<Meter>) -> Result<Vec<f64>, Fault> {
    let mut took = Vec::new();
    loop {
        for user in &mut users {
            if !meter.goes_on() {
                return Ok(took);
            }
            let began = Instant::now();
            user.says().await?;
            took.push(began.elapsed().as_secs_f64() * 1_000.0);
            meter.turn_done();
        }
    }
}

/// Chats that the costs of a message are counted over.
const COSTS_CHATS: usize = 200;
/// Messages a chat before the counting: a chat that goes to and fro is called back twice from each of two
/// replicas, and then stays with none (SPEC B10).
const BEFORE: usize = 6;
/// Messages a chat that are counted.
const COUNTED: usize = 3;

/// Log entries a message takes, one after another through two hundred chats: with and without
/// durability, turns that stay and turns that do not, to the same replica and to two in turn. A reply
/// that is sent is recorded with what comes next, as on any bot that is not idle.
pub(crate) async fn costs(cluster: &Cluster) -> Result<Vec<(String, f64)>, Fault> {
    let mut costs = Vec::new();
    for (journal, durability) in [("durable", Durability::On), ("plain", Durability::Off)] {
        for (stays, sticky) in [("sticky", Some(Sticky::default())), ("released", None)] {
            let prefix = Prefix::new(format!("costs-{journal}-{stays}"))?;
            let store = GroupStore::new(cluster.group(), prefix);
            let ears = Ears::default();
            let mut bots = Vec::new();
            for _ in 0..2 {
                let coordinator = store.coordinator(CoordinatorOptions::default());
                let coordination =
                    Coordination::new(coordinator).durability(durability).sticky(sticky);
                let bot = flows(Bot::builder()).provider(ears.clone()).store(store.clone());
                let bot = bot.coordination(coordination).build().await?;
                bot.start().await?;
                bots.push(bot);
            }
            let both: Vec<Link> = bots.iter().map(Bot::link).collect();
            for (delivery, links) in [("affine", vec![both[0].clone()]), ("round_robin", both)] {
                let mut users: Vec<User> = (0..COSTS_CHATS)
                    .map(|chat| User::new(links.clone(), &ears, format!("{delivery}-{chat}")))
                    .collect();
                let mut before = 0;
                for round in 0..BEFORE + COUNTED {
                    if round == BEFORE {
                        before = cluster.applied();
                    }
                    for user in &mut users {
                        user.says().await?;
                    }
                }
                let entries = (cluster.applied() - before) as f64 / (COUNTED * COSTS_CHATS) as f64;
                costs.push((format!("entries_per_message_{journal}_{delivery}_{stays}"), entries));
            }
            for bot in bots {
                bot.stop().await?;
            }
        }
    }
    Ok(costs)
}
