//! What a handler is lent: the message, and a voice.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::conversation::{FlowId, State};
use super::error::{EnterError, ReplyError};
use super::runtime::Runtime;
use super::scope::Scope;
use super::user::UserState;
use crate::types::{ChatKey, Fence, Message};

/// One message under its chat's turn, lent to a hook or handler. Neither owned nor `Clone`; what outlives
/// the turn uses a [`BotHandle`](super::BotHandle).
pub struct Ctx {
    scope: Arc<Scope>,
    // As the hooks leave it.
    message: Arc<Message>,
    changed: bool,
    runtime: Arc<Runtime>,
    sends: u32,
    entering: Option<Entering>,
}

/// A conversation a handler asked for; it begins when the handler returned `Ok`.
pub(crate) struct Entering {
    pub(crate) flow: &'static str,
    pub(crate) state: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ctx").field("message", &self.message.id).finish_non_exhaustive()
    }
}

impl Ctx {
    pub(crate) fn new(scope: Arc<Scope>, runtime: Arc<Runtime>) -> Self {
        let message = Arc::new(scope.message().clone());
        Self { scope, message, changed: false, runtime, sends: 0, entering: None }
    }

    /// The message as the hooks left it.
    pub(crate) fn heard(&self) -> Arc<Message> {
        self.message.clone()
    }

    /// What hooks made of it in an earlier attempt.
    pub(crate) fn set_heard(&mut self, message: Message) {
        self.message = Arc::new(message);
        self.changed = true;
    }

    /// Whether a hook changed it.
    pub(crate) fn is_changed(&self) -> bool {
        self.changed
    }

    fn change(&mut self) -> &mut Message {
        self.changed = true;
        Arc::make_mut(&mut self.message)
    }

    pub(crate) fn take_entering(&mut self) -> Option<Entering> {
        self.entering.take()
    }

    /// The message's text.
    pub fn text(&self) -> &str {
        &self.message.text
    }

    /// The user's language as the message tells it, a BCP 47 tag.
    pub fn lang(&self) -> Option<&str> {
        self.message.lang.as_deref()
    }

    /// From a hook: what everything after it takes for the text, the transcript of a voice message,
    /// say.
    pub fn set_text(&mut self, text: impl Into<String>) {
        self.change().text = text.into();
    }

    /// From a hook: what everything after it takes for the user's language.
    pub fn set_lang(&mut self, lang: impl Into<String>) {
        self.change().lang = Some(lang.into());
    }

    /// From a hook: what everything after it takes for the message's kind.
    pub fn set_kind(&mut self, kind: impl Into<String>) {
        self.change().kind = kind.into();
    }

    /// What follows the command's name, blanks trimmed.
    pub fn args(&self) -> &str {
        self.text().split_once(char::is_whitespace).map_or("", |(_, args)| args.trim())
    }

    /// The message.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// The chat.
    pub fn chat(&self) -> &ChatKey {
        self.scope.chat()
    }

    /// The fence of this turn: hand it to resources that can refuse older ones.
    pub fn fence(&self) -> Fence {
        self.scope.fence()
    }

    /// Whether this turn may still act. For long work; every call that acts asks by itself.
    pub fn check(&self) -> Result<(), ReplyError> {
        self.scope.check().map_err(|reason| self.scope.lost_reply(reason))
    }

    /// Replies in this chat, in order. With durability it leaves with the commit that ends the
    /// turn, or after 100 ms of a longer handler.
    pub async fn reply(&mut self, text: impl Into<String>) -> Result<(), ReplyError> {
        let text = text.into();
        let id = format!("{}/{}/{}", self.scope.chat(), self.scope.origin(), self.sends);
        self.sends += 1;
        self.scope.send(id, text).await
    }

    /// Enters a flow with this state; its first step runs, under the same turn, once the handler
    /// has returned `Ok`.
    pub async fn enter<S: State>(&mut self, flow: FlowId<S>, state: S) -> Result<(), EnterError> {
        if !self.runtime.flows.contains_key(flow.name()) {
            return Err(EnterError::UnknownFlow { flow: flow.name().to_owned() });
        }
        if let Some(entering) = &self.entering {
            return Err(EnterError::AlreadyEntered { entered: entering.flow.to_owned() });
        }
        self.entering = Some(Entering { flow: flow.name(), state: Box::new(state) });
        Ok(())
    }

    /// This user's state: the participant's in a group, else the chat's. Kept by the store, shared
    /// by all replicas, one per user and type name is the bot's own business: use one type.
    pub fn user<T: State + Default>(&mut self) -> UserState<'_, T> {
        UserState::new(&self.scope, self.runtime.store.as_ref())
    }
}
