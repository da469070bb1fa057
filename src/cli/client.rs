//! Calls on a running node's cluster listener (SPEC K1, N3, N4), and how their answers are shown.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::{HostPort, Settings};
use crate::raft::{Role, Secret, Status};
use crate::types::NodeId;

use super::args::{CallArgs, LeaveArgs};
use super::failure::Failure;
use super::secret;

/// One node's cluster listener.
#[derive(Clone, Debug)]
pub(super) struct Client {
    address: HostPort,
    secret: Secret,
    http: reqwest::Client,
}

/// How long the connection may take.
const CONNECT: Duration = Duration::from_secs(2);
/// How long an ordinary answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a group without a leader is asked again.
const ELECTION: Duration = Duration::from_secs(5);
/// After this long.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a change of the membership may take: a join waits until the node has caught up.
const CHANGE: Duration = Duration::from_secs(120);

impl Client {
    pub(super) fn new(settings: &Settings) -> Result<Self, Failure> {
        let secret = secret::read(&secret::path(settings))?;
        Self::with_secret(settings.cluster.clone(), secret)
    }

    pub(super) fn with_secret(address: HostPort, secret: Secret) -> Result<Self, Failure> {
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

    /// Asks for a change; again while the group elects a leader, which certainly did nothing.
    pub(super) async fn change(&self, path: &str, body: Value) -> Result<Value, Failure> {
        let until = tokio::time::Instant::now() + ELECTION;
        loop {
            let answer = self.call(reqwest::Method::POST, path, Some(body.clone()), CHANGE).await;
            match answer {
                Err(Failure::Leaderless(_)) if tokio::time::Instant::now() < until => {
                    tokio::time::sleep(AGAIN).await;
                }
                answer => return answer,
            }
        }
    }

    async fn call(
        &self,
        method: reqwest::Method,
        path: &str,
        body: Option<Value>,
        within: Duration,
    ) -> Result<Value, Failure> {
        let url = format!("http://{}{path}", self.address);
        let mut request =
            self.http.request(method, &url).bearer_auth(self.secret.reveal()).timeout(within);
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
            503 if matches!(value["error"].as_str(), Some("no_quorum" | "not_leader")) => {
                Failure::Leaderless(line)
            }
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
    Ok(if args.json { pretty(&value) } else { table(&status) })
}

/// `botmesh yield-leader`.
pub(super) async fn yield_leader(settings: &Settings, args: &CallArgs) -> Result<String, Failure> {
    let answer = Client::new(settings)?.change("/cluster/yield-leader", json!({})).await?;
    if args.json {
        return Ok(pretty(&answer));
    }
    Ok(format!("node {} handed on; node {} leads now", answer["from"], answer["to"]))
}

/// `botmesh leave`.
pub(super) async fn leave(settings: &Settings, args: &LeaveArgs) -> Result<String, Failure> {
    let client = Client::new(settings)?;
    let (status, _) = client.status().await?;
    let id = match &args.node {
        None => status.node_id.ok_or_else(|| {
            Failure::Refused(format!("{} belongs to no group yet; nothing to leave", status.name))
        })?,
        Some(node) => find(&status, node)?,
    };
    let answer = client.change("/cluster/leave", json!({ "node_id": id })).await?;
    if args.call.json {
        return Ok(pretty(&answer));
    }
    let mut text = format!("node {id} has left; voters now: {}\n", answer["voters"]);
    if let Some(warning) = answer["warning"].as_str() {
        text += &format!("warning: {warning}\n");
    }
    Ok(text + "stop its process and remove its data directory; its id is never used again")
}

/// A member by id or by name.
fn find(status: &Status, wanted: &str) -> Result<NodeId, Failure> {
    let id: Option<NodeId> = wanted.parse().ok();
    let found: Vec<NodeId> = status
        .nodes
        .iter()
        .filter(|node| Some(node.id) == id || node.name == wanted)
        .map(|node| node.id)
        .collect();
    match found[..] {
        [one] => Ok(one),
        [] => {
            let mut names: Vec<&str> = status.nodes.iter().map(|node| node.name.as_str()).collect();
            names.sort_unstable();
            let names = names.join(", ");
            Err(Failure::Usage(format!("no node {wanted:?} in the group; there are: {names}")))
        }
        _ => {
            Err(Failure::Usage(format!("several nodes match {wanted:?}: ids {found:?}; give one")))
        }
    }
}

pub(super) fn pretty(value: &Value) -> String {
    // A `Value` has string keys only, so it always prints.
    serde_json::to_string_pretty(value).unwrap_or_default()
}

fn table(status: &Status) -> String {
    let or_none = |id: Option<u64>| id.map_or("-".to_owned(), |id| id.to_string());
    let mut text = format!(
        "cluster {}  term {}  leader {}\nseen by {} (node {}, {}): applied {}, committed {}\n\n",
        status.cluster_id.as_deref().unwrap_or("-"),
        status.term,
        or_none(status.leader),
        status.name,
        or_none(status.node_id),
        word(status.role),
        status.applied,
        status.committed,
    );
    let nodes = status.nodes.iter().map(|node| {
        let reachable = if node.reachable { "yes" } else { "no" };
        let role = word(node.role);
        [
            node.id.to_string(),
            node.name.clone(),
            role.into(),
            reachable.into(),
            node.address.clone(),
        ]
    });
    text += &columns(&["NODE", "NAME", "ROLE", "REACHABLE", "ADDRESS"], nodes);
    let old = status.nodes.iter().filter(|node| {
        node.level.is_some_and(|level| status.nodes.iter().any(|other| other.level > Some(level)))
    });
    for node in old {
        text += &format!("node {} runs an older version than others\n", node.id);
    }
    text.push('\n');
    let sessions = status.sessions.iter().map(|session| {
        let mut valid = format!("{:.1} s", session.valid_ms as f64 / 1000.0);
        if let Some(other) = session.shared_with {
            valid += &format!("  (replica id shared with {other})");
        }
        let incarnation = session.incarnation.to_string();
        [session.replica.clone(), incarnation, session.node_id.to_string(), valid]
    });
    text += &columns(&["REPLICA", "INCARNATION", "NODE", "VALID"], sessions);
    if !status.leads.is_empty() {
        text.push('\n');
        let leads = status.leads.iter();
        let leads =
            leads.map(|lead| [lead.name.clone(), lead.holder.to_string(), lead.fence.to_string()]);
        text += &columns(&["LEAD", "HOLDER", "FENCE"], leads);
    }
    text + &format!("\nturns: {} held, {} waiting\n", status.turns.held, status.turns.waiting)
}

fn word(role: Role) -> &'static str {
    match role {
        Role::Leader => "leader",
        Role::Follower => "follower",
        Role::Learner => "learner",
        Role::Candidate => "candidate",
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
            "leader": null, "applied": 17, "committed": 18, "state_marks": [],
            "nodes": [
                {"id": 1, "name": "n1", "address": "127.0.0.1:9101", "role": "leader",
                 "reachable": false, "level": 1},
                {"id": 12, "name": "n2", "address": "127.0.0.1:9102", "role": "follower",
                 "reachable": true, "level": 2}
            ],
            "sessions": [{"replica": "r", "incarnation": 5, "node_id": 2, "valid_ms": 14300,
                          "shared_with": 4}],
            "leads": [{"name": "job", "holder": 5, "fence": 9}],
            "turns": {"held": 3, "waiting": 1}
        });
        let table = super::table(&Status::deserialize(&status).unwrap());
        assert!(table.contains("term 4  leader -"), "{table}");
        assert!(table.contains("\n1     n1    leader    no         127.0.0.1:9101\n"), "{table}");
        assert!(table.contains("node 1 runs an older version"), "{table}");
        assert!(table.contains("replica id shared with 4"), "{table}");
        assert!(table.contains("14.3 s") && table.contains("job   5       9"), "{table}");
        assert!(table.ends_with("turns: 3 held, 1 waiting\n"), "{table}");
        let status = Status::deserialize(&status).unwrap();
        assert_eq!((find(&status, "n2").unwrap(), find(&status, "1").unwrap()), (12, 1));
        assert!(find(&status, "n9").unwrap_err().to_string().contains("n1, n2"));
    }
}
