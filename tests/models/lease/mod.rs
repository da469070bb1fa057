//! The lease rules (DESIGN 3), each of which can be left out.
//!
//! One replica holds a chat's turn, may pause, die and come back; two nodes arm its session, one of
//! them late, and restart or catch up by a snapshot; a rival waits. The rival is perfect: it acts at
//! the very instant at which the log gives it the turn. Clocks run at 0.9, 1 or 1.1 of real time,
//! which passes in ticks. Renewals, expiries and answers stay under way for ever: they may be late,
//! repeated, reordered, or never come.
//!
//! The holder takes the turn when it gets it and acts whenever it may: one that does less can do no
//! more harm. It may die, or give up and come back, at any instant; one that stays away can do none.
//! A suspended holder is one that does nothing for a while; only to the variant whose clock stops
//! meanwhile is that a state of its own. A send is taken to end at its deadline, whatever happens:
//! what a pause between the last check and the provider's receipt can do is not fenced by leases.

mod rules;

use stateright::{Model, Property};

use crate::few::Few;

/// The one thing in which a variant differs from the rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Nothing,
    /// 1: the leader answers a renewal when it gets it, not when it is applied.
    AnsweredAtReceipt,
    /// 2: a retry of a renewal counts from its own instant.
    RetriesCountAnew,
    /// 2: every renewal has the same number.
    NumbersStay,
    /// 3: a snapshot carries deadlines, read on another node's clock.
    InstantsStored,
    /// 4: the holder's clock stops while it is suspended.
    ClockStopsAsleep,
    /// 4: a timer says when to give up, and comes late.
    TimerTrusted,
    /// 5: a process that comes back goes on as the incarnation it was.
    IncarnationStays,
    /// 6: the end of a session passes nothing on.
    EndPassesNothingOn,
    /// 7: a send has no deadline.
    SendsWithoutDeadline,
}

mod broken {
    pub const OVERLAP: u8 = 1;
    pub const FENCES: u8 = 2;
    pub const EARLY: u8 = 4;
    pub const HELD_BY_DEAD: u8 = 8;
}

const PROPERTIES: [(&str, u8); 4] = [
    ("whoever acts has the turn", broken::OVERLAP),
    ("fences grow", broken::FENCES),
    ("no session ends before its last accepted renewal and a lease", broken::EARLY),
    ("an ended session holds nothing", broken::HELD_BY_DEAD),
];

/// The holder's first incarnation, the rival's, and the one the holder comes back as.
const FIRST: u8 = 1;
const RIVAL: u8 = 2;
const SECOND: u8 = 3;

/// A clock's reading, in tenths of a tick of a clock that is right.
type Reading = u16;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Session {
    live: bool,
    ended: bool,
    seq: u8,
    /// The tick of its last applied renewal, or of its opening.
    renewed: u8,
}

/// What a node knows of a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Armed {
    on: bool,
    seq: u8,
    at: i8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct State {
    now: u8,
    /// Of the holder's clock and the nodes', in tenths.
    rates: [u8; 3],

    // The group.
    sessions: [Session; 4],
    /// Incarnation and fence; nobody's where 0.
    holder: (u8, u8),
    fence: u8,
    queue: Few<u8, 3>,

    // The nodes: the first applies at once.
    nodes: [[Armed; 4]; 2],
    restarts: u8,

    // Under way, a bit for each incarnation and number.
    renewals: u32,
    answers: u32,
    expiries: u32,

    // The holder's process.
    /// 0 while it has no session.
    life: u8,
    /// When it asked for its next session.
    opening: Option<Reading>,
    opened: bool,
    reopened: bool,
    seq: u8,
    sent: Reading,
    answered: bool,
    /// What its lease counts from.
    from: Reading,
    held: u8,
    /// Variants only: the fence of a send that goes on.
    sending: u8,
    asleep: bool,
    slept: u8,
    /// Variants only: the timer has told it to give up.
    told: bool,

    /// The highest fence that was acted under.
    acted: u8,
    broken: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Tick,
    Renew,
    Retry,
    ApplyRenewal(u8, u8),
    Answer(u8),
    CatchUp,
    Restart(usize),
    Install,
    ProposeExpiry(usize, u8),
    ApplyExpiry(u8, u8),
    Send,
    Timer,
    Reopen,
    ApplyOpening,
    Opened,
    RivalReleases,
    Sleep,
    Wake,
}

struct Lease {
    change: Change,
    /// A lease in ticks.
    lease: u8,
    /// How long before its end the holder stops, in tenths of the lease.
    margin: u8,
    /// Renewals in a life.
    renewals: u8,
    /// Ticks after which nothing is looked at any more.
    horizon: u8,
    /// Whether the holder may die and come back, and nodes restart, each once.
    deaths: bool,
    restarts: bool,
    /// Whether clocks run at any of their rates, or the holder's slow and the nodes' fast.
    any_rates: bool,
    judged: u8,
}

fn mark(inc: u8, seq: u8) -> u32 {
    1 << (inc * 8 + seq)
}

impl State {
    /// The holder's clock. It runs on during suspend (rule 4).
    fn clock(&self) -> Reading {
        u16::from(self.now - self.slept) * u16::from(self.rates[0])
    }

    fn grant(&mut self) {
        if self.holder.0 == 0 && !self.queue.is_empty() {
            self.fence += 1;
            self.holder = (self.queue.remove(0), self.fence);
            if self.holder.0 == RIVAL {
                self.acted = self.fence;
            }
        }
    }

    fn end(&mut self, inc: u8, change: Change) {
        let session = &mut self.sessions[usize::from(inc)];
        (session.live, session.ended) = (false, true);
        // The first node applies this too; the other learns as it catches up.
        self.nodes[0][usize::from(inc)] = Armed::default();
        if change == Change::EndPassesNothingOn {
            return;
        }
        self.queue.retain(|waiting| *waiting != inc);
        if self.holder.0 == inc {
            self.holder = (0, 0);
        }
        self.grant();
    }

    fn arm(&mut self, node: usize, inc: u8) {
        let Session { live: on, seq, .. } = self.sessions[usize::from(inc)];
        self.nodes[node][usize::from(inc)] = match on {
            true => Armed { on, seq, at: self.now as i8 },
            false => Armed::default(),
        };
    }

    /// The process gives up or dies, and asks for another session.
    fn reopen(&mut self) {
        (self.life, self.held, self.sending) = (0, 0, 0);
        (self.seq, self.sent, self.answered, self.told) = (0, 0, true, false);
        (self.opening, self.reopened) = (Some(self.clock()), true);
    }
}

impl State {
    /// Drops what can make no difference any more, so that states that will go on alike are one.
    /// Only by the rules is all of it without effect.
    fn forget(&mut self) {
        if self.answered || self.life == 0 {
            self.sent = 0;
        }
        if self.life == 0 {
            self.from = 0;
        }
        for inc in [FIRST, SECOND] {
            let session = &mut self.sessions[usize::from(inc)];
            if session.ended {
                *session = Session { ended: true, ..Session::default() };
            }
            for seq in 0..8 {
                if session.ended || seq <= session.seq {
                    self.renewals &= !mark(inc, seq);
                }
                if session.ended || seq < session.seq {
                    self.expiries &= !mark(inc, seq);
                }
                let awaited = self.life == inc && !self.answered && self.seq == seq;
                if !awaited {
                    self.answers &= !mark(inc, seq);
                }
            }
        }
    }
}

impl Lease {
    fn units(&self) -> Reading {
        u16::from(self.lease) * 10
    }

    /// How long the holder may act after what its lease counts from.
    fn tenure(&self) -> Reading {
        self.units() - u16::from(self.lease) * u16::from(self.margin)
    }

    fn is_up(&self, state: &State) -> bool {
        state.clock() >= state.from + self.tenure()
    }

    /// Whether the holder believes it may act.
    fn may_act(&self, state: &State) -> bool {
        let in_time = match self.change {
            Change::TimerTrusted => !state.told,
            _ => !self.is_up(state),
        };
        state.life != 0 && !state.asleep && in_time
    }

    fn holder_actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.asleep {
            actions.push(Action::Wake);
            return;
        }
        if self.change == Change::ClockStopsAsleep && state.slept == 0 {
            actions.push(Action::Sleep);
        }
        if state.life == 0 {
            if state.opening.is_some() {
                actions.push(Action::Opened);
            }
            return;
        }
        if self.deaths && !state.reopened {
            actions.push(Action::Reopen);
        }
        if self.change == Change::TimerTrusted && self.is_up(state) && !state.told {
            actions.push(Action::Timer);
        }
        if !self.may_act(state) {
            return;
        }
        if state.answered && state.seq < self.renewals {
            actions.push(Action::Renew);
        }
        if !state.answered {
            if self.change == Change::RetriesCountAnew {
                actions.push(Action::Retry);
            }
            actions.push(Action::Answer(state.seq));
        }
        if self.change == Change::SendsWithoutDeadline && state.held != 0 && state.sending == 0 {
            actions.push(Action::Send);
        }
    }

    fn node_actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.push(Action::CatchUp);
        if self.restarts && state.restarts == 0 {
            actions.push(Action::Restart(0));
            actions.push(Action::Restart(1));
            actions.push(Action::Install);
        }
        for inc in [FIRST, SECOND] {
            for node in 0..2 {
                let Armed { on, seq, at } = state.nodes[node][usize::from(inc)];
                let passed = i16::from(state.now as i8 - at) * i16::from(state.rates[1 + node]);
                let proposed = state.expiries & mark(inc, seq) != 0;
                if on && !proposed && passed >= self.units() as i16 {
                    actions.push(Action::ProposeExpiry(node, inc));
                }
            }
            for seq in 0..=self.renewals {
                if state.expiries & mark(inc, seq) != 0 {
                    actions.push(Action::ApplyExpiry(inc, seq));
                }
                if state.renewals & mark(inc, seq) != 0 {
                    actions.push(Action::ApplyRenewal(inc, seq));
                }
            }
        }
        if state.reopened && !state.opened {
            actions.push(Action::ApplyOpening);
        }
        if state.holder.0 == RIVAL {
            actions.push(Action::RivalReleases);
        }
    }

    fn tick(&self, next: &mut State) {
        next.now += 1;
        if next.asleep {
            next.slept += 1;
        }
    }

    /// The fence the holder acts under now, be it that rule 7 lets a send go on. With the rule, no
    /// send outlasts the instant of giving up.
    fn acts_under(&self, state: &State) -> u8 {
        if state.sending == 0 && self.may_act(state) { state.held } else { state.sending }
    }

    fn apply_renewal(&self, next: &mut State, inc: u8, seq: u8) -> Option<()> {
        let now = next.now;
        let session = &mut next.sessions[usize::from(inc)];
        let newer = seq > session.seq
            || (self.change == Change::NumbersStay && session.renewed < now && seq == session.seq);
        if !session.live || !newer {
            return None;
        }
        (session.seq, session.renewed) = (seq, now);
        next.answers |= mark(inc, seq);
        next.arm(0, inc);
        Some(())
    }

    fn apply_expiry(&self, next: &mut State, inc: u8, seq: u8) -> Option<()> {
        let Session { live, seq: last, renewed, .. } = next.sessions[usize::from(inc)];
        if !live || last != seq {
            return None;
        }
        // No clock can have counted a lease.
        if u16::from(next.now - renewed) * 11 < self.units() {
            next.broken |= broken::EARLY;
        }
        next.end(inc, self.change);
        Some(())
    }

    fn apply_opening(&self, next: &mut State) -> Option<()> {
        let inc = self.second();
        if std::mem::replace(&mut next.opened, true) {
            return None;
        }
        let now = next.now;
        let session = &mut next.sessions[usize::from(inc)];
        *session = Session { live: true, ended: false, seq: 0, renewed: now };
        next.arm(0, inc);
        if next.holder.0 != inc && !next.queue.contains(&inc) {
            next.queue.push(inc);
        }
        next.grant();
        Some(())
    }

    /// Who the holder comes back as (rule 5).
    fn second(&self) -> u8 {
        if self.change == Change::IncarnationStays { FIRST } else { SECOND }
    }

    fn step(&self, next: &mut State, action: Action) -> Option<()> {
        match action {
            Action::Tick => self.tick(next),
            Action::Renew => {
                next.seq = if self.change == Change::NumbersStay { 1 } else { next.seq + 1 };
                (next.sent, next.answered) = (next.clock(), false);
                next.renewals |= mark(next.life, next.seq);
                if self.change == Change::AnsweredAtReceipt {
                    next.answers |= mark(next.life, next.seq);
                }
            }
            Action::Retry => next.sent = next.clock(),
            Action::ApplyRenewal(inc, seq) => self.apply_renewal(next, inc, seq)?,
            Action::Answer(seq) => {
                if seq != next.seq || next.answers & mark(next.life, seq) == 0 {
                    return None;
                }
                (next.answered, next.from) = (true, next.from.max(next.sent));
            }
            Action::CatchUp => [FIRST, SECOND].iter().for_each(|inc| {
                let (session, armed) =
                    (next.sessions[usize::from(*inc)], next.nodes[1][usize::from(*inc)]);
                if session.live != armed.on || session.seq != armed.seq {
                    next.arm(1, *inc);
                }
            }),
            // Rule 3: a node that starts arms what it knows anew.
            Action::Restart(node) => {
                next.restarts += 1;
                let now = next.now as i8;
                next.nodes[node]
                    .iter_mut()
                    .filter(|armed| armed.on)
                    .for_each(|armed| armed.at = now);
            }
            Action::Install => {
                next.restarts += 1;
                next.arm(1, FIRST);
                next.arm(1, SECOND);
                if self.change == Change::InstantsStored {
                    // The second node's clock reads a lease more than the first one's.
                    for inc in [FIRST, SECOND].map(usize::from) {
                        let at = next.nodes[0][inc].at - self.lease as i8;
                        next.nodes[1][inc].at = at;
                    }
                }
            }
            Action::ProposeExpiry(node, inc) => {
                next.expiries |= mark(inc, next.nodes[node][usize::from(inc)].seq);
            }
            Action::ApplyExpiry(inc, seq) => self.apply_expiry(next, inc, seq)?,
            Action::Send => next.sending = next.held,
            Action::Timer => next.told = true,
            Action::Reopen => next.reopen(),
            Action::ApplyOpening => self.apply_opening(next)?,
            Action::Opened => {
                let inc = self.second();
                if !next.opened {
                    return None;
                }
                next.life = inc;
                next.from = next.opening.take()?;
            }
            Action::RivalReleases => {
                next.holder = (0, 0);
                next.grant();
            }
            Action::Sleep => next.asleep = true,
            Action::Wake => next.asleep = false,
        }
        Some(())
    }
}

impl Model for Lease {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut states = Vec::new();
        for n in 0..27 {
            let rates = [9 + n / 9, 11 - n / 3 % 3, 11 - n % 3];
            // The first puts the holder in the greatest danger.
            if n > 0 && !self.any_rates {
                continue;
            }
            let mut state = State { rates, life: FIRST, answered: true, ..State::default() };
            state.sessions[usize::from(FIRST)].live = true;
            state.sessions[usize::from(RIVAL)].live = true;
            state.queue.push(FIRST);
            state.queue.push(RIVAL);
            state.grant();
            state.held = state.fence;
            state.arm(0, FIRST);
            state.arm(1, FIRST);
            states.push(state);
        }
        states
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.broken != 0 {
            return;
        }
        if state.now < self.horizon {
            actions.push(Action::Tick);
        }
        self.holder_actions(state, actions);
        self.node_actions(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = *state;
        self.step(&mut next, action)?;
        if next.life != 0 && next.holder.0 == next.life {
            next.held = next.holder.1;
        }
        let fence = self.acts_under(&next);
        if fence != 0 && next.holder != (next.life, fence) {
            next.broken |= broken::OVERLAP;
        }
        if fence != 0 && fence < next.acted {
            next.broken |= broken::FENCES;
        }
        next.acted = next.acted.max(fence);
        if next.sessions[usize::from(next.holder.0)].ended {
            next.broken |= broken::HELD_BY_DEAD;
        }
        next.broken &= self.judged;
        if self.change == Change::Nothing {
            next.forget();
        }
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        macro_rules! holds {
            ($($n:literal)*) => {
                vec![$(Property::always(PROPERTIES[$n].0, |_, state: &State| {
                    state.broken & PROPERTIES[$n].1 == 0
                })),*]
            };
        }
        holds!(0 1 2 3)
    }
}
