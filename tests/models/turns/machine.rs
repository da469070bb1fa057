//! What the log decides about one chat: the part of `src/machine` that the turn protocol rests on.
//!
//! The committed state and each node's own are values of this type; a node's is the committed one
//! of some time ago.

use super::Change;
use crate::few::Few;

/// A set of messages, one bit each.
pub type Msgs = u8;

pub fn bit(msg: u8) -> Msgs {
    1 << msg
}

/// Messages of a set, in order.
pub fn each(set: Msgs) -> impl Iterator<Item = u8> {
    (0..8).filter(move |msg| set & bit(*msg) != 0)
}

/// Incarnations that can be: 1 and 2 from the beginning, 3 is what comes back.
pub const INCARNATIONS: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Session {
    #[default]
    Unknown,
    Live,
    Dead,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Ticket {
    pub msg: u8,
    /// Nobody's where 0.
    pub owner: u8,
}

/// Who has the turn: nobody where `inc` is 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Holder {
    pub inc: u8,
    pub fence: u8,
    /// Without durability: whose ticket it came by.
    pub msg: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Command {
    #[default]
    Nothing,
    Open,
    /// The end of the session: a certain death, or an expiry after the holder gave up.
    Dead,
    /// Without durability: a place in the queue.
    Ticket {
        msg: u8,
    },
    /// With durability: journal the message and take its ticket.
    Admit {
        msg: u8,
    },
    /// A write of the step of `msg`; with durability also its acknowledgement. `late`: asked for
    /// after the step was cut.
    Write {
        fence: u8,
        msg: u8,
        late: bool,
    },
    Release {
        fence: u8,
    },
    /// Without durability: a ticket is given back unused.
    Withdraw {
        msg: u8,
    },
}

/// A command of an incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Entry {
    pub inc: u8,
    pub command: Command,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Machine {
    pub sessions: [Session; INCARNATIONS],
    pub fence: u8,
    pub holder: Holder,
    /// Tickets that wait. With durability a ticket stays here until it is acknowledged; without,
    /// until it is granted.
    pub queue: Few<Ticket, 5>,
    /// With durability: what was ever journaled, and what of it is acknowledged.
    pub journaled: Msgs,
    pub acked: Msgs,
    /// Where ends go on: the dead session that still has what it had.
    pub ending: u8,
}

/// The rules the machine goes by.
#[derive(Clone, Copy)]
pub struct Rules {
    pub durable: bool,
    pub change: Change,
}

impl Machine {
    pub fn is_live(&self, inc: u8) -> bool {
        self.sessions[usize::from(inc)] == Session::Live
    }

    pub fn queued(&self) -> Msgs {
        self.queue.iter().fold(0, |set, ticket| set | bit(ticket.msg))
    }

    /// Whether this incarnation holds the turn under exactly this fence.
    pub fn is_held_by(&self, inc: u8, fence: u8) -> bool {
        self.holder.inc == inc && self.holder.fence == fence
    }

    /// Applies an entry. Answers whether it was accepted.
    pub fn apply(&mut self, Entry { inc, command }: Entry, rules: Rules) -> bool {
        // Whatever is asked of the chat finds it as if the dead had left it with their end.
        let ending = std::mem::take(&mut self.ending);
        if ending != 0 {
            self.free(ending, rules);
            self.grant(rules);
        }
        let accepted = match command {
            Command::Open => self.open(inc, rules),
            Command::Dead => self.end(inc, rules),
            _ if !self.is_live(inc) && rules.change != Change::TheDeadAreHeard => false,
            Command::Nothing => false,
            Command::Ticket { msg } => {
                self.queue.push(Ticket { msg, owner: inc });
                true
            }
            Command::Admit { msg } => {
                let fresh = self.journaled & bit(msg) == 0;
                if fresh {
                    self.journaled |= bit(msg);
                    self.queue.push(Ticket { msg, owner: inc });
                }
                fresh
            }
            Command::Write { fence, msg, .. } => self.write(inc, fence, msg, rules),
            Command::Release { fence } => {
                let held = self.is_held_by(inc, fence);
                if held {
                    self.holder = Holder::default();
                }
                held
            }
            Command::Withdraw { msg } => self.withdraw(inc, msg, rules),
        };
        // Rule 2: the apply that frees a turn or adds a ticket also grants.
        let frees = matches!(command, Command::Release { .. } | Command::Dead);
        if !(frees && rules.change == Change::FreeingGrantsNothing) {
            self.grant(rules);
        }
        accepted
    }

    fn grant(&mut self, rules: Rules) {
        if self.holder.inc != 0 || self.queue.is_empty() {
            return;
        }
        let Ticket { msg, owner } = self.queue[0];
        if owner == 0 {
            return;
        }
        if rules.change != Change::FenceStays || self.fence == 0 {
            self.fence += 1;
        }
        self.holder = Holder { inc: owner, fence: self.fence, msg };
        if !rules.durable {
            self.queue.remove(0);
        }
    }

    /// Rule 11: a write needs a live session and the exact holder.
    fn write(&mut self, inc: u8, fence: u8, msg: u8, rules: Rules) -> bool {
        let may = match rules.change {
            Change::OnlyOlderFencesRefused => fence >= self.fence,
            _ => self.is_held_by(inc, fence),
        };
        if may && rules.durable {
            self.acked |= bit(msg);
            self.queue.retain(|ticket| ticket.msg != msg);
        }
        may
    }

    /// Rule 10: a withdrawal of a granted ticket is its release.
    fn withdraw(&mut self, inc: u8, msg: u8, rules: Rules) -> bool {
        if self.holder.inc == inc && self.holder.msg == msg {
            let released = rules.change != Change::WithdrawalSparesGrants;
            if released {
                self.holder = Holder::default();
            }
            return released;
        }
        self.queue.retain(|ticket| ticket.msg != msg || ticket.owner != inc);
        true
    }

    fn open(&mut self, inc: u8, rules: Rules) -> bool {
        let session = &mut self.sessions[usize::from(inc)];
        if *session == Session::Dead && rules.change != Change::TheDeadMayOpen {
            return false;
        }
        *session = Session::Live;
        for ticket in self.queue.iter_mut().filter(|ticket| ticket.owner == 0) {
            ticket.owner = inc;
        }
        true
    }

    /// Rule 13: the end of a session, in one apply.
    fn end(&mut self, inc: u8, rules: Rules) -> bool {
        let session = &mut self.sessions[usize::from(inc)];
        if *session == Session::Dead {
            return false;
        }
        *session = Session::Dead;
        if matches!(rules.change, Change::EndsGoOn | Change::EndsStandStill) {
            self.ending = inc;
            return true;
        }
        self.free(inc, rules);
        true
    }

    /// Frees what a dead session had.
    fn free(&mut self, inc: u8, rules: Rules) {
        if self.holder.inc == inc {
            self.holder = Holder::default();
        }
        if rules.change == Change::TheDeadKeepTickets {
            return;
        }
        if !rules.durable || rules.change == Change::TheDeadsMessagesGo {
            self.queue.retain(|ticket| ticket.owner != inc);
            return;
        }
        let heir = (1..INCARNATIONS as u8).rev().find(|inc| self.is_live(*inc)).unwrap_or(0);
        let mut moved: Few<Ticket, 5> = Few::default();
        for ticket in self.queue.iter_mut().filter(|ticket| ticket.owner == inc) {
            ticket.owner = heir;
            moved.push(*ticket);
        }
        if rules.change == Change::TheDeadsMessagesGoLast {
            let kept = self.queue;
            self.queue.retain(|ticket| !moved.contains(ticket));
            kept.iter().filter(|ticket| moved.contains(ticket)).for_each(|t| self.queue.push(*t));
        }
    }
}
