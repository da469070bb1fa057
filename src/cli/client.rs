//! Calls on a running node's cluster listener (SPEC K1, N3, N4), and how their answers are shown.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::{HostPort, Settings};
use crate::types::NodeId;

use super::args::CallArgs;
use super::failure::Failure;
use super::secret;

/// One node's cluster listener.
#[derive(Clone, Debug)]
pub(super) struct Client {
    address: HostPort,
    secret: String,
    http: reqwest::Client,
}

/// `GET /cluster/status` (SPEC N4). What it does not need, it does not name.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Status {
    cluster_id: String,
    pub(super) node_id: NodeId,
    name: String,
    pub(super) role: String,
    term: u64,
    pub(super) leader: Option<NodeId>,
    applied: Option<u64>,
    committed: Option<u64>,
    pub(super) nodes: Vec<Member>,
    sessions: Vec<Session>,
    leads: Vec<Lead>,
    turns: Turns,
}

/// A member.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Member {
    pub(super) id: NodeId,
    pub(super) name: String,
    address: String,
    pub(super) role: String,
    reachable: bool,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Session {
    replica: String,
    incarnation: Value,
    node_id: NodeId,
    valid_ms: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Lead {
    name: String,
    holder: Value,
    fence: u64,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Turns {
    held: u64,
    waiting: u64,
}

/// How long the connection may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How long an ordinary answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a change of the membership may take: a join waits until the node has caught up.
const CHANGE: Duration = Duration::from_secs(120);

impl Client {
    pub(super) fn new(settings: &Settings) -> Result<Self, Failure> {
        let secret = secret::read(&secret::path(settings))?;
        Self::with_secret(settings.cluster.clone(), secret)
    }

    pub(super) fn with_secret(address: HostPort, secret: String) -> Result<Self, Failure> {
        // No proxy: the cluster's own traffic never leaves by one.
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT)
            .build()
            .map_err(|error| Failure::Other(format!("cannot make an HTTP client: {error}")))?;
        Ok(Self { address, secret, http })
    }

    /// Whether the node says it is ready.
    pub(super) async fn is_ready(&self) -> bool {
        let url = format!("http://{}/readyz", self.address);
        let answer = self.http.get(url).timeout(CONNECT).send().await;
        answer.is_ok_and(|answer| answer.status().is_success())
    }

    pub(super) async fn status(&self) -> Result<(Status, Value), Failure> {
        let value = self.call(reqwest::Method::GET, "/cluster/status", None, ANSWER).await?;
        let status = Status::deserialize(&value).map_err(|error| {
            Failure::Other(format!("{} answers with another status: {error}", self.address))
        })?;
        Ok((status, value))
    }

    pub(super) async fn change(&self, path: &str, body: Value) -> Result<Value, Failure> {
        self.call(reqwest::Method::POST, path, Some(body), CHANGE).await
    }

    async fn call(
        &self,
        method: reqwest::Method,
        path: &str,
        body: Option<Value>,
        within: Duration,
    ) -> Result<Value, Failure> {
        let url = format!("http://{}{path}", self.address);
        let mut request = self.http.request(method, &url).bearer_auth(&self.secret).timeout(within);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let answer = request.send().await.map_err(|error| self.unreached(&error))?;
        let status = answer.status();
        let text = answer.text().await.map_err(|error| self.unreached(&error))?;
        let value: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        if status.is_success() {
            return Ok(value);
        }
        let why = value["message"].as_str().map_or_else(|| text.trim().to_owned(), str::to_owned);
        let line = format!("{} answers {}: {why}", self.address, status.as_u16());
        Err(match status.as_u16() {
            401 | 403 => Failure::Refused(format!(
                "{line}; give the group's secret with --secret-file, or the directory of `up` \
                 with --dir"
            )),
            503 | 504 => Failure::NoAnswer(line),
            _ => Failure::Refused(line),
        })
    }

    fn unreached(&self, error: &reqwest::Error) -> Failure {
        let why = if error.is_timeout() {
            "it did not answer in time".to_owned()
        } else {
            root_cause(error)
        };
        Failure::NoAnswer(format!(
            "no answer from {}: {why}; is the node up? name another with --cluster",
            self.address
        ))
    }
}

/// The innermost cause says what happened; the outer ones repeat the address.
fn root_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(inner) => root_cause(inner),
        None => error.to_string(),
    }
}

/// `botmesh status`.
pub(super) async fn show_status(settings: &Settings, args: &CallArgs) -> Result<String, Failure> {
    let (status, value) = Client::new(settings)?.status().await?;
    Ok(if args.json { pretty(&value) } else { status.table() })
}

/// `botmesh yield-leader`.
pub(super) async fn yield_leader(settings: &Settings, args: &CallArgs) -> Result<String, Failure> {
    let answer = Client::new(settings)?.change("/cluster/yield-leader", json!({})).await?;
    if args.json {
        return Ok(pretty(&answer));
    }
    Ok(match answer["leader"].as_u64() {
        Some(leader) => format!("node {leader} leads now"),
        None => "leadership was handed on".to_owned(),
    })
}

pub(super) fn pretty(value: &Value) -> String {
    // A `Value` has string keys only, so it always prints.
    serde_json::to_string_pretty(value).unwrap_or_default()
}

impl Status {
    fn table(&self) -> String {
        let or_none = |number: Option<u64>| number.map_or("-".to_owned(), |n| n.to_string());
        let mut text = format!(
            "cluster {}  term {}  leader {}\nseen by {} (node {}, {}): applied {}, committed {}\n\n",
            self.cluster_id,
            self.term,
            or_none(self.leader),
            self.name,
            self.node_id,
            self.role,
            or_none(self.applied),
            or_none(self.committed),
        );
        text += &columns(
            &["NODE", "NAME", "ROLE", "REACHABLE", "ADDRESS"],
            self.nodes.iter().map(|node| {
                let reachable = if node.reachable { "yes" } else { "no" };
                [
                    node.id.to_string(),
                    node.name.clone(),
                    node.role.clone(),
                    reachable.to_owned(),
                    node.address.clone(),
                ]
            }),
        );
        text.push('\n');
        text += &columns(
            &["REPLICA", "INCARNATION", "NODE", "VALID"],
            self.sessions.iter().map(|session| {
                [
                    session.replica.clone(),
                    session.incarnation.to_string(),
                    session.node_id.to_string(),
                    format!("{:.1} s", session.valid_ms as f64 / 1000.0),
                ]
            }),
        );
        if !self.leads.is_empty() {
            text.push('\n');
            text += &columns(
                &["LEAD", "HOLDER", "FENCE"],
                self.leads.iter().map(|lead| {
                    [lead.name.clone(), lead.holder.to_string(), lead.fence.to_string()]
                }),
            );
        }
        text + &format!("\nturns: {} held, {} waiting\n", self.turns.held, self.turns.waiting)
    }
}

/// Left-aligned columns, as wide as their widest cell.
fn columns<const N: usize>(head: &[&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut table = vec![head.map(str::to_owned)];
    table.extend(rows);
    let width = |column: usize| {
        table.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    let line = |row: &[String; N]| {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    table.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n4_the_table_shows_what_the_status_says() {
        let status = json!({
            "cluster_id": "c0ffee", "node_id": 2, "name": "n2", "role": "follower", "term": 4,
            "leader": null, "applied": 17, "committed": null, "state_marks": [],
            "nodes": [
                {"id": 1, "name": "n1", "address": "127.0.0.1:9101", "role": "voter",
                 "reachable": false},
                {"id": 12, "name": "n2", "address": "127.0.0.1:9102", "role": "voter",
                 "reachable": true}
            ],
            "sessions": [{"replica": "r", "incarnation": 5, "node_id": 2, "valid_ms": 14300}],
            "leads": [{"name": "job", "holder": 5, "fence": 9}],
            "turns": {"held": 3, "waiting": 1}
        });
        let table = Status::deserialize(&status).unwrap().table();
        assert!(table.contains("term 4  leader -"), "{table}");
        assert!(table.contains("\n1     n1    voter  no         127.0.0.1:9101\n"), "{table}");
        assert!(table.contains("14.3 s") && table.contains("job   5       9"), "{table}");
        assert!(table.ends_with("turns: 3 held, 1 waiting\n"), "{table}");
    }
}
