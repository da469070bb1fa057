//! Ends of sessions in slices: nobody can tell them from ends in one apply (SPEC E2, M3).

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::select;

use super::kit::*;
use crate::machine::level::LEVEL_SLICES;
use crate::machine::*;
use crate::types::*;

/// A machine that ends sessions in slices: all that leave more than two tickets and outboxes, one
/// of them an entry.
fn sliced() -> Kit {
    let mut kit = Kit::new();
    kit.run(Command::RaiseLevel { level: LEVEL_SLICES });
    kit
}

fn lead(name: &str) -> QueueKey {
    queue(QueueKind::Lead, name)
}

fn chat(number: usize) -> String {
    format!("demo:{number}")
}

/// Goes on until nothing is left of those that ended.
fn finish(kit: &mut Kit) {
    while kit.machine.is_ending() {
        kit.run(Command::Noop);
    }
}

fn try_take(kit: &mut Kit, session: Incarnation, queue: &QueueKey) -> Reply {
    kit.run(Command::TakeTicket { session, queue: queue.clone(), if_free: true })
}

#[test]
fn e2_a_session_that_has_much_is_over_at_once_and_freed_in_slices() {
    let mut kit = sliced();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let turns: Vec<_> = (0..9).map(|at| kit.take(a, turn(&chat(at)))).collect();
    let waiting: Vec<_> = (0..9).map(|at| kit.take(b, turn(&chat(at)))).collect();
    kit.take(a, lead("jobs"));
    let (next_lead, _) = kit.take(b, lead("jobs"));

    kit.close(a);
    let grants: Vec<_> = kit.grants().iter().map(|grant| grant.1).collect();
    assert_eq!(grants, [next_lead], "leads go first, though it was taken last");
    assert!(kit.machine.session(a).is_none() && kit.machine.is_ending());
    let again = Command::TakeTicket { session: a, queue: turn("x"), if_free: false };
    assert_eq!(kit.run(again), Reply::SessionExpired);
    assert_eq!(kit.machine.tickets_of(a), [], "nothing is its any more");

    // What was not reached yet is nobody's either.
    let (last, fence) = (turn(&chat(8)), turns[8].1.unwrap().fence);
    assert_eq!(kit.machine.holder(&last).unwrap(), Holder { session: b, fence: None });
    assert_eq!(kit.machine.ticket(&p(), turns[8].0), TicketState::Gone);
    let held = match kit.commit(holder(last, fence, None), vec![put("r", "v", Expect::Any)]) {
        Reply::Refused(Refusal::Fenced { holder }) => holder.unwrap(),
        other => panic!("{other:?}"),
    };
    assert!(held.session == b && held.fence.unwrap() > fence, "who waited there has it now");

    let left = kit.machine.turn_counts();
    kit.run(Command::Noop);
    assert_eq!(kit.machine.turn_counts().1, left.1 - 2, "one, and one for the entry's command");
    finish(&mut kit);
    for (ticket, _) in waiting {
        assert!(matches!(kit.machine.ticket(&p(), ticket), TicketState::Granted { .. }));
    }
    assert_eq!(kit.machine.turn_counts(), (9, 0));
}

#[test]
fn e2_what_the_dead_left_is_free_for_whoever_asks() {
    let mut kit = sliced();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let lock = |key: &str| {
        let key = key.to_owned();
        Command::AcquireLock { prefix: p(), key, ttl_ms: 100, node: 1 }
    };
    let taken: Vec<_> = (0..20).map(|at| kit.take(a, turn(&chat(at))).0).collect();
    kit.take(a, queue(QueueKind::Lock, "k"));
    kit.take(a, queue(QueueKind::Lock, "k"));
    kit.close(a);
    assert!(matches!(kit.run(lock("k")), Reply::Lock { .. }));
    assert!(matches!(
        try_take(&mut kit, b, &turn(&chat(19))),
        Reply::Ticket { grant: Some(_), ahead: 0, .. }
    ));
    let (_, grant) = kit.fresh(b, "1", &chat(18));
    assert!(grant.is_some(), "nobody is before it");
    assert_eq!(kit.release(taken[16], b), Reply::TicketGone);
    let post = Op::Post { prefix: p(), message: message("2", &chat(17), "x"), session: Some(b) };
    kit.commit(Authority::Nobody, vec![post]);
    assert_eq!(kit.machine.holder(&turn(&chat(17))).unwrap().session, b);
    assert!(kit.machine.is_ending(), "all that came before its turn");
}

/// Each of them alone would end with its entry; together they would make others wait as one does.
#[test]
fn e2_many_that_end_with_one_entry_count_together() {
    let mut kit = sliced();
    let all: Vec<_> = (0..8).map(|_| kit.open(SessionKind::Remote, "")).collect();
    for (at, session) in all.iter().enumerate() {
        kit.take(*session, turn(&chat(at)));
    }
    let b = kit.replica("b");
    (0..8).for_each(|at| assert!(kit.take(b, turn(&chat(at))).1.is_none()));
    let close = |session: &Incarnation| Command::CloseSession { session: *session };
    let replies = kit.run_all(all.iter().map(close).collect());
    assert!(replies.iter().all(|reply| *reply == Reply::Done));
    assert!(kit.machine.is_ending() && kit.grants().len() == 2, "{:?}", kit.grants());
    assert_eq!(kit.machine.sessions().len(), 1, "all of them are over");
    finish(&mut kit);
    assert_eq!(kit.machine.turn_counts(), (8, 0));
}

/// What another left before does not keep a lead back.
#[test]
fn e2_a_lead_passes_on_though_another_end_goes_on() {
    let mut kit = sliced();
    let (first, second) = (kit.replica("a"), kit.replica("b"));
    for at in 0..20 {
        kit.take(first, turn(&chat(at)));
    }
    for at in 20..30 {
        kit.take(second, turn(&chat(at)));
    }
    kit.take(second, lead("l"));
    let third = kit.replica("c");
    let (next, _) = kit.take(third, lead("l"));
    kit.close(first);
    kit.close(second);
    assert!(kit.grants().iter().any(|grant| grant.1 == next));
    assert!(kit.machine.is_ending());
}

/// What a turn's holder asks about its own line.
#[test]
fn e2_the_dead_are_no_company() {
    let mut kit = sliced();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let mut held = Vec::new();
    for at in 0..9 {
        held.push(kit.take(b, turn(&chat(at))));
        kit.take(a, turn(&chat(at)));
    }
    let (late, late_grant) = kit.take(a, turn("late"));
    let alone = |kit: &Kit, at: usize| {
        let (ticket, grant) = held[at];
        kit.machine.is_alone(&turn(&chat(at)), ticket, grant.unwrap().fence)
    };
    assert!(!alone(&kit, 8));
    assert!(kit.machine.is_alone(&turn("late"), late, late_grant.unwrap().fence));
    kit.close(a);
    assert!(kit.machine.is_ending() && alone(&kit, 8));
    assert!(!kit.machine.is_alone(&turn("late"), late, late_grant.unwrap().fence));
}

#[test]
fn e2_messages_of_one_that_has_much_keep_their_place() {
    let mut kit = sliced();
    let a = kit.replica("a");
    let old: Vec<_> = (0..6).map(|at| kit.fresh(a, &format!("old {at}"), &chat(at)).0).collect();
    kit.run(Command::DeclareDead { process: ProcessToken(9) });
    kit.close(a);
    // No replica lives: nobody's, until one opens; what was not reached by then is given to it later.
    let b = kit.replica("b");
    let (new, grant) = kit.fresh(b, "new", &chat(5));
    assert_eq!(grant, None, "the older message comes first");
    assert!(kit.grants().iter().any(|grant| (grant.0, grant.1) == (b, old[5])));
    finish(&mut kit);
    let owned: Vec<_> = kit.machine.tickets_of(b).iter().map(|ticket| ticket.0).collect();
    assert_eq!(owned, old.iter().copied().chain([new]).collect::<Vec<_>>());
}

#[test]
fn e2_replies_of_one_that_has_much_get_another_sender() {
    let mut kit = sliced();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    for at in 0..6 {
        let (_, grant) = kit.take(a, turn(&chat(at)));
        let by = holder(turn(&chat(at)), grant.unwrap().fence, Some(a));
        kit.commit(by, vec![send(&chat(at), &format!("1-{at}"), true, 9)]);
    }
    kit.run(Command::GiveUpSession { session: a });
    let owner = |kit: &Kit, at| kit.machine.outbox_owner(&p(), &chat(at));
    assert_eq!(owner(&kit, 5), None);
    // The next entry of a chat finds its sender.
    let (_, grant) = kit.take(b, turn(&chat(5)));
    let by = holder(turn(&chat(5)), grant.unwrap().fence, Some(b));
    kit.commit(by, vec![send(&chat(5), "2", true, 9)]);
    assert_eq!(owner(&kit, 5), Some(b));
    finish(&mut kit);
    assert!((0..6).all(|at| owner(&kit, at) == Some(b)));
    let adopted = |at| Effect::OutboxReady { session: b, prefix: p(), chat: chat(at) };
    assert!(kit.effects.contains(&adopted(4)), "the last of them came last");
}

#[test]
fn e2_an_end_that_goes_on_outlives_a_snapshot_and_a_restart() {
    let mut kit = sliced();
    let (a, b) = (kit.replica("a"), kit.replica("b"));
    let left: Vec<_> = (0..6).map(|at| kit.take(a, turn(&chat(at))).0).collect();
    kit.close(a);
    let records: Vec<_> = kit.machine.freeze().records().collect();
    // Format 1 for ever.
    assert!(records.contains(&(vec![23, 1], vec![0])), "session 1, closed");
    kit.machine = Machine::from_records(records).unwrap();
    assert!(kit.machine.is_ending());
    assert_eq!(kit.machine.tickets_of(a), []);
    finish(&mut kit);
    assert!(left.iter().all(|ticket| kit.machine.ticket(&p(), *ticket) == TicketState::Gone));
    assert_eq!(kit.machine.turn_counts(), (0, 0));
    assert!(matches!(try_take(&mut kit, b, &turn(&chat(1))), Reply::Ticket { ahead: 0, .. }));
}

/// A group whose programs do not all know it goes on as they all do.
#[test]
fn m5_below_its_level_a_session_ends_in_one_apply() {
    let mut kit = Kit::new();
    kit.run(Command::RaiseLevel { level: LEVEL_SLICES - 1 });
    let a = kit.replica("a");
    for at in 0..9 {
        kit.take(a, turn(&chat(at)));
    }
    kit.close(a);
    assert!(!kit.machine.is_ending());
    assert_eq!(kit.machine.turn_counts(), (0, 0));
}

#[derive(Clone, Debug)]
enum Step {
    Open,
    Take {
        session: usize,
        queue: usize,
        if_free: bool,
    },
    Admit {
        session: usize,
        chat: usize,
    },
    /// The holder writes, replies and ends its turn, or its message.
    Say {
        queue: usize,
        done: bool,
    },
    /// Somebody who held a queue once writes in its name.
    Late {
        grant: usize,
        named: bool,
    },
    Leave {
        session: usize,
        queue: usize,
    },
    Sent {
        session: usize,
        chat: usize,
    },
    Lock(&'static str),
    Post {
        chat: usize,
    },
    Rekey {
        from: usize,
        to: usize,
    },
    End {
        session: usize,
        how: u8,
    },
    /// The one replica that may end does.
    EndReplica {
        how: u8,
    },
    Restart,
    Pass,
}

const CHATS: usize = 4;

fn steps() -> impl Strategy<Value = Step> {
    let queue = 0..CHATS + 2;
    let chats = || 0..CHATS;
    prop_oneof![
        2 => Just(Step::Open),
        12 => (0..6_usize, queue.clone(), any::<bool>())
            .prop_map(|(session, queue, if_free)| Step::Take { session, queue, if_free }),
        6 => (0..2_usize, chats()).prop_map(|(session, chat)| Step::Admit { session, chat }),
        8 => (queue.clone(), any::<bool>()).prop_map(|(queue, done)| Step::Say { queue, done }),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(grant, named)| Step::Late { grant, named }),
        2 => (0..6_usize, queue).prop_map(|(session, queue)| Step::Leave { session, queue }),
        2 => (0..2_usize, chats()).prop_map(|(session, chat)| Step::Sent { session, chat }),
        1 => select(&["k", "m"][..]).prop_map(Step::Lock),
        2 => chats().prop_map(|chat| Step::Post { chat }),
        1 => (chats(), chats()).prop_map(|(from, to)| Step::Rekey { from, to }),
        3 => (2..6_usize, 0..3_u8).prop_map(|(session, how)| Step::End { session, how }),
        1 => (0..3_u8).prop_map(|how| Step::EndReplica { how }),
        1 => Just(Step::Restart),
        2 => Just(Step::Pass),
    ]
}

/// A machine, and what its clients were told.
struct Side {
    kit: Kit,
    /// Every grant, by its ticket and which of that ticket's it was.
    granted: BTreeMap<(TicketId, usize), (QueueKey, Incarnation, Fence)>,
}

/// Two replicas live, and programs. One of the replicas may end, so there is never a choice of whom its
/// messages go to: that is made when they go.
struct Run {
    sides: [Side; 2],
    sessions: Vec<Incarnation>,
    messages: usize,
}

fn queue_at(at: usize) -> QueueKey {
    match at {
        at if at < CHATS => turn(&chat(at)),
        at => lead(&format!("lead {at}")),
    }
}

impl Side {
    fn new(mut kit: Kit) -> Self {
        kit.replica("a");
        kit.replica("b");
        Self { kit, granted: BTreeMap::new() }
    }

    fn run(&mut self, command: Command) -> Reply {
        let reply = self.kit.run(command);
        for effect in &self.kit.effects {
            if let Effect::Granted { session, queue, ticket, grant } = effect {
                let of_ticket = (*ticket, 0)..=(*ticket, usize::MAX);
                let nth = self.granted.range(of_ticket).count();
                self.granted.insert((*ticket, nth), (queue.clone(), *session, grant.fence));
            }
        }
        plain(reply)
    }

    /// The ticket that holds a queue, as its client knows it.
    fn holds(&self, queue: &QueueKey) -> Option<(TicketId, Incarnation, Fence)> {
        let Holder { session, fence } = self.kit.machine.holder(queue)?;
        let fence = fence?;
        let held = self.granted.iter().find(|(_, (_, _, given))| *given == fence);
        held.map(|((ticket, _), _)| (*ticket, session, fence))
    }

    /// What there is once nothing is left to be done: sessions, lines, outboxes, rows.
    fn whole(&mut self) -> Vec<String> {
        finish(&mut self.kit);
        let machine = &self.kit.machine;
        let mut all: Vec<String> =
            machine.sessions().iter().map(|session| format!("{:?}", session.session)).collect();
        for number in 1..=machine.tables.prefixes.get(&p()).unwrap().tickets {
            let ticket = TicketId(number);
            all.push(match machine.ticket(&p(), ticket) {
                TicketState::Granted { queue, session, .. } => format!("{queue:?} {session}"),
                other => format!("{other:?}"),
            });
            all.push(format!("{:?}", machine.journal(&p(), ticket)));
        }
        for chat in (0..CHATS).map(chat) {
            let entries = machine.outbox(&p(), &chat, 0, 100).into_iter();
            let entries: Vec<_> =
                entries.map(|entry| (entry.number, entry.id, entry.unsent)).collect();
            all.push(format!("{entries:?} {:?}", machine.outbox_owner(&p(), &chat)));
        }
        all.push(format!("{:?}", machine.row(&row("r")).map(|row| (row.value, row.revision))));
        all
    }
}

/// A reply without the numbers of fences, which tell how many grants there were before.
fn plain(reply: Reply) -> Reply {
    let grant = |grant: Option<Grant>| grant.map(|grant| Grant { fence: Fence(0), ..grant });
    let held = |holder: Holder| Holder { fence: holder.fence.map(|_| Fence(0)), ..holder };
    match reply {
        Reply::Ticket { ticket, grant: given, ahead } => {
            Reply::Ticket { ticket, grant: grant(given), ahead }
        }
        Reply::Held(holder) => Reply::Held(held(holder)),
        Reply::Lock { token, ttl_ms, .. } => Reply::Lock { token, fence: Fence(0), ttl_ms },
        Reply::Refused(Refusal::Fenced { holder }) => {
            Reply::Refused(Refusal::Fenced { holder: holder.map(held) })
        }
        Reply::Admitted(admissions) => {
            let plain = admissions.into_iter().map(|admission| match admission {
                Admission::Fresh { ticket, grant: given } => {
                    Admission::Fresh { ticket, grant: grant(given) }
                }
                other => other,
            });
            Reply::Admitted(plain.collect())
        }
        other => other,
    }
}

impl Run {
    fn new() -> Self {
        let mut one = Kit::new();
        // As many entries as the other has had.
        one.run(Command::Noop);
        let sides = [Side::new(one), Side::new(sliced())];
        Self { sides, sessions: vec![Incarnation(1), Incarnation(2)], messages: 0 }
    }

    fn both(&mut self, command: &Command) {
        let [one, other] = &mut self.sides;
        let (one, other) = (one.run(command.clone()), other.run(command.clone()));
        assert_eq!(one, other, "{command:?}");
        if let Reply::Session { session, .. } = one {
            self.sessions.push(session);
        }
    }

    fn session(&self, at: usize) -> Incarnation {
        self.sessions.get(at).copied().unwrap_or(self.sessions[1])
    }

    /// The same command under each side's fence.
    fn as_holders(&mut self, command: impl Fn(&Side) -> Option<Command>) {
        let [one, other] = &mut self.sides;
        // A client acts once it was told that it may, which may be later in slices.
        let (Some(first), Some(second)) = (command(one), command(other)) else { return };
        assert_eq!(one.run(first.clone()), other.run(second), "{first:?}");
    }

    fn end(&mut self, session: Incarnation, how: u8) {
        self.both(&match how {
            0 => Command::CloseSession { session },
            1 => Command::GiveUpSession { session },
            _ => Command::ExpireSession { session, seq: 0 },
        });
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Open if self.sessions.len() < 6 => {
                let (kind, replica) = (SessionKind::Remote, String::new());
                let lease_ms = 1_000;
                self.both(&Command::OpenSession { prefix: p(), kind, replica, node: 1, lease_ms });
            }
            Step::Open | Step::Pass => self.both(&Command::Noop),
            Step::Take { session, queue, if_free } => {
                let (session, queue) = (self.session(session), queue_at(queue));
                self.both(&Command::TakeTicket { session, queue, if_free });
            }
            Step::Admit { session, chat: at } => {
                self.messages += 1;
                let messages = vec![message(&self.messages.to_string(), &chat(at), "x")];
                let session = self.sessions[session];
                self.both(&Command::Admit { prefix: p(), session, messages, cursor: None });
            }
            Step::Say { queue: at, done } => {
                self.messages += 1;
                let id = self.messages.to_string();
                self.as_holders(|side| {
                    let queue = queue_at(at);
                    let (ticket, session, fence) = side.holds(&queue)?;
                    let mut ops = vec![put("r", &id, Expect::Any), send(&queue.name, &id, true, 2)];
                    if done && side.kit.machine.journal(&p(), ticket).is_some() {
                        ops.push(Op::Acknowledge { prefix: p(), ticket });
                    }
                    ops.push(Op::Release { prefix: p(), ticket });
                    Some(Command::Commit { by: holder(queue, fence, Some(session)), ops })
                });
            }
            Step::Late { grant, named } => {
                let all = self.sides[0].granted.keys();
                let Some(nth) = grant.checked_rem(all.len()) else { return };
                let Some(which) = all.copied().nth(nth) else { return };
                self.as_holders(|side| {
                    let (queue, session, fence) = side.granted.get(&which)?.clone();
                    let by = holder(queue, fence, named.then_some(session));
                    Some(Command::Commit { by, ops: vec![put("r", "late", Expect::Any)] })
                });
            }
            Step::Leave { session, queue } => {
                let (session, queue) = (self.session(session), queue_at(queue));
                self.both(&Command::ReleaseQueue { queue, session });
            }
            Step::Sent { session, chat: at } => {
                let (session, up_to) = (self.sessions[session], u64::MAX);
                self.both(&Command::MarkSent { prefix: p(), chat: chat(at), up_to, session });
            }
            Step::Lock(key) => {
                let key = key.to_owned();
                self.both(&Command::AcquireLock { prefix: p(), key, ttl_ms: 50, node: 1 });
            }
            Step::Post { chat: at } => {
                self.messages += 1;
                let message = message(&format!("p{}", self.messages), &chat(at), "x");
                let ops = vec![Op::Post { prefix: p(), message, session: None }];
                self.both(&Command::Commit { by: Authority::Nobody, ops });
            }
            Step::Rekey { from, to } => {
                let (from, to) = (chat(from), chat(to));
                self.both(&Command::Rekey { prefix: p(), from, to, users: vec![], keep_new: true });
            }
            // The second replica lives on.
            Step::End { session, how } => {
                let session = self.sessions.get(session.max(2)).copied();
                self.end(session.unwrap_or(Incarnation(99)), how);
            }
            Step::EndReplica { how } => self.end(self.sessions[0], how),
            Step::Restart => {
                let kit = &mut self.sides[1].kit;
                kit.machine = Machine::from_records(kit.machine.freeze().records()).unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// The same commands, in a machine that ends sessions in one apply and in one that does so in
    /// slices: the same answers, and the same state once nothing is left to be done.
    #[test]
    fn e2_an_end_in_slices_is_an_end_in_one_apply(steps in prop::collection::vec(steps(), 1..60)) {
        let mut run = Run::new();
        for step in &steps {
            run.step(step);
        }
        let [one, other] = &mut run.sides;
        prop_assert_eq!(one.whole(), other.whole());
    }
}
