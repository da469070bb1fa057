//! How soon a webhook is answered while handlers sleep.
//!
//! A provider that is not answered in time delivers again, or gives the bot up. So the webhook is
//! answered after the commit that journals the message, and not after its handler. Three processes on
//! loopback, more chats than handlers that can be asleep at once, and messages at a fixed rate; every
//! one of them has to be replied to once and in order.

use std::path::Path;
use std::time::{Duration, Instant};

use super::args::WebhookArgs;
use super::group::{Group, Setup};
use super::load::{Load, Plan, Spread};
use super::net::{Net, Network};
use super::report::Report;
use super::sink::Sink;
use crate::cli::failure::Failure;

/// How long the last replies may take beyond their handlers' sleep.
const PATIENCE: Duration = Duration::from_secs(60);
/// The lease is no part of this.
const LEASE: Duration = Duration::from_secs(15);

/// Measures.
pub(super) async fn run(program: &Path, args: &WebhookArgs) -> Result<Report, Failure> {
    let WebhookArgs { rate, seconds, sleep, load: spread, .. } = *args;
    if spread == Spread::None {
        return Err(Failure::Usage("--load none: then there is nothing to answer".to_owned()));
    }
    let network = Network::open(Net::Loopback, 3)?;
    let sink = Sink::open(&network).await?;
    let handlers_sleep = Some(sleep);
    let (polls, watched_by) = (false, &[] as &[&str]);
    let setup = Setup { program, nodes: 3, lease: LEASE, watched_by, polls, handlers_sleep };
    let group = Group::start(&setup, &sink, network).await?;
    // A chat's next message comes when its last handler has slept long enough.
    let chats = (f64::from(rate) * 2.0 * sleep.as_secs_f64().max(0.5)).ceil() as u32;
    let began = Instant::now();
    let load = Load::start(group.doors(), &sink, Plan { spread, rate, chats });
    tokio::time::sleep(Duration::from_secs(seconds.into())).await;
    let answers = load.stop().await?;
    let took = began.elapsed().as_secs_f64();
    sink.drained(sleep + PATIENCE).await;
    let command = format!(
        "botmesh bench webhook --rate {rate} --seconds {seconds} --sleep {} --load {}",
        humantime::format_duration(sleep).to_string().replace(' ', ""),
        spread.name()
    );
    let mut report = Report::new(command, answers.len());
    report.add("messages taken", "1/s", vec![answers.len() as f64 / took]);
    report.add("webhook answers", "ms", answers);
    report.checked(sink.ledger(|ledger| ledger.checks()));
    group.stop().await;
    Ok(report)
}
