//! The `botmesh` binary: parse the command line, run, exit with the code of what happened.

/// glibc's allocator costs an eighth of the processor under load.
#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    botmesh::cli::main()
}
