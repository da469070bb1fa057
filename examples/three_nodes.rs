//! Three nodes and three replicas of a bot, embedded by the library: a conversation begins on one,
//! that one is lost, and it goes on at another with what it knows.
//!
//! One process here, for a short program; three in earnest. `cargo run --example three_nodes`

use std::time::Duration;

use botmesh::bot::{Bot, Convo, Coordination, Flow, FlowId, Next, Result, Route};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::provider::webhook::WebhookProvider;
use botmesh::raft::{Node, NodeOptions, Secret, Start};
use botmesh::steps;
use botmesh::store::GroupStore;
use botmesh::types::Prefix;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

steps! { enum At { Name, Age } }

const HELLO: FlowId<String> = FlowId::new("hello");

async fn hello(at: At, c: &mut Convo<String>) -> Result<Next<At>> {
    match at {
        At::Name => {
            c.state = c.ask("What is your name?").await?;
            c.next()
        }
        At::Age => {
            let age: u32 = c.ask("And your age?").parse("A number, please.").await?;
            c.say(format!("{}, {age}: noted.", c.state)).await?;
            c.end()
        }
    }
}

/// One replica: a node, a bot on it, and the listeners of both.
struct Replica {
    node: Node,
    bot: Bot,
    public: String,
    listeners: Vec<JoinHandle<std::io::Result<()>>>,
}

impl Replica {
    async fn start(
        name: &str,
        dir: &std::path::Path,
        secret: &Secret,
        start: Start,
    ) -> Result<Self> {
        let cluster = TcpListener::bind("127.0.0.1:0").await?;
        let advertise = cluster.local_addr()?.to_string();
        let options = NodeOptions::new(name, dir.join(name), advertise, secret.clone());
        let node = Node::open(NodeOptions { start, ..options }).await?;
        let peers = node.router();
        let peers = tokio::spawn(async move { axum::serve(cluster, peers).await });
        node.joined(Duration::from_secs(30)).await?;

        let store = GroupStore::new(node.as_group(), Prefix::new("hello")?);
        let lease = CoordinatorOptions { lease: Duration::from_secs(1), ..Default::default() };
        let bot = Bot::builder()
            .provider(WebhookProvider::new("web"))
            .store(store.clone())
            .coordination(Coordination::new(store.coordinator(lease)))
            .flow(Flow::new(HELLO, hello).persistent())
            .on(Route::Any, async |ctx| Ok(ctx.enter(HELLO, String::new()).await?))
            .build()
            .await?;
        bot.start().await?;
        let public = TcpListener::bind("127.0.0.1:0").await?;
        let base = format!("http://{}/webhooks/web", public.local_addr()?);
        let routes = bot.router();
        let webhook = tokio::spawn(async move { axum::serve(public, routes).await });
        Ok(Self { node, bot, public: base, listeners: vec![peers, webhook] })
    }

    fn address(&self) -> String {
        let status = self.node.status();
        let own = status.nodes.iter().find(|node| Some(node.id) == status.node_id);
        own.map(|node| node.address.clone()).unwrap_or_default()
    }

    /// Says something and waits for the answer.
    async fn says(&self, id: &str, text: &str) -> Result {
        println!("ann> {text}");
        let client = reqwest::Client::new();
        let message = json!({ "id": id, "chat": "ann", "text": text });
        client.post(&self.public).json(&message).send().await?.error_for_status()?;
        loop {
            let replies = client.get(format!("{}/replies?chat=ann", self.public)).send().await?;
            let replies: Vec<Value> = replies.error_for_status()?.json().await?;
            if let Some(reply) = replies.iter().find(|reply| reply["in_reply_to"] == id) {
                println!("bot> {}", reply["text"].as_str().unwrap_or_default());
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Its machine loses power, as far as the others can tell.
    async fn vanishes(self) {
        for listener in &self.listeners {
            listener.abort();
        }
        // The bot says no good-bye either.
        std::mem::forget(self.bot);
        self.node.shutdown().await;
    }
}

#[tokio::main]
async fn main() -> Result {
    let dir = std::env::temp_dir().join(format!("three-nodes-{}", std::process::id()));
    let secret = Secret::random();
    let first = Replica::start("n1", &dir, &secret, Start::Bootstrap).await?;
    let join = Start::Join(vec![first.address()]);
    let second = Replica::start("n2", &dir, &secret, join.clone()).await?;
    let third = Replica::start("n3", &dir, &secret, join).await?;
    while third.node.status().nodes.len() < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("     (three nodes, one group)");

    first.says("m1", "hello").await?;
    second.says("m2", "Ann").await?;
    println!("     (the second replica is lost)");
    second.vanishes().await;
    third.says("m3", "twenty").await?;
    first.says("m4", "20").await?;

    // All bots first: one node of three could not commit that the last session is closed.
    first.bot.stop().await?;
    third.bot.stop().await?;
    third.node.shutdown().await;
    first.node.shutdown().await;
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
