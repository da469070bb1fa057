//! A user's state: typed, kept by the store, changed by compare-and-set.

use std::fmt;
use std::marker::PhantomData;

use super::conversation::State;
use super::error::UserError;
use super::scope::Scope;
use crate::store::{
    CommitError, Consistency, Expect, Op, RowKey, Store, StoreError, Table, user_key,
};

/// How often an update is repeated when others write in between.
const UPDATE_TRIES_MAX: u32 = 100;

/// The state of the user whose message is handled.
pub struct UserState<'c, T> {
    scope: &'c Scope,
    store: &'c dyn Store,
    row: RowKey,
    kind: PhantomData<fn() -> T>,
}

impl<T> fmt::Debug for UserState<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserState").field("row", &self.row).finish_non_exhaustive()
    }
}

impl<'c, T: State + Default> UserState<'c, T> {
    pub(crate) fn new(scope: &'c Scope, store: &'c dyn Store) -> Self {
        let row = RowKey::new(Table::User, user_key(scope.chat()));
        Self { scope, store, row, kind: PhantomData }
    }

    async fn read(&self, how: Consistency<'_>) -> Result<(T, Expect), UserError> {
        match self.store.read(&self.row, how).await? {
            None => Ok((T::default(), Expect::Absent)),
            Some(row) => {
                let state = serde_json::from_slice(&row.value).map_err(|error| {
                    StoreError::Undecodable { key: self.row.key.clone(), why: error.to_string() }
                })?;
                Ok((state, Expect::Revision(row.revision)))
            }
        }
    }

    /// Reads it, linearizably; the default where nothing was written yet.
    pub async fn get(&self) -> Result<T, UserError> {
        Ok(self.read(Consistency::Linearizable).await?.0)
    }

    /// Changes it: `change` is run again on newer state until no other write came in between.
    pub async fn update<R>(&self, mut change: impl FnMut(&mut T) -> R) -> Result<R, UserError> {
        // A user may write in several chats at once, so this chat's turn guards nothing here: the
        // revision does. The first read may be local, since an old one is refused.
        let mut how = Consistency::Local;
        for _ in 0..UPDATE_TRIES_MAX {
            let (mut state, expect) = self.read(how).await?;
            let result = change(&mut state);
            let value = serde_json::to_vec(&state).map_err(|error| UserError::Unserialisable {
                user: self.row.key.clone(),
                why: error.to_string(),
            })?;
            let put = Op::Put { row: self.row.clone(), value, expect, ttl_ms: None };
            match self.store.commit(self.scope.authority(), vec![put]).await {
                Ok(_) => return Ok(result),
                Err(CommitError::Superseded { .. }) => how = Consistency::Linearizable,
                Err(error) => return Err(error.into()),
            }
        }
        Err(UserError::Contended { user: self.row.key.clone(), tries: UPDATE_TRIES_MAX })
    }
}
