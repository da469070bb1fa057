//! The command line: what each verb parses, runs and exits with.

pub mod demo;

/// Runs the command line of this process and returns its exit code.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
