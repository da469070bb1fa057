//! What a job's handler is lent, and how handlers are called.

use std::fmt;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use crate::bot::error::Result;
use crate::bot::handle::{BotHandle, PostError};
use crate::bot::handler::Cloned;
use crate::coordinator::LostReason;
use crate::types::{ChatKey, Fence, Incarnation};

/// One occurrence of a job, lent to its handler. Neither owned nor `Clone`: what was cut says
/// nothing more.
pub struct Tick {
    pub(super) handle: BotHandle,
    pub(super) id: Option<String>,
    pub(super) due_ms: u64,
    pub(super) attempt: u32,
    pub(super) claim: Option<(Incarnation, Fence)>,
    pub(super) posts: u32,
}

impl fmt::Debug for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tick")
            .field("id", &self.id)
            .field("due_ms", &self.due_ms)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

impl Tick {
    /// The job's id, where it has one.
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// The instant it was due.
    pub fn due(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(self.due_ms)
    }

    /// The same, in ms since the Unix epoch: with the id it names this occurrence, also when it runs
    /// again.
    pub fn due_ms(&self) -> u64 {
        self.due_ms
    }

    /// Which attempt at this occurrence it is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Of a durable job: grows with every claim. Hand it to resources that can refuse older ones.
    pub fn fence(&self) -> Option<Fence> {
        self.claim.map(|(_, fence)| fence)
    }

    /// Whether this occurrence is still this replica's to run. For long work.
    pub fn check(&self) -> Result<(), LostReason> {
        let live = self.handle.runtime.scheduler.incarnation();
        match self.claim {
            Some((claimer, _)) if live != Some(claimer) => Err(LostReason::Expired),
            _ => Ok(()),
        }
    }

    /// Says something in a chat, as [`BotHandle::post`] does. In a durable job it is said once,
    /// however often the occurrence runs: the n-th post of an occurrence is one message.
    pub async fn post(&mut self, chat: &ChatKey, text: impl Into<String>) -> Result<(), PostError> {
        let id = match &self.id {
            Some(id) => format!("job-{id}-{}-{}", self.due_ms, self.posts),
            None => format!("job-{}", crate::outside::uuid()),
        };
        self.posts += 1;
        self.handle.post_as(id, chat, text.into()).await
    }

    /// A way to the bot that outlives this run.
    pub fn handle(&self) -> &BotHandle {
        &self.handle
    }
}

/// The code of a job, as a bound: an async function or closure of `&mut Tick` whose future is
/// `Send`. Implemented for all of them; nobody names it.
pub trait JobHandler<'a>: Send + Sync + 'static {
    /// What it returns.
    type Fut: Future<Output = Result> + Send + 'a;

    /// Runs one occurrence.
    fn run(self, tick: &'a mut Tick) -> Self::Fut;
}

impl<'a, F, Fut> JobHandler<'a> for F
where
    F: FnOnce(&'a mut Tick) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result> + Send + 'a,
{
    type Fut = Fut;

    fn run(self, tick: &'a mut Tick) -> Fut {
        self(tick)
    }
}

/// A handler whose type is forgotten.
pub(crate) trait AnyJobHandler: Send + Sync {
    fn call<'a>(&self, tick: &'a mut Tick) -> Pin<Box<dyn Future<Output = Result> + Send + 'a>>;
}

impl<F> AnyJobHandler for Cloned<F>
where
    F: Clone + for<'a> JobHandler<'a>,
{
    fn call<'a>(&self, tick: &'a mut Tick) -> Pin<Box<dyn Future<Output = Result> + Send + 'a>> {
        Box::pin(self.0.clone().run(tick))
    }
}
