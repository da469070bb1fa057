//! What became of a reply, as its provider tells.
//!
//! Receipts come late, twice and out of order, and to any replica. So how far a reply came is a row of
//! the store, and it only ever advances: what is behind it is dropped. They are no messages: they take
//! no turn, and nothing that becomes of one delays a user's message (case w3).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::DeliverError;
use crate::store::{Authority, CommitError, Consistency, Expect, Op, RowKey, Store, Table};
use crate::types::{ChatKey, KEY_BYTES_MAX};

/// How long it is remembered how far a reply came: later receipts are dropped by nobody any more.
const REMEMBERED_MS: u64 = 7 * 24 * 3_600_000;
/// Tries to advance rows that others advance at the same time.
const TRIES_MAX: u32 = 8;

/// How far a reply came. A later one is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReceiptState {
    /// The provider sent it on.
    Sent,
    /// It will not arrive.
    Failed,
    /// It is on the user's device.
    Delivered,
    /// The user saw it.
    Read,
    /// The user heard it.
    Played,
}

/// What became of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The chat.
    pub chat: ChatKey,
    /// What the outside calls the reply ([`super::SentId`]); for a receipt for all replies up to an
    /// instant, that chat's watermark.
    pub sent: String,
    /// How far it came.
    pub state: ReceiptState,
    /// When, ms since the Unix epoch, by the provider's clock; for a watermark, up to when.
    pub at_ms: u64,
    /// What the outside says of a failure.
    pub why: Option<String>,
    /// A watermark advances with its instant too, not with its state alone.
    pub watermark: bool,
}

/// As it is stored. A reply advances by its state, a watermark by its instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Reached {
    at_ms: u64,
    state: ReceiptState,
}

impl Receipt {
    fn key(&self) -> RowKey {
        let kind = if self.watermark { format!("{:?}:", self.state) } else { String::new() };
        RowKey::new(Table::Kv, format!("botmesh.receipt:{kind}{}:{}", self.chat.channel, self.sent))
    }

    fn reached(&self) -> Reached {
        Reached { at_ms: if self.watermark { self.at_ms } else { 0 }, state: self.state }
    }
}

/// Advances what the store knows; answers those receipts that advanced something, in order.
pub(super) async fn advance(
    store: &dyn Store,
    receipts: Vec<Receipt>,
) -> Result<Vec<Receipt>, DeliverError> {
    // A key over the limit is none this bot's replies were ever given.
    let fits = |receipt: &Receipt| receipt.key().key.len() <= KEY_BYTES_MAX;
    let receipts: Vec<Receipt> = receipts.into_iter().filter(fits).collect();
    let mut failed = None;
    for _ in 0..TRIES_MAX {
        let (advanced, ops) = draft(store, &receipts).await?;
        if ops.is_empty() {
            return Ok(Vec::new());
        }
        match store.commit(Authority::Nobody, ops).await {
            Ok(_) => return Ok(advanced),
            // Somebody advanced one of them meanwhile, or did this: look again.
            Err(error) => failed = Some(error),
        }
        if !matches!(failed, Some(CommitError::Superseded { .. })) {
            break;
        }
    }
    let why = failed.map_or_else(String::new, |error| error.to_string());
    Err(DeliverError::Unavailable { why, retry_after: std::time::Duration::from_secs(1) })
}

/// Which receipts are news, and what has to be written for them.
async fn draft(
    store: &dyn Store,
    receipts: &[Receipt],
) -> Result<(Vec<Receipt>, Vec<Op>), DeliverError> {
    let mut rows: BTreeMap<RowKey, (Expect, Option<Reached>, bool)> = BTreeMap::new();
    let mut advanced = Vec::new();
    for receipt in receipts {
        let key = receipt.key();
        if !rows.contains_key(&key) {
            let found = store.read(&key, Consistency::Local).await.map_err(|error| {
                let retry_after = std::time::Duration::from_secs(1);
                DeliverError::Unavailable { why: error.to_string(), retry_after }
            })?;
            let expect = found.as_ref().map_or(Expect::Absent, |r| Expect::Revision(r.revision));
            let reached = found.and_then(|row| serde_json::from_slice(&row.value).ok());
            rows.insert(key.clone(), (expect, reached, false));
        }
        let Some((_, reached, changed)) = rows.get_mut(&key) else { continue };
        if reached.is_none_or(|reached| reached < receipt.reached()) {
            *reached = Some(receipt.reached());
            *changed = true;
            advanced.push(receipt.clone());
        }
    }
    let changed = rows.into_iter().filter(|(_, (_, _, changed))| *changed);
    let ops = changed.map(|(row, (expect, reached, _))| {
        // Two plain fields always serialise.
        let value = serde_json::to_vec(&reached).unwrap_or_default();
        Op::Put { row, value, expect, ttl_ms: Some(REMEMBERED_MS) }
    });
    Ok((advanced, ops.collect()))
}
