//! Botmesh: the replicas of a chat bot form a Raft group themselves.
//!
//! | module | holds |
//! |---|---|
//! | [`types`] | the names every layer shares: keys, fences, incarnations, messages |
//! | [`clock`] | the boot clock (`CLOCK_BOOTTIME`) and the manual one of tests |
//! | [`codec`] | the envelope and limits of every record and body |
//! | [`machine`] | the pure state machine: who may act for which chat |
//! | [`group`] | how a command reaches a machine and how its effects come back |
//! | [`raft`] | the group of nodes: log, snapshots, transport, membership |
//! | [`coordinator`] | sessions, turns, leads: the trait and its carriers |
//! | [`store`] | rows, checkpoints, locks, journal: the trait and its carriers |
//! | [`provider`] | chat transports |
//! | [`bot`] | the runtime a bot author meets |
//! | [`http`] | the public and the cluster listener |
//! | [`cli`] | the `botmesh` binary |

pub mod bot;
pub mod cli;
pub mod clock;
pub mod codec;
pub mod config;
pub mod coordinator;
pub mod group;
pub mod http;
pub mod machine;
mod outside;
pub mod provider;
pub mod raft;
pub mod store;
pub mod supervise;
#[cfg(feature = "test-util")]
pub mod testing;
pub mod types;
mod watch;
