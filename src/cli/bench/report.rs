//! Figures: collected, printed for people, written for scripts (SPEC N7).

use serde_json::{Map, Value, json};

use super::plot;

/// What went wrong, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Checks {
    /// What never came.
    pub(super) lost: u64,
    /// What came twice.
    pub(super) doubled: u64,
    /// What came at a place, by fence and number under it, that was not behind the last one.
    pub(super) out_of_order: u64,
}

/// One figure: all its samples.
#[derive(Clone, Debug)]
pub(super) struct Figure {
    pub(super) name: String,
    pub(super) unit: &'static str,
    pub(super) sorted: Vec<f64>,
}

/// All figures of a measurement.
#[derive(Clone, Debug)]
pub(super) struct Report {
    command: String,
    runs: usize,
    figures: Vec<Figure>,
    checks: Checks,
    /// What else went wrong, in words.
    failed: Option<String>,
}

impl Report {
    pub(super) fn new(command: impl Into<String>, runs: usize) -> Self {
        let (figures, checks) = (Vec::new(), Checks::default());
        Self { command: command.into(), runs, figures, checks, failed: None }
    }

    /// Adds a figure; none where nothing was measured.
    pub(super) fn add(
        &mut self,
        name: impl Into<String>,
        unit: &'static str,
        mut samples: Vec<f64>,
    ) {
        samples.sort_by(f64::total_cmp);
        if !samples.is_empty() {
            self.figures.push(Figure { name: name.into(), unit, sorted: samples });
        }
    }

    pub(super) fn checked(&mut self, checks: Checks) {
        self.checks = checks;
    }

    /// What no count tells.
    pub(super) fn failed(&mut self, why: String) {
        self.failed = Some(why);
    }

    /// What went wrong, in words.
    pub(super) fn fault(&self) -> Option<String> {
        let bad = self.checks != Checks::default();
        let broken = bad.then(|| "a message was lost, doubled or came out of order".to_owned());
        self.failed.clone().or(broken)
    }

    /// The table for people.
    pub(super) fn table(&self) -> String {
        let head = ["figure", "n", "p50", "p95", "p99", "max", "unit"].map(str::to_owned);
        let rows = self.figures.iter().map(|figure| {
            let at = |part| format!("{:.1}", figure.at(part));
            let (name, unit) = (figure.name.clone(), figure.unit.to_owned());
            let count = figure.sorted.len().to_string();
            [name, count, at(0.50), at(0.95), at(0.99), at(1.0), unit]
        });
        let mut text = String::new();
        for [name, count, p50, p95, p99, max, unit] in std::iter::once(head).chain(rows) {
            let row =
                format!("{name:<36} {count:>5} {p50:>8} {p95:>8} {p99:>8} {max:>8}  {unit}\n");
            text.push_str(&row);
        }
        let Checks { lost, doubled, out_of_order } = self.checks;
        text + &format!("lost {lost}, doubled {doubled}, out of order {out_of_order}\n")
    }

    /// The picture.
    pub(super) fn svg(&self) -> String {
        let Checks { lost, doubled, out_of_order } = self.checks;
        let title = format!(
            "{}: {} runs, lost {lost}, doubled {doubled}, out of order {out_of_order}",
            self.command, self.runs
        );
        plot::svg(&title, &self.figures)
    }

    /// The document for scripts.
    pub(super) fn json(&self) -> String {
        let mut figures = Map::new();
        for figure in &self.figures {
            let at = |part| figure.at(part);
            let (p50, p95, p99, max) = (at(0.50), at(0.95), at(0.99), at(1.0));
            let value =
                json!({ "p50": p50, "p95": p95, "p99": p99, "max": max, "unit": figure.unit });
            figures.insert(figure.name.clone(), value);
        }
        let Checks { lost, doubled, out_of_order } = self.checks;
        let report = json!({
            "command": self.command, "version": env!("CARGO_PKG_VERSION"), "machine": machine(),
            "runs": self.runs, "figures": figures,
            "lost": lost, "doubled": doubled, "out_of_order": out_of_order,
        });
        format!("{report:#}\n")
    }
}

impl Figure {
    /// Nearest rank.
    pub(super) fn at(&self, part: f64) -> f64 {
        let last = self.sorted.len() - 1;
        self.sorted[((last as f64) * part).round() as usize]
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n7_the_document_has_the_agreed_shape() {
        let mut report = Report::new("botmesh bench failover", 4);
        report.add("holder", "ms", vec![3.0, 1.0, 2.0, 9.0]);
        report.add("nothing", "ms", Vec::new());
        report.checked(Checks { lost: 1, doubled: 0, out_of_order: 2 });
        let found: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(found["figures"]["holder"]["max"], 9.0);
        assert_eq!(found["figures"]["holder"]["p50"], 3.0);
        assert_eq!(found["figures"].as_object().unwrap().len(), 1);
        let counts = ["runs", "lost", "doubled", "out_of_order"].map(|name| found[name].clone());
        assert_eq!(counts, [json!(4), json!(1), json!(0), json!(2)]);
        assert!(found["command"].is_string() && found["machine"]["cores"].is_u64());
        assert!(report.table().contains("holder") && report.table().contains("lost 1"));
        assert!(report.fault().is_some());
        assert!(Report::new("well", 1).fault().is_none());
    }
}
