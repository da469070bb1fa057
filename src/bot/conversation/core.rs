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

use std::sync::Arc;
use std::task::{Poll, Waker};

use parking_lot::Mutex;
use serde_json::Value;

use crate::bot::error::ConvoError;
use crate::bot::scope::Scope;

/// Where a conversation stands; what a checkpoint is made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stand {
    /// The step's name.
    pub(crate) step: &'static str,
    /// Counts the entries into steps of this conversation.
    pub(crate) visit: u32,
    /// The state when the step was entered.
    pub(crate) state: Value,
    /// Things said in this visit.
    pub(crate) sends: u32,
    /// The question it waits at: 0 = the step's first. `None` = it does not wait.
    pub(crate) waits_at: Option<u32>,
}

/// How a conversation is begun from a checkpoint that waited at the first question of its step: the
/// step runs from its start up to there, silently, and the message is the answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replay {
    /// Things said in that visit before it waited.
    pub(crate) sends: u32,
}

struct Inner {
    stand: Stand,
    // The next question's number in this step.
    questions: u32,
    scope: Option<Arc<Scope>>,
    answer: Option<String>,
    interrupt: Option<ConvoError>,
    replay: Option<Replay>,
    waker: Option<Waker>,
}

/// See the module.
pub(crate) struct Core {
    /// Stable name of the conversation: made from the message that began it.
    pub(crate) id: String,
    // One lock for all of it: held for a few assignments, never across an await.
    inner: Mutex<Inner>,
}

impl Core {
    /// A conversation whose next step entry is visit `visit` + 1.
    pub(crate) fn new(id: String, visit: u32, replay: Option<Replay>) -> Arc<Self> {
        let stand = Stand { step: "", visit, state: Value::Null, sends: 0, waits_at: None };
        Arc::new(Self {
            id,
            inner: Mutex::new(Inner {
                stand,
                questions: 0,
                scope: None,
                answer: None,
                interrupt: None,
                replay,
                waker: None,
            }),
        })
    }

    /// Where it stands.
    pub(crate) fn stand(&self) -> Stand {
        self.inner.lock().stand.clone()
    }

    /// Whether it waits for an answer.
    pub(crate) fn waits(&self) -> bool {
        self.inner.lock().stand.waits_at.is_some()
    }

    /// Lends it a turn, with the answer it waits for.
    pub(crate) fn lend(&self, scope: Arc<Scope>, answer: Option<String>) {
        let mut inner = self.inner.lock();
        inner.scope = Some(scope);
        if answer.is_some() {
            inner.stand.waits_at = None;
            inner.answer = answer;
        }
        if let Some(waker) = inner.waker.take() {
            waker.wake();
        }
    }

    /// Takes the turn back: from here on it can say nothing.
    pub(crate) fn take_back(&self) {
        self.inner.lock().scope = None;
    }

    /// Ends all it could say, for good. The first interrupt stays.
    pub(crate) fn interrupt(&self, why: ConvoError) {
        let mut inner = self.inner.lock();
        inner.scope = None;
        inner.interrupt.get_or_insert(why);
    }

    /// Why it was interrupted.
    pub(crate) fn interrupted(&self) -> Option<ConvoError> {
        self.inner.lock().interrupt.clone()
    }

    /// A step begins with this state.
    pub(super) fn enter_step(&self, step: &'static str, state: Value) {
        let mut inner = self.inner.lock();
        let visit = inner.stand.visit + 1;
        inner.stand = Stand { step, visit, state, sends: 0, waits_at: None };
        inner.questions = 0;
        if let Some(scope) = &inner.scope {
            scope.step_started();
        }
    }

    /// A question begins; its number in the step.
    pub(super) fn begin_question(&self) -> u32 {
        let mut inner = self.inner.lock();
        let number = inner.questions;
        inner.questions += 1;
        number
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
            None => crate::coordinator::LostReason::Superseded,
        };
        let why = ConvoError::LeaseLost { reason: lost };
        inner.interrupt = Some(why.clone());
        Err(why)
    }

    /// Says something, unless it was said before the checkpoint this step was begun from.
    pub(super) async fn say(&self, text: String) -> Result<(), ConvoError> {
        let scope = self.scope()?;
        let id = {
            let mut inner = self.inner.lock();
            let number = inner.stand.sends;
            inner.stand.sends += 1;
            if inner.replay.is_some() {
                return Ok(());
            }
            let (step, visit) = (inner.stand.step, inner.stand.visit);
            format!("{}/{}/{step}.{visit}/{number}", scope.chat(), self.id)
        };
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

    /// Waits for the answer to this question.
    pub(super) async fn answer(&self, question: u32) -> Result<String, ConvoError> {
        // A wait that is dropped (it lost a `select!`) no longer waits.
        struct Waiting<'a>(&'a Core);
        impl Drop for Waiting<'_> {
            fn drop(&mut self) {
                self.0.inner.lock().stand.waits_at = None;
            }
        }
        let waiting = Waiting(self);
        let answer = std::future::poll_fn(|cx| {
            let mut inner = self.inner.lock();
            if let Some(why) = &inner.interrupt {
                return Poll::Ready(Err(why.clone()));
            }
            if let Some(answer) = inner.answer.take() {
                if let Some(replay) = inner.replay.take() {
                    inner.stand.sends = replay.sends;
                }
                return Poll::Ready(Ok(answer));
            }
            inner.stand.waits_at = Some(question);
            inner.waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        drop(waiting);
        answer
    }
}
