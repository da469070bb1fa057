//! Members that stop and start in any order, and snapshots that are cut off anywhere (cases r18, r25).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::SECOND;
use crate::support::api::Outcome;
use crate::support::cluster::{Cluster, Options};
use crate::support::session::Prefix;

/// The states are marked every ten seconds.
const MARKED: Duration = Duration::from_secs(10);

/// `TEST_ORDERS_SECONDS=600` is the case at its full length; `TEST_ORDERS_SEED` repeats the choices of
/// a run, though not what the processes make of them.
#[tokio::test(flavor = "multi_thread")]
async fn case_r18_after_any_order_of_stops_and_starts_all_are_equal() {
    let read = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let lasts = Duration::from_secs(read("TEST_ORDERS_SECONDS").unwrap_or(15));
    let seed = read("TEST_ORDERS_SEED").unwrap_or_else(|| rand::rng().random());
    println!("TEST_ORDERS_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::start(Options::nodes(3)).await;
    let prefix = Prefix::new(cluster.api(), "r18");
    let began = Instant::now();
    let (mut changes, mut asked, mut answered) = (0, 0, Vec::new());
    while began.elapsed() < lasts {
        let up = cluster.nodes.iter().filter(|node| node.runs()).count();
        let index = random.random_range(0..3);
        let node = &mut cluster.nodes[index];
        match node.runs() {
            false => node.start(&[]),
            true if up > 1 && random.random_bool(0.5) => {
                node.signal(Signal::TERM);
                // Without a quorum it cannot give anything back, and is not waited for.
                let until = Instant::now() + random.random_range(SECOND / 10..2 * SECOND);
                while node.ended().is_none() && Instant::now() < until {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                node.kill();
            }
            true if up > 1 => node.kill(),
            true => {}
        }
        changes += 1;
        // How long it stays so is part of the order.
        let stays = Instant::now() + random.random_range(Duration::ZERO..SECOND);
        while Instant::now() < stays {
            let at = random.random_range(0..3);
            let request = prefix.create(&format!("demo:r18-{asked}"), &json!(asked));
            let request = request.key(format!("r18-{asked}")).once(SECOND / 2);
            if let Outcome::Answered(answer) = prefix.api.call(at, &request).await
                && answer.status == 200
            {
                answered.push(asked);
            }
            asked += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    println!("{changes} changes; {} of {asked} writes were answered", answered.len());
    cluster.restart_all().await;
    let led: Vec<Value> = futures_util::future::join_all((0..3).map(|index| cluster.status(index)))
        .await
        .into_iter()
        .map(|status| status.unwrap()["leader"].clone())
        .collect();
    assert!(led.iter().all(|leader| *leader == led[0] && leader.is_u64()), "{led:?}");
    for number in answered {
        let found = prefix.read(number % 3, &format!("demo:r18-{number}")).await;
        assert_eq!(found.map(|(value, _)| value), Some(json!(number)), "it was acknowledged");
    }
    cluster.states_are_equal().await;
}

/// Rows that make a snapshot large enough to be met half-way.
const ROWS: usize = 60;
const ROW_BYTES: usize = 100_000;

/// Writes until it is told to stop; how many were answered.
struct Writers {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicUsize>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Writers {
    fn start(prefix: &Prefix) -> Self {
        let (stop, written) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let tasks = (0..4).map(|writer| {
            let (stop, written, prefix) = (stop.clone(), written.clone(), prefix.clone());
            tokio::spawn(async move {
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    let create = prefix.create(&format!("demo:w{writer}-{number}"), &json!(number));
                    // Of a write that was broken off nobody says anything.
                    let request = create.key(format!("w{writer}-{number}")).once(SECOND);
                    if let Outcome::Answered(answer) =
                        prefix.api.call((writer + number) % 3, &request).await
                        && answer.status == 200
                    {
                        written.fetch_add(1, Ordering::Relaxed);
                    }
                    number += 1;
                }
            })
        });
        let tasks = tasks.collect();
        Self { stop, written, tasks }
    }

    /// Returns once so many more were answered.
    async fn more(&self, count: usize) {
        let target = self.written.load(Ordering::Relaxed) + count;
        let until = Instant::now() + 60 * SECOND;
        while self.written.load(Ordering::Relaxed) < target {
            assert!(Instant::now() < until, "writing does not go on");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
    }
}

/// Whether a folder holds a file that this says yes to.
fn holds(folder: &Path, is: impl Fn(&str) -> bool) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    entries.flatten().any(|entry| is(&entry.file_name().to_string_lossy()))
}

/// Looks without a pause, off the runtime: what is looked for is there for milliseconds.
async fn caught(within: Duration, look: impl Fn() -> bool + Send + 'static) -> bool {
    let looking = tokio::task::spawn_blocking(move || {
        let until = Instant::now() + within;
        while Instant::now() < until {
            if look() {
                return true;
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        false
    });
    looking.await.unwrap()
}

/// Tries until it struck; what is rare is tried often.
const TRIES: usize = 12;

#[tokio::test(flavor = "multi_thread")]
async fn case_r25_snapshots_cut_off_in_build_send_and_install_leave_equal_states() {
    let mut options = Options::nodes(3);
    options.args.extend(["--snapshot-every", "50"].map(str::to_owned));
    let mut cluster = Cluster::start(options).await;
    let prefix = Prefix::new(cluster.api(), "r25");
    for number in 0..ROWS {
        let write = prefix.create(&format!("demo:r25-{number}"), &json!("x".repeat(ROW_BYTES)));
        assert_eq!(prefix.write(0, write).await.status, 200);
    }
    let writers = Writers::start(&prefix);

    // In the building, of a leader and of a follower.
    for leads in [true, false] {
        let leader = cluster.leader().await;
        let index = if leads { leader } else { (leader + 1) % 3 };
        let folder = cluster.nodes[index].dir.join("snapshots");
        let building = caught(30 * SECOND, move || holds(&folder, |name| name.ends_with(".tmp")));
        assert!(building.await, "no snapshot is built");
        cluster.nodes[index].kill();
        cluster.restart(index).await;
    }
    // In the sending and in the installing: first the one that takes it dies, then the one that gives.
    for giver_dies in [false, true] {
        let mut struck = false;
        for _ in 0..TRIES {
            cluster.wait_settled().await;
            let leader = cluster.leader().await;
            let taker = (leader + 1) % 3;
            cluster.nodes[taker].kill();
            // Further than what the others keep of their logs.
            writers.more(300).await;
            let folder = cluster.nodes[taker].dir.join("incoming");
            let _ = std::fs::remove_dir_all(&folder);
            cluster.nodes[taker].start(&[]);
            if caught(10 * SECOND, move || holds(&folder, |_| true)).await {
                let dies = if giver_dies { cluster.leader().await } else { taker };
                cluster.nodes[dies].kill();
                cluster.nodes[dies].start(&[]);
                struck = true;
            }
            for index in 0..3 {
                cluster.wait_ready(index).await;
            }
            if struck {
                break;
            }
        }
        assert!(struck, "no snapshot was ever on its way");
    }
    writers.end().await;
    cluster.wait_settled().await;
    let began = Instant::now();
    cluster.states_are_equal().await;
    println!("equal after {:?} (marks come every {MARKED:?})", began.elapsed());
    for number in 0..ROWS {
        let found = prefix.read(number % 3, &format!("demo:r25-{number}")).await;
        let text = found.map(|(value, _)| value.as_str().map(str::len));
        assert_eq!(text, Some(Some(ROW_BYTES)));
    }
}
