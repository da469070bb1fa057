//! Rows: values under a key, with a revision and perhaps an end.
//!
//! Every write takes a revision no row ever had, so a condition can never match a row that was
//! deleted and made again (SPEC K6). A row whose end has passed counts as absent at once; it is
//! removed a little later, a bounded number an apply.

use std::sync::Arc;

use super::apply::SWEEP_MAX;
use super::state::{Machine, Row};
use super::tables::{Payload, StoredRow};
use super::{Effect, RowKey};
use crate::types::Revision;

impl Machine {
    /// A row as long as it has not ended.
    pub(super) fn live_row(&self, key: &RowKey) -> Option<&StoredRow> {
        self.tables.rows.get(key).filter(|row| !self.has_ended(row.expires_ms))
    }

    pub(super) fn has_ended(&self, expires_ms: Option<u64>) -> bool {
        expires_ms.is_some_and(|expires| expires <= self.tables.meta.now_ms)
    }

    pub(super) fn put_row(
        &mut self,
        key: &RowKey,
        value: &[u8],
        ttl_ms: Option<u64>,
        effects: &mut Vec<Effect>,
    ) -> Revision {
        self.tables.meta.revision += 1;
        let revision = Revision(self.tables.meta.revision);
        let expires_ms = ttl_ms.map(|ttl| self.tables.meta.now_ms.saturating_add(ttl));
        let shared = match self.tables.rows.get_key(key) {
            Some(shared) => shared.clone(),
            None => Arc::new(key.clone()),
        };
        let row = StoredRow { value: Payload(value.into()), revision, expires_ms };
        if let Some(old) = self.tables.rows.insert(shared.clone(), row)
            && let Some(expires) = old.expires_ms
        {
            self.index.row_ends.remove(&(expires, shared.clone()));
        }
        if let Some(expires) = expires_ms {
            self.index.row_ends.insert((expires, shared));
        }
        effects.push(Effect::RowChanged(key.clone()));
        revision
    }

    pub(super) fn delete_row(&mut self, key: &RowKey, effects: &mut Vec<Effect>) {
        let Some(shared) = self.tables.rows.get_key(key).cloned() else { return };
        if let Some(old) = self.tables.rows.remove(key) {
            if let Some(expires) = old.expires_ms {
                self.index.row_ends.remove(&(expires, shared));
            }
            effects.push(Effect::RowChanged(key.clone()));
        }
    }

    pub(super) fn sweep_rows(&mut self, effects: &mut Vec<Effect>) {
        for _ in 0..SWEEP_MAX {
            let Some((expires, key)) = self.index.row_ends.first().cloned() else { return };
            if !self.has_ended(Some(expires)) {
                return;
            }
            self.delete_row(&key, effects);
        }
    }

    /// A row, unless it has ended.
    pub fn row(&self, key: &RowKey) -> Option<Row> {
        self.live_row(key).map(view)
    }

    /// Up to `limit` rows of a table and prefix after `after`, in key order, ended ones left out.
    /// `first` itself is left out where `after` is set.
    pub fn scan(&self, first: &RowKey, after: bool, limit: usize) -> Vec<(RowKey, Row)> {
        use std::ops::Bound;
        let first = Arc::new(first.clone());
        let start =
            if after { Bound::Excluded(first.clone()) } else { Bound::Included(first.clone()) };
        let live = |row: &StoredRow| !self.has_ended(row.expires_ms);
        let found = self.tables.rows.range((start, Bound::Unbounded), limit, live);
        let same = |key: &RowKey| key.table == first.table && key.prefix == first.prefix;
        let rows = found.into_iter().take_while(|(key, _)| same(key));
        rows.map(|(key, row)| (RowKey::clone(key), view(row))).collect()
    }
}

fn view(row: &StoredRow) -> Row {
    Row { value: row.value.0.to_vec(), revision: row.revision, expires_ms: row.expires_ms }
}
