use std::path::Path;

use bytes::Bytes;
use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use uuid::Uuid;

use super::*;
use crate::machine::{
    Authority, BatchReply, ClientId, Command, Expect, Op, RowKey, Table as RowTable,
};
use crate::raft::identity::Identity;
use crate::raft::log_store::{LogOptions, test_log_id};
use crate::raft::types::Entry;
use crate::types::Prefix;

/// What the hook was told.
#[derive(Debug, Default)]
struct Heard {
    applied: Mutex<Vec<(u64, u64, BatchReply)>>,
    installed: Mutex<u32>,
}

impl ApplyHook for Heard {
    fn applied(&self, index: u64, batch: &Batch, reply: BatchReply, _effects: Vec<Effect>) {
        self.applied.lock().push((index, batch.serial, reply));
    }

    fn installed(&self, _machine: &Machine) {
        *self.installed.lock() += 1;
    }
}

fn stamped(root: &Path) -> DataDir {
    let dir = DataDir::open(root, "test").unwrap();
    let identity =
        Identity { cluster_id: Uuid::nil(), node_id: 1, name: "n1".into(), peers: vec![] };
    dir.stamp(identity).unwrap();
    dir
}

fn try_open(root: &Path) -> Result<(LogStore, StateStore, Arc<Heard>), OpenError> {
    let dir = stamped(root);
    let log = LogStore::open(&dir, LogOptions::default())?;
    let heard = Arc::new(Heard::default());
    // No cut comes by itself: the tests say when.
    let options = StateOptions {
        cut_every: Duration::from_secs(3600),
        ..StateOptions::new(Limits::default())
    };
    let state = StateStore::open(&dir, &log, options, heard.clone())?;
    Ok((log, state, heard))
}

fn open(root: &Path) -> (LogStore, StateStore, Arc<Heard>) {
    try_open(root).unwrap()
}

struct Dirs;

impl StoreBuilder<TypeConfig, LogStore, StateStore, tempfile::TempDir> for Dirs {
    async fn build(
        &self,
    ) -> Result<(tempfile::TempDir, LogStore, StateStore), StorageError<TypeConfig>> {
        let dir = tempfile::tempdir().unwrap();
        let (log, state, _) = open(dir.path());
        Ok((dir, log, state))
    }
}

#[tokio::test]
async fn openrafts_own_suite_passes() {
    Suite::test_all(Dirs).await.unwrap();
}

fn row(key: &str) -> RowKey {
    RowKey { table: RowTable::Kv, prefix: Prefix::new("bot").unwrap(), key: key.to_owned() }
}

fn put(key: &str, value: Vec<u8>) -> Op {
    Op::Put { row: row(key), value, expect: Expect::Any, ttl_ms: None }
}

fn batch(serial: u64, ops: Vec<Op>) -> Batch {
    Batch {
        client: ClientId { node: 1, boot: 1 },
        lane: 0,
        serial,
        stamp_ms: 1_000 + serial,
        commands: vec![Command::Commit { by: Authority::Nobody, ops }],
    }
}

fn entry(index: u64, ops: Vec<Op>) -> Entry {
    let bytes = codec::seal(Kind::Batch, &batch(index - 1, ops));
    Entry {
        log_id: test_log_id(1, index),
        payload: EntryPayload::Normal(Proposal(Bytes::from(bytes))),
    }
}

async fn apply(state: &mut StateStore, entries: Vec<Entry>) {
    let entries = entries.into_iter().map(|entry| Ok((entry, None)));
    state.apply(futures_util::stream::iter(entries)).await.unwrap();
}

fn hash(state: &StateStore) -> u64 {
    state.read(|machine| machine.freeze().hash())
}

fn value(state: &StateStore, key: &str) -> Option<Vec<u8>> {
    state.read(|machine| machine.row(&row(key))).map(|row| row.value)
}
