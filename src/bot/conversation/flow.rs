//! A flow: steps over a state, as its author writes it and as the runtime drives it.

use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::code::{AnyCode, BeginError, From, Migrate, Running, Scripted, Talk, Typed};
use super::convo::Convo;
use super::core::Core;
use super::shape;
use super::steps::Steps;
use crate::bot::drive::panic_text;
use crate::bot::error::Result;

/// What a flow may keep between its questions: serialised at each step's entry, and given to the
/// replica that continues.
pub trait State: Serialize + DeserializeOwned + Send + Sync + 'static {}
impl<S: Serialize + DeserializeOwned + Send + Sync + 'static> State for S {}

/// Names a flow or a conversation, and the type of its state. A `const`, so that any function can
/// enter it with the right state or not compile.
pub struct FlowId<S> {
    name: &'static str,
    state: PhantomData<fn(S)>,
}

impl<S> FlowId<S> {
    /// The flow of that name.
    pub const fn new(name: &'static str) -> Self {
        Self { name, state: PhantomData }
    }

    /// The name.
    pub const fn name(&self) -> &'static str {
        self.name
    }
}

impl<S> Clone for FlowId<S> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<S> Copy for FlowId<S> {}

impl<S> fmt::Debug for FlowId<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FlowId").field(&self.name).finish()
    }
}

/// Where a step goes next; made by [`Convo::next`], [`Convo::goto`],
/// [`Convo::switch`] and [`Convo::end`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next<K>(pub(super) Way<K>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way<K> {
    Following,
    Goto(K),
    /// Another conversation; which one, the [`Core`] keeps.
    Switch,
    End,
}

impl<K> Next<K> {
    pub(super) fn following() -> Self {
        Self(Way::Following)
    }
    pub(super) fn goto(step: K) -> Self {
        Self(Way::Goto(step))
    }
    pub(super) fn switch() -> Self {
        Self(Way::Switch)
    }
    pub(super) fn end() -> Self {
        Self(Way::End)
    }
}

/// The code of a flow, as a bound: an async function or closure of a step and a [`Convo`], whose
/// future is `Send`. Implemented for all of them; nobody names it.
///
/// `AsyncFnOnce` beside it drives the compiler's inference; this carries `Send`, which stable Rust
/// cannot yet say of an async closure's future. The closure is cloned for each run, so it may own
/// what it captured.
pub trait Script<'a, S: 'a, K>: Send + Sync + 'static {
    /// What it returns.
    type Fut: Future<Output = Result<Next<K>>> + Send + 'a;

    /// Runs one step.
    fn run(self, at: K, c: &'a mut Convo<S>) -> Self::Fut;
}

impl<'a, S: 'a, K, F, Fut> Script<'a, S, K> for F
where
    F: FnOnce(K, &'a mut Convo<S>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Next<K>>> + Send + 'a,
{
    type Fut = Fut;

    fn run(self, at: K, c: &'a mut Convo<S>) -> Fut {
        self(at, c)
    }
}

/// The code of a conversation without steps, as a bound. See [`Script`].
pub trait Dialogue<'a, S: 'a>: Send + Sync + 'static {
    /// What it returns.
    type Fut: Future<Output = Result> + Send + 'a;

    /// Runs it.
    fn run(self, c: &'a mut Convo<S>) -> Self::Fut;
}

impl<'a, S: 'a, F, Fut> Dialogue<'a, S> for F
where
    F: FnOnce(&'a mut Convo<S>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result> + Send + 'a,
{
    type Fut = Fut;

    fn run(self, c: &'a mut Convo<S>) -> Fut {
        self(c)
    }
}

/// A flow, before it is given to [`BotBuilder::flow`](crate::bot::BotBuilder::flow).
///
/// The unit of hand-over is the step: one that runs again on another replica starts from the state
/// at its entry. What it *said* is not said again (with durability); what it *did* outside is done
/// again, so do it last in its step, or make it harmless to repeat.
pub struct Flow<S> {
    code: Typed<S>,
    plan: Plan,
    state: PhantomData<fn(S)>,
}

impl<S> fmt::Debug for Flow<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow").field("plan", &self.plan).finish_non_exhaustive()
    }
}

/// What is said about a flow besides its code.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) persistent: bool,
    /// One function without steps: it can be left a note about, not continued.
    pub(crate) stackful: bool,
    /// The word that cancels, and what is said then.
    pub(crate) cancel: Option<(String, String)>,
    /// How long a question waits that says nothing else; the bot's own where `None`.
    pub(crate) timeout: Option<Duration>,
    /// What is said when that time is over.
    pub(crate) timeout_text: Option<String>,
    pub(crate) version: u32,
}

impl Plan {
    fn new(name: &'static str, stackful: bool) -> Self {
        Self {
            name,
            persistent: false,
            stackful,
            cancel: None,
            timeout: None,
            timeout_text: None,
            version: 1,
        }
    }
}

impl<S: State> Flow<S> {
    /// The flow of that id, run by an async function or closure.
    ///
    /// ```
    /// use botmesh::bot::{Convo, Flow, FlowId, Next, Result};
    /// use botmesh::steps;
    ///
    /// steps! { enum At { Name, Greet } }
    /// const HELLO: FlowId<String> = FlowId::new("hello");
    ///
    /// async fn hello(at: At, c: &mut Convo<String>) -> Result<Next<At>> {
    ///     match at {
    ///         At::Name => { c.state = c.ask("Your name?").await?; c.next() }
    ///         At::Greet => { c.say(format!("Hello, {}!", c.state)).await?; c.end() }
    ///     }
    /// }
    /// let flow = Flow::new(HELLO, hello).persistent();
    /// ```
    pub fn new<K, F>(id: FlowId<S>, script: F) -> Self
    where
        K: Steps,
        F: Clone + AsyncFnOnce(K, &mut Convo<S>) -> Result<Next<K>> + for<'a> Script<'a, S, K>,
    {
        let code = Typed::new(Scripted { script, kinds: PhantomData::<fn(S, K)> });
        Self { code, plan: Plan::new(id.name, false), state: PhantomData }
    }

    /// A conversation that is one function from beginning to end, without steps: what
    /// [`BotBuilder::conversation`](crate::bot::BotBuilder::conversation) makes, with options.
    ///
    /// It lives in the memory of one replica, since its stack cannot be stored. Where another
    /// replica takes the chat, the [`Handover`](crate::bot::Handover)'s fallback decides.
    pub fn of_one_piece<F>(id: FlowId<S>, dialogue: F) -> Self
    where
        F: Clone + AsyncFnOnce(&mut Convo<S>) -> Result + for<'a> Dialogue<'a, S>,
    {
        let code = Typed::new(Talk { dialogue, kinds: PhantomData::<fn(S)> });
        Self { code, plan: Plan::new(id.name, true), state: PhantomData }
    }

    /// Its checkpoint is kept until it ends: any replica continues it, after any restart. Says
    /// nothing to a conversation of one piece.
    #[must_use]
    pub fn persistent(mut self) -> Self {
        self.plan.persistent = !self.plan.stackful;
        self
    }

    /// A message of exactly this text ends it, at any question, with this reply.
    #[must_use]
    pub fn cancel_on(mut self, word: impl Into<String>, reply: impl Into<String>) -> Self {
        self.plan.cancel = Some((word.into(), reply.into()));
        self
    }

    /// How long its questions wait that do not say it themselves ([`within`](super::Ask::within));
    /// then it ends. Without it, the bot's
    /// [`conversation_timeout`](crate::bot::BotBuilder::conversation_timeout) holds.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.plan.timeout = Some(timeout);
        self
    }

    /// What is said when it ends for want of an answer; nothing by default.
    #[must_use]
    pub fn say_on_timeout(mut self, text: impl Into<String>) -> Self {
        self.plan.timeout_text = Some(text.into());
        self
    }

    /// Raise it where the meaning of a step or of the state changed though their names did not:
    /// stored conversations of another version go through [`Flow::migrate`], or to the fallback.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.plan.version = version;
        self
    }

    /// Makes a state of one that an earlier version stored and that does not decode any more, or
    /// was stored under another [`Flow::version`]. `None` = it cannot; the fallback decides.
    ///
    /// ```
    /// # use botmesh::bot::{Convo, Flow, FlowId, Next, Result};
    /// # use serde::{Deserialize, Serialize};
    /// # botmesh::steps! { enum At { Name } }
    /// #[derive(Serialize, Deserialize)]
    /// struct Visit { guests: u32 }
    /// const VISIT: FlowId<Visit> = FlowId::new("visit");
    /// # async fn visit(_: At, c: &mut Convo<Visit>) -> Result<Next<At>> { c.end() }
    /// // Guests were a text once.
    /// let flow = Flow::new(VISIT, visit).persistent().migrate(|old| {
    ///     Some(Visit { guests: old.get("guests")?.as_str()?.parse().ok()? })
    /// });
    /// ```
    #[must_use]
    pub fn migrate(mut self, migrate: impl Fn(Value) -> Option<S> + Send + Sync + 'static) -> Self {
        let migrate: Migrate<S> = Arc::new(migrate);
        self.code.migrate = Some(migrate);
        self
    }

    pub(crate) fn into_any(self) -> AnyFlow {
        let steps = self.code.steps();
        let parts = [self.plan.version.to_string(), steps.join(","), shape::of::<S>()];
        let fingerprint = shape::hash(&parts.join("\n")).into();
        AnyFlow { code: Arc::new(self.code), plan: self.plan, fingerprint }
    }
}

/// A flow whose state's type is forgotten.
#[derive(Clone)]
pub(crate) struct AnyFlow {
    code: Arc<dyn AnyCode>,
    pub(crate) plan: Plan,
    /// Version, step names in order and the state's shape, hashed: texts do not count (SPEC C6).
    pub(crate) fingerprint: Arc<str>,
}

impl AnyFlow {
    pub(crate) fn steps(&self) -> Vec<&'static str> {
        self.code.steps()
    }

    /// Runs the author's code that reads and writes the state: a panic in it is caught here like
    /// one of a step, which nothing outlives that it left half done.
    pub(crate) fn begin(&self, core: Arc<Core>, from: From) -> Result<Running, BeginError> {
        catch_unwind(AssertUnwindSafe(|| self.code.begin(core, from))).unwrap_or_else(|panic| {
            let why = format!("its code panicked: {}", panic_text(&*panic));
            Err(BeginError::Undecodable(why))
        })
    }

    /// The state a handler entered it with, as it is stored.
    pub(crate) fn encode(&self, state: &(dyn std::any::Any + Send + Sync)) -> Option<Value> {
        catch_unwind(AssertUnwindSafe(|| self.code.encode(state))).ok().flatten()
    }
}
