//! Conversations: flows of questions that survive the replica that asks them.
//!
//! Problem: a dialogue is easiest to write as code that waits for each answer, but the process that
//! waits may die, or the answer may reach another one.
//! Idea: the unit is the *step*, an async function over a typed state. Where the same replica gets
//! the next message, the suspended step goes on in memory, in place. Where another does, the step is
//! run again from the state at its entry: up to its first question silently when it waited there,
//! since that was asked, and the message is the answer.

mod convo;
pub(crate) mod core;
mod flow;
mod steps;

pub use convo::{Ask, Convo};
pub(crate) use flow::{AnyFlow, BeginError, Ended, From, Running};
pub use flow::{Flow, FlowId, Next, Script, State};
pub use steps::Steps;
