//! The tasks that run jobs: one a job and replica, from the bot's start to its stop.
//!
//! Problem: each occurrence of a durable job is to run on one replica, though all of them wait for it
//! and any may die while it runs.
//! Idea: the group keeps one task a job, with its next occurrence. Whoever claims that first runs
//! it; the others see the claim in their own applies and wait for the task to change.
//! Invariants:
//! 1. Nobody runs an occurrence it has not claimed, and a run is cut when its claimer's session ends:
//!    the group frees the claim not before.
//! 2. A replica that failed leaves the next attempt to the others for a while (SPEC G4: elsewhere).
//! 3. A claim whose answer was lost is seen in the task itself, and is run as any other.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::Scheduled;
use super::job::{Next, Plan};
use super::tick::Tick;
use crate::bot::drive::{Driven, poll};
use crate::bot::error::{Result, RuntimeError};
use crate::bot::events::Event;
use crate::bot::handle::BotHandle;
use crate::bot::outbox::back_off;
use crate::bot::runtime::{Phase, Runtime};
use crate::clock::BootInstant;
use crate::coordinator::LostReason;
use crate::store::{Claim, CommitError, Task};
use crate::types::{Fence, Incarnation};

/// Longest wait without a look at the time of day: a clock that was put right is followed.
const LOOK_AGAIN: Duration = Duration::from_secs(60);

/// How long a replica that failed leaves the job to the others, at least.
const HOLD_OFF: Duration = Duration::from_secs(1);
const HOLD_OFF_MAX: Duration = Duration::from_secs(60);

/// Runs a job without an id, on this replica as on every other.
pub(crate) async fn local(runtime: Arc<Runtime>, scheduled: Arc<Scheduled>) {
    let closing = runtime.reached(Phase::Closing);
    tokio::pin!(closing);
    let mut due = scheduled.schedule.after(runtime.clock.wall_ms());
    while let Some(due_ms) = due {
        tokio::select! {
            biased;
            () = &mut closing => return,
            () = reached(&runtime, due_ms, |runtime| runtime.clock.wall_ms()) => {}
        }
        let tick = Tick {
            handle: BotHandle { runtime: runtime.clone() },
            id: None,
            due_ms,
            attempt: 1,
            claim: None,
            posts: 0,
        };
        match run(&runtime, &scheduled, tick, std::future::pending()).await {
            Outcome::Done | Outcome::Lost => {}
            Outcome::Failed(error) => runtime.events.error(None, error),
            Outcome::Stopped => return,
        }
        due = scheduled.schedule.after(runtime.clock.wall_ms().max(due_ms));
    }
}

/// Resolves when the time of day is that late.
async fn reached(runtime: &Runtime, due_ms: u64, now_ms: impl Fn(&Runtime) -> u64) {
    loop {
        let left = due_ms.saturating_sub(now_ms(runtime));
        if left == 0 {
            return;
        }
        let wait = Duration::from_millis(left).min(LOOK_AGAIN);
        runtime.clock.sleep_until(runtime.clock.now() + wait).await;
    }
}

/// How a run ended.
enum Outcome {
    Done,
    Failed(RuntimeError),
    /// The claim is lost with its session.
    Lost,
    /// The bot cuts what still runs.
    Stopped,
}

/// Runs one occurrence to its end, or until it has to be cut.
async fn run(
    runtime: &Arc<Runtime>,
    scheduled: &Scheduled,
    mut tick: Tick,
    lost: impl Future<Output = ()>,
) -> Outcome {
    let (job, attempt) = (scheduled.job.to_string(), tick.attempt);
    let failed = |source: crate::bot::BoxError| {
        let source = source.into();
        Outcome::Failed(RuntimeError::Job { job: job.clone(), attempt, source })
    };
    let until = scheduled.job.within.map(|within| runtime.clock.now() + within);
    let cutting = runtime.reached(Phase::Cutting);
    tokio::pin!(lost, cutting);
    let mut called = scheduled.handler.call(&mut tick);
    let mut running: Pin<&mut (dyn Future<Output = Result> + Send)> = called.as_mut();
    let outcome = tokio::select! {
        biased;
        () = &mut lost => Outcome::Lost,
        () = &mut cutting => Outcome::Stopped,
        driven = std::future::poll_fn(|cx| poll(&mut running, &|| false, cx)) => match driven {
            Driven::Done(Ok(())) => Outcome::Done,
            Driven::Done(Err(error)) => failed(error),
            Driven::Panicked(what) => failed(format!("it panicked: {what}").into()),
            // A job waits for no answer and has no turn to lose.
            Driven::Waits | Driven::Cut(_) => Outcome::Done,
        },
        () = runtime.clock.sleep_until(until.unwrap_or_else(BootInstant::never)) => {
            failed("it took longer than it may; see Job::within".into())
        }
    };
    // Before the tick it was lent.
    drop(called);
    outcome
}

/// Runs the occurrences of a durable job that this replica claims.
pub(crate) async fn durable(runtime: Arc<Runtime>, scheduled: Arc<Scheduled>) {
    let closing = runtime.reached(Phase::Closing);
    let Some(id) = scheduled.job.durable_id().map(str::to_owned) else { return };
    let body = scheduled.job.definition().encode();
    let mut worker = Worker { runtime, scheduled, id, body, ensured: false, held_off: None };
    let mut failures = 0;
    tokio::pin!(closing);
    loop {
        let stepped = tokio::select! {
            biased;
            () = &mut closing => return,
            stepped = worker.next_claim() => stepped,
        };
        let worked = match stepped {
            Ok(Some(claimed)) => worker.work(claimed).await,
            Ok(None) => return,
            Err(error) => Err(error),
        };
        match worked {
            Ok(()) => failures = 0,
            Err(error) => {
                tracing::warn!(job = %worker.scheduled.job, %error, "the job's task is out of reach");
                let until = worker.runtime.clock.now() + back_off(failures);
                failures += 1;
                tokio::select! {
                    biased;
                    () = &mut closing => return,
                    () = worker.runtime.clock.sleep_until(until) => {}
                }
            }
        }
    }
}

/// An occurrence that is ours.
struct Claimed {
    due_ms: u64,
    by: Incarnation,
    fence: Fence,
    attempt: u32,
}

struct Worker {
    runtime: Arc<Runtime>,
    scheduled: Arc<Scheduled>,
    id: String,
    body: Vec<u8>,
    /// Whether the group has this definition, as far as this replica has seen to it.
    ensured: bool,
    /// The occurrence that failed here, and until when others go first.
    held_off: Option<(u64, BootInstant)>,
}

impl Worker {
    /// Waits for an occurrence and claims it; `None` where there will be none. Dropped at any
    /// point it leaves at most a claim, which the end of the session frees.
    async fn next_claim(&mut self) -> Result<Option<Claimed>, CommitError> {
        let store = self.runtime.store.clone();
        loop {
            let me = self.session().await;
            let mut task = store.task(&self.id).await.map_err(unread)?;
            if !self.ensured {
                let Some(first) = self.scheduled.schedule.after(store.now_ms()) else {
                    return Ok(None);
                };
                // Nothing is asked for that is there: a group on its way to this version refuses it.
                self.ensured = match &task {
                    Some(task) if task.body == self.body => true,
                    _ => store.ensure_task(&self.id, first, self.body.clone()).await?,
                };
                task = store.task(&self.id).await.map_err(unread)?;
            }
            match &task {
                Some(task) if task.claimed_by == Some(me) => {
                    let Task { due_ms, fence, attempt, .. } = *task;
                    return Ok(Some(Claimed { due_ms, by: me, fence, attempt }));
                }
                Some(free) if free.claimed_by.is_none() && free.body == self.body => {
                    if !self.came_due(free).await? {
                        continue;
                    }
                    let due_ms = free.due_ms;
                    if let Some(claim) = store.claim_task(&self.id, due_ms, me).await? {
                        let Claim { fence, attempt } = claim;
                        return Ok(Some(Claimed { due_ms, by: me, fence, attempt }));
                    }
                    if store.task(&self.id).await.map_err(unread)?.as_ref() == Some(free) {
                        let why = "its claim was refused".to_owned();
                        return Err(CommitError::Unavailable { why });
                    }
                }
                // Done for ever; whoever starts next puts it again where it has a next.
                None if self.scheduled.schedule.after(store.now_ms()).is_none() => return Ok(None),
                // Another's, of another release, or gone.
                _ => {
                    store.task_changed(&self.id, task.as_ref()).await.map_err(unread)?;
                }
            }
        }
    }

    /// Waits until a free task is due and ours to try; `false` where it changed meanwhile.
    async fn came_due(&self, task: &Task) -> Result<bool, CommitError> {
        let (runtime, due_ms) = (&self.runtime, task.due_ms);
        let due = async {
            reached(runtime, due_ms, |runtime| runtime.store.now_ms()).await;
            if let Some((held_ms, until)) = self.held_off
                && held_ms == due_ms
            {
                runtime.clock.sleep_until(until).await;
            }
        };
        tokio::select! {
            biased;
            changed = runtime.store.task_changed(&self.id, Some(task)) => {
                changed.map_err(unread)?;
                Ok(false)
            }
            () = due => Ok(true),
        }
    }

    /// The live session; waits for one.
    async fn session(&self) -> Incarnation {
        loop {
            // Subscribed before the look: nothing falls in between.
            let mut events = self.runtime.scheduler.events();
            if let Some(me) = self.runtime.scheduler.incarnation() {
                return me;
            }
            // One that was missed is one more look.
            let _ = events.recv().await;
        }
    }

    /// Resolves when this session is over.
    async fn lost(&self, me: Incarnation) {
        let scheduler = &self.runtime.scheduler;
        loop {
            let mut events = scheduler.events();
            let until = scheduler.valid_until().filter(|_| scheduler.incarnation() == Some(me));
            let Some(until) = until else { return };
            tokio::select! {
                biased;
                () = self.runtime.clock.sleep_until(until) => {}
                _ = events.recv() => {}
            }
        }
    }

    /// Runs a claimed occurrence and ends it in the group.
    async fn work(&mut self, claimed: Claimed) -> Result<(), CommitError> {
        let Claimed { due_ms, by, fence, attempt } = claimed;
        let (runtime, scheduled) = (self.runtime.clone(), self.scheduled.clone());
        let now_ms = runtime.store.now_ms();
        let plan = scheduled.schedule.plan(due_ms, now_ms, scheduled.job.missed, attempt);
        let next = match plan {
            Plan::Pass { next } => {
                tracing::info!(job = %scheduled.job, due_ms, "missed, and passed over");
                return self.finish(due_ms, by, next).await;
            }
            Plan::Run { next } => next,
        };
        if attempt > scheduled.job.attempts {
            // Whoever ran it before died each time.
            return self.give_up(due_ms, by, attempt - 1, next).await;
        }
        let tick = Tick {
            handle: BotHandle { runtime: runtime.clone() },
            id: Some(self.id.clone()),
            due_ms,
            attempt,
            claim: Some((by, fence)),
            posts: 0,
        };
        match run(&runtime, &scheduled, tick, self.lost(by)).await {
            Outcome::Done => self.finish(due_ms, by, self.after(next, due_ms)).await,
            Outcome::Failed(error) => {
                runtime.events.error(None, error);
                if attempt >= scheduled.job.attempts {
                    return self.give_up(due_ms, by, attempt, next).await;
                }
                let wait = HOLD_OFF * 2_u32.saturating_pow(attempt.saturating_sub(1).min(10));
                let until = runtime.clock.now() + wait.min(HOLD_OFF_MAX);
                self.held_off = Some((due_ms, until));
                let back = || runtime.store.return_task(&self.id, due_ms, by);
                self.settled(by, back).await
            }
            Outcome::Lost => {
                let (key, reason) = (format!("job:{}", self.id), LostReason::Expired);
                runtime.events.emit(Event::LeaseLost { key, reason });
                Ok(())
            }
            // The session's end frees the claim.
            Outcome::Stopped => Ok(()),
        }
    }

    fn after(&self, next: Next, due_ms: u64) -> Option<u64> {
        match next {
            Next::Is(next) => next,
            Next::AfterTheRun => {
                self.scheduled.schedule.after(self.runtime.store.now_ms().max(due_ms))
            }
        }
    }

    async fn give_up(
        &self,
        due_ms: u64,
        by: Incarnation,
        attempts: u32,
        next: Next,
    ) -> Result<(), CommitError> {
        self.finish(due_ms, by, self.after(next, due_ms)).await?;
        let id = self.id.clone();
        self.runtime.events.emit(Event::JobGivenUp { id, due_ms, attempts });
        Ok(())
    }

    async fn finish(
        &self,
        due_ms: u64,
        by: Incarnation,
        next_ms: Option<u64>,
    ) -> Result<(), CommitError> {
        let store = &self.runtime.store;
        self.settled(by, || store.finish_task(&self.id, due_ms, by, next_ms)).await
    }

    /// Asks until there is an answer, or the claim has ended with its session. Asking again is
    /// harmless: what was done already is refused.
    async fn settled<F>(&self, by: Incarnation, ask: impl Fn() -> F) -> Result<(), CommitError>
    where
        F: Future<Output = Result<bool, CommitError>>,
    {
        for attempt in 0.. {
            let error = match ask().await {
                Ok(_) => break,
                Err(error) => error,
            };
            if self.runtime.scheduler.incarnation() != Some(by) {
                break;
            }
            tracing::warn!(job = %self.scheduled.job, %error, "the end of a run is not recorded yet");
            let until = self.runtime.clock.now() + back_off(attempt);
            tokio::select! {
                biased;
                () = self.runtime.reached(Phase::Cutting) => break,
                () = self.runtime.clock.sleep_until(until) => {}
            }
        }
        Ok(())
    }
}

fn unread(error: crate::store::StoreError) -> CommitError {
    CommitError::Unavailable { why: error.to_string() }
}
