//! The group of nodes, in one process: real Raft, real disk, real HTTP on loopback.

mod raft {
    mod basics;
    mod cluster;
    mod faults;
    mod members;
}
