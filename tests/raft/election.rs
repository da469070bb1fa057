//! Leaders that die, that are cut off, that hand over (SPEC A7, E6, K1; DESIGN 5.3 to 5.5).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use botmesh::clock::{Clock, SystemClock};
use botmesh::group::Group;
use botmesh::machine::Expect;
use botmesh::raft::{Node, NodeOptions, Start, Timing};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::cluster::*;

/// What the election timer alone takes at the least: the lease of the dead leader, and then the
/// election timeout.
fn slow(timing: Timing) -> Duration {
    timing.election_max + timing.election_min
}

/// So much slower than usual that a busy machine is fast beside it.
fn slowed() -> Timing {
    Timing::scaled(5)
}

/// How long nobody else led after a leader was gone.
async fn without_leader(nodes: &[Running], since: Instant) -> Duration {
    until("another leader", || nodes.iter().any(|one| one.status().leader == Some(one.id()))).await;
    since.elapsed()
}

/// The middle one: a machine that does other things too spoils single ones.
fn median(mut all: Vec<Duration>) -> Duration {
    all.sort();
    all[all.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e6_a_dead_leader_is_replaced_without_waiting_for_its_lease() {
    let lab = Lab::new().with_timing(slowed());
    let mut nodes = lab.three().await;
    let mut took = Vec::new();
    for round in 0..5 {
        let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
        execute(&nodes[leader].node, put("k", &[round], Expect::Any)).await.unwrap();
        // The others have greeted it: a leader that was never attended is not suspected.
        until("the streams", || nodes[leader].taken.lock().get("/raft/attend") >= Some(&2)).await;
        let dead = nodes.remove(leader);
        let name = dead.status().name;
        let died = Instant::now();
        dead.crash().await;
        took.push(without_leader(&nodes, died).await);
        // What was acknowledged is there.
        assert_eq!(read(&nodes[0].node, "k").await, Some(vec![round]));
        nodes.push(lab.restart(&name).await);
        let all: Vec<&Running> = nodes.iter().collect();
        converge(&all).await;
    }
    assert!(median(took.clone()) < slow(slowed()) / 2, "{took:?}");
}

/// A lease of the leader proves nothing where the others may elect at once (DESIGN 5.4): it confirms
/// no read without having heard them again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f4_a_leader_that_was_just_acknowledged_confirms_no_read_alone() {
    let lab = Lab::new();
    let deaf = Arc::new(AtomicBool::new(false));
    let nodes = three_behind(&lab, |_, router| {
        let deaf = deaf.clone();
        router.layer(axum::middleware::from_fn(
            move |request: axum::extract::Request, next: axum::middleware::Next| {
                let deaf = deaf.clone();
                async move {
                    while deaf.load(Ordering::SeqCst) {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                    next.run(request).await
                }
            },
        ))
    })
    .await;
    let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
    let node = &nodes[leader].node;
    for _ in 0..5 {
        // A majority has just acknowledged the leader, so its lease is as fresh as can be …
        execute(node, put("k", b"v", Expect::Any)).await.unwrap();
        deaf.store(true, Ordering::SeqCst);
        let read = node.barrier(SystemClock.now() + Duration::from_millis(60)).await;
        deaf.store(false, Ordering::SeqCst);
        // … and yet it has to ask.
        assert!(read.is_err(), "a read was confirmed by nobody");
        node.barrier(SystemClock.now() + SOON).await.unwrap();
    }
}

/// Three voters whose routes are wrapped.
async fn three_behind(
    lab: &Lab,
    wrap: impl Fn(usize, axum::Router) -> axum::Router,
) -> Vec<Running> {
    let mut nodes: Vec<Running> = Vec::new();
    for number in 0..3 {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let start = match nodes.first() {
            None => Start::Bootstrap,
            Some(first) => Start::Join(vec![first.address.clone()]),
        };
        let options = lab.options(&format!("n{}", number + 1), &address, start);
        nodes.push(lab.serve_as(listener, options, |router| wrap(number, router)).await.unwrap());
    }
    until("three voters", || nodes.iter().all(|one| voters(&one.status()) == 3)).await;
    nodes
}

/// One direction of a link between two nodes: bytes pass until it is cut; from then on connections
/// are reset and new ones refused.
struct Link {
    at: SocketAddr,
    to: Arc<Mutex<SocketAddr>>,
    serving: Option<JoinHandle<()>>,
}

impl Link {
    async fn open(at: SocketAddr, to: SocketAddr) -> Self {
        let mut link = Self { at, to: Arc::new(Mutex::new(to)), serving: None };
        link.mend().await;
        link
    }

    async fn mend(&mut self) {
        let listener = TcpListener::bind(self.at).await.unwrap();
        let to = self.to.clone();
        self.serving = Some(tokio::spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((mut one, _)) = listener.accept().await {
                let to = to.clone();
                open.spawn(async move {
                    let to = *to.lock();
                    let Ok(mut other) = TcpStream::connect(to).await else { return };
                    // Closed by force, both ends see a reset.
                    for stream in [&one, &other] {
                        stream.set_zero_linger().unwrap();
                        stream.set_nodelay(true).unwrap();
                    }
                    let _ = tokio::io::copy_bidirectional(&mut one, &mut other).await;
                });
            }
        }));
    }

    async fn cut(&mut self) {
        let serving = self.serving.take().unwrap();
        serving.abort();
        let _ = serving.await;
    }
}

/// Where the link from one node to another listens.
fn ip(from: usize, to: usize) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 1 + from as u8, 1 + to as u8)
}

/// The hosts file of a node of such a group.
fn hosts(of: usize) -> Vec<(String, IpAddr)> {
    let by = |to| if to == of { Ipv4Addr::LOCALHOST } else { ip(of, to) };
    (0..3).map(|to| (format!("n{to}.test"), IpAddr::V4(by(to)))).collect()
}

/// A group in which every node reaches every other by a link of its own.
struct Linked {
    nodes: Vec<Running>,
    /// By (from, to).
    links: std::collections::BTreeMap<(usize, usize), Link>,
}

impl Linked {
    async fn three(lab: &Lab) -> Self {
        let mut listeners = Vec::new();
        for _ in 0..3 {
            listeners.push(TcpListener::bind("127.0.0.1:0").await.unwrap());
        }
        let own: Vec<SocketAddr> =
            listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        let mut links = std::collections::BTreeMap::new();
        for from in 0..3 {
            for to in (0..3).filter(|to| *to != from) {
                let at = SocketAddr::from((ip(from, to), own[to].port()));
                links.insert((from, to), Link::open(at, own[to]).await);
            }
        }
        let mut nodes: Vec<Running> = Vec::new();
        for (number, listener) in listeners.into_iter().enumerate() {
            let advertise = format!("n{number}.test:{}", own[number].port());
            let start = match nodes.first() {
                None => Start::Bootstrap,
                Some(first) => Start::Join(vec![first.address.clone()]),
            };
            let hosts = hosts(number);
            let options = lab.options(&format!("n{number}"), &advertise, start);
            nodes.push(lab.serve(listener, NodeOptions { hosts, ..options }).await.unwrap());
        }
        until("three voters", || nodes.iter().all(|one| voters(&one.status()) == 3)).await;
        Self { nodes, links }
    }

    /// Both directions.
    async fn cut(&mut self, one: usize, other: usize) {
        for key in [(one, other), (other, one)] {
            self.links.get_mut(&key).unwrap().cut().await;
        }
    }

    async fn mend(&mut self, one: usize, other: usize) {
        for key in [(one, other), (other, one)] {
            self.links.get_mut(&key).unwrap().mend().await;
        }
    }
}

/// Terms that any node was in while this was watched.
async fn terms_for(nodes: &[Running], how_long: Duration) -> BTreeSet<u64> {
    let began = Instant::now();
    let mut terms = BTreeSet::new();
    while began.elapsed() < how_long {
        terms.extend(nodes.iter().map(|one| one.status().term));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    terms
}

/// What a rule that rejects looks like from one end of a link is what a death looks like. Nobody else
/// sees it, so nobody is deposed. `TEST_RESET_SECONDS=60` is the case at its full length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e6_a_link_that_answers_with_resets_changes_the_leader_once_at_most() {
    let seconds = std::env::var("TEST_RESET_SECONDS").ok().and_then(|text| text.parse().ok());
    let cut_for = Duration::from_secs(seconds.unwrap_or(6));
    let lab = Lab::new();
    let mut group = Linked::three(&lab).await;
    let leader = leader_of(&group.nodes.iter().collect::<Vec<_>>()).await;
    until("the streams", || group.nodes[leader].taken.lock().get("/raft/attend") >= Some(&2)).await;
    let (cut_off, third) = ((leader + 1) % 3, (leader + 2) % 3);
    let before = group.nodes[leader].status().term;
    let told = |group: &Linked| group.nodes[third].taken.lock().get("/raft/suspect").copied();
    let told_before = told(&group).unwrap_or(0);
    group.cut(leader, cut_off).await;
    let writing = tokio::spawn(write_on(group.nodes[third].node.clone()));
    let terms = terms_for(&group.nodes, cut_for).await;
    let after = group.nodes[leader].status().term;
    assert!(terms.len() <= 2, "one link took the group through the terms {before} to {after}");
    // It was seen as a death by the one, over and over, and told.
    assert!(told(&group).unwrap_or(0) >= told_before + 5, "nobody suspected the leader");
    writing.abort();
    group.mend(leader, cut_off).await;
    converge(&group.nodes.iter().collect::<Vec<_>>()).await;
    assert!(group.nodes[leader].status().term <= after + 1);
}

/// A supervisor starts the leader again before anybody was refused a connection: what answers is
/// another process, so the leader is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e6_a_leader_that_answers_as_another_process_is_replaced() {
    let timing = Timing::scaled(20);
    let lab = Lab::new().with_timing(timing);
    let mut group = Linked::three(&lab).await;
    let leader = leader_of(&group.nodes.iter().collect::<Vec<_>>()).await;
    until("the streams", || group.nodes[leader].taken.lock().get("/raft/attend") >= Some(&2)).await;
    let (name, advertise, term) = {
        let status = group.nodes[leader].status();
        (status.name, group.nodes[leader].address.clone(), status.term)
    };
    let died = Instant::now();
    group.nodes.remove(leader).crash().await;
    // The links still take connections, so nothing is refused, and lead to the next process.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    for from in (0..3).filter(|from| *from != leader) {
        *group.links[&(from, leader)].to.lock() = to;
    }
    let options = lab.options(&name, &advertise, Start::Member);
    let options = NodeOptions { hosts: hosts(leader), ..options };
    group.nodes.push(lab.serve(listener, options).await.unwrap());
    until("another leader", || group.nodes.iter().any(|one| one.status().leader == Some(one.id())))
        .await;
    let took = died.elapsed();
    assert!(took < slow(timing), "it took {took:?}, no less than the election timer");
    assert!(group.nodes[0].status().term > term);
}

async fn write_on(node: Node) {
    for number in 0_u64.. {
        execute(&node, put("w", &number.to_le_bytes(), Expect::Any)).await.unwrap();
    }
}

/// The longest time between two writes that were answered, while `change` goes on.
async fn gap(node: &Node, change: impl Future<Output = ()>) -> Duration {
    let changed = AtomicBool::new(false);
    let writes = async {
        let (mut worst, mut number) = (Duration::ZERO, 0_u64);
        loop {
            // One that begins after the change is the last.
            let last = changed.load(Ordering::SeqCst);
            let began = Instant::now();
            execute(node, put("g", &number.to_le_bytes(), Expect::Any)).await.unwrap();
            worst = worst.max(began.elapsed());
            number += 1;
            if last {
                return worst;
            }
        }
    };
    let change = async {
        change.await;
        changed.store(true, Ordering::SeqCst);
    };
    futures_util::future::join(writes, change).await.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn k1_a_yield_and_a_stop_stall_nobody_for_an_election() {
    let lab = Lab::new().with_timing(slowed());
    let mut nodes = lab.three().await;
    let mut yields = Vec::new();
    for _ in 0..6 {
        let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
        let through = &nodes[(leader + 1) % 3].node;
        let from = nodes[leader].node.clone();
        yields.push(
            gap(through, async move {
                from.yield_leader(SOON).await.unwrap();
            })
            .await,
        );
    }
    let mut stops = Vec::new();
    for _ in 0..3 {
        let leader = leader_of(&nodes.iter().collect::<Vec<_>>()).await;
        let through = nodes[(leader + 1) % 3].node.clone();
        let stopped = nodes.remove(leader);
        let name = stopped.status().name;
        stops.push(gap(&through, stopped.stop()).await);
        nodes.push(lab.restart(&name).await);
        converge(&nodes.iter().collect::<Vec<_>>()).await;
    }
    println!("yields {yields:?}, stops {stops:?}");
    let quick = slowed().election_min;
    assert!(median(yields.clone()) < quick, "{yields:?}");
    assert!(median(stops.clone()) < quick, "{stops:?}");
}
