//! What can be typed. Values are taken as text and checked by [`crate::config`], so that a flag, a
//! variable and a line of the file meet the same rules and the same words.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::{KEYS, Layers};

use super::bench::args::Measurement;
use super::failure::{EXIT_CODES, Failure};

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "botmesh",
    version,
    about = "Chat bots that form their own Raft group",
    long_about = "Chat bots that form their own Raft group: no message lost, doubled or reordered \
                  when one of them dies, and no database to run.",
    after_long_help = after_help(),
    propagate_version = true
)]
pub(super) struct Cli {
    /// TOML file with settings; variables and flags win over it
    #[arg(long, global = true, value_name = "FILE", env = "BOTMESH_CONFIG")]
    pub(super) config: Option<PathBuf>,
    /// What to log: error, warn, info, debug, trace, or a filter such as botmesh::raft=debug
    #[arg(long, global = true, value_name = "LEVEL")]
    log: Option<String>,
    #[command(subcommand)]
    pub(super) verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(super) enum Verb {
    /// Start a whole group on this machine, with the demo bot
    Up(UpArgs),
    /// Run one node with the demo bot
    Run(RunArgs),
    /// Run any bot's command as a child: report its death to the group, start it again
    Supervise(SuperviseArgs),
    /// Measure on this machine, with processes of its own
    Bench {
        #[command(subcommand)]
        what: Measurement,
    },
    /// Run one node that joins the group of a member: short for `run --join MEMBER`
    Join(JoinArgs),
    /// Take a node out of the group for good
    Leave(LeaveArgs),
    /// Hand Raft leadership to another voter
    YieldLeader(CallArgs),
    /// Show nodes, sessions, leads and turns as one node sees them
    Status(CallArgs),
}

/// `up`.
#[derive(Debug, Args)]
pub(super) struct UpArgs {
    /// How many nodes, 1 to 9
    #[arg(long, value_name = "N")]
    nodes: Option<String>,
    /// Where data goes; node i keeps its own in DIR/n{i}/
    #[arg(long, value_name = "DIR")]
    dir: Option<String>,
    /// First public listener (webhooks, chat page); node i adds i - 1 to the port
    #[arg(long, value_name = "ADDR")]
    public: Option<String>,
    /// First cluster listener (peers, operators); node i adds i - 1 to the port
    #[arg(long, value_name = "ADDR")]
    cluster: Option<String>,
    /// How long a silent replica keeps its chats
    #[arg(long, value_name = "TIME")]
    lease: Option<String>,
    /// Where the demo webhook POSTs its replies
    #[arg(long, value_name = "URL")]
    reply_url: Option<String>,
    /// Give each message a turn of its own, also where nobody else wants its chat
    #[arg(long)]
    no_sticky: bool,
    /// Leave a node that ended down
    #[arg(long)]
    no_restart: bool,
    #[command(flatten)]
    watch: WatchArgs,
}

/// What `up` and `supervise` do about deaths.
#[derive(Debug, Args)]
pub(super) struct WatchArgs {
    /// Send no death reports: what a dead process held waits for its lease
    #[arg(long)]
    no_supervise: bool,
    /// Kill a process that is stopped or shows no life for this long, or `off`
    #[arg(long, value_name = "TIME")]
    hang_kill: Option<String>,
}

/// `supervise`.
#[derive(Debug, Args)]
pub(super) struct SuperviseArgs {
    /// Leave the command down once it has ended, and end with its exit code
    #[arg(long)]
    no_restart: bool,
    #[command(flatten)]
    watch: WatchArgs,
    /// How long one step may run: so long the command may take to stop, and 20 s more
    #[arg(long, value_name = "TIME")]
    settle: Option<String>,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,
}

/// `run`.
#[derive(Debug, Args)]
pub(in crate::cli) struct RunArgs {
    /// What people call this node; unique in the group
    #[arg(long)]
    name: Option<String>,
    /// Its data directory
    #[arg(long, value_name = "DIR")]
    dir: Option<String>,
    /// Listener for webhooks and the chat page
    #[arg(long, value_name = "ADDR")]
    public: Option<String>,
    /// Listener for peers and operators
    #[arg(long, value_name = "ADDR")]
    cluster: Option<String>,
    /// How peers reach the cluster listener, where that is not its own address
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// File with the cluster secret; DIR/secret by default
    #[arg(long, value_name = "FILE")]
    secret_file: Option<String>,
    /// Where the demo webhook POSTs its replies
    #[arg(long, value_name = "URL")]
    reply_url: Option<String>,
    /// How long this replica keeps its chats when it falls silent
    #[arg(long, value_name = "TIME")]
    lease: Option<String>,
    /// Found a new group of one. A member that restarts needs none of these three
    #[arg(long)]
    bootstrap: bool,
    /// Join the group of this member
    #[arg(long, value_name = "HOST:PORT")]
    join: Option<String>,
    /// Found or join a group together with --peers, once N of them are there
    #[arg(long, value_name = "N")]
    bootstrap_expect: Option<String>,
    /// Cluster addresses of all that start together, the own included
    #[arg(long, value_name = "A,B,C")]
    peers: Option<String>,
    /// Public addresses of all nodes, for the chat page
    #[arg(long, value_name = "A,B,C")]
    public_peers: Option<String>,
    /// How long a message waits for its turn before an error is raised
    #[arg(long, value_name = "TIME")]
    turn_wait: Option<String>,
    /// How long one step may run
    #[arg(long, value_name = "TIME")]
    settle: Option<String>,
    /// Give each message a turn of its own, also where nobody else wants its chat
    #[arg(long)]
    no_sticky: bool,
    /// Free space below which the node takes nothing more, or `off`
    #[arg(long, value_name = "SIZE")]
    disk_low_water: Option<String>,
    /// Time between two heartbeats, alike on all nodes
    #[arg(long, value_name = "TIME")]
    beat: Option<String>,
    /// How long a message id is recognised, alike on all nodes
    #[arg(long, value_name = "TIME")]
    dedupe_window: Option<String>,
    /// Message ids recognised at most, alike on all nodes
    #[arg(long, value_name = "N")]
    dedupe_ids: Option<String>,
    /// Log entries after which a snapshot is built
    #[arg(long, value_name = "N")]
    snapshot_every: Option<String>,
    /// Bytes of log after which a snapshot is built
    #[arg(long, value_name = "BYTES")]
    snapshot_every_bytes: Option<String>,
}

/// What calls on a running node need.
#[derive(Debug, Args)]
pub(super) struct CallArgs {
    /// Cluster listener of the node to ask
    #[arg(long, value_name = "ADDR")]
    cluster: Option<String>,
    /// File with the cluster secret; DIR/secret by default
    #[arg(long, value_name = "FILE")]
    secret_file: Option<String>,
    /// The directory of `up`, to find the secret in
    #[arg(long, value_name = "DIR")]
    dir: Option<String>,
    /// Print the answer as JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// `leave`.
#[derive(Debug, Args)]
pub(super) struct LeaveArgs {
    /// Which node, by id or name; the one that is asked where not given
    #[arg(value_name = "NODE")]
    pub(super) node: Option<String>,
    #[command(flatten)]
    pub(super) call: CallArgs,
}

/// `join`.
#[derive(Debug, Args)]
pub(super) struct JoinArgs {
    /// Cluster address of any member of the group
    #[arg(value_name = "MEMBER")]
    pub(super) member: String,
    #[command(flatten)]
    pub(super) run: RunArgs,
}

impl Cli {
    /// Reads file, environment and flags, in that order.
    pub(super) fn layers(&self) -> Result<Layers, Failure> {
        let mut layers = Layers::default();
        if let Some(path) = &self.config {
            layers.file(path)?;
        }
        layers.environment(std::env::vars())?;
        layers.flag("log", self.log.clone());
        match &self.verb {
            Verb::Up(args) => args.layer(&mut layers),
            Verb::Run(args) => args.layer(&mut layers),
            Verb::Bench { what: Measurement::Member(args) } => args.run.layer(&mut layers),
            Verb::Bench { .. } => {}
            Verb::Supervise(args) => args.layer(&mut layers),
            Verb::Join(args) => {
                args.run.layer(&mut layers);
                layers.flag("join", Some(args.member.clone()));
            }
            Verb::Leave(args) => args.call.layer(&mut layers),
            Verb::YieldLeader(args) | Verb::Status(args) => args.layer(&mut layers),
        }
        Ok(layers)
    }
}

impl UpArgs {
    fn layer(&self, layers: &mut Layers) {
        layers.flag("nodes", self.nodes.clone());
        layers.flag("dir", self.dir.clone());
        layers.flag("public", self.public.clone());
        layers.flag("cluster", self.cluster.clone());
        layers.flag("lease", self.lease.clone());
        layers.flag("reply_url", self.reply_url.clone());
        layers.flag("sticky", self.no_sticky.then(|| "false".to_owned()));
        layers.flag("restart", self.no_restart.then(|| "false".to_owned()));
        self.watch.layer(layers);
    }
}

impl WatchArgs {
    fn layer(&self, layers: &mut Layers) {
        layers.flag("supervise", self.no_supervise.then(|| "false".to_owned()));
        layers.flag("hang_kill", self.hang_kill.clone());
    }
}

impl SuperviseArgs {
    fn layer(&self, layers: &mut Layers) {
        layers.flag("restart", self.no_restart.then(|| "false".to_owned()));
        layers.flag("settle", self.settle.clone());
        self.watch.layer(layers);
    }
}

impl RunArgs {
    fn layer(&self, layers: &mut Layers) {
        layers.flag("name", self.name.clone());
        layers.flag("dir", self.dir.clone());
        layers.flag("public", self.public.clone());
        layers.flag("cluster", self.cluster.clone());
        layers.flag("advertise", self.advertise.clone());
        layers.flag("secret_file", self.secret_file.clone());
        layers.flag("reply_url", self.reply_url.clone());
        layers.flag("lease", self.lease.clone());
        layers.flag("bootstrap", self.bootstrap.then(|| "true".to_owned()));
        layers.flag("join", self.join.clone());
        layers.flag("bootstrap_expect", self.bootstrap_expect.clone());
        layers.flag("peers", self.peers.clone());
        layers.flag("public_peers", self.public_peers.clone());
        layers.flag("turn_wait", self.turn_wait.clone());
        layers.flag("settle", self.settle.clone());
        layers.flag("sticky", self.no_sticky.then(|| "false".to_owned()));
        layers.flag("disk_low_water", self.disk_low_water.clone());
        layers.flag("beat", self.beat.clone());
        layers.flag("dedupe_window", self.dedupe_window.clone());
        layers.flag("dedupe_ids", self.dedupe_ids.clone());
        layers.flag("snapshot_every", self.snapshot_every.clone());
        layers.flag("snapshot_every_bytes", self.snapshot_every_bytes.clone());
    }
}

impl CallArgs {
    fn layer(&self, layers: &mut Layers) {
        layers.flag("cluster", self.cluster.clone());
        layers.flag("secret_file", self.secret_file.clone());
        layers.flag("dir", self.dir.clone());
    }
}

/// The end of `--help`: settings and exit codes.
fn after_help() -> String {
    let mut text = String::from(
        "Settings (key of the file; flag --KEY with '-' for '_'; variable BOTMESH_KEY):\n",
    );
    for key in KEYS {
        text.push_str(&format!("  {:<17} {} [{}]\n", key.name, key.meaning, key.default));
    }
    text.push_str("\nExit codes:\n");
    for (code, meaning) in EXIT_CODES {
        text.push_str(&format!("  {code:<4} {meaning}\n"));
    }
    text
}
