//! How messages come in.
//!
//! With durability: messages gather while one admission is under way and go as the next (DESIGN 1);
//! `deliver` answers after the commit. One admission at a time keeps each chat's order of arrival.
//! Without: each message takes its ticket in order of arrival, then waits for its turn in memory.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};

use super::error::RuntimeError;
use super::events::Event;
use super::runtime::{Phase, Runtime};
use super::turns;
use crate::clock::BootInstant;
use crate::coordinator::{Admission, Admit, CoordinationError, Lead};
use crate::provider::{BadItem, DeliverError, Delivered, Inbox, Notice};
use crate::store::{
    Authority, CommitError, Consistency, Expect, Op, RekeyError, RowKey, Table, Taken,
};
use crate::types::{ChatKey, Message, TicketId, VALUE_BYTES_MAX};

/// Deliveries waiting for their admission.
const WAITING_MAX: usize = 4096;
/// Messages of one admission.
const BATCH_MESSAGES_MAX: usize = 512;
/// Bytes of one admission.
const BATCH_BYTES_MAX: usize = 2 * VALUE_BYTES_MAX;
/// Rows of a provider's that are read at once.
const KEPT_PAGE: usize = 16_384;
/// Message ids a bot without durability remembers, to handle each once.
const SEEN_MAX: usize = 100_000;
/// Kinds of message that only the bot itself makes begin so.
const OWN_KINDS: &str = "botmesh.";
/// What the bot says of its own accord (SPEC G5).
pub(crate) const KIND_POST: &str = "botmesh.post";

struct Waiting {
    messages: Vec<Admit>,
    answer: oneshot::Sender<Result<Vec<Delivered>, DeliverError>>,
}

/// The way in.
pub(crate) struct Intake {
    sender: mpsc::Sender<Waiting>,
    // Taken once, by the task that admits.
    receiver: Mutex<Option<mpsc::Receiver<Waiting>>>,
    // Without durability only.
    seen: Mutex<Seen>,
    // With durability: tickets taken here whose turn has not come, and since when. Tickets only
    // grow, so the first waits longest.
    waiting: Mutex<BTreeMap<TicketId, BootInstant>>,
    added: Notify,
}

#[derive(Default)]
struct Seen {
    /// With a hash of the text each came with.
    ids: HashMap<(String, String), u64>,
    order: VecDeque<(String, String)>,
}

impl Seen {
    /// Remembers this id; where it was known, whether the text was the same.
    fn known(&mut self, message: &Message) -> Option<bool> {
        let id = (message.chat.channel.clone(), message.id.clone());
        let mut hasher = DefaultHasher::new();
        message.text.hash(&mut hasher);
        let hash = hasher.finish();
        if let Some(known) = self.ids.get(&id) {
            return Some(*known == hash);
        }
        self.ids.insert(id.clone(), hash);
        self.order.push_back(id);
        if self.order.len() > SEEN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        None
    }

    fn forget(&mut self, message: &Message) {
        // It stays in `order`, where a later eviction of it removes nothing.
        self.ids.remove(&(message.chat.channel.clone(), message.id.clone()));
    }
}

impl Intake {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        Self {
            sender,
            receiver: Mutex::new(Some(receiver)),
            seen: Mutex::default(),
            waiting: Mutex::default(),
            added: Notify::new(),
        }
    }

    /// The ticket's turn came.
    pub(crate) fn came(&self, ticket: TicketId) {
        self.waiting.lock().remove(&ticket);
    }

    /// The message was not handled: when it comes again it is not known (case c3).
    pub(crate) fn forget(&self, message: &Message) {
        self.seen.lock().forget(message);
    }

    fn waits(&self, tickets: impl Iterator<Item = TicketId>, since: BootInstant) {
        let mut waiting = self.waiting.lock();
        let before = waiting.len();
        waiting.extend(tickets.map(|ticket| (ticket, since)));
        if waiting.len() > before {
            self.added.notify_one();
        }
    }
}

/// A message as it is journaled.
pub(crate) fn admit(message: &Message) -> Result<Admit, DeliverError> {
    let invalid = |why: String| DeliverError::Invalid { id: message.id.clone(), why };
    message.chat.check().map_err(|error| invalid(error.to_string()))?;
    crate::types::check_key("message id", &message.id).map_err(|e| invalid(e.to_string()))?;
    let body = serde_json::to_vec(message).map_err(|error| invalid(error.to_string()))?;
    if body.len() > VALUE_BYTES_MAX {
        return Err(invalid(format!("{} bytes, at most {VALUE_BYTES_MAX} fit", body.len())));
    }
    Ok(Admit {
        id: message.id.clone(),
        channel: message.chat.channel.clone(),
        chat: message.chat.to_string(),
        body,
    })
}

fn unavailable(why: impl Into<String>) -> DeliverError {
    DeliverError::Unavailable { why: why.into(), retry_after: Duration::from_secs(1) }
}

/// What providers deliver to.
pub(crate) struct BotInbox {
    pub(crate) runtime: Arc<Runtime>,
    /// In whose name an elected provider delivers. Weak: the guard's end is not its provider's to
    /// put off, and once it is gone what is delivered late is refused (SPEC D6).
    pub(crate) lead: Option<Weak<Lead>>,
}

#[async_trait]
impl Inbox for BotInbox {
    async fn deliver(&self, messages: Vec<Message>) -> Result<Vec<Delivered>, DeliverError> {
        let admits = self.check(&messages)?;
        let lead = self.lead()?;
        match lead {
            _ if !self.runtime.durable => self.deliver_in_memory(messages).await,
            Some(lead) => self.admit_under(&lead, admits, None).await,
            None => self.admit(admits).await,
        }
    }

    async fn deliver_past(
        &self,
        provider: &str,
        messages: Vec<Message>,
        cursor: Vec<u8>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        let admits = self.check(&messages)?;
        let lead = self.lead()?;
        let row = cursor_of(provider);
        if let Some(lead) = lead.filter(|_| self.runtime.durable) {
            return self.admit_under(&lead, admits, Some((row, cursor))).await;
        }
        let delivered = match self.runtime.durable {
            true => self.admit(admits).await?,
            false => self.deliver_in_memory(messages).await?,
        };
        // What was taken is known by its id, where this fails and it comes again.
        let put = Op::Put { row, value: cursor, expect: Expect::Any, ttl_ms: None };
        let written = self.runtime.store.commit(Authority::Nobody, vec![put]).await;
        written.map_err(|error| unavailable(error.to_string()))?;
        Ok(delivered)
    }

    async fn cursor(&self, provider: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        let found = self.runtime.store.read(&cursor_of(provider), Consistency::Linearizable).await;
        let row = found.map_err(|error| unavailable(error.to_string()))?;
        Ok(row.map(|row| row.value))
    }

    async fn keep(
        &self,
        provider: &str,
        rows: Vec<(String, Vec<u8>)>,
        remembered: Duration,
    ) -> Result<(), DeliverError> {
        let ttl_ms = Some(u64::try_from(remembered.as_millis()).unwrap_or(u64::MAX));
        let put = |(name, value): (String, Vec<u8>)| Op::Put {
            row: kept_by(provider, &name),
            value,
            expect: Expect::Any,
            ttl_ms,
        };
        self.write(rows.into_iter().map(put).collect()).await
    }

    async fn change(
        &self,
        provider: &str,
        rows: Vec<(String, Option<Vec<u8>>)>,
    ) -> Result<(), DeliverError> {
        let change = |(name, value): (String, Option<Vec<u8>>)| {
            let (row, expect) = (kept_by(provider, &name), Expect::Any);
            match value {
                Some(value) => Op::Put { row, value, expect, ttl_ms: None },
                None => Op::Delete { row, expect },
            }
        };
        self.write(rows.into_iter().map(change).collect()).await
    }

    async fn all_kept(&self, provider: &str) -> Result<Vec<(String, Vec<u8>)>, DeliverError> {
        self.lead()?;
        let first = kept_by(provider, "").key;
        let (mut found, mut after) = (Vec::new(), first.clone());
        loop {
            let page = self.runtime.store.scan(Table::Kv, Some(&after), KEPT_PAGE).await;
            let page = page.map_err(|error| unavailable(error.to_string()))?;
            let last = page.len() < KEPT_PAGE;
            for (row, content) in page {
                match row.key.strip_prefix(&first) {
                    Some(name) => found.push((name.to_owned(), content.value)),
                    None => return Ok(found),
                }
                after = row.key;
            }
            if last {
                return Ok(found);
            }
        }
    }

    async fn kept(&self, provider: &str, name: &str) -> Result<Option<Vec<u8>>, DeliverError> {
        let row = kept_by(provider, name);
        let found = self.runtime.store.read(&row, Consistency::Linearizable).await;
        Ok(found.map_err(|error| unavailable(error.to_string()))?.map(|row| row.value))
    }

    async fn rekey(&self, from: &ChatKey, to: &ChatKey, taken: Taken) -> Result<(), RekeyError> {
        self.runtime.store.rekey(from, to, taken).await
    }

    fn notice(&self, provider: &str, notice: Notice) {
        let events = &self.runtime.events;
        let provider = provider.to_owned();
        match notice {
            Notice::Bad(BadItem { at, why }) => {
                events.error(None, RuntimeError::Item { provider, at, why });
            }
            Notice::Unknown { kind } => {
                tracing::debug!(%provider, %kind, "an event of a kind that nobody handles");
                events.counts.unknown(provider);
            }
            Notice::Receipt(receipt) => events.emit(Event::Receipt { receipt }),
            Notice::Moved { from, to } => events.emit(Event::ChatMoved { from, to }),
        }
    }

    fn connected(&self, provider: &str, connected: bool) {
        // One that is no longer the leader's says nothing of the leader's connection.
        if self.lead().is_ok() {
            self.runtime.connected(provider, connected);
        }
    }
}

/// Where an exclusive transport's cursor is kept.
fn cursor_of(provider: &str) -> RowKey {
    RowKey::new(Table::Kv, format!("botmesh.cursor:{provider}"))
}

/// Where what a provider remembers is kept.
fn kept_by(provider: &str, name: &str) -> RowKey {
    RowKey::new(Table::Kv, format!("botmesh.kept:{provider}:{name}"))
}

impl BotInbox {
    /// The messages as they are journaled, where all are acceptable and the bot takes any.
    fn check(&self, messages: &[Message]) -> Result<Vec<Admit>, DeliverError> {
        if self.runtime.phase() > Phase::Open {
            return Err(unavailable("this replica is stopping; ask another"));
        }
        for message in messages {
            if message.kind.starts_with(OWN_KINDS) {
                let why = format!("the kind {:?} is the bot's own", message.kind);
                return Err(DeliverError::Invalid { id: message.id.clone(), why });
            }
        }
        messages.iter().map(admit).collect()
    }

    /// The lead it delivers in the name of, where it needs one.
    fn lead(&self) -> Result<Option<Arc<Lead>>, DeliverError> {
        let Some(lead) = &self.lead else { return Ok(None) };
        let held = lead.upgrade().filter(|lead| lead.check().is_ok());
        held.map(Some).ok_or(DeliverError::Deposed)
    }

    /// Writes what a provider keeps, in the name of its lead where it has one: what a deposed replica
    /// remembers is older than what its successor does.
    async fn write(&self, ops: Vec<Op>) -> Result<(), DeliverError> {
        let lead = self.lead()?;
        let by = lead.as_deref().map_or(Authority::Nobody, Authority::Lead);
        match self.runtime.store.commit(by, ops).await {
            Ok(_) => Ok(()),
            Err(CommitError::Fenced { .. }) => Err(DeliverError::Deposed),
            Err(error) => Err(unavailable(error.to_string())),
        }
    }

    async fn admit(&self, messages: Vec<Admit>) -> Result<Vec<Delivered>, DeliverError> {
        let (answer, answered) = oneshot::channel();
        let intake = &self.runtime.intake.sender;
        intake
            .try_send(Waiting { messages, answer })
            .map_err(|_| unavailable(format!("{WAITING_MAX} deliveries wait already")))?;
        // The task drops an answer only where it ends: nothing of it was admitted then.
        answered.await.unwrap_or_else(|_| Err(unavailable("this replica is stopping")))
    }

    /// An admission of its own: what comes through one connection has nothing to gather with.
    async fn admit_under(
        &self,
        lead: &Lead,
        messages: Vec<Admit>,
        cursor: Option<(RowKey, Vec<u8>)>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        let since = self.runtime.clock.now();
        match self.runtime.coordinator.admit_under(lead, messages, cursor).await {
            Ok(admissions) => {
                self.runtime.intake.waits(admissions.iter().filter_map(waiting), since);
                admissions.into_iter().map(|one| delivered(&self.runtime, one)).collect()
            }
            Err(CoordinationError::LeaseLost { .. }) => Err(DeliverError::Deposed),
            Err(error) => Err(unavailable(error.to_string())),
        }
    }

    async fn deliver_in_memory(
        &self,
        messages: Vec<Message>,
    ) -> Result<Vec<Delivered>, DeliverError> {
        let mut delivered = Vec::with_capacity(messages.len());
        for message in messages {
            let known = self.runtime.intake.seen.lock().known(&message);
            delivered.push(Delivered { duplicate: known.is_some() });
            if let Some(same_body) = known {
                duplicate(&self.runtime, same_body);
                continue;
            }
            match self.runtime.coordinator.take_ticket(&message.chat).await {
                Ok(ticket) => {
                    let runtime = self.runtime.clone();
                    let work = turns::ticketed(runtime, ticket, message);
                    self.runtime.tasks.spawn(work);
                }
                Err(error) => {
                    self.runtime.intake.forget(&message);
                    return Err(unavailable(error.to_string()));
                }
            }
        }
        Ok(delivered)
    }
}

/// Admits what gathers, until the bot closes.
pub(crate) async fn admitting(runtime: Arc<Runtime>) {
    let Some(mut waiting) = runtime.intake.receiver.lock().take() else { return };
    let closing = runtime.reached(Phase::Closing);
    tokio::pin!(closing);
    let mut left_over = None;
    loop {
        let first = match left_over.take() {
            Some(first) => first,
            None => tokio::select! {
                biased;
                first = waiting.recv() => match first { Some(first) => first, None => return },
                () = &mut closing => return,
            },
        };
        let (batch, rest) = gather(first, &mut waiting);
        left_over = rest;
        admit_batch(&runtime, batch).await;
    }
}

/// What goes with `first` into one admission, and what did not fit.
fn gather(
    first: Waiting,
    waiting: &mut mpsc::Receiver<Waiting>,
) -> (Vec<Waiting>, Option<Waiting>) {
    let size = |w: &Waiting| w.messages.iter().map(|m| m.body.len()).sum::<usize>();
    let (mut count, mut bytes) = (first.messages.len(), size(&first));
    let mut batch = vec![first];
    while let Ok(next) = waiting.try_recv() {
        count += next.messages.len();
        bytes += size(&next);
        if count > BATCH_MESSAGES_MAX || bytes > BATCH_BYTES_MAX {
            return (batch, Some(next));
        }
        batch.push(next);
    }
    (batch, None)
}

async fn admit_batch(runtime: &Runtime, mut batch: Vec<Waiting>) {
    let counts: Vec<usize> = batch.iter().map(|waiting| waiting.messages.len()).collect();
    let messages = batch.iter_mut().flat_map(|w| std::mem::take(&mut w.messages)).collect();
    let since = runtime.clock.now();
    // Not repeated here when the outcome is unknown: the same id coming again would be told that it
    // is a duplicate, and that is never the answer to a first delivery (SPEC N5).
    let mut answers = match runtime.coordinator.admit(messages).await {
        Ok(admissions) => {
            runtime.intake.waits(admissions.iter().filter_map(waiting), since);
            admissions.into_iter()
        }
        Err(error) => {
            tracing::debug!(%error, "messages were not admitted");
            for waiting in batch {
                // The caller may have gone.
                let _ = waiting.answer.send(Err(unavailable(error.to_string())));
            }
            return;
        }
    };
    for (waiting, count) in batch.into_iter().zip(counts) {
        let mine = answers.by_ref().take(count).map(|one| delivered(runtime, one)).collect();
        let _ = waiting.answer.send(mine);
    }
}

/// The ticket of a message whose turn is another's yet.
fn waiting(admission: &Admission) -> Option<TicketId> {
    match admission {
        Admission::Fresh { ticket, grant: None } => Some(*ticket),
        _ => None,
    }
}

/// A message is counted, and not handled, where its id was seen before.
fn duplicate(runtime: &Runtime, same_body: bool) {
    if !same_body {
        tracing::warn!("a message id came again with another body; it was not handled");
    }
    runtime.events.counts.duplicate(same_body);
}

/// Tells of messages whose turn does not come within `turn_wait`, once each (SPEC B4). They were
/// accepted, so their tickets keep their place. Until the bot closes.
pub(crate) async fn watching(runtime: Arc<Runtime>) {
    let closing = runtime.reached(Phase::Closing);
    tokio::pin!(closing);
    loop {
        let first = runtime.intake.waiting.lock().first_key_value().map(|(t, s)| (*t, *s));
        let Some((ticket, since)) = first else {
            tokio::select! {
                biased;
                () = &mut closing => return,
                () = runtime.intake.added.notified() => continue,
            }
        };
        let due = since + runtime.turn_wait;
        if runtime.clock.now() < due {
            tokio::select! {
                biased;
                () = &mut closing => return,
                () = runtime.clock.sleep_until(due) => continue,
            }
        }
        runtime.intake.came(ticket);
        if let Some(error) = runtime.coordinator.overdue(ticket, since) {
            let key = match &error {
                CoordinationError::Unavailable { key, .. } => Some(key.clone()),
                _ => None,
            };
            runtime.events.error(key, error);
        }
    }
}

fn delivered(runtime: &Runtime, admission: Admission) -> Result<Delivered, DeliverError> {
    match admission {
        Admission::Fresh { .. } => Ok(Delivered { duplicate: false }),
        Admission::Duplicate { same_body } => {
            duplicate(runtime, same_body);
            Ok(Delivered { duplicate: true })
        }
        Admission::Full(limit) => Err(unavailable(format!("the bound {limit:?} is met"))),
    }
}
