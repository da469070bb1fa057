//! The API as a program meets it, over a group in memory.
//!
//! `client` is that program, and notes which answers it was given; `contract` holds those against
//! the OpenAPI document; the others go through the fine print of SPEC K6, resource by resource.

mod bad_input;
mod checkpoints;
mod client;
mod contract;
mod keys;
mod leads_and_locks;
mod sessions;
mod turns;
