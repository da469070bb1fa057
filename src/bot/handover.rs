//! What becomes of a chat's conversation when another replica takes the chat (SPEC C6, C7).
//!
//! Problem: a conversation may be a typed state at a step (which can be stored), or a stack and
//! closures (which cannot), or stored by a version of the bot that is not this one.
//! Idea: what can be stored is, and continues. The rest leaves a note of a few words, the *stub*, so
//! that the replica that takes the chat at least knows; its [`Fallback`] decides what the user gets.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::ctx::Ctx;
use super::error::Result;

/// Which flows are checkpointed besides the persistent ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flows {
    /// None: they live in the memory of the replica that runs them.
    #[default]
    Keep,
    /// All whose state serialises, for as long as [`Handover::ttl`]. Upgrade every replica before
    /// turning it on.
    Forward,
}

/// How conversations change hands. Give it to [`Coordination::handover`](super::Coordination).
///
/// ```
/// use botmesh::bot::{Fallback, Flows, Handover};
/// let handover = Handover {
///     flows: Flows::Forward,     // flows without .persistent() continue too
///     fallback: Fallback::Notify, // the rest: tell the user
///     ..Handover::default()
/// };
/// ```
#[derive(Clone, Debug)]
pub struct Handover {
    /// Which flows are checkpointed besides the persistent ones.
    pub flows: Flows,
    /// What becomes of a conversation that cannot continue.
    pub fallback: Fallback,
    /// How long a forwarded flow's checkpoint lives after its last write; `None` = as long as the
    /// conversation's timeout, else 5 minutes. Never shorter than the wait it was written in.
    pub ttl: Option<Duration>,
    /// What [`Fallback::Notify`] says; `None` = a text in the user's language.
    pub notify_message: Option<String>,
    /// Without durability, the largest answer that is kept inside a checkpoint while its step goes
    /// on, in bytes. A larger one is asked for again.
    pub max_answer_bytes: usize,
}

impl Default for Handover {
    fn default() -> Self {
        Self {
            flows: Flows::Keep,
            fallback: Fallback::Drop,
            ttl: None,
            notify_message: None,
            max_answer_bytes: 16 * 1024,
        }
    }
}

/// Default of [`Handover::ttl`] where the conversation has no timeout either.
pub(crate) const TTL: Duration = Duration::from_secs(5 * 60);

impl Handover {
    /// What [`Fallback::Notify`] says to a user of this language.
    pub(crate) fn notice(&self, lang: Option<&str>) -> String {
        let own = self.notify_message.clone();
        own.unwrap_or_else(|| interrupted_in(lang).to_owned())
    }
}

/// The notice by language; English where it is not known.
fn interrupted_in(lang: Option<&str>) -> &'static str {
    let lang = lang.unwrap_or_default();
    let primary = lang.split(['-', '_']).next().unwrap_or_default().to_ascii_lowercase();
    match primary.as_str() {
        "de" => "Unser Gespräch wurde unterbrochen. Bitte beginne noch einmal.",
        "es" => "Nuestra conversación se ha interrumpido. Por favor, empieza de nuevo.",
        "fr" => "Notre conversation a été interrompue. Merci de recommencer.",
        "it" => "La nostra conversazione è stata interrotta. Per favore, ricomincia.",
        "nl" => "Ons gesprek is onderbroken. Begin alsjeblieft opnieuw.",
        "pl" => "Nasza rozmowa została przerwana. Proszę, zacznij od nowa.",
        "pt" => "A nossa conversa foi interrompida. Por favor, comece de novo.",
        "tr" => "Görüşmemiz kesildi. Lütfen yeniden başlayın.",
        _ => "Our conversation was interrupted. Please start again.",
    }
}

/// Why a conversation cannot continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interruption {
    /// Its flow has changed: the step is gone, the fingerprint or version is another, or the bot
    /// has no such flow.
    Changed,
    /// What is stored does not decode, and nothing migrates it.
    Undecodable,
    /// It was never stored: a conversation of one piece, or a flow that is not forwarded.
    NotForwarded,
    /// Its state does not serialise.
    Unserialisable,
}

/// What became of a conversation whose chat came from another replica, or from an earlier life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HandoverOutcome {
    /// It went on at its question, or with the answer that was kept; nothing was asked again.
    Continued,
    /// Its step ran again from its start.
    Restarted,
    /// It is gone; the message was routed as a new one.
    Dropped(Interruption),
    /// The user was told, and the message is consumed.
    Notified(Interruption),
    /// It began anew with its initial state.
    Reentered(Interruption),
    /// The bot's own function took the message.
    Handled(Interruption),
}

/// What the fallback is told.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Interrupted {
    /// The flow's or conversation's name; `?` where what is stored does not say.
    pub name: String,
    /// Why it cannot continue.
    pub reason: Interruption,
    /// The step it was in, where that is known.
    pub step: Option<String>,
    /// The state at the entry of that step, where it was stored.
    pub state: Option<Value>,
    /// The state the conversation began with, where it was stored.
    pub initial: Option<Value>,
}

/// What becomes of a conversation that cannot continue. The message that wakes it is either
/// consumed or routed as a new one.
#[derive(Clone, Debug, Default)]
pub enum Fallback {
    /// Nothing; the message is routed.
    #[default]
    Drop,
    /// The user is told; the message is consumed.
    Notify,
    /// It is entered again from its beginning, with its initial state: what ran before its first
    /// wait runs again. The message is consumed.
    Restart,
    /// The bot's own; see [`Fallback::function`].
    Function(Migration),
}

impl Fallback {
    /// A function of the bot's own: `true` = it consumed the message, `false` = the message is
    /// routed. What it enters begins, and consumes the message.
    ///
    /// ```
    /// use botmesh::bot::{Ctx, Fallback, Interrupted, Result};
    ///
    /// async fn apologise(lost: Interrupted, ctx: &mut Ctx) -> Result<bool> {
    ///     ctx.reply(format!("Sorry, {} has to start again.", lost.name)).await?;
    ///     Ok(true)
    /// }
    /// let fallback = Fallback::function(apologise);
    /// ```
    pub fn function<F>(function: F) -> Self
    where
        F: Clone + AsyncFnOnce(Interrupted, &mut Ctx) -> Result<bool> + for<'a> FallbackFn<'a>,
    {
        Self::Function(Migration(Arc::new(ClonedFallback(function))))
    }
}

/// The code of a fallback, as a bound; see [`Script`](super::Script). Nobody names it.
pub trait FallbackFn<'a>: Send + Sync + 'static {
    /// What it returns.
    type Fut: Future<Output = Result<bool>> + Send + 'a;

    /// Decides about one conversation.
    fn run(self, lost: Interrupted, ctx: &'a mut Ctx) -> Self::Fut;
}

impl<'a, F, Fut> FallbackFn<'a> for F
where
    F: FnOnce(Interrupted, &'a mut Ctx) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<bool>> + Send + 'a,
{
    type Fut = Fut;

    fn run(self, lost: Interrupted, ctx: &'a mut Ctx) -> Fut {
        self(lost, ctx)
    }
}

/// A bot's own fallback, its type forgotten.
#[derive(Clone)]
pub struct Migration(Arc<dyn AnyFallback>);

impl fmt::Debug for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

impl Migration {
    pub(crate) fn call<'a>(&self, lost: Interrupted, ctx: &'a mut Ctx) -> Deciding<'a> {
        self.0.call(lost, ctx)
    }
}

type Deciding<'a> = Pin<Box<dyn Future<Output = Result<bool>> + Send + 'a>>;

trait AnyFallback: Send + Sync {
    fn call<'a>(&self, lost: Interrupted, ctx: &'a mut Ctx) -> Deciding<'a>;
}

struct ClonedFallback<F>(F);

impl<F: Clone + for<'a> FallbackFn<'a>> AnyFallback for ClonedFallback<F> {
    fn call<'a>(&self, lost: Interrupted, ctx: &'a mut Ctx) -> Deciding<'a> {
        Box::pin(self.0.clone().run(lost, ctx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c7_the_notice_is_in_the_users_language_unless_it_is_the_bots_own() {
        let default = Handover::default();
        assert!(default.notice(None).starts_with("Our conversation"));
        assert!(default.notice(Some("de-AT")).starts_with("Unser Gespräch"));
        assert!(default.notice(Some("pt_BR")).starts_with("A nossa"));
        assert!(default.notice(Some("tlh")).starts_with("Our conversation"));
        let own = Handover { notify_message: Some("Oops.".into()), ..default };
        assert_eq!(own.notice(Some("de")), "Oops.");
    }
}
