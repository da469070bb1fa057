//! One process of several, for examples that tests kill: a node of the group with a bot on it. It
//! says `complete` once the group has three voters, `leads` when it is elected to connect, `stands by` when
//! it is not, and `in doubt` where a reply may have arrived and is sent again.

use std::time::Duration;

use botmesh::bot::{Bot, BotBuilder, Coordination, Event, Result};
use botmesh::coordinator::CoordinatorOptions;
use botmesh::raft::{Node, NodeOptions, Role, Secret, Start};
use botmesh::store::GroupStore;
use botmesh::types::Prefix;
use tokio::net::TcpListener;

/// A replica with a lease that tests need not wait for.
pub async fn replica(bot: BotBuilder, store: GroupStore) -> Result<Bot> {
    let lease = CoordinatorOptions { lease: Duration::from_secs(1), ..Default::default() };
    let coordination = Coordination::new(store.coordinator(lease));
    Ok(bot.store(store).coordination(coordination).build().await?)
}

/// Which process it is.
pub struct Member<'a> {
    pub name: &'a str,
    pub dir: &'a str,
    pub address: &'a str,
    pub secret: &'a str,
    /// The address of a member; nobody's, where it founds the group.
    pub join: &'a [String],
}

impl Member<'_> {
    /// Runs until it is told to end.
    pub async fn run(&self, bot: BotBuilder) -> Result {
        let start = match self.join {
            [] => Start::Bootstrap,
            join => Start::Join(join.to_vec()),
        };
        let listener = TcpListener::bind(self.address).await?;
        let (address, secret) = (self.address.to_owned(), Secret::new(self.secret)?);
        let options = NodeOptions::new(self.name, self.dir, address, secret);
        let node = Node::open(NodeOptions { start, ..options }).await?;
        let peers = node.router();
        let peers = tokio::spawn(async move { axum::serve(listener, peers).await });
        node.joined(Duration::from_secs(30)).await?;
        let whole = node.clone();
        tokio::spawn(async move {
            // Three voters: any one of them may go.
            while whole.status().nodes.iter().filter(|n| n.role != Role::Learner).count() < 3 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            println!("complete");
        });
        let bot = replica(bot, GroupStore::new(node.as_group(), Prefix::new("bot")?)).await?;
        let mut events = bot.events();
        tokio::spawn(async move {
            while let Some(event) = events.next().await {
                match event {
                    Event::Leader { .. } => println!("leads"),
                    Event::Follower { .. } => println!("stands by"),
                    Event::SendUnknown { .. } => println!("in doubt"),
                    _ => {}
                }
            }
        });
        let mut end = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        let ended = async move {
            end.recv().await;
        };
        bot.run_until(ended).await?;
        node.shutdown().await;
        peers.abort();
        Ok(())
    }
}
