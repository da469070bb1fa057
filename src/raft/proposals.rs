//! From a command to the log and back: the proposal queue.
//!
//! Problem: a commit costs a round trip and two fsyncs, whatever it carries, and an answer can be
//! lost at every step, while a command must take effect once and in order. Idea: commands gather
//! in a few *lanes*; each lane has one batch in flight, under consecutive serials, and repeats it
//! to whoever leads until this node's own apply shows it (SPEC B8). The machine answers a repeated
//! serial from memory, so repeating is safe, and one batch of remembered answers a lane is enough.
//!
//! ```text
//!   execute ──► lane: waiting … ──► batch in flight ──► leader's log ──► own apply ──► caller
//!                      ▲                   │  ▲                              (landed)
//!                      └── certainly not ──┘  └── in doubt: the same serial again
//!                            taken
//! ```
//!
//! Invariants:
//! * Commands about one chat, lock, task or session go through one lane ([`lane_of`]), so they are
//!   applied in the order they were asked (SPEC B1).
//! * A batch changes only while it was certainly not taken by any leader; once in doubt it is
//!   repeated unchanged until it lands.
//! * A command that rides opens no batch of its own before its time; any other command of its lane
//!   takes it along.
//! * A caller whose deadline passes takes its command back while it still waits, and only then is
//!   it told *not executed*.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use super::lanes::{lane_of, weight};
use super::types::Proposal;
use crate::clock::{BootInstant, Clock};
use crate::group::{ExecuteError, Unavailable};
use crate::machine::{Batch, BatchReply, ClientId, Command, Machine, Reply};

#[cfg(test)]
mod tests;

/// Lanes of a node. More of them overlap commits, fewer make larger batches. Not tuned yet.
const LANES: u16 = 4;
/// The most commands of one batch.
const BATCH_COMMANDS_MAX: usize = 1024;
/// The most bytes of one batch, except that one command always fits.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// How often a lane lets other tasks go first while they add to its next batch.
const GATHER_TURNS_MAX: u32 = 16;
/// First and longest pause before a batch is repeated.
const PAUSE_MIN: Duration = Duration::from_millis(4);
const PAUSE_MAX: Duration = Duration::from_millis(16);
/// How long a committed batch may take to be applied here before the machine is asked for it.
const LAND_WITHIN: Duration = Duration::from_millis(500);
/// No renewal older than this enters a batch, nor one older than a third of its lease (DESIGN 3
/// rule 10).
const RENEWAL_AGE_MAX: Duration = Duration::from_millis(500);

/// What became of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It is committed; the own apply follows.
    Committed,
    /// No leader took it into its log.
    NotTaken,
    /// It may be in a log.
    Unknown,
}

/// How batches reach the leader.
#[async_trait]
pub(crate) trait Carrier: Send + Sync + std::fmt::Debug + 'static {
    /// Why a batch cannot be sent now; `None` where a leader with a majority is known.
    fn hindrance(&self) -> Option<Unavailable>;

    /// The time a batch is stamped with; a leader stamps what others forward anew.
    fn stamp_ms(&self) -> u64;

    /// Sends a batch to the leader. Dropping the future does not take it back.
    async fn propose(&self, proposal: Proposal) -> Sent;

    /// The replies of a batch that has been applied.
    fn remembered(&self, client: ClientId, lane: u16, serial: u64) -> Option<BatchReply>;
}

/// A command's way: waiting → sent, or waiting → taken back. One atomic, so that lane and caller
/// agree on which came first.
const WAITING: u8 = 0;
const SENT: u8 = 1;
const TAKEN_BACK: u8 = 2;

/// What a caller is told.
pub(crate) type Answer = Result<Reply, ExecuteError>;

#[derive(Debug)]
struct Pending {
    command: Command,
    /// About how many bytes it takes in a batch.
    weight: usize,
    /// Set on renewals: not to enter a batch after this.
    stale_at: Option<BootInstant>,
    /// Set where it waits so long for others to share its batch.
    rides_until: Option<BootInstant>,
    asked: BootInstant,
    state: Arc<AtomicU8>,
    caller: oneshot::Sender<Answer>,
}

impl Pending {
    /// Moves it from waiting to sent; `false` where the caller took it back.
    fn claim(&self) -> bool {
        let claimed =
            self.state.compare_exchange(WAITING, SENT, Ordering::AcqRel, Ordering::Acquire);
        claimed.is_ok()
    }
}

/// What a batch does not carry of its commands, for when they go back.
struct Extra {
    weight: usize,
    stale_at: Option<BootInstant>,
    rides_until: Option<BootInstant>,
    asked: BootInstant,
}

/// The batch a lane has in flight.
#[derive(Debug)]
struct Flight {
    serial: u64,
    callers: Vec<(oneshot::Sender<Answer>, Arc<AtomicU8>)>,
    /// Set where the machine waits for another serial.
    gap: Option<u64>,
}

#[derive(Debug, Default)]
struct Lane {
    /// In the order they were asked. A plain mutex: held for a push or a drain.
    waiting: Mutex<VecDeque<Pending>>,
    /// Raised when something waits.
    filled: Notify,
    /// Taken out by the apply that answers it.
    flight: Mutex<Option<Flight>>,
    /// Raised when the flight has landed.
    landed: Notify,
}

/// The queue of one node.
#[derive(Debug)]
pub(crate) struct Proposals {
    client: ClientId,
    lanes: Vec<Lane>,
    /// Commands waiting, over all lanes.
    waiting: AtomicUsize,
    waiting_max: usize,
    clock: Arc<dyn Clock>,
    stop: CancellationToken,
}

impl Proposals {
    pub(crate) fn new(
        client: ClientId,
        waiting_max: usize,
        clock: Arc<dyn Clock>,
        stop: CancellationToken,
    ) -> Self {
        let lanes = (0..LANES).map(|_| Lane::default()).collect();
        Self { client, lanes, waiting: AtomicUsize::new(0), waiting_max, clock, stop }
    }

    /// Queues a command and waits for its answer. `renewal` is the lease of what it renews.
    pub(crate) async fn execute(
        &self,
        command: Command,
        renewal: Option<Duration>,
        deadline: BootInstant,
        hindrance: impl Fn() -> Option<Unavailable>,
    ) -> Answer {
        self.queue(command, renewal, None, deadline, hindrance).await
    }

    /// As `execute`, and until `latest` it may wait for another command to go with.
    pub(crate) async fn execute_by(
        &self,
        command: Command,
        latest: BootInstant,
        deadline: BootInstant,
        hindrance: impl Fn() -> Option<Unavailable>,
    ) -> Answer {
        self.queue(command, None, Some(latest), deadline, hindrance).await
    }

    async fn queue(
        &self,
        command: Command,
        renewal: Option<Duration>,
        rides_until: Option<BootInstant>,
        deadline: BootInstant,
        hindrance: impl Fn() -> Option<Unavailable>,
    ) -> Answer {
        let asked = self.clock.now();
        if self.stop.is_cancelled() {
            return Err(ExecuteError::NotExecuted(shutting_down()));
        }
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed);
        if waiting >= self.waiting_max {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(ExecuteError::NotExecuted(Unavailable::Overloaded { waiting }));
        }
        let (caller, mut answer) = oneshot::channel();
        let state = Arc::new(AtomicU8::new(WAITING));
        let lane = &self.lanes[usize::from(lane_of(&command, LANES))];
        let pending = Pending {
            weight: weight(&command),
            command,
            stale_at: renewal.map(|lease| asked + (lease / 3).min(RENEWAL_AGE_MAX)),
            rides_until,
            asked,
            state: state.clone(),
            caller,
        };
        lane.waiting.lock().push_back(pending);
        lane.filled.notify_one();

        tokio::select! {
            biased;
            answer = &mut answer => answer.unwrap_or_else(|_| {
                // The lane went away with the command: only its state tells how far it was.
                Err(match state.load(Ordering::Acquire) {
                    SENT => ExecuteError::OutcomeUnknown(shutting_down()),
                    _ => ExecuteError::NotExecuted(shutting_down()),
                })
            }),
            () = self.clock.sleep_until(deadline) => {
                let back = state.compare_exchange(
                    WAITING, TAKEN_BACK, Ordering::AcqRel, Ordering::Acquire,
                );
                let waited = self.clock.now() - asked;
                let why = hindrance().unwrap_or(Unavailable::Timeout { waited });
                match back {
                    Ok(_) => Err(ExecuteError::NotExecuted(why)),
                    // It may have landed this very moment.
                    Err(_) => answer
                        .try_recv()
                        .unwrap_or(Err(ExecuteError::OutcomeUnknown(why))),
                }
            }
        }
    }

    /// What hinders every command once the node is shut down.
    pub(crate) fn stopped(&self) -> Option<Unavailable> {
        self.stop.is_cancelled().then(shutting_down)
    }

    /// Commands waiting.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// An entry was applied on this node.
    pub(crate) fn landed(&self, batch: &Batch, reply: BatchReply) {
        if batch.client == self.client
            && let Some(lane) = self.lanes.get(usize::from(batch.lane))
        {
            lane.land(batch.serial, reply);
        }
    }

    /// The state was replaced: what was in flight may be in it.
    pub(crate) fn installed(&self, machine: &Machine) {
        for (number, lane) in (0..LANES).zip(&self.lanes) {
            let serial = lane.flight.lock().as_ref().map(|flight| flight.serial);
            if let Some(serial) = serial
                && let Some(reply) = machine.remembered(self.client, number, serial)
            {
                lane.land(serial, reply);
            }
        }
    }

    /// Runs one lane until the node stops.
    pub(crate) async fn run_lane(&self, number: u16, carrier: &dyn Carrier) {
        let lane = &self.lanes[usize::from(number)];
        let mut serial = 0;
        loop {
            // Nothing to gather at the first command after a rest: it goes out at once.
            let follows = serial > 0 && !lane.waiting.lock().is_empty();
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                () = self.ready(lane, carrier) => {}
            }
            if follows {
                gather(lane).await;
            }
            let batch = self.take(lane);
            if batch.is_empty() {
                continue;
            }
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                next = self.fly(lane, number, serial, batch, carrier) => serial = next,
            }
        }
        self.close(lane);
    }

    /// Lane numbers.
    pub(crate) fn lane_numbers() -> std::ops::Range<u16> {
        0..LANES
    }

    /// Returns when something waits that does not ride, or rode long enough, and a leader is known.
    async fn ready(&self, lane: &Lane, carrier: &dyn Carrier) {
        loop {
            let filled = lane.filled.notified();
            match lane.due() {
                None => {
                    filled.await;
                    continue;
                }
                Some(Some(latest)) if self.clock.now() < latest => {
                    tokio::select! {
                        biased;
                        () = filled => {}
                        () = self.clock.sleep_until(latest) => {}
                    }
                    continue;
                }
                Some(_) => {}
            }
            if carrier.hindrance().is_none() {
                return;
            }
            // Meanwhile callers give up; what they took back must not fill the queue.
            self.sweep(lane);
            tokio::time::sleep(PAUSE_MIN).await;
        }
    }

    /// Removes what was taken back.
    fn sweep(&self, lane: &Lane) {
        let mut waiting = lane.waiting.lock();
        let before = waiting.len();
        waiting.retain(|pending| pending.state.load(Ordering::Acquire) == WAITING);
        self.waiting.fetch_sub(before - waiting.len(), Ordering::Relaxed);
    }

    /// Takes the next batch out of the queue.
    fn take(&self, lane: &Lane) -> Vec<Pending> {
        let now = self.clock.now();
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut waiting = lane.waiting.lock();
        while let Some(next) = waiting.front() {
            let full = batch.len() >= BATCH_COMMANDS_MAX || bytes + next.weight > BATCH_BYTES_MAX;
            if full && !batch.is_empty() {
                break;
            }
            let Some(next) = waiting.pop_front() else { break };
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            if !next.claim() {
                continue;
            }
            if next.stale_at.is_some_and(|stale_at| now > stale_at) {
                let waited = now - next.asked;
                let why = ExecuteError::NotExecuted(Unavailable::Timeout { waited });
                // Whoever asked may be gone.
                let _ = next.caller.send(Err(why));
                continue;
            }
            bytes += next.weight;
            batch.push(next);
        }
        batch
    }

    /// Sends a batch until it has landed. Returns the lane's next serial.
    async fn fly(
        &self,
        lane: &Lane,
        number: u16,
        serial: u64,
        pending: Vec<Pending>,
        carrier: &dyn Carrier,
    ) -> u64 {
        let mut commands = Vec::with_capacity(pending.len());
        let mut callers = Vec::with_capacity(pending.len());
        let mut extras = Vec::with_capacity(pending.len());
        for one in pending {
            commands.push(one.command);
            callers.push((one.caller, one.state));
            extras.push(Extra {
                weight: one.weight,
                stale_at: one.stale_at,
                rides_until: one.rides_until,
                asked: one.asked,
            });
        }
        let stamp_ms = carrier.stamp_ms();
        let mut batch = Batch { client: self.client, lane: number, serial, stamp_ms, commands };
        let mut proposal = Proposal::seal(&batch);
        *lane.flight.lock() = Some(Flight { serial, callers, gap: None });

        let mut in_doubt = false;
        let mut pause = PAUSE_MIN;
        loop {
            let sent = if carrier.hindrance().is_some() {
                Sent::NotTaken
            } else {
                tokio::select! {
                    biased;
                    () = lane.gone() => return batch.serial + 1,
                    sent = carrier.propose(proposal.clone()) => sent,
                }
            };
            let wait = match sent {
                Sent::Committed => LAND_WITHIN,
                Sent::NotTaken if !in_doubt => {
                    let Some(flight) = lane.flight.lock().take() else { return batch.serial + 1 };
                    self.put_back(lane, batch.commands, flight, extras);
                    tokio::time::sleep(PAUSE_MIN).await;
                    return batch.serial;
                }
                Sent::NotTaken => pause,
                Sent::Unknown => {
                    in_doubt = true;
                    pause
                }
            };
            // Nothing is certain about a batch that an earlier attempt may have left in a log.
            in_doubt |= sent == Sent::Committed;
            if tokio::time::timeout(wait, lane.gone()).await.is_ok() {
                return batch.serial + 1;
            }
            pause = (pause * 2).min(PAUSE_MAX);
            if let Some(next) = lane.gap() {
                tracing::error!(
                    lane = number,
                    serial = batch.serial,
                    next,
                    "the group lost a batch"
                );
                batch.serial = next;
                proposal = Proposal::seal(&batch);
            } else if let Some(reply) = carrier.remembered(self.client, number, batch.serial) {
                lane.land(batch.serial, reply);
            }
        }
    }

    /// Puts the commands of a batch that no leader took back to where they were.
    fn put_back(&self, lane: &Lane, commands: Vec<Command>, flight: Flight, extras: Vec<Extra>) {
        let mut waiting = lane.waiting.lock();
        self.waiting.fetch_add(commands.len(), Ordering::Relaxed);
        let all = commands.into_iter().zip(flight.callers).zip(extras);
        for ((command, (caller, state)), extra) in all.rev() {
            state.store(WAITING, Ordering::Release);
            let Extra { weight, stale_at, rides_until, asked } = extra;
            waiting.push_front(Pending {
                command,
                weight,
                stale_at,
                rides_until,
                asked,
                state,
                caller,
            });
        }
        lane.filled.notify_one();
    }

    /// Drops what is left: each caller is told by its command's state.
    fn close(&self, lane: &Lane) {
        let mut waiting = lane.waiting.lock();
        self.waiting.fetch_sub(waiting.len(), Ordering::Relaxed);
        waiting.clear();
        drop(waiting);
        *lane.flight.lock() = None;
    }
}

/// Lets those whose answers have just landed ask for what they want next, so that it shares the next
/// batch. The lane was woken last and would run first (tokio runs the task woken last next), and
/// under load half of all commands would always miss the batch: twice the entries, each with its
/// syncs and messages.
async fn gather(lane: &Lane) {
    let mut before = lane.waiting.lock().len();
    for _ in 0..GATHER_TURNS_MAX {
        tokio::task::yield_now().await;
        let now = lane.waiting.lock().len();
        if now <= before || now >= BATCH_COMMANDS_MAX {
            return;
        }
        before = now;
    }
}

impl Lane {
    /// When a batch has to go: `None` = nothing waits, `Some(None)` = now, else at that instant.
    fn due(&self) -> Option<Option<BootInstant>> {
        let waiting = self.waiting.lock();
        let mut first = None;
        for one in waiting.iter() {
            // Under load the first that waits is one that does not ride.
            let Some(until) = one.rides_until else { return Some(None) };
            first = Some(first.map_or(until, |first: BootInstant| first.min(until)));
        }
        first.map(Some)
    }

    /// Answers the callers of a batch.
    fn land(&self, serial: u64, reply: BatchReply) {
        let mut slot = self.flight.lock();
        let Some(flight) = slot.as_mut().filter(|flight| flight.serial == serial) else { return };
        if let BatchReply::Gap { next } = reply {
            // Nothing ran; the lane sends it again under the serial the machine waits for.
            flight.gap = Some(next);
            flight.serial = next;
            return;
        }
        let Some(flight) = slot.take() else { return };
        drop(slot);
        match reply {
            BatchReply::Applied(replies) => {
                for ((caller, _), reply) in flight.callers.into_iter().zip(replies) {
                    // Whoever asked may be gone.
                    let _ = caller.send(Ok(reply));
                }
            }
            BatchReply::Superseded { boot } => {
                let why = format!("its data directory was opened again (boot {boot})");
                for (caller, _) in flight.callers {
                    let not = Unavailable::NotServing { why: why.clone() };
                    let _ = caller.send(Err(ExecuteError::NotExecuted(not)));
                }
            }
            BatchReply::Forgotten | BatchReply::Gap { .. } => {
                for (caller, _) in flight.callers {
                    let lost = Unavailable::NotServing { why: "the answer was forgotten".into() };
                    let _ = caller.send(Err(ExecuteError::OutcomeUnknown(lost)));
                }
            }
        }
        self.landed.notify_one();
    }

    /// Returns once nothing is in flight.
    async fn gone(&self) {
        loop {
            let landed = self.landed.notified();
            if self.flight.lock().is_none() {
                return;
            }
            landed.await;
        }
    }

    fn gap(&self) -> Option<u64> {
        self.flight.lock().as_mut().and_then(|flight| flight.gap.take())
    }
}

fn shutting_down() -> Unavailable {
    Unavailable::NotServing { why: "it is shutting down".to_owned() }
}
