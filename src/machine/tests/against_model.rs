//! Random commands, on the machine and on the naive model: every reply, every grant and every view
//! is the same, every invariant holds, and stopping and loading in between changes nothing.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::select;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};

use super::kit::*;
use super::model::Model;
use crate::machine::*;
use crate::types::*;

#[derive(Clone, Debug)]
enum Step {
    /// A command, some ms after the one before.
    Run(u64, Box<Command>),
    /// The machine is written as a snapshot and read again.
    Snapshot,
    /// What changed is cut.
    Cut,
    /// What changed is cut, and the machine made again from all cuts.
    Restart,
}

fn limits() -> Limits {
    Limits {
        lease_ms_min: 10,
        lease_ms_max: 1_000,
        tickets_per_queue_max: 4,
        sessions_max: 6,
        idle_keys_max: 2,
        dedupe_ids_max: 6,
        dedupe_ms: 500,
        idempotency_keys_max: 3,
        idempotency_ms: 300,
        attempts_max: 3,
        outbox_unsent_max: 3,
        dead_letters_max: 2,
        prefixes_max: 1,
        mark_every_ms: 100,
    }
}

const CHATS: [&str; 3] = ["a", "b", "c"];

/// Keys that have a queue and an outbox, and keys that have a row.
fn chats_and_rows() -> impl Strategy<Value = &'static str> {
    select(&["a", "b", "c", "r", "s"][..])
}

fn queues() -> impl Strategy<Value = QueueKey> {
    prop_oneof![
        6 => select(&CHATS[..]).prop_map(turn),
        2 => Just(queue(QueueKind::Lead, "l")),
        1 => Just(queue(QueueKind::Lock, "k")),
    ]
}

/// Live sessions, and now and then one that is not.
fn sessions(model: &Model) -> impl Strategy<Value = Incarnation> + use<> {
    let mut all: Vec<Incarnation> = model.sessions.iter().flat_map(|life| [life.id; 4]).collect();
    all.extend([Incarnation(0), Incarnation(1), Incarnation(99)]);
    select(all)
}

/// Live tickets, granted ones more often, and now and then one that is not.
fn tickets(model: &Model) -> impl Strategy<Value = TicketId> + use<> {
    let weight = |grant: Option<Grant>| if grant.is_some() { 6 } else { 2 };
    let live = model.tickets.iter();
    let mut all: Vec<TicketId> =
        live.flat_map(|place| vec![place.id; weight(place.grant)]).collect();
    all.extend([TicketId(0), TicketId(1), TicketId(model.tickets_given + 1)]);
    select(all)
}

/// A ticket with the session that owns it, mostly.
fn owned(model: &Model) -> impl Strategy<Value = (TicketId, Incarnation)> + use<> {
    let live = model.tickets.iter().filter_map(|place| Some((place.id, place.owner?)));
    let mut all: Vec<(TicketId, Incarnation)> = live.collect();
    all.push((TicketId(1), Incarnation(1)));
    prop_oneof![4 => select(all), 1 => (tickets(model), sessions(model))]
}

fn messages() -> impl Strategy<Value = Admit> {
    let ids = select(&["1", "2", "3", "4", "5", "6", "7", "8", "9"][..]);
    let bodies = prop_oneof![9 => Just("x"), 1 => Just("y")];
    (ids, select(&CHATS[..]), bodies).prop_map(|(id, chat, body)| message(id, chat, body))
}

fn authorities(model: &Model) -> impl Strategy<Value = Authority> + use<> {
    let mut all = vec![Authority::Nobody; 2];
    for place in &model.tickets {
        let Some(grant) = place.grant else { continue };
        let exact = holder(place.queue.clone(), grant.fence, place.owner);
        all.extend(vec![exact; 6]);
        all.push(holder(place.queue.clone(), grant.fence, None));
        all.push(holder(place.queue.clone(), Fence(grant.fence.0 - 1), place.owner));
        all.push(holder(place.queue.clone(), grant.fence, Some(Incarnation(1))));
    }
    select(all)
}

fn expectations(model: &Model) -> impl Strategy<Value = Expect> + use<> {
    let mut all = vec![Expect::Any, Expect::Any, Expect::Absent];
    all.extend(model.rows.iter().map(|row| Expect::Revision(row.revision)));
    all.push(Expect::Revision(Revision(model.revision + 1)));
    select(all)
}

fn ops(model: &Model) -> impl Strategy<Value = Op> + use<> {
    let rows = || select(&["r", "s"][..]).prop_map(row);
    let ttls = prop_oneof![3 => Just(None), 1 => Just(Some(50)), 1 => Just(Some(0))];
    let value = Just(b"v".to_vec());
    let owners = prop_oneof![1 => Just(None), 2 => sessions(model).prop_map(Some)];
    let sends = (select(&CHATS[..]), 0..9_u32, any::<bool>(), 0..3_u32);
    prop_oneof![
        3 => (rows(), value, expectations(model), ttls)
            .prop_map(|(row, value, expect, ttl_ms)| Op::Put { row, value, expect, ttl_ms }),
        1 => (rows(), expectations(model)).prop_map(|(row, expect)| Op::Delete { row, expect }),
        3 => tickets(model).prop_map(|ticket| Op::Acknowledge { prefix: p(), ticket }),
        3 => tickets(model).prop_map(|ticket| Op::Release { prefix: p(), ticket }),
        2 => (tickets(model), 0..9_u64)
            .prop_map(|(ticket, said)| Op::Keep { prefix: p(), ticket, said }),
        3 => sends.prop_map(|(chat, id, deliver, keep)| send(chat, &id.to_string(), deliver, keep)),
        1 => (messages(), owners)
            .prop_map(|(message, session)| Op::Post { prefix: p(), message, session }),
    ]
}

fn processes() -> impl Strategy<Value = ProcessToken> {
    (0..6_u128).prop_map(ProcessToken)
}

/// Commands on sessions, queues and locks.
fn turns(model: &Model) -> BoxedStrategy<Command> {
    let kinds = select(&[SessionKind::Replica, SessionKind::Replica, SessionKind::Remote][..]);
    let open = (kinds, select(&["n1", "n2", ""][..]), 0..2_000_u64);
    let open_again = open.clone();
    let seqs = prop_oneof![2 => Just(None), 1 => (0..4_u64).prop_map(Some)];
    let tokens = || (select(&["k", "m"][..]), sessions(model), 0..2_000_u64);
    prop_oneof![
        3 => open.prop_map(|(kind, replica, lease_ms)| {
            let replica = replica.to_owned();
            Command::OpenSession { prefix: p(), kind, replica, node: 1, lease_ms }
        }),
        2 => (open_again, processes()).prop_map(|((kind, replica, lease_ms), process)| {
            let replica = replica.to_owned();
            let command = Command::OpenSession { prefix: p(), kind, replica, node: 1, lease_ms };
            Command::ForProcess { process, command: command.into() }
        }),
        1 => processes().prop_map(|process| Command::DeclareDead { process }),
        2 => (sessions(model), seqs)
            .prop_map(|(session, seq)| Command::RenewSession { session, seq }),
        1 => (sessions(model), any::<bool>()).prop_map(|(session, lost)| match lost {
            true => Command::GiveUpSession { session },
            false => Command::CloseSession { session },
        }),
        1 => (sessions(model), 0..2_u64)
            .prop_map(|(session, seq)| Command::ExpireSession { session, seq }),
        5 => (sessions(model), queues(), any::<bool>())
            .prop_map(|(session, queue, if_free)| Command::TakeTicket { session, queue, if_free }),
        5 => owned(model).prop_map(|(ticket, session)| {
            Command::Release { prefix: p(), ticket, session }
        }),
        1 => (queues(), sessions(model))
            .prop_map(|(queue, session)| Command::ReleaseQueue { queue, session }),
        1 => select(&["k", "m"][..]).prop_map(|key| {
            Command::AcquireLock { prefix: p(), key: key.into(), ttl_ms: 50, node: 1 }
        }),
        1 => tokens().prop_map(|(key, token, ttl_ms)| {
            Command::RenewLock { prefix: p(), key: key.into(), token, ttl_ms }
        }),
        1 => tokens().prop_map(|(key, token, _)| {
            Command::ReleaseLock { prefix: p(), key: key.into(), token }
        }),
    ]
    .boxed()
}

/// Commands on rows, messages, replies and tasks.
fn writes(model: &Model) -> BoxedStrategy<Command> {
    let commits = (authorities(model), prop::collection::vec(ops(model), 1..5));
    let admissions = (sessions(model), prop::collection::vec(messages(), 1..3));
    let marks = (select(&CHATS[..]), 0..5_u64, sessions(model));
    // The second instant is reached only in the course of a longer run.
    let instants = [10_u64, 3_000];
    let tasks = move || (select(&["t", "u"][..]), select(instants.to_vec()), sessions(model));
    let bodies = || select(&["t", "other"][..]).prop_map(|body| body.as_bytes().to_vec());
    let mut dead: Vec<TicketId> = model.dead.iter().map(|dead| dead.0).collect();
    dead.push(TicketId(1));
    prop_oneof![
        9 => commits.prop_map(|(by, ops)| Command::Commit { by, ops }),
        5 => admissions.prop_map(|(session, messages)| {
            Command::Admit { prefix: p(), session, messages, cursor: None }
        }),
        4 => marks.prop_map(|(chat, up_to, session)| {
            Command::MarkSent { prefix: p(), chat: chat.into(), up_to, session }
        }),
        1 => (tasks(), bodies()).prop_map(|((id, due_ms, _), body)| {
            Command::PutTask { prefix: p(), id: id.into(), due_ms, body }
        }),
        1 => (tasks(), bodies()).prop_map(|((id, due_ms, _), body)| {
            Command::EnsureTask { prefix: p(), id: id.into(), due_ms, body }
        }),
        1 => tasks().prop_map(|(id, due_ms, session)| {
            Command::ReturnTask { prefix: p(), id: id.into(), due_ms, session }
        }),
        1 => tasks().prop_map(|(id, due_ms, session)| {
            Command::ClaimTask { prefix: p(), id: id.into(), due_ms, session }
        }),
        1 => (tasks(), select(&[None, Some(10_u64), Some(3_000)][..])).prop_map(
            |((id, due_ms, session), next_ms)| {
                Command::FinishTask { prefix: p(), id: id.into(), due_ms, session, next_ms }
            }
        ),
        2 => (chats_and_rows(), chats_and_rows(), any::<bool>()).prop_map(|(from, to, keep_new)| {
            let (from, to) = (from.to_owned(), to.to_owned());
            Command::Rekey { prefix: p(), from, to, users: Vec::new(), keep_new }
        }),
        1 => (select(dead), any::<bool>())
            .prop_map(|(ticket, retry)| Command::DeadLetter { prefix: p(), ticket, retry }),
    ]
    .boxed()
}

fn commands(model: &Model) -> BoxedStrategy<Command> {
    let plain = || prop_oneof![3 => turns(model), 3 => writes(model)];
    let keys = (select(&["1", "2", "3", "4", "5"][..]), 0..2_u8, plain());
    let keyed = keys.prop_map(|(key, print, command)| Command::Keyed {
        key: IdempotencyKey { prefix: p(), session: None, key: key.into() },
        fingerprint: [print; 16],
        command: Box::new(command),
    });
    // Smaller bounds, and the first ones again.
    let bounds = (1..=6_u32, 1..=2_u32).prop_map(|(dedupe_ids_max, idle_keys_max)| {
        Command::SetLimits { limits: Limits { dedupe_ids_max, idle_keys_max, ..limits() } }
    });
    prop_oneof![27 => plain(), 3 => keyed, 1 => bounds].boxed()
}

struct Reference;

impl ReferenceStateMachine for Reference {
    type State = Model;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Model> {
        // The machine knows its only prefix from the first session on; so does the model.
        let mut model = Model::new(limits());
        model.apply(0, &first());
        Just(model).boxed()
    }

    fn transitions(model: &Model) -> BoxedStrategy<Step> {
        let pass = prop_oneof![3 => Just(0_u64), 1 => 1..200_u64];
        prop_oneof![
            20 => (pass, commands(model)).prop_map(|(pass, command)| Step::Run(pass, command.into())),
            1 => Just(Step::Snapshot),
            1 => Just(Step::Cut),
            1 => Just(Step::Restart),
        ]
        .boxed()
    }

    fn apply(mut model: Model, step: &Step) -> Model {
        if let Step::Run(pass, command) = step {
            model.apply(*pass, command);
        }
        model
    }
}

fn first() -> Command {
    let (kind, replica) = (SessionKind::Replica, "n1".to_owned());
    Command::OpenSession { prefix: p(), kind, replica, node: 1, lease_ms: 100 }
}

/// The machine, and what its cuts left on the disk.
struct Subject {
    kit: Kit,
    disk: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Subject {
    fn cut(&mut self) {
        let cut = self.kit.machine.cut();
        for (key, value) in cut.records() {
            let known = match value {
                Some(value) => self.disk.insert(key, value).is_some(),
                None => self.disk.remove(&key).is_some(),
            };
            assert!(known || !cut.is_empty());
        }
        let whole: BTreeMap<_, _> = self.kit.machine.freeze().records().collect();
        assert_eq!(self.disk, whole, "the cuts laid over each other are the state");
        assert!(self.kit.machine.cut().is_empty());
    }

    fn agree(&self, model: &Model) {
        let machine = &self.kit.machine;
        for process in (0..6).map(ProcessToken) {
            assert_eq!(machine.is_dead(process), model.dead_processes.contains(&process));
        }
        for life in &model.sessions {
            assert_eq!(machine.process_of(life.id), life.process);
        }
        let lives: Vec<_> = machine.sessions().iter().map(|s| (s.session, s.kind, s.seq)).collect();
        assert!(lives.into_iter().eq(model.sessions.iter().map(|s| (s.id, s.kind, s.seq))));
        for place in &model.tickets {
            let found = machine.ticket(&p(), place.id);
            let ahead = model.line(&place.queue).position(|other| other.id == place.id).unwrap();
            let (queue, ahead) = (place.queue.clone(), ahead as u64);
            let wanted = match (place.grant, place.owner) {
                (Some(grant), Some(session)) => TicketState::Granted { queue, session, grant },
                (_, session) => TicketState::Waiting { queue, session, ahead },
            };
            assert_eq!(found, wanted);
            let journaled = machine.journal(&p(), place.id).map(|r| (r.id, r.body, r.attempts));
            let wanted = place.message.as_ref().map(|(m, n)| (m.id.clone(), m.body.clone(), *n));
            assert_eq!(journaled, wanted);
        }
        for (queue, _, fence, said) in &model.going_on {
            assert_eq!(machine.said_under(queue, *fence), *said);
        }
        let held = |kind| move |place: &&super::model::Place| place.queue.kind == kind;
        let turns: Vec<_> = model.tickets.iter().filter(held(QueueKind::Turn)).collect();
        let granted = turns.iter().filter(|place| place.grant.is_some()).count() as u64;
        assert_eq!(machine.turn_counts(), (granted, turns.len() as u64 - granted));
        let lead = queue(QueueKind::Lead, "l");
        assert_eq!(machine.leads().first().map(|lead| lead.1), model.holder(&lead));
        for name in ["r", "s"] {
            let kept = model.rows.iter().find(|kept| kept.key == row(name));
            let found = machine.row(&row(name)).map(|row| (row.revision, row.value));
            assert_eq!(found, kept.map(|kept| (kept.revision, kept.value.clone())));
        }
        for chat in CHATS {
            let entries = machine.outbox(&p(), chat, 0, 100).into_iter();
            let entries: Vec<_> = entries.map(|e| (e.number, e.id, e.unsent)).collect();
            assert_eq!(entries, model.outbox(chat));
        }
        for life in &model.sessions {
            let chats: Vec<_> = machine.outboxes_of(life.id).into_iter().map(|c| c.1).collect();
            assert_eq!(chats, model.chats_to_send(life.id));
        }
        let mut jobs: Vec<_> =
            model.jobs.iter().map(|j| (j.due_ms, j.id.clone(), j.claimed_by, j.attempt)).collect();
        jobs.sort();
        let due = machine.tasks_due(&p(), 9_999, 100).into_iter();
        let due: Vec<_> = due.map(|t| (t.due_ms, t.id, t.claimed_by, t.attempt)).collect();
        assert_eq!(due, jobs);
        for job in &model.jobs {
            assert_eq!(machine.task(&p(), &job.id).map(|task| task.body), Some(job.body.clone()));
        }
        let dead: Vec<_> = machine.dead_letters(&p()).iter().map(|dead| dead.ticket).collect();
        assert!(dead.into_iter().eq(model.dead.iter().map(|dead| dead.0)));
    }
}

impl StateMachineTest for Subject {
    type SystemUnderTest = Self;
    type Reference = Reference;

    fn init_test(_: &Model) -> Self {
        let mut subject = Self { kit: Kit::with(limits()), disk: BTreeMap::new() };
        subject.kit.run(first());
        subject
    }

    fn apply(mut subject: Self, model: &Model, step: Step) -> Self {
        match step {
            Step::Run(pass, command) => {
                subject.kit.now_ms += pass;
                let reply = subject.kit.run(*command);
                assert_eq!(reply, model.reply);
                assert_eq!(subject.kit.grants(), model.granted);
            }
            Step::Snapshot => {
                let bytes = subject.kit.bytes();
                let hash = subject.kit.machine.freeze().hash();
                let mut loaded = Machine::read(&mut bytes.as_slice()).unwrap();
                assert_eq!(super::kit::bytes(&loaded), bytes);
                assert_eq!(loaded.freeze().hash(), hash);
                assert!(loaded.cut().is_empty());
                // The disk has what was cut before; the snapshot is not written there.
                subject.cut();
                subject.kit.machine = loaded;
            }
            Step::Cut => subject.cut(),
            Step::Restart => {
                subject.cut();
                let loaded = Machine::from_records(subject.disk.clone()).unwrap();
                assert_eq!(super::kit::bytes(&loaded), subject.kit.bytes());
                subject.kit.machine = loaded;
            }
        }
        subject.agree(model);
        subject
    }
}

/// A run is to be short; `PROPTEST_CASES=10000` makes it long.
fn config() -> ProptestConfig {
    let given = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { given.cases } else { 60 };
    ProptestConfig { cases, max_shrink_iters: 20_000, failure_persistence: None, ..given }
}

prop_state_machine! {
    #![proptest_config(config())]

    #[test]
    fn b1_the_machine_does_what_the_naive_model_does(sequential 1..120 => Subject);
}
