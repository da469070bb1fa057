//! The pure state machine: everything that decides who may act.
//!
//! `(state, log index, batch) → (reply, effects)`: no clock, no I/O, no randomness, so that every
//! node that applies the same log is in the same state, and the in-memory group of the test kit
//! runs this very code.

mod command;
mod reply;

pub use command::{
    Admit, Authority, Batch, ClientId, Command, Expect, IdempotencyKey, Op, Outgoing, QueueKey,
    QueueKind, RowKey, SessionKind, Table,
};
pub use reply::{Admission, BatchReply, Effect, EndReason, Grant, Holder, Limit, Refusal, Reply};

mod state;

pub use state::{
    Cut, DeadLetter, Frozen, JournalRecord, Limits, LoadError, Machine, OutboxEntry, Row,
    SessionView, TaskView, TicketState,
};
