//! A machine with one client, and short names for what tests ask of it.

use crate::machine::*;
use crate::types::*;

/// A machine under test. Every apply checks its invariants.
pub(crate) struct Kit {
    pub(crate) machine: Machine,
    pub(crate) effects: Vec<Effect>,
    pub(crate) now_ms: u64,
    serial: u64,
}

pub(crate) fn p() -> Prefix {
    Prefix::new("p").unwrap()
}

pub(crate) fn queue(kind: QueueKind, name: &str) -> QueueKey {
    QueueKey { kind, prefix: p(), name: name.to_owned() }
}

pub(crate) fn turn(name: &str) -> QueueKey {
    queue(QueueKind::Turn, name)
}

pub(crate) fn row(name: &str) -> RowKey {
    RowKey { table: Table::Checkpoint, prefix: p(), key: name.to_owned() }
}

pub(crate) fn put(name: &str, value: &str, expect: Expect) -> Op {
    Op::Put { row: row(name), value: value.into(), expect, ttl_ms: None }
}

pub(crate) fn message(id: &str, chat: &str, body: &str) -> Admit {
    Admit { id: id.into(), channel: "demo".into(), chat: chat.into(), body: body.into() }
}

pub(crate) fn outgoing(id: &str, deliver: bool, keep: u32) -> Outgoing {
    let body = format!("text {id}").into();
    Outgoing { id: id.into(), in_reply_to: "m".into(), body, turn_seq: 0, deliver, keep }
}

pub(crate) fn send(chat: &str, id: &str, deliver: bool, keep: u32) -> Op {
    Op::Send { prefix: p(), chat: chat.into(), send: outgoing(id, deliver, keep) }
}

pub(crate) fn holder(queue: QueueKey, fence: Fence, session: Option<Incarnation>) -> Authority {
    Authority::Holder { queue, fence, session }
}

impl Kit {
    pub(crate) fn new() -> Self {
        Self::with(Limits::default())
    }

    pub(crate) fn with(limits: Limits) -> Self {
        Self { machine: Machine::new(limits), effects: Vec::new(), now_ms: 1_000, serial: 0 }
    }

    /// Runs one command; what follows from it is in `effects`.
    pub(crate) fn run(&mut self, command: Command) -> Reply {
        self.run_all(vec![command]).remove(0)
    }

    /// Runs one batch.
    pub(crate) fn run_all(&mut self, commands: Vec<Command>) -> Vec<Reply> {
        let batch = Batch {
            client: ClientId { node: 1, boot: 1 },
            lane: 0,
            serial: self.serial,
            stamp_ms: self.now_ms,
            commands,
        };
        self.serial += 1;
        self.effects.clear();
        match self.machine.apply(self.serial, &batch, &mut self.effects) {
            BatchReply::Applied(replies) => replies,
            other => panic!("the batch did not run: {other:?}"),
        }
    }

    pub(crate) fn open(&mut self, kind: SessionKind, replica: &str) -> Incarnation {
        let replica = replica.to_owned();
        match self.run(Command::OpenSession {
            prefix: p(),
            kind,
            replica,
            node: 1,
            lease_ms: 1_000,
        }) {
            Reply::Session { session, .. } => session,
            other => panic!("no session: {other:?}"),
        }
    }

    pub(crate) fn replica(&mut self, name: &str) -> Incarnation {
        self.open(SessionKind::Replica, name)
    }

    pub(crate) fn take(
        &mut self,
        session: Incarnation,
        queue: QueueKey,
    ) -> (TicketId, Option<Grant>) {
        match self.run(Command::TakeTicket { session, queue, if_free: false }) {
            Reply::Ticket { ticket, grant, .. } => (ticket, grant),
            other => panic!("no ticket: {other:?}"),
        }
    }

    pub(crate) fn release(&mut self, ticket: TicketId, session: Incarnation) -> Reply {
        self.run(Command::Release { prefix: p(), ticket, session })
    }

    pub(crate) fn admit(&mut self, session: Incarnation, messages: Vec<Admit>) -> Vec<Admission> {
        match self.run(Command::Admit { prefix: p(), session, messages, cursor: None }) {
            Reply::Admitted(admissions) => admissions,
            other => panic!("not admitted: {other:?}"),
        }
    }

    /// Admits one message that is new.
    pub(crate) fn fresh(
        &mut self,
        session: Incarnation,
        id: &str,
        chat: &str,
    ) -> (TicketId, Option<Grant>) {
        match self.admit(session, vec![message(id, chat, "body")]).remove(0) {
            Admission::Fresh { ticket, grant } => (ticket, grant),
            other => panic!("not fresh: {other:?}"),
        }
    }

    pub(crate) fn commit(&mut self, by: Authority, ops: Vec<Op>) -> Reply {
        self.run(Command::Commit { by, ops })
    }

    pub(crate) fn close(&mut self, session: Incarnation) {
        assert_eq!(self.run(Command::CloseSession { session }), Reply::Done);
    }

    /// The grants among the effects of the last batch.
    pub(crate) fn grants(&self) -> Vec<(Incarnation, TicketId, Grant)> {
        let granted = |effect: &Effect| match effect {
            Effect::Granted { session, ticket, grant, .. } => Some((*session, *ticket, *grant)),
            _ => None,
        };
        self.effects.iter().filter_map(granted).collect()
    }

    /// The state in its canonical form.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        bytes(&self.machine)
    }
}

pub(crate) fn bytes(machine: &Machine) -> Vec<u8> {
    let mut bytes = Vec::new();
    machine.freeze().write(&mut bytes).unwrap();
    bytes
}
