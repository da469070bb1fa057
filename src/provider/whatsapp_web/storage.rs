//! What WhatsApp's client keeps, as rows of the replicated store.
//!
//! Problem: the client writes many small things a message (ratchets, keys, who was sent which key),
//! and what it wrote before it sends must not be lost: a counter used twice breaks the encryption, a
//! lost identity needs a person with a phone. Yet a commit of a group costs a round to its quorum.
//!
//! Idea: while a replica leads, it has all rows in memory and nobody else may write; so reads cost
//! nothing, and writes gather. What must be durable ([`Storage::write`]) waits for one commit, which
//! takes along whatever gathered meanwhile; what only must not be *later* than the next such write
//! ([`Storage::stage`]) waits for nothing and goes with it, or after [`RIDE`]. A row that is written
//! and deleted before it went never goes.
//!
//! Invariants:
//! * Every write is made in the name of the lead, so the group refuses it once that is lost, whatever
//!   this replica believes. After one such refusal nothing is tried any more (case w12).
//! * What was staged first is never durable later. A write that returned `Ok` is durable, with all
//!   that was staged before it.
//! * A failed commit changes nothing about what is to be written: it is tried again with the next.
//!
//! A row names what it is (`session/…`) and begins with a line of JSON that says its version, when it
//! was written and what follows: JSON, or bytes of the client's own. A version that is not known ends
//! the start: nothing is overwritten that somebody newer wrote.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};
use whatsapp_rust::wacore::store::error::{Result, StoreError};

use crate::provider::{DeliverError, Link};
use crate::types::VALUE_BYTES_MAX;

/// The version of a row's form.
const VERSION: u32 = 1;
/// How long what was staged waits for a write to go with.
const RIDE: Duration = Duration::from_secs(1);
/// Names longer than this are kept by digest: keys of the store are bounded, ids of others are not.
const NAME_BYTES_MAX: usize = 320;
/// Rows of one commit, and their bytes.
const COMMIT_ROWS_MAX: usize = 256;
const COMMIT_BYTES_MAX: usize = VALUE_BYTES_MAX;
/// What a row takes besides its content, at most.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// What is escaped in a part of a name.
const PART: &AsciiSet = &CONTROLS.add(b'/').add(b'%').add(b'#');

/// The storage of WhatsApp's client over a link to a bot: all five of its traits. Cheap to clone.
///
/// [`WhatsAppWeb`](super::WhatsAppWeb) opens one at each start; it is public for whoever runs the
/// client by themselves.
#[derive(Clone)]
pub struct Storage {
    shared: Arc<Shared>,
}

struct Shared {
    link: Link,
    provider: String,
    state: Mutex<State>,
    /// Held by whoever commits.
    committing: tokio::sync::Mutex<()>,
    staged: Notify,
    /// Why nothing is written any more.
    over: watch::Sender<Option<Over>>,
}

/// Why a storage takes nothing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    /// Another replica leads.
    Deposed,
    /// This run is over.
    Closed,
}

#[derive(Default)]
struct State {
    rows: BTreeMap<String, Row>,
    /// What is still to be written, in order: (name, row), `None` deletes.
    staged: BTreeMap<u64, (String, Option<Row>)>,
    /// Where a name stands in `staged`.
    places: HashMap<String, u64>,
    /// Names the store may have.
    stored: HashSet<String>,
    last: u64,
    /// All up to this one are durable.
    durable: u64,
}

/// A row as it is in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// When it was written, seconds since the Unix epoch, by that replica's clock.
    pub(super) at: i64,
    pub(super) json: bool,
    pub(super) content: Bytes,
}

/// The first line of a stored row.
#[derive(Serialize, Deserialize)]
struct Head {
    v: u32,
    at: i64,
    form: String,
    /// The name, where it is too long to be the row's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

/// One change of a row.
pub(super) type Change = (String, Option<Row>);

impl State {
    /// Notes one change; up to which number is to be durable before it is.
    fn change(&mut self, name: String, row: Option<Row>) -> Option<u64> {
        let same = match (self.rows.get(&name), &row) {
            (Some(old), Some(new)) => old.json == new.json && old.content == new.content,
            (None, None) => true,
            _ => false,
        };
        if same {
            // It keeps its place in the order, or may be on its way just now.
            let place = self.places.get(&name).copied();
            return place.or_else(|| (self.durable < self.last).then_some(self.last));
        }
        match &row {
            Some(row) => self.rows.insert(name.clone(), row.clone()),
            None => self.rows.remove(&name),
        };
        if let Some(place) = self.places.remove(&name) {
            self.staged.remove(&place);
        }
        if row.is_none() && !self.stored.contains(&name) {
            return None;
        }
        self.last += 1;
        self.places.insert(name.clone(), self.last);
        self.staged.insert(self.last, (name, row));
        Some(self.last)
    }
}

impl Row {
    pub(super) fn raw(content: impl Into<Bytes>) -> Self {
        Self { at: now_s(), json: false, content: content.into() }
    }

    pub(super) fn json(value: &impl Serialize) -> Result<Self> {
        let content = serde_json::to_vec(value).map_err(|e| StoreError::Serialization(e.into()))?;
        Ok(Self { at: now_s(), json: true, content: content.into() })
    }

    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.content).map_err(|e| StoreError::Serialization(e.into()))
    }

    fn encode(&self, name: &str) -> Vec<u8> {
        let form = if self.json { "json" } else { "bytes" }.to_owned();
        let name = (name.len() > NAME_BYTES_MAX).then(|| name.to_owned());
        // Texts and numbers always serialise.
        let head = Head { v: VERSION, at: self.at, form, name };
        let mut bytes = serde_json::to_vec(&head).unwrap_or_default();
        bytes.push(b'\n');
        bytes.extend_from_slice(&self.content);
        bytes
    }

    /// The row's full name and the row; `Err` says what it is not.
    fn decode(stored: &str, bytes: Vec<u8>) -> std::result::Result<(String, Self), String> {
        let bytes = Bytes::from(bytes);
        let end = bytes.iter().position(|byte| *byte == b'\n').ok_or("it has no first line")?;
        let head = serde_json::from_slice::<Head>(&bytes[..end]);
        let head = head.map_err(|error| error.to_string())?;
        if head.v > VERSION {
            return Err(format!("it is of version {}, and this program knows {VERSION}", head.v));
        }
        let row = Self { at: head.at, json: head.form == "json", content: bytes.slice(end + 1..) };
        Ok((head.name.unwrap_or_else(|| stored.to_owned()), row))
    }
}

/// Seconds since the Unix epoch. It only ages what is swept out later.
pub(super) fn now_s() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}

/// The name of a row: its kind, then what it is of.
pub(super) fn named(kind: &str, parts: &[&str]) -> String {
    let mut name = kind.to_owned();
    for part in parts {
        name.push('/');
        name.extend(utf8_percent_encode(part, PART));
    }
    name
}

/// The parts of a row's name, without its kind.
pub(super) fn parts(name: &str) -> Vec<String> {
    let decode = |part: &str| percent_decode_str(part).decode_utf8_lossy().into_owned();
    name.split('/').skip(1).map(decode).collect()
}

/// As the store calls the row.
fn stored_name(name: &str) -> String {
    if name.len() <= NAME_BYTES_MAX {
        return name.to_owned();
    }
    let kind = name.split('/').next().unwrap_or_default();
    let digest: String = Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{kind}/#{digest}")
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What is in it are keys.
        f.debug_struct("Storage").field("rows", &self.len()).finish_non_exhaustive()
    }
}

impl Storage {
    /// Reads all that is kept under a provider's id. Fails where this replica does not lead it, or
    /// where a row is not what this program can read.
    pub async fn open(link: Link, provider: &str) -> std::result::Result<Self, DeliverError> {
        let mut rows = BTreeMap::new();
        for (stored, bytes) in link.all_kept(provider).await? {
            let (name, row) = Row::decode(&stored, bytes).map_err(|why| DeliverError::Invalid {
                id: format!("row {stored:?} of {provider}"),
                why,
            })?;
            rows.insert(name, row);
        }
        let stored = rows.keys().cloned().collect();
        let state = Mutex::new(State { rows, stored, ..State::default() });
        let (committing, staged) = (tokio::sync::Mutex::default(), Notify::new());
        let over = watch::Sender::new(None);
        let provider = provider.to_owned();
        let shared = Shared { link, provider, state, committing, staged, over };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.shared.state.lock().rows.len()
    }

    /// Whether nothing was ever kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn get(&self, name: &str) -> Option<Row> {
        self.shared.state.lock().rows.get(name).cloned()
    }

    /// Rows whose names begin so, in order.
    pub(super) fn below(&self, first: &str) -> Vec<(String, Row)> {
        let state = self.shared.state.lock();
        let from = state.rows.range::<str, _>((Bound::Included(first), Bound::Unbounded));
        let below = from.take_while(|(name, _)| name.starts_with(first));
        below.map(|(name, row)| (name.clone(), row.clone())).collect()
    }

    /// How many rows have names that begin so.
    pub(super) fn count(&self, first: &str) -> usize {
        let state = self.shared.state.lock();
        let from = state.rows.range::<str, _>((Bound::Included(first), Bound::Unbounded));
        from.take_while(|(name, _)| name.starts_with(first)).count()
    }

    /// Changes rows; returns once that is durable, and all that was staged before.
    pub(super) async fn write(&self, changes: Vec<Change>) -> Result<()> {
        let Some(last) = self.note(changes)? else { return Ok(()) };
        self.durable(last).await
    }

    /// Changes rows; durable with the next write, or a little later.
    pub(super) fn stage(&self, changes: Vec<Change>) -> Result<()> {
        if self.note(changes)?.is_some() {
            self.shared.staged.notify_one();
        }
        Ok(())
    }

    /// Reads and changes rows, with nothing between the two, and makes it durable.
    pub(super) async fn update(
        &self,
        change: impl FnOnce(&dyn Fn(&str) -> Option<Row>) -> Result<Vec<Change>>,
    ) -> Result<()> {
        match self.noted(change)? {
            Some(last) => self.durable(last).await,
            None => Ok(()),
        }
    }

    /// As [`Storage::update`]; durable with the next write, or a little later.
    pub(super) fn stage_update(
        &self,
        change: impl FnOnce(&dyn Fn(&str) -> Option<Row>) -> Result<Vec<Change>>,
    ) -> Result<()> {
        if self.noted(change)?.is_some() {
            self.shared.staged.notify_one();
        }
        Ok(())
    }

    fn noted(
        &self,
        change: impl FnOnce(&dyn Fn(&str) -> Option<Row>) -> Result<Vec<Change>>,
    ) -> Result<Option<u64>> {
        let mut state = self.shared.state.lock();
        let changes = change(&|name| state.rows.get(name).cloned())?;
        self.note_in(&mut state, changes)
    }

    /// Writes what is staged.
    pub(super) async fn flush(&self) -> Result<()> {
        let last = self.shared.state.lock().last;
        self.durable(last).await
    }

    /// Deletes every row, and returns once that is durable.
    pub(super) async fn wipe(&self) -> Result<()> {
        let names: Vec<String> = self.shared.state.lock().rows.keys().cloned().collect();
        self.write(names.into_iter().map(|name| (name, None)).collect()).await
    }

    /// Writes what is staged and nothing goes with, until it is over.
    pub(super) async fn riding(&self) -> Over {
        let over = self.over();
        tokio::pin!(over);
        loop {
            let next = async {
                self.shared.staged.notified().await;
                tokio::time::sleep(RIDE).await;
                if let Err(error) = self.flush().await {
                    tracing::debug!(provider = %self.shared.provider, %error, "rows wait");
                    // They are still there.
                    self.shared.staged.notify_one();
                }
            };
            tokio::select! {
                biased;
                over = &mut over => return over,
                () = next => {}
            }
        }
    }

    /// Returns once nothing is taken any more.
    pub(super) async fn over(&self) -> Over {
        let mut over = self.shared.over.subscribe();
        // The sender is in `self`.
        over.wait_for(Option::is_some).await.ok().and_then(|over| *over).unwrap_or(Over::Closed)
    }

    /// Takes nothing any more, for this reason; the first one stays.
    pub(super) fn end(&self, why: Over) {
        self.shared.over.send_if_modified(|over| {
            let first = over.is_none();
            over.get_or_insert(why);
            first
        });
    }

    fn note(&self, changes: Vec<Change>) -> Result<Option<u64>> {
        self.note_in(&mut self.shared.state.lock(), changes)
    }

    /// Notes changes in memory; the number of the last one, where there was any.
    fn note_in(&self, state: &mut State, changes: Vec<Change>) -> Result<Option<u64>> {
        if let Some(over) = *self.shared.over.borrow() {
            return Err(refused(over));
        }
        for (name, row) in &changes {
            let bytes = row.as_ref().map_or(0, |row| row.content.len());
            if bytes + HEAD_BYTES_MAX > VALUE_BYTES_MAX || name.len() > HEAD_BYTES_MAX / 2 {
                let kind = name.split('/').next().unwrap_or_default();
                let why = format!("a row of {kind} is too large: {bytes} bytes");
                return Err(StoreError::Validation(why));
            }
        }
        let mut last = None;
        for (name, row) in changes {
            last = state.change(name, row).max(last);
        }
        Ok(last)
    }

    /// Returns once all up to that number is durable.
    async fn durable(&self, last: u64) -> Result<()> {
        let _turn = self.shared.committing.lock().await;
        if self.shared.state.lock().durable >= last {
            return Ok(());
        }
        if let Some(over) = *self.shared.over.borrow() {
            return Err(refused(over));
        }
        let mut taken = Taken::from(&self.shared.state);
        for part in taken.parts() {
            let changed = self.shared.link.change(&self.shared.provider, part).await;
            if let Err(error) = changed {
                if matches!(error, DeliverError::Deposed) {
                    self.end(Over::Deposed);
                }
                return Err(StoreError::Database(Box::new(error)));
            }
        }
        taken.is_durable();
        Ok(())
    }
}

fn refused(over: Over) -> StoreError {
    let why = match over {
        Over::Deposed => DeliverError::Deposed,
        Over::Closed => DeliverError::Unavailable {
            why: "this connection is over".to_owned(),
            retry_after: RIDE,
        },
    };
    StoreError::Database(Box::new(why))
}

/// What is on its way into the store. It goes back to where it was taken from unless it arrived.
struct Taken<'a> {
    state: &'a Mutex<State>,
    staged: BTreeMap<u64, (String, Option<Row>)>,
    last: u64,
}

impl<'a> Taken<'a> {
    fn from(state: &'a Mutex<State>) -> Self {
        let mut locked = state.lock();
        locked.places.clear();
        let (staged, last) = (std::mem::take(&mut locked.staged), locked.last);
        locked.stored.extend(staged.values().map(|(name, _)| name.clone()));
        Self { state, staged, last }
    }

    /// The changes as commits, in order.
    fn parts(&self) -> Vec<Vec<(String, Option<Vec<u8>>)>> {
        let (mut parts, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
        for (name, row) in self.staged.values() {
            let value = row.as_ref().map(|row| row.encode(name));
            let more = name.len() + value.as_ref().map_or(0, Vec::len);
            if part.len() == COMMIT_ROWS_MAX || (bytes + more > COMMIT_BYTES_MAX && bytes > 0) {
                parts.push(std::mem::take(&mut part));
                bytes = 0;
            }
            bytes += more;
            part.push((stored_name(name), value));
        }
        if !part.is_empty() {
            parts.push(part);
        }
        parts
    }

    fn is_durable(&mut self) {
        let mut state = self.state.lock();
        state.durable = state.durable.max(self.last);
        for (name, row) in std::mem::take(&mut self.staged).into_values() {
            if row.is_none() {
                state.stored.remove(&name);
            }
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        for (place, (name, row)) in std::mem::take(&mut self.staged) {
            // What was written since is newer.
            if !state.places.contains_key(&name) {
                state.places.insert(name.clone(), place);
                state.staged.insert(place, (name, row));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d5_a_row_says_what_it_is() {
        let name = named("session", &["1/2%3#4@lid:5", "ü"]);
        assert_eq!(parts(&name), ["1/2%3#4@lid:5", "ü"]);
        let row = Row { at: 7, json: false, content: Bytes::from_static(b"a\nb") };
        let bytes = row.encode(&name);
        assert_eq!(bytes, b"{\"v\":1,\"at\":7,\"form\":\"bytes\"}\na\nb");
        assert_eq!(Row::decode(&name, bytes).unwrap(), (name, row.clone()));
        let long = named("sent", &[&"x".repeat(NAME_BYTES_MAX)]);
        let stored = stored_name(&long);
        assert!(stored.starts_with("sent/#") && stored.len() < 80, "{stored}");
        assert_eq!(Row::decode(&stored, row.encode(&long)).unwrap(), (long, row));
        for odd in [&b""[..], b"{}\n", b"x\n", b"{\"v\":2,\"at\":0,\"form\":\"json\"}\n{}"] {
            assert!(Row::decode("device", odd.to_vec()).is_err());
        }
    }
}
