//! What is built from [`Store::commit`] and [`Store::read`]: for every store alike.

use async_trait::async_trait;

use super::{
    Authority, CommitError, Consistency, Expect, Op, Row, RowKey, Store, StoreError, Table,
};
use crate::coordinator::Turn;
use crate::types::{ChatKey, Revision};

/// Attempts of [`StoreExt::update_row`] before it gives up: each lost one means that another writer
/// went on.
const UPDATE_ATTEMPTS_MAX: u32 = 100;

/// Why an update was not made.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum UpdateError {
    /// The row could not be read.
    #[error(transparent)]
    Read(#[from] StoreError),
    /// The row could not be written.
    #[error(transparent)]
    Write(#[from] CommitError),
}

/// Compound operations over any [`Store`].
#[async_trait]
pub trait StoreExt: Store {
    /// A chat's checkpoint, never older than anything acknowledged under this turn.
    async fn checkpoint(&self, turn: &Turn) -> Result<Option<Row>, StoreError> {
        let row = RowKey::new(Table::Checkpoint, turn.key().to_string());
        self.read(&row, Consistency::Under(turn)).await
    }

    /// Writes the checkpoint of the turn's chat, where its revision is still the one expected
    /// (`None`: where there is none), and only while the turn is held (SPEC C3).
    async fn set_checkpoint_if(
        &self,
        turn: &Turn,
        expected: Option<Revision>,
        value: Vec<u8>,
        ttl_ms: Option<u64>,
    ) -> Result<Revision, CommitError> {
        let row = RowKey::new(Table::Checkpoint, turn.key().to_string());
        let put = Op::Put { row, value, expect: expectation(expected), ttl_ms };
        let revisions = self.commit(Authority::Turn(turn), vec![put]).await?;
        Ok(revisions.first().copied().unwrap_or_default())
    }

    /// Deletes the checkpoint of the turn's chat where its revision is still the one expected, and
    /// only while the turn is held. A newer row stays.
    async fn clear_checkpoint_if(
        &self,
        turn: &Turn,
        expected: Revision,
    ) -> Result<(), CommitError> {
        let row = RowKey::new(Table::Checkpoint, turn.key().to_string());
        let delete = Op::Delete { row, expect: Expect::Revision(expected) };
        self.commit(Authority::Turn(turn), vec![delete]).await.map(drop)
    }

    /// The checkpoint of a chat, as anybody may read it.
    async fn checkpoint_of(&self, chat: &ChatKey) -> Result<Option<Row>, StoreError> {
        let row = RowKey::new(Table::Checkpoint, chat.to_string());
        self.read(&row, Consistency::Linearizable).await
    }

    /// Reads a row, changes it and writes it back where nobody wrote meanwhile; again until it
    /// holds. For rows that several chats share (SPEC F4). `change` answers the new value, and may
    /// run several times.
    async fn update_row<F>(&self, row: &RowKey, mut change: F) -> Result<Revision, UpdateError>
    where
        F: FnMut(Option<&[u8]>) -> Vec<u8> + Send,
    {
        let mut attempt = 0;
        loop {
            attempt += 1;
            let found = self.read(row, Consistency::Linearizable).await?;
            let put = Op::Put {
                row: row.clone(),
                value: change(found.as_ref().map(|found| found.value.as_slice())),
                expect: expectation(found.map(|found| found.revision)),
                ttl_ms: None,
            };
            match self.commit(Authority::Nobody, vec![put]).await {
                Ok(revisions) => return Ok(revisions.first().copied().unwrap_or_default()),
                Err(CommitError::Superseded { .. }) if attempt < UPDATE_ATTEMPTS_MAX => {}
                Err(fault) => return Err(fault.into()),
            }
        }
    }
}

impl<S: Store + ?Sized> StoreExt for S {}

fn expectation(revision: Option<Revision>) -> Expect {
    revision.map_or(Expect::Absent, Expect::Revision)
}
