//! What the process says of itself to `/readyz` and `/metrics` (SPEC K7).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::bot::Bot;
use crate::http::cluster::Probe;
use crate::http::metrics::{self, Text};
use crate::raft::{Node, Role};

/// The node's health, and the bot's.
pub(super) struct Health {
    node: Node,
    // Set once, read by every probe.
    bot_ready: AtomicBool,
    // Set once: the listener that measures runs before there is a bot.
    bot: OnceLock<Bot>,
}

impl Health {
    pub(super) fn new(node: Node) -> Self {
        Self { node, bot_ready: AtomicBool::new(false), bot: OnceLock::new() }
    }

    /// There is a bot, whose figures are published from now on.
    pub(super) fn watch(&self, bot: Bot) {
        // It is set by one caller, once.
        let _ = self.bot.set(bot);
    }

    /// The bot has its session.
    pub(super) fn bot_is_ready(&self) {
        self.bot_ready.store(true, Ordering::Release);
    }
}

impl Probe for Health {
    fn ready(&self) -> Result<(), String> {
        let node = self.node.readiness();
        if !node.quorum {
            return Err("no leader with a majority is heard".to_owned());
        }
        if !node.caught_up {
            return Err("it catches up with the group".to_owned());
        }
        if !self.bot_ready.load(Ordering::Acquire) {
            return Err("the bot has no session yet".to_owned());
        }
        Ok(())
    }

    fn measure(&self, text: &mut Text) {
        let status = self.node.status();
        text.gauge("botmesh_raft_term", "The Raft term", status.term);
        text.gauge("botmesh_raft_applied", "The last applied log index", status.applied);
        text.gauge("botmesh_raft_committed", "The last committed log index", status.committed);
        let leads = u64::from(status.role == Role::Leader);
        text.gauge("botmesh_raft_leader", "1 where this node leads", leads);
        text.gauge("botmesh_members", "Members of the group", status.nodes.len() as u64);
        let reachable = status.nodes.iter().filter(|node| node.reachable).count();
        text.gauge("botmesh_members_reachable", "Members heard lately", reachable as u64);
        let waiting = self.node.commands_waiting() as u64;
        text.gauge("botmesh_commands_waiting", "Commands waiting for a batch", waiting);
        let (scrubs, faults) = self.node.scrubbed();
        text.counter("botmesh_scrubs_total", "Readings of all state on disk", scrubs);
        let help = "Readings that found something else than was written; it was written anew";
        text.counter("botmesh_scrub_faults_total", help, faults);
        if let Some(bot) = self.bot.get() {
            metrics::write_bot(text, bot);
        }
        text.gauge("botmesh_ready", "1 where /readyz says 200", u64::from(self.ready().is_ok()));
    }
}
