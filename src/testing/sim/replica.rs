//! What runs on a simulated host, as its program sees it.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::clock::Clock;
use crate::coordinator::{CoordinatorOptions, RaftCoordinator};
use crate::outside::seeded;
use crate::provider::scripted::ScriptedProvider;
use crate::raft::Node;
use crate::raft::simulated::Net;
use crate::store::GroupStore;
use crate::types::{Prefix, ReplicaId};

/// The channels of a simulation: their users are the same people for all replicas.
pub(super) type Providers = Arc<Mutex<BTreeMap<String, ScriptedProvider>>>;

/// The channel of that id, as its users see it.
pub(super) fn channel(providers: &Providers, id: &str) -> ScriptedProvider {
    let mut providers = providers.lock();
    providers.entry(id.to_owned()).or_insert_with(|| ScriptedProvider::new(id)).clone()
}

/// A number below `below`, from the seed.
pub(super) fn random(below: u64) -> u64 {
    seeded::draw(|chance| rand::Rng::random_range(chance, 0..below.max(1))).unwrap_or_default()
}

/// One life of a replica: its node, and what a bot on it needs.
///
/// Everything a program makes of it belongs to this life. Keep none of it outside the program: a
/// process that crashed leaves nothing behind.
#[derive(Clone, Debug)]
pub struct Replica {
    number: usize,
    node: Node,
    clock: Arc<dyn Clock>,
    net: Arc<Net>,
    shared: Providers,
    own: Providers,
}

impl Replica {
    pub(super) fn new(
        number: usize,
        node: Node,
        clock: Arc<dyn Clock>,
        (net, shared): (&Arc<Net>, &Providers),
    ) -> Self {
        let (net, shared) = (net.clone(), shared.clone());
        Self { number, node, clock, net, shared, own: Arc::default() }
    }

    /// Which host, from 0 on.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Its node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The boot clock of its host.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Time since the beginning, which no host knows: for records of what happened when.
    pub fn elapsed(&self) -> std::time::Duration {
        self.net.now()
    }

    /// A number below `below`, from the seed.
    pub fn random(&self, below: u64) -> u64 {
        random(below)
    }

    /// Rows, checkpoints and locks.
    pub fn store(&self, prefix: &Prefix) -> GroupStore {
        GroupStore::new(self.node.as_group(), prefix.clone())
    }

    /// A coordinator named after the host, with this lease.
    pub fn coordinator(&self, prefix: &Prefix, lease: std::time::Duration) -> RaftCoordinator {
        let replica_id = Some(ReplicaId(format!("r{}", self.number)));
        let options = CoordinatorOptions { lease, replica_id };
        RaftCoordinator::new(self.node.as_group(), prefix.clone(), options)
    }

    /// A channel whose users speak to whichever replica is there: see
    /// [`Sim::user`](super::Sim::user).
    pub fn provider(&self, id: &str) -> ScriptedProvider {
        let mut own = self.own.lock();
        own.entry(id.to_owned()).or_insert_with(|| channel(&self.shared, id).replica()).clone()
    }
}
