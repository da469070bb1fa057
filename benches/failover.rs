//! From the death of a replica to the next one acting: `cargo bench --bench failover [-- --runs N]`.
//! The measurement itself is `botmesh bench failover`.

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    // What cargo adds is not ours.
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let status = Command::new(env!("CARGO_BIN_EXE_botmesh"))
        .args(["bench", "failover"])
        .args(arguments)
        .status();
    match status {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}
