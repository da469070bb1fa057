//! Everything that speaks HTTP to the outside: the *cluster* listener (Raft, administration,
//! coordination API, metrics) and the *public* one (webhooks, web chat).
//!
//! | module | holds |
//! |---|---|
//! | [`coordination`] | the coordination API for programs in any language (SPEC K6) |
//! | [`cluster`] | the cluster listener's routes behind the secret, and the three open ones (K5, K7) |
//! | [`public`] | webhooks of the providers, `bot.router()` (L9) |
//! | [`webchat`] | the chat page and its stream of replies |
//! | [`listen`] | a listener with bounds and an orderly stop |
//! | [`metrics`] | Prometheus' text format |
//! | [`gate`] | shedding at the door (M3) |

pub mod cluster;
pub mod coordination;
pub mod gate;
pub mod listen;
pub mod metrics;
pub mod public;
pub mod webchat;

mod body;
mod error;

#[cfg(test)]
mod tests;

pub use error::ApiError;
