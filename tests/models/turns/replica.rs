//! One replica's process: what it remembers about the chat, and when it may do what.

use super::machine::{Holder, Machine, Msgs, Ticket, bit};
use super::{Change, Rules};
use crate::few::Few;

/// What a process knows of the last write of its last step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Answer {
    /// No write was made.
    #[default]
    None,
    /// It is under way.
    Awaited,
    /// It was decided, and the answer is under way.
    Decided(bool),
    Known(bool),
}

impl Answer {
    /// Rule 6: whether the write has a definite answer, or there is none to wait for.
    pub fn is_definite(self) -> bool {
        matches!(self, Self::None | Self::Known(true))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Replica {
    /// 0 while the process is down.
    pub inc: u8,
    /// The fence of the turn it has taken; 0 for none.
    pub held: u8,
    /// The last fence it proposed to release.
    pub released: u8,
    /// The message whose step runs; 0 for none.
    pub step: u8,
    pub write: Answer,
    /// Without durability: messages taken as local and not begun.
    pub local: Few<u8, 4>,
    /// Without durability: messages that wait for their own ticket.
    pub waiting: Msgs,
    /// With durability: messages whose step is finished.
    pub done: Msgs,
    /// A write that was checked and not proposed yet: its message and fence. Its step may be cut
    /// in between.
    pub asking: (u8, u8),
    /// Variants only: a foreign ticket was applied while the turn was held.
    pub called: bool,
    /// Variants only: a step was cut and its release is still to be proposed.
    pub cutting: bool,
}

impl Replica {
    pub fn new(inc: u8) -> Self {
        Self { inc, ..Self::default() }
    }

    /// The messages taken as local.
    pub fn local(&self) -> Msgs {
        self.local.iter().fold(0, |set, msg| set | bit(*msg))
    }

    /// Rule 3: the turn its own node says it has, if it may take it.
    pub fn may_take(&self, node: &Machine, rules: Rules) -> Option<Holder> {
        let Holder { inc, fence, msg } = node.holder;
        let mine = inc == self.inc && self.inc != 0 && self.held == 0;
        let fresh = fence > self.released || rules.change == Change::ReleasedTurnsTaken;
        // Rule 10: a ticket whose withdrawal was proposed is not waited for any more.
        let wanted = rules.durable
            || self.waiting & bit(msg) != 0
            || rules.change == Change::ReleasedTurnsTaken;
        (mine && fresh && wanted).then_some(node.holder)
    }

    /// The first ticket of the own node's queue that is not finished.
    pub fn next_ticket(&self, node: &Machine) -> Option<Ticket> {
        node.queue.iter().find(|ticket| self.done & bit(ticket.msg) == 0).copied()
    }

    /// Whether nothing of the message before is left to wait for.
    pub fn may_begin(&self, rules: Rules) -> bool {
        let definite = self.write.is_definite() || rules.change == Change::UnansweredWrites;
        self.held != 0 && self.step == 0 && !self.cutting && definite
    }

    /// With durability, rule 5: the message to handle next under the turn that is held.
    pub fn next_journaled(&self, node: &Machine) -> Option<u8> {
        let next = self.next_ticket(node)?;
        (next.owner == self.inc).then_some(next.msg)
    }

    /// Rules 7 and 8: whether the turn is called back and nothing local is left.
    pub fn must_release(&self, node: &Machine, rules: Rules) -> bool {
        if self.held == 0 || self.step != 0 || !self.local.is_empty() {
            return false;
        }
        if self.cutting || self.write == Answer::Known(false) {
            return true;
        }
        if rules.durable {
            return self.next_ticket(node).is_some_and(|next| next.owner != self.inc);
        }
        match rules.change {
            Change::CallBackIsAnEvent => {
                self.called || node.queue.iter().any(|ticket| ticket.owner == self.inc)
            }
            _ => !node.queue.is_empty(),
        }
    }

    /// Rule 4: whether a message that arrives is handled without a ticket. `unapplied`: an own
    /// command is not applied on the own node.
    pub fn takes_locally(&self, node: &Machine, unapplied: bool, rules: Rules) -> bool {
        if rules.durable || self.held == 0 || self.cutting {
            return false;
        }
        let own = node.queue.iter().any(|ticket| ticket.owner == self.inc);
        let foreign = node.queue.iter().any(|ticket| ticket.owner != self.inc);
        match rules.change {
            Change::LocalBeforeOwnTickets => !foreign,
            Change::LocalBeforeForeignTickets => !own && !unapplied,
            _ => !own && !foreign && !unapplied,
        }
    }
}
