//! Tests of the machine as a whole.

mod against_model;
mod endings;
mod homes;
mod kit;
mod model;
mod model_writes;
mod processes;
mod rekey;
mod stored;
mod transcript;
mod turns;
mod writes;
