//! What the process-level tests share. Each test binary uses a part of it.
#![allow(dead_code, reason = "each test binary uses its own part of this module")]
#![allow(unreachable_pub, reason = "a module of a test binary has nobody to be reachable for")]

pub mod api;
pub mod cluster;
pub mod demo;
pub mod disks;
pub mod histories;
pub mod ledger;
pub mod linearize;
pub mod links;
pub mod models;
pub mod proxy;
pub mod session;
pub mod simulated;
pub mod talk;
pub mod turnlog;
pub mod workload;
