//! What a step is lent: its state, and a voice.

use std::fmt;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;

use super::core::Core;
use super::flow::Next;
use super::steps::Steps;
use crate::bot::error::{ConvoError, Result};
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
    /// let count: u32 = c.ask("How many?").parse("A number, please.").await?;
    /// let sure = c.ask("Sure? (yes/no)").choice([("yes", true), ("no", false)]).await?;
    /// # Ok(()) }
    /// ```
    pub fn ask(&mut self, text: impl Into<String>) -> Ask<'_, S> {
        Ask { convo: self, text: text.into(), read: Box::new(|text| Ok(text.to_owned())) }
    }

    /// The chat.
    pub fn chat(&self) -> Result<ChatKey, ConvoError> {
        Ok(self.core.scope()?.chat().clone())
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
}

/// What becomes of an answer: a value, or the text to ask again with (`None` = the question).
type Read<T> = Box<dyn Fn(&str) -> std::result::Result<T, Option<String>> + Send + Sync>;

/// A question, before it is awaited.
#[must_use = "a question is asked when it is awaited"]
pub struct Ask<'c, S, T = String> {
    convo: &'c mut Convo<S>,
    text: String,
    read: Read<T>,
}

impl<S, T> fmt::Debug for Ask<'_, S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask").field("text", &self.text).finish_non_exhaustive()
    }
}

impl<'c, S, T: 'static> Ask<'c, S, T> {
    /// Asks again where `check` finds fault: with its text, or with the question where that is empty.
    pub fn check<F, E>(self, check: F) -> Self
    where
        F: Fn(&T) -> std::result::Result<(), E> + Send + Sync + 'static,
        E: Into<String>,
    {
        let read = self.read;
        let read: Read<T> = Box::new(move |text| {
            let value = read(text)?;
            match check(&value) {
                Ok(()) => Ok(value),
                Err(again) => Err(Some(again.into()).filter(|again| !again.is_empty())),
            }
        });
        Self { read, ..self }
    }
}

impl<'c, S> Ask<'c, S, String> {
    /// Takes the answer as a `T`; asks again with this text until it is one.
    pub fn parse<T: FromStr + 'static>(self, again: impl Into<String>) -> Ask<'c, S, T> {
        let again = again.into();
        let read: Read<T> =
            Box::new(move |text| text.trim().parse().map_err(|_| Some(again.clone())));
        Ask { convo: self.convo, text: self.text, read }
    }

    /// Takes one of these words, and asks again with the question until it is one.
    pub fn choice<T, W, const N: usize>(self, choices: [(W, T); N]) -> Ask<'c, S, T>
    where
        T: Clone + Send + Sync + 'static,
        W: Into<String>,
    {
        let choices = choices.map(|(word, value)| (word.into(), value));
        let read: Read<T> = Box::new(move |text| {
            let text = text.trim();
            choices.iter().find(|(word, _)| word == text).map(|(_, v)| v.clone()).ok_or(None)
        });
        Ask { convo: self.convo, text: self.text, read }
    }
}

impl<'c, S: Send, T: Send + 'static> IntoFuture for Ask<'c, S, T> {
    type Output = std::result::Result<T, ConvoError>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'c>>;

    fn into_future(self) -> Self::IntoFuture {
        // Only the shared record crosses the await, so `T` and the state need not be `Sync`.
        let core = self.convo.core.clone();
        let (text, read) = (self.text, self.read);
        Box::pin(async move {
            let question = core.begin_question();
            let mut asked = text.clone();
            loop {
                core.say(asked).await?;
                let answer = core.answer(question).await?;
                match read(&answer) {
                    Ok(value) => return Ok(value),
                    Err(again) => asked = again.unwrap_or_else(|| text.clone()),
                }
            }
        })
    }
}
