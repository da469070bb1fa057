//! Figures: collected, printed for people, written for scripts (SPEC N7).

use serde_json::{Map, Value, json};

/// What went wrong with turns, counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Checks {
    /// Tickets whose turn never came.
    pub(crate) lost: u64,
    /// Turns of a chat that overlapped.
    pub(crate) doubled: u64,
    /// Turns of a chat whose fence did not grow.
    pub(crate) out_of_order: u64,
}

#[derive(Debug)]
struct Figure {
    name: String,
    unit: &'static str,
    sorted: Vec<f64>,
}

/// All figures of one run.
#[derive(Debug, Default)]
pub(crate) struct Report {
    figures: Vec<Figure>,
    checks: Checks,
}

impl Report {
    pub(crate) fn add(&mut self, name: &str, unit: &'static str, mut samples: Vec<f64>) {
        assert!(!samples.is_empty(), "{name} was not measured");
        samples.sort_by(f64::total_cmp);
        self.figures.push(Figure { name: name.to_owned(), unit, sorted: samples });
    }

    pub(crate) fn checked(&mut self, checks: Checks) {
        self.checks.lost += checks.lost;
        self.checks.doubled += checks.doubled;
        self.checks.out_of_order += checks.out_of_order;
    }

    fn p50(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|figure| figure.name == name).map(|figure| figure.at(0.50))
    }

    pub(crate) fn print(&self) {
        let row = |name: &str, p50: String, p95: String, p99: String, max: String, unit: &str| {
            println!("{name:<46} {p50:>10} {p95:>10} {p99:>10} {max:>10}  {unit}");
        };
        let head = |text: &str| text.to_owned();
        row("figure", head("p50"), head("p95"), head("p99"), head("max"), "unit");
        for figure in &self.figures {
            let show = |part: f64| shown(figure.at(part));
            row(&figure.name, show(0.50), show(0.95), show(0.99), show(1.0), figure.unit);
        }
        if let (Some(grant), Some(commit)) =
            (self.p50("ticket_to_grant_1_client"), self.p50("bare_commit_1_client"))
        {
            println!("ticket → grant / bare commit, p50: {:.2}", grant / commit);
        }
        let Checks { lost, doubled, out_of_order } = self.checks;
        println!("lost {lost}, doubled {doubled}, out of order {out_of_order}");
    }

    pub(crate) fn json(&self) -> String {
        let mut figures = Map::new();
        for figure in &self.figures {
            let at = |part: f64| figure.at(part);
            let value = json!({
                "p50": at(0.50), "p95": at(0.95), "p99": at(0.99), "max": at(1.0),
                "unit": figure.unit
            });
            figures.insert(figure.name.clone(), value);
        }
        let Checks { lost, doubled, out_of_order } = self.checks;
        let report = json!({
            "command": "cargo bench --bench turns",
            "version": env!("CARGO_PKG_VERSION"),
            "machine": machine(),
            "runs": 1,
            "figures": figures,
            "lost": lost,
            "doubled": doubled,
            "out_of_order": out_of_order,
        });
        format!("{report:#}\n")
    }
}

impl Figure {
    /// Nearest rank.
    fn at(&self, part: f64) -> f64 {
        let last = self.sorted.len() - 1;
        self.sorted[((last as f64) * part).round() as usize]
    }
}

fn shown(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.3}") }
}

fn machine() -> Value {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown", |(_, model)| model.trim());
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({ "cpu": model, "cores": cores, "kernel": kernel.trim() })
}
