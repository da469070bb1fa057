//! The machine once more, written to be obviously right instead of fast: plain lists, searched from
//! the front, and a commit that works on a copy of everything. One prefix.

use crate::machine::digest;
use crate::machine::*;
use crate::types::*;

use super::kit::{p, turn};

#[derive(Clone, Debug)]
pub(crate) struct Life {
    pub(crate) id: Incarnation,
    pub(crate) kind: SessionKind,
    replica: String,
    lease_ms: u64,
    pub(crate) seq: u64,
    lock: Option<QueueKey>,
    pub(crate) process: Option<ProcessToken>,
}

#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) id: TicketId,
    pub(crate) queue: QueueKey,
    pub(crate) owner: Option<Incarnation>,
    pub(crate) grant: Option<Grant>,
    pub(crate) message: Option<(Admit, u32)>,
}

#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) key: RowKey,
    pub(crate) value: Vec<u8>,
    pub(crate) revision: Revision,
    pub(super) expires_ms: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(super) chat: String,
    pub(crate) id: String,
    pub(super) deliver: bool,
    pub(super) done: bool,
    pub(super) listed: bool,
    pub(super) keep: u32,
}

#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) id: String,
    pub(crate) due_ms: u64,
    pub(crate) claimed_by: Option<Incarnation>,
    pub(crate) attempt: u32,
    pub(crate) body: Vec<u8>,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) limits: Limits,
    pub(crate) now_ms: u64,
    pub(crate) fence: u64,
    incarnation: u64,
    pub(crate) revision: u64,
    pub(crate) tickets_given: u64,
    idle: u64,
    pub(crate) sessions: Vec<Life>,
    /// In the order of their ids, all queues together.
    pub(crate) tickets: Vec<Place>,
    /// Who was granted last, and when the queue became idle (0 = it is not).
    pub(super) last: Vec<(QueueKey, Incarnation, u64)>,
    /// Fences that outlast their ticket, whose they are, and how much was said under them.
    pub(crate) going_on: Vec<(QueueKey, Incarnation, Fence, u64)>,
    pub(crate) rows: Vec<Kept>,
    /// Message ids in the order they were seen: id, body, when.
    seen: Vec<(String, Vec<u8>, u64)>,
    pub(crate) dead: Vec<(TicketId, Admit)>,
    pub(super) sent: Vec<Sent>,
    pub(super) senders: Vec<(String, Incarnation)>,
    pub(crate) jobs: Vec<Job>,
    pub(super) keyed: Vec<(IdempotencyKey, [u8; 16], Reply, u64)>,
    /// Dead processes, oldest first.
    pub(crate) dead_processes: Vec<ProcessToken>,
    /// What the last command answered and granted.
    pub(crate) reply: Reply,
    pub(crate) granted: Vec<(Incarnation, TicketId, Grant)>,
}

impl Model {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            now_ms: 1_000,
            fence: 0,
            incarnation: 0,
            revision: 0,
            tickets_given: 0,
            idle: 0,
            sessions: Vec::new(),
            tickets: Vec::new(),
            last: Vec::new(),
            going_on: Vec::new(),
            rows: Vec::new(),
            seen: Vec::new(),
            dead: Vec::new(),
            sent: Vec::new(),
            senders: Vec::new(),
            jobs: Vec::new(),
            keyed: Vec::new(),
            dead_processes: Vec::new(),
            reply: Reply::Done,
            granted: Vec::new(),
        }
    }

    /// One batch of one command, `pass_ms` after the one before.
    pub(crate) fn apply(&mut self, pass_ms: u64, command: &Command) {
        self.now_ms += pass_ms;
        self.granted.clear();
        let now_ms = self.now_ms;
        self.rows.retain(|row| row.expires_ms.is_none_or(|end| end > now_ms));
        self.seen.retain(|seen| seen.2 + self.limits.dedupe_ms > now_ms);
        self.forget_beyond();
        self.keyed.retain(|keyed| keyed.3 > now_ms);
        self.reply = self.run(command);
    }

    pub(super) fn run(&mut self, command: &Command) -> Reply {
        match command {
            Command::Noop => Reply::Done,
            Command::OpenSession { kind, replica, lease_ms, .. } => {
                self.open(*kind, replica, *lease_ms)
            }
            Command::RenewSession { session, seq } => self.renew(*session, *seq),
            Command::CloseSession { session } | Command::GiveUpSession { session } => {
                match self.life(*session).is_some() {
                    true => self.end(*session),
                    false => Reply::SessionExpired,
                }
            }
            Command::ExpireSession { session, seq } => {
                match self.life(*session).is_some_and(|life| life.seq == *seq) {
                    true => self.end(*session),
                    false => Reply::Stale,
                }
            }
            Command::TakeTicket { session, queue, if_free } => self.take(*session, queue, *if_free),
            Command::Release { ticket, session, .. } => self.release(*ticket, *session),
            Command::ReleaseQueue { queue, session } => {
                let first = self.line(queue).find(|place| place.owner == Some(*session));
                match (self.life(*session), first.map(|place| place.id)) {
                    (None, _) => Reply::SessionExpired,
                    (Some(_), None) => Reply::TicketGone,
                    (Some(_), Some(ticket)) => self.release(ticket, *session),
                }
            }
            Command::AcquireLock { key, ttl_ms, .. } => self.acquire(key, *ttl_ms),
            Command::RenewLock { key, token, ttl_ms, .. } => match self.lock(key, *token) {
                true => {
                    let lease_ms = (*ttl_ms).clamp(1, self.limits.lease_ms_max);
                    let life = self.life_mut(*token);
                    (life.seq, life.lease_ms) = (life.seq + 1, lease_ms);
                    Reply::Renewed { seq: life.seq, lease_ms, shared_with: None }
                }
                false => Reply::Stale,
            },
            Command::ReleaseLock { key, token, .. } => match self.lock(key, *token) {
                true => self.end(*token),
                false => Reply::Stale,
            },
            Command::Commit { by, ops } => match self.commit(by, ops) {
                Ok(revisions) => Reply::Committed(revisions),
                Err(refusal) => Reply::Refused(refusal),
            },
            Command::Admit { session, messages, .. } => {
                match self.life(*session).map(|life| life.kind) {
                    Some(SessionKind::Replica) => Reply::Admitted(
                        messages
                            .iter()
                            .map(|message| self.admit(message, Some(*session)))
                            .collect(),
                    ),
                    _ => Reply::SessionExpired,
                }
            }
            Command::MarkSent { chat, up_to, session, .. } => self.mark(chat, *up_to, *session),
            Command::PutTask { id, due_ms, body, .. } => self.put_job(id, *due_ms, body),
            Command::EnsureTask { id, due_ms, body, .. } => {
                match self.jobs.iter().any(|job| job.id == *id && job.body == *body) {
                    true => Reply::Done,
                    false => self.put_job(id, *due_ms, body),
                }
            }
            Command::ReturnTask { id, due_ms, session, .. } => {
                self.return_job(id, *due_ms, *session)
            }
            Command::ClaimTask { id, due_ms, session, .. } => self.claim(id, *due_ms, *session),
            Command::FinishTask { id, due_ms, session, next_ms, .. } => {
                self.finish(id, *due_ms, *session, *next_ms)
            }
            Command::Keyed { key, fingerprint, command } => self.keyed(key, fingerprint, command),
            Command::DeadLetter { ticket, retry, .. } => self.dead_letter(*ticket, *retry),
            Command::ForProcess { process, command } => self.for_process(*process, command),
            Command::DeclareDead { process } => self.declare_dead(*process),
            Command::RaiseLevel { .. } => Reply::Done,
            Command::SetLimits { limits } => {
                self.limits = *limits;
                self.let_go();
                Reply::Done
            }
            Command::Rekey { from, to, keep_new, .. } => self.rekey(from, to, *keep_new),
        }
    }

    pub(crate) fn life(&self, session: Incarnation) -> Option<&Life> {
        self.sessions.iter().find(|life| life.id == session)
    }

    pub(super) fn life_mut(&mut self, session: Incarnation) -> &mut Life {
        self.sessions.iter_mut().find(|life| life.id == session).unwrap()
    }

    pub(super) fn may_act(&self, session: Incarnation) -> bool {
        self.life(session).is_some_and(|life| life.kind != SessionKind::Lock)
    }

    fn begin(&mut self, kind: SessionKind, replica: &str, lease_ms: u64) -> Option<Incarnation> {
        if self.sessions.len() >= self.limits.sessions_max as usize {
            return None;
        }
        self.incarnation += 1;
        let id = Incarnation(self.incarnation);
        self.sessions.push(Life {
            id,
            kind,
            replica: replica.into(),
            lease_ms,
            seq: 0,
            lock: None,
            process: None,
        });
        Some(id)
    }

    fn open(&mut self, kind: SessionKind, replica: &str, lease_ms: u64) -> Reply {
        let lease_ms = lease_ms.max(self.limits.lease_ms_min).min(self.limits.lease_ms_max);
        let Some(session) = self.begin(kind, replica, lease_ms) else {
            return Reply::Full(Limit::Sessions);
        };
        let shared_with = self.namesake(session, |other| other < session);
        if kind == SessionKind::Replica {
            let orphans: Vec<usize> =
                (0..self.tickets.len()).filter(|at| self.tickets[*at].owner.is_none()).collect();
            for at in &orphans {
                self.tickets[*at].owner = Some(session);
            }
            for at in orphans {
                self.grant(&self.tickets[at].queue.clone());
            }
            for chat in self.unsent_chats() {
                if !self.senders.iter().any(|(owned, _)| *owned == chat) {
                    self.senders.push((chat, session));
                }
            }
        }
        Reply::Session { session, lease_ms, shared_with }
    }

    fn namesake(
        &self,
        session: Incarnation,
        which: impl Fn(Incarnation) -> bool,
    ) -> Option<Incarnation> {
        let own = self.life(session).unwrap();
        if own.kind != SessionKind::Replica || own.replica.is_empty() {
            return None;
        }
        let same = |life: &&Life| life.kind == own.kind && life.replica == own.replica;
        self.sessions.iter().filter(same).map(|life| life.id).filter(|id| which(*id)).max()
    }

    fn renew(&mut self, session: Incarnation, seq: Option<u64>) -> Reply {
        let Some(life) = self.life(session) else { return Reply::SessionExpired };
        let (seq, lease_ms) = (seq.unwrap_or(life.seq + 1), life.lease_ms);
        if seq <= life.seq {
            return Reply::Stale;
        }
        self.life_mut(session).seq = seq;
        let shared_with = self.namesake(session, |other| other > session);
        Reply::Renewed { seq, lease_ms, shared_with }
    }

    pub(super) fn pick(&self, chat: &str) -> Option<Incarnation> {
        let replicas = self.sessions.iter().filter(|life| life.kind == SessionKind::Replica);
        let replicas: Vec<Incarnation> = replicas.map(|life| life.id).collect();
        let nth = digest::short(chat.as_bytes()).checked_rem(replicas.len() as u64)?;
        Some(replicas[nth as usize])
    }

    fn end(&mut self, session: Incarnation) -> Reply {
        self.end_all(&[session])
    }

    fn for_process(&mut self, process: ProcessToken, command: &Command) -> Reply {
        if !matches!(command, Command::OpenSession { .. }) {
            return self.run(command);
        }
        if self.dead_processes.contains(&process) {
            return Reply::SessionExpired;
        }
        let reply = self.run(command);
        if let Reply::Session { session, .. } = reply {
            self.life_mut(session).process = Some(process);
        }
        reply
    }

    fn declare_dead(&mut self, process: ProcessToken) -> Reply {
        if !self.dead_processes.contains(&process) {
            let its = self.sessions.iter().filter(|life| life.process == Some(process));
            let its: Vec<Incarnation> = its.map(|life| life.id).collect();
            self.end_all(&its);
            self.dead_processes.push(process);
            if self.dead_processes.len() > 3 {
                self.dead_processes.remove(0);
            }
        }
        Reply::Done
    }

    fn end_all(&mut self, sessions: &[Incarnation]) -> Reply {
        self.sessions.retain(|life| !sessions.contains(&life.id));
        // As the sessions go, and for each of them as its tickets stand.
        let owned = |session: &Incarnation| {
            let session = Some(*session);
            self.tickets.iter().filter(move |place| place.owner == session).cloned()
        };
        let owned: Vec<Place> = sessions.iter().flat_map(owned).collect();
        for place in &owned {
            if place.message.is_some() {
                let owner = self.pick(&place.queue.name);
                if place.grant.is_some() {
                    self.end_fence(&place.queue);
                }
                let place = self.place_mut(place.id);
                (place.owner, place.grant) = (owner, None);
            } else {
                self.leave(place.id);
            }
        }
        for place in owned {
            self.grant(&place.queue);
        }
        let (kept, lost): (Vec<_>, Vec<_>) = std::mem::take(&mut self.senders)
            .into_iter()
            .partition(|(_, owner)| !sessions.contains(owner));
        self.senders = kept;
        for (chat, _) in lost {
            self.senders.extend(self.pick(&chat).map(|owner| (chat, owner)));
        }
        let claimed = |job: &&mut Job| job.claimed_by.is_some_and(|by| sessions.contains(&by));
        for job in self.jobs.iter_mut().filter(claimed) {
            job.claimed_by = None;
        }
        Reply::Done
    }

    pub(crate) fn line(&self, queue: &QueueKey) -> impl Iterator<Item = &Place> {
        self.tickets.iter().filter(move |place| place.queue == *queue)
    }

    pub(crate) fn place(&self, id: TicketId) -> Option<&Place> {
        self.tickets.iter().find(|place| place.id == id)
    }

    pub(super) fn place_mut(&mut self, id: TicketId) -> &mut Place {
        self.tickets.iter_mut().find(|place| place.id == id).unwrap()
    }

    pub(super) fn grant(&mut self, queue: &QueueKey) {
        let Some(head) = self.line(queue).next() else { return };
        let (id, Some(owner), None) = (head.id, head.owner, head.grant) else { return };
        let same = self.going_on.iter().find(|(of, by, ..)| of == queue && *by == owner);
        let fence = match same {
            Some((.., fence, _)) => *fence,
            None => {
                self.end_fence(queue);
                self.fence += 1;
                Fence(self.fence)
            }
        };
        let at = self.last.iter().position(|(known, ..)| known == queue);
        let previous = at.map(|at| self.last.remove(at).1);
        self.last.push((queue.clone(), owner, 0));
        let grant = Grant { fence, previous };
        self.place_mut(id).grant = Some(grant);
        self.granted.push((owner, id, grant));
    }

    pub(super) fn end_fence(&mut self, queue: &QueueKey) {
        self.going_on.retain(|(of, ..)| of != queue);
    }

    pub(super) fn keep(&mut self, ticket: TicketId, said: u64) {
        let Place { queue, owner, grant, .. } = self.place(ticket).unwrap().clone();
        self.leave(ticket);
        if self.last.iter().any(|last| last.0 == queue) {
            self.going_on.push((queue.clone(), owner.unwrap(), grant.unwrap().fence, said));
        }
        self.grant(&queue);
    }

    fn join(&mut self, queue: &QueueKey, owner: Option<Incarnation>) -> TicketId {
        self.tickets_given += 1;
        let id = TicketId(self.tickets_given);
        self.tickets.push(Place { id, queue: queue.clone(), owner, grant: None, message: None });
        for last in self.last.iter_mut().filter(|last| last.0 == *queue) {
            last.2 = 0;
        }
        self.grant(queue);
        id
    }

    pub(super) fn leave(&mut self, id: TicketId) {
        let Place { queue, grant, .. } = self.place(id).unwrap().clone();
        if grant.is_some() {
            self.end_fence(&queue);
        }
        self.tickets.retain(|place| place.id != id);
        if self.line(&queue).next().is_some() {
            return;
        }
        if queue.kind == QueueKind::Lock {
            self.last.retain(|last| last.0 != queue);
        }
        if let Some(last) = self.last.iter_mut().find(|last| last.0 == queue) {
            self.idle += 1;
            last.2 = self.idle;
        }
        self.let_go();
    }

    /// Forgets the oldest message ids beyond the bound.
    fn forget_beyond(&mut self) {
        let over = self.seen.len().saturating_sub(self.limits.dedupe_ids_max as usize);
        self.seen.drain(..over);
    }

    /// Forgets the queues that have been idle longest, beyond the bound.
    fn let_go(&mut self) {
        let idle = |last: &&(QueueKey, Incarnation, u64)| last.2 > 0;
        while self.last.iter().filter(idle).count() > self.limits.idle_keys_max as usize {
            let oldest = self.last.iter().filter(idle).map(|last| last.2).min().unwrap();
            self.last.retain(|last| last.2 != oldest);
            let known = |queue: &QueueKey| self.last.iter().any(|last| last.0 == *queue);
            self.going_on.retain(|(of, ..)| known(of));
        }
    }

    pub(super) fn full(&self, queue: &QueueKey) -> bool {
        self.line(queue).count() >= self.limits.tickets_per_queue_max as usize
    }

    pub(crate) fn holder(&self, queue: &QueueKey) -> Option<Holder> {
        let first = self.line(queue).find(|place| place.owner.is_some())?;
        Some(Holder { session: first.owner?, fence: first.grant.map(|grant| grant.fence) })
    }

    fn take(&mut self, session: Incarnation, queue: &QueueKey, if_free: bool) -> Reply {
        if !self.may_act(session) {
            return Reply::SessionExpired;
        }
        let ahead = self.line(queue).count() as u64;
        if if_free && ahead > 0 {
            let nobody = Holder { session: Incarnation(0), fence: None };
            return Reply::Held(self.holder(queue).unwrap_or(nobody));
        }
        if self.full(queue) {
            return Reply::Full(Limit::TicketsPerQueue);
        }
        let ticket = self.join(queue, Some(session));
        Reply::Ticket { ticket, grant: self.place(ticket).unwrap().grant, ahead }
    }

    fn release(&mut self, ticket: TicketId, session: Incarnation) -> Reply {
        if self.life(session).is_none() {
            return Reply::SessionExpired;
        }
        match self.place(ticket) {
            None if ticket.0 > 0 && ticket.0 <= self.tickets_given => Reply::TicketGone,
            None => Reply::UnknownTicket,
            Some(place) if place.owner != Some(session) => Reply::NotYours,
            Some(place) if place.message.is_some() && place.grant.is_none() => Reply::Stale,
            Some(_) => {
                self.give_back(ticket);
                Reply::Done
            }
        }
    }

    pub(super) fn give_back(&mut self, ticket: TicketId) {
        let place = self.place(ticket).unwrap().clone();
        match place.message {
            Some((message, attempts)) if attempts + 1 >= self.limits.attempts_max => {
                self.dead.push((ticket, message));
                self.dead.sort_by_key(|(ticket, _)| *ticket);
                if self.dead.len() > self.limits.dead_letters_max as usize {
                    self.dead.remove(0);
                }
                self.leave(ticket);
            }
            Some((message, attempts)) => {
                self.end_fence(&place.queue);
                let place = self.place_mut(ticket);
                (place.message, place.grant) = (Some((message, attempts + 1)), None);
            }
            None => {
                let life = place.owner.and_then(|owner| self.life(owner));
                match life.filter(|life| life.lock.as_ref() == Some(&place.queue)) {
                    Some(life) => drop(self.end(life.id)),
                    None => self.leave(ticket),
                }
            }
        }
        self.grant(&place.queue);
    }

    fn lock(&self, key: &str, token: Incarnation) -> bool {
        let lock = self.life(token).and_then(|life| life.lock.as_ref());
        lock.is_some_and(|lock| lock.name == key)
    }

    fn acquire(&mut self, key: &str, ttl_ms: u64) -> Reply {
        let queue = QueueKey { kind: QueueKind::Lock, prefix: p(), name: key.into() };
        if let Some(holder) = self.holder(&queue) {
            return Reply::Held(holder);
        }
        let ttl_ms = ttl_ms.clamp(1, self.limits.lease_ms_max);
        let Some(token) = self.begin(SessionKind::Lock, "", ttl_ms) else {
            return Reply::Full(Limit::Sessions);
        };
        self.life_mut(token).lock = Some(queue.clone());
        let ticket = self.join(&queue, Some(token));
        Reply::Lock { token, fence: self.place(ticket).unwrap().grant.unwrap().fence, ttl_ms }
    }

    pub(super) fn admit(&mut self, message: &Admit, owner: Option<Incarnation>) -> Admission {
        if let Some((_, body, _)) = self.seen.iter().find(|(id, ..)| *id == message.id) {
            return Admission::Duplicate { same_body: *body == message.body };
        }
        let queue = turn(&message.chat);
        if self.full(&queue) {
            return Admission::Full(Limit::TicketsPerQueue);
        }
        self.seen.push((message.id.clone(), message.body.clone(), self.now_ms));
        self.forget_beyond();
        let ticket = self.join(&queue, owner);
        let place = self.place_mut(ticket);
        place.message = Some((message.clone(), 0));
        Admission::Fresh { ticket, grant: place.grant }
    }

    fn dead_letter(&mut self, ticket: TicketId, retry: bool) -> Reply {
        let Some(at) = self.dead.iter().position(|(dead, _)| *dead == ticket) else {
            return Reply::UnknownTicket;
        };
        let message = self.dead[at].1.clone();
        if retry {
            let queue = turn(&message.chat);
            if self.full(&queue) {
                return Reply::Full(Limit::TicketsPerQueue);
            }
            let new = self.join(&queue, self.pick(&message.chat));
            self.place_mut(new).message = Some((message, 0));
        }
        self.dead.remove(at);
        Reply::Done
    }
}
