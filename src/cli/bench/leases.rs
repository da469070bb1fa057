//! Whether a lease ends though its holder renews it (DESIGN 10: no false expiry, idle or overloaded).
//!
//! Three nodes with the demo bot hold a session each. Three more sessions are opened over the HTTP API,
//! one through each node, and hold turns. All are renewed as it is done, every third of the lease, for as
//! long as asked; nothing dies. A session that ends nevertheless is a *false expiry*; one that ends
//! after the measurement itself was late with a renewal is not, and is counted apart.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::args::LeasesArgs;
use super::group::{Group, Setup};
use super::net::{Net, Network};
use super::report::{Checks, Report};
use super::sink::Sink;
use crate::cli::failure::Failure;

/// How long one call may take at one node.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a call may take over all nodes where no lease bounds it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(50);
/// How often the bots' own sessions are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Measures.
pub(super) async fn run(program: &Path, args: &LeasesArgs) -> Result<Report, Failure> {
    let LeasesArgs { minutes, busy, lease, turns, .. } = *args;
    let network = Network::open(Net::Loopback, 3)?;
    let sink = Sink::open(&network).await?;
    let (polls, watched_by) = (false, &[] as &[&str]);
    let setup = Setup { program, nodes: 3, lease, watched_by, polls, handlers_sleep: None };
    let group = Group::start(&setup, &sink, network).await?;
    let bots = group.well().await?.sessions;
    let api = Api::new(&group)?;
    let mut holders = Vec::new();
    for node in 0..group.len() {
        holders.push(Holder::open(&api, node, lease, turns).await?);
    }
    let spinning = busy.then(Spinning::start);
    let stop = watch::Sender::new(false);
    let mut renewing = tokio::task::JoinSet::new();
    for holder in holders {
        renewing.spawn(holder.renew(stop.subscribe()));
    }
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let bots_ended = watch_bots(&group, bots, until).await;
    stop.send_replace(true);
    let (mut renewals, mut counts) = (Vec::new(), Counts::default());
    counts.expired += bots_ended;
    while let Some(ended) = renewing.join_next().await {
        let holder = ended.map_err(|error| Failure::Other(format!("a holder: {error}")))??;
        counts.lost += holder.lost_turns().await?;
        counts.expired += holder.counts.expired;
        counts.late += holder.counts.late;
        renewals.extend(holder.renewals);
    }
    drop(spinning);
    let how = if busy { " --busy" } else { "" };
    let lease = humantime::format_duration(lease).to_string().replace(' ', "");
    let command =
        format!("botmesh bench leases --minutes {minutes} --lease {lease} --turns {turns}{how}");
    let mut report = Report::new(command, renewals.len());
    report.add("renewal answered", "ms", renewals);
    report.add("false expiries", "1", vec![counts.expired as f64]);
    report.add("renewed too late to count", "1", vec![counts.late as f64]);
    report.add("turns held", "1", vec![(3 * turns) as f64 - counts.lost as f64]);
    report.checked(Checks { lost: counts.lost, ..Checks::default() });
    if counts.expired > 0 {
        report.failed(format!("{} leases ended though they were renewed", counts.expired));
    }
    group.stop().await;
    Ok(report)
}

#[derive(Debug, Default)]
struct Counts {
    /// Sessions that ended though a renewal was sent while a third of the lease was left.
    expired: u64,
    /// Sessions that were renewed too late.
    late: u64,
    /// Turns that are not held any more.
    lost: u64,
}

/// Looks at the bots' own sessions until then; how many of them ended.
async fn watch_bots(group: &Group, bots: BTreeSet<u64>, until: Instant) -> u64 {
    let (mut known, mut ended, mut node) = (bots, 0, 0);
    while Instant::now() < until {
        tokio::time::sleep(LOOK.min(until.saturating_duration_since(Instant::now()))).await;
        node = (node + 1) % group.len();
        let Some(status) = group.status(node).await else { continue };
        let live: BTreeSet<u64> =
            status.sessions.iter().map(|session| session.incarnation).collect();
        // Every one of them is counted once.
        let gone = known.iter().filter(|session| !live.contains(session)).count();
        known.retain(|session| live.contains(session));
        ended += gone as u64;
    }
    ended
}

/// The coordination API of all nodes.
#[derive(Clone)]
struct Api {
    http: reqwest::Client,
    bases: Vec<String>,
    secret: String,
}

impl Api {
    fn new(group: &Group) -> Result<Self, Failure> {
        let http = reqwest::Client::builder().no_proxy().build();
        let http =
            http.map_err(|error| Failure::Other(format!("cannot make an HTTP client: {error}")))?;
        let clusters = group.clusters();
        let bases = clusters.iter().map(|cluster| format!("http://{cluster}/v1/bench")).collect();
        Ok(Self { http, bases, secret: group.secret().reveal().to_owned() })
    }

    /// Asks a node, then the next ones, until one answers definitely or the time is over.
    async fn ask(
        &self,
        first: usize,
        (method, path, body, key): (Method, &str, Option<Value>, &str),
        within: Duration,
    ) -> Option<(StatusCode, Value)> {
        let until = Instant::now() + within;
        for next in 0.. {
            let base = &self.bases[(first + next) % self.bases.len()];
            let mut request = self.http.request(method.clone(), format!("{base}/{path}"));
            request = request.bearer_auth(&self.secret).timeout(ANSWER);
            if let Some(body) = &body {
                request = request.json(body);
            }
            if !key.is_empty() {
                request = request.header("idempotency-key", key);
            }
            if let Ok(answer) = request.send().await {
                let status = answer.status();
                if !status.is_server_error() && status != StatusCode::TOO_MANY_REQUESTS {
                    return Some((status, answer.json().await.unwrap_or_default()));
                }
            }
            if Instant::now() >= until {
                return None;
            }
            tokio::time::sleep(AGAIN).await;
        }
        None
    }
}

/// One session over HTTP, and the turns it holds.
struct Holder {
    api: Api,
    node: usize,
    session: u64,
    lease: Duration,
    /// When the first attempt of the last renewal that counted was sent.
    renewed: Instant,
    /// Ticket and fence of each turn.
    turns: Vec<(u64, u64)>,
    renewals: Vec<f64>,
    counts: Counts,
}

impl Holder {
    async fn open(api: &Api, node: usize, lease: Duration, turns: usize) -> Result<Self, Failure> {
        let refused = |what: &str, answer: &Option<(StatusCode, Value)>| {
            Failure::Other(format!("n{}: {what}: {answer:?}", node + 1))
        };
        let renewed = Instant::now();
        let body = json!({ "lease_ms": lease.as_millis() as u64 });
        let asked = (Method::POST, "sessions", Some(body), "");
        let opened = api.ask(node, asked, PATIENCE).await;
        let answer = opened.as_ref().filter(|(status, _)| *status == StatusCode::CREATED);
        let granted = answer
            .and_then(|(_, body)| Some((body["session"].as_u64()?, body["lease_ms"].as_u64()?)));
        let (session, lease) = granted.ok_or_else(|| refused("no session", &opened))?;
        let lease = Duration::from_millis(lease);
        let mut held = Vec::new();
        for turn in 0..turns {
            let chat = format!("bench:held-{node}-{turn}");
            let body = json!({ "session": session, "key": chat, "wait_ms": 10_000 });
            let asked = (Method::POST, "turns", Some(body), chat.as_str());
            let granted = api.ask(node, asked, PATIENCE).await;
            let numbers = granted
                .as_ref()
                .filter(|(status, _)| *status == StatusCode::OK)
                .and_then(|(_, body)| Some((body["ticket"].as_u64()?, body["fence"].as_u64()?)));
            held.push(numbers.ok_or_else(|| refused("no turn", &granted))?);
        }
        let (api, counts) = (api.clone(), Counts::default());
        let renewals = Vec::new();
        Ok(Self { api, node, session, lease, renewed, turns: held, renewals, counts })
    }

    /// Renews every third of the lease until told to stop, or until the session has ended.
    async fn renew(mut self, mut stop: watch::Receiver<bool>) -> Result<Self, Failure> {
        let path = format!("sessions/{}/renew", self.session);
        loop {
            let due = tokio::time::Instant::from_std(self.renewed + self.lease / 3);
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return Ok(self),
                () = tokio::time::sleep_until(due) => {}
            }
            let sent = Instant::now();
            let asked = (Method::POST, path.as_str(), None, "");
            match self.api.ask(self.node, asked, PATIENCE.max(self.lease * 2)).await {
                Some((StatusCode::OK, _)) => {
                    self.renewed = sent;
                    self.renewals.push(sent.elapsed().as_secs_f64() * 1_000.0);
                }
                Some((StatusCode::NOT_FOUND, _)) => {
                    // A third of the lease was left: whatever kept it from counting was not here.
                    let in_time = sent < self.renewed + self.lease * 2 / 3;
                    self.counts.expired += u64::from(in_time);
                    self.counts.late += u64::from(!in_time);
                    return Ok(self);
                }
                other => {
                    let why = format!("n{}: no renewal: {other:?}", self.node + 1);
                    return Err(Failure::Other(why));
                }
            }
        }
    }

    /// Turns that are not held any more under the fence they had.
    async fn lost_turns(&self) -> Result<u64, Failure> {
        let mut lost = 0;
        for (ticket, fence) in &self.turns {
            let path = format!("turns/{ticket}");
            let asked = (Method::GET, path.as_str(), None, "");
            let answer = self.api.ask(self.node, asked, PATIENCE).await;
            let (_, body) =
                answer.ok_or_else(|| Failure::Other(format!("nobody tells of ticket {ticket}")))?;
            let held = body["granted"] == true && body["fence"] == *fence;
            lost += u64::from(!held);
        }
        Ok(lost)
    }
}

/// Threads that spin, one a processor, until this is dropped.
struct Spinning(Arc<AtomicBool>);

impl Spinning {
    fn start() -> Self {
        let over = Arc::<AtomicBool>::default();
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            let over = over.clone();
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        Self(over)
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
