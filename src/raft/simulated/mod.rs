//! What a simulated node has in the place of a machine: a network, a disk and a clock, all three
//! driven by a seed on one thread.
//!
//! The node code is the real one, down to the seams: requests leave it through
//! [`Place::send`] and come in through its own router, so that headers, secret, routes, limits and
//! bodies are what they are; its log is written to a [`Disk`], its small files and snapshots to a
//! real directory. Not run are sled, the tail file and their threads, sockets and HTTP's framing.

mod clock;
mod link;
mod network;
mod serve;

use std::sync::Arc;

use reqwest::header::{AUTHORIZATION, HeaderValue};

pub(crate) use super::log_store::simulated::Disk;
pub(crate) use clock::HostClock;
pub(crate) use network::Net;
pub(crate) use serve::serve;

use super::node::Node;
use super::way::Lost;
use super::{Role, Secret};
use crate::machine::{Batch, BatchReply, Effect};

/// What a simulation sees of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) term: u64,
    pub(crate) leads: bool,
    pub(crate) serves: bool,
    pub(crate) applied: u64,
    /// Of the machine.
    pub(crate) hash: Option<u64>,
}

/// Looks at a node from outside; at its machine too where `whole`.
pub(crate) fn look(node: &Node, whole: bool) -> Option<Look> {
    let member = node.inner.member().ok()?;
    let server = member.server();
    Some(Look {
        term: server.vote.leader_id.term,
        leads: member.role() == Role::Leader,
        serves: member.caught_up() && member.hindrance().is_none(),
        applied: member.data().last_applied.map_or(0, |at| at.index),
        hash: whole.then(|| member.state.read(|machine| machine.freeze().hash())),
    })
}

/// The place of one node in a simulation.
#[derive(Clone, Debug)]
pub struct Place {
    net: Arc<Net>,
    host: usize,
    disk: Arc<Disk>,
    bearer: HeaderValue,
}

impl Place {
    pub(crate) fn new(net: Arc<Net>, host: usize, disk: Arc<Disk>, secret: &Secret) -> Self {
        let bearer = HeaderValue::from_str(&secret.bearer())
            .expect("a checked secret is a valid header value");
        Self { net, host, disk, bearer }
    }

    pub(super) fn disk(&self) -> Arc<Disk> {
        self.disk.clone()
    }

    /// Sends a request to another node and returns once the head of its answer is there.
    pub(super) async fn send(
        &self,
        mut request: reqwest::Request,
    ) -> Result<reqwest::Response, Lost> {
        request.headers_mut().insert(AUTHORIZATION, self.bearer.clone());
        link::send(&self.net, self.host, request).await
    }

    pub(super) fn knock(&self, address: &str) -> bool {
        self.net.knock(self.host, address)
    }

    /// The node has applied an entry.
    pub(super) fn applied(
        &self,
        index: u64,
        batch: &Batch,
        reply: &BatchReply,
        effects: &[Effect],
    ) {
        self.net.applied(self.host, index, (batch, reply), effects);
    }

    /// The node begins from this state.
    pub(super) fn installed(&self) {
        self.net.installed(self.host);
    }
}
