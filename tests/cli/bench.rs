//! The measurements, each really made, a few times over: what they print, write and count. How long
//! anything took is nobody's business here.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::support::cluster::Arena;
use crate::{ask, failure};

/// A measurement that was made.
struct Made {
    table: String,
    document: Value,
    picture: String,
}

impl Made {
    /// Runs a measurement. `None` where the machine forbids it, which it has to say itself.
    fn make(test: &str, arguments: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (json, svg) = (dir.path().join("figures.json"), dir.path().join("figures.svg"));
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let (to_json, to_svg) = (text(&json), text(&svg));
        let mut all = vec!["bench"];
        all.extend(arguments);
        all.extend(["--json", &to_json, "--plot", &to_svg]);
        let output: Output = ask(&all);
        if output.status.code() == Some(8) {
            let (_, why) = failure(&output);
            assert!(why.contains("this machine"), "{why}");
            eprintln!("SKIPPED {test}: {why}");
            return None;
        }
        assert!(output.status.success(), "{arguments:?}: {:?}", failure(&output));
        Some(Self {
            table: String::from_utf8(output.stdout).unwrap(),
            document: serde_json::from_slice(&fs::read(&json).unwrap()).unwrap(),
            picture: fs::read_to_string(&svg).unwrap(),
        })
    }

    /// How many samples a figure has, by the table.
    fn samples(&self, figure: &str) -> usize {
        let row = self.table.lines().find_map(|line| line.strip_prefix(figure));
        let count = row.and_then(|row| row.split_whitespace().next()?.parse().ok());
        count.unwrap_or_else(|| panic!("no figure {figure:?} in\n{}", self.table))
    }

    /// The form of SPEC N7, and nothing lost, doubled or out of order.
    fn is_well(&self, runs: usize) {
        let document = &self.document;
        assert_eq!(document["runs"], runs, "{document:#}");
        for count in ["lost", "doubled", "out_of_order"] {
            assert_eq!(document[count], 0, "{count}: {document:#}");
        }
        assert!(document["command"].as_str().unwrap().starts_with("botmesh bench "));
        assert!(document["version"].is_string() && document["machine"]["cores"].is_u64());
        let figures = document["figures"].as_object().unwrap();
        assert!(!figures.is_empty());
        for (name, figure) in figures {
            let at = |part: &str| figure[part].as_f64().unwrap_or_else(|| panic!("{name}: {part}"));
            assert!(at("p50") <= at("p95") && at("p95") <= at("p99") && at("p99") <= at("max"));
            assert!(figure["unit"].is_string());
        }
        assert!(self.picture.starts_with("<svg") && self.picture.contains("<circle"));
        assert!(self.table.contains("lost 0, doubled 0, out of order 0"), "{}", self.table);
    }
}

/// `bench failover` with few messages, so that a debug build keeps up on a busy machine.
fn failover(test: &str, runs: usize, more: &[&str]) -> Option<Made> {
    let runs_text = runs.to_string();
    let mut arguments = vec!["failover", "--runs", &runs_text, "--rate", "5"];
    arguments.extend(more);
    let made = Made::make(test, &arguments)?;
    made.is_well(runs);
    Some(made)
}

#[tokio::test(flavor = "multi_thread")]
async fn l6_a_supervised_death_is_measured_for_each_kind_of_victim() {
    let _arena = Arena::enter().await;
    let more = ["--kill", "all", "--load", "affine"];
    let made = failover("l6_a_supervised_death", 5, &more).unwrap();
    for kind in [
        "holder",
        "holder that leads",
        "transport leader",
        "transport and Raft leader",
        "pair, one started again",
    ] {
        for point in ["detected", "declared", "granted", "acted", "writes back"] {
            assert_eq!(made.samples(&format!("{kind}: {point}")), 1);
        }
    }
    assert_eq!(made.samples("holder that leads: elected"), 1);
    assert_eq!(made.samples("transport leader: transport answers"), 1);
    assert!(made.samples("webhook answers the load") > 0);
    assert!(made.document["command"].as_str().unwrap().contains("--kill all"));
}

#[tokio::test(flavor = "multi_thread")]
async fn case_c17_both_leads_of_a_dead_node_move_and_each_is_timed() {
    let _arena = Arena::enter().await;
    let made = failover("case_c17", 2, &["--kill", "leads"]).unwrap();
    let kind = "transport and Raft leader";
    assert_eq!(made.samples(&format!("{kind}: elected")), 2, "another one leads the group");
    assert_eq!(made.samples(&format!("{kind}: acted")), 2, "another one polls");
    assert_eq!(made.samples(&format!("{kind}: transport answers")), 2, "and answers");
    println!("{}", made.table);
}

#[tokio::test(flavor = "multi_thread")]
async fn l6_an_unsupervised_death_is_measured_by_its_lease() {
    let _arena = Arena::enter().await;
    let more = ["--mode", "unsupervised", "--lease", "4s", "--load", "round-robin"];
    let made = failover("l6_an_unsupervised_death", 2, &more).unwrap();
    for kind in ["holder", "holder that leads"] {
        assert_eq!(made.samples(&format!("{kind}: acted")), 1);
        assert_eq!(made.samples(&format!("{kind}: writes back")), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn l6_a_freeze_and_a_planned_stop_are_measured() {
    let _arena = Arena::enter().await;
    let frozen = failover("l6_a_freeze", 1, &["--mode", "freeze", "--kill", "holder"]).unwrap();
    assert_eq!(frozen.samples("holder: acted"), 1);
    let more = ["--mode", "graceful", "--kill", "all", "--load", "affine"];
    let stopped = failover("l6_a_planned_stop", 4, &more).unwrap();
    for kind in ["holder", "holder that leads", "transport leader", "transport and Raft leader"] {
        assert_eq!(stopped.samples(&format!("{kind}: gap")), 1);
        assert_eq!(stopped.samples(&format!("{kind}: another answers")), 1);
    }
    assert_eq!(stopped.samples("transport leader: acted"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn l6_a_pair_of_five_is_measured() {
    let _arena = Arena::enter().await;
    let made = failover("l6_a_pair_of_five", 1, &["--nodes", "5", "--kill", "pair"]).unwrap();
    assert_eq!(made.samples("pair: acted"), 1);
    assert_eq!(made.samples("pair: elected"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn l6_a_one_way_cut_and_a_vanished_host_are_measured_where_packets_can_be_dropped() {
    let _arena = Arena::enter().await;
    for mode in ["one-way-cut", "vanished-host"] {
        let more = ["--mode", mode, "--lease", "4s", "--load", "affine"];
        let Some(made) = failover("l6_a_one_way_cut", 2, &more) else { return };
        for kind in ["holder", "holder that leads"] {
            assert_eq!(made.samples(&format!("{kind}: acted")), 1);
            assert_eq!(made.samples(&format!("{kind}: granted")), 1);
        }
        assert!(made.document["command"].as_str().unwrap().contains("--net namespaces"));
    }
    let spaces = fs::read_dir("/run/netns").map_or(0, |all| {
        all.flatten().filter(|it| it.file_name().to_string_lossy().starts_with("bm")).count()
    });
    assert_eq!(spaces, 0, "the namespaces go with the measurement");
}

#[tokio::test(flavor = "multi_thread")]
async fn l6_leases_that_are_renewed_are_counted_and_none_ends() {
    let _arena = Arena::enter().await;
    let arguments = ["leases", "--minutes", "0.3", "--busy", "--turns", "5"];
    let made = Made::make("l6_leases", &arguments).unwrap();
    let renewals = made.samples("renewal answered");
    made.is_well(renewals);
    assert!(renewals >= 3, "each of three sessions is renewed: {renewals}");
    let figures = &made.document["figures"];
    assert_eq!(figures["false expiries"]["max"], 0.0);
    assert_eq!(figures["turns held"]["max"], 15.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn l6_a_webhook_is_measured_while_its_handlers_sleep() {
    let _arena = Arena::enter().await;
    let arguments = ["webhook", "--rate", "10", "--seconds", "3", "--sleep", "700ms"];
    let made = Made::make("l6_a_webhook", &arguments).unwrap();
    let taken = made.samples("webhook answers");
    made.is_well(taken);
    assert!(taken > 0);
}

#[test]
fn l6_what_cannot_be_measured_is_refused_and_help_says_each_mode() {
    for (arguments, part) in [
        (["--mode", "vanished-host", "--net", "loopback"], "leave --net out"),
        (["--mode", "freeze", "--kill", "pair"], "--nodes 5"),
        (["--nodes", "4", "--kill", "holder"], "3 or of 5"),
    ] {
        let mut all = vec!["bench", "failover"];
        all.extend(arguments);
        let (code, said) = failure(&ask(&all));
        assert!(code == 2 && said.contains(part), "{arguments:?}: {code} {said}");
    }
    let help = String::from_utf8(ask(&["bench", "failover", "--help"]).stdout).unwrap();
    for word in [
        "supervised",
        "unsupervised",
        "freeze",
        "graceful",
        "one-way-cut",
        "vanished-host",
        "holder",
        "leader",
        "transport",
        "pair",
        "leads",
        "all",
        "affine",
        "round-robin",
        "namespaces",
    ] {
        assert!(help.contains(word), "{word} in\n{help}");
    }
    let help = String::from_utf8(ask(&["bench", "--help"]).stdout).unwrap();
    for verb in ["failover", "leases", "webhook"] {
        assert!(help.contains(verb), "{verb} in\n{help}");
    }
    assert!(!help.contains("member"), "{help}");
}
