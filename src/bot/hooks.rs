//! Hooks: what a bot does with every message before anything else sees it.

use std::pin::Pin;

use super::ctx::Ctx;
use super::error::Result;

/// What becomes of a message after a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// It goes on, to the next hook, the conversation or the handler.
    On,
    /// It ends here. A conversation that waits goes on waiting.
    Stop,
}

/// The code of a hook, as a bound: an async function or closure of `&mut Ctx`. See
/// [`Script`](super::Script). Nobody names it.
pub trait Hook<'a>: Send + Sync + 'static {
    /// What it returns.
    type Fut: Future<Output = Result<Pass>> + Send + 'a;

    /// Looks at one message.
    fn run(self, ctx: &'a mut Ctx) -> Self::Fut;
}

impl<'a, F, Fut> Hook<'a> for F
where
    F: FnOnce(&'a mut Ctx) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Pass>> + Send + 'a,
{
    type Fut = Fut;

    fn run(self, ctx: &'a mut Ctx) -> Fut {
        self(ctx)
    }
}

pub(crate) type Passing<'a> = Pin<Box<dyn Future<Output = Result<Pass>> + Send + 'a>>;

/// A hook whose type is forgotten.
pub(crate) trait AnyHook: Send + Sync {
    fn call<'a>(&self, ctx: &'a mut Ctx) -> Passing<'a>;
}

/// Clones the closure for each message, so that it may own what it captured.
pub(crate) struct ClonedHook<F>(pub(crate) F);

impl<F: Clone + for<'a> Hook<'a>> AnyHook for ClonedHook<F> {
    fn call<'a>(&self, ctx: &'a mut Ctx) -> Passing<'a> {
        Box::pin(self.0.clone().run(ctx))
    }
}
