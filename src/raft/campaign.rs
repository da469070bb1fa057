//! The election after a leader's death: fast, and in order.
//!
//! Problem: survivors that all campaign at once split the votes, and one that has less log than
//! another wastes a term; either stalls for a lease now and then. Idea: they take turns by what would
//! win. Each knows how far the others' logs go, from the exchange of suspicions or by asking, and waits
//! one step for every one that is ahead of it. Who is first has won before the second begins. Where
//! nobody has (the first may have died too, or be paused), they ask again, rank again and repeat.
//!
//! A step has to be longer than a vote takes, or the order means nothing. What the exchange of
//! suspicions took tells how slow the others are just now; steps are at least three times that, and
//! each attempt is slower than the one before.
//!
//! The election itself is openraft's leader transfer, as if the dead leader had named this node: its
//! voters grant such a vote although the lease of the old leader runs. That is why only
//! [`super::suspect`] may start it, and why no read trusts a leader's lease (see
//! [`super::barrier`]). What makes it safe is Raft's own: one vote a term, a log no shorter than the
//! voter's.

use std::time::Duration;

use futures_util::future::join_all;
use openraft::async_runtime::WatchReceiver;
use openraft::raft::TransferLeaderRequest;

use super::member::Member;
use super::suspect;
use super::types::{LogId, Vote};
use crate::outside;
use crate::types::NodeId;

/// After how many heartbeats this gives up; the election timer goes on then.
const GIVE_UP_BEATS: u32 = 20;

/// How long each part takes, from the beat of the group.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// A peer that has not said its log by then, nor before, counts as behind.
    ask: Duration,
    /// What each peer that is ahead is given.
    step: Duration,
    /// How long a campaign may take before it is repeated, at least …
    again_min: Duration,
    /// … and at most: random between the two.
    again_max: Duration,
}

/// How often the pace is halved at the most.
const HALVED_MAX: u32 = 3;

impl Pace {
    fn of(heartbeat: Duration) -> Self {
        Self {
            ask: heartbeat / 10,
            step: heartbeat * 3 / 10,
            again_min: heartbeat * 2 / 5,
            again_max: heartbeat * 4 / 5,
        }
    }

    /// The pace of a later attempt.
    fn at(self, attempt: u32, slowest: Duration) -> Self {
        let slower = 1 << attempt.min(HALVED_MAX);
        let vote = (slowest * 3).min(self.again_max * 4);
        Self {
            ask: self.ask * slower,
            step: (self.step * slower).max(vote),
            again_min: (self.again_min * slower).max(vote),
            again_max: (self.again_max * slower).max(vote * 2),
        }
    }
}

/// How many come before this node: those with a longer log, and of equal ones those of a lower id.
fn ahead(own: (NodeId, Option<LogId>), others: &[(NodeId, Option<LogId>)]) -> u32 {
    let before =
        |(id, log): &&(NodeId, Option<LogId>)| *log > own.1 || *log == own.1 && *id < own.0;
    others.iter().filter(before).count() as u32
}

/// Elects another leader in the place of the one that has this vote.
pub(super) async fn run(member: &Member, dead: Vote) {
    if member.room.is_short() {
        return; // It would have nowhere to write what it would lead.
    }
    let first = Pace::of(member.timing.heartbeat);
    let mut attempt = 0;
    let began = member.clock.now();
    let mut from = dead;
    while member.clock.now() - began < member.timing.heartbeat * GIVE_UP_BEATS {
        let pace = first.at(attempt, member.suspicions.slowest(dead));
        // The own lease of the dead leader ends here.
        transfer(member, from, dead.leader_id.voted_for, pace.again_max).await;
        let before = rank(member, dead, attempt > 0, pace).await;
        attempt += 1;
        tracing::info!(
            dead = dead.leader_id.voted_for,
            after_term = from.leader_id.term,
            before,
            "electing another leader"
        );
        if elected(member, dead, pace.step * before).await {
            return;
        }
        let Some(now) = member.vote().await else { return };
        if now == from {
            transfer(member, from, member.id(), pace.again_max).await;
        }
        let within = outside::between(pace.again_min, pace.again_max);
        if elected(member, dead, within).await {
            return;
        }
        // Whoever campaigned has not won: the vote it was given is where the next one starts.
        let Some(now) = member.vote().await else { return };
        from = now;
    }
    tracing::warn!("no leader was elected at once; the election timer goes on");
}

/// How many come before this node. Who suspected the leader said how far its log goes, and gets no more
/// from a dead one; the others are asked, and all of them once an attempt has failed.
async fn rank(member: &Member, dead: Vote, all: bool, pace: Pace) -> u32 {
    let asked = suspect::others(member, dead).into_iter().map(|peer| async move {
        let said = member.suspicions.log_of(peer, dead);
        if let Some(log) = said.filter(|_| !all) {
            return (peer, log);
        }
        let opinion = suspect::ask(member, peer, dead, pace.ask).await;
        (peer, opinion.map_or(said.flatten(), |opinion| opinion.last_log))
    });
    let logs = join_all(asked).await;
    ahead((member.id(), member.data().last_log), &logs)
}

/// As if the leader that has this vote had handed leadership to `to`.
async fn transfer(member: &Member, from: Vote, to: NodeId, within: Duration) {
    let request = TransferLeaderRequest::new(from, to, None);
    match tokio::time::timeout(within, member.raft.handle_transfer_leader(request)).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::debug!(%error, "not transferred"),
        Ok(Err(error)) => tracing::debug!(%error, "not transferred"),
        Err(_) => tracing::debug!("the vote is not on disk yet"),
    }
}

/// Waits for another leader than the dead one.
async fn elected(member: &Member, dead: Vote, within: Duration) -> bool {
    let mut metrics = member.raft.server_metrics();
    let leader = async {
        loop {
            if metrics.borrow_and_update().current_leader.is_some()
                && member.vote().await.is_none_or(|vote| vote.committed && vote != dead)
            {
                return;
            }
            if metrics.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(within, leader).await.is_ok()
}

#[cfg(test)]
mod tests {
    use openraft::vote::RaftLeaderId;

    use super::*;

    fn log(term: u64, index: u64) -> Option<LogId> {
        let leader: openraft::impls::leader_id_std::LeaderId<u64, u64> = RaftLeaderId::new(term, 1);
        Some(LogId::new(leader.to_committed(), index))
    }

    #[test]
    fn case_r26_survivors_take_turns_by_their_logs() {
        let others = [(1, log(2, 9)), (3, log(1, 50)), (4, None), (5, log(2, 8))];
        assert_eq!(ahead((2, log(2, 8)), &others), 1, "a later term is longer than many entries");
        assert_eq!(ahead((2, log(2, 9)), &others), 1, "the lower id goes first");
        assert_eq!(ahead((6, log(2, 8)), &others), 2);
        assert_eq!(ahead((2, log(3, 1)), &others), 0);
        assert_eq!(ahead((2, None), &others), 3, "whoever is silent is not waited for");
        // Every two of them agree on who goes first.
        for one in others {
            for other in others.into_iter().filter(|other| other.0 != one.0) {
                assert_eq!(ahead(one, &[other]) + ahead(other, &[one]), 1);
            }
        }
    }

    #[test]
    fn the_pace_is_that_of_the_recipe_at_the_default_beat() {
        let pace = Pace::of(Duration::from_millis(50));
        let ms = Duration::from_millis;
        assert_eq!((pace.ask, pace.step), (ms(5), ms(15)));
        assert_eq!((pace.again_min, pace.again_max), (ms(20), ms(40)));
        let step = |attempt, slowest| pace.at(attempt, ms(slowest)).step;
        assert_eq!((step(0, 1), step(1, 1), step(9, 1)), (ms(15), ms(30), ms(120)));
        assert_eq!((step(0, 20), step(0, 5_000)), (ms(60), ms(160)), "slow voters, and hung ones");
    }
}
