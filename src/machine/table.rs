//! The maps the state is made of.
//!
//! Problem: a snapshot and a periodic cut each need the whole state as of one log entry, while the
//! next entries are being applied; copying a million chats under the apply stalls every writer for
//! hundreds of milliseconds (DESIGN 7).
//!
//! Idea: a table is a fixed number of shards, each an `Arc` of a sorted map. Holding it still
//! clones the `Arc`s; a later write copies the one shard it touches, once. Beside each shard stand
//! the keys touched since the last cut, each with whether it existed at that cut, so a key that
//! came and went in between leaves no record.
//!
//! Invariants: which shard a key lives in is nobody's business outside this file: everything that
//! leaves a table (records, hashes) is in key order or independent of order.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::RangeBounds;
use std::sync::Arc;

use serde::Serialize;

use super::stored::encode;

/// A sharded, copy-on-write sorted map that knows what changed since its last cut.
#[derive(Debug, Clone)]
pub(super) struct Table<K, V> {
    shards: Vec<Shard<K, V>>,
    len: u64,
    /// Whether anything was touched since the last cut; spares a look at every shard.
    touched: bool,
}

#[derive(Debug, Clone)]
struct Shard<K, V> {
    live: Arc<BTreeMap<K, V>>,
    /// Keys touched since the last cut → whether the last cut had them.
    touched: BTreeMap<K, bool>,
}

/// A table held still.
#[derive(Debug, Clone)]
pub(super) struct FrozenTable<K, V> {
    shards: Vec<Arc<BTreeMap<K, V>>>,
    len: u64,
}

/// What changed in a table between two cuts, held still.
#[derive(Debug)]
pub(super) struct CutTable<K, V> {
    shards: Vec<CutShard<K, V>>,
}

#[derive(Debug)]
struct CutShard<K, V> {
    live: Arc<BTreeMap<K, V>>,
    touched: BTreeMap<K, bool>,
}

impl<K: Ord + Hash + Clone, V: Clone> Table<K, V> {
    /// An empty table. `shards` is a power of two: many where a table grows with the chats, one
    /// where it is small or must be walked in order.
    pub(super) fn new(shards: usize) -> Self {
        assert!(shards.is_power_of_two(), "a shard is picked by masking");
        let shard = || Shard { live: Arc::new(BTreeMap::new()), touched: BTreeMap::new() };
        Self { shards: (0..shards).map(|_| shard()).collect(), len: 0, touched: false }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    fn place<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        if self.shards.len() == 1 {
            return 0;
        }
        let mut hasher = ShardHasher(0);
        key.hash(&mut hasher);
        hasher.finish() as usize & (self.shards.len() - 1)
    }

    pub(super) fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        self.shards[self.place(key)].live.get(key)
    }

    /// The key as it is stored, to share it.
    pub(super) fn get_key<Q>(&self, key: &Q) -> Option<&K>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        self.shards[self.place(key)].live.get_key_value(key).map(|(key, _)| key)
    }

    pub(super) fn contains<Q>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        self.get(key).is_some()
    }

    /// A value to change; counts as touched.
    pub(super) fn get_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        let place = self.place(key);
        let shard = &mut self.shards[place];
        let (owned, _) = shard.live.get_key_value(key)?;
        if !shard.touched.contains_key(key) {
            shard.touched.insert(owned.clone(), true);
            self.touched = true;
        }
        Arc::make_mut(&mut shard.live).get_mut(key)
    }

    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let place = self.place(&key);
        let shard = &mut self.shards[place];
        if !shard.touched.contains_key(&key) {
            shard.touched.insert(key.clone(), shard.live.contains_key(&key));
            self.touched = true;
        }
        let old = Arc::make_mut(&mut shard.live).insert(key, value);
        self.len += u64::from(old.is_none());
        old
    }

    pub(super) fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        let place = self.place(key);
        let shard = &mut self.shards[place];
        // Looked up first, so that removing what is absent copies no shard.
        shard.live.get_key_value(key)?;
        let (key, old) = Arc::make_mut(&mut shard.live).remove_entry(key)?;
        shard.touched.entry(key).or_insert(true);
        self.touched = true;
        self.len -= 1;
        Some(old)
    }

    /// Everything, shard by shard. For what does not depend on order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.live.iter())
    }

    /// Up to `limit` entries of a range in key order, those that `wanted` lets pass.
    pub(super) fn range(
        &self,
        range: impl RangeBounds<K> + Clone,
        limit: usize,
        wanted: impl Fn(&V) -> bool,
    ) -> Vec<(&K, &V)> {
        // Each shard's first `limit` hold the table's first `limit`.
        let mut found = Vec::new();
        for shard in &self.shards {
            let entries = shard.live.range(range.clone()).filter(|(_, value)| wanted(value));
            found.extend(entries.take(limit));
        }
        found.sort_unstable_by_key(|(key, _)| *key);
        found.truncate(limit);
        found
    }

    /// Holds the table still.
    pub(super) fn freeze(&self) -> FrozenTable<K, V> {
        let shards = self.shards.iter().map(|shard| shard.live.clone()).collect();
        FrozenTable { shards, len: self.len }
    }

    /// What changed since the last cut; the next one starts here.
    pub(super) fn cut(&mut self) -> CutTable<K, V> {
        let mut shards = Vec::new();
        if std::mem::take(&mut self.touched) {
            for shard in self.shards.iter_mut().filter(|shard| !shard.touched.is_empty()) {
                let touched = std::mem::take(&mut shard.touched);
                shards.push(CutShard { live: shard.live.clone(), touched });
            }
        }
        CutTable { shards }
    }

    /// Forgets what changed: the state as it stands is on disk.
    pub(super) fn mark_clean(&mut self) {
        self.touched = false;
        for shard in &mut self.shards {
            shard.touched.clear();
        }
    }
}

impl<K: Ord + Serialize, V: Serialize> FrozenTable<K, V> {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Its records in key order.
    pub(super) fn records(&self, tag: u8) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> + '_ {
        let mut entries: Vec<(&K, &V)> =
            self.shards.iter().flat_map(|shard| shard.iter()).collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        entries.into_iter().map(move |(key, value)| (record_key(tag, key), encode(value)))
    }

    /// Its records in no order that means anything.
    pub(super) fn records_unordered(
        &self,
        tag: u8,
    ) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> + '_ {
        let entries = self.shards.iter().flat_map(|shard| shard.iter());
        entries.map(move |(key, value)| (record_key(tag, key), encode(value)))
    }
}

impl<K: Ord + Serialize, V: Serialize> CutTable<K, V> {
    pub(super) fn records(&self, tag: u8) -> impl Iterator<Item = (Vec<u8>, Option<Vec<u8>>)> + '_ {
        self.shards.iter().flat_map(move |shard| {
            shard.touched.iter().filter_map(move |(key, existed)| match shard.live.get(key) {
                Some(value) => Some((record_key(tag, key), Some(encode(value)))),
                None if *existed => Some((record_key(tag, key), None)),
                None => None,
            })
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| {
            shard.touched.iter().all(|(key, existed)| !existed && !shard.live.contains_key(key))
        })
    }
}

fn record_key<K: Serialize>(tag: u8, key: &K) -> Vec<u8> {
    let mut bytes = vec![tag];
    bytes.extend(encode(key));
    bytes
}

/// Spreads keys over shards. Fixed, so that two runs do the same work; never stored.
struct ShardHasher(u64);

impl Hasher for ShardHasher {
    fn write(&mut self, bytes: &[u8]) {
        let mut chunks = bytes.chunks_exact(8);
        for chunk in &mut chunks {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
        let mut word = [0; 8];
        word[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
        self.write_u64(u64::from_le_bytes(word));
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(u64::from(byte));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn finish(&self) -> u64 {
        // The multiplication mixes upwards; shards are picked by the low bits.
        self.0 ^ (self.0 >> 32)
    }
}
