//! What a checkpoint, a fenced lock and a chat's turns may answer (SPEC K6), one key at a time.
//!
//! The number a client does not know (the revision, token or ticket of a write whose answer was
//! lost) is resolved before the search where anybody saw it: every value written is unique, so the
//! revision that belongs to it is read off the history. What nobody ever saw stays unknown, and no
//! client can have used it.
//!
//! Each kind also has rules that need no order at all, checked first because their message is the
//! clearest: a revision names one value for ever, a token and a fence name one grant.

use std::collections::{BTreeMap, HashMap};

use super::linearize::{Call, Model, Verdict, check};

/// A history of checkpoint calls.
pub type CheckpointCall = Call<CheckpointOp, CheckpointAnswer>;
/// A history of lock calls.
pub type LockCall = Call<LockOp, LockAnswer>;
/// A history of turn calls.
pub type TurnCall = Call<TurnOp, TurnAnswer>;

// ---------------------------------------------------------------------------------- checkpoints

/// The condition of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// `If-Match: "revision"`.
    Revision(u64),
    /// `If-None-Match: *`.
    Absent,
}

/// A call on one checkpoint. Values are numbers that no two writes share.
#[derive(Clone, Debug)]
pub enum CheckpointOp {
    /// GET.
    Get,
    /// PUT.
    Put {
        /// When it may write.
        condition: Condition,
        /// What.
        value: u64,
    },
    /// DELETE under `If-Match`.
    Delete {
        /// The revision it removes.
        revision: u64,
    },
}

/// What a checkpoint call answers.
#[derive(Clone, Debug)]
pub enum CheckpointAnswer {
    /// GET 200.
    Found {
        /// The value.
        value: u64,
        /// Its `ETag`.
        revision: u64,
    },
    /// GET 404.
    Absent,
    /// PUT 200.
    Written {
        /// The revision the value got.
        revision: u64,
    },
    /// DELETE 2xx.
    Deleted,
    /// 412.
    Refused,
}

/// One checkpoint. Its state is the value that is there.
pub struct Checkpoint {
    revision_of: HashMap<u64, u64>,
}

impl Model for Checkpoint {
    type State = Option<u64>;
    type Op = CheckpointOp;
    type Answer = CheckpointAnswer;

    fn initial(&self) -> Option<u64> {
        None
    }

    fn step(&self, state: &Option<u64>, call: &CheckpointCall) -> Vec<Option<u64>> {
        let revision = state.and_then(|value| self.revision_of.get(&value).copied());
        let holds = |condition: &Condition| match condition {
            Condition::Absent => state.is_none(),
            Condition::Revision(wanted) => state.is_some() && revision == Some(*wanted),
        };
        let (possible, then) = match (&call.op, &call.answer) {
            (CheckpointOp::Get, None) => (true, *state),
            (CheckpointOp::Get, Some(CheckpointAnswer::Absent)) => (state.is_none(), None),
            (CheckpointOp::Get, Some(CheckpointAnswer::Found { value, revision: seen })) => {
                (*state == Some(*value) && revision == Some(*seen), *state)
            }
            (CheckpointOp::Put { condition, value }, answer) => {
                let holds = holds(condition);
                let then = if holds { Some(*value) } else { *state };
                match answer {
                    None => (true, then),
                    Some(CheckpointAnswer::Written { .. }) => (holds, then),
                    Some(CheckpointAnswer::Refused) => (!holds, then),
                    Some(_) => (false, None),
                }
            }
            (CheckpointOp::Delete { revision }, answer) => {
                let holds = holds(&Condition::Revision(*revision));
                let then = if holds { None } else { *state };
                match answer {
                    None => (true, then),
                    Some(CheckpointAnswer::Deleted) => (holds, then),
                    Some(CheckpointAnswer::Refused) => (!holds, then),
                    Some(_) => (false, None),
                }
            }
            (CheckpointOp::Get, Some(_)) => (false, None),
        };
        if possible { vec![then] } else { Vec::new() }
    }
}

/// Checks the history of one checkpoint.
pub fn check_checkpoint(history: &[CheckpointCall]) -> Verdict {
    let mut revision_of = HashMap::new();
    let mut value_of = HashMap::new();
    for call in history {
        let (value, revision) = match (&call.op, &call.answer) {
            (CheckpointOp::Put { value, .. }, Some(CheckpointAnswer::Written { revision })) => {
                (*value, *revision)
            }
            (CheckpointOp::Get, Some(CheckpointAnswer::Found { value, revision })) => {
                (*value, *revision)
            }
            _ => continue,
        };
        let before = *value_of.entry(revision).or_insert(value);
        if before != value {
            return refuted(format!(
                "revision {revision} was used twice: for value {before} and for value {value}"
            ));
        }
        let before = *revision_of.entry(value).or_insert(revision);
        if before != revision {
            return refuted(format!(
                "value {value} was written once and has two revisions: {before} and {revision}"
            ));
        }
    }
    check(&Checkpoint { revision_of }, history)
}

// ---------------------------------------------------------------------------------------- locks

/// A call on one fenced lock.
#[derive(Clone, Debug)]
pub enum LockOp {
    /// POST.
    Acquire {
        /// The ttl asked for.
        ttl_ms: u64,
    },
    /// POST renew.
    Renew {
        /// The acquisition.
        token: String,
        /// The new ttl.
        ttl_ms: u64,
    },
    /// DELETE.
    Release {
        /// The acquisition.
        token: String,
    },
}

/// What a lock call answers.
#[derive(Clone, Debug)]
pub enum LockAnswer {
    /// 201.
    Acquired {
        /// Names the acquisition.
        token: String,
        /// Its fence.
        fence: u64,
    },
    /// 200 or 204.
    Done,
    /// 409.
    Refused,
}

/// Who holds a lock.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockHolder {
    /// Unknown where the answer of the acquisition was lost.
    token: Option<String>,
    /// The first instant at which it may run out: a lock is held *at least* its ttl from sending.
    until: u64,
}

/// What a lock holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LockState {
    holder: Option<LockHolder>,
    fence: u64,
}

/// One fenced lock. That a ttl ran out is a step nobody sees, possible from [`LockHolder::until`]
/// on: for a call that ended before that instant it is impossible, for a later one both hold.
pub struct Lock;

impl Lock {
    fn answered(state: &LockState, call: &LockCall) -> Option<LockState> {
        let until = |ttl_ms: u64| call.start.saturating_add(ttl_ms.saturating_mul(1_000_000));
        let holds = |token: &String| {
            state.holder.as_ref().is_some_and(|holder| holder.token.as_ref() == Some(token))
        };
        match (&call.op, &call.answer) {
            (LockOp::Acquire { ttl_ms }, None) => {
                let mut then = state.clone();
                then.holder.get_or_insert(LockHolder { token: None, until: until(*ttl_ms) });
                Some(then)
            }
            (LockOp::Acquire { ttl_ms }, Some(LockAnswer::Acquired { token, fence })) => {
                let holder = LockHolder { token: Some(token.clone()), until: until(*ttl_ms) };
                (state.holder.is_none() && *fence > state.fence)
                    .then_some(LockState { holder: Some(holder), fence: *fence })
            }
            (LockOp::Acquire { .. }, Some(LockAnswer::Refused)) => {
                state.holder.is_some().then(|| state.clone())
            }
            (LockOp::Renew { token, ttl_ms }, answer) => {
                let mut then = state.clone();
                let held = holds(token);
                if held && !matches!(answer, Some(LockAnswer::Refused)) {
                    then.holder =
                        Some(LockHolder { token: Some(token.clone()), until: until(*ttl_ms) });
                }
                fits(answer, held).then_some(then)
            }
            (LockOp::Release { token }, answer) => {
                let mut then = state.clone();
                let held = holds(token);
                if held {
                    then.holder = None;
                }
                fits(answer, held).then_some(then)
            }
            (LockOp::Acquire { .. }, Some(LockAnswer::Done)) => None,
        }
    }
}

/// Whether a renewal or a release may have been answered so.
fn fits(answer: &Option<LockAnswer>, held: bool) -> bool {
    match answer {
        None => true,
        Some(LockAnswer::Done) => held,
        Some(LockAnswer::Refused) => !held,
        Some(LockAnswer::Acquired { .. }) => false,
    }
}

impl Model for Lock {
    type State = LockState;
    type Op = LockOp;
    type Answer = LockAnswer;

    fn initial(&self) -> LockState {
        LockState::default()
    }

    fn step(&self, state: &LockState, call: &LockCall) -> Vec<LockState> {
        let mut before = vec![state.clone()];
        if state.holder.as_ref().is_some_and(|holder| holder.until <= call.end) {
            before.push(LockState { holder: None, fence: state.fence });
        }
        before.iter().filter_map(|state| Lock::answered(state, call)).collect()
    }
}

/// Checks the history of one lock.
pub fn check_lock(history: &[LockCall]) -> Verdict {
    let mut fence_of: BTreeMap<&str, u64> = BTreeMap::new();
    let mut token_of: BTreeMap<u64, &str> = BTreeMap::new();
    for call in history {
        let Some(LockAnswer::Acquired { token, fence }) = &call.answer else { continue };
        if fence_of.insert(token, *fence).is_some() {
            return refuted(format!("token {token} was given out twice"));
        }
        if token_of.insert(*fence, token).is_some() {
            return refuted(format!("fence {fence} was given out twice"));
        }
    }
    check(&Lock, history)
}

// ---------------------------------------------------------------------------------------- turns

/// A call on one chat's queue.
#[derive(Clone, Debug)]
pub enum TurnOp {
    /// POST turns. What its answer says of the queue is recorded as an [`TurnOp::Ask`] over the
    /// same interval: a POST that waits takes its place at one instant and is granted at a later.
    Take {
        /// For this session.
        session: u64,
    },
    /// GET, with or without a wait.
    Ask {
        /// The ticket.
        ticket: u64,
    },
    /// DELETE: a release or a withdrawal.
    Release {
        /// The ticket.
        ticket: u64,
        /// Its session.
        session: u64,
    },
    /// DELETE of the session, which ends all its tickets.
    Close {
        /// The session.
        session: u64,
    },
}

/// What a turn call answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnAnswer {
    /// POST 200 or 202.
    Ticket {
        /// The ticket.
        ticket: u64,
    },
    /// 200 with `granted: true`.
    Granted {
        /// The ticket.
        ticket: u64,
        /// The grant's fence.
        fence: u64,
        /// The session of the turn before.
        previous: Option<u64>,
    },
    /// 202 with `granted: false`.
    Waiting {
        /// The ticket.
        ticket: u64,
        /// How many are before it, the holder counted.
        ahead: u64,
    },
    /// 204.
    Done,
    /// 404 `ticket_gone`.
    Gone,
    /// 404 `session_expired`.
    SessionExpired,
}

/// One place in a queue. `ticket` is unknown where the answer was lost.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    ticket: Option<u64>,
    session: u64,
}

/// What a chat's queue holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TurnState {
    queue: Vec<Place>,
    /// The greatest fence that is known to have been granted.
    fence: u64,
    /// The greatest ticket that is known to have been given out.
    ticket: u64,
    /// Who held the turn before the one at the head.
    previous: Option<u64>,
    closed: Vec<u64>,
}

/// One chat's queue. The head is granted, always: the apply that frees the turn or adds a ticket
/// also grants (DESIGN 4 rule 2).
pub struct Turns {
    /// The fence of each ticket that anybody saw granted.
    fence_of: HashMap<u64, u64>,
}

impl Turns {
    /// Notes that the head has just been granted; `None` = its fence did not grow.
    fn granted(&self, mut state: TurnState) -> Option<TurnState> {
        let head = state.queue.first().and_then(|head| head.ticket);
        if let Some(fence) = head.and_then(|ticket| self.fence_of.get(&ticket)) {
            if *fence <= state.fence {
                return None;
            }
            state.fence = *fence;
        }
        Some(state)
    }

    fn take(&self, state: &TurnState, ticket: Option<u64>, session: u64) -> Option<TurnState> {
        let mut then = state.clone();
        if let Some(ticket) = ticket {
            if ticket <= then.ticket {
                return None;
            }
            then.ticket = ticket;
        }
        then.queue.push(Place { ticket, session });
        if then.queue.len() == 1 { self.granted(then) } else { Some(then) }
    }

    fn without(&self, state: &TurnState, gone: impl Fn(&Place) -> bool) -> Option<TurnState> {
        let mut then = state.clone();
        let head = then.queue.first().cloned();
        then.queue.retain(|place| !gone(place));
        match head {
            Some(head) if gone(&head) => {
                then.previous = Some(head.session);
                self.granted(then)
            }
            _ => Some(then),
        }
    }

    /// What a ticket that is in the queue is told.
    fn told(&self, state: &TurnState, ticket: u64) -> Option<TurnAnswer> {
        let ahead = state.queue.iter().position(|place| place.ticket == Some(ticket))? as u64;
        Some(if ahead == 0 {
            TurnAnswer::Granted { ticket, fence: state.fence, previous: state.previous }
        } else {
            TurnAnswer::Waiting { ticket, ahead }
        })
    }

    fn answered(&self, state: &TurnState, call: &TurnCall) -> Option<TurnState> {
        match (&call.op, &call.answer) {
            (TurnOp::Take { session }, answer) => {
                let dead = state.closed.contains(session);
                match answer {
                    None if dead => Some(state.clone()),
                    None => self.take(state, None, *session),
                    Some(TurnAnswer::SessionExpired) => dead.then(|| state.clone()),
                    Some(TurnAnswer::Ticket { ticket }) if !dead => {
                        self.take(state, Some(*ticket), *session)
                    }
                    Some(_) => None,
                }
            }
            (TurnOp::Ask { .. }, None) => Some(state.clone()),
            (TurnOp::Ask { ticket }, Some(answer)) => {
                let told = self.told(state, *ticket);
                let fits = match answer {
                    TurnAnswer::Gone => told.is_none(),
                    // Which of the two 404s a ticket of a closed session meets is not fixed.
                    TurnAnswer::SessionExpired => told.is_none() && !state.closed.is_empty(),
                    answer => told.as_ref() == Some(answer),
                };
                fits.then(|| state.clone())
            }
            (TurnOp::Release { ticket, session }, answer) => {
                let dead = state.closed.contains(session);
                match answer {
                    Some(TurnAnswer::SessionExpired) => dead.then(|| state.clone()),
                    None | Some(TurnAnswer::Done) => {
                        self.without(state, |place| place.ticket == Some(*ticket))
                    }
                    Some(_) => None,
                }
            }
            (TurnOp::Close { session }, answer) => {
                let dead = state.closed.contains(session);
                match answer {
                    Some(TurnAnswer::SessionExpired) if dead => Some(state.clone()),
                    None if dead => Some(state.clone()),
                    None | Some(TurnAnswer::Done) if !dead => {
                        let mut then = self.without(state, |place| place.session == *session)?;
                        then.closed.push(*session);
                        then.closed.sort_unstable();
                        Some(then)
                    }
                    _ => None,
                }
            }
        }
    }
}

impl Model for Turns {
    type State = TurnState;
    type Op = TurnOp;
    type Answer = TurnAnswer;

    fn initial(&self) -> TurnState {
        TurnState::default()
    }

    fn step(&self, state: &TurnState, call: &TurnCall) -> Vec<TurnState> {
        self.answered(state, call).into_iter().collect()
    }
}

/// Checks the history of one chat's turns.
pub fn check_turns(history: &[TurnCall]) -> Verdict {
    let mut fence_of = HashMap::new();
    let mut ticket_of = HashMap::new();
    for call in history {
        let Some(TurnAnswer::Granted { ticket, fence, .. }) = &call.answer else { continue };
        let before = *fence_of.entry(*ticket).or_insert(*fence);
        if before != *fence {
            return refuted(format!("ticket {ticket} was granted twice: {before} and {fence}"));
        }
        let before = *ticket_of.entry(*fence).or_insert(*ticket);
        if before != *ticket {
            return refuted(format!("fence {fence} was granted to {before} and to {ticket}"));
        }
    }
    check(&Turns { fence_of }, history)
}

fn refuted(text: String) -> Verdict {
    Verdict::Refuted(text)
}
