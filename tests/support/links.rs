//! The links between the nodes of a group, each with a fault of its own.
//!
//! Every node announces an address at which a TCP proxy of this process listens, one a node. Problem:
//! all peers of a node then come in at one address and from one machine, and a fault is of one link.
//! Idea: whatever a node says to another begins with who says it, and where that one can be reached
//! (DESIGN 2). So the first bytes of a connection name the address of the one who dials.
//!
//! What a link does is looked at for every piece that passes, so a fault also meets connections that
//! are open already. What a cut link has swallowed comes out when it heals, as after a partition.
//!
//! Invariant: while a node does not listen, its proxy does not either. A dead node's address refuses
//! connections here as it does without a proxy; its peers tell a death by that.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::cluster::{Cluster, free_address};

/// What a link does with what passes, seen from the one who dials.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Link {
    /// Passes it.
    #[default]
    Open,
    /// Swallows it, both ways, until the link is another one.
    Cut,
    /// Passes questions and swallows answers.
    AnswersLost,
    /// Resets every connection.
    Reset,
    /// Passes every piece so much later.
    Delayed(Duration),
    /// Passes so many bytes a second.
    Slow(u32),
}

/// All links, by who dials and who is dialled.
type Table = Vec<Vec<Link>>;

/// The proxies of a group. Dropping it ends them.
pub struct Links {
    /// Where each node's proxy listens.
    pub addresses: Vec<SocketAddr>,
    table: watch::Sender<Table>,
    /// Where the nodes listen; set once they have addresses.
    targets: watch::Sender<Vec<SocketAddr>>,
    counts: Arc<Counts>,
    _tasks: JoinSet<()>,
}

#[derive(Default)]
struct Counts {
    /// Connections whose dialler was found, and therefore its link.
    passed: AtomicUsize,
    /// Connections whose dialler was not: their link is open.
    strangers: AtomicUsize,
}

#[derive(Clone)]
struct Proxy {
    node: usize,
    /// What each node's address looks like where it is named.
    names: Arc<Vec<String>>,
    table: watch::Receiver<Table>,
    targets: watch::Receiver<Vec<SocketAddr>>,
    counts: Arc<Counts>,
}

impl Links {
    /// Starts so many proxies; they serve once [`Links::lead_to`] was told where to.
    pub async fn start(nodes: usize) -> Self {
        let table = watch::Sender::new(vec![vec![Link::Open; nodes]; nodes]);
        let (targets, counts) = (watch::Sender::new(Vec::new()), Arc::<Counts>::default());
        let addresses: Vec<SocketAddr> = (0..nodes).map(|_| free_address()).collect();
        let names: Arc<Vec<String>> = Arc::new(addresses.iter().map(ToString::to_string).collect());
        let mut tasks = JoinSet::new();
        for (node, address) in addresses.iter().enumerate() {
            let (counts, names) = (counts.clone(), names.clone());
            let (table, targets) = (table.subscribe(), targets.subscribe());
            tasks.spawn(Proxy { node, names, table, targets, counts }.run(*address));
        }
        Self { addresses, table, targets, counts, _tasks: tasks }
    }

    /// Whom the proxies stand before; the nodes announce the proxies from their next start on.
    pub fn lead_to(&self, cluster: &mut Cluster) {
        for (node, address) in cluster.nodes.iter_mut().zip(&self.addresses) {
            node.advertise = Some(*address);
        }
        self.targets.send_replace(cluster.nodes.iter().map(|node| node.cluster).collect());
    }

    /// Changes the link that one node dials another over.
    pub fn set(&self, from: usize, to: usize, link: Link) {
        self.table.send_modify(|table| table[from][to] = link);
    }

    /// Changes both links between two nodes.
    pub fn set_both(&self, one: usize, other: usize, link: Link) {
        self.set(one, other, link);
        self.set(other, one, link);
    }

    /// Opens all.
    pub fn heal(&self) {
        self.table.send_modify(|table| table.iter_mut().flatten().for_each(|it| *it = Link::Open));
    }

    /// How many connections had a link, and how many had none because nobody was named in them.
    pub fn counts(&self) -> (usize, usize) {
        let Counts { passed, strangers } = &*self.counts;
        (passed.load(Ordering::Relaxed), strangers.load(Ordering::Relaxed))
    }
}

impl Proxy {
    async fn run(mut self, address: SocketAddr) {
        if self.targets.wait_for(|targets| !targets.is_empty()).await.is_err() {
            return;
        }
        let mut open = JoinSet::new();
        loop {
            while TcpStream::connect(self.target()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // A port just let go may be free a moment later.
            let Ok(listener) = TcpListener::bind(address).await else {
                tokio::time::sleep(Duration::from_millis(5)).await;
                continue;
            };
            let (gone, mut is_gone) = tokio::sync::mpsc::unbounded_channel();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let Ok((stream, _)) = accepted else { continue };
                        while open.try_join_next().is_some() {}
                        let (proxy, gone) = (self.clone(), gone.clone());
                        open.spawn(async move {
                            let target = proxy.target();
                            proxy.pass(stream, target).await;
                            let refused = TcpStream::connect(target).await.is_err();
                            // Nobody has to listen any more.
                            let _ = refused.then(|| gone.send(()));
                        });
                    }
                    Some(()) = is_gone.recv() => break,
                }
            }
        }
    }

    fn target(&self) -> SocketAddr {
        self.targets.borrow()[self.node]
    }

    /// The first bytes of a connection, and which node is named in them.
    async fn dialler(&self, stream: &mut TcpStream) -> io::Result<(Vec<u8>, Option<usize>)> {
        let (mut first, mut piece) = (Vec::new(), vec![0; 16 << 10]);
        loop {
            // A connection may be idle for long; a request that has begun comes whole at once.
            let idle = first.is_empty();
            let within = Duration::from_millis(if idle { 3_600_000 } else { 50 });
            let Ok(read) = tokio::time::timeout(within, stream.read(&mut piece)).await else {
                return Ok((first, None));
            };
            let len = read?;
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            first.extend_from_slice(&piece[..len]);
            // Who says it comes first; what is said may name others.
            let others = self.names.iter().enumerate().filter(|(node, _)| *node != self.node);
            let named = others.filter_map(|(node, name)| {
                let at = first.windows(name.len()).position(|part| part == name.as_bytes())?;
                Some((at, node))
            });
            if let Some((_, node)) = named.min() {
                return Ok((first, Some(node)));
            }
            if first.len() > 4 << 10 {
                return Ok((first, None));
            }
        }
    }

    /// One connection, to its end.
    async fn pass(mut self, mut dialled: TcpStream, to: SocketAddr) {
        let Ok((first, from)) = self.dialler(&mut dialled).await else { return };
        let count = if from.is_some() { &self.counts.passed } else { &self.counts.strangers };
        count.fetch_add(1, Ordering::Relaxed);
        let node = self.node;
        let link = move |table: &Table| from.map_or(Link::Open, |from| table[from][node]);
        let mut table = self.table.clone();
        if table.wait_for(|table| link(table) != Link::Cut).await.is_err() {
            return;
        }
        if link(&table.borrow()) == Link::Reset {
            let _ = set_socket_linger(&dialled, Some(Duration::ZERO));
            return;
        }
        let Ok(mut target) = TcpStream::connect(to).await else { return };
        if target.write_all(&first).await.is_err() {
            return;
        }
        let _ = (dialled.set_nodelay(true), target.set_nodelay(true));
        let was_reset = {
            let (mut a, mut b) = (dialled.split(), target.split());
            let (questions, answers) = (self.table.clone(), self.table.clone());
            let both = async {
                let there = pump(&mut a.0, &mut b.1, questions, &link, true);
                let back = pump(&mut b.0, &mut a.1, answers, &link, false);
                // A side that has ended ends the other: HTTP has no use for half a connection.
                tokio::select! { _ = there => {}, _ = back => {} }
            };
            tokio::select! {
                () = both => false,
                changed = self.table.wait_for(|table| link(table) == Link::Reset) => changed.is_ok(),
            }
        };
        if was_reset {
            for stream in [&dialled, &target] {
                let _ = set_socket_linger(stream, Some(Duration::ZERO));
            }
        }
    }
}

/// Carries one direction, as the link says at each piece.
async fn pump(
    from: &mut tokio::net::tcp::ReadHalf<'_>,
    to: &mut tokio::net::tcp::WriteHalf<'_>,
    mut table: watch::Receiver<Table>,
    link: &impl Fn(&Table) -> Link,
    questions: bool,
) -> io::Result<()> {
    let mut piece = vec![0; 16 << 10];
    loop {
        let len = from.read(&mut piece).await?;
        if len == 0 {
            return Ok(());
        }
        let swallows = |link: Link| link == Link::Cut || (link == Link::AnswersLost && !questions);
        let passes = |table: &Table| !swallows(link(table));
        let now = table.wait_for(passes).await.map(|table| link(&table));
        match now.map_err(io::Error::other)? {
            Link::Delayed(time) => tokio::time::sleep(time).await,
            Link::Slow(rate) => {
                let time = len as f64 / f64::from(rate);
                tokio::time::sleep(Duration::from_secs_f64(time)).await;
            }
            _ => {}
        }
        to.write_all(&piece[..len]).await?;
    }
}
