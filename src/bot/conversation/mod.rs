//! Conversations: flows of questions that survive the replica that asks them.
//!
//! Problem: a dialogue is easiest to write as code that waits for each answer, but the process that
//! waits may die, or the answer may reach another one.
//! Idea: the unit is the *step*, an async function over a typed state. Where the same replica gets
//! the next message, the suspended step goes on in memory, in place. Where another does, the step is
//! run again from the state at its entry: up to its first question silently when it waited there,
//! since that was asked, and the message is the answer.

mod ask;
mod code;
mod convo;
pub(crate) mod core;
mod flow;
mod shape;
mod steps;

pub use ask::{Ask, Verify, Within};
pub(crate) use code::{BeginError, Ended, From, Running};
pub use convo::Convo;
pub use core::Idle;
pub(crate) use flow::AnyFlow;
pub use flow::{Dialogue, Flow, FlowId, Next, Script, State};
pub use steps::Steps;
