//! Whether the leader's process is gone: what this node saw, what the others say.
//!
//! Problem: followers wait out a leader's lease and an election timeout before they elect another,
//! about half a second, although the kernel told them of a killed process within a millisecond: it
//! closed its sockets. But a socket that closed proves little. One link with a reject rule looks the
//! same, and an election that passes the lease of a *live* leader would then be fought over again and
//! again. Idea: a node that saw its stream to the leader end, and is refused a new one
//! ([`super::attend`]), only *suspects* the leader, and tells the other voters. Only when a majority of
//! the voters, the leader left out, suspect it, the fast election begins ([`super::campaign`]). A link
//! has two ends; a majority sees the death of a process.
//!
//! The parent that waited for the leader's process needs no majority: its report names the token of
//! that process, which the leader gave with its stream's hello.
//!
//! Invariants:
//! * A suspicion is of one committed vote, one leader in one term. It says nothing of the next.
//! * Silence is no suspicion: a frozen leader, and one whose packets are dropped, is left to the
//!   election timer.
//! * A suspicion that is not repeated for a second is forgotten; one that ends is not repeated.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use futures_util::future::{join_all, join3};
use openraft::async_runtime::WatchReceiver;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::member::Member;
use super::node::Inner;
use super::peers::Lane;
use super::server::{Answer, Asked, answer};
use super::types::{LogId, Vote};
use super::{attend, campaign};
use crate::clock::BootInstant;
use crate::types::{NodeId, ProcessToken};
use crate::watch;

/// For how many heartbeats a suspicion of another counts.
const FRESH_BEATS: u32 = 20;
/// After how many heartbeats a suspicion that stands is told again.
const AGAIN_BEATS: u32 = 5;

/// What a node says of a leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Claim {
    /// Nothing: it asks.
    Asks,
    /// It suspects that the leader's process is gone.
    Suspects,
    /// It was told so by the parent of that process, whose token this is.
    Dead(ProcessToken),
}

/// One voter to another, of the leader that has this vote.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Suspicion {
    /// The committed vote of the leader.
    pub(crate) of: Vote,
    /// What is said of it.
    pub(crate) claim: Claim,
    /// How far the log of whoever says it goes.
    pub(crate) last_log: Option<LogId>,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opinion {
    /// Whether the asked node suspects the same leader.
    pub(crate) suspects: bool,
    /// How far its log goes.
    pub(crate) last_log: Option<LogId>,
}

/// What is known of the death of leaders. Each fact carries the vote it is about.
#[derive(Debug, Default)]
struct Book {
    /// The process that has the vote, by its own word.
    process: Option<(Vote, ProcessToken)>,
    /// Whom this node suspects.
    own: Option<Vote>,
    /// Whose process is dead by its parent's word.
    certain: Option<Vote>,
    /// Whom the others suspect, and when they last said so.
    others: BTreeMap<NodeId, (Vote, BootInstant)>,
    /// How far the others' logs went while this vote was in effect, by their own word.
    logs: BTreeMap<NodeId, (Vote, Option<LogId>)>,
    /// The longest that another voter took for an answer since this one is suspected.
    slowest: Option<(Vote, Duration)>,
}

/// The suspicions of one node.
#[derive(Debug)]
pub(crate) struct Suspicions {
    // A plain mutex: held for a look or an insertion.
    book: Mutex<Book>,
    moved: watch::Sender<()>,
}

impl Default for Suspicions {
    fn default() -> Self {
        Self { book: Mutex::default(), moved: watch::channel(()).0 }
    }
}

impl Suspicions {
    fn change(&self, change: impl FnOnce(&mut Book)) {
        change(&mut self.book.lock());
        self.moved.send_replace(());
    }

    /// The leader has said which process it is. It is there: an earlier suspicion was none.
    pub(super) fn attended(&self, vote: Vote, process: ProcessToken) {
        self.change(|book| {
            book.process = Some((vote, process));
            book.own = None;
        });
    }

    /// This node saw what a death looks like; `true` where it had not before.
    pub(super) fn suspect(&self, vote: Vote) -> bool {
        let mut news = false;
        self.change(|book| news = book.own.replace(vote) != Some(vote));
        news
    }

    /// It does not look like a death any more.
    pub(super) fn withdraw(&self) {
        if self.book.lock().own.is_some() {
            self.change(|book| book.own = None);
        }
    }

    /// A parent has waited for this process. Where it led, nothing else has to be known.
    pub(crate) fn dead(&self, process: ProcessToken) {
        let led = match self.book.lock().process {
            Some((vote, token)) if token == process => vote,
            _ => return,
        };
        self.change(|book| book.certain = Some(led));
    }

    /// What this node says of a leader now.
    pub(super) fn claim(&self, of: Vote) -> Claim {
        let book = self.book.lock();
        match book.process {
            Some((vote, process)) if vote == of && book.certain == Some(of) => Claim::Dead(process),
            _ if book.own == Some(of) => Claim::Suspects,
            _ => Claim::Asks,
        }
    }

    /// Takes note of what another voter says.
    pub(super) fn heard(&self, from: NodeId, said: Suspicion, now: BootInstant) {
        self.book.lock().logs.insert(from, (said.of, said.last_log));
        match said.claim {
            Claim::Asks => {
                self.book.lock().others.remove(&from);
                return;
            }
            Claim::Suspects => {}
            Claim::Dead(process) => self.dead(process),
        }
        self.change(|book| {
            book.others.insert(from, (said.of, now));
        });
    }

    /// What another voter that suspects this leader last said of its log.
    pub(super) fn log_of(&self, peer: NodeId, of: Vote) -> Option<Option<LogId>> {
        let book = self.book.lock();
        let suspects = book.others.get(&peer).is_some_and(|(vote, _)| *vote == of);
        let said = book.logs.get(&peer).filter(|(vote, _)| suspects && *vote == of);
        said.map(|(_, log)| *log)
    }

    /// The longest that another voter took for an answer since this leader is suspected.
    pub(super) fn slowest(&self, of: Vote) -> Duration {
        let slowest = self.book.lock().slowest;
        slowest.filter(|(vote, _)| *vote == of).map_or(Duration::ZERO, |(_, took)| took)
    }

    fn answered_in(&self, of: Vote, took: Duration) {
        let before = self.slowest(of);
        self.book.lock().slowest = Some((of, before.max(took)));
    }

    /// Whether enough is known to elect another in the leader's place: that it is dead, or that a
    /// majority of the voters, itself left out, suspect it. `voters` are those of each
    /// configuration in effect.
    fn enough(
        &self,
        of: Vote,
        own: NodeId,
        voters: &[BTreeSet<NodeId>],
        since: BootInstant,
    ) -> bool {
        let book = self.book.lock();
        let suspects = |id: &NodeId| {
            *id != of.leader_id.voted_for
                && if *id == own {
                    book.own == Some(of)
                } else {
                    book.others.get(id).is_some_and(|(vote, at)| *vote == of && *at >= since)
                }
        };
        let most = |voters: &BTreeSet<NodeId>| {
            voters.iter().filter(|id| suspects(id)).count() > voters.len() / 2
        };
        book.certain == Some(of) || (!voters.is_empty() && voters.iter().all(most))
    }
}

/// `POST /raft/suspect`.
pub(super) async fn suspect(State(inner): State<Arc<Inner>>, body: Bytes) -> Answer {
    let asked = Asked::<Suspicion>::open(&inner, &body)?;
    let member = &asked.member;
    member.suspicions.heard(asked.from.from, asked.question, member.clock.now());
    let suspects = member.suspicions.claim(asked.question.of) != Claim::Asks;
    let opinion = Opinion { suspects, last_log: member.data().last_log };
    Ok(answer(member, &asked.from, &opinion))
}

/// Asks another voter what it knows of a leader, telling it what is known here.
pub(super) async fn ask(
    member: &Member,
    peer: NodeId,
    of: Vote,
    within: Duration,
) -> Option<Opinion> {
    let address = member.address_of(peer)?;
    let claim = member.suspicions.claim(of);
    let said = Suspicion { of, claim, last_log: member.data().last_log };
    let to = (peer, address.as_str());
    let asked = member.clock.now();
    let call = member.peers.call(Lane::Beat, to, "/raft/suspect", &said, within);
    match call.await {
        Ok(opinion) => {
            if claim != Claim::Asks {
                member.suspicions.answered_in(of, member.clock.now() - asked);
            }
            let opinion: Opinion = opinion;
            let claim = if opinion.suspects { Claim::Suspects } else { Claim::Asks };
            let said = Suspicion { of, claim, last_log: opinion.last_log };
            member.suspicions.heard(peer, said, member.clock.now());
            Some(opinion)
        }
        Err(error) => {
            tracing::debug!(peer, %error, "a voter does not say whether it suspects the leader");
            None
        }
    }
}

/// Follows one leader after another, and elects the next where one is gone, until Raft has stopped.
pub(crate) async fn watch(member: Arc<Member>) {
    while let Some(vote) = next_leader(&member).await {
        tokio::select! {
            biased;
            () = over(&member, vote) => {}
            never = stay(&member, vote) => match never {},
            () = enough(&member, vote) => {
                campaign::run(&member, vote).await;
                // One that may not campaign leaves it to the others, and does not come back to it.
                over(&member, vote).await;
            }
        }
    }
}

/// Who else votes: the voters but this node and the leader of this vote.
pub(super) fn others(member: &Member, of: Vote) -> Vec<NodeId> {
    let membership = member.membership();
    let voters = membership.membership().voter_ids();
    voters.filter(|id| *id != member.id() && *id != of.leader_id.voted_for).collect()
}

/// The vote of a leader other than this node, while this node votes.
async fn next_leader(member: &Member) -> Option<Vote> {
    let mut metrics = member.raft.server_metrics();
    loop {
        let follows = {
            let now = metrics.borrow_and_update();
            let votes = now.membership_config.membership().voter_ids().any(|id| id == member.id());
            votes && now.current_leader.is_some_and(|leader| leader != member.id())
        };
        if follows {
            let vote = member.vote().await?;
            if vote.committed && vote.leader_id.voted_for != member.id() {
                return Some(vote);
            }
        }
        metrics.changed().await.ok()?;
    }
}

/// Returns once the vote is no longer this one.
pub(super) async fn over(member: &Member, vote: Vote) {
    let mut metrics = member.raft.server_metrics();
    while member.vote().await == Some(vote) {
        // Marked as seen before the vote is looked at again.
        if metrics.changed().await.is_err() {
            return;
        }
    }
}

/// What a follower does while a leader leads.
async fn stay(member: &Member, vote: Vote) -> Infallible {
    let (never, ..) =
        join3(attend::follow(member, vote), tell(member, vote), greet(member, vote)).await;
    never
}

/// Voters that follow have no business with each other until their leader dies; what the first word
/// between two processes costs, a synced record of the other's boot, is paid here.
async fn greet(member: &Member, vote: Vote) {
    let asked = others(member, vote).into_iter().map(|peer| greet_one(member, peer, vote));
    join_all(asked).await;
}

async fn greet_one(member: &Member, peer: NodeId, vote: Vote) {
    let _ = ask(member, peer, vote, member.timing.append).await;
}

/// Tells the other voters what this node suspects, for as long as it does.
async fn tell(member: &Member, vote: Vote) -> Infallible {
    let mut moved = member.suspicions.moved.subscribe();
    loop {
        let claim = member.suspicions.claim(vote);
        if claim != Claim::Asks {
            let within = member.timing.election_min;
            let told = others(member, vote).into_iter().map(|peer| ask(member, peer, vote, within));
            join_all(told).await;
        }
        let again = tokio::time::sleep(member.timing.heartbeat * AGAIN_BEATS);
        let changed = async {
            while member.suspicions.claim(vote) == claim {
                // The sender lives as long as the member.
                let _ = moved.changed().await;
            }
        };
        tokio::select! {
            biased;
            () = changed => {}
            () = again, if claim != Claim::Asks => {}
        }
    }
}

/// Returns once there is reason enough for an election.
async fn enough(member: &Member, vote: Vote) {
    let mut moved = member.suspicions.moved.subscribe();
    loop {
        let membership = member.membership();
        let voters = membership.membership().get_joint_config();
        let fresh = member.timing.heartbeat * FRESH_BEATS;
        let since = member.clock.now().saturating_sub(fresh);
        if member.suspicions.enough(vote, member.id(), voters, since) {
            return;
        }
        // The sender lives as long as the member.
        let _ = moved.changed().await;
    }
}

#[cfg(test)]
mod tests {
    use openraft::vote::RaftLeaderId;

    use super::*;

    fn vote(term: u64, leader: NodeId) -> Vote {
        Vote { leader_id: RaftLeaderId::new(term, leader), committed: true }
    }

    fn at(ms: u64) -> BootInstant {
        BootInstant::from_boot(Duration::from_millis(ms))
    }

    fn said(of: Vote, claim: Claim) -> Suspicion {
        Suspicion { of, claim, last_log: None }
    }

    const SUSPECTS: Claim = Claim::Suspects;

    #[test]
    fn e6_only_a_majority_without_the_leader_is_enough() {
        let (of, five) = (vote(7, 1), [BTreeSet::from([1, 2, 3, 4, 5])]);
        let all = Suspicions::default();
        let enough = |all: &Suspicions| all.enough(of, 2, &five, at(0));
        assert!(all.suspect(of) && !all.suspect(of), "news once");
        all.heard(3, said(of, SUSPECTS), at(10));
        // The leader's own word counts for nothing, nor does what is said of another term.
        all.heard(1, said(of, SUSPECTS), at(10));
        all.heard(4, said(vote(6, 1), SUSPECTS), at(10));
        assert!(!enough(&all), "two of five");
        all.heard(4, said(of, SUSPECTS), at(10));
        assert!(enough(&all));
        assert!(!all.enough(of, 2, &five, at(11)), "what is not repeated is forgotten");
        // In a change of the membership it takes a majority of both.
        let joint = [five[0].clone(), BTreeSet::from([1, 5, 6])];
        assert!(!all.enough(of, 2, &joint, at(0)));
        all.heard(3, said(of, Claim::Asks), at(12));
        assert!(!enough(&all), "it was taken back");
        all.heard(5, said(of, SUSPECTS), at(12));
        assert!(enough(&all));
        all.withdraw();
        assert!(!enough(&all) && all.claim(of) == Claim::Asks);
        assert!(!Suspicions::default().enough(of, 2, &[], at(0)));
    }

    #[test]
    fn e6_a_report_counts_alone_where_it_names_the_process_that_leads() {
        let (of, three) = (vote(3, 1), [BTreeSet::from([1, 2, 3])]);
        let (leads, other) = (ProcessToken(1), ProcessToken(2));
        let all = Suspicions::default();
        all.dead(leads);
        assert!(!all.enough(of, 2, &three, at(0)), "nobody has said that it leads");
        all.attended(of, leads);
        all.dead(other);
        assert!(!all.enough(of, 2, &three, at(0)));
        all.dead(leads);
        assert!(all.enough(of, 2, &three, at(0)));
        assert_eq!(all.claim(of), Claim::Dead(leads));
        assert!(!all.enough(vote(4, 1), 2, &three, at(0)), "it led that term and no other");

        // Passed on, it counts for whom the same process attends.
        let told = Suspicions::default();
        told.attended(of, leads);
        told.heard(2, said(of, Claim::Dead(other)), at(1));
        assert!(!told.enough(of, 3, &three, at(0)));
        told.heard(2, said(of, Claim::Dead(leads)), at(1));
        assert!(told.enough(of, 3, &three, at(0)));
    }
}
