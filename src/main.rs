//! The `botmesh` binary: parse the command line, run, exit with the code of what happened.

fn main() -> std::process::ExitCode {
    botmesh::cli::main()
}
