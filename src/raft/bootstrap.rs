//! How an empty directory becomes a member (SPEC K1, K2).
//!
//! *Join*: ask the given addresses in turn until one takes this node in; the answer names the group
//! and the id. The nonce of the request was on disk before it was first sent, so asking again, also
//! after a crash, is one join.
//!
//! *Expect*: symmetric replicas must not found two groups, whatever starts first and whoever is cut
//! off. Nobody founds before it has seen every one of the expected nodes, in this very round, each
//! without a group; then only the first by name founds, and the others join it. One that meets an
//! existing group joins that. The peer list must name exactly the expected nodes: with more, two
//! halves could each see "enough".

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::cluster::{JoinAnswer, JoinRequest, Problem};
use super::error::NodeError;
use super::identity::{Identity, KnownPeer};
use super::member::{Leader, Member};
use super::node::{Inner, Phase};
use super::peers::Lane;
use super::way::Lost;
use super::{Status, levels};
use crate::types::NodeId;

/// Between two rounds of asking.
const ROUND: Duration = Duration::from_millis(250);
/// How often the same reason is logged.
const SAY_EVERY: u32 = 16;
/// How long one question may take.
const ASK_WITHIN: Duration = Duration::from_secs(2);
/// How long a join may take on the other side: an entry and a membership change.
const JOIN_WITHIN: Duration = Duration::from_secs(15);

/// Checks `--bootstrap-expect`.
pub(crate) fn check_expected(count: usize, peers: &[String], own: &str) -> Result<(), String> {
    let mut distinct: Vec<&String> = peers.iter().collect();
    distinct.sort();
    distinct.dedup();
    if count == 0 || distinct.len() != count || peers.len() != count {
        return Err(format!(
            "--bootstrap-expect {count} needs exactly {count} different addresses in --peers; {} \
             are given",
            distinct.len()
        ));
    }
    if !peers.iter().any(|peer| peer == own) {
        return Err(format!("--peers does not name this node's own address {own}"));
    }
    Ok(())
}

/// Asks these addresses to be taken in, until one does.
pub(crate) async fn join(
    inner: Arc<Inner>,
    addresses: Vec<String>,
    replaces: Option<NodeId>,
) -> Result<(), NodeError> {
    let mut said = 0;
    loop {
        let mut why = Vec::new();
        for address in &addresses {
            match ask_to_join(&inner, address, replaces, None).await {
                Ok(answer) => return enter(&inner, answer).await,
                Err(error) => why.push(format!("{address}: {error}")),
            }
        }
        wait(&inner, "waiting to join", &why.join("; "), &mut said).await;
    }
}

/// Says why it waits, now and then, and waits for the next round.
async fn wait(inner: &Inner, what: &str, why: &str, said: &mut u32) {
    if said.is_multiple_of(SAY_EVERY) {
        tracing::warn!(name = inner.options.name, "{what}: {why}");
    }
    *said = said.wrapping_add(1);
    inner.phase.send_replace(Phase::Seeking(format!("{what}: {why}")));
    tokio::time::sleep(ROUND).await;
}

/// One join request.
async fn ask_to_join(
    inner: &Inner,
    address: &str,
    replaces: Option<NodeId>,
    wait_ms: Option<u64>,
) -> Result<JoinAnswer, String> {
    let dir = inner.dir().map_err(|error| error.to_string())?;
    let request = JoinRequest {
        name: inner.options.name.clone(),
        address: inner.options.advertise.clone(),
        nonce: dir.boot().join_nonce,
        node_id: None,
        replaces,
        wait_ms,
    };
    let within = JOIN_WITHIN + Duration::from_millis(wait_ms.unwrap_or(0));
    let request = inner
        .clients
        .of(Lane::Forward)
        .post(format!("http://{address}/cluster/join"))
        .header(levels::HEADER, inner.options.command_level)
        .timeout(within)
        .json(&request);
    let response = inner.clients.send(request).await.map_err(why)?;
    let status = response.status();
    let body = response.bytes().await.map_err(why)?;
    if status.is_success() {
        return serde_json::from_slice(&body).map_err(|error| error.to_string());
    }
    Err(serde_json::from_slice::<Problem>(&body)
        .map_or_else(|_| format!("status {status}"), |problem| problem.message))
}

/// Becomes the member the group said.
async fn enter(inner: &Arc<Inner>, answer: JoinAnswer) -> Result<(), NodeError> {
    let cluster_id = Uuid::parse_str(&answer.cluster_id)
        .map_err(|error| NodeError::NotJoined { why: format!("the group's id: {error}") })?;
    let others = answer.nodes.into_iter().filter(|node| node.id != answer.node_id);
    let peers = others
        .map(|node| KnownPeer { node_id: node.id, name: node.name, address: node.address })
        .collect();
    let name = inner.options.name.clone();
    inner.become_member(Identity { cluster_id, node_id: answer.node_id, name, peers }).await
}

/// Why there is no answer, in words.
fn why(lost: impl Into<Lost>) -> String {
    lost.into().why().to_owned()
}

/// What another expected replica says.
enum Seen {
    /// It has no group yet; its name.
    Waiting(String),
    /// It belongs to this group.
    Grouped(Uuid),
    /// Nothing.
    Silent(String),
}

async fn look_at(inner: &Inner, address: &str) -> Seen {
    let request = inner
        .clients
        .of(Lane::Forward)
        .get(format!("http://{address}/cluster/status"))
        .timeout(ASK_WITHIN);
    let answered = async {
        let response = inner.clients.send(request).await.map_err(why)?;
        let status = response.status();
        if !status.is_success() {
            return Err(format!("status {status}"));
        }
        response.json::<Status>().await.map_err(why)
    };
    match answered.await {
        Ok(Status { cluster_id: Some(id), .. }) => match Uuid::parse_str(&id) {
            Ok(id) => Seen::Grouped(id),
            Err(error) => Seen::Silent(format!("its group's id: {error}")),
        },
        Ok(Status { name, .. }) => Seen::Waiting(name),
        Err(why) => Seen::Silent(why),
    }
}

/// Symmetric start: see the module's head.
pub(crate) async fn expect(inner: Arc<Inner>, peers: Vec<String>) -> Result<(), NodeError> {
    let own = &inner.options.advertise;
    let mut said = 0;
    loop {
        let others: Vec<&String> = peers.iter().filter(|peer| *peer != own).collect();
        let looks = others.iter().map(|address| look_at(&inner, address));
        let seen = futures_util::future::join_all(looks).await;
        let mut names = BTreeMap::from([(inner.options.name.clone(), own.clone())]);
        let mut silent = Vec::new();
        let mut grouped = Vec::new();
        for (address, seen) in others.into_iter().zip(seen) {
            match seen {
                Seen::Grouped(_) => grouped.push(address.clone()),
                Seen::Silent(why) => silent.push(format!("{address} ({why})")),
                Seen::Waiting(name) => {
                    if let Some(same) = names.insert(name.clone(), address.clone()) {
                        let why = format!(
                            "{same} and {address} are both named {name}; give each replica a name \
                             of its own"
                        );
                        return Err(NodeError::NotJoined { why });
                    }
                }
            }
        }
        let mut why = silent.join(", ");
        for address in grouped {
            match ask_to_join(&inner, &address, None, None).await {
                Ok(answer) => return enter(&inner, answer).await,
                Err(error) => why = format!("{address}: {error}"),
            }
        }
        let first = names.first_key_value().map(|(name, _)| name.clone());
        if names.len() == peers.len() && first.as_ref() == Some(&inner.options.name) {
            return inner.found().await;
        }
        let what = format!("no group yet, {} of {} expected nodes seen", names.len(), peers.len());
        if why.is_empty() {
            why = format!("{} founds it", first.unwrap_or_default());
        }
        wait(&inner, &what, &why, &mut said).await;
    }
}

/// A member that restarts ignores its join flag (SPEC N2); where the flag leads to another group,
/// that is more likely a mistake than a leftover, and said once.
pub(crate) async fn compare_join_flag(inner: Arc<Inner>, own: Uuid, addresses: Vec<String>) {
    for address in addresses {
        if let Seen::Grouped(other) = look_at(&inner, &address).await
            && other != own
        {
            tracing::warn!(
                name = inner.options.name,
                "--join {address} leads to group {other}, and this data directory is a member of \
                 group {own}: the flag is ignored; to join the other group, start with an empty \
                 directory"
            );
            return;
        }
    }
}

/// Tells the group where this member is now, where that is not what the membership says (SPEC K4).
pub(crate) async fn announce(inner: Arc<Inner>, member: Arc<Member>) {
    loop {
        let known = member.peer(member.id());
        let Some(known) = known else {
            // Not told of its own membership yet.
            tokio::time::sleep(ROUND).await;
            continue;
        };
        let own = (&inner.options.name, &inner.options.advertise);
        if (&known.name, &known.address) == own {
            return;
        }
        let mut addresses: Vec<String> = match member.leader() {
            Leader::Here => vec![inner.options.advertise.clone()],
            Leader::At(_, address) => vec![address],
            Leader::Nobody => Vec::new(),
        };
        let membership = member.membership();
        let others = membership.membership().nodes().filter(|(id, _)| **id != member.id());
        addresses.extend(others.map(|(_, peer)| peer.address.clone()));
        for address in addresses {
            match ask_to_join(&inner, &address, None, None).await {
                Ok(_) => break,
                Err(error) => tracing::debug!(%address, error, "not announced"),
            }
        }
        tokio::time::sleep(ROUND).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k2_the_peer_list_names_exactly_the_expected_nodes() {
        let peers = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        assert!(check_expected(3, &peers(&["a:1", "b:1", "c:1"]), "b:1").is_ok());
        assert!(check_expected(3, &peers(&["a:1", "b:1"]), "b:1").is_err());
        assert!(check_expected(3, &peers(&["a:1", "b:1", "b:1"]), "b:1").is_err());
        assert!(check_expected(2, &peers(&["a:1", "b:1", "c:1"]), "b:1").is_err());
        assert!(check_expected(3, &peers(&["a:1", "b:1", "c:1"]), "d:1").is_err());
    }
}
