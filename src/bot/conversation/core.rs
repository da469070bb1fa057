//! What a running conversation and the runtime share.
//!
//! Problem: a step is ordinary async code, suspended in the middle of `c.ask(..).await` for minutes;
//! the runtime has to know that it waits there (and does not merely compute), hand it the answer
//! under another turn, and be certain that a step which was cut says nothing any more.
//! Idea: one small locked record. The step writes where it stands; the runtime lends it a turn
//! ([`Core::lend`]) and takes it back ([`Core::take_back`]).
//! Invariants:
//! 1. Without a lent turn a conversation can neither say nor take anything.
//! 2. An interrupt is sticky: every later call fails with the first one.
//! 3. `sends` counts what was said in this visit of the step, in order, so that a step run again
//!    makes the same ids (SPEC G3).
//! 4. A wait's end acts only through [`Core::due`], asked under a turn: a timer only wakes (SPEC B6).

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;

use crate::bot::ctx::Entering;
use crate::bot::error::ConvoError;
use crate::bot::scope::Scope;
use crate::clock::BootInstant;
use crate::coordinator::LostReason;
use crate::types::Message;

/// Where a conversation stands; what a checkpoint is made of.
#[derive(Clone, Debug)]
pub(crate) struct Stand {
    /// The step's name.
    pub(crate) step: &'static str,
    /// Counts the entries into steps of this conversation.
    pub(crate) visit: u32,
    /// The state when the step was entered, or why it does not serialise.
    pub(crate) state: Result<Value, String>,
    /// Things said in this visit.
    pub(crate) sends: u32,
    /// Questions begun in this visit.
    pub(crate) questions: u32,
    /// What became of the first of them.
    pub(crate) first: First,
    /// Where it waits.
    pub(crate) waits: Option<Wait>,
}

impl Stand {
    fn entered(step: &'static str, visit: u32, state: Result<Value, String>) -> Self {
        Self { step, visit, state, sends: 0, questions: 0, first: First::Open, waits: None }
    }

    /// What is worth a checkpoint of its own in the middle of a turn; `None` while it waits, and
    /// past the answer to a later question, which no checkpoint holds (SPEC C9).
    pub(crate) fn midway(&self) -> Option<Midway> {
        match (&self.first, self.questions) {
            _ if self.waits.is_some() => None,
            (First::Open, 0) => Some(Midway::Entered),
            (First::Answered { .. }, 1) => Some(Midway::Answered),
            _ => None,
        }
    }
}

/// See [`Stand::midway`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Midway {
    /// The step was entered and has no answer yet.
    Entered,
    /// Its first question was answered.
    Answered,
}

/// The first question of a step.
#[derive(Clone, Debug)]
pub(crate) enum First {
    /// Not answered yet.
    Open,
    /// Answered by this message, when so much had been said.
    Answered { message: Arc<Message>, sends: u32, tries: u32 },
    /// Its wait ended without one.
    TimedOut,
}

/// One wait for an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    /// The question, from 0 in its step.
    pub(crate) question: u32,
    /// Answers it refused before.
    pub(crate) tries: u32,
    /// Tells this wait from those before it.
    pub(crate) number: u64,
    /// When it ends without an answer.
    until: Option<BootInstant>,
    /// Whether the question itself asked for that end, and goes on with `None`.
    own_end: bool,
    /// When its watchdog speaks.
    idle_at: Option<BootInstant>,
}

impl Wait {
    /// When something is due; to be asked again then.
    fn due_at(&self) -> Option<BootInstant> {
        self.until.into_iter().chain(self.idle_at).min()
    }
}

/// What a wait gets.
#[derive(Clone, Debug)]
pub(crate) enum Given {
    /// A message.
    Message(Arc<Message>),
    /// Its time is over.
    Nothing,
}

/// What a timer finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing any more, or not yet.
    Nothing,
    /// The user has been silent: say this, and wait on.
    Idle(String),
    /// The user has been silent: say this and end.
    IdleEnd(String),
    /// The question goes on without an answer.
    NoAnswer,
    /// The conversation ends.
    Over,
}

/// What is done when a user is silent for a while. Data, not a callback: that could not borrow the
/// conversation. See [`Convo::idle`](super::Convo::idle).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Idle {
    text: String,
    ends: bool,
}

impl Idle {
    /// Says this, once in each wait, and goes on waiting.
    pub fn say(text: impl Into<String>) -> Self {
        Self { text: text.into(), ends: false }
    }

    /// Says this and ends the conversation.
    pub fn end(text: impl Into<String>) -> Self {
        Self { text: text.into(), ends: true }
    }
}

/// How a conversation is begun from a checkpoint that waited at the first question of its step: the
/// step runs from its start up to there, silently, and the message is the answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replay {
    /// Things said in that visit before it waited.
    pub(crate) sends: u32,
    /// Answers the question refused before.
    pub(crate) tries: u32,
}

/// A question that was begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    number: u32,
    /// Answers it refused.
    pub(super) tries: u32,
}

struct Inner {
    stand: Stand,
    scope: Option<Arc<Scope>>,
    answers: VecDeque<Given>,
    interrupt: Option<ConvoError>,
    replay: Option<Replay>,
    waker: Option<Waker>,
    // Of the step; forgotten where the next one begins.
    idle: Option<(Duration, Idle)>,
    waited: u64,
    // The last message it was given.
    heard: Option<Arc<Message>>,
    switch: Option<Entering>,
    // A question gave up and nothing was done about it since.
    exhausted: bool,
}

/// See the module.
pub(crate) struct Core {
    /// Stable name of the conversation: made from the message that began it.
    pub(crate) id: String,
    /// How long a question waits that says nothing else.
    timeout: Option<Duration>,
    // One lock for all of it: held for a few assignments, never across an await.
    inner: Mutex<Inner>,
}

impl Core {
    /// A conversation whose next step entry is visit `visit` + 1.
    pub(crate) fn new(
        id: String,
        visit: u32,
        replay: Option<Replay>,
        timeout: Option<Duration>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id,
            timeout,
            inner: Mutex::new(Inner {
                stand: Stand::entered("", visit, Ok(Value::Null)),
                scope: None,
                answers: VecDeque::new(),
                interrupt: None,
                replay,
                waker: None,
                idle: None,
                waited: 0,
                heard: None,
                switch: None,
                exhausted: false,
            }),
        })
    }

    /// Where it stands.
    pub(crate) fn stand(&self) -> Stand {
        self.inner.lock().stand.clone()
    }

    /// The step it is in, and which visit.
    pub(crate) fn step(&self) -> (&'static str, u32) {
        let inner = self.inner.lock();
        (inner.stand.step, inner.stand.visit)
    }

    /// See [`Stand::midway`]; with the visit.
    pub(crate) fn midway(&self) -> Option<(u32, Midway)> {
        let inner = self.inner.lock();
        // Until it has got back to where its checkpoint says, that says more.
        if inner.replay.is_some() {
            return None;
        }
        inner.stand.midway().map(|midway| (inner.stand.visit, midway))
    }

    /// Whether it waits for an answer.
    pub(crate) fn waits(&self) -> bool {
        self.inner.lock().stand.waits.is_some()
    }

    /// When a wait is due for something, and its number.
    pub(crate) fn due_at(&self) -> Option<(BootInstant, u64)> {
        let inner = self.inner.lock();
        let wait = inner.stand.waits.as_ref()?;
        Some((wait.due_at()?, wait.number))
    }

    /// Until when the wait may last by its own word.
    pub(crate) fn waits_until(&self) -> Option<BootInstant> {
        self.inner.lock().stand.waits.as_ref()?.until
    }

    /// What is due in this wait; what was said of idleness is not due again.
    pub(crate) fn due(&self, number: u64, now: BootInstant) -> Due {
        let mut inner = self.inner.lock();
        let idle = inner.idle.clone();
        let Some(wait) = inner.stand.waits.as_mut().filter(|wait| wait.number == number) else {
            return Due::Nothing;
        };
        if wait.until.is_some_and(|until| until <= now) {
            return if wait.own_end { Due::NoAnswer } else { Due::Over };
        }
        if wait.idle_at.is_some_and(|at| at <= now) {
            wait.idle_at = None;
            return match idle {
                Some((_, Idle { text, ends: true })) => Due::IdleEnd(text),
                Some((_, Idle { text, ends: false })) => Due::Idle(text),
                None => Due::Nothing,
            };
        }
        Due::Nothing
    }

    /// The last message it was given.
    pub(crate) fn heard(&self) -> Option<Arc<Message>> {
        self.inner.lock().heard.clone()
    }

    /// Lends it a turn, with what it is to be given.
    pub(crate) fn lend(&self, scope: Arc<Scope>, given: Vec<Given>) {
        let mut inner = self.inner.lock();
        inner.heard.get_or_insert_with(|| Arc::new(scope.message().clone()));
        inner.scope = Some(scope);
        if !given.is_empty() {
            inner.stand.waits = None;
            inner.answers.extend(given);
        }
        if let Some(waker) = inner.waker.take() {
            waker.wake();
        }
    }

    /// Takes the turn back: from here on it can say nothing. Answers what it did not take.
    pub(crate) fn take_back(&self) -> Vec<Given> {
        let mut inner = self.inner.lock();
        inner.scope = None;
        inner.answers.drain(..).collect()
    }

    /// Ends all it could say, for good. The first interrupt stays.
    pub(crate) fn interrupt(&self, why: ConvoError) {
        let mut inner = self.inner.lock();
        inner.scope = None;
        inner.stand.waits = None;
        inner.interrupt.get_or_insert(why);
    }

    /// Why it was interrupted.
    pub(crate) fn interrupted(&self) -> Option<ConvoError> {
        self.inner.lock().interrupt.clone()
    }

    /// Whether it ended because a question gave up and its step did nothing about that.
    pub(crate) fn gave_up(&self) -> bool {
        self.inner.lock().exhausted
    }

    /// The conversation to go on with.
    pub(crate) fn take_switch(&self) -> Option<Entering> {
        self.inner.lock().switch.take()
    }

    pub(super) fn switch_to(&self, entering: Entering) {
        let mut inner = self.inner.lock();
        inner.leave_replay();
        inner.switch = Some(entering);
    }

    /// A step begins with this state; `false` where this turn has begun too many.
    pub(super) fn enter_step(&self, step: &'static str, state: Result<Value, String>) -> bool {
        let mut inner = self.inner.lock();
        if !inner.stand.step.is_empty() {
            inner.leave_replay();
        }
        let visit = inner.stand.visit + 1;
        inner.stand = Stand::entered(step, visit, state);
        inner.idle = None;
        match &inner.scope {
            Some(scope) => scope.step_started(),
            None => true,
        }
    }

    /// A question begins.
    pub(super) fn begin_question(&self) -> Question {
        let mut inner = self.inner.lock();
        inner.exhausted = false;
        let number = inner.stand.questions;
        inner.stand.questions += 1;
        let tries = inner.replay.filter(|_| number == 0).map_or(0, |replay| replay.tries);
        Question { number, tries }
    }

    /// A question gave up.
    pub(super) fn exhausted(&self) {
        self.inner.lock().exhausted = true;
    }

    pub(super) fn set_idle(&self, after: Duration, idle: Idle) {
        self.inner.lock().idle = Some((after, idle));
    }

    /// The turn, unless it is lost or the conversation was interrupted.
    pub(super) fn scope(&self) -> Result<Arc<Scope>, ConvoError> {
        let mut inner = self.inner.lock();
        if let Some(why) = &inner.interrupt {
            return Err(why.clone());
        }
        let lost = match &inner.scope {
            Some(scope) => match scope.check() {
                Ok(()) => return Ok(scope.clone()),
                Err(reason) => reason,
            },
            None => LostReason::Superseded,
        };
        // It is lent a turn, for a message of its chat, before any of its code runs.
        let chat = inner.heard.as_ref().map(|heard| heard.chat.to_string()).unwrap_or_default();
        let why = ConvoError::LeaseLost { chat, reason: lost };
        inner.interrupt = Some(why.clone());
        Err(why)
    }

    /// Takes the next number of what is said in this step.
    fn next_send(&self, scope: &Scope) -> Option<String> {
        let mut inner = self.inner.lock();
        inner.exhausted = false;
        let number = inner.stand.sends;
        inner.stand.sends += 1;
        // It was said before the checkpoint this step was begun from.
        if inner.replay.is_some() {
            return None;
        }
        let (step, visit) = (inner.stand.step, inner.stand.visit);
        Some(format!("{}/{}/{step}.{visit}/{number}", scope.chat(), self.id))
    }

    /// Says something, unless it was said before.
    pub(super) async fn say(&self, text: String) -> Result<(), ConvoError> {
        let scope = self.scope()?;
        self.say_in(&scope, text).await
    }

    /// The same for the runtime, under a turn that the conversation is not lent.
    pub(crate) async fn say_in(&self, scope: &Arc<Scope>, text: String) -> Result<(), ConvoError> {
        let Some(id) = self.next_send(scope) else { return Ok(()) };
        match scope.send(id, text).await {
            Ok(()) => Ok(()),
            Err(error) => {
                let why = ConvoError::from(error);
                if matches!(why, ConvoError::LeaseLost { .. }) {
                    self.interrupt(why.clone());
                }
                Err(why)
            }
        }
    }

    /// Waits for the answer to this question; `None` where its own time ended first.
    pub(super) async fn answer(
        &self,
        question: Question,
        within: Option<Duration>,
    ) -> Result<Option<Arc<Message>>, ConvoError> {
        // A wait that is dropped (it lost a `select!`) no longer waits.
        struct Waiting<'a>(&'a Core);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.inner.lock().stand.waits = None;
            }
        }
        let now = self.scope()?.now();
        let waiting = Waiting(self);
        let answer = std::future::poll_fn(|cx| {
            let mut inner = self.inner.lock();
            if let Some(why) = &inner.interrupt {
                return Poll::Ready(Err(why.clone()));
            }
            if let Some(given) = inner.answers.pop_front() {
                return Poll::Ready(Ok(inner.take(question, given)));
            }
            inner.wait(question, within, self.timeout, now);
            inner.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        drop(waiting);
        answer
    }
}

impl Inner {
    /// The step goes elsewhere without the question that its checkpoint waited at: its code is
    /// another now, or its way. From here on nothing was said before, and the answer to that
    /// question answers no other one.
    fn leave_replay(&mut self) {
        if self.replay.take().is_some() {
            self.answers.pop_front();
        }
    }

    /// Takes what a question was given.
    fn take(&mut self, question: Question, given: Given) -> Option<Arc<Message>> {
        if let Some(replay) = self.replay.take() {
            self.stand.sends = replay.sends;
        }
        let (taken, first) = match given {
            Given::Message(message) => {
                self.heard = Some(message.clone());
                let (sends, tries) = (self.stand.sends, question.tries);
                (Some(message.clone()), First::Answered { message, sends, tries })
            }
            Given::Nothing => (None, First::TimedOut),
        };
        if question.number == 0 {
            self.stand.first = first;
        }
        taken
    }

    /// Waits, from this instant on where it did not wait before.
    fn wait(
        &mut self,
        question: Question,
        within: Option<Duration>,
        timeout: Option<Duration>,
        now: BootInstant,
    ) {
        if self.stand.waits.is_some() {
            return;
        }
        self.waited += 1;
        self.stand.waits = Some(Wait {
            question: question.number,
            tries: question.tries,
            number: self.waited,
            until: within.or(timeout).map(|after| now + after),
            own_end: within.is_some(),
            idle_at: self.idle.as_ref().map(|(after, _)| now + *after),
        });
    }
}
