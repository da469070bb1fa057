//! The maps the state is made of.
//!
//! Problem: a snapshot and a periodic cut each need the whole state as of one log entry, while the
//! next entries are being applied; copying a million chats under the apply stalls every writer for
//! hundreds of milliseconds (DESIGN 7).
//!
//! Idea: a table is a fixed number of shards, each an `Arc` of a map. Holding it still clones the
//! `Arc`s; a later write copies the one shard it touches, once. Beside each shard stand the keys
//! touched since the last cut, each with whether it existed at that cut, so a key that came and
//! went in between leaves no record.
//!
//! A shard is a [`HashMap`], except where a table must be walked in order ([`Shelf`]): with keys
//! that are strings behind pointers, each step of a sorted search is a miss of the cache, and
//! lookups are half of what an apply costs.
//!
//! Invariants: which shard a key lives in, and where in it, is nobody's business outside this file:
//! everything that leaves a table (records, hashes) is in key order or independent of order.

use std::borrow::Borrow;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use foldhash::fast::RandomState;
use serde::Serialize;

use super::stored::encode;

/// A map by hash. Chats are named by strangers, so the hash is seeded in every process anew: nobody
/// can choose names that collide, and an order that mattered after all would differ between nodes,
/// which their state marks and the tests compare.
pub(super) type Hashed<K, V> = HashMap<K, V, RandomState>;

/// A shard's capacity below which it is not worth giving memory back.
const ROOM_MIN: usize = 64;

/// What a shard has to be able to do.
pub(super) trait Shelf<K, V>: Clone + Default {
    fn find<Q>(&self, key: &Q) -> Option<(&K, &V)>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized;
    fn find_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized;
    fn put(&mut self, key: K, value: V) -> Option<V>;
    fn take<Q>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized;
    fn all<'a>(&'a self) -> impl Iterator<Item = (&'a K, &'a V)>
    where
        K: 'a,
        V: 'a;
}

/// Both kinds of map do this alike, under the same names.
macro_rules! as_the_map_does {
    () => {
        fn find<Q>(&self, key: &Q) -> Option<(&K, &V)>
        where
            K: Borrow<Q>,
            Q: Ord + Hash + ?Sized,
        {
            self.get_key_value(key)
        }

        fn find_mut<Q>(&mut self, key: &Q) -> Option<&mut V>
        where
            K: Borrow<Q>,
            Q: Ord + Hash + ?Sized,
        {
            self.get_mut(key)
        }

        fn put(&mut self, key: K, value: V) -> Option<V> {
            self.insert(key, value)
        }

        fn all<'a>(&'a self) -> impl Iterator<Item = (&'a K, &'a V)>
        where
            K: 'a,
            V: 'a,
        {
            self.iter()
        }
    };
}

impl<K: Ord + Clone, V: Clone> Shelf<K, V> for BTreeMap<K, V> {
    as_the_map_does!();

    fn take<Q>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        self.remove_entry(key)
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Shelf<K, V> for Hashed<K, V> {
    as_the_map_does!();

    fn take<Q>(&mut self, key: &Q) -> Option<(K, V)>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        let taken = self.remove_entry(key);
        // A burst that has passed leaves no empty rooms behind.
        if self.capacity() > ROOM_MIN && self.len() < self.capacity() / 8 {
            self.shrink_to(self.len() * 2);
        }
        taken
    }
}

/// A sharded, copy-on-write map that knows what changed since its last cut.
#[derive(Debug, Clone)]
pub(super) struct Table<K, V, S = Hashed<K, V>> {
    shards: Vec<Shard<K, V, S>>,
    /// Picks the shard; seeded apart from the shards' own maps.
    spread: RandomState,
    len: u64,
    /// Whether anything was touched since the last cut; spares a look at every shard.
    touched: bool,
}

#[derive(Debug, Clone)]
struct Shard<K, V, S> {
    live: Arc<S>,
    /// Keys touched since the last cut → whether the last cut had them.
    touched: Hashed<K, bool>,
    value: PhantomData<V>,
}

/// A table held still.
#[derive(Debug, Clone)]
pub(super) struct FrozenTable<K, V, S = Hashed<K, V>> {
    shards: Vec<Arc<S>>,
    len: u64,
    entry: PhantomData<(K, V)>,
}

/// What changed in a table between two cuts, held still.
#[derive(Debug)]
pub(super) struct CutTable<K, V, S = Hashed<K, V>> {
    shards: Vec<CutShard<K, S>>,
    value: PhantomData<V>,
}

#[derive(Debug)]
struct CutShard<K, S> {
    live: Arc<S>,
    touched: Hashed<K, bool>,
}

impl<K: Ord + Hash + Clone, V: Clone, S: Shelf<K, V>> Table<K, V, S> {
    /// An empty table. `shards` is a power of two: many where a table grows with the chats, one
    /// where it is small or must be walked in order.
    pub(super) fn new(shards: usize) -> Self {
        assert!(shards.is_power_of_two(), "a shard is picked by masking");
        let shard =
            || Shard { live: Arc::default(), touched: Hashed::default(), value: PhantomData };
        Self {
            shards: (0..shards).map(|_| shard()).collect(),
            spread: RandomState::default(),
            len: 0,
            touched: false,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    fn place<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        if self.shards.len() == 1 {
            return 0;
        }
        self.spread.hash_one(key) as usize & (self.shards.len() - 1)
    }

    pub(super) fn get<Q>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        self.shards[self.place(key)].live.find(key).map(|(_, value)| value)
    }

    /// The key as it is stored, to share it.
    pub(super) fn get_key<Q>(&self, key: &Q) -> Option<&K>
    where
        K: Borrow<Q>,
        Q: Ord + Hash + ?Sized,
    {
        self.shards[self.place(key)].live.find(key).map(|(key, _)| key)
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
        let (owned, _) = shard.live.find(key)?;
        if !shard.touched.contains_key(key) {
            shard.touched.insert(owned.clone(), true);
            self.touched = true;
        }
        Arc::make_mut(&mut shard.live).find_mut(key)
    }

    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let place = self.place(&key);
        let shard = &mut self.shards[place];
        if !shard.touched.contains_key(&key) {
            shard.touched.insert(key.clone(), shard.live.find(&key).is_some());
            self.touched = true;
        }
        let old = Arc::make_mut(&mut shard.live).put(key, value);
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
        shard.live.find(key)?;
        let (key, old) = Arc::make_mut(&mut shard.live).take(key)?;
        match shard.touched.entry(key) {
            Entry::Vacant(untouched) => drop(untouched.insert(true)),
            // Came and went since the last cut: to that cut it is as if it never was.
            Entry::Occupied(came) if !came.get() => drop(came.remove()),
            Entry::Occupied(_) => {}
        }
        self.touched = true;
        self.len -= 1;
        Some(old)
    }

    /// Everything, shard by shard. For what does not depend on order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.shards.iter().flat_map(|shard| shard.live.all())
    }

    /// Holds the table still.
    pub(super) fn freeze(&self) -> FrozenTable<K, V, S> {
        let shards = self.shards.iter().map(|shard| shard.live.clone()).collect();
        FrozenTable { shards, len: self.len, entry: PhantomData }
    }

    /// What changed since the last cut; the next one starts here.
    pub(super) fn cut(&mut self) -> CutTable<K, V, S> {
        let mut shards = Vec::new();
        if std::mem::take(&mut self.touched) {
            for shard in self.shards.iter_mut().filter(|shard| !shard.touched.is_empty()) {
                let touched = std::mem::take(&mut shard.touched);
                shards.push(CutShard { live: shard.live.clone(), touched });
            }
        }
        CutTable { shards, value: PhantomData }
    }

    /// Forgets what changed: the state as it stands is on disk.
    pub(super) fn mark_clean(&mut self) {
        self.touched = false;
        for shard in &mut self.shards {
            shard.touched = Hashed::default();
        }
    }
}

impl<K: Ord + Hash + Clone, V: Clone> Table<K, V, BTreeMap<K, V>> {
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
}

impl<K: Ord + Serialize, V: Serialize, S: Shelf<K, V>> FrozenTable<K, V, S> {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Its records in key order.
    pub(super) fn records(&self, tag: u8) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> + '_ {
        let mut entries: Vec<(&K, &V)> = self.shards.iter().flat_map(|shard| shard.all()).collect();
        entries.sort_unstable_by_key(|(key, _)| *key);
        entries.into_iter().map(move |(key, value)| (record_key(tag, key), encode(value)))
    }

    /// Its records in no order that means anything.
    pub(super) fn records_unordered(
        &self,
        tag: u8,
    ) -> impl Iterator<Item = (Vec<u8>, Vec<u8>)> + '_ {
        let entries = self.shards.iter().flat_map(|shard| shard.all());
        entries.map(move |(key, value)| (record_key(tag, key), encode(value)))
    }
}

impl<K: Ord + Hash + Serialize, V: Serialize, S: Shelf<K, V>> CutTable<K, V, S> {
    /// Records that changed, within a shard in key order.
    pub(super) fn records(&self, tag: u8) -> impl Iterator<Item = (Vec<u8>, Option<Vec<u8>>)> + '_ {
        self.shards.iter().flat_map(move |shard| {
            let mut touched: Vec<(&K, bool)> =
                shard.touched.iter().map(|(key, existed)| (key, *existed)).collect();
            touched.sort_unstable_by_key(|(key, _)| *key);
            touched.into_iter().filter_map(move |(key, existed)| match shard.live.find(key) {
                Some((_, value)) => Some((record_key(tag, key), Some(encode(value)))),
                None if existed => Some((record_key(tag, key), None)),
                None => None,
            })
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| {
            shard.touched.iter().all(|(key, existed)| !existed && shard.live.find(key).is_none())
        })
    }
}

fn record_key<K: Serialize>(tag: u8, key: &K) -> Vec<u8> {
    let mut bytes = vec![tag];
    bytes.extend(encode(key));
    bytes
}
