//! Is there an order in which these calls could have run one at a time?
//!
//! Problem: many clients call a replicated object at once, some answers never arrive, and we want
//! to know whether what they saw could have come from *one* copy of the object. A history is
//! *linearizable* when every call can be given an instant between its start and its end so that
//! running the calls in the order of these instants on a plain sequential object (the [`Model`])
//! gives every answer that was seen.
//!
//! Idea (Wing and Gong 1993, with Lowe's memo): depth-first search. A call may come next if no
//! other call that is still to be placed *ended* before it started. Place it, ask the model where
//! that leads, go on; a pair (set of placed calls, state) that was visited once need not be visited
//! again, which turns an exponential search into a quick one for histories of one key.
//!
//! Invariants:
//! - A call whose outcome is *unknown* never ended: it may come anywhere after its start, or never.
//!   Never needs no case of its own: the search has succeeded once all the *answered* calls stand.
//! - The model may be unsure (a lock's ttl may or may not have run out): a state is a set of
//!   possible states, and an answer refutes only when no member of the set can give it.
//! - The search has a bound. Meeting it is its own verdict and never counts as passed.

use std::collections::{BTreeSet, HashSet};
use std::fmt::{Debug, Write as _};
use std::hash::Hash;

/// A sequential object that says what each call may answer.
pub trait Model {
    /// What the object holds.
    type State: Clone + Ord + Hash + Debug;
    /// What is asked.
    type Op: Debug;
    /// What is answered.
    type Answer: Debug;

    /// What it holds before the first call.
    fn initial(&self) -> Self::State;

    /// The states it may be in after `call` ran on `state`; none = `call` cannot have had its
    /// answer there. An unknown answer fits everywhere.
    fn step(&self, state: &Self::State, call: &Call<Self::Op, Self::Answer>) -> Vec<Self::State>;
}

/// One call as its client saw it. Instants are nanoseconds on one monotonic clock.
#[derive(Clone, Debug)]
pub struct Call<Op, Answer> {
    /// Who called, to read a refuted history by.
    pub client: usize,
    /// What was asked.
    pub op: Op,
    /// What came back; `None` = the outcome is unknown.
    pub answer: Option<Answer>,
    /// Just before the first attempt was sent.
    pub start: u64,
    /// Just after the definite answer arrived; `u64::MAX` where none did.
    pub end: u64,
}

/// What the search found.
#[derive(Debug)]
pub enum Verdict {
    /// An order exists.
    Linearizable,
    /// None exists; the text shows the history and how far the best attempt came.
    Refuted(String),
    /// The bound was met first: neither shown nor refuted.
    GaveUp {
        /// How many pairs were visited.
        visited: usize,
    },
}

impl Verdict {
    /// Whether an order was found.
    pub fn is_linearizable(&self) -> bool {
        matches!(self, Verdict::Linearizable)
    }

    /// Whether it is certain that none exists.
    pub fn is_refuted(&self) -> bool {
        matches!(self, Verdict::Refuted(_))
    }
}

/// The most pairs (placed calls, state) that are visited.
const VISITS_MAX: usize = 2_000_000;

/// Which calls have been placed.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Placed(Vec<u64>);

impl Placed {
    fn none(calls: usize) -> Self {
        Self(vec![0; calls.div_ceil(64)])
    }

    fn has(&self, call: usize) -> bool {
        self.0[call / 64] & (1 << (call % 64)) != 0
    }

    fn with(&self, call: usize) -> Self {
        let mut more = self.clone();
        more.0[call / 64] |= 1 << (call % 64);
        more
    }
}

/// One level of the search: what stands so far, and which calls are still to be tried next.
struct Level<State> {
    placed: Placed,
    states: BTreeSet<State>,
    candidates: Vec<usize>,
    /// The call that led here.
    by: Option<usize>,
}

/// Searches an order for the calls of one key.
pub fn check<M: Model>(model: &M, history: &[Call<M::Op, M::Answer>]) -> Verdict {
    check_within(model, history, VISITS_MAX)
}

/// As [`check`], with a bound of the caller's.
pub fn check_within<M: Model>(
    model: &M,
    history: &[Call<M::Op, M::Answer>],
    visits_max: usize,
) -> Verdict {
    let answered = history.iter().filter(|call| call.answer.is_some()).count();
    let start = Placed::none(history.len());
    let mut visited = HashSet::new();
    let mut best: (usize, Vec<usize>, BTreeSet<M::State>) = (0, Vec::new(), BTreeSet::new());
    let mut levels = vec![Level {
        candidates: candidates(history, &start),
        placed: start,
        states: BTreeSet::from([model.initial()]),
        by: None,
    }];
    while let Some(level) = levels.last_mut() {
        let done = history
            .iter()
            .enumerate()
            .filter(|(index, call)| call.answer.is_some() && level.placed.has(*index))
            .count();
        if done == answered {
            return Verdict::Linearizable;
        }
        let Some(next) = level.candidates.pop() else {
            levels.pop();
            continue;
        };
        let states: BTreeSet<M::State> =
            level.states.iter().flat_map(|state| model.step(state, &history[next])).collect();
        if states.is_empty() {
            continue;
        }
        let placed = level.placed.with(next);
        if visited.len() >= visits_max {
            return Verdict::GaveUp { visited: visited.len() };
        }
        if !visited.insert((placed.clone(), states.clone())) {
            continue;
        }
        let reached = done + usize::from(history[next].answer.is_some());
        if reached > best.0 {
            let order = levels.iter().filter_map(|level| level.by).chain([next]).collect();
            best = (reached, order, states.clone());
        }
        let candidates = candidates(history, &placed);
        levels.push(Level { placed, states, candidates, by: Some(next) });
    }
    Verdict::Refuted(explain(history, &best.1, &best.2))
}

/// The calls that may come next, the most promising last: answered ones before unknown ones, and
/// among those the earliest to end first.
fn candidates<Op, Answer>(history: &[Call<Op, Answer>], placed: &Placed) -> Vec<usize> {
    let open = || history.iter().enumerate().filter(|(index, _)| !placed.has(*index));
    let first_end = open().map(|(_, call)| call.end).min().unwrap_or(u64::MAX);
    let mut next: Vec<usize> =
        open().filter(|(_, call)| call.start <= first_end).map(|(index, _)| index).collect();
    next.sort_by_key(|index| std::cmp::Reverse((history[*index].end, history[*index].start)));
    next
}

/// The history in order of start, with the longest order that was found.
fn explain<Op: Debug, Answer: Debug, State: Debug>(
    history: &[Call<Op, Answer>],
    order: &[usize],
    states: &BTreeSet<State>,
) -> String {
    let mut by_start: Vec<usize> = (0..history.len()).collect();
    by_start.sort_by_key(|index| history[*index].start);
    let origin = by_start.first().map_or(0, |index| history[*index].start);
    let micros = |instant: u64| match instant {
        u64::MAX => "never".to_owned(),
        instant => format!("{}", (instant - origin) / 1_000),
    };
    let mut text = String::from("no order explains this history (µs, * = could be placed):\n");
    for index in by_start {
        let call = &history[index];
        let mark = if order.contains(&index) { '*' } else { ' ' };
        let answer = match &call.answer {
            Some(answer) => format!("{answer:?}"),
            None => "unknown".to_owned(),
        };
        let _ = writeln!(
            text,
            "{mark} #{index:<3} client {} {:>9} .. {:>9}  {:?} -> {answer}",
            call.client,
            micros(call.start),
            micros(call.end),
            call.op
        );
    }
    let _ = writeln!(text, "longest order: {order:?}\nwhich leads to: {states:?}");
    text
}
