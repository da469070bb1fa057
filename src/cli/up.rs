//! `botmesh up`: a whole group on this machine (SPEC A5, L1, N1).
//!
//! Each node is this same program run as `botmesh run`, symmetric (`--bootstrap-expect`): whichever
//! of them finds no data waits for the others, and joins a group that exists rather than founding a
//! second one. So a first start, a start from data, one with a lost directory and one with more
//! nodes than before are all the same command.
//!
//! In order: one `up` a directory → ports free → secret → children → wait until every node is ready
//! and a member → `ready`. SIGINT or SIGTERM stops all in order, the second one kills.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};

use crate::config::{HostPort, Settings};
use crate::raft::Role;
use crate::supervise::{self, Event, Order, Output, Spec};

use super::client::Client;
use super::failure::Failure;
use super::{ports, say, secret};

/// How long a node may take to end by itself beyond `settle`: longer than its own bound.
pub(super) const GRACE: Duration = Duration::from_secs(20);
/// Distance of two looks at a starting group.
const LOOK: Duration = Duration::from_millis(50);
/// After this long without `ready`, say what is missing.
const PATIENCE: Duration = Duration::from_secs(15);

struct Plan {
    name: String,
    dir: PathBuf,
    public: HostPort,
    cluster: HostPort,
}

/// Runs the verb on the calling thread, which has to be the main one (see [`supervise`]).
pub(super) fn up(settings: &Settings, config: Option<&Path>) -> Result<(), Failure> {
    let plans = plan(settings)?;
    std::fs::create_dir_all(&settings.dir).map_err(|error| {
        Failure::Directory(format!("cannot make {}: {error}", settings.dir.display()))
    })?;
    let _only = lock(&settings.dir)?;
    for plan in &plans {
        // Bound and let go at once: what matters is to say so before anything starts.
        ports::bind(&format!("{}: public listener", plan.name), &plan.public)?;
        ports::bind(&format!("{}: cluster listener", plan.name), &plan.cluster)?;
    }
    let secret_path = secret::path(settings);
    secret::make(&secret_path)?;
    let secret = secret::read(&secret_path)?;
    let program = std::env::current_exe()
        .map_err(|error| Failure::Other(format!("cannot find this program's file: {error}")))?;
    let clients = plans
        .iter()
        .map(|plan| Client::with_secret(plan.cluster.dialled_here(), secret.clone()))
        .collect::<Result<Vec<_>, _>>()?;
    let children = plans.iter().map(|plan| child(settings, config, &plans, plan, &program));
    let options = supervise::Options {
        children: children.collect(),
        restart: settings.restart,
        grace: settings.settle + GRACE,
        report: settings.supervise,
        hang_kill: settings.hang_kill,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::Other(format!("cannot start a runtime: {error}")))?;
    runtime.block_on(watch_over(settings, &plans, &clients, options))
}

fn plan(settings: &Settings) -> Result<Vec<Plan>, Failure> {
    let past = |what: &str| {
        Failure::Usage(format!("{what}: {} nodes run past port 65535", settings.nodes))
    };
    for (what, base) in [("public", &settings.public), ("cluster", &settings.cluster)] {
        if base.port == 0 {
            return Err(Failure::Usage(format!(
                "{what}: up needs a port; node i adds i - 1 to it"
            )));
        }
    }
    let beyond = settings.dir.join(format!("n{}", settings.nodes + 1));
    if beyond.exists() {
        return Err(Failure::Usage(format!(
            "{} is there: this group had more than {} nodes; start it with as many as before, then \
             `botmesh leave` takes one out, and its directory can go",
            beyond.display(),
            settings.nodes
        )));
    }
    (0..settings.nodes)
        .map(|i| {
            let name = format!("n{}", i + 1);
            Ok(Plan {
                dir: settings.dir.join(&name),
                name,
                public: settings.public.nth(i).ok_or_else(|| past("public"))?,
                cluster: settings.cluster.nth(i).ok_or_else(|| past("cluster"))?,
            })
        })
        .collect()
}

/// Keeps a second `up` off this directory for as long as the file is open.
fn lock(dir: &Path) -> Result<File, Failure> {
    let path = dir.join("up.lock");
    let fault = |error: std::io::Error| Failure::Directory(format!("{}: {error}", path.display()));
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let file = file.as_mut().map_err(|error| fault(std::io::Error::from(error.kind())))?;
    if flock(&*file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut pid = String::new();
        file.read_to_string(&mut pid).map_err(fault)?;
        return Err(Failure::Directory(format!(
            "{} belongs to a running `botmesh up` (pid {}); stop that one, or give another --dir",
            dir.display(),
            pid.trim()
        )));
    }
    file.set_len(0).and_then(|()| file.rewind()).map_err(fault)?;
    writeln!(file, "{}", std::process::id()).map_err(fault)?;
    file.try_clone().map_err(fault)
}

fn child(
    settings: &Settings,
    config: Option<&Path>,
    plans: &[Plan],
    plan: &Plan,
    program: &Path,
) -> Spec {
    let list = |address: fn(&Plan) -> HostPort| {
        let all: Vec<String> = plans.iter().map(|plan| address(plan).to_string()).collect();
        all.join(",")
    };
    let mut arguments = vec!["run".to_owned()];
    let mut add = |flag: &str, value: String| {
        arguments.push(flag.to_owned());
        arguments.push(value);
    };
    add("--name", plan.name.clone());
    add("--dir", plan.dir.display().to_string());
    add("--public", plan.public.to_string());
    add("--cluster", plan.cluster.to_string());
    add("--advertise", plan.cluster.dialled_here().to_string());
    add("--secret-file", secret::path(settings).display().to_string());
    add("--lease", humantime::format_duration(settings.lease).to_string().replace(' ', ""));
    add("--turn-wait", humantime::format_duration(settings.turn_wait).to_string().replace(' ', ""));
    add("--settle", humantime::format_duration(settings.settle).to_string().replace(' ', ""));
    add("--bootstrap-expect", plans.len().to_string());
    add("--peers", list(|plan| plan.cluster.dialled_here()));
    add("--public-peers", list(|plan| plan.public.clone()));
    add("--disk-low-water", settings.disk_low_water.to_string());
    add("--beat", humantime::format_duration(settings.beat).to_string().replace(' ', ""));
    let window = humantime::format_duration(settings.dedupe_window).to_string();
    add("--dedupe-window", window.replace(' ', ""));
    add("--dedupe-ids", settings.dedupe_ids.to_string());
    add("--snapshot-every", settings.snapshot_every.to_string());
    add("--snapshot-every-bytes", settings.snapshot_every_bytes.to_string());
    add("--log", settings.log.clone());
    if let Some(url) = &settings.reply_url {
        add("--reply-url", url.clone());
    }
    if let Some(config) = config {
        add("--config", config.display().to_string());
    }
    if !settings.sticky {
        arguments.push("--no-sticky".to_owned());
    }
    Spec {
        name: plan.name.clone(),
        program: program.to_owned(),
        arguments,
        output: Output::Log(plan.dir.join("output.log")),
        pid_file: Some(plan.dir.join("pid")),
    }
}

async fn watch_over(
    settings: &Settings,
    plans: &[Plan],
    clients: &[Client],
    options: supervise::Options,
) -> Result<(), Failure> {
    let fault = |error: std::io::Error| Failure::Other(format!("cannot catch signals: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(fault)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(fault)?;
    let (orders, receiver) = watch::channel(Order::Run);
    let (sender, mut events) = mpsc::channel(1024);
    let children = supervise::run(options, receiver, sender);
    let ready = wait_ready(plans, clients);
    tokio::pin!(children, ready);
    let mut announced = false;
    loop {
        tokio::select! {
            () = &mut children => break,
            () = asked(&mut interrupt, &mut terminate) => {
                if *orders.borrow() == Order::Run {
                    say("botmesh: stopping; once more kills at once");
                    orders.send_replace(Order::Stop);
                } else {
                    orders.send_replace(Order::Kill);
                }
            }
            () = &mut ready, if !announced && *orders.borrow() == Order::Run => {
                announced = true;
                banner(settings, plans);
                say("ready");
            }
            Some(event) = events.recv() => {
                // While a group forms or stops, its members miss each other; that is no news.
                let settled = announced && *orders.borrow() == Order::Run;
                if settled || !is_mere_warning(&event) {
                    tell(&event, *orders.borrow());
                }
            }
        }
    }
    while let Ok(event) = events.try_recv() {
        if !is_mere_warning(&event) {
            tell(&event, *orders.borrow());
        }
    }
    let order = *orders.borrow();
    match order {
        Order::Run => Err(Failure::Other("all nodes have ended; see DIR/n1/output.log".to_owned())),
        Order::Interrupt | Order::Stop => Ok(()),
        Order::Kill => Err(Failure::Killed),
    }
}

/// Returns at either of the signals that stop a program.
async fn asked(interrupt: &mut Signal, terminate: &mut Signal) {
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

/// Returns once every node serves and all are members, voters where the number is odd (SPEC K1).
async fn wait_ready(plans: &[Plan], clients: &[Client]) {
    let since = tokio::time::Instant::now();
    let mut said = false;
    loop {
        let missing = missing(plans, clients).await;
        match missing {
            None => return,
            Some(what) if since.elapsed() >= PATIENCE && !said => {
                said = true;
                say(&format!("botmesh: still waiting: {what}; the nodes' logs say why"));
            }
            Some(_) => {}
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn missing(plans: &[Plan], clients: &[Client]) -> Option<String> {
    for (plan, client) in plans.iter().zip(clients) {
        if !client.is_ready().await {
            return Some(format!("{} is not ready", plan.name));
        }
        let status = match client.status().await {
            Ok((status, _)) => status,
            Err(error) => return Some(format!("{} has no status: {error}", plan.name)),
        };
        let member = |plan: &&Plan| status.nodes.iter().any(|node| node.name == plan.name);
        if let Some(absent) = plans.iter().find(|plan| !member(plan)) {
            return Some(format!("{} is not a member yet, says {}", absent.name, plan.name));
        }
        let voters = status.nodes.iter().filter(|node| node.role != Role::Learner).count();
        let wanted = voters_of(plans.len());
        if voters < wanted {
            return Some(format!("{voters} of {wanted} voters, says {}", plan.name));
        }
    }
    None
}

/// How many of so many members vote: 1, 3 or 5 (SPEC K1).
fn voters_of(nodes: usize) -> usize {
    match nodes {
        0..=2 => 1,
        3..=4 => 3,
        _ => 5,
    }
}

fn banner(settings: &Settings, plans: &[Plan]) {
    let mut lines = vec![format!(
        "botmesh: {} node{} on this machine, data in {}",
        plans.len(),
        if plans.len() == 1 { "" } else { "s" },
        settings.dir.display()
    )];
    for plan in plans {
        lines.push(format!(
            "  {}  chat http://{}/  cluster {}",
            plan.name,
            plan.public.dialled_here(),
            plan.cluster
        ));
    }
    if let Some(last) = plans.last() {
        lines.push(format!(
            "  webhook  curl -H 'content-type: application/json' -d '{}' http://{}/webhooks/demo",
            r#"{"id":"1","chat":"ann","text":"order"}"#,
            last.public.dialled_here()
        ));
        lines.push(format!(
            "  replies  curl 'http://{}/webhooks/demo/replies?chat=ann'",
            last.public.dialled_here()
        ));
    }
    lines.push(format!(
        "  status   botmesh status --cluster {} --dir {}",
        settings.cluster.dialled_here(),
        settings.dir.display()
    ));
    lines.push("  Ctrl-C stops all nodes; their data stays".to_owned());
    for line in lines {
        say(&line);
    }
}

/// Not an error, not a panic, not an end.
fn is_mere_warning(event: &Event) -> bool {
    matches!(event, Event::Warned { line, .. } if line.contains(" WARN "))
}

fn tell(event: &Event, order: Order) {
    if let Some(line) = describe(event, order) {
        say(&line);
    }
}

/// What people are told of an event; the rest goes to the log.
pub(super) fn describe(event: &Event, order: Order) -> Option<String> {
    Some(match event {
        Event::Started { name, pid } => {
            tracing::debug!(%name, pid, "started");
            return None;
        }
        Event::Reported { name, took } => {
            tracing::debug!(%name, ?took, "the group knows of its death");
            return None;
        }
        Event::Unreported { name, why } if order != Order::Run => {
            tracing::debug!(%name, %why, "its death was not reported");
            return None;
        }
        Event::Unreported { name, why } => {
            format!("{name} | its death was not reported, its lease decides: {why}")
        }
        Event::Stranger { name, pid, child } => format!(
            "{name} | death reports are off: process {pid} acts in the group and is not the one \
             that is waited for ({child}); let the command replace its shell with `exec`"
        ),
        Event::Hangs { name, why } => format!("{name} hangs ({why}); killing it"),
        Event::Failed { name, why } => format!("{name} | {why}"),
        Event::Warned { name, line } => format!("{name} | {line}"),
        Event::Ended { name, status, again_in } => {
            let how = match (again_in, order) {
                (Some(pause), _) => {
                    format!("starting it again in {}", humantime::format_duration(*pause))
                }
                (None, Order::Run) => "it stays down (--no-restart)".to_owned(),
                (None, _) if status.success() => return None,
                (None, _) => "while stopping".to_owned(),
            };
            format!("{name} ended ({status}); {how}")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Layers;

    fn settings(flags: &[(&'static str, &str)]) -> Settings {
        let mut layers = Layers::default();
        for (key, value) in flags {
            layers.flag(key, Some((*value).to_owned()));
        }
        Settings::from_layers(&layers).unwrap()
    }

    #[test]
    fn n1_node_i_listens_at_port_plus_i_minus_one() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display().to_string();
        let plans = plan(&settings(&[("nodes", "4"), ("dir", &at)])).unwrap();
        let ports: Vec<(u16, u16)> =
            plans.iter().map(|plan| (plan.public.port, plan.cluster.port)).collect();
        assert_eq!(ports, [(8101, 9101), (8102, 9102), (8103, 9103), (8104, 9104)]);
        assert_eq!(plans[3].dir, dir.path().join("n4"));
        let past = plan(&settings(&[("public", "127.0.0.1:65534"), ("dir", &at)]));
        assert!(matches!(past, Err(Failure::Usage(text)) if text.contains("65535")));
    }

    #[test]
    fn n1_fewer_nodes_than_the_data_has_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("n3")).unwrap();
        let at = dir.path().display().to_string();
        assert!(plan(&settings(&[("dir", &at)])).is_ok());
        let fewer = plan(&settings(&[("dir", &at), ("nodes", "2")]));
        assert!(matches!(fewer, Err(Failure::Usage(text)) if text.contains("botmesh leave")));
    }

    #[test]
    fn a5_a_second_up_on_the_directory_is_told_the_first_ones_pid() {
        let dir = tempfile::tempdir().unwrap();
        let held = lock(dir.path()).unwrap();
        let Err(Failure::Directory(text)) = lock(dir.path()) else { panic!("it is held") };
        assert!(text.contains(&format!("pid {}", std::process::id())), "{text}");
        drop(held);
        lock(dir.path()).unwrap();
    }
}
