//! Questions: what becomes of an answer, and of none.
//!
//! An [`Ask`] is a builder that is awaited: the question goes out when the await begins, and each
//! answer runs through what was added, in order, until one is taken or the attempts are used up.

use std::fmt;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::convo::Convo;
use super::core::Core;
use crate::bot::error::ConvoError;

/// What becomes of an answer: a value, or the text to ask again with (`None` = the question).
type Read<T> = Result<T, Option<String>>;
type Reading<T> = Pin<Box<dyn Future<Output = Read<T>> + Send>>;
type Reader<T> = Box<dyn Fn(String) -> Reading<T> + Send + Sync>;

/// An asynchronous check of an answer, as a bound. Implemented for async functions and closures of
/// `&T`; nobody names it. See [`Script`](super::Script) for why it stands beside `AsyncFnOnce`.
pub trait Verify<'a, T: 'a, E>: Send + Sync + 'static {
    /// What it returns.
    type Fut: Future<Output = Result<(), E>> + Send + 'a;

    /// Checks one answer.
    fn run(self, answer: &'a T) -> Self::Fut;
}

impl<'a, T: 'a, E, F, Fut> Verify<'a, T, E> for F
where
    F: FnOnce(&'a T) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'a,
{
    type Fut = Fut;

    fn run(self, answer: &'a T) -> Fut {
        self(answer)
    }
}

/// A question, before it is awaited.
#[must_use = "a question is asked when it is awaited"]
pub struct Ask<'c, S, T = String> {
    convo: &'c mut Convo<S>,
    text: String,
    read: Reader<T>,
    attempts: Option<u32>,
}

impl<S, T> fmt::Debug for Ask<'_, S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask").field("text", &self.text).finish_non_exhaustive()
    }
}

fn again(text: impl Into<String>) -> Option<String> {
    Some(text.into()).filter(|text| !text.is_empty())
}

impl<'c, S> Ask<'c, S, String> {
    pub(super) fn new(convo: &'c mut Convo<S>, text: String) -> Self {
        let read: Reader<String> = Box::new(|text| Box::pin(async move { Ok(text) }));
        Self { convo, text, read, attempts: None }
    }

    /// Takes the answer as a `T`; asks again with this text until it is one.
    pub fn parse<T>(self, otherwise: impl Into<String>) -> Ask<'c, S, T>
    where
        T: FromStr + Send + 'static,
    {
        let otherwise = again(otherwise);
        self.then(move |text| text.trim().parse().map_err(|_| otherwise.clone()))
    }

    /// Takes one of these words, and asks again with the question until it is one.
    pub fn choice<T, W, const N: usize>(self, choices: [(W, T); N]) -> Ask<'c, S, T>
    where
        T: Clone + Send + Sync + 'static,
        W: Into<String>,
    {
        let choices = choices.map(|(word, value)| (word.into(), value));
        self.then(move |text| {
            let text = text.trim();
            choices.iter().find(|(word, _)| word == text).map(|(_, v)| v.clone()).ok_or(None)
        })
    }
}

impl<'c, S, T: Send + 'static> Ask<'c, S, T> {
    /// Adds a stage.
    fn then<U: Send + 'static>(
        self,
        stage: impl Fn(T) -> Read<U> + Send + Sync + 'static,
    ) -> Ask<'c, S, U> {
        let (read, stage) = (self.read, Arc::new(stage));
        let read: Reader<U> = Box::new(move |text| {
            let (value, stage) = (read(text), stage.clone());
            Box::pin(async move { stage(value.await?) })
        });
        Ask { convo: self.convo, text: self.text, read, attempts: self.attempts }
    }

    /// Asks again where `check` finds fault: with its text, or with the question where that is empty.
    pub fn check<F, E>(self, check: F) -> Self
    where
        F: Fn(&T) -> Result<(), E> + Send + Sync + 'static,
        E: Into<String>,
    {
        self.then(move |value| match check(&value) {
            Ok(()) => Ok(value),
            Err(fault) => Err(again(fault)),
        })
    }

    /// Like [`Ask::check`], for a check that itself has to wait: for a database, another service.
    /// While it does, the answer is safe: where the step is cut, its next run is given it again
    /// (SPEC C8).
    ///
    /// ```no_run
    /// # use botmesh::bot::{Convo, ConvoError};
    /// async fn street_exists(street: &String) -> Result<(), String> {
    ///     # let found = !street.is_empty();
    ///     // ... ask the map ...
    ///     if found { Ok(()) } else { Err(format!("There is no {street} here. Which one?")) }
    /// }
    /// # async fn step(c: &mut Convo<u32>) -> Result<(), ConvoError> {
    /// let street = c.ask("Where to?").verify(street_exists).attempts(3).await?;
    /// # Ok(()) }
    /// ```
    pub fn verify<F, E>(self, check: F) -> Self
    where
        T: Sync,
        F: Clone + AsyncFnOnce(&T) -> Result<(), E> + for<'a> Verify<'a, T, E>,
        E: Into<String> + 'static,
    {
        let read = self.read;
        let read: Reader<T> = Box::new(move |text| {
            let (value, check) = (read(text), check.clone());
            Box::pin(async move {
                let value = value.await?;
                let checked = check.run(&value).await;
                checked.map_err(again)?;
                Ok(value)
            })
        });
        Self { read, ..self }
    }

    /// Gives up after so many answers that were none (at least one), with
    /// [`ConvoError::AttemptsExhausted`]. A step that returns it ends the conversation.
    pub fn attempts(self, attempts: u32) -> Self {
        Self { attempts: Some(attempts.max(1)), ..self }
    }

    /// Goes on with `None` where no answer comes within this time of being asked. Each time it is
    /// asked again the time begins anew; on another replica too, when that takes the chat.
    pub fn within(self, time: Duration) -> Within<'c, S, T> {
        Within { ask: self, time }
    }
}

/// A question that waits only so long.
#[must_use = "a question is asked when it is awaited"]
pub struct Within<'c, S, T = String> {
    ask: Ask<'c, S, T>,
    time: Duration,
}

impl<S, T> fmt::Debug for Within<'_, S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Within").field("ask", &self.ask).field("time", &self.time).finish()
    }
}

/// Asks until an answer is taken, the attempts are used up, or the time is.
async fn asked<T: Send + 'static>(
    core: Arc<Core>,
    text: String,
    read: Reader<T>,
    attempts: Option<u32>,
    within: Option<Duration>,
) -> Result<Option<T>, ConvoError> {
    let mut question = core.begin_question();
    let mut words = text.clone();
    loop {
        core.say(words).await?;
        let Some(message) = core.answer(question, within).await? else { return Ok(None) };
        match read(message.text.clone()).await {
            Ok(value) => return Ok(Some(value)),
            Err(again) => words = again.unwrap_or_else(|| text.clone()),
        }
        question.tries += 1;
        if let Some(attempts) = attempts.filter(|attempts| question.tries >= *attempts) {
            core.exhausted();
            return Err(ConvoError::AttemptsExhausted { attempts });
        }
    }
}

type Answer<'c, T> = Pin<Box<dyn Future<Output = Result<T, ConvoError>> + Send + 'c>>;

impl<'c, S: Send, T: Send + 'static> IntoFuture for Ask<'c, S, T> {
    type Output = Result<T, ConvoError>;
    type IntoFuture = Answer<'c, T>;

    fn into_future(self) -> Self::IntoFuture {
        // Only the shared record crosses the await, so `T` and the state need not be `Sync`.
        let core = self.convo.core().clone();
        let Self { text, read, attempts, .. } = self;
        Box::pin(async move {
            match asked(core, text, read, attempts, None).await? {
                Some(value) => Ok(value),
                // Without a time of its own, a wait that ends interrupts.
                None => Err(ConvoError::TimedOut),
            }
        })
    }
}

impl<'c, S: Send, T: Send + 'static> IntoFuture for Within<'c, S, T> {
    type Output = Result<Option<T>, ConvoError>;
    type IntoFuture = Answer<'c, Option<T>>;

    fn into_future(self) -> Self::IntoFuture {
        let core = self.ask.convo.core().clone();
        let Ask { text, read, attempts, .. } = self.ask;
        Box::pin(asked(core, text, read, attempts, Some(self.time)))
    }
}
