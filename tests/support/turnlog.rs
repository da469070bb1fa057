//! The turn log: what every replica records of the turns it held, and what must be true of it.
//!
//! For each chat: no two turns overlap, fences only grow, and turns come in the order of their
//! tickets. It needs no search, so it serves where a history is too long for the checker.

use std::collections::BTreeMap;

/// One turn as its holder saw it.
#[derive(Clone, Debug)]
pub struct Held {
    /// The chat.
    pub chat: String,
    /// Its place in the chat's queue.
    pub ticket: u64,
    /// The grant's fence.
    pub fence: u64,
    /// After the grant was seen, ns on one monotonic clock.
    pub start: u64,
    /// Before the release was sent, ns.
    pub end: u64,
}

/// What is wrong with a turn log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Two turns of one chat at one time.
    Overlap {
        /// The chat.
        chat: String,
        /// Fence of the earlier one.
        first: u64,
        /// Fence of the later one.
        second: u64,
    },
    /// A later turn has a fence that is not greater.
    FenceWentBack {
        /// The chat.
        chat: String,
        /// Fence of the earlier turn.
        before: u64,
        /// Fence of the later one.
        after: u64,
    },
    /// A later turn has an earlier ticket, or the same.
    OutOfOrder {
        /// The chat.
        chat: String,
        /// Ticket of the earlier turn.
        before: u64,
        /// Ticket of the later one.
        after: u64,
    },
}

/// Everything that is wrong with these turns, in order of time.
pub fn faults(log: &[Held]) -> Vec<Fault> {
    let mut chats: BTreeMap<&str, Vec<&Held>> = BTreeMap::new();
    for held in log {
        chats.entry(&held.chat).or_default().push(held);
    }
    let mut faults = Vec::new();
    for (chat, mut turns) in chats {
        turns.sort_by_key(|held| (held.start, held.end));
        for pair in turns.windows(2) {
            let [before, after] = pair else { continue };
            let chat = chat.to_owned();
            if after.start < before.end {
                let (first, second) = (before.fence, after.fence);
                faults.push(Fault::Overlap { chat: chat.clone(), first, second });
            }
            if after.fence <= before.fence {
                let (before, after) = (before.fence, after.fence);
                faults.push(Fault::FenceWentBack { chat: chat.clone(), before, after });
            }
            if after.ticket <= before.ticket {
                let (before, after) = (before.ticket, after.ticket);
                faults.push(Fault::OutOfOrder { chat, before, after });
            }
        }
    }
    faults
}
