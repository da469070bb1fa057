//! Which fault comes next: drawn from a seed and from nothing else, so that a seed is a schedule.
//!
//! Kinds come out of a bag that holds each once; when it is empty it is filled again. So a run that
//! is long enough for one bag has met every kind, and what came before what differs between seeds.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng, SeedableRng};

/// What can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    /// `kill -9` of the Raft leader.
    KillLeader,
    /// `kill -9` of another node.
    KillFollower,
    /// `kill -9` of the node that has just taken a message, the moment it has.
    KillHolder,
    /// `kill -9` of two: no majority until one is back.
    KillTwo,
    /// `kill -9` of all at one instant.
    KillAll,
    /// SIGSTOP for less than the lease.
    FreezeBriefly,
    /// SIGSTOP for longer than the lease.
    FreezeBeyondLease,
    /// SIGSTOP of the leader, for longer than an election.
    FreezeLeader,
    /// SIGTERM: a planned stop.
    Stop,
    /// Leadership is sent elsewhere.
    YieldLeader,
    /// Two nodes do not reach each other.
    Cut,
    /// One does not reach the other, which reaches it.
    CutOneWay,
    /// What one asks the other arrives, and the answers do not.
    AnswersLost,
    /// The leader reaches nobody and nobody reaches it.
    IsolateLeader,
    /// One link answers with TCP resets.
    Reset,
    /// What passes between two nodes takes long.
    Delay,
    /// Little passes between two nodes.
    Slow,
    /// A node loses its directory and comes back as a new member.
    Wipe,
    /// A member leaves, and a new one joins in its place.
    Leave,
    /// All processors are busy with something else.
    Busy,
    /// A node's disk is full, and has room again.
    FullDisk,
    /// A node's syncs are slow.
    SlowSync,
    /// A node's sync fails.
    FailedSync,
    /// A node's wall clock is an hour off, for one life of its process.
    ClockJump,
}

/// All of them.
pub(crate) const ALL: [Kind; 24] = [
    Kind::KillLeader,
    Kind::KillFollower,
    Kind::KillHolder,
    Kind::KillTwo,
    Kind::KillAll,
    Kind::FreezeBriefly,
    Kind::FreezeBeyondLease,
    Kind::FreezeLeader,
    Kind::Stop,
    Kind::YieldLeader,
    Kind::Cut,
    Kind::CutOneWay,
    Kind::AnswersLost,
    Kind::IsolateLeader,
    Kind::Reset,
    Kind::Delay,
    Kind::Slow,
    Kind::Wipe,
    Kind::Leave,
    Kind::Busy,
    Kind::FullDisk,
    Kind::SlowSync,
    Kind::FailedSync,
    Kind::ClockJump,
];

/// One fault. Nodes are drawn as numbers; what they mean (the leader, another than it) is settled
/// when it strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// What.
    pub(crate) kind: Kind,
    /// Which node, as far as the kind leaves it open.
    pub(crate) node: usize,
    /// Which of the two others, where two are concerned.
    pub(crate) other: usize,
    /// How long it lasts, where the kind leaves it open.
    pub(crate) lasts: Duration,
    /// How long all is well before it.
    pub(crate) calm: Duration,
}

/// The faults of a seed, without an end.
pub(crate) struct Plan {
    random: StdRng,
    kinds: Vec<Kind>,
    bag: Vec<Kind>,
}

impl Plan {
    /// Of these kinds.
    pub(crate) fn new(seed: u64, kinds: &[Kind]) -> Self {
        let (kinds, bag) = (kinds.to_vec(), Vec::new());
        Self { random: StdRng::seed_from_u64(seed), kinds, bag }
    }
}

impl Iterator for Plan {
    type Item = Fault;

    fn next(&mut self) -> Option<Fault> {
        if self.bag.is_empty() {
            self.bag = self.kinds.clone();
            self.bag.shuffle(&mut self.random);
        }
        let mut ms = |range| Duration::from_millis(self.random.random_range(range));
        let (lasts, calm) = (ms(600..2_400), ms(200..900));
        let (node, other) = (self.random.random_range(0..3), self.random.random_range(0..2));
        self.bag.pop().map(|kind| Fault { kind, node, other, lasts, calm })
    }
}
