//! `botmesh bench`: measurements people can repeat (SPEC L6, N7).
//!
//! `benches/failover.rs` calls the same code. Figures of one machine say little about another, and a
//! debug build says little about a release: the report names the machine and the command.
//!
//! | verb | measures |
//! |---|---|
//! | `failover` | from a death, a freeze, a cut or a stop to the next act |
//! | `leases` | whether a lease ends that is renewed |
//! | `webhook` | how soon a message is taken while handlers sleep |
//! | `member` | nothing: it is what the groups of the others are made of |

use std::path::PathBuf;

use tokio::signal::unix::{SignalKind, signal};

use super::call;
use super::failure::Failure;
use crate::config::Settings;

pub(super) mod args;
mod failover;
mod group;
mod leases;
mod ledger;
mod load;
mod member;
mod mode;
mod net;
mod phases;
mod plot;
mod report;
mod sink;
mod webhook;

use args::{Measurement, OutputArgs};
use report::Report;

/// Runs the verb.
pub(super) fn bench(settings: &Settings, what: &Measurement) -> Result<(), Failure> {
    match what {
        Measurement::Member(args) => member::run(settings, args),
        Measurement::Failover(args) => {
            let program = program()?;
            measure(failover::run(&program, args), &args.output)
        }
        Measurement::Leases(args) => {
            let program = program()?;
            measure(leases::run(&program, args), &args.output)
        }
        Measurement::Webhook(args) => {
            let program = program()?;
            measure(webhook::run(&program, args), &args.output)
        }
    }
}

fn program() -> Result<PathBuf, Failure> {
    std::env::current_exe()
        .map_err(|error| Failure::Other(format!("cannot find this program's file: {error}")))
}

/// Measures, prints the table and writes the documents.
fn measure(
    measuring: impl Future<Output = Result<Report, Failure>>,
    output: &OutputArgs,
) -> Result<(), Failure> {
    call(async move {
        // Whoever interrupts it finds no process, no file and no namespace left.
        let report = tokio::select! {
            report = measuring => report?,
            stopped = interrupted() => return Err(stopped),
        };
        for (path, text) in [(&output.json, report.json()), (&output.plot, report.svg())] {
            let Some(path) = path else { continue };
            std::fs::write(path, text)
                .map_err(|error| Failure::Other(format!("{}: {error}", path.display())))?;
        }
        match report.fault() {
            None => Ok(report.table()),
            Some(fault) => Err(Failure::Other(format!("{}{fault}", report.table()))),
        }
    })
}

async fn interrupted() -> Failure {
    let caught = |kind| signal(kind).map_err(|error| Failure::Other(format!("signals: {error}")));
    let (mut interrupt, mut terminate) =
        match (caught(SignalKind::interrupt()), caught(SignalKind::terminate())) {
            (Ok(interrupt), Ok(terminate)) => (interrupt, terminate),
            (Err(fault), _) | (_, Err(fault)) => return fault,
        };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Failure::Other("interrupted; nothing was measured".to_owned())
}
