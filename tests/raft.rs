//! The group of nodes, in one process: real Raft, real disk, real HTTP on loopback.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod raft {
    mod basics;
    mod behind;
    mod bounds;
    mod cluster;
    mod election;
    mod endings;
    mod faults;
    mod members;
    mod sticky;
    mod versions;
}
