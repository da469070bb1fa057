//! A flow: steps over a state, as its author writes it and as the runtime drives it.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::convo::Convo;
use super::core::Core;
use super::steps::Steps;
use crate::bot::error::{BoxError, Result};

/// What a flow may keep between its questions: serialised at each step's entry, and given to the
/// replica that continues.
pub trait State: Serialize + DeserializeOwned + Send + Sync + 'static {}
impl<S: Serialize + DeserializeOwned + Send + Sync + 'static> State for S {}

/// Names a flow and the type of its state. A `const`, so that any function can enter the flow with
/// the right state or not compile.
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

/// Where a step goes next; made by [`Convo::next`], [`Convo::goto`] and [`Convo::end`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next<K>(Way<K>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way<K> {
    Following,
    Goto(K),
    End,
}

impl<K> Next<K> {
    pub(super) fn following() -> Self {
        Self(Way::Following)
    }
    pub(super) fn goto(step: K) -> Self {
        Self(Way::Goto(step))
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

/// A flow, before it is given to [`super::super::BotBuilder::flow`].
pub struct Flow<S> {
    code: Arc<dyn Code>,
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
    /// The word that cancels, and what is said then.
    pub(crate) cancel: Option<(String, String)>,
    pub(crate) version: u32,
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
        Self {
            code: Arc::new(Scripted { script, kinds: PhantomData::<fn(S, K)> }),
            plan: Plan { name: id.name, persistent: false, cancel: None, version: 1 },
            state: PhantomData,
        }
    }

    /// Its checkpoint is kept until it ends: any replica continues it, after any restart.
    #[must_use]
    pub fn persistent(mut self) -> Self {
        self.plan.persistent = true;
        self
    }

    /// A message of exactly this text ends it, at any question, with this reply.
    #[must_use]
    pub fn cancel_on(mut self, word: impl Into<String>, reply: impl Into<String>) -> Self {
        self.plan.cancel = Some((word.into(), reply.into()));
        self
    }

    /// Raise it where the meaning of a step or of the state changed though their names did not.
    #[must_use]
    pub fn version(mut self, version: u32) -> Self {
        self.plan.version = version;
        self
    }

    pub(crate) fn into_any(self) -> AnyFlow {
        AnyFlow { code: self.code, plan: self.plan }
    }
}

/// A flow whose state's type is forgotten.
#[derive(Clone)]
pub(crate) struct AnyFlow {
    code: Arc<dyn Code>,
    pub(crate) plan: Plan,
}

impl AnyFlow {
    pub(crate) fn steps(&self) -> Vec<&'static str> {
        self.code.steps()
    }

    pub(crate) fn begin(&self, core: Arc<Core>, from: From) -> Result<Running, BeginError> {
        self.code.begin(core, from)
    }

    /// The flow's shape, for a checkpoint to be compared with: version and step names in order.
    pub(crate) fn fingerprint(&self) -> String {
        format!("{}:{}", self.plan.version, self.steps().join(","))
    }
}

/// A conversation under way. Dropping it cuts it.
pub(crate) type Running = Pin<Box<dyn Future<Output = Ended> + Send>>;

/// How a conversation's code ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// It came to its end.
    End,
    /// A step returned an error.
    Failed(BoxError),
    /// The state does not serialise.
    Unserialisable(String),
}

/// Where a conversation begins.
pub(crate) enum From {
    /// At the first step, with this state (an `S`).
    Entry(Box<dyn Any + Send>),
    /// At a step of a checkpoint, with its state.
    Checkpoint {
        /// The step's name.
        step: String,
        /// The state.
        state: Value,
    },
}

/// Why it does not begin.
#[derive(Debug)]
pub(crate) enum BeginError {
    /// The flow has no such step any more.
    UnknownStep,
    /// The state does not decode.
    Undecodable(String),
    /// The state is not of the registered flow's type.
    OtherState,
}

trait Code: Send + Sync {
    fn steps(&self) -> Vec<&'static str>;
    fn begin(&self, core: Arc<Core>, from: From) -> Result<Running, BeginError>;
}

struct Scripted<S, K, F> {
    script: F,
    kinds: PhantomData<fn(S, K)>,
}

impl<S, K, F> Code for Scripted<S, K, F>
where
    S: State,
    K: Steps,
    F: Clone + for<'a> Script<'a, S, K>,
{
    fn steps(&self) -> Vec<&'static str> {
        K::all().iter().map(|step| step.name()).collect()
    }

    fn begin(&self, core: Arc<Core>, from: From) -> Result<Running, BeginError> {
        let (at, state) = match from {
            From::Entry(state) => {
                let state = state.downcast::<S>().map_err(|_| BeginError::OtherState)?;
                // `BotBuilder::build` refuses a flow without steps.
                (*K::all().first().ok_or(BeginError::UnknownStep)?, *state)
            }
            From::Checkpoint { step, state } => {
                let at = K::named(&step).ok_or(BeginError::UnknownStep)?;
                let state = serde_json::from_value(state)
                    .map_err(|error| BeginError::Undecodable(error.to_string()))?;
                (at, state)
            }
        };
        Ok(Box::pin(converse(self.script.clone(), core, at, state)))
    }
}

async fn converse<S, K, F>(script: F, core: Arc<Core>, mut at: K, state: S) -> Ended
where
    S: State,
    K: Steps,
    F: Clone + for<'a> Script<'a, S, K>,
{
    let mut convo = Convo::new(state, core.clone());
    loop {
        match serde_json::to_value(&convo.state) {
            Ok(state) => core.enter_step(at.name(), state),
            Err(error) => return Ended::Unserialisable(error.to_string()),
        }
        match script.clone().run(at, &mut convo).await {
            Ok(Next(Way::End)) => return Ended::End,
            Ok(Next(Way::Goto(step))) => at = step,
            Ok(Next(Way::Following)) => match at.following() {
                Some(step) => at = step,
                None => return Ended::End,
            },
            Err(error) => return Ended::Failed(error),
        }
    }
}
