//! The pure state machine: everything that decides who may act.
//!
//! `(state, log index, batch) → (reply, effects)`: no clock, no I/O, no randomness, so that every
//! node that applies the same log is in the same state, and the in-memory group of the test kit
//! runs this very code.
//!
//! One primitive carries turns, leads and fenced locks: a *session*, and first-in-first-out
//! *queues* of *tickets* that belong to sessions. The head of a queue holds it, under a fence that
//! grows with every grant anywhere (DESIGN 1). The rules of DESIGN 3 and 4 are kept here.
//!
//! | file | holds |
//! |---|---|
//! | `command`, `reply` | what can be asked, what is answered, what follows |
//! | `state` | the machine, its bounds, the shapes in which it is read |
//! | `apply` | one batch: lanes, machine time, one command after the other |
//! | `sessions`, `processes`, `queues`, `locks` | who lives, who waits, who holds |
//! | `homes` | channels that belong to whoever leads them |
//! | `rows`, `commit`, `journal`, `outbox`, `tasks`, `keyed` | what is written, and under whose authority |
//! | `rekey` | a chat's key that changes |
//! | `views` | the reading side |
//! | `table`, `tables`, `index` | how the state is kept |
//! | `stored`, `digest` | how it is written down |
//! | `level` | which programs understand what |
//! | `invariants` | what must hold after every apply |

mod command;
mod reply;

pub use command::{
    Admit, Authority, Batch, ClientId, Command, Expect, IdempotencyKey, Op, Outgoing, QueueKey,
    QueueKind, RowKey, SessionKind, Table,
};
pub use reply::{Admission, BatchReply, Effect, EndReason, Grant, Holder, Limit, Refusal, Reply};

mod apply;
mod arrivals;
mod commit;
mod digest;
mod endings;
mod homes;
mod index;
mod invariants;
mod journal;
mod keyed;
mod level;
mod locks;
mod outbox;
mod processes;
mod queues;
mod rekey;
mod rows;
mod sessions;
mod state;
mod stored;
mod table;
mod tables;
mod tasks;
mod views;

pub use level::{LEVEL, LEVEL_LOWEST};
pub use state::{
    DeadLetter, JournalRecord, Limits, LoadError, Machine, OutboxEntry, Row, SessionView, TaskView,
    TicketState,
};
pub use stored::{Change, Cut, Frozen, hash_of};

#[cfg(test)]
mod tests;
