//! What may happen next, and what it does.

use stateright::{Model, Property};

use super::machine::{Command, Entry, Machine, bit, each};
use super::replica::{Answer, Replica};
use super::{Action, Change, PROPERTIES, State, Turns, broken};
use crate::few::Few;

impl Turns {
    /// What the protocol and the network do sooner or later.
    fn must(&self, state: &State, actions: &mut Vec<Action>) {
        let rules = self.rules;
        for inc in 1..state.lanes.len() as u8 {
            let lane = &state.lanes[usize::from(inc)];
            if !lane.is_empty() {
                actions.push(Action::Commit(inc));
            }
            match rules.change {
                Change::AnyOrder => {
                    (1..lane.len() as u8)
                        .for_each(|n| actions.push(Action::CommitNth(inc, n, false)));
                }
                Change::Repeated if !lane.is_empty() && state.resends < self.bounds.resends => {
                    actions.push(Action::CommitNth(inc, 0, true));
                }
                _ => {}
            }
            if state.dead & !state.reported & bit(inc) != 0 {
                actions.push(Action::Report(inc));
            }
        }
        if rules.change == Change::EndsGoOn && state.ends() {
            actions.push(Action::GoOn);
        }
        for r in 0..2 {
            let (replica, node) = (&state.replicas[r], state.node(r));
            if replica.inc == 0 {
                continue;
            }
            if !state.behind[r].is_empty() {
                actions.push(Action::Apply(r));
            }
            if matches!(replica.write, Answer::Decided(_)) {
                actions.push(Action::Learn(r));
            }
            if replica.may_take(node, rules).is_some() {
                actions.push(Action::Take(r));
            }
            if replica.may_begin(rules) && next(replica, node, self).is_some() {
                actions.push(Action::Begin(r));
            }
            if replica.asking.0 != 0 {
                actions.push(Action::Propose(r));
            } else if replica.step != 0 {
                self.must_in_step(r, replica, actions);
            }
            // An own ticket under way will do for all of them.
            if replica.held == 0 && replica.waiting == 0 && !replica.local.is_empty() {
                actions.push(Action::Queue(r));
            }
            if replica.must_release(node, rules) {
                actions.push(Action::Release(r));
            }
        }
    }

    fn must_in_step(&self, r: usize, replica: &Replica, actions: &mut Vec<Action>) {
        let durable = self.rules.durable;
        match replica.write {
            Answer::None if durable => actions.push(Action::Write(r)),
            Answer::Decided(false) if durable => {}
            Answer::Known(false) => actions.push(Action::Cut(r)),
            _ => actions.push(Action::Finish(r)),
        }
    }

    /// What may happen, or not.
    fn may(&self, state: &State, actions: &mut Vec<Action>) {
        let (rules, bounds) = (self.rules, self.bounds);
        // The two are alike at first, so what happens first may as well happen to the first.
        let alike = state.arrived == 0 && state.crashes == 0;
        for r in 0..if alike { 1 } else { 2 } {
            let replica = &state.replicas[r];
            if replica.inc == 0 {
                if !state.restarted {
                    actions.push(Action::Restart(r));
                }
                continue;
            }
            if state.crashes < bounds.crashes {
                actions.push(Action::Crash(r));
            }
            if !state.is_open(r) {
                continue;
            }
            if state.arrived < bounds.messages {
                actions.push(Action::Arrive(r));
            }
            if replica.step != 0 {
                if state.cuts < bounds.cuts {
                    actions.push(Action::Cut(r));
                }
                let writes = !rules.durable && state.writes < bounds.writes;
                if writes && replica.write == Answer::None && replica.asking.0 == 0 {
                    actions.push(Action::Write(r));
                }
            }
            let idle = replica.held != 0 && replica.step == 0 && replica.local.is_empty();
            if idle && state.lapses < bounds.lapses && !replica.must_release(state.node(r), rules) {
                actions.push(Action::Lapse(r));
            }
            if rules.durable && state.resends < bounds.resends {
                (1..=state.arrived).for_each(|msg| actions.push(Action::SendAgain(r, msg)));
            }
            if state.withdrawals < bounds.withdrawals {
                each(replica.waiting).for_each(|msg| actions.push(Action::Withdraw(r, msg)));
            }
            self.may_against_the_rules(state, r, actions);
        }
    }

    /// What only a variant does.
    fn may_against_the_rules(&self, state: &State, r: usize, actions: &mut Vec<Action>) {
        let replica = &state.replicas[r];
        let lane = &state.lanes[usize::from(replica.inc)];
        match self.rules.change {
            Change::AnswersTaken if state.answer.inc == replica.inc && replica.held == 0 => {
                actions.push(Action::TakeAnswer(r));
            }
            Change::ReleaseTakenBack
                if replica.held == 0
                    && lane.contains(&Command::Release { fence: replica.released }) =>
            {
                actions.push(Action::TakeBack(r));
            }
            Change::LocalMoved
                if replica.held != 0
                    && !replica.local.is_empty()
                    && !state.node(r).queue.is_empty() =>
            {
                actions.push(Action::MoveLocal(r));
            }
            _ => {}
        }
    }

    fn take(&self, next: &mut State, r: usize) {
        let Some(holder) = next.replicas[r].may_take(&next.nodes[r], self.rules) else {
            return;
        };
        let replica = &mut next.replicas[r];
        replica.held = holder.fence;
        replica.called = false;
        let waits = replica.waiting & bit(holder.msg) != 0;
        if !self.rules.durable && waits {
            replica.waiting &= !bit(holder.msg);
            // What was taken locally before a cut may have come before the ticket's message.
            let mut local = Few::default();
            each(replica.local()).filter(|msg| *msg < holder.msg).for_each(|msg| local.push(msg));
            local.push(holder.msg);
            each(replica.local()).filter(|msg| *msg > holder.msg).for_each(|msg| local.push(msg));
            replica.local = local;
            let msg = replica.local.remove(0);
            next.begin(r, msg, self.rules);
        }
    }

    fn take_answer(&self, next: &mut State, r: usize) {
        let holder = next.answer;
        let replica = &mut next.replicas[r];
        replica.held = holder.fence;
        if replica.waiting & bit(holder.msg) != 0 {
            replica.waiting &= !bit(holder.msg);
            next.begin(r, holder.msg, self.rules);
        }
    }
}

/// The message to handle next under the turn that is held.
fn next(replica: &Replica, node: &Machine, model: &Turns) -> Option<u8> {
    match model.rules.durable {
        true => replica.next_journaled(node),
        false => replica.local.first().copied(),
    }
}

impl Model for Turns {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        // What follows from a fault proves nothing more.
        if state.broken != 0 {
            return;
        }
        self.must(state, actions);
        let judged = self.judged & broken::STUCK != 0;
        if judged && actions.is_empty() && state.is_unfinished(self.rules) {
            actions.push(Action::Stand);
        }
        self.may(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let rules = self.rules;
        let mut next = *state;
        match action {
            Action::Commit(inc) => {
                let command = next.lane(inc).remove(0);
                next.commit(Entry { inc, command }, rules);
            }
            Action::CommitNth(inc, n, stays) => {
                let command = next.lane(inc)[usize::from(n)];
                if stays {
                    next.resends += 1;
                } else {
                    next.lane(inc).remove(usize::from(n));
                }
                next.commit(Entry { inc, command }, rules);
            }
            Action::Report(inc) => {
                next.reported |= bit(inc);
                next.commit(Entry { inc, command: Command::Dead }, rules);
            }
            Action::GoOn => next.commit(Entry::default(), rules),
            Action::Apply(r) => next.apply(r, rules),
            Action::Learn(r) => next.learn(r),
            Action::Take(r) => self.take(&mut next, r),
            Action::TakeAnswer(r) => self.take_answer(&mut next, r),
            Action::Begin(r) => {
                let msg = self::next(&next.replicas[r], &next.nodes[r], self)?;
                if !rules.durable {
                    next.replicas[r].local.remove(0);
                }
                next.begin(r, msg, rules);
            }
            Action::Write(r) => {
                let replica = &mut next.replicas[r];
                replica.write = Answer::Awaited;
                replica.asking = (replica.step, replica.held);
                next.writes += u8::from(!rules.durable);
            }
            Action::Finish(r) => {
                let replica = &mut next.replicas[r];
                let msg = std::mem::take(&mut replica.step);
                if rules.durable {
                    replica.done |= bit(msg);
                }
            }
            Action::Release(r) => next.release(r),
            Action::Lapse(r) => {
                next.lapses += 1;
                next.release(r);
            }
            Action::Cut(r) => next.cut(r, rules),
            Action::Propose(r) => {
                let (msg, fence) = std::mem::take(&mut next.replicas[r].asking);
                let Replica { step, held, .. } = next.replicas[r];
                let late = step != msg || held != fence;
                next.propose(r, Command::Write { fence, msg, late });
            }
            Action::TakeBack(r) => next.replicas[r].held = next.replicas[r].released,
            Action::MoveLocal(r) => next.queue_local(r),
            Action::Queue(r) => next.queue_first(r),
            Action::Withdraw(r, msg) => {
                next.withdrawals += 1;
                next.lost |= bit(msg);
                if rules.change != Change::WithdrawnTurnsTaken {
                    next.replicas[r].waiting &= !bit(msg);
                }
                next.propose(r, Command::Withdraw { msg });
            }
            Action::Arrive(r) => next.arrive(r, rules),
            Action::SendAgain(r, msg) => {
                next.resends += 1;
                if next.log.journaled & bit(msg) == 0 {
                    // Whichever replica journals it first, its order is the log's.
                    next.before[usize::from(msg)] = 0;
                }
                next.propose(r, Command::Admit { msg });
            }
            Action::Crash(r) => next.crash(r),
            Action::Restart(r) => {
                next.restarted = true;
                next.replicas[r] = Replica::new(3);
                next.propose(r, Command::Open);
            }
            Action::Stand => next.broken |= broken::STUCK,
        }
        next.broken &= self.judged;
        Some(next)
    }

    /// Some variants go on for ever; the protocol has to fit without this.
    fn within_boundary(&self, state: &State) -> bool {
        let whole = [Change::Nothing, Change::LocalBesideWrites, Change::EndsGoOn];
        whole.contains(&self.rules.change)
            || (state.lanes.iter().all(|lane| lane.len() < 6)
                && state.behind.iter().all(|entries| entries.len() < 9)
                && state.log.queue.len() < 5
                && state.log.fence < 9)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        macro_rules! holds {
            ($($n:literal)*) => {
                vec![$(Property::always(PROPERTIES[$n].0, |_, state: &State| {
                    state.broken & PROPERTIES[$n].1 == 0
                })),*]
            };
        }
        holds!(0 1 2 3 4 5 6)
    }
}
