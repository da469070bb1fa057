//! A node that is far behind and comes back through a slow link (case r17).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use botmesh::machine::{Expect, Reply};
use botmesh::raft::{Node, NodeLimits, NodeOptions, Start, Timing};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

use super::cluster::*;

/// Bytes a second of the slow link, each way, over all its connections together.
const RATE: u64 = 512 << 10;
/// Bytes that pass at once.
const PIECE: usize = 4 << 10;

/// One direction of the link: when its next byte may pass.
type Free = Arc<Mutex<Instant>>;

/// A link to a listener that may change.
struct SlowLink {
    address: String,
    to: Arc<Mutex<SocketAddr>>,
}

impl SlowLink {
    async fn open(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let link = Self { address, to: Arc::new(Mutex::new(to)) };
        let to = link.to.clone();
        let ways: [Free; 2] = std::array::from_fn(|_| Arc::new(Mutex::new(Instant::now())));
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (to, ways) = (*to.lock(), ways.clone());
                tokio::spawn(async move {
                    let Ok(far) = TcpStream::connect(to).await else { return };
                    let (near_in, near_out) = near.into_split();
                    let (far_in, far_out) = far.into_split();
                    let [there, back] = ways;
                    // Where one way ends, so does the other.
                    tokio::select! {
                        () = pass(near_in, far_out, there) => {}
                        () = pass(far_in, near_out, back) => {}
                    }
                });
            }
        });
        link
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    free: Free,
) {
    let mut piece = vec![0; PIECE];
    while let Ok(read @ 1..) = from.read(&mut piece).await {
        let at = {
            let mut free = free.lock();
            *free =
                (*free).max(Instant::now()) + Duration::from_micros(read as u64 * 1_000_000 / RATE);
            *free
        };
        tokio::time::sleep_until(at).await;
        if to.write_all(&piece[..read]).await.is_err() {
            return;
        }
    }
}

/// Writes until the log is longer by so many entries.
async fn write_entries(node: &Running, entries: u64, from: u64) {
    let until = node.status().applied + entries;
    let mut next = from;
    while node.status().applied < until {
        let some = (next..next + 64).map(|number| write(node.node.clone(), number));
        next += 64;
        futures_util::stream::iter(some).buffer_unordered(8).collect::<Vec<()>>().await;
    }
}

async fn write(node: Node, number: u64) {
    let key = format!("k{}", number % 2_000);
    let reply = execute(&node, put(&key, &[number as u8; 1_000], Expect::Any)).await.unwrap();
    assert!(matches!(reply, Reply::Committed(_)), "{reply:?}");
}

/// `TEST_BEHIND_ENTRIES=200000` is the case at its full length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_r17_a_node_far_behind_a_slow_link_converges_and_elects_nobody() {
    let entries = std::env::var("TEST_BEHIND_ENTRIES").ok().and_then(|text| text.parse().ok());
    let entries: u64 = entries.unwrap_or(900);
    // A beat for a busy machine: an election here would have to be the returning node's.
    let lab = Lab::new().with_timing(Timing::scaled(10));
    let limits = NodeLimits::snapshots_every((entries / 6).min(50_000));
    let start = async |name: &str, start: Start, link: Option<&SlowLink>| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let address = match link {
            Some(link) => {
                *link.to.lock() = at;
                link.address.clone()
            }
            None => at.to_string(),
        };
        let options = NodeOptions { limits, ..lab.options(name, &address, start) };
        lab.serve(listener, options).await.unwrap()
    };
    let link = SlowLink::open(SocketAddr::from(([127, 0, 0, 1], 1))).await;
    let first = start("n1", Start::Bootstrap, None).await;
    let join = Start::Join(vec![first.address.clone()]);
    let second = start("n2", join.clone(), None).await;
    let third = start("n3", join, Some(&link)).await;
    let all = [&first, &second, &third];
    until("three voters", || all.iter().all(|one| voters(&one.status()) == 3)).await;
    if leader_of(&all).await == 2 {
        third.node.yield_leader(SOON).await.unwrap();
    }

    let left_at = third.status().applied;
    third.crash().await;
    // The two that are left may have to elect one; from here on nobody has to.
    let leader = leader_of(&[&first, &second]).await;
    write_entries([&first, &second][leader], entries, 0).await;
    // Raft purges behind a snapshot, some hundred entries at a time, and not while it tries to send
    // just these.
    let giver = [&first, &second][leader];
    let mut more = 0;
    while giver.status().purged <= left_at && more < 100 {
        more += 1;
        write_entries(giver, 64, entries).await;
    }
    assert!(giver.status().purged > left_at, "nothing was purged in {} entries", more * 64);
    let seen = |nodes: &[&Running]| {
        nodes.iter().map(|one| (one.status().term, one.status().leader)).collect::<Vec<_>>()
    };
    let before = seen(&[&first, &second]);

    let third = start("n3", Start::Member, Some(&link)).await;
    // The others do not wait for it.
    write_entries([&first, &second][leader], entries / 20, entries * 2).await;
    let all = [&first, &second, &third];
    let deadline = std::time::Instant::now() + 4 * SOON + Duration::from_millis(entries) * 4;
    while !all.iter().all(|one| one.status().applied == all[0].status().applied) {
        assert!(std::time::Instant::now() < deadline, "n3 is at {}", third.status().applied);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    converge(&all).await;
    assert_eq!(seen(&[&first, &second]), before, "its return held an election");
    assert_eq!(seen(&[&third]), before[..1]);
    let taken = third.taken.lock().clone();
    assert!(taken.get("/raft/snapshot").is_some_and(|count| *count >= 1), "{taken:?}");
}
