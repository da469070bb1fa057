//! The simulated network: what is on its way, when it arrives, and what the weather does to it.
//!
//! Time goes in ticks of a millisecond; whoever drives the simulation raises it and has what is due
//! delivered. What a connection carries keeps its order, as TCP would keep it; two requests are on two
//! connections and may overtake each other. A direction that is cut swallows what is sent in it,
//! questions and answers alike, and says nothing. Nothing is cut up, and what arrives is whole.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{self, HeaderMap, StatusCode};
use parking_lot::Mutex;
use rand::Rng;
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use crate::codec;
use crate::machine::{Batch, BatchReply, Effect, EndReason};
use crate::outside::seeded;
use crate::raft::way::Lost;

/// After how long a connection that nobody answers is given up.
const CONNECT_WITHIN: Duration = Duration::from_millis(500);
/// Requests that may come twice: Raft and the batches' serials are made for it.
const MAY_COME_TWICE: [&str; 4] = ["/raft/append", "/raft/vote", "/raft/pre-vote", "/raft/forward"];

/// A part of an answer.
#[derive(Clone, Debug)]
pub(super) enum Part {
    /// Its beginning, or all of it.
    Head { status: StatusCode, headers: HeaderMap, whole: Option<Bytes> },
    /// More of its body.
    Chunk(Bytes),
    /// Its end.
    End,
    /// The connection was closed by the death of the other end.
    Reset,
    /// Nobody listens.
    Refused,
    /// No connection came about.
    Unreachable,
}

impl Part {
    fn name(&self) -> &'static str {
        match self {
            Self::Head { .. } => "answer",
            Self::Chunk(_) => "more",
            Self::End => "end",
            Self::Reset => "reset",
            Self::Refused => "refused",
            Self::Unreachable => "unreachable",
        }
    }

    /// Whether no other follows it.
    fn is_last(&self) -> bool {
        !matches!(self, Self::Head { whole: None, .. } | Self::Chunk(_))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Head { whole: Some(bytes), .. } | Self::Chunk(bytes) => bytes,
            _ => &[],
        }
    }
}

/// What comes to a host.
#[derive(Debug)]
pub(crate) enum Incoming {
    /// A request. Only one that `counts` is answered; its like are what comes a second time.
    Request { exchange: u64, request: Box<http::Request<Bytes>>, counts: bool },
    /// Whoever asked is gone.
    HungUp { exchange: u64 },
}

/// What really happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) delivered: u64,
    pub(crate) cut: u64,
    pub(crate) cut_one_way: u64,
    pub(crate) lost: u64,
    pub(crate) doubled: u64,
    pub(crate) overtaken: u64,
    pub(crate) refused: u64,
    pub(crate) reset: u64,
    pub(crate) snapshots: u64,
    pub(crate) applied: u64,
    pub(crate) sessions_ended: u64,
}

#[derive(Debug)]
enum Event {
    Request { to: usize, incoming: Incoming, path: String, from: usize },
    Part { exchange: u64, from: usize, part: Part },
}

#[derive(Debug)]
struct Exchange {
    client: usize,
    server: usize,
    parts: mpsc::UnboundedSender<Part>,
    /// When the last part of the answer arrives: the next one is not earlier.
    last: Duration,
}

#[derive(Debug, Default)]
struct Host {
    address: String,
    /// Where there is a listener.
    inbox: Option<mpsc::UnboundedSender<Incoming>>,
    /// A machine that is gone, not a process: it does not even refuse.
    vanished: bool,
    /// Its process has a state.
    opened: bool,
    /// The latest arrival that was planned for it.
    latest: Duration,
}

#[derive(Debug, Default)]
struct Inner {
    hosts: Vec<Host>,
    events: BTreeMap<(Duration, u64), Event>,
    exchanges: BTreeMap<u64, Exchange>,
    next: u64,
    cut: BTreeSet<(usize, usize)>,
    /// In thousandths.
    loss: u32,
    twice: u32,
    /// The longest that a message takes where nothing is wrong, in ms.
    delay_ms: u64,
    slow_ms: BTreeMap<(usize, usize), u64>,
    counts: Counts,
    trace: Sha256,
    lines: Option<Vec<String>>,
    /// What was applied under each index, and by whom first.
    applied: BTreeMap<u64, (usize, [u8; 32])>,
    /// What two nodes differ in.
    faults: Vec<String>,
}

/// The network of a simulation.
#[derive(Debug)]
pub(crate) struct Net {
    now_ns: AtomicU64,
    // A plain mutex: held for a look or an insertion, on one thread.
    inner: Mutex<Inner>,
}

impl Net {
    pub(crate) fn new(addresses: Vec<String>, keeps_lines: bool) -> Self {
        let hosts = addresses.into_iter().map(|address| Host { address, ..Host::default() });
        let inner = Inner {
            hosts: hosts.collect(),
            delay_ms: 2,
            lines: keeps_lines.then(Vec::new),
            ..Inner::default()
        };
        Self { now_ns: AtomicU64::new(0), inner: Mutex::new(inner) }
    }

    /// Time since the simulation began.
    pub(crate) fn now(&self) -> Duration {
        Duration::from_nanos(self.now_ns.load(Ordering::Relaxed))
    }

    pub(crate) fn set_now(&self, now: Duration) {
        self.now_ns.store(now.as_nanos() as u64, Ordering::Relaxed);
    }

    // ------------------------------------------------------------------------------- the weather

    /// A direction carries nothing, or something again.
    pub(crate) fn cut(&self, from: usize, to: usize, is_cut: bool) {
        let cut = &mut self.inner.lock().cut;
        match is_cut {
            true => drop(cut.insert((from, to))),
            false => drop(cut.remove(&(from, to))),
        }
    }

    /// Of a thousand requests or answers, so many get lost with their connection, and so many
    /// requests arrive a second time; a message takes up to so many ms.
    pub(crate) fn weather(&self, loss: u32, twice: u32, delay_ms: u64) {
        let inner = &mut *self.inner.lock();
        (inner.loss, inner.twice, inner.delay_ms) = (loss, twice, delay_ms.max(1));
    }

    /// What goes this way takes so much longer.
    pub(crate) fn slow(&self, from: usize, to: usize, ms: u64) {
        self.inner.lock().slow_ms.insert((from, to), ms);
    }

    /// Everything is carried again, and nothing gets lost.
    pub(crate) fn heal(&self) {
        let inner = &mut *self.inner.lock();
        inner.cut.clear();
        inner.slow_ms.clear();
        (inner.loss, inner.twice, inner.delay_ms) = (0, 0, 2);
    }

    // --------------------------------------------------------------------------------- the hosts

    /// A process listens on a host.
    pub(crate) fn listen(&self, host: usize) -> mpsc::UnboundedReceiver<Incoming> {
        let (inbox, incoming) = mpsc::unbounded_channel();
        let inner = &mut *self.inner.lock();
        inner.hosts[host].inbox = Some(inbox);
        inner.hosts[host].vanished = false;
        inner.hosts[host].opened = false;
        incoming
    }

    /// The process of a host is gone. Its kernel closes what was open, unless the machine vanished.
    pub(crate) fn gone(&self, host: usize, vanished: bool) {
        let now = self.now();
        let inner = &mut *self.inner.lock();
        inner.hosts[host].inbox = None;
        inner.hosts[host].vanished = vanished;
        let own = |exchange: &Exchange| exchange.client == host || exchange.server == host;
        let open: Vec<u64> =
            inner.exchanges.iter().filter(|(_, one)| own(one)).map(|(id, _)| *id).collect();
        for id in open {
            if inner.exchanges[&id].client == host {
                let Some(exchange) = inner.exchanges.remove(&id) else { continue };
                if !vanished {
                    inner.tell_hung_up(now, id, &exchange);
                }
            } else if !vanished {
                inner.part(now, id, Part::Reset);
            }
        }
    }

    /// Whether somebody would accept a connection.
    pub(crate) fn knock(&self, from: usize, address: &str) -> bool {
        let inner = self.inner.lock();
        let Some(to) = inner.find(address) else { return false };
        let open = !inner.cut.contains(&(from, to)) && !inner.cut.contains(&(to, from));
        open && inner.hosts[to].inbox.is_some()
    }

    // -------------------------------------------------------------------------------- the traffic

    /// A host asks another; where the answer will come.
    pub(super) fn ask(
        &self,
        from: usize,
        request: &reqwest::Request,
    ) -> Result<(u64, mpsc::UnboundedReceiver<Part>), Lost> {
        let now = self.now();
        let inner = &mut *self.inner.lock();
        let url = request.url();
        let address = format!(
            "{}:{}",
            url.host_str().unwrap_or_default(),
            url.port_or_known_default().unwrap_or_default()
        );
        let to = inner.find(&address);
        let to = to.ok_or_else(|| Lost::Connect(format!("no host {address}")))?;
        let mut copy = http::Request::new(Bytes::new());
        *copy.method_mut() = request.method().clone();
        *copy.uri_mut() = url.path().parse().map_err(|_| Lost::Broken("path".to_owned()))?;
        *copy.headers_mut() = request.headers().clone();
        if let Some(body) = request.body() {
            // Streams are read before they are sent here.
            let bytes =
                body.as_bytes().ok_or_else(|| Lost::Broken("a streamed body".to_owned()))?;
            *copy.body_mut() = Bytes::copy_from_slice(bytes);
        }
        let exchange = inner.next();
        let (parts, answer) = mpsc::unbounded_channel();
        let open = Exchange { client: from, server: to, parts, last: now };
        inner.exchanges.insert(exchange, open);
        if inner.is_lost(from, to) {
            // On a connection that was there it is not even known that nothing arrives.
            if seeded::draw(|chance| chance.random_bool(0.5)).unwrap_or_default() {
                let at = now + CONNECT_WITHIN;
                inner.plan(at, Event::Part { exchange, from: to, part: Part::Unreachable });
            }
            return Ok((exchange, answer));
        }
        let path = url.path().to_owned();
        let twice = MAY_COME_TWICE.contains(&url.path()) && inner.chance(inner.twice);
        let event = |request, counts| Event::Request {
            to,
            from,
            path: path.clone(),
            incoming: Incoming::Request { exchange, request: Box::new(request), counts },
        };
        if twice {
            inner.counts.doubled += 1;
            let at = now + inner.delay(from, to) + Duration::from_millis(3);
            inner.plan(at, event(copy.clone(), false));
        }
        let at = now + inner.delay(from, to);
        let latest = inner.hosts[to].latest;
        inner.counts.overtaken += u64::from(at < latest);
        inner.hosts[to].latest = latest.max(at);
        inner.plan(at, event(copy, true));
        Ok((exchange, answer))
    }

    /// A host answers.
    pub(super) fn answer(&self, host: usize, exchange: u64, part: Part) {
        let now = self.now();
        let inner = &mut *self.inner.lock();
        let Some(open) = inner.exchanges.get(&exchange) else { return };
        let client = open.client;
        if !inner.is_lost(host, client) {
            inner.part(now, exchange, part);
        }
    }

    /// Whoever asked wants no (more) answer.
    pub(super) fn hang_up(&self, exchange: u64) {
        let now = self.now();
        let inner = &mut *self.inner.lock();
        if let Some(open) = inner.exchanges.remove(&exchange) {
            inner.tell_hung_up(now, exchange, &open);
        }
    }

    /// Delivers what is due.
    pub(crate) fn deliver(&self) {
        let now = self.now();
        let inner = &mut *self.inner.lock();
        while let Some(entry) = inner.events.first_entry() {
            if entry.key().0 > now {
                return;
            }
            match entry.remove() {
                Event::Request { to, from, path, incoming } => {
                    inner.arrive(now, (from, to), &path, incoming);
                }
                Event::Part { exchange, from, part } => {
                    let Some(open) = inner.exchanges.get(&exchange) else { continue };
                    let (client, parts) = (open.client, open.parts.clone());
                    if part.is_last() {
                        inner.exchanges.remove(&exchange);
                    }
                    inner.counts.delivered += 1;
                    inner.counts.refused += u64::from(matches!(part, Part::Refused));
                    inner.counts.reset += u64::from(matches!(part, Part::Reset));
                    inner.note(now, (from, client), part.name(), part.bytes());
                    // Whoever asked may be gone.
                    let _ = parts.send(part);
                }
            }
        }
    }

    // ------------------------------------------------------------------------------- what is seen

    /// Something happened that belongs to the trace.
    pub(crate) fn happened(&self, host: usize, what: &str) {
        let now = self.now();
        self.inner.lock().note(now, (host, host), what, &[]);
    }

    /// A node has applied an entry.
    pub(super) fn applied(
        &self,
        host: usize,
        index: u64,
        (batch, reply): (&Batch, &BatchReply),
        effects: &[Effect],
    ) {
        let now = self.now();
        let mut bytes = Vec::new();
        codec::encode_onto(batch, &mut bytes);
        codec::encode_onto(reply, &mut bytes);
        let hash: [u8; 32] = Sha256::digest(&bytes).into();
        let inner = &mut *self.inner.lock();
        inner.counts.applied += 1;
        inner.note(now, (host, host), "applied", &bytes);
        if let Some(ended) = inner.first(index).then(|| ended(effects)) {
            inner.counts.sessions_ended += ended;
        }
        let (first, known) = *inner.applied.entry(index).or_insert((host, hash));
        if known != hash {
            inner.faults.push(format!(
                "hosts {first} and {host} applied different things as entry {index}"
            ));
        }
    }

    /// A node begins from a state, or goes on from one it was sent.
    pub(super) fn installed(&self, host: usize) {
        let now = self.now();
        let inner = &mut *self.inner.lock();
        inner.note(now, (host, host), "installed", &[]);
        // The first state of a process is what its disk had.
        let opened = std::mem::replace(&mut inner.hosts[host].opened, true);
        inner.counts.snapshots += u64::from(opened);
    }

    pub(crate) fn counts(&self) -> Counts {
        self.inner.lock().counts.clone()
    }

    pub(crate) fn faults(&self) -> Vec<String> {
        self.inner.lock().faults.clone()
    }

    /// A hash of everything that happened so far.
    pub(crate) fn trace(&self) -> String {
        let digest = self.inner.lock().trace.clone().finalize();
        digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Everything that happened so far, where lines are kept.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.inner.lock().lines.clone().unwrap_or_default()
    }
}

/// How many sessions ended without having been closed.
fn ended(effects: &[Effect]) -> u64 {
    let ended = |effect: &&Effect| match effect {
        Effect::SessionEnded { reason, .. } => *reason != EndReason::Closed,
        _ => false,
    };
    effects.iter().filter(ended).count() as u64
}

impl Inner {
    /// Whether nobody has applied this entry before.
    fn first(&self, index: u64) -> bool {
        !self.applied.contains_key(&index)
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn plan(&mut self, at: Duration, event: Event) {
        let number = self.next();
        self.events.insert((at, number), event);
    }

    fn find(&self, address: &str) -> Option<usize> {
        self.hosts.iter().position(|host| host.address == address)
    }

    fn chance(&self, thousandths: u32) -> bool {
        thousandths > 0
            && seeded::draw(|chance| chance.random_range(0..1_000) < thousandths)
                .unwrap_or_default()
    }

    /// Whether what is sent now in this direction never arrives.
    fn is_lost(&mut self, from: usize, to: usize) -> bool {
        if from == to {
            return false;
        }
        if self.cut.contains(&(from, to)) {
            self.counts.cut += 1;
            self.counts.cut_one_way += u64::from(!self.cut.contains(&(to, from)));
            return true;
        }
        let lost = self.chance(self.loss);
        self.counts.lost += u64::from(lost);
        lost
    }

    fn delay(&self, from: usize, to: usize) -> Duration {
        let slow = self.slow_ms.get(&(from, to)).copied().unwrap_or(0);
        let drawn = seeded::draw(|chance| chance.random_range(1..=self.delay_ms));
        Duration::from_millis(drawn.unwrap_or(1) + slow)
    }

    /// Sends a part of an answer on its way, behind the parts before it.
    fn part(&mut self, now: Duration, exchange: u64, part: Part) {
        let Some(open) = self.exchanges.get(&exchange) else { return };
        let (client, server, last) = (open.client, open.server, open.last);
        if matches!(part, Part::Reset | Part::Refused) && self.is_lost(server, client) {
            return;
        }
        let at = (now + self.delay(server, client)).max(last);
        if let Some(open) = self.exchanges.get_mut(&exchange) {
            open.last = at;
        }
        self.plan(at, Event::Part { exchange, from: server, part });
    }

    fn tell_hung_up(&mut self, now: Duration, exchange: u64, open: &Exchange) {
        if !self.is_lost(open.client, open.server) {
            let at = now + self.delay(open.client, open.server);
            let (to, from, path) = (open.server, open.client, "hung up".to_owned());
            let incoming = Incoming::HungUp { exchange };
            self.plan(at, Event::Request { to, from, path, incoming });
        }
    }

    fn arrive(&mut self, now: Duration, way: (usize, usize), path: &str, incoming: Incoming) {
        let host = &self.hosts[way.1];
        let (vanished, inbox) = (host.vanished, host.inbox.clone());
        match inbox {
            Some(inbox) => {
                if let Incoming::Request { request, .. } = &incoming {
                    self.counts.delivered += 1;
                    self.note(now, way, path, &request.body().clone());
                }
                // The process may be about to end.
                let _ = inbox.send(incoming);
            }
            None => {
                if let Incoming::Request { exchange, counts: true, .. } = incoming
                    && !vanished
                {
                    self.part(now, exchange, Part::Refused);
                }
            }
        }
    }

    fn note(&mut self, now: Duration, way: (usize, usize), what: &str, bytes: &[u8]) {
        let head = format!("{} {}>{} {what} {} ", now.as_millis(), way.0, way.1, bytes.len());
        self.trace.update(head.as_bytes());
        self.trace.update(bytes);
        if let Some(lines) = &mut self.lines {
            let crc = crc32c::crc32c(bytes);
            lines.push(format!("{head}{crc:08x}"));
        }
    }
}
