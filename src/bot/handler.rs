//! Handlers and the routes that lead to them.

use std::fmt;
use std::pin::Pin;

use super::ctx::Ctx;
use super::error::Result;

/// Which messages a handler gets. Exact routes win over [`Route::Any`]; among the exact ones, the
/// first that was added. A message inside a conversation goes to the conversation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Exactly this text.
    Text(String),
    /// `/name`, alone or with arguments after a blank; [`Ctx::args`] has them.
    Command(String),
    /// Every message nothing else took.
    Any,
}

impl Route {
    /// The command `/name`.
    pub fn command(name: impl Into<String>) -> Self {
        let name: String = name.into();
        Self::Command(name.trim_start_matches('/').to_owned())
    }

    pub(crate) fn takes(&self, text: &str) -> bool {
        match self {
            Self::Text(wanted) => text == wanted,
            Self::Command(name) => {
                text.strip_prefix('/').and_then(|text| text.split_whitespace().next())
                    == Some(name.as_str())
            }
            Self::Any => false,
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Command(name) => write!(f, "/{name}"),
            Self::Any => write!(f, "any message"),
        }
    }
}

impl From<&str> for Route {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Route {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

/// The code of a handler, as a bound: an async function or closure of `&mut Ctx` whose future is
/// `Send`. Implemented for all of them; nobody names it. See
/// [`Script`](super::Script) for why it stands beside `AsyncFnOnce`.
pub trait Handler<'a>: Send + Sync + 'static {
    /// What it returns.
    type Fut: Future<Output = Result> + Send + 'a;

    /// Handles one message.
    fn run(self, ctx: &'a mut Ctx) -> Self::Fut;
}

impl<'a, F, Fut> Handler<'a> for F
where
    F: FnOnce(&'a mut Ctx) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result> + Send + 'a,
{
    type Fut = Fut;

    fn run(self, ctx: &'a mut Ctx) -> Fut {
        self(ctx)
    }
}

/// A handler whose type is forgotten.
pub(crate) trait AnyHandler: Send + Sync {
    fn call<'a>(&self, ctx: &'a mut Ctx) -> Pin<Box<dyn Future<Output = Result> + Send + 'a>>;
}

/// Clones the closure for each message, so that it may own what it captured.
pub(crate) struct Cloned<F>(pub(crate) F);

impl<F> AnyHandler for Cloned<F>
where
    F: Clone + for<'a> Handler<'a>,
{
    fn call<'a>(&self, ctx: &'a mut Ctx) -> Pin<Box<dyn Future<Output = Result> + Send + 'a>> {
        Box::pin(self.0.clone().run(ctx))
    }
}
