//! The code of a conversation, its types forgotten step by step, and how it is begun and run.

use std::any::Any;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use serde_json::Value;

use super::convo::Convo;
use super::core::Core;
use super::flow::{Dialogue, Next, Script, State, Way};
use super::steps::Steps;
use crate::bot::error::BoxError;

/// A conversation under way. Dropping it cuts it.
pub(crate) type Running = Pin<Box<dyn Future<Output = Ended> + Send>>;

/// How a conversation's code ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// It came to its end.
    End,
    /// It goes on as another one; the core has which.
    Switch,
    /// A step returned an error.
    Failed(BoxError),
    /// One turn went through so many steps that it will never wait.
    Endless,
}

/// Where a conversation begins.
pub(crate) enum From {
    /// At the first step, with this state (an `S`).
    Entry(Box<dyn Any + Send + Sync>),
    /// At the first step, with this stored state.
    Start {
        /// The state.
        state: Value,
        /// Whether it was stored by this version.
        same: bool,
    },
    /// At a step of a checkpoint, with its state.
    Checkpoint {
        /// The step's name.
        step: String,
        /// The state.
        state: Value,
        /// Whether it was stored by this version.
        same: bool,
    },
}

/// Why it does not begin.
#[derive(Debug)]
pub(crate) enum BeginError {
    /// The flow has no such step any more.
    UnknownStep,
    /// It was stored under another version, and nothing migrates it.
    OtherVersion,
    /// The state does not decode.
    Undecodable(String),
    /// The state is not of the registered flow's type.
    OtherState,
}

/// See [`super::Flow::migrate`].
pub(super) type Migrate<S> = Arc<dyn Fn(Value) -> Option<S> + Send + Sync>;

/// Code whose state's type is forgotten.
pub(super) trait AnyCode: Send + Sync {
    fn steps(&self) -> Vec<&'static str>;
    fn begin(&self, core: Arc<Core>, from: From) -> Result<Running, BeginError>;
    fn encode(&self, state: &(dyn Any + Send + Sync)) -> Option<Value>;
}

/// Code over a state.
pub(super) trait Code<S>: Send + Sync {
    fn steps(&self) -> Vec<&'static str>;
    /// Enters the step of that name, or the first.
    fn begin(&self, core: Arc<Core>, at: Option<&str>, state: S) -> Result<Running, BeginError>;
}

/// Code and what reads its stored state.
pub(super) struct Typed<S> {
    code: Box<dyn Code<S>>,
    pub(super) migrate: Option<Migrate<S>>,
}

impl<S: State> Typed<S> {
    pub(super) fn new(code: impl Code<S> + 'static) -> Self {
        Self { code: Box::new(code), migrate: None }
    }

    fn decode(&self, state: Value, same: bool) -> Result<S, BeginError> {
        if !same {
            let migrate = self.migrate.as_ref().ok_or(BeginError::OtherVersion)?;
            return migrate(state).ok_or_else(Self::not_migrated);
        }
        let Some(migrate) = &self.migrate else {
            return serde_json::from_value(state)
                .map_err(|error| BeginError::Undecodable(error.to_string()));
        };
        match serde_json::from_value(state.clone()) {
            Ok(state) => Ok(state),
            Err(_) => migrate(state).ok_or_else(Self::not_migrated),
        }
    }

    fn not_migrated() -> BeginError {
        BeginError::Undecodable("its migration made nothing of it".to_owned())
    }
}

impl<S: State> AnyCode for Typed<S> {
    fn steps(&self) -> Vec<&'static str> {
        self.code.steps()
    }

    fn begin(&self, core: Arc<Core>, from: From) -> Result<Running, BeginError> {
        match from {
            From::Entry(state) => {
                let state = state.downcast::<S>().map_err(|_| BeginError::OtherState)?;
                self.code.begin(core, None, *state)
            }
            From::Start { state, same } => self.code.begin(core, None, self.decode(state, same)?),
            From::Checkpoint { step, state, same } => {
                // Asked first, so that a step that is gone is called that.
                if !self.code.steps().contains(&step.as_str()) {
                    return Err(BeginError::UnknownStep);
                }
                self.code.begin(core, Some(&step), self.decode(state, same)?)
            }
        }
    }

    fn encode(&self, state: &(dyn Any + Send + Sync)) -> Option<Value> {
        serde_json::to_value(state.downcast_ref::<S>()?).ok()
    }
}

pub(super) struct Scripted<S, K, F> {
    pub(super) script: F,
    pub(super) kinds: PhantomData<fn(S, K)>,
}

fn encoded<S: State>(state: &S) -> Result<Value, String> {
    serde_json::to_value(state).map_err(|error| error.to_string())
}

impl<S, K, F> Code<S> for Scripted<S, K, F>
where
    S: State,
    K: Steps,
    F: Clone + for<'a> Script<'a, S, K>,
{
    fn steps(&self) -> Vec<&'static str> {
        K::all().iter().map(|step| step.name()).collect()
    }

    fn begin(&self, core: Arc<Core>, at: Option<&str>, state: S) -> Result<Running, BeginError> {
        // `BotBuilder::build` refuses a flow without steps.
        let at = at.map_or_else(|| K::all().first().copied(), K::named);
        let at = at.ok_or(BeginError::UnknownStep)?;
        // Here and not at the first poll: a checkpoint of the entry can be written before that.
        core.enter_step(at.name(), encoded(&state));
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
        at = match script.clone().run(at, &mut convo).await {
            Ok(Next(Way::End)) => return Ended::End,
            Ok(Next(Way::Switch)) => return Ended::Switch,
            Ok(Next(Way::Goto(step))) => step,
            Ok(Next(Way::Following)) => match at.following() {
                Some(step) => step,
                None => return Ended::End,
            },
            Err(error) => return Ended::Failed(error),
        };
        if !core.enter_step(at.name(), encoded(&convo.state)) {
            return Ended::Endless;
        }
    }
}

/// The one step of a conversation of one piece, as events and reply ids name it.
const ONE_PIECE: &str = "conversation";

pub(super) struct Talk<S, F> {
    pub(super) dialogue: F,
    pub(super) kinds: PhantomData<fn(S)>,
}

impl<S, F> Code<S> for Talk<S, F>
where
    S: State,
    F: Clone + for<'a> Dialogue<'a, S>,
{
    fn steps(&self) -> Vec<&'static str> {
        vec![ONE_PIECE]
    }

    fn begin(&self, core: Arc<Core>, _at: Option<&str>, state: S) -> Result<Running, BeginError> {
        core.enter_step(ONE_PIECE, encoded(&state));
        let dialogue = self.dialogue.clone();
        Ok(Box::pin(async move {
            let mut convo = Convo::new(state, core);
            match dialogue.run(&mut convo).await {
                Ok(()) => Ended::End,
                Err(error) => Ended::Failed(error),
            }
        }))
    }
}
