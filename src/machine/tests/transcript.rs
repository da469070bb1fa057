//! The queue protocol as a transcript: commands and, below each, all that follows from it.
//!
//! `queue.txt` is to be read by people. `BOTMESH_BLESS=1 cargo test transcript` writes it anew from
//! its commands; what changed is then for a person to judge.

use std::fmt::Write;

use super::kit::*;
use crate::machine::*;
use crate::types::*;

#[test]
fn b1_the_queue_protocol_goes_as_written() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/machine/tests/queue.txt");
    let script = std::fs::read_to_string(path).unwrap();
    let mut kit = Kit::with(Limits { attempts_max: 2, idle_keys_max: 2, ..Limits::default() });
    let mut played = String::new();
    for line in script.lines().filter(|line| !line.starts_with("    ")) {
        writeln!(played, "{line}").unwrap();
        if let Some(command) = line.strip_prefix("> ") {
            let reply = kit.run(parse(&command.split(' ').collect::<Vec<_>>()));
            writeln!(played, "    {}", say_reply(&reply)).unwrap();
            for effect in &kit.effects {
                writeln!(played, "    * {}", say_effect(effect)).unwrap();
            }
        }
    }
    if std::env::var_os("BOTMESH_BLESS").is_some() {
        std::fs::write(path, &played).unwrap();
    }
    assert_eq!(played, std::fs::read_to_string(path).unwrap());
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|_| panic!("{text:?} is not a number"))
}

fn session(text: &str) -> Incarnation {
    Incarnation(number(text))
}

fn ticket(text: &str) -> TicketId {
    TicketId(number(text))
}

fn parse_queue(text: &str) -> QueueKey {
    match text.split_once('/') {
        Some(("turn", name)) => turn(name),
        Some(("lead", name)) => queue(QueueKind::Lead, name),
        Some(("lock", name)) => queue(QueueKind::Lock, name),
        _ => panic!("{text:?} is not a queue"),
    }
}

fn parse(words: &[&str]) -> Command {
    let prefix = p();
    let open = |kind, replica: &str| {
        let (prefix, replica) = (p(), replica.to_owned());
        Command::OpenSession { prefix, kind, replica, node: 1, lease_ms: 1_000 }
    };
    match *words {
        ["open", name] => open(SessionKind::Replica, name),
        ["open", name, "of", process] => Command::ForProcess {
            process: ProcessToken(number(process).into()),
            command: open(SessionKind::Replica, name).into(),
        },
        ["died", process] => Command::DeclareDead { process: ProcessToken(number(process).into()) },
        ["open-remote"] => open(SessionKind::Remote, ""),
        ["renew", who] => Command::RenewSession { session: session(who), seq: None },
        ["close", who] => Command::CloseSession { session: session(who) },
        ["expire", who, seq] => Command::ExpireSession { session: session(who), seq: number(seq) },
        ["take", who, queue] | ["take", who, queue, "if-free"] => {
            let (session, queue) = (session(who), parse_queue(queue));
            Command::TakeTicket { session, queue, if_free: words.len() == 4 }
        }
        ["release", who, which] => {
            Command::Release { prefix, ticket: ticket(which), session: session(who) }
        }
        ["admit", who, chat, id] => {
            let messages = vec![message(id, chat, "body")];
            Command::Admit { prefix, session: session(who), messages, cursor: None }
        }
        ["finish", who, chat, which, "fence", fence]
        | ["finish", who, chat, which, "fence", fence, "and", "keep"] => {
            let ticket = ticket(which);
            let last = match words.len() {
                6 => Op::Release { prefix, ticket },
                _ => Op::Keep { prefix, ticket, said: 1 },
            };
            let by = holder(turn(chat), Fence(number(fence)), Some(session(who)));
            let acknowledge = Op::Acknowledge { prefix: p(), ticket };
            Command::Commit { by, ops: vec![acknowledge, last] }
        }
        ["lock", key] => Command::AcquireLock { prefix, key: key.into(), ttl_ms: 50, node: 1 },
        ["unlock", key, token] => {
            Command::ReleaseLock { prefix, key: key.into(), token: session(token) }
        }
        _ => panic!("{words:?} is not a command"),
    }
}

fn say_grant(grant: &Grant) -> String {
    match grant.previous {
        Some(previous) => format!("fence {} after session {previous}", grant.fence),
        None => format!("fence {} after nobody known", grant.fence),
    }
}

fn say_queue(queue: &QueueKey) -> String {
    let kind = match queue.kind {
        QueueKind::Turn => "turn",
        QueueKind::Lead => "lead",
        QueueKind::Lock => "lock",
    };
    format!("{kind}/{}", queue.name)
}

fn say_holder(holder: &Holder) -> String {
    match holder.fence {
        Some(fence) => format!("session {} holds it, fence {fence}", holder.session),
        None => format!("session {} waits first", holder.session),
    }
}

fn say_reply(reply: &Reply) -> String {
    match reply {
        Reply::Session { session, .. } => format!("session {session}"),
        Reply::Ticket { ticket, grant: Some(grant), .. } => {
            format!("ticket {ticket}, granted: {}", say_grant(grant))
        }
        Reply::Ticket { ticket, grant: None, ahead } => format!("ticket {ticket}, {ahead} ahead"),
        Reply::Lock { token, fence, .. } => format!("locked: token {token}, fence {fence}"),
        Reply::Held(holder) => say_holder(holder),
        Reply::Renewed { seq, .. } => format!("renewal {seq}"),
        Reply::Refused(Refusal::Fenced { holder: Some(holder) }) => {
            format!("refused: {}", say_holder(holder))
        }
        Reply::Admitted(admissions) => match &admissions[..] {
            [Admission::Fresh { ticket, .. }] => format!("journaled: ticket {ticket}"),
            other => format!("{other:?}"),
        },
        other => format!("{other:?}"),
    }
}

fn say_effect(effect: &Effect) -> String {
    match effect {
        Effect::SessionArmed { session, seq, lease_ms } => {
            format!("session {session} lives {lease_ms} ms from renewal {seq}")
        }
        Effect::SessionEnded { session, reason } => format!("session {session} ended: {reason:?}"),
        Effect::Granted { session, queue, ticket, grant } => {
            let (queue, grant) = (say_queue(queue), say_grant(grant));
            format!("session {session} holds {queue} by ticket {ticket}, {grant}")
        }
        Effect::CalledBack { session, queue } => {
            format!("session {session} is called back from {}", say_queue(queue))
        }
        Effect::TicketEnded { ticket, .. } => format!("ticket {ticket} ended"),
        Effect::Adopted { session, ticket, .. } => {
            format!("ticket {ticket} is now session {session}'s")
        }
        Effect::DeadLettered { id, .. } => format!("message {id} is given up"),
        other => format!("{other:?}"),
    }
}
