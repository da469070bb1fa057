//! The second half of the naive model: commits, outboxes, tasks and idempotency keys.

use super::kit::{row, turn};
use super::model::{Job, Kept, Model, Place, Sent};
use crate::machine::*;
use crate::types::*;

impl Model {
    pub(super) fn commit(&mut self, by: &Authority, ops: &[Op]) -> Result<Vec<Revision>, Refusal> {
        let mut acting = None;
        if let Authority::Holder { queue, fence, session } = by {
            if session.is_some_and(|session| self.life(session).is_none()) {
                return Err(Refusal::SessionExpired);
            }
            let head = self.line(queue).next().filter(|head| {
                let same_fence = head.grant.is_some_and(|grant| grant.fence == *fence);
                same_fence && session.is_none_or(|session| head.owner == Some(session))
            });
            let fenced = Refusal::Fenced { holder: self.holder(queue) };
            acting = Some(head.ok_or(fenced)?.clone());
        }
        // All or none: the operations work on a copy that is kept only if all succeed.
        let mut copy = self.clone();
        let mut released = Vec::new();
        let session = match by {
            Authority::Holder { session, .. } => *session,
            Authority::Nobody => None,
        };
        let mut revisions = Vec::new();
        for (place, op) in ops.iter().enumerate() {
            let before = self.clone();
            let context = (acting.as_ref(), session, &mut released);
            revisions.push(copy.op(place as u32, op, context, &before)?);
        }
        *self = copy;
        Ok(revisions)
    }

    fn op(
        &mut self,
        at: u32,
        op: &Op,
        (acting, session, released): (Option<&Place>, Option<Incarnation>, &mut Vec<TicketId>),
        before: &Model,
    ) -> Result<Revision, Refusal> {
        let fenced = |ticket: TicketId| {
            let holder = before.place(ticket).and_then(|place| before.holder(&place.queue));
            Refusal::Fenced { holder }
        };
        match op {
            Op::Put { row, value, expect, ttl_ms } => {
                self.expect(at, row, *expect)?;
                self.revision += 1;
                let revision = Revision(self.revision);
                let expires_ms = ttl_ms.map(|ttl| self.now_ms + ttl);
                self.rows.retain(|kept| kept.key != *row);
                if *ttl_ms != Some(0) {
                    let (key, value) = (row.clone(), value.clone());
                    self.rows.push(Kept { key, value, revision, expires_ms });
                }
                return Ok(revision);
            }
            Op::Delete { row, expect } => {
                self.expect(at, row, *expect)?;
                self.rows.retain(|kept| kept.key != *row);
            }
            Op::Acknowledge { ticket, .. } => {
                let holds = acting.is_some_and(|acting| acting.id == *ticket);
                if !holds || released.contains(ticket) {
                    return Err(fenced(*ticket));
                }
                self.place_mut(*ticket).message = None;
            }
            Op::Release { ticket, .. } => {
                let owner = acting.and_then(|acting| acting.owner);
                let ours = self.place(*ticket).filter(|place| {
                    let durable = place.message.is_some();
                    owner.is_some()
                        && place.owner == owner
                        && !released.contains(ticket)
                        && (!durable || before.place(*ticket).is_some_and(|p| p.grant.is_some()))
                });
                ours.ok_or_else(|| fenced(*ticket))?;
                released.push(*ticket);
                self.give_back(*ticket);
            }
            Op::Keep { ticket, said, .. } => {
                let holds = acting.is_some_and(|acting| {
                    acting.id == *ticket && acting.queue.kind == QueueKind::Turn
                });
                let done = self.place(*ticket).is_some_and(|place| place.message.is_none());
                if !holds || !done || released.contains(ticket) {
                    return Err(fenced(*ticket));
                }
                released.push(*ticket);
                self.keep(*ticket, *said);
            }
            Op::Send { chat, send, .. } => {
                if self.sent.iter().any(|sent| sent.chat == *chat && sent.id == send.id) {
                    return Ok(Revision(0));
                }
                let waiting = self.sent.iter().filter(|s| s.chat == *chat && !s.done).count();
                let waits = send.deliver || waiting > 0;
                if waits && waiting >= self.limits.outbox_unsent_max as usize {
                    return Err(Refusal::Full { op: at, limit: Limit::OutboxEntries });
                }
                self.sent.push(Sent {
                    chat: chat.clone(),
                    id: send.id.clone(),
                    deliver: send.deliver,
                    done: !waits,
                    listed: true,
                    keep: send.keep,
                });
                self.settle(chat);
                let replica = |s: &Incarnation| {
                    self.life(*s).is_some_and(|life| life.kind == SessionKind::Replica)
                };
                if waits && !self.senders.iter().any(|(owned, _)| owned == chat) {
                    let sender = session.filter(replica).or_else(|| self.pick(chat));
                    self.senders.extend(sender.map(|sender| (chat.clone(), sender)));
                }
            }
            Op::Post { message, session, .. } => {
                let replica = |s: Incarnation| {
                    self.life(s).is_some_and(|life| life.kind == SessionKind::Replica)
                };
                if session.is_some_and(|session| !replica(session)) {
                    return Err(Refusal::SessionExpired);
                }
                let owner = session.or_else(|| self.pick(&message.chat));
                if let Admission::Full(limit) = self.admit(message, owner) {
                    return Err(Refusal::Full { op: at, limit });
                }
            }
            // The model's chats have no home; those that have one are tested by themselves.
            Op::Home { .. } => {}
        }
        Ok(Revision(0))
    }

    fn expect(&self, op: u32, row: &RowKey, expect: Expect) -> Result<(), Refusal> {
        let found = self.rows.iter().find(|kept| kept.key == *row).map(|kept| kept.revision);
        let met = match expect {
            Expect::Any => true,
            Expect::Absent => found.is_none(),
            Expect::Revision(revision) => found == Some(revision),
        };
        if met { Ok(()) } else { Err(Refusal::Superseded { op, found }) }
    }

    pub(super) fn unsent_chats(&self) -> Vec<String> {
        let mut chats: Vec<String> =
            self.sent.iter().filter(|sent| !sent.done).map(|sent| sent.chat.clone()).collect();
        chats.sort();
        chats.dedup();
        chats
    }

    /// What only has to be listed is done once all before it are; then too old entries go.
    fn settle(&mut self, chat: &str) {
        let mut of_chat: Vec<&mut Sent> =
            self.sent.iter_mut().filter(|sent| sent.chat == chat).collect();
        for sent in &mut of_chat {
            if !sent.done && sent.deliver {
                break;
            }
            sent.done = true;
        }
        let keep = of_chat.last().unwrap().keep as usize;
        let done = of_chat.iter().filter(|sent| sent.done).count();
        for sent in of_chat.into_iter().take(done.saturating_sub(keep)) {
            sent.listed = false;
        }
    }

    pub(super) fn mark(&mut self, chat: &str, up_to: u64, session: Incarnation) -> Reply {
        if !self.may_act(session) {
            return Reply::SessionExpired;
        }
        if !self.senders.contains(&(chat.to_owned(), session)) {
            return Reply::NotYours;
        }
        let of_chat = self.sent.iter_mut().filter(|sent| sent.chat == chat);
        of_chat.take(up_to as usize).for_each(|sent| sent.done = true);
        self.settle(chat);
        if self.sent.iter().all(|sent| sent.chat != chat || sent.done) {
            self.senders.retain(|(owned, _)| owned != chat);
        }
        Reply::Done
    }

    /// The listed entries of a chat: number, id, whether they still have to be sent.
    pub(crate) fn outbox(&self, chat: &str) -> Vec<(u64, String, bool)> {
        let of_chat = self.sent.iter().filter(|sent| sent.chat == chat).zip(1..);
        let listed = of_chat.filter(|(sent, _)| sent.listed);
        listed.map(|(s, number)| (number, s.id.clone(), s.deliver && !s.done)).collect()
    }

    pub(crate) fn chats_to_send(&self, session: Incarnation) -> Vec<String> {
        let mut chats: Vec<String> = self
            .senders
            .iter()
            .filter(|(_, owner)| *owner == session)
            .map(|(chat, _)| chat.clone())
            .collect();
        chats.sort();
        chats
    }

    /// Everything of one key, under another.
    pub(super) fn rekey(&mut self, from: &str, to: &str, keep_new: bool) -> Reply {
        if from == to {
            return Reply::Done;
        }
        let (old, new) = (turn(from), turn(to));
        let ids = |model: &Self, durable: bool| -> Vec<TicketId> {
            let line = model.line(&old).filter(|place| place.message.is_some() == durable);
            line.map(|place| place.id).collect()
        };
        let moving = ids(self, true);
        let room = self.limits.tickets_per_queue_max as usize;
        if moving.len() + self.line(&new).count() > room {
            return Reply::Full(Limit::TicketsPerQueue);
        }
        let at = |model: &Self, name| model.rows.iter().position(|kept| kept.key == row(name));
        if at(self, from).is_some() && at(self, to).is_some() && !keep_new {
            return Reply::Taken { row: row(to) };
        }
        if let Some(place) = at(self, from) {
            let moved = self.rows.remove(place);
            if at(self, to).is_none() {
                self.revision += 1;
                let revision = Revision(self.revision);
                self.rows.push(Kept { key: row(to), revision, ..moved });
            }
        }
        for id in ids(self, false) {
            self.leave(id);
        }
        self.end_fence(&old);
        self.last.retain(|last| last.0 != old);
        for id in &moving {
            let place = self.place_mut(*id);
            place.queue = new.clone();
            place.grant = None;
            place.message.as_mut().unwrap().0.chat = to.into();
        }
        if !moving.is_empty() {
            self.last.iter_mut().filter(|last| last.0 == new).for_each(|last| last.2 = 0);
            let later = self.line(&new).skip(1).find(|place| place.grant.is_some()).cloned();
            if let Some(later) = later {
                self.end_fence(&new);
                match later.message {
                    Some(_) => self.place_mut(later.id).grant = None,
                    None => self.leave(later.id),
                }
            }
            self.grant(&new);
        }
        self.move_sent(from, to);
        for (_, message) in self.dead.iter_mut().filter(|(_, message)| message.chat == from) {
            message.chat = to.into();
        }
        Reply::Done
    }

    fn move_sent(&mut self, from: &str, to: &str) {
        let owner = self.senders.iter().find(|(chat, _)| chat == from).map(|(_, owner)| *owner);
        self.senders.retain(|(chat, _)| chat != from);
        let (moving, kept): (Vec<Sent>, Vec<Sent>) =
            std::mem::take(&mut self.sent).into_iter().partition(|sent| sent.chat == from);
        self.sent = kept;
        for sent in moving.into_iter().filter(|sent| sent.listed) {
            if self.sent.iter().any(|known| known.chat == to && known.id == sent.id) {
                continue;
            }
            let deliver = sent.deliver && !sent.done;
            let waits = deliver || self.sent.iter().any(|other| other.chat == to && !other.done);
            self.sent.push(Sent { chat: to.into(), deliver, done: !waits, ..sent });
            self.settle(to);
            if deliver && !self.senders.iter().any(|(chat, _)| chat == to) {
                let sender = owner.or_else(|| self.pick(to));
                self.senders.extend(sender.map(|sender| (to.to_owned(), sender)));
            }
        }
    }

    pub(super) fn put_job(&mut self, id: &str, due_ms: u64, body: &[u8]) -> Reply {
        let body = body.to_vec();
        match self.jobs.iter_mut().find(|job| job.id == id) {
            Some(job) if job.claimed_by.is_some() => return Reply::Stale,
            Some(job) if job.due_ms == due_ms => job.body = body,
            Some(job) => (job.due_ms, job.attempt, job.body) = (due_ms, 0, body),
            None => {
                let id = id.into();
                self.jobs.push(Job { id, due_ms, claimed_by: None, attempt: 0, body });
            }
        }
        Reply::Done
    }

    pub(super) fn return_job(&mut self, id: &str, due_ms: u64, session: Incarnation) -> Reply {
        if !self.may_act(session) {
            return Reply::SessionExpired;
        }
        let ours = |job: &&mut Job| {
            job.id == id && job.due_ms == due_ms && job.claimed_by == Some(session)
        };
        match self.jobs.iter_mut().find(ours) {
            Some(job) => job.claimed_by = None,
            None => return Reply::Stale,
        }
        Reply::Done
    }

    pub(super) fn claim(&mut self, id: &str, due_ms: u64, session: Incarnation) -> Reply {
        if !self.may_act(session) {
            return Reply::SessionExpired;
        }
        let now_ms = self.now_ms;
        let open = |job: &&mut Job| {
            job.id == id && job.due_ms == due_ms && due_ms <= now_ms && job.claimed_by.is_none()
        };
        let Some(job) = self.jobs.iter_mut().find(open) else { return Reply::Stale };
        self.fence += 1;
        job.claimed_by = Some(session);
        job.attempt += 1;
        Reply::Claimed { fence: Fence(self.fence), attempt: job.attempt }
    }

    pub(super) fn finish(
        &mut self,
        id: &str,
        due_ms: u64,
        session: Incarnation,
        next_ms: Option<u64>,
    ) -> Reply {
        if !self.may_act(session) {
            return Reply::SessionExpired;
        }
        let ours =
            |job: &Job| job.id == id && job.due_ms == due_ms && job.claimed_by == Some(session);
        let Some(at) = self.jobs.iter().position(ours) else { return Reply::Stale };
        match next_ms {
            Some(due_ms) => {
                let job = &mut self.jobs[at];
                (job.due_ms, job.claimed_by, job.attempt) = (due_ms, None, 0);
            }
            None => drop(self.jobs.remove(at)),
        }
        Reply::Done
    }

    pub(super) fn keyed(
        &mut self,
        key: &IdempotencyKey,
        print: &[u8; 16],
        command: &Command,
    ) -> Reply {
        if let Some((_, known, reply, _)) = self.keyed.iter().find(|keyed| keyed.0 == *key) {
            return if known == print { reply.clone() } else { Reply::KeyReused };
        }
        if self.keyed.len() >= self.limits.idempotency_keys_max as usize {
            return Reply::Full(Limit::IdempotencyKeys);
        }
        let reply = self.run(command);
        if !matches!(reply, Reply::Full(_)) {
            let end = self.now_ms + self.limits.idempotency_ms;
            self.keyed.push((key.clone(), *print, reply.clone(), end));
        }
        reply
    }
}
