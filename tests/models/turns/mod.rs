//! The turn protocol of one chat (DESIGN 4), every rule of which can be left out.
//!
//! Two replicas, one of which may die and come back as a new incarnation, each over a node that
//! applies the log as late as it likes. Commands wait under way for as long as they like, also those
//! of the dead; a serial below the next one changes nothing and one above is refused, so without
//! rule 1 left out a repeated or reordered command is one that does nothing, and is not modelled.
//! A process that pauses is one that takes no step; one that pauses beyond its lease gives up
//! before its session ends (the lease model shows it), which to this model is a death.
//!
//! Ghosts, which no replica can see, judge: what ran when, what arrived before what.

mod machine;
mod replica;
mod rules;
mod steps;

use self::machine::{
    Command, Entry, Holder, INCARNATIONS, Machine, Msgs, Rules, Session, bit, each,
};
use self::replica::{Answer, Replica};
use crate::few::Few;

/// The one thing in which a variant differs from the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    Nothing,
    /// 1: commands are applied in whatever order they come.
    AnyOrder,
    /// 1: a command is applied as often as it comes.
    Repeated,
    /// 2: a grant under the fence of the one before.
    FenceStays,
    /// 2: the apply that frees a turn grants nothing.
    FreeingGrantsNothing,
    /// 3: a turn is taken as the leader's answer says.
    AnswersTaken,
    /// 3: a turn is taken whose release was proposed.
    ReleasedTurnsTaken,
    /// 4: local messages though own tickets wait.
    LocalBeforeOwnTickets,
    /// 4: local messages though foreign tickets wait.
    LocalBeforeForeignTickets,
    /// 4, weaker, and good enough: own writes that are not applied do not keep from local messages.
    LocalBesideWrites,
    /// 5: local messages with durability.
    LocalThoughDurable,
    /// 6: the next message begins though a write of the one before has no answer.
    UnansweredWrites,
    /// 7: the call-back is an event.
    CallBackIsAnEvent,
    /// 8: called back, local messages are moved to the queue.
    LocalMoved,
    /// 8: a step is cut, and the local messages behind it are moved to the queue.
    LocalMovedByACut,
    /// 9: a cut step writes until its release is proposed, later.
    CutStepsWrite,
    /// 10: a release without an answer is taken as not made.
    ReleaseTakenBack,
    /// 10: a grant that meets its withdrawal is acted upon.
    WithdrawnTurnsTaken,
    /// 10: a withdrawal of a granted ticket does nothing.
    WithdrawalSparesGrants,
    /// 1: commands of an incarnation that is not live are applied.
    TheDeadAreHeard,
    /// 11: a write is refused only if there is a newer fence.
    OnlyOlderFencesRefused,
    /// 13: what a dead session had is dropped, with durability too.
    TheDeadsMessagesGo,
    /// 13: durable tickets of a dead session lose their place.
    TheDeadsMessagesGoLast,
    /// 13: tickets of a dead session stay.
    TheDeadKeepTickets,
    /// 13, as it is where a session has much: it ends in one apply, and later ones free what it had.
    EndsGoOn,
    /// 13: as that, and nobody proposes those applies.
    EndsStandStill,
    /// 5.1: a death report that overtakes the opening is forgotten.
    TheDeadMayOpen,
}

/// How much may happen.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub messages: u8,
    pub crashes: u8,
    pub cuts: u8,
    pub withdrawals: u8,
    /// Times a turn is given back though nobody asks for it.
    pub lapses: u8,
    /// Messages that their sender sends again, to another replica.
    pub resends: u8,
    /// Writes made without durability; with it every message has one.
    pub writes: u8,
}

/// What went wrong, as bits of [`State::broken`].
pub mod broken {
    pub const OVERLAP: u8 = 1;
    pub const FENCES: u8 = 2;
    pub const ORDER: u8 = 4;
    pub const INSIDE: u8 = 8;
    pub const CUT: u8 = 16;
    pub const TWICE: u8 = 32;
    pub const STUCK: u8 = 64;
}

pub const PROPERTIES: [(&str, u8); 7] = [
    ("one replica at a time acts for the chat", broken::OVERLAP),
    ("fences grow", broken::FENCES),
    ("messages are handled in order", broken::ORDER),
    ("no write lands inside the next message", broken::INSIDE),
    ("no write of a cut or released step lands", broken::CUT),
    ("no message is handled twice", broken::TWICE),
    ("no message is lost or waits for ever", broken::STUCK),
];

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct State {
    /// What is committed.
    log: Machine,
    /// What each node has applied, and what it has yet to apply.
    nodes: [Machine; 2],
    behind: [Few<Entry, 10>; 2],
    replicas: [Replica; 2],
    /// Commands under way, by incarnation in the order of their serials.
    lanes: [Few<Command, 8>; INCARNATIONS],
    /// Only where answers are acted upon: the last answer that told of a grant.
    answer: Holder,

    // How much of the bounds is used.
    arrived: u8,
    crashes: u8,
    cuts: u8,
    withdrawals: u8,
    lapses: u8,
    resends: u8,
    writes: u8,

    /// Incarnations whose process has died, by number; those of whom the group was told; and whether
    /// one came back.
    dead: u8,
    reported: u8,
    restarted: bool,

    // Ghosts.
    /// What must be handled before each message.
    before: [Msgs; 5],
    begun: Msgs,
    /// Messages that a death, a withdrawal took away, as the rules allow without durability.
    lost: Msgs,
    /// Messages taken as local.
    taken: Msgs,
    /// The message that was begun last.
    current: u8,
    /// The incarnation and the fence that were acted under last.
    acted: (u8, u8),
    broken: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// The next command of a lane is committed.
    Commit(u8),
    /// The n-th is, out of order; with `true` it stays under way.
    CommitNth(u8, u8, bool),
    /// The group learns that a process is dead.
    Report(u8),
    /// An empty entry is committed, for an end that goes on.
    GoOn,
    /// A node applies its next entry.
    Apply(usize),
    /// A process learns the answer to its write before its node applies it.
    Learn(usize),
    Take(usize),
    TakeAnswer(usize),
    Begin(usize),
    Write(usize),
    Finish(usize),
    Release(usize),
    Lapse(usize),
    Cut(usize),
    /// A write that was checked is proposed.
    Propose(usize),
    TakeBack(usize),
    MoveLocal(usize),
    /// A message that a cut left takes a ticket.
    Queue(usize),
    Withdraw(usize, u8),
    Arrive(usize),
    SendAgain(usize, u8),
    Crash(usize),
    Restart(usize),
    /// Nothing can happen any more, and not all is done.
    Stand,
}

pub struct Turns {
    pub rules: Rules,
    pub bounds: Bounds,
    /// The properties looked at: all, or the one that a variant is to break.
    pub judged: u8,
}

impl State {
    /// Both replicas run, and nobody has the turn.
    fn new() -> Self {
        let mut log = Machine::default();
        log.sessions[1] = Session::Live;
        log.sessions[2] = Session::Live;
        Self {
            log,
            nodes: [log; 2],
            replicas: [Replica::new(1), Replica::new(2)],
            ..Self::default()
        }
    }

    /// Whether an end goes on.
    fn ends(&self) -> bool {
        self.log.ending != 0
    }

    fn node(&self, r: usize) -> &Machine {
        &self.nodes[r]
    }

    fn lane(&mut self, inc: u8) -> &mut Few<Command, 8> {
        &mut self.lanes[usize::from(inc)]
    }

    fn propose(&mut self, r: usize, command: Command) {
        let inc = self.replicas[r].inc;
        self.lane(inc).push(command);
    }

    fn is_open(&self, r: usize) -> bool {
        let inc = self.replicas[r].inc;
        inc != 0 && self.nodes[r].is_live(inc)
    }

    /// Whether a command of the process is not applied on its own node.
    fn has_unapplied(&self, r: usize, rules: Rules) -> bool {
        let inc = self.replicas[r].inc;
        let counts = |command: &Command| {
            rules.change != Change::LocalBesideWrites || !matches!(command, Command::Write { .. })
        };
        self.lanes[usize::from(inc)].iter().any(counts)
            || self.behind[r].iter().any(|entry| entry.inc == inc && counts(&entry.command))
    }

    /// Messages that an incarnation is about to journal.
    fn unjournaled(&self, inc: u8) -> Msgs {
        let lane = &self.lanes[usize::from(inc)];
        lane.iter().fold(0, |set, command| match command {
            Command::Admit { msg } => set | bit(*msg),
            _ => set,
        }) & !self.log.journaled
    }

    fn process(&mut self, inc: u8) -> Option<&mut Replica> {
        self.replicas.iter_mut().find(|replica| replica.inc == inc && inc != 0)
    }

    fn commit(&mut self, entry: Entry, rules: Rules) {
        let before = self.log;
        let accepted = self.log.apply(entry, rules);
        for behind in &mut self.behind {
            behind.push(entry);
        }
        // Whatever else the dead proposed is refused. Their opening may still come.
        if entry.command == Command::Dead && rules.change != Change::TheDeadAreHeard {
            self.lost |= self.unjournaled(entry.inc);
            self.lane(entry.inc).retain(|command| *command == Command::Open);
        }
        let holder = self.log.holder;
        match entry.command {
            Command::Write { fence, msg, late } => {
                let held = before.is_held_by(entry.inc, fence);
                if accepted && (late || !held) {
                    self.broken |= broken::CUT;
                } else if accepted && msg != self.current {
                    self.broken |= broken::INSIDE;
                }
                if accepted && rules.durable && before.acked & bit(msg) != 0 {
                    self.broken |= broken::TWICE;
                }
                if !late && let Some(process) = self.process(entry.inc) {
                    process.write = Answer::Decided(accepted);
                }
            }
            Command::Admit { msg } if accepted => {
                self.before[usize::from(msg)] |= before.journaled;
                // Handled before it was journaled: then before all that was journaled earlier.
                if self.begun & bit(msg) != 0 && before.journaled & !self.begun != 0 {
                    self.broken |= broken::ORDER;
                }
            }
            Command::Ticket { .. }
                if rules.change == Change::AnswersTaken
                    && before.holder.inc == 0
                    && holder.inc == entry.inc =>
            {
                self.answer = holder;
            }
            _ => {}
        }
    }

    fn apply(&mut self, r: usize, rules: Rules) {
        let entry = self.behind[r].remove(0);
        self.nodes[r].apply(entry, rules);
        let replica = &mut self.replicas[r];
        match entry.command {
            Command::Write { late: false, .. } if entry.inc == replica.inc => self.learn(r),
            Command::Ticket { .. }
                if rules.change == Change::CallBackIsAnEvent
                    && entry.inc != replica.inc
                    && replica.held != 0 =>
            {
                replica.called = true;
            }
            _ => {}
        }
    }

    fn learn(&mut self, r: usize) {
        let replica = &mut self.replicas[r];
        if let Answer::Decided(accepted) = replica.write {
            replica.write = Answer::Known(accepted);
        }
    }

    fn begin(&mut self, r: usize, msg: u8, rules: Rules) {
        let other = self.replicas[1 - r];
        let replica = &mut self.replicas[r];
        replica.step = msg;
        replica.write = Answer::None;
        if other.step != 0 {
            self.broken |= broken::OVERLAP;
        }
        let acting = (replica.inc, replica.held);
        if acting.1 < self.acted.1 || (acting.1 == self.acted.1 && acting.0 != self.acted.0) {
            self.broken |= broken::FENCES;
        }
        self.acted = acting;
        let again = if rules.durable { self.log.acked } else { self.begun };
        if again & bit(msg) != 0 {
            self.broken |= broken::TWICE;
        }
        let handled = if rules.durable { self.log.acked } else { self.begun } | self.lost;
        if self.before[usize::from(msg)] & !handled != 0 {
            self.broken |= broken::ORDER;
        }
        self.begun |= bit(msg);
        self.current = msg;
    }

    fn arrive(&mut self, r: usize, rules: Rules) {
        self.arrived += 1;
        let msg = self.arrived;
        let replica = self.replicas[r];
        if rules.durable {
            self.before[usize::from(msg)] = self.unjournaled(replica.inc);
            self.propose(r, Command::Admit { msg });
            if rules.change == Change::LocalThoughDurable && replica.may_begin(rules) {
                self.begin(r, msg, rules);
            }
            return;
        }
        // Earlier messages of the same process, those that anybody took, and those whose tickets
        // this node has seen, come first.
        let earlier = replica.waiting | replica.local() | self.taken | self.nodes[r].queued();
        self.before[usize::from(msg)] = earlier;
        let unapplied = self.has_unapplied(r, rules);
        let replica = &mut self.replicas[r];
        if replica.takes_locally(&self.nodes[r], unapplied, rules) {
            replica.local.push(msg);
            self.taken |= bit(msg);
        } else {
            replica.waiting |= bit(msg);
            self.propose(r, Command::Ticket { msg });
        }
    }

    /// Ends the turn here and proposes its release.
    fn release(&mut self, r: usize) {
        let replica = &mut self.replicas[r];
        let fence = std::mem::take(&mut replica.held);
        replica.released = fence;
        replica.called = false;
        replica.cutting = false;
        if replica.write == Answer::Known(false) {
            replica.write = Answer::None;
        }
        self.propose(r, Command::Release { fence });
    }

    /// Rule 9: the step loses its handle and the release is proposed, in one action. Messages that
    /// were taken locally come as if they arrived now.
    fn cut(&mut self, r: usize, rules: Rules) {
        self.cuts += 1;
        let replica = &mut self.replicas[r];
        let step = std::mem::take(&mut replica.step);
        if replica.asking.0 != 0 {
            // Whatever becomes of that write, no answer to it is waited for.
            replica.write = Answer::None;
        }
        if rules.change == Change::CutStepsWrite {
            replica.asking = (step, replica.held);
            replica.cutting = true;
            return;
        }
        self.release(r);
        // Local messages stay, and are the first under the next turn. They lose their place before
        // what came to the other replica since.
        let Replica { waiting, .. } = self.replicas[r];
        let taken = self.replicas[r].local();
        self.taken &= !taken;
        for msg in each(!(waiting | taken)).filter(|msg| *msg <= self.arrived) {
            self.before[usize::from(msg)] &= !taken;
        }
        if rules.change == Change::LocalMovedByACut {
            self.queue_local(r);
        }
    }

    /// The first of the messages that a cut left takes a ticket.
    fn queue_first(&mut self, r: usize) {
        let msg = self.replicas[r].local.remove(0);
        self.replicas[r].waiting |= bit(msg);
        self.propose(r, Command::Ticket { msg });
    }

    fn queue_local(&mut self, r: usize) {
        let local = std::mem::take(&mut self.replicas[r].local);
        for msg in local.iter() {
            self.replicas[r].waiting |= bit(*msg);
            self.taken &= !bit(*msg);
            self.propose(r, Command::Ticket { msg: *msg });
        }
    }

    fn crash(&mut self, r: usize) {
        self.crashes += 1;
        self.lost |= self.replicas[r].local() | self.replicas[r].waiting;
        self.dead |= 1 << self.replicas[r].inc;
        self.replicas[r] = Replica::default();
    }

    /// What should have been handled by now.
    fn is_unfinished(&self, rules: Rules) -> bool {
        let alive = self.replicas.iter().any(|replica| replica.inc != 0);
        let all = (1..=self.arrived).fold(0, |set, msg| set | bit(msg));
        let left = match rules.durable {
            true => self.log.journaled & !self.log.acked,
            false => all & !self.begun & !self.lost,
        };
        alive && (left != 0 || !self.log.queue.is_empty())
    }
}
