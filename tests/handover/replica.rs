//! The process under test: a node, a bot with all kinds of conversations, and their listeners.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use botmesh::bot::{
    Bot, BotBuilder, Convo, Coordination, Durability, Fallback, Flow, FlowId, Flows, Handover,
    Next, Result, Route,
};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::provider::webhook::WebhookProvider;
use botmesh::raft::{Node, NodeOptions, Secret, Start};
use botmesh::steps;
use botmesh::store::GroupStore;
use botmesh::types::Prefix;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Where the process finds its [`Role`].
pub(crate) const ROLE: &str = "BOTMESH_TEST_ROLE";
pub(crate) const LEASE: Duration = Duration::from_secs(1);
pub(crate) const SETTLE: Duration = Duration::from_secs(4);
/// Work that ends within `SETTLE`.
pub(crate) const WORKS: Duration = Duration::from_secs(3);
pub(crate) const NOTICE: &str = "Let's start again.";

/// What one process is.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Role {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    pub(crate) secret: String,
    pub(crate) cluster: SocketAddr,
    pub(crate) public: SocketAddr,
    /// Nobody: it founds the group.
    pub(crate) join: Option<SocketAddr>,
    pub(crate) durable: bool,
    /// Which release of the bot.
    pub(crate) release: u32,
}

/// A file that is there once the work of a chat has begun.
pub(crate) fn begun(dir: &Path, chat: &str) -> PathBuf {
    dir.join(format!("begun-{chat}"))
}

#[derive(Default, Serialize, Deserialize)]
struct Order {
    item: String,
}

steps! { enum At { Item, Count } }

async fn order(at: At, c: &mut Convo<Order>) -> Result<Next<At>> {
    match at {
        At::Item => {
            c.state.item = c.ask("What?").await?;
            c.next()
        }
        At::Count => {
            let count = c.ask("How many?").await?;
            c.say(format!("{count} × {}", c.state.item)).await?;
            c.end()
        }
    }
}

steps! { enum Reversed { Count, Item } }

async fn reversed(at: Reversed, c: &mut Convo<Order>) -> Result<Next<Reversed>> {
    match at {
        Reversed::Count => {
            c.ask("How many first?").await?;
            c.next()
        }
        Reversed::Item => {
            c.ask("What then?").await?;
            c.end()
        }
    }
}

steps! { enum Both { Questions } }

/// Two questions in a step. In the second release the second one does not wait for long.
async fn pair(patience: Duration, c: &mut Convo<()>) -> Result<Next<Both>> {
    let first = c.ask("first?").await?;
    match c.ask("second?").within(patience).await? {
        Some(second) => c.say(format!("{first}+{second}")).await?,
        None => c.say(format!("{first} and no second")).await?,
    }
    c.end()
}

steps! { enum Steps { Work, Then } }

/// Works for long on its first answer, once in the first replica; then asks another question.
async fn work(role: &Role, at: Steps, c: &mut Convo<String>) -> Result<Next<Steps>> {
    static WORKED: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    if at == Steps::Then {
        let second = c.ask("second?").await?;
        c.say(format!("{}+{second}", c.state)).await?;
        return c.end();
    }
    c.state = c.ask("first?").await?;
    let chat = c.chat()?.chat;
    let anew = WORKED.lock().unwrap().get_or_insert_default().insert(chat.clone());
    if role.name == "n1" && anew {
        // The step is suspended here first: what must be kept before it goes on is kept.
        tokio::task::yield_now().await;
        std::fs::write(begun(&role.dir, &chat), "")?;
        let time = if c.state == "late" { WORKS } else { 10 * SETTLE };
        tokio::time::sleep(time).await;
        c.say("too late").await?;
    }
    c.next()
}

steps! { enum Known { Name, Age } }

#[derive(Default, Serialize, Deserialize)]
struct Profile {
    name: String,
}

async fn profile(at: Known, c: &mut Convo<Profile>) -> Result<Next<Known>> {
    match at {
        Known::Name => {
            c.state.name = c.ask("Name?").await?;
            c.next()
        }
        Known::Age => {
            let age = c.ask("Age?").await?;
            c.say(format!("{}, {age}", c.state.name)).await?;
            c.end()
        }
    }
}

#[derive(Default, Serialize, Deserialize)]
struct Wider {
    name: String,
    #[serde(default)]
    color: Option<String>,
}

async fn wider(at: Known, c: &mut Convo<Wider>) -> Result<Next<Known>> {
    match at {
        Known::Name => {
            c.state.name = c.ask("Name?").await?;
            c.next()
        }
        Known::Age => {
            let age = c.ask("Age?").await?;
            let color = c.state.color.as_deref().unwrap_or("no color");
            c.say(format!("{}, {age}, {color}", c.state.name)).await?;
            c.end()
        }
    }
}

steps! { enum Before { Item, Extra } }

async fn before(at: Before, c: &mut Convo<Order>) -> Result<Next<Before>> {
    match at {
        Before::Item => {
            c.state.item = c.ask("What?").await?;
            c.next()
        }
        Before::Extra => {
            c.ask("Extra?").await?;
            c.end()
        }
    }
}

const ORDER: FlowId<Order> = FlowId::new("order");
const FORWARDED: FlowId<Order> = FlowId::new("forwarded");
const CHANGED: FlowId<Order> = FlowId::new("changed");
const GONE: FlowId<Order> = FlowId::new("gone");
const PAIR: FlowId<()> = FlowId::new("pair");
const WORK: FlowId<String> = FlowId::new("work");
const TALK: FlowId<()> = FlowId::new("talk");
const PROFILE: FlowId<Profile> = FlowId::new("profile");
const WIDER: FlowId<Wider> = FlowId::new("profile");

fn flows(bot: BotBuilder, role: &Role) -> BotBuilder {
    let patience = [Duration::from_secs(60), Duration::from_secs(1)][role.release as usize - 1];
    let worker = role.clone();
    let bot = bot
        .flow(Flow::new(ORDER, order).persistent())
        .flow(Flow::new(FORWARDED, order))
        .flow(Flow::new(PAIR, async move |_: Both, c: &mut _| pair(patience, c).await).persistent())
        .flow(
            Flow::new(WORK, async move |at: Steps, c: &mut _| work(&worker, at, c).await)
                .persistent(),
        )
        .conversation(TALK, async |c| {
            let first = c.ask("first?").await?;
            let second = c.ask("second?").await?;
            Ok(c.say(format!("{first}+{second}")).await?)
        });
    match role.release {
        1 => bot
            .flow(Flow::new(CHANGED, order))
            .flow(Flow::new(GONE, before).persistent())
            .flow(Flow::new(PROFILE, profile).persistent())
            .on("profile", async |ctx| Ok(ctx.enter(PROFILE, Profile::default()).await?)),
        _ => bot
            .flow(Flow::new(CHANGED, reversed))
            .flow(Flow::new(GONE, order).persistent())
            .flow(Flow::new(WIDER, wider).persistent())
            .on("profile", async |ctx| Ok(ctx.enter(WIDER, Wider::default()).await?)),
    }
}

fn routes(bot: BotBuilder) -> BotBuilder {
    bot.on("order", async |ctx| Ok(ctx.enter(ORDER, Order::default()).await?))
        .on("forwarded", async |ctx| Ok(ctx.enter(FORWARDED, Order::default()).await?))
        .on("changed", async |ctx| Ok(ctx.enter(CHANGED, Order::default()).await?))
        .on("gone", async |ctx| Ok(ctx.enter(GONE, Order::default()).await?))
        .on("pair", async |ctx| Ok(ctx.enter(PAIR, ()).await?))
        .on("work", async |ctx| Ok(ctx.enter(WORK, String::new()).await?))
        .on("talk", async |ctx| Ok(ctx.enter(TALK, ()).await?))
        .on("poison", async |_| panic!("this message is poison"))
        .on(Route::Any, async |ctx| Ok(ctx.reply(format!("echo: {}", ctx.text())).await?))
}

/// Runs the process until it is told to stop.
pub(crate) async fn run(role: Role) -> Result {
    let cluster = TcpListener::bind(role.cluster).await?;
    let public = TcpListener::bind(role.public).await?;
    let secret = Secret::new(&role.secret)?;
    let start = match role.join {
        Some(join) => Start::Join(vec![join.to_string()]),
        None => Start::Bootstrap,
    };
    let advertise = role.cluster.to_string();
    let options = NodeOptions::new(&role.name, role.dir.join("data"), advertise, secret);
    let node = Node::open(NodeOptions { start, ..options }).await?;
    let peers = node.router();
    tokio::spawn(async move { axum::serve(cluster, peers).await });
    node.joined(Duration::from_secs(30)).await?;

    let store = GroupStore::new(node.as_group(), Prefix::new("rooms")?);
    let lease = CoordinatorOptions { lease: LEASE, ..Default::default() };
    let handover = Handover {
        flows: Flows::Forward,
        fallback: Fallback::Notify,
        notify_message: Some(NOTICE.to_owned()),
        ..Handover::default()
    };
    let durability = if role.durable { Durability::On } else { Durability::Off };
    let coordination = Coordination::new(store.coordinator(lease))
        .durability(durability)
        .settle(SETTLE)
        .handover(handover);
    let bot = flows(Bot::builder(), &role);
    let bot = routes(bot)
        .provider(WebhookProvider::new("web"))
        .store(store)
        .coordination(coordination)
        .build()
        .await?;
    let webhook = bot.router();
    tokio::spawn(async move { axum::serve(public, webhook).await });
    let mut stop = signal(SignalKind::terminate())?;
    bot.run_until(async {
        stop.recv().await;
    })
    .await?;
    node.shutdown().await;
    Ok(())
}
