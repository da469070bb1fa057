//! What `botmesh bench` can be told.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::load::Spread;
use super::mode::{Kill, Mode};
use super::net::Net;
use crate::cli::args::RunArgs;

/// What `bench` measures.
#[derive(Debug, Subcommand)]
pub(crate) enum Measurement {
    /// From the death, the freeze, the cut or the stop of a replica to the next one acting
    Failover(FailoverArgs),
    /// Whether a lease ends though its holder renews it, idle or with every processor busy
    Leases(LeasesArgs),
    /// How soon a webhook is answered while handlers sleep
    Webhook(WebhookArgs),
    /// One node of a measurement's group: `run`, with what is measured
    #[command(hide = true)]
    Member(Box<MemberArgs>),
}

/// Where figures go.
#[derive(Debug, Args)]
pub(crate) struct OutputArgs {
    /// Where to write the figures as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Where to draw the samples, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}

/// `bench failover`.
#[derive(Debug, Args)]
pub(crate) struct FailoverArgs {
    /// How many times
    #[arg(long, default_value_t = 60, value_name = "N")]
    pub(crate) runs: usize,
    /// Whom to strike
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) kill: Kill,
    /// How a replica goes, and whether a supervisor tells of it
    #[arg(long, value_enum, default_value = "supervised")]
    pub(crate) mode: Mode,
    /// Of how many nodes, 3 or 5
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = nodes_of_a_bench)]
    pub(crate) nodes: usize,
    /// Where the nodes are: on loopback, or each in a network namespace of its own (needs root). The
    /// modes that drop packets need namespaces and take them by themselves
    #[arg(long, value_enum, value_name = "NET")]
    pub(crate) net: Option<Net>,
    /// What else the group has to do meanwhile
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) load: Spread,
    /// Messages a second of that load
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rate: u32,
    /// The lease of the replicas; a minute where a death is told of, a second where the lease decides
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) lease: Option<Duration>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `bench leases`.
#[derive(Debug, Args)]
pub(crate) struct LeasesArgs {
    /// For how long
    #[arg(long, default_value_t = 10.0, value_name = "N", value_parser = minutes)]
    pub(crate) minutes: f64,
    /// Spin on every processor meanwhile
    #[arg(long)]
    pub(crate) busy: bool,
    /// The lease that is held
    #[arg(long, default_value = "15s", value_name = "TIME", value_parser = time)]
    pub(crate) lease: Duration,
    /// Turns held by each of the three sessions that are opened over HTTP
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub(crate) turns: usize,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `bench webhook`.
#[derive(Debug, Args)]
pub(crate) struct WebhookArgs {
    /// Messages a second, over all three nodes
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rate: u32,
    /// For how long
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub(crate) seconds: u32,
    /// How long each handler sleeps
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = time)]
    pub(crate) sleep: Duration,
    /// How messages of a chat go to the nodes
    #[arg(long, value_enum, default_value = "affine")]
    pub(crate) load: Spread,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// `bench member`.
#[derive(Debug, Args)]
pub(crate) struct MemberArgs {
    /// Where the exclusive transport polls
    #[arg(long, value_name = "URL")]
    pub(crate) poll: Option<String>,
    /// How long each handler sleeps
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) handlers_sleep: Option<Duration>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
}

/// Groups that survive the death of one, or of two.
fn nodes_of_a_bench(text: &str) -> Result<usize, String> {
    match text {
        "3" => Ok(3),
        "5" => Ok(5),
        _ => Err("a group of 3 or of 5 is measured".to_owned()),
    }
}

fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write 500ms or 15s"))
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if (0.01..=100_000.0).contains(&minutes) => Ok(minutes),
        _ => Err("a number of minutes, 0.01 at the least".to_owned()),
    }
}
