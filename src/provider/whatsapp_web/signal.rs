//! Storage for the Signal protocol: identities, sessions, pre-keys, sender keys.
//!
//! All of it is durable when the call returns: the client sends a message under a counter only after
//! it has stored that the counter is used.

use std::sync::Arc;

use bytes::Bytes;
use whatsapp_rust::async_trait;
use whatsapp_rust::traits::SignalStore;
use whatsapp_rust::wacore::store::error::{Result, StoreError};

use super::storage::{Change, Row, Storage, named, parts};

const IDENTITY: &str = "identity";
const SESSION: &str = "session";
const PREKEY: &str = "prekey";
const SIGNED: &str = "signed-prekey";
const SENDER: &str = "sender-key";

/// A number as a part of a name: in order.
fn number(id: u32) -> String {
    format!("{id:010}")
}

fn put(kind: &str, part: &str, content: &[u8]) -> Change {
    (named(kind, &[part]), Some(Row::raw(content.to_vec())))
}

impl Storage {
    fn content(&self, kind: &str, part: &str) -> Option<Bytes> {
        self.get(&named(kind, &[part])).map(|row| row.content)
    }

    async fn delete(&self, kind: &str, part: &str) -> Result<()> {
        self.write(vec![(named(kind, &[part]), None)]).await
    }

    /// The numbered rows of a kind, in order.
    fn numbered(&self, kind: &str) -> Vec<(u32, Bytes)> {
        let rows = self.below(&format!("{kind}/")).into_iter();
        rows.filter_map(|(name, row)| Some((parts(&name).pop()?.parse().ok()?, row.content)))
            .collect()
    }
}

#[async_trait]
impl SignalStore for Storage {
    async fn put_identity(&self, address: &str, key: [u8; 32]) -> Result<()> {
        self.write(vec![put(IDENTITY, address, &key)]).await
    }

    async fn put_identities_batch(&self, identities: &[(Arc<str>, [u8; 32])]) -> Result<()> {
        self.write(identities.iter().map(|(at, key)| put(IDENTITY, at, key)).collect()).await
    }

    async fn load_identity(&self, address: &str) -> Result<Option<[u8; 32]>> {
        let Some(content) = self.content(IDENTITY, address) else { return Ok(None) };
        let key = content.as_ref().try_into();
        key.map(Some).map_err(|_| StoreError::Validation("an identity has 32 bytes".to_owned()))
    }

    async fn delete_identity(&self, address: &str) -> Result<()> {
        self.delete(IDENTITY, address).await
    }

    async fn get_session(&self, address: &str) -> Result<Option<Bytes>> {
        Ok(self.content(SESSION, address))
    }

    async fn put_session(&self, address: &str, session: &[u8]) -> Result<()> {
        self.write(vec![put(SESSION, address, session)]).await
    }

    async fn put_sessions_batch(&self, sessions: &[(Arc<str>, Bytes)]) -> Result<()> {
        self.write(sessions.iter().map(|(at, session)| put(SESSION, at, session)).collect()).await
    }

    async fn delete_session(&self, address: &str) -> Result<()> {
        self.delete(SESSION, address).await
    }

    async fn has_signal_state_for_user(&self, user: &str) -> Result<bool> {
        let is_of = |kind: &str| {
            let first = named(kind, &[user]);
            let rows = self.below(&first).into_iter();
            rows.map(|(name, _)| name).any(|name| name[first.len()..].starts_with(['@', ':']))
        };
        Ok(is_of(SESSION) || is_of(IDENTITY))
    }

    async fn store_prekey(&self, id: u32, record: &[u8], _uploaded: bool) -> Result<()> {
        self.write(vec![put(PREKEY, &number(id), record)]).await
    }

    async fn store_prekeys_batch(&self, keys: &[(u32, Bytes)], _uploaded: bool) -> Result<()> {
        self.write(keys.iter().map(|(id, record)| put(PREKEY, &number(*id), record)).collect())
            .await
    }

    async fn load_prekey(&self, id: u32) -> Result<Option<Bytes>> {
        Ok(self.content(PREKEY, &number(id)))
    }

    async fn mark_prekeys_uploaded(&self, _ids: &[u32]) -> Result<()> {
        // Nobody ever asks; which were offered, the device's own watermark says.
        Ok(())
    }

    async fn remove_prekey(&self, id: u32) -> Result<()> {
        // One that is still there after a crash decrypts a message that is known by its id; so it
        // need not be gone before anything else. It is not removed before its session is durable.
        self.stage(vec![(named(PREKEY, &[&number(id)]), None)])
    }

    async fn get_max_prekey_id(&self) -> Result<u32> {
        Ok(self.numbered(PREKEY).last().map_or(0, |(id, _)| *id))
    }

    async fn store_signed_prekey(&self, id: u32, record: &[u8]) -> Result<()> {
        self.write(vec![put(SIGNED, &number(id), record)]).await
    }

    async fn load_signed_prekey(&self, id: u32) -> Result<Option<Vec<u8>>> {
        Ok(self.content(SIGNED, &number(id)).map(|record| record.to_vec()))
    }

    async fn load_all_signed_prekeys(&self) -> Result<Vec<(u32, Vec<u8>)>> {
        let all = self.numbered(SIGNED).into_iter();
        Ok(all.map(|(id, record)| (id, record.to_vec())).collect())
    }

    async fn remove_signed_prekey(&self, id: u32) -> Result<()> {
        self.delete(SIGNED, &number(id)).await
    }

    async fn put_sender_key(&self, address: &str, record: &[u8]) -> Result<()> {
        self.write(vec![put(SENDER, address, record)]).await
    }

    async fn put_sender_keys_batch(&self, sender_keys: &[(Arc<str>, Bytes)]) -> Result<()> {
        self.write(sender_keys.iter().map(|(at, record)| put(SENDER, at, record)).collect()).await
    }

    async fn get_sender_key(&self, address: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.content(SENDER, address).map(|record| record.to_vec()))
    }

    async fn delete_sender_key(&self, address: &str) -> Result<()> {
        self.delete(SENDER, address).await
    }
}
