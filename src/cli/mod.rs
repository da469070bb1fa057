//! The command line: what each verb parses, runs and exits with.
//!
//! Every verb goes the same way: settings from file, environment and flags; the work; one line on
//! stderr and an exit code of [`failure::EXIT_CODES`] where it failed. `up` and `supervise` stay on
//! the main thread and its single-threaded runtime, because their children's lives hang on that
//! thread (see [`crate::supervise`]); everything else runs on a runtime of its own.

mod args;
mod bench;
mod client;
mod failure;
mod health;
mod ports;
mod run;
mod secret;
mod supervise;
mod up;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use crate::bot::BotBuilder;
use crate::config::Settings;

use args::{Cli, Verb};
use failure::Failure;

pub mod demo;

/// Runs the command line of this process and returns its exit code.
pub fn main() -> ExitCode {
    main_with(demo::flows)
}

/// What a binary adds to a bot that has its store, its coordination and its providers already.
pub type Flows = fn(BotBuilder) -> BotBuilder;

/// Everything `botmesh` can do, with these flows and handlers instead of the demo's: a `main` for a
/// bot of one's own.
///
/// ```no_run
/// use botmesh::bot::{BotBuilder, Ctx, Result, Route};
///
/// async fn hello(ctx: &mut Ctx) -> Result {
///     Ok(ctx.reply("Hello!").await?)
/// }
///
/// fn flows(bot: BotBuilder) -> BotBuilder {
///     bot.on(Route::Any, hello)
/// }
///
/// fn main() -> std::process::ExitCode {
///     botmesh::cli::main_with(flows)
/// }
/// ```
pub fn main_with(flows: Flows) -> ExitCode {
    match dispatch(&Cli::parse(), flows) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nobody may read stderr any more; the code still says it.
            let _ = writeln!(std::io::stderr(), "error: {failure}");
            failure.code()
        }
    }
}

fn dispatch(cli: &Cli, flows: Flows) -> Result<(), Failure> {
    let settings = Settings::from_layers(&cli.layers()?)?;
    start_log(&settings);
    match &cli.verb {
        Verb::Up(_) => up::up(&settings, cli.config.as_deref()),
        Verb::Status(args) => call(client::show_status(&settings, args)),
        Verb::YieldLeader(args) => call(client::yield_leader(&settings, args)),
        Verb::Leave(args) => call(client::leave(&settings, args)),
        Verb::Run(_) | Verb::Join(_) => run::run(&settings, flows),
        Verb::Bench { what } => bench::bench(&settings, what),
        Verb::Supervise(args) => supervise::supervise(&settings, &args.command),
    }
}

/// Runs one call and prints what it answers.
fn call(work: impl Future<Output = Result<String, Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Other(format!("cannot start a runtime: {error}")))?;
    say(runtime.block_on(work)?.trim_end());
    Ok(())
}

/// Prints a line for people or scripts. A reader that went away is no reason to stop.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Logs go to stderr; under `up` that is the node's log file.
fn start_log(settings: &Settings) {
    let mut filter = tracing_subscriber::EnvFilter::try_new(&settings.log).unwrap_or_default();
    // At trace they log whole frames, and a bot's token is in one of those.
    for capped in ["tungstenite=info", "tokio_tungstenite=info"] {
        filter = filter.add_directive(capped.parse().expect("a target and a level"));
    }
    // Only a second call in one process fails, and then the first one's stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}
