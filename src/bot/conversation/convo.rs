//! What a step is lent: its state, and a voice.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::ask::Ask;
use super::core::{Core, Idle};
use super::flow::{FlowId, Next, State};
use super::steps::Steps;
use crate::bot::ctx::Entering;
use crate::bot::error::{ConvoError, EnterError, Result};
use crate::types::ChatKey;

/// A conversation, lent to one of its steps.
///
/// Neither owned nor `Clone`: no task that a step spawns can hold it, so cutting the step ends all
/// it could say (SPEC C10). A step is a transaction over [`Convo::state`]: run again, it starts from
/// the state at its entry, and its changes count when it returns `Ok`.
pub struct Convo<S> {
    /// The conversation's state.
    pub state: S,
    core: Arc<Core>,
}

impl<S: fmt::Debug> fmt::Debug for Convo<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Convo").field("id", &self.core.id).field("state", &self.state).finish()
    }
}

impl<S> Convo<S> {
    pub(super) fn new(state: S, core: Arc<Core>) -> Self {
        Self { state, core }
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Says something, in order. With durability it leaves with the commit that ends the turn, or
    /// after 100 ms of a longer step.
    pub async fn say(&mut self, text: impl Into<String>) -> Result<(), ConvoError> {
        let text = text.into();
        self.core.say(text).await
    }

    /// Asks a question; awaiting it yields the next message's text.
    ///
    /// ```no_run
    /// # use botmesh::bot::{Convo, ConvoError};
    /// # async fn step(c: &mut Convo<u32>) -> Result<(), ConvoError> {
    /// let name: String = c.ask("Who is there?").await?;
    /// let count: u32 = c.ask("How many?").parse("A number, please.").attempts(3).await?;
    /// let sure = c.ask("Sure? (yes/no)").choice([("yes", true), ("no", false)]).await?;
    /// let city = c.ask("City?").within(std::time::Duration::from_secs(120)).await?;
    /// if city.is_none() { c.say("Later, then.").await?; }
    /// # Ok(()) }
    /// ```
    pub fn ask(&mut self, text: impl Into<String>) -> Ask<'_, S> {
        Ask::new(self, text.into())
    }

    /// What is done when the user is silent for this long at a question of this step. It begins
    /// anew at each question, ends with the step, and like all timers acts only under the chat's
    /// turn; on another replica it is armed by the code that runs there again.
    pub fn idle(&mut self, after: Duration, idle: Idle) {
        self.core.set_idle(after, idle);
    }

    /// Waits. Longer than `settle` is refused: the step would be cut and run again for ever.
    pub async fn sleep(&mut self, time: Duration) -> Result<(), ConvoError> {
        let scope = self.core.scope()?;
        let settle = scope.settle();
        if time >= settle {
            return Err(ConvoError::SleepTooLong { asked: time, settle });
        }
        scope.sleep(time).await;
        self.check()
    }

    /// The chat.
    pub fn chat(&self) -> Result<ChatKey, ConvoError> {
        Ok(self.core.scope()?.chat().clone())
    }

    /// The user's language as the last message told it, a BCP 47 tag.
    pub fn lang(&self) -> Option<String> {
        self.core.heard().and_then(|message| message.lang.clone())
    }

    /// Whether this conversation may still act; the error says why not. For long work between two
    /// questions.
    pub fn check(&self) -> Result<(), ConvoError> {
        self.core.scope().map(|_| ())
    }

    /// On to the step that follows; past the last one the conversation ends.
    pub fn next<K: Steps>(&self) -> Result<Next<K>> {
        Ok(Next::following())
    }

    /// On to this step.
    pub fn goto<K: Steps>(&self, step: K) -> Result<Next<K>> {
        Ok(Next::goto(step))
    }

    /// The conversation ends.
    pub fn end<K: Steps>(&self) -> Result<Next<K>> {
        Ok(Next::end())
    }

    /// This conversation ends and another begins with this state, under the same turn.
    pub fn switch<K: Steps, T: State>(&mut self, flow: FlowId<T>, state: T) -> Result<Next<K>> {
        if !self.core.scope()?.knows_flow(flow.name()) {
            return Err(EnterError::UnknownFlow { flow: flow.name().to_owned() }.into());
        }
        self.core.switch_to(Entering { flow: flow.name(), state: Box::new(state) });
        Ok(Next::switch())
    }
}
