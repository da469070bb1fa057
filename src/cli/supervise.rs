//! `botmesh supervise -- COMMAND`: a bot's parent in production (SPEC E6).
//!
//! The command may be `botmesh run …` or any bot built with the library. Its output and its exit
//! code pass through; SIGINT and SIGTERM are passed on, the second one kills. As the first process
//! of a container it buries the orphans there (see [`crate::supervise`]).

use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::config::Settings;
use crate::supervise::{self, Event, Options, Order, Output, Spec};

use super::failure::Failure;
use super::up::{GRACE, describe};

/// Runs the verb on the calling thread, which has to be the main one (see [`crate::supervise`]).
pub(super) fn supervise(settings: &Settings, command: &[String]) -> Result<(), Failure> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Failure::Usage("say what to run: botmesh supervise -- COMMAND".to_owned()));
    };
    let name = Path::new(program).file_name().map_or(program.clone(), |name| {
        // Lossy only for names nobody can type.
        name.to_string_lossy().into_owned()
    });
    let options = Options {
        children: vec![Spec {
            name,
            program: program.into(),
            arguments: arguments.to_vec(),
            output: Output::Inherited,
            pid_file: None,
        }],
        restart: settings.restart,
        grace: settings.settle + GRACE,
        report: settings.supervise,
        hang_kill: settings.hang_kill,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::Other(format!("cannot start a runtime: {error}")))?;
    runtime.block_on(watch_over(options))
}

async fn watch_over(options: Options) -> Result<(), Failure> {
    let fault = |error: std::io::Error| Failure::Other(format!("cannot catch signals: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(fault)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(fault)?;
    let (orders, receiver) = watch::channel(Order::Run);
    let (sender, mut events) = mpsc::channel(1024);
    let child = supervise::run(options, receiver, sender);
    tokio::pin!(child);
    let mut last = None;
    loop {
        let asked = tokio::select! {
            () = &mut child => break,
            _ = interrupt.recv() => Order::Interrupt,
            _ = terminate.recv() => Order::Stop,
            Some(event) = events.recv() => {
                take(&event, *orders.borrow(), &mut last);
                continue;
            }
        };
        let first = *orders.borrow() == Order::Run;
        orders.send_replace(if first { asked } else { Order::Kill });
    }
    let order = *orders.borrow();
    while let Ok(event) = events.try_recv() {
        take(&event, order, &mut last);
    }
    outcome(last)
}

fn take(event: &Event, order: Order, last: &mut Option<Result<ExitStatus, String>>) {
    match event {
        Event::Ended { status, .. } => *last = Some(Ok(*status)),
        Event::Failed { why, .. } => *last = Some(Err(why.clone())),
        _ => {}
    }
    if let Some(line) = describe(event, order) {
        // Standard output is the command's own. Nobody may read this one any more.
        let _ = writeln!(std::io::stderr(), "botmesh: {line}");
    }
}

/// The command's own end.
fn outcome(last: Option<Result<ExitStatus, String>>) -> Result<(), Failure> {
    match last {
        None => Ok(()),
        Some(Err(why)) => Err(Failure::Other(why)),
        Some(Ok(status)) if status.success() => Ok(()),
        Some(Ok(status)) => {
            let signal = status.signal().unwrap_or(0);
            let code = status.code().unwrap_or(128 + signal);
            let code = u8::try_from(code).unwrap_or(1);
            Err(Failure::Child { code, how: status.to_string() })
        }
    }
}
