//! Runs a handler or a step until it ends, waits for an answer, or has to be cut.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::runtime::{Phase, Runtime};
use super::scope::Scope;
use crate::coordinator::LostReason;
use crate::store::CommitError;

/// What is said in a longer step leaves after this much of it.
const FLUSH_AFTER: Duration = Duration::from_millis(100);

/// How a run went.
pub(crate) enum Driven<T> {
    /// It returned.
    Done(T),
    /// It waits for an answer.
    Waits,
    /// It was cut, or has to be dropped: the turn is lost.
    Cut(LostReason),
    /// It panicked.
    Panicked(String),
}

type Step<'a, T> = Pin<&'a mut (dyn Future<Output = T> + Send)>;
pub(crate) type Flush = Pin<Box<dyn Future<Output = Result<(), LostReason>> + Send>>;

/// Whether something should be committed before the turn's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    /// Nothing.
    Nothing,
    /// With the next early commit.
    Soon,
    /// Before the step goes on.
    Now,
}

/// What a run may have to commit before the turn's end.
pub(crate) trait Early: Send + Sync {
    /// Asked wherever the run waits for something.
    fn wants(&self) -> Wants;

    /// Commits it. An error means that the turn is lost.
    fn write(self: Arc<Self>) -> Flush;
}

/// Polls once, panics caught.
pub(crate) fn poll<T>(
    step: &mut Step<'_, T>,
    waits: &dyn Fn() -> bool,
    cx: &mut Context<'_>,
) -> Poll<Driven<T>> {
    // A step that panicked is dropped, so nobody sees what it left half done.
    match std::panic::catch_unwind(AssertUnwindSafe(|| step.as_mut().poll(cx))) {
        Ok(Poll::Ready(value)) => Poll::Ready(Driven::Done(value)),
        Ok(Poll::Pending) if waits() => Poll::Ready(Driven::Waits),
        Ok(Poll::Pending) => Poll::Pending,
        Err(panic) => Poll::Ready(Driven::Panicked(panic_text(&*panic))),
    }
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without text".into())
}

/// See the module. The caller drops the future after anything but `Waits`.
pub(crate) async fn drive<T>(
    runtime: &Arc<Runtime>,
    scope: &Arc<Scope>,
    mut step: Step<'_, T>,
    waits: impl Fn() -> bool + Send + Sync,
    early: Arc<dyn Early>,
) -> Driven<T> {
    scope.step_started();
    let watched = runtime.watch.over(scope);
    // Most are done at the first poll; only the others need timers.
    let first = std::future::poll_fn(|cx| Poll::Ready(poll(&mut step, &waits, cx))).await;
    if let Poll::Ready(driven) = first {
        return driven;
    }
    let lost = scope.turn().lost();
    let cutting = runtime.reached(Phase::Cutting);
    tokio::pin!(lost, cutting);
    let mut flush: Option<Flush> = None;
    let mut flush_at = runtime.clock.now() + FLUSH_AFTER;
    // What must be committed before the step goes on holds it; what may follow does not.
    let mut holding = false;
    let driven = loop {
        let now = early.wants() == Wants::Now;
        if now && flush.is_none() {
            (flush, holding) = (Some(early.clone().write()), true);
        }
        let settle_at = scope.step_started_at() + runtime.settle;
        tokio::select! {
            biased;
            reason = &mut lost => break Driven::Cut(reason),
            () = &mut cutting => break Driven::Cut(LostReason::SteppedDown),
            driven = std::future::poll_fn(|cx| poll_once(&mut step, &waits, &early, cx)),
                if !holding && !now =>
            {
                match driven {
                    Some(driven) => break driven,
                    None => continue,
                }
            }
            flushed = flushing(&mut flush) => {
                (flush, holding) = (None, false);
                if let Err(reason) = flushed {
                    break Driven::Cut(reason);
                }
            }
            () = runtime.clock.sleep_until(settle_at.min(flush_at)) => {
                let now = runtime.clock.now();
                if now >= scope.step_started_at() + runtime.settle {
                    break Driven::Cut(LostReason::Settled);
                }
                if now >= flush_at {
                    flush_at = now + FLUSH_AFTER;
                    if flush.is_none() && early.wants() != Wants::Nothing {
                        flush = Some(early.clone().write());
                    }
                }
            }
        }
    };
    // The step is done, or is dropped: what is still to be committed does not block a thread.
    drop(watched);
    match (&driven, flush) {
        (Driven::Cut(_), _) | (_, None) => driven,
        // What an early commit is about to write comes before what the last one will.
        (_, Some(flush)) => match flush.await {
            Ok(()) => driven,
            Err(reason) => Driven::Cut(reason),
        },
    }
}

/// Polls once more; `None` where the step now waits for something and must not go on before an
/// early commit.
fn poll_once<T>(
    step: &mut Step<'_, T>,
    waits: &dyn Fn() -> bool,
    early: &Arc<dyn Early>,
    cx: &mut Context<'_>,
) -> Poll<Option<Driven<T>>> {
    match poll(step, waits, cx) {
        Poll::Ready(driven) => Poll::Ready(Some(driven)),
        Poll::Pending if early.wants() == Wants::Now => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    }
}

async fn flushing(flush: &mut Option<Flush>) -> Result<(), LostReason> {
    match flush {
        Some(flush) => flush.await,
        None => std::future::pending().await,
    }
}

/// A handler: only what it said.
impl Early for Scope {
    fn wants(&self) -> Wants {
        // What a conversation said before goes out after the write that ends it.
        if self.has_said() && !self.is_holding() { Wants::Soon } else { Wants::Nothing }
    }

    fn write(self: Arc<Self>) -> Flush {
        Box::pin(async move { self.flush().await })
    }
}

impl Scope {
    /// Commits what was said so far. What was certainly or possibly not written is put back: an id
    /// the outbox knows is passed over.
    async fn flush(self: Arc<Self>) -> Result<(), LostReason> {
        let said = self.take_said();
        match self.commit_said(None, &said).await {
            Ok(_) => Ok(()),
            Err(CommitError::Fenced { .. } | CommitError::Superseded { .. }) => {
                Err(self.check().err().unwrap_or(LostReason::Superseded))
            }
            Err(error) => {
                tracing::warn!(chat = %self.chat(), %error, "replies are not committed yet");
                self.put_back(said);
                Ok(())
            }
        }
    }
}
