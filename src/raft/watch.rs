//! What a member does by itself while it runs: ends silent sessions, remembers its peers, says why
//! the group cannot be asked, tends the membership where it leads.

use std::sync::Arc;
use std::time::Duration;

use openraft::ServerState;
use openraft::async_runtime::WatchReceiver;
use openraft::error::Fatal;

use super::files::fatal;
use super::member::{Leader, Member};
use super::node::Inner;
use super::types::{Peer, StoredMembership};
use super::{bootstrap, bounds, compaction, levels, membership, room, suspect};
use crate::group::Unavailable;
use crate::machine::Command;
use crate::types::NodeId;

/// How long one proposed expiry is waited for; it comes up again by itself.
const EXPIRE_WITHIN: Duration = Duration::from_secs(5);
/// How often a node that does not lead looks whether it has come to, while a session's end goes on.
const ENDING_LOOK: Duration = Duration::from_millis(50);
/// How long a quorum may be missing before it is said, and how often it is said again.
const QUORUM_GRACE: Duration = Duration::from_secs(2);
const QUORUM_AGAIN: Duration = Duration::from_secs(10);
/// How often the quorum is looked at.
const QUORUM_LOOK: Duration = Duration::from_millis(500);

/// Starts the tasks of a member.
pub(crate) fn spawn(inner: &Arc<Inner>, member: &Arc<Member>) {
    let mut tasks: Vec<futures_util::future::BoxFuture<'static, ()>> = vec![
        Box::pin(expire_sessions(inner.clone(), member.clone())),
        Box::pin(follow_changes(inner.clone(), member.clone())),
        Box::pin(finish_endings(member.clone())),
        Box::pin(watch_quorum(member.clone())),
        Box::pin(catch_up(member.clone())),
        Box::pin(membership::tend(member.clone())),
        Box::pin(levels::tend(member.clone())),
        Box::pin(bounds::tend(member.clone(), inner.options.machine)),
        Box::pin(suspect::watch(member.clone())),
        Box::pin(beat_at_once(member.clone())),
        Box::pin(end_with_raft(member.clone())),
        Box::pin(room::watch(member.clone())),
        Box::pin(compaction::watch(member.clone(), inner.options.limits.snapshot_every_bytes)),
        Box::pin(bootstrap::announce(inner.clone(), member.clone())),
    ];
    for task in tasks.drain(..) {
        let stop = inner.stop.clone();
        inner.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = task => {}
            }
        });
    }
}

/// Ends the process where Raft has ended by itself, as it does when a store fails it. Such a node would
/// answer for ever that it does not serve, and whoever watches the process would take it for well.
async fn end_with_raft(member: Arc<Member>) {
    let mut metrics = member.raft.metrics();
    loop {
        let ended = metrics.borrow_and_update().running_state.clone().err();
        if let Some(why) = ended {
            // Stopped as asked; or halted, of which its owner is told.
            if !matches!(why, Fatal::Stopped) && member.state.halted().is_none() {
                fatal("Raft has ended by itself", &why);
            }
            return;
        }
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// Proposes the end of sessions whose deadline passed, while this node leads.
async fn expire_sessions(inner: Arc<Inner>, member: Arc<Member>) {
    loop {
        let due = member.sessions.due(|| member.role() == super::Role::Leader).await;
        for (session, seq) in due {
            let member = member.clone();
            let deadline = member.clock.now() + EXPIRE_WITHIN;
            inner.tasks.spawn(async move {
                let command = Command::ExpireSession { session, seq };
                let hindrance = || member.hindrance();
                let done = member.proposals.execute(command, None, deadline, hindrance).await;
                tracing::info!(%session, seq, ?done, "session ran out");
            });
        }
    }
}

/// While this node leads: proposes empty entries for as long as a session that has ended leaves
/// something, since every entry frees some of it.
async fn finish_endings(member: Arc<Member>) {
    let mut ending = member.state.ending();
    loop {
        if !*ending.borrow_and_update() {
            if ending.changed().await.is_err() {
                return;
            }
            continue;
        }
        if member.role() == super::Role::Leader {
            let deadline = member.clock.now() + EXPIRE_WITHIN;
            let hindrance = || member.hindrance();
            let done = member.proposals.execute(Command::Noop, None, deadline, hindrance).await;
            if done.is_ok() {
                continue;
            }
        }
        // Another one leads, and this one may come to.
        if matches!(tokio::time::timeout(ENDING_LOOK, ending.changed()).await, Ok(Err(_))) {
            return;
        }
    }
}

/// A leader knows that a majority follows it by the answers to its heartbeats, and the first one would
/// come with the next tick only. Nobody is served meanwhile, so it comes at once.
async fn beat_at_once(member: Arc<Member>) {
    let mut metrics = member.raft.server_metrics();
    let mut led = None;
    loop {
        let leads = {
            let now = metrics.borrow_and_update();
            (now.state == ServerState::Leader).then_some(now.vote.leader_id.term)
        };
        if leads.is_some() && leads != led && member.raft.trigger().heartbeat().await.is_err() {
            return;
        }
        led = leads;
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// Acts on changes of leader and membership.
async fn follow_changes(inner: Arc<Inner>, member: Arc<Member>) {
    let mut metrics = member.raft.server_metrics();
    let mut led = None;
    let mut seen = None;
    loop {
        let membership = member.membership();
        if seen.as_ref() != Some(&membership) {
            for (&id, peer) in membership.membership().nodes() {
                let known = member.peers.address(id);
                if id != member.id() && is_news(seen.as_deref(), id, peer, known.as_deref()) {
                    member.peers.note_address(id, &peer.address);
                }
            }
            seen = Some(membership);
        }
        let (leader, state) = {
            let now = metrics.borrow_watched();
            (now.current_leader, now.state)
        };
        if leader != led {
            tracing::info!(node_id = member.id(), ?leader, ?state, "leader changed");
            led = leader;
        }
        if state == ServerState::Leader {
            member.sessions.look_again();
        }
        let peers = member.known_peers();
        if let Ok(dir) = inner.dir()
            && let Ok(Err(error)) =
                crate::outside::off_thread(move || dir.remember_peers(peers)).await
        {
            tracing::warn!(%error, "the peers were not written down");
        }
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// Whether a membership says of a member's address what is not known yet. A member says itself where
/// it is, and what it said may be newer than a membership that only repeats itself. One that moves it
/// is news, however lately it was heard: it may have restarted elsewhere since, with a membership in
/// which *its* peers are not where they were, and then nobody finds it who does not take the word of
/// the one it told.
fn is_news(seen: Option<&StoredMembership>, id: NodeId, peer: &Peer, known: Option<&str>) -> bool {
    match seen.and_then(|seen| seen.membership().get_node(&id)) {
        Some(before) => before.address != peer.address,
        None => known.is_none(),
    }
}

/// Says why nothing can be committed.
async fn watch_quorum(member: Arc<Member>) {
    let mut missing_since = None;
    let mut said = None;
    loop {
        let now = member.clock.now();
        match member.hindrance() {
            Some(Unavailable::NoQuorum { reachable, voters }) => {
                let since = *missing_since.get_or_insert(now);
                let quiet = said.is_none_or(|at| now - at >= QUORUM_AGAIN);
                if now - since >= QUORUM_GRACE && quiet {
                    let unreachable = unreachable(&member);
                    tracing::warn!(
                        "no quorum {reachable}/{voters}: {unreachable} do not answer; start or \
                         reconnect them"
                    );
                    said = Some(now);
                }
            }
            _ => {
                if said.take().is_some() {
                    tracing::info!("quorum is back");
                }
                missing_since = None;
            }
        }
        tokio::time::sleep(QUORUM_LOOK).await;
    }
}

/// The voters that are not heard, by name and address.
fn unreachable(member: &Member) -> String {
    let membership = member.membership();
    let silent = membership.membership().voter_ids().filter(|id| {
        *id != member.id() && !member.peers.heard_within(*id, super::peers::REACHABLE)
    });
    let names: Vec<String> = silent
        .map(|id| member.peer(id).map_or_else(|| id.to_string(), |peer| peer.to_string()))
        .collect();
    if names.is_empty() { "some voters".to_owned() } else { names.join(", ") }
}

/// Marks the member as caught up once it has applied what its first leader had committed (SPEC K7).
async fn catch_up(member: Arc<Member>) {
    let mut metrics = member.raft.data_metrics();
    let mut target = None;
    loop {
        // Copied out: `leader` looks at these metrics too, and a second look under a first one locks
        // up with the writer that came between the two.
        let (committed, applied) = {
            let data = metrics.borrow_watched();
            (data.cluster_committed, data.last_applied)
        };
        let term = member.raft.server_metrics().borrow_watched().vote.leader_id.term;
        // What a leader committed in its own term is everything that was acknowledged before.
        if target.is_none()
            && member.leader() != Leader::Nobody
            && let Some(committed) = committed
            && committed.leader_id.term == term
        {
            target = Some(committed);
        }
        if target.is_some() && applied >= target {
            member.set_caught_up();
            return;
        }
        // The term may change without the log doing so.
        let changed = tokio::time::timeout(Duration::from_millis(100), metrics.changed()).await;
        if matches!(changed, Ok(Err(_))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use openraft::Membership;

    use super::*;

    fn at(address: &str) -> Peer {
        Peer { address: address.to_owned(), ..Peer::default() }
    }

    fn membership(second: &str) -> StoredMembership {
        let nodes = BTreeMap::from([(1, at("a:1")), (2, at(second))]);
        let membership = Membership::new(vec![BTreeSet::from([1])], nodes);
        StoredMembership::new(None, membership.unwrap())
    }

    #[test]
    fn k4_a_move_is_news_and_a_repeated_membership_is_not() {
        let (before, after) = (membership("b:1"), at("b:2"));
        // Heard a moment ago at its old place: the move is what counts.
        assert!(is_news(Some(&before), 2, &after, Some("b:1")));
        // It has said itself that it is elsewhere by now; this membership says what it said before.
        assert!(!is_news(Some(&before), 2, &at("b:1"), Some("b:3")));
        // After a start: a message may have come before the membership was looked at.
        assert!(!is_news(None, 2, &after, Some("b:3")));
        assert!(is_news(None, 2, &after, None));
        assert!(is_news(Some(&before), 3, &at("c:1"), None), "a new member");
    }
}
