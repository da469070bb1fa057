//! Which commands the programs of a group understand, and who holds it back (SPEC M5, case r19).
//!
//! Problem: the nodes of a group are upgraded one after another. A command that an older program does
//! not know would stop it, with its vote. Idea: every request and answer between nodes says, in an
//! HTTP header that older programs pass over, what *level* of commands its program knows. The leader
//! raises the group's agreed level (see [`crate::machine`]) once every voter has said that it knows
//! more. Where one holds the group back, the leader says which, so that any node can name it.
//!
//! Invariants:
//! * A voter that has said nothing knows the lowest level. What a process said is forgotten when
//!   another answers in its place: whoever comes back may have come back with an older program.
//! * The level is raised under [`Member::change`], over the voters of the membership in effect, both
//!   halves of a joint one; and no learner becomes a voter that is below it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::http::HeaderValue;
use openraft::async_runtime::WatchReceiver;
use parking_lot::Mutex;
use uuid::Uuid;

use super::Role;
use super::member::{Leader, Member};
use super::wire::Header;
use crate::clock::BootInstant;
use crate::group::Unavailable;
use crate::machine::{Command, LEVEL_LOWEST};
use crate::types::NodeId;

/// Where a level is announced: `OWN`, or `OWN NODE=LEVEL` with the voter that holds the group back.
pub(crate) const HEADER: &str = "botmesh-level";
/// How often a leader whose group is below its own level looks whether it may be raised.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long a voter may say nothing before it is taken for one that holds the group back, and how
/// long a command above the level waits for it to be raised where nobody is known to.
const SILENT_MAX: Duration = Duration::from_secs(4);
/// How long raising the level may take before it is tried anew.
const RAISE_WITHIN: Duration = Duration::from_secs(2);

/// A voter that holds the group back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lag {
    pub(crate) node: NodeId,
    /// What it knows.
    pub(crate) level: u32,
}

/// What is known of levels. Plain mutexes: held for a map access.
#[derive(Debug)]
pub(crate) struct Levels {
    /// What this node's program knows.
    pub(crate) own: u32,
    /// What each peer's process said.
    said: Mutex<HashMap<NodeId, (Uuid, u32)>>,
    /// Who holds the group back: this node's own judgement where it leads, else the leader's.
    lag: Mutex<Option<Lag>>,
    /// The agreed level, as far as it was looked up.
    agreed: AtomicU32,
}

/// The level an announcement names.
pub(crate) fn announced(said: &HeaderValue) -> Option<u32> {
    said.to_str().ok()?.split(' ').next()?.parse().ok()
}

/// The voter an announcement names.
fn lag_of(said: &HeaderValue) -> Option<Lag> {
    let (node, level) = said.to_str().ok()?.split_once(' ')?.1.split_once('=')?;
    Some(Lag { node: node.parse().ok()?, level: level.parse().ok()? })
}

impl Levels {
    pub(crate) fn new(own: u32) -> Self {
        Self {
            own,
            said: Mutex::default(),
            lag: Mutex::new(None),
            agreed: AtomicU32::new(LEVEL_LOWEST),
        }
    }

    /// What this node says with each message.
    pub(crate) fn announcement(&self) -> HeaderValue {
        match self.lag() {
            None => HeaderValue::from(self.own),
            Some(Lag { node, level }) => {
                HeaderValue::try_from(format!("{} {node}={level}", self.own))
                    .expect("digits are valid in a header")
            }
        }
    }

    /// A process of this peer was met: what another process of it said counts no longer.
    pub(crate) fn met(&self, peer: NodeId, nonce: Uuid) {
        let mut said = self.said.lock();
        if said.get(&peer).is_some_and(|(of, _)| *of != nonce) {
            said.remove(&peer);
        }
    }

    /// A process of this peer sent a message with this announcement, or without one.
    pub(crate) fn heard(&self, peer: NodeId, nonce: Uuid, said: Option<&HeaderValue>) {
        match said.and_then(announced) {
            Some(level) => drop(self.said.lock().insert(peer, (nonce, level))),
            None => drop(self.said.lock().remove(&peer)),
        }
    }

    /// A leader sent entries or a heartbeat.
    pub(crate) fn led(&self, from: &Header, said: Option<&HeaderValue>) {
        self.heard(from.from, from.nonce, said);
        self.hold_back(said.and_then(lag_of));
    }

    /// What this peer's process said, if anything.
    pub(crate) fn of(&self, peer: NodeId) -> Option<u32> {
        self.said.lock().get(&peer).map(|(_, level)| *level)
    }

    /// Who holds the group back, as far as this node knows.
    fn lag(&self) -> Option<Lag> {
        *self.lag.lock()
    }

    fn hold_back(&self, lag: Option<Lag>) {
        *self.lag.lock() = lag;
    }

    /// The voter that knows least.
    fn least(&self, own: NodeId, voters: impl Iterator<Item = NodeId>) -> Option<Lag> {
        let level = |id| match id == own {
            true => self.own,
            false => self.of(id).unwrap_or(LEVEL_LOWEST),
        };
        voters.map(|node| Lag { node, level: level(node) }).min_by_key(|lag| (lag.level, lag.node))
    }
}

impl Member {
    /// The agreed level, as of what this node has applied.
    pub(crate) fn command_level(&self) -> u32 {
        let levels = &self.peers.levels;
        let known = levels.agreed.load(Ordering::Relaxed);
        if known >= levels.own {
            // It never falls, and nothing here asks for more.
            return known;
        }
        let agreed = self.state.read(crate::machine::Machine::level);
        levels.agreed.fetch_max(agreed, Ordering::Relaxed);
        agreed
    }

    /// Returns once all voters understand a command, or why it cannot be proposed. Nothing is waited
    /// for but a level that is about to be raised: after a start, before all voters were heard.
    pub(crate) async fn is_understood(
        &self,
        command: &Command,
        deadline: BootInstant,
    ) -> Result<(), Unavailable> {
        let needs = command.level();
        if needs <= LEVEL_LOWEST || needs <= self.command_level() {
            return Ok(());
        }
        let own = self.peers.levels.own;
        if own < needs {
            return Err(Unavailable::TooNew { needs, node: self.id(), knows: own });
        }
        let mut applied = self.state.applied();
        let mut led_since = None;
        loop {
            if needs <= self.command_level() {
                return Ok(());
            }
            if let Some(lasts) = self.proposals.stopped().or_else(|| self.lasting_hindrance()) {
                return Err(lasts);
            }
            let now = self.clock.now();
            let lag = self.peers.levels.lag().filter(|lag| lag.level < needs);
            let leader = match self.leader() {
                Leader::Here => Some(self.id()),
                Leader::At(id, _) => Some(id),
                Leader::Nobody => None,
            };
            if let Some(leader) = leader {
                // A leader that neither raises the level nor says why not knows no higher one.
                let waited = now - *led_since.get_or_insert(now) >= SILENT_MAX || now >= deadline;
                let levels = &self.peers.levels;
                // Another leader was heard, so one of which no level is known has announced none.
                let leads = match leader == self.id() {
                    true => Some(levels.own),
                    false => Some(levels.of(leader).unwrap_or(LEVEL_LOWEST)),
                };
                let level = leads.unwrap_or(LEVEL_LOWEST);
                let below = waited || leads.is_some_and(|leads| leads < needs);
                if let Some(Lag { node, level }) =
                    lag.or(below.then_some(Lag { node: leader, level }))
                {
                    return Err(Unavailable::TooNew { needs, node, knows: level });
                }
            } else if now >= deadline {
                return Err(self.hindrance().unwrap_or_else(|| self.no_quorum()));
            }
            let _ = tokio::time::timeout(LOOK_EVERY, applied.changed()).await;
        }
    }
}

/// While this node leads: raises the agreed level to what every voter knows, or says who does not.
pub(crate) async fn tend(member: Arc<Member>) {
    let levels = &member.peers.levels;
    let mut metrics = member.raft.server_metrics();
    let mut held: Option<(Lag, BootInstant)> = None;
    let mut said = None;
    loop {
        let leads = member.role() == Role::Leader;
        let agreed = member.command_level();
        if !leads || agreed >= levels.own {
            if leads {
                levels.hold_back(None);
            }
            held = None;
            // Leading may begin without a change that is seen here, so this looks again by itself.
            let changed = tokio::time::timeout(Duration::from_secs(1), metrics.changed()).await;
            if matches!(changed, Ok(Err(_))) {
                return;
            }
            continue;
        }
        let membership = member.membership();
        let least = levels.least(member.id(), membership.membership().voter_ids());
        if least.is_some_and(|least| least.level > agreed) {
            held = None;
            levels.hold_back(None);
            raise(&member).await;
        } else if let Some(least) = least {
            let now = member.clock.now();
            if held.is_none_or(|(before, _)| before != least) {
                held = Some((least, now));
            }
            let silent = levels.of(least.node).is_none() && least.node != member.id();
            let waits = held.is_some_and(|(_, since)| silent && now - since < SILENT_MAX);
            levels.hold_back((!waits).then_some(least));
            if !waits && said != Some(least) {
                said = Some(least);
                tracing::warn!(
                    node = least.node,
                    "commands above level {agreed} are refused: node {} has announced level {}, \
                     this one knows {}; start the newer version there too",
                    least.node,
                    least.level,
                    levels.own
                );
            }
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Raises the level as far as every voter goes.
async fn raise(member: &Member) {
    let _one_at_a_time = member.change.lock().await;
    // Another change may have been under way.
    let membership = member.membership();
    let least = member.peers.levels.least(member.id(), membership.membership().voter_ids());
    let Some(level) = least.map(|least| least.level) else { return };
    if level <= member.command_level() {
        return;
    }
    let deadline = member.clock.now() + RAISE_WITHIN;
    let command = Command::RaiseLevel { level };
    match member.proposals.execute(command, None, deadline, || member.hindrance()).await {
        Ok(_) => tracing::info!(level, "the group uses commands up to this level from now on"),
        Err(error) => tracing::debug!(level, %error, "the level is not raised yet"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Uuid = Uuid::from_u128(1);
    const TWO: Uuid = Uuid::from_u128(2);

    fn say(text: &str) -> Option<HeaderValue> {
        Some(HeaderValue::from_str(text).unwrap())
    }

    #[test]
    fn m5_who_has_said_nothing_knows_the_lowest_level() {
        let levels = Levels::new(4);
        let least = || levels.least(1, [1, 2, 3].into_iter()).unwrap();
        assert_eq!(least(), Lag { node: 2, level: LEVEL_LOWEST });
        levels.heard(2, ONE, say("4").as_ref());
        assert_eq!(least(), Lag { node: 3, level: LEVEL_LOWEST });
        levels.heard(3, ONE, say("3").as_ref());
        assert_eq!(least(), Lag { node: 3, level: 3 });
        levels.heard(3, ONE, say("4 9=1").as_ref());
        assert_eq!(least().level, 4);
        for nothing in [None, say("x"), say("")] {
            levels.heard(3, ONE, say("4").as_ref());
            levels.heard(3, ONE, nothing.as_ref());
            assert_eq!(levels.of(3), None, "{nothing:?}");
        }
    }

    #[test]
    fn m5_what_a_process_said_is_not_said_by_the_next() {
        let levels = Levels::new(4);
        levels.heard(2, ONE, say("4").as_ref());
        levels.met(2, ONE);
        assert_eq!(levels.of(2), Some(4));
        levels.met(2, TWO);
        assert_eq!(levels.of(2), None);
    }

    #[test]
    fn m5_an_announcement_names_who_holds_the_group_back() {
        let levels = Levels::new(4);
        assert_eq!(levels.announcement(), "4");
        levels.hold_back(Some(Lag { node: 17, level: 2 }));
        let said = levels.announcement();
        assert_eq!(said, "4 17=2");
        assert_eq!(announced(&said), Some(4));
        assert_eq!(lag_of(&said), Some(Lag { node: 17, level: 2 }));
    }
}
