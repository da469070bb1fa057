//! What goes wrong in a bot, typed by what its author can do about it.

use std::sync::Arc;
use std::time::Duration;

use crate::coordinator::{CoordinationError, LostReason};
use crate::provider::SendError;
use crate::store::{CommitError, StoreError};

/// Any error: what handlers and steps may fail with.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What handlers and steps return; `?` takes any error.
pub type Result<T = (), E = BoxError> = std::result::Result<T, E>;

/// An error that events hand to several listeners.
pub type SharedError = Arc<dyn std::error::Error + Send + Sync>;

/// Why a reply was not taken.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ReplyError {
    /// The turn is lost: another replica may answer this chat now.
    #[error("the turn of {chat} is lost ({reason:?}); stop working on this message")]
    LeaseLost {
        /// The chat.
        chat: String,
        /// Why.
        reason: LostReason,
    },
    /// No provider of this bot serves the channel.
    #[error("no provider named {channel:?}; add it with Bot::builder().provider(..)")]
    NoProvider {
        /// The channel.
        channel: String,
    },
    /// The text is longer than one row may be.
    #[error("the reply has {bytes} bytes, at most {max} fit; split it or send a link")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The bound.
        max: usize,
    },
    /// The provider did not send it (only without durability; with it the outbox sends later).
    #[error(transparent)]
    Provider(#[from] SendError),
    /// The store did not take it (only without durability, for listed replies).
    #[error(transparent)]
    Store(#[from] CommitError),
}

impl ReplyError {
    /// Whether the same call may succeed later under the same turn.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Provider(SendError::RateLimited { .. } | SendError::Transport { .. }) => true,
            Self::Store(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// Why a conversation's call failed. Once it was interrupted, every later call fails alike: the
/// runtime records why it stopped and never asks the step's own error.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ConvoError {
    /// The chat's turn is lost; another replica continues from the checkpoint.
    #[error("the turn of {chat} is lost ({reason:?}); return, its new holder continues")]
    LeaseLost {
        /// The chat.
        chat: String,
        /// Why.
        reason: LostReason,
    },
    /// The user cancelled.
    #[error("the conversation was cancelled")]
    Cancelled,
    /// No answer came in time, or the user was silent for too long.
    #[error("no answer came in time; the conversation is over")]
    TimedOut,
    /// So many answers were none. A step that returns this ends the conversation.
    #[error("none of {attempts} answers would do; say something else, or return to end it")]
    AttemptsExhausted {
        /// How many.
        attempts: u32,
    },
    /// A sleep that `settle` would cut, again and again.
    #[error(
        "a sleep of {asked:?} is not shorter than settle ({settle:?}), which would cut the step and \
             run it again for ever; raise settle, or ask a question within that time"
    )]
    SleepTooLong {
        /// How long it was to be.
        asked: Duration,
        /// The bound.
        settle: Duration,
    },
    /// Something was said that could not be sent.
    #[error(transparent)]
    Send(ReplyError),
}

impl ConvoError {
    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Send(error) if error.is_retryable())
    }
}

impl From<ReplyError> for ConvoError {
    fn from(error: ReplyError) -> Self {
        match error {
            ReplyError::LeaseLost { chat, reason } => Self::LeaseLost { chat, reason },
            error => Self::Send(error),
        }
    }
}

/// Why a conversation was not entered.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum EnterError {
    /// No such flow was registered.
    #[error("this bot has no flow {flow:?}; add it with Bot::builder().flow(..)")]
    UnknownFlow {
        /// Its name.
        flow: String,
    },
    /// The handler entered a flow already; a chat has one conversation at a time.
    #[error("this handler has entered the flow {entered:?} already; a chat is in one at a time")]
    AlreadyEntered {
        /// The first one's name.
        entered: String,
    },
    /// The flow was registered with another state type under the same name.
    #[error("the flow {flow:?} was registered with another state type; give each its own name")]
    OtherState {
        /// Its name.
        flow: String,
    },
    /// The state does not serialise.
    #[error("the state of flow {flow:?} does not serialise: {why}")]
    State {
        /// Its name.
        flow: String,
        /// Why.
        why: String,
    },
    /// The group did not take it (from a [`super::BotHandle`]).
    #[error(transparent)]
    Store(#[from] CommitError),
}

/// Why a user's state was not read or written.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum UserError {
    /// Reading failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Writing failed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The state does not serialise.
    #[error("the state of user {user} does not serialise: {why}")]
    Unserialisable {
        /// Whose.
        user: String,
        /// Why.
        why: String,
    },
    /// Others kept writing in between.
    #[error("user {user}: {tries} writes in a row were overtaken; try again")]
    Contended {
        /// Whose.
        user: String,
        /// How often it was tried.
        tries: u32,
    },
}

/// What follows a failure while a message is handled.
const AGAIN: &str = "with durability the message is tried again, then becomes a dead letter";

/// What the `Error` event reports: nothing here stops the bot.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// A turn, a session or a commit of the group did not come.
    #[error(transparent)]
    Coordination(#[from] CoordinationError),
    /// A handler returned an error; with durability its message is tried again.
    #[error("handler {route} failed for {chat} (attempt {attempt}): {source}; {AGAIN}")]
    Handler {
        /// The chat.
        chat: String,
        /// The handler's route.
        route: String,
        /// Which attempt, from 1.
        attempt: u32,
        /// What it returned.
        source: SharedError,
    },
    /// A step returned an error; with durability its message is tried again.
    #[error("step {step} of flow {flow} failed for {chat} (attempt {attempt}): {source}; {AGAIN}")]
    Step {
        /// The chat.
        chat: String,
        /// The flow.
        flow: String,
        /// The step.
        step: String,
        /// Which attempt, from 1.
        attempt: u32,
        /// What it returned.
        source: SharedError,
    },
    /// A handler or a step panicked.
    #[error("{place} panicked for {chat} (attempt {attempt}): {what}; {AGAIN}")]
    Panicked {
        /// The chat.
        chat: String,
        /// `handler …` or `step … of flow …`.
        place: String,
        /// Which attempt, from 1.
        attempt: u32,
        /// The panic's message.
        what: String,
    },
    /// A journaled message does not decode.
    #[error("message {id} of {chat} does not decode: {why}; it becomes a dead letter, look there")]
    Message {
        /// The chat.
        chat: String,
        /// The message's id.
        id: String,
        /// Why.
        why: String,
    },
    /// The chat's data could not be read; the message is tried again.
    #[error("{chat}: {source}; {AGAIN}")]
    Store {
        /// The chat.
        chat: String,
        /// Why.
        source: StoreError,
    },
    /// What a turn did could not be written; the message is tried again.
    #[error("{chat}: what its turn did is not written: {source}; {AGAIN}")]
    Commit {
        /// The chat.
        chat: String,
        /// Why.
        source: CommitError,
    },
    /// A stored conversation could not continue; the bot's fallback decides.
    #[error(
        "{chat}: the conversation {flow} cannot continue: {why}; the fallback decides what follows"
    )]
    Checkpoint {
        /// The chat.
        chat: String,
        /// The flow.
        flow: String,
        /// Why.
        why: String,
    },
    /// A step or handler did not end at `settle` and blocks its thread. Its turn was taken from
    /// it, and all it still tries is refused.
    #[error(
        "{chat}: what runs here did not stop after {settle:?}; it blocks its thread, so its turn \
             was taken from it. Move blocking work to tokio::task::spawn_blocking"
    )]
    Blocked {
        /// The chat.
        chat: String,
        /// `settle`.
        settle: Duration,
    },
    /// A flow could not be entered.
    #[error("{chat}: {source}; {AGAIN}")]
    Enter {
        /// The chat.
        chat: String,
        /// Why.
        source: EnterError,
    },
    /// A reply could not be sent and will not be tried again.
    #[error("reply {id} to {chat} was not sent: {source}; it is not tried again, the next one is")]
    Send {
        /// The chat.
        chat: String,
        /// The reply's id.
        id: String,
        /// Why.
        source: ReplyError,
    },
    /// A run of a job failed or panicked; a durable job's occurrence is run again by another replica.
    #[error("job {job} failed (attempt {attempt}): {source}; it runs again, or at its next time")]
    Job {
        /// The job.
        job: String,
        /// Which attempt, from 1.
        attempt: u32,
        /// What it returned.
        source: SharedError,
    },
    /// A part of what came in was not acceptable and was left out; the rest was handled.
    #[error("provider {provider}: {at} was left out: {why}; what came with it was handled")]
    Item {
        /// The provider's id.
        provider: String,
        /// Where it stood.
        at: String,
        /// Why.
        why: String,
    },
    /// A provider ended.
    #[error("provider {provider} ended: {why}; it is started again in a few seconds")]
    Provider {
        /// Its id.
        provider: String,
        /// Why.
        why: String,
    },
}

/// What is wrong with how a bot was put together: every fault at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildError {
    /// Each fault, in the order of the builder's calls.
    pub faults: Vec<Fault>,
}

impl std::fmt::Display for BuildError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the bot cannot be built:")?;
        for fault in &self.faults {
            write!(f, "\n- {fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for BuildError {}

/// One fault of a bot's construction.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// No provider.
    #[error("it has no provider; add one with .provider(..)")]
    NoProvider,
    /// Two providers of one id.
    #[error("two providers are named {id:?}; give each its own name")]
    ProviderTwice {
        /// The id.
        id: String,
    },
    /// A provider's id is not usable as a channel.
    #[error("provider {id:?}: {why}")]
    ProviderName {
        /// The id.
        id: String,
        /// What is wrong.
        why: String,
    },
    /// Two flows of one name.
    #[error("two flows are named {flow:?}; give each its own name")]
    FlowTwice {
        /// The name.
        flow: String,
    },
    /// A flow has no steps, or two of one name.
    #[error("flow {flow:?}: {why}")]
    FlowSteps {
        /// The name.
        flow: String,
        /// What is wrong.
        why: String,
    },
    /// Two handlers for exactly the same route.
    #[error("two handlers for {route}; the second would never run")]
    RouteTwice {
        /// The route.
        route: String,
    },
    /// An option is out of its range.
    #[error("{option} is {given}; {allowed}")]
    Option {
        /// Its name.
        option: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// Durability was asked for where it cannot be had.
    #[error(
        "durability is on, but {lacking} cannot journal; use a store of a group, \
             or Durability::Off"
    )]
    NotDurable {
        /// `the store` or `the coordinator`.
        lacking: &'static str,
    },
    /// The coordinator's store has to be given too.
    #[error("coordination is on, but there is no store; give .store(..) the one they share")]
    NoStore,
    /// Coordinator and store have different prefixes.
    #[error("the coordinator's prefix is {coordinator:?}, the store's {store:?}; use one")]
    PrefixesDiffer {
        /// The coordinator's.
        coordinator: String,
        /// The store's.
        store: String,
    },
    /// A job's id cannot be one.
    #[error("job id {id:?}: {why}")]
    JobId {
        /// The id.
        id: String,
        /// What is wrong.
        why: String,
    },
    /// Two jobs of one id.
    #[error("two jobs have the id {id:?}; give each its own")]
    JobTwice {
        /// The id.
        id: String,
    },
    /// A job's period or cron expression says nothing.
    #[error("job {job}: {why}")]
    JobWhen {
        /// The job.
        job: String,
        /// What is wrong.
        why: String,
    },
    /// A job's zone does not exist.
    #[error("job {job}: there is no zone {zone:?}; use an IANA name such as Europe/Berlin")]
    JobZone {
        /// The job.
        job: String,
        /// The zone.
        zone: String,
    },
    /// A job has no occurrence.
    #[error("job {job} never comes: no instant fits the expression")]
    JobNever {
        /// The job.
        job: String,
    },
    /// A job is to be durable, and the store keeps no tasks.
    #[error("job {job} has an id, and this store keeps no tasks; use a store of a group")]
    JobNotDurable {
        /// The job.
        job: String,
    },
    /// The scheduler's coordinator is of another prefix.
    #[error("the scheduler's prefix is {scheduler:?}, the store's {store:?}; use one")]
    SchedulerPrefix {
        /// The scheduler's.
        scheduler: String,
        /// The store's.
        store: String,
    },
    /// A provider lists its replies in a store that keeps none.
    #[error("provider {id:?} lists its replies in the store, and this store keeps none")]
    NotListed {
        /// The provider.
        id: String,
    },
}

/// Why a bot did not start or stop cleanly.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum BotError {
    /// It was started before.
    #[error("the bot was started before; build another one")]
    Started,
    /// The coordinator failed.
    #[error(transparent)]
    Coordination(#[from] CoordinationError),
}
