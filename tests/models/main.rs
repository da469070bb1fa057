//! Models of the protocols, checked by exploring every state they can reach.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test panics on what it did not expect")]

mod check;
mod few;
mod lease;
mod turns;
