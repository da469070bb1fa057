//! Storage of what the account is: the device, the state it synchronises with the phone, and the
//! secrets of messages.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use whatsapp_rust::async_trait;
use whatsapp_rust::traits::{
    AppStateSyncKey, AppSyncStore, DeviceStore, MsgSecretEntry, MsgSecretStore,
    merge_msg_secret_expiry, merge_msg_secret_message_ts,
};
use whatsapp_rust::wacore::appstate::hash::HashState;
use whatsapp_rust::wacore::appstate::processor::AppStateMutationMAC;
use whatsapp_rust::wacore::client_profile::ClientProfile;
use whatsapp_rust::wacore::store::Device;
use whatsapp_rust::wacore::store::device::DEVICE_PROPS;
use whatsapp_rust::wacore::store::error::{Result, StoreError};

use super::storage::{Row, Storage, named, parts};

pub(super) const DEVICE: &str = "device";
const SYNC_KEY: &str = "sync-key";
const SYNC_LATEST: &str = "sync-latest";
const SYNC_VERSION: &str = "sync-version";
const MAC: &str = "mac";
const SECRET: &str = "secret";

/// The secret of a message, by which what refers to it is decrypted.
#[derive(Serialize, Deserialize)]
struct Secret {
    secret: Vec<u8>,
    expires_at: i64,
    message_ts: i64,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Storage {
    /// The device, where there is one.
    pub(super) fn device(&self) -> Result<Option<Device>> {
        let Some(row) = self.get(DEVICE) else { return Ok(None) };
        let mut device: Device = row.read()?;
        // What a process sets at its start and is not stored.
        device.device_props = Arc::new(DEVICE_PROPS.clone());
        device.client_profile = ClientProfile::web();
        Ok(Some(device))
    }
}

#[async_trait]
impl DeviceStore for Storage {
    async fn save(&self, device: &Device) -> Result<()> {
        let row = Row::json(device)?;
        let identity = device.identity_key.public_key.public_key_bytes().to_vec();
        self.update(|get| {
            let before = get(DEVICE).map(|row| row.read::<Device>()).transpose()?;
            let other = before.filter(|before| before.is_registered()).is_some_and(|before| {
                before.identity_key.public_key.public_key_bytes() != identity
            });
            if other {
                // Linking anew begins with deleting this one, on purpose.
                let why = "a linked device is not replaced by another".to_owned();
                return Err(StoreError::Validation(why));
            }
            Ok(vec![(DEVICE.to_owned(), Some(row))])
        })
        .await
    }

    async fn load(&self) -> Result<Option<Device>> {
        self.device()
    }

    async fn exists(&self) -> Result<bool> {
        Ok(self.get(DEVICE).is_some())
    }

    async fn create(&self) -> Result<i32> {
        if self.get(DEVICE).is_none() {
            self.save(&Device::new()).await?;
        }
        Ok(1)
    }
}

#[async_trait]
impl AppSyncStore for Storage {
    async fn get_sync_key(&self, key_id: &[u8]) -> Result<Option<AppStateSyncKey>> {
        self.get(&named(SYNC_KEY, &[&hex(key_id)])).map(|row| row.read()).transpose()
    }

    async fn set_sync_key(&self, key_id: &[u8], key: AppStateSyncKey) -> Result<()> {
        let key = (named(SYNC_KEY, &[&hex(key_id)]), Some(Row::json(&key)?));
        self.write(vec![key, (SYNC_LATEST.to_owned(), Some(Row::raw(key_id.to_vec())))]).await
    }

    async fn get_version(&self, name: &str) -> Result<HashState> {
        let row = self.get(&named(SYNC_VERSION, &[name]));
        row.map_or_else(|| Ok(HashState::default()), |row| row.read())
    }

    async fn set_version(&self, name: &str, state: HashState) -> Result<()> {
        self.write(vec![(named(SYNC_VERSION, &[name]), Some(Row::json(&state)?))]).await
    }

    async fn put_mutation_macs(
        &self,
        name: &str,
        _version: u64,
        mutations: &[AppStateMutationMAC],
    ) -> Result<()> {
        let put = |mac: &AppStateMutationMAC| {
            let row = Row::raw(mac.value_mac.clone());
            (named(MAC, &[name, &hex(&mac.index_mac)]), Some(row))
        };
        self.write(mutations.iter().map(put).collect()).await
    }

    async fn get_mutation_mac(&self, name: &str, index_mac: &[u8]) -> Result<Option<Vec<u8>>> {
        let row = self.get(&named(MAC, &[name, &hex(index_mac)]));
        Ok(row.map(|row| row.content.to_vec()))
    }

    async fn get_mutation_macs(
        &self,
        name: &str,
        index_macs: &[[u8; 32]],
    ) -> Result<HashMap<[u8; 32], Vec<u8>>> {
        let found = index_macs.iter().filter_map(|index| {
            let row = self.get(&named(MAC, &[name, &hex(index)]))?;
            Some((*index, row.content.to_vec()))
        });
        Ok(found.collect())
    }

    async fn delete_mutation_macs(&self, name: &str, index_macs: &[Vec<u8>]) -> Result<()> {
        let gone = index_macs.iter().map(|index| (named(MAC, &[name, &hex(index)]), None));
        self.write(gone.collect()).await
    }

    async fn clear_mutation_macs(&self, name: &str) -> Result<()> {
        let all = self.below(&named(MAC, &[name, ""]));
        self.write(all.into_iter().map(|(name, _)| (name, None)).collect()).await
    }

    async fn get_latest_sync_key_id(&self) -> Result<Option<Vec<u8>>> {
        Ok(self.get(SYNC_LATEST).map(|row| row.content.to_vec()))
    }
}

#[async_trait]
impl MsgSecretStore for Storage {
    async fn put_msg_secrets(&self, entries: Vec<MsgSecretEntry>) -> Result<usize> {
        let stored = entries.len();
        self.update(|get| {
            // Of two of one key in a batch the later is judged by the earlier.
            let mut changed: HashMap<String, Secret> = HashMap::new();
            for entry in &entries {
                let name = named(SECRET, &[&entry.chat, &entry.sender, &entry.msg_id]);
                let before = match changed.remove(&name) {
                    Some(before) => Some(before),
                    None => get(&name).map(|row| row.read::<Secret>()).transpose()?,
                };
                let (expires_at, message_ts) = match before {
                    None => (entry.expires_at, entry.message_ts),
                    Some(before) => (
                        merge_msg_secret_expiry(before.expires_at, entry.expires_at),
                        merge_msg_secret_message_ts(before.message_ts, entry.message_ts),
                    ),
                };
                let secret = entry.secret.to_vec();
                changed.insert(name, Secret { secret, expires_at, message_ts });
            }
            let rows = changed
                .into_iter()
                .map(|(name, secret)| Row::json(&secret).map(|row| (name, Some(row))));
            rows.collect()
        })
        .await?;
        Ok(stored)
    }

    async fn get_msg_secret(&self, chat: &str, sender: &str, id: &str) -> Result<Option<Vec<u8>>> {
        let found = self.get_msg_secret_with_ts(chat, sender, id).await?;
        Ok(found.map(|(secret, _)| secret))
    }

    async fn get_msg_secret_with_ts(
        &self,
        chat: &str,
        sender: &str,
        id: &str,
    ) -> Result<Option<(Vec<u8>, i64)>> {
        let Some(row) = self.get(&named(SECRET, &[chat, sender, id])) else { return Ok(None) };
        let Secret { secret, message_ts, .. } = row.read()?;
        Ok(Some((secret, message_ts)))
    }

    async fn delete_expired_msg_secrets(&self, cutoff_timestamp: i64) -> Result<u32> {
        self.sweep(SECRET, |row| {
            let secret: Secret = row.read()?;
            Ok(secret.expires_at != 0 && secret.expires_at <= cutoff_timestamp)
        })
    }
}

impl Storage {
    /// Deletes those rows of a kind that are past; how many they were.
    pub(super) fn sweep(&self, kind: &str, past: impl Fn(&Row) -> Result<bool>) -> Result<u32> {
        let mut gone = Vec::new();
        for (name, row) in self.below(&format!("{kind}/")) {
            if past(&row)? {
                debug_assert!(!parts(&name).is_empty(), "rows of a kind have a name");
                gone.push((name, None));
            }
        }
        let count = u32::try_from(gone.len()).unwrap_or(u32::MAX);
        self.stage(gone)?;
        Ok(count)
    }
}
