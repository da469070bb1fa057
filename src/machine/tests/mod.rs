//! Tests of the machine as a whole.

mod kit;
mod turns;
