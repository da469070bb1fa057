//! Figures in Prometheus' text format (SPEC K7).
//!
//! The format is three kinds of lines, and the figures already live elsewhere: in the machine, in
//! the node, in one table of answers here. So they are written out at the scrape; no registry
//! keeps a second copy of them.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use parking_lot::Mutex;

use crate::bot::Bot;

/// The content type of the format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A scrape being written.
#[derive(Debug, Default)]
pub struct Text(String);

impl Text {
    /// Starts a family: every line of it follows before the next family starts.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// One line.
    pub fn line(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            self.0.push(if index == 0 { '{' } else { ',' });
            let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{label}=\"{text}\"");
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    /// A family of one gauge.
    pub fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "gauge", help);
        self.line(name, &[], value as f64);
    }

    /// A family of one counter.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.line(name, &[], value as f64);
    }

    /// What was written.
    pub fn finish(self) -> String {
        self.0
    }
}

/// Writes what a bot counted (SPEC H1), each figure as `botmesh_{name}_total`.
pub fn write_bot(text: &mut Text, bot: &Bot) {
    let mut family = "";
    for figure in bot.figures() {
        let name = format!("botmesh_{}_total", figure.name);
        if figure.name != family {
            family = figure.name;
            text.family(&name, "counter", figure.help);
        }
        let label = figure.label.as_ref().map(|(key, value)| (*key, value.as_str()));
        text.line(&name, label.as_slice(), figure.value as f64);
    }
}

/// Counts requests by route, method and status. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    // A mutex: the table has a few dozen rows (routes are templates, not paths), and is held for
    // one addition.
    table: Arc<Mutex<BTreeMap<Answered, Tally>>>,
}

/// (route, method, status)
type Answered = (String, String, u16);

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    count: u64,
    seconds: f64,
}

impl Requests {
    /// Adds one answer.
    fn add(&self, route: &str, method: &str, status: u16, seconds: f64) {
        let key = (route.to_owned(), method.to_owned(), status);
        let mut table = self.table.lock();
        let tally = table.entry(key).or_default();
        tally.count += 1;
        tally.seconds += seconds;
    }

    /// Writes the families.
    pub fn write(&self, text: &mut Text) {
        let rows: Vec<_> = self.table.lock().iter().map(|(key, row)| (key.clone(), *row)).collect();
        text.family("botmesh_http_requests_total", "counter", "Answers by route and status");
        for ((route, method, status), row) in &rows {
            let status = status.to_string();
            let labels =
                [("route", route.as_str()), ("method", method.as_str()), ("status", &*status)];
            text.line("botmesh_http_requests_total", &labels, row.count as f64);
        }
        let seconds = "botmesh_http_request_seconds_total";
        text.family(seconds, "counter", "Time from head to answer, long polls included");
        for ((route, method, status), row) in &rows {
            let status = status.to_string();
            let labels =
                [("route", route.as_str()), ("method", method.as_str()), ("status", &*status)];
            text.line(seconds, &labels, row.seconds);
        }
    }
}

/// Middleware that counts. Methods beyond the usual and paths without a route share one name each,
/// so that a stranger cannot grow the table.
pub async fn count(State(requests): State<Requests>, request: Request, next: Next) -> Response {
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned());
    let method = match request.method().as_str() {
        usual @ ("GET" | "POST" | "PUT" | "DELETE" | "HEAD" | "OPTIONS" | "PATCH") => usual,
        _ => "other",
    }
    .to_owned();
    let begin = Instant::now();
    let response = next.run(request).await;
    let seconds = begin.elapsed().as_secs_f64();
    requests.add(&route, &method, response.status().as_u16(), seconds);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k7_the_text_is_what_prometheus_reads() {
        let mut text = Text::default();
        text.gauge("botmesh_term", "The Raft term", 7);
        text.family("x", "counter", "An x");
        text.line("x", &[("a", "q\"uo\\te\n"), ("b", "2")], 1.5);
        let expected = "# HELP botmesh_term The Raft term\n# TYPE botmesh_term gauge\n\
                        botmesh_term 7\n# HELP x An x\n# TYPE x counter\n\
                        x{a=\"q\\\"uo\\\\te\\n\",b=\"2\"} 1.5\n";
        assert_eq!(text.finish(), expected);
    }

    #[test]
    fn k7_answers_are_counted_by_route_and_status() {
        let requests = Requests::default();
        requests.add("/v1/{prefix}/turns", "POST", 200, 0.5);
        requests.add("/v1/{prefix}/turns", "POST", 200, 0.25);
        let mut text = Text::default();
        requests.write(&mut text);
        let text = text.finish();
        let labels = "{route=\"/v1/{prefix}/turns\",method=\"POST\",status=\"200\"}";
        assert!(text.contains(&format!("botmesh_http_requests_total{labels} 2\n")), "{text}");
        assert!(text.contains(&format!("botmesh_http_request_seconds_total{labels} 0.75\n")));
    }
}
