//! `botmesh bench`: measurements people can repeat (SPEC L6, N7).
//!
//! `benches/failover.rs` calls the same code. Figures of one machine say little about another, and a
//! debug build says little about a release: the report names the machine and the command.

mod group;
mod phases;
mod plot;
mod report;
mod sink;

pub(crate) mod failover;

pub(crate) use group::Mode;
