//! Storage of what the client knows of others: devices, groups, tokens, who has which key; and of
//! messages that are on their way, in and out.

use std::collections::BTreeMap;

use whatsapp_rust::async_trait;
use whatsapp_rust::traits::{
    DeviceListRecord, LidPnMappingEntry, PendingInboundKey, PendingInboundRow, ProtocolStore,
    TcTokenEntry,
};
use whatsapp_rust::wacore::store::error::Result;

use super::storage::{Change, Row, Storage, named, parts};

/// A group's devices, each with whether it has the sender key: one row a group.
const HAVE_KEY: &str = "have-key";
const LID: &str = "lid";
/// From a phone number to the latest `LID`.
const NUMBER: &str = "number";
const BASE_KEY: &str = "base-key";
const DEVICES: &str = "devices";
const GROUP: &str = "group";
const TOKEN: &str = "token";
const SENT: &str = "sent";
const PENDING: &str = "pending";
/// Messages kept to be sent again when a device asks for it; beyond that the oldest go.
const SENT_MAX: usize = 4096;

type HaveKey = BTreeMap<String, bool>;

/// As it is after this entry, with the number it had before.
fn mapping(get: &dyn Fn(&str) -> Option<Row>, entry: &LidPnMappingEntry) -> Result<Vec<Change>> {
    let name = named(LID, &[&entry.lid]);
    let before = get(&name).map(|row| row.read::<LidPnMappingEntry>()).transpose()?;
    let mut changes = Vec::new();
    if let Some(before) = before.filter(|before| before.phone_number != entry.phone_number) {
        let number = named(NUMBER, &[&before.phone_number]);
        if get(&number).is_some_and(|row| row.content == entry.lid.as_bytes()) {
            changes.push((number, None));
        }
    }
    let lid = Row::raw(entry.lid.clone().into_bytes());
    changes.push((named(NUMBER, &[&entry.phone_number]), Some(lid)));
    changes.push((name, Some(Row::json(entry)?)));
    Ok(changes)
}

impl Storage {
    /// The groups, each with who has its key.
    fn have_key(&self) -> Result<Vec<(String, HaveKey)>> {
        let rows = self.below(&format!("{HAVE_KEY}/")).into_iter();
        rows.map(|(name, row)| Ok((name, row.read()?))).collect()
    }
}

#[async_trait]
impl ProtocolStore for Storage {
    async fn get_sender_key_devices(&self, group_jid: &str) -> Result<Vec<(String, bool)>> {
        let row = self.get(&named(HAVE_KEY, &[group_jid]));
        let devices: HaveKey = row.map(|row| row.read()).transpose()?.unwrap_or_default();
        Ok(devices.into_iter().collect())
    }

    async fn set_sender_key_status(&self, group_jid: &str, entries: &[(&str, bool)]) -> Result<()> {
        let name = named(HAVE_KEY, &[group_jid]);
        self.update(|get| {
            let mut devices: HaveKey =
                get(&name).map(|row| row.read()).transpose()?.unwrap_or_default();
            devices.extend(entries.iter().map(|(device, has)| ((*device).to_owned(), *has)));
            Ok(vec![(name.clone(), Some(Row::json(&devices)?))])
        })
        .await
    }

    async fn clear_sender_key_devices(&self, group_jid: &str) -> Result<()> {
        self.write(vec![(named(HAVE_KEY, &[group_jid]), None)]).await
    }

    async fn delete_sender_key_device_rows(&self, device_jids: &[&str]) -> Result<()> {
        let mut changes = Vec::new();
        for (name, mut devices) in self.have_key()? {
            let before = devices.len();
            devices.retain(|device, _| !device_jids.contains(&device.as_str()));
            if devices.len() < before {
                changes.push((name, Some(Row::json(&devices)?)));
            }
        }
        self.write(changes).await
    }

    async fn clear_all_sender_key_devices(&self) -> Result<()> {
        let all = self.below(&format!("{HAVE_KEY}/")).into_iter();
        self.write(all.map(|(name, _)| (name, None)).collect()).await
    }

    async fn get_lid_mapping(&self, lid: &str) -> Result<Option<LidPnMappingEntry>> {
        self.get(&named(LID, &[lid])).map(|row| row.read()).transpose()
    }

    async fn get_pn_mapping(&self, phone: &str) -> Result<Option<LidPnMappingEntry>> {
        match self.get(&named(NUMBER, &[phone])) {
            Some(row) => self.get_lid_mapping(&String::from_utf8_lossy(&row.content)).await,
            None => Ok(None),
        }
    }

    async fn put_lid_mapping(&self, entry: &LidPnMappingEntry) -> Result<()> {
        self.update(|get| mapping(get, entry)).await
    }

    async fn put_lid_mappings(&self, entries: &[LidPnMappingEntry]) -> Result<()> {
        let Some((last, rest)) = entries.split_last() else { return Ok(()) };
        // Each is judged by the one before; all go in one commit.
        for entry in rest {
            self.stage_update(|get| mapping(get, entry))?;
        }
        self.put_lid_mapping(last).await
    }

    async fn get_all_lid_mappings(&self) -> Result<Vec<LidPnMappingEntry>> {
        self.below(&format!("{LID}/")).into_iter().map(|(_, row)| row.read()).collect()
    }

    async fn save_base_key(&self, address: &str, message_id: &str, base_key: &[u8]) -> Result<()> {
        let row = Row::raw(base_key.to_vec());
        self.stage(vec![(named(BASE_KEY, &[address, message_id]), Some(row))])
    }

    async fn has_same_base_key(
        &self,
        address: &str,
        message_id: &str,
        current_base_key: &[u8],
    ) -> Result<bool> {
        let row = self.get(&named(BASE_KEY, &[address, message_id]));
        Ok(row.is_some_and(|row| row.content == current_base_key))
    }

    async fn delete_base_key(&self, address: &str, message_id: &str) -> Result<()> {
        self.stage(vec![(named(BASE_KEY, &[address, message_id]), None)])
    }

    async fn update_device_list(&self, record: DeviceListRecord) -> Result<()> {
        self.update_device_lists(vec![record]).await
    }

    async fn update_device_lists(&self, records: Vec<DeviceListRecord>) -> Result<()> {
        let put = |record: &DeviceListRecord| {
            Row::json(record).map(|row| (named(DEVICES, &[&record.user]), Some(row)))
        };
        self.write(records.iter().map(put).collect::<Result<_>>()?).await
    }

    async fn get_devices(&self, user: &str) -> Result<Option<DeviceListRecord>> {
        self.get(&named(DEVICES, &[user])).map(|row| row.read()).transpose()
    }

    async fn delete_devices(&self, user: &str) -> Result<()> {
        self.write(vec![(named(DEVICES, &[user]), None)]).await
    }

    async fn get_group_metadata(&self, group_jid: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.get(&named(GROUP, &[group_jid])).map(|row| row.content.to_vec()))
    }

    async fn put_group_metadata(&self, group_jid: &str, blob: &[u8]) -> Result<()> {
        self.stage(vec![(named(GROUP, &[group_jid]), Some(Row::raw(blob.to_vec())))])
    }

    async fn delete_group_metadata(&self, group_jid: &str) -> Result<()> {
        self.stage(vec![(named(GROUP, &[group_jid]), None)])
    }

    async fn get_tc_token(&self, jid: &str) -> Result<Option<TcTokenEntry>> {
        self.get(&named(TOKEN, &[jid])).map(|row| row.read()).transpose()
    }

    async fn put_tc_token(&self, jid: &str, entry: &TcTokenEntry) -> Result<()> {
        self.write(vec![(named(TOKEN, &[jid]), Some(Row::json(entry)?))]).await
    }

    async fn delete_tc_token(&self, jid: &str) -> Result<()> {
        self.write(vec![(named(TOKEN, &[jid]), None)]).await
    }

    async fn get_all_tc_token_jids(&self) -> Result<Vec<String>> {
        let rows = self.below(&format!("{TOKEN}/")).into_iter();
        Ok(rows.filter_map(|(name, _)| parts(&name).pop()).collect())
    }

    async fn delete_expired_tc_tokens(&self, token_cutoff: i64, sender_cutoff: i64) -> Result<u32> {
        self.sweep(TOKEN, |row| {
            let entry: TcTokenEntry = row.read()?;
            let token = !entry.token.is_empty() && entry.token_timestamp >= token_cutoff;
            let sender = entry.sender_timestamp.is_some_and(|at| at >= sender_cutoff);
            Ok(!token && !sender)
        })
    }

    async fn touch_tc_token_sender_timestamp(&self, jid: &str, timestamp: i64) -> Result<()> {
        let name = named(TOKEN, &[jid]);
        self.update(|get| {
            let before = get(&name).map(|row| row.read::<TcTokenEntry>()).transpose()?;
            let mut entry = before.unwrap_or(TcTokenEntry {
                token: Vec::new(),
                token_timestamp: timestamp,
                sender_timestamp: None,
            });
            entry.sender_timestamp = entry.sender_timestamp.max(Some(timestamp));
            Ok(vec![(name.clone(), Some(Row::json(&entry)?))])
        })
        .await
    }

    async fn store_received_tc_token(
        &self,
        jid: &str,
        token: &[u8],
        token_timestamp: i64,
    ) -> Result<()> {
        let name = named(TOKEN, &[jid]);
        self.update(|get| {
            let before = get(&name).map(|row| row.read::<TcTokenEntry>()).transpose()?;
            let newer = |before: &TcTokenEntry| {
                !before.token.is_empty() && before.token_timestamp > token_timestamp
            };
            if before.as_ref().is_some_and(newer) {
                return Ok(Vec::new());
            }
            let sender_timestamp = before.and_then(|before| before.sender_timestamp);
            let entry = TcTokenEntry { token: token.to_vec(), token_timestamp, sender_timestamp };
            Ok(vec![(name.clone(), Some(Row::json(&entry)?))])
        })
        .await
    }

    async fn store_sent_message(&self, chat: &str, message_id: &str, payload: &[u8]) -> Result<()> {
        let mut changes = Vec::new();
        let all = format!("{SENT}/");
        if self.count(&all) >= SENT_MAX {
            let mut kept = self.below(&all);
            kept.sort_by_key(|(_, row)| row.at);
            changes.extend(kept.into_iter().take(SENT_MAX / 4).map(|(name, _)| (name, None)));
        }
        changes.push((named(SENT, &[chat, message_id]), Some(Row::raw(payload.to_vec()))));
        self.stage(changes)
    }

    async fn take_sent_message(&self, chat: &str, message_id: &str) -> Result<Option<Vec<u8>>> {
        let name = named(SENT, &[chat, message_id]);
        let mut taken = None;
        self.stage_update(|get| {
            taken = get(&name).map(|row| row.content.to_vec());
            Ok(vec![(name.clone(), None)])
        })?;
        Ok(taken)
    }

    async fn delete_expired_sent_messages(&self, cutoff_timestamp: i64) -> Result<u32> {
        self.sweep(SENT, |row| Ok(row.at < cutoff_timestamp))
    }

    // A message that came in is kept before the ratchet that decrypted it is stored, so that one that
    // comes again can be told from one that was handled. It is enough that its row is not durable
    // later than the ratchet, and each row goes with whatever is written next. So it costs no commit:
    // mostly the message is journaled, and its row gone again, before one is made.

    async fn store_pending_inbound(
        &self,
        chat: &str,
        sender: &str,
        id: &str,
        message: &[u8],
    ) -> Result<()> {
        self.store_pending_inbound_batch(&[PendingInboundRow { chat, sender, id, message }]).await
    }

    async fn get_pending_inbound(
        &self,
        chat: &str,
        sender: &str,
        id: &str,
    ) -> Result<Option<Vec<u8>>> {
        let row = self.get(&named(PENDING, &[chat, sender, id]));
        Ok(row.map(|row| row.content.to_vec()))
    }

    async fn delete_pending_inbound(&self, chat: &str, sender: &str, id: &str) -> Result<()> {
        self.delete_pending_inbound_batch(&[PendingInboundKey { chat, sender, id }]).await
    }

    async fn delete_expired_pending_inbound(&self, cutoff_timestamp: i64) -> Result<u32> {
        self.sweep(PENDING, |row| Ok(row.at < cutoff_timestamp))
    }

    async fn store_pending_inbound_batch(&self, rows: &[PendingInboundRow<'_>]) -> Result<()> {
        let put = |row: &PendingInboundRow<'_>| {
            let name = named(PENDING, &[row.chat, row.sender, row.id]);
            (name, Some(Row::raw(row.message.to_vec())))
        };
        self.stage(rows.iter().map(put).collect())
    }

    async fn delete_pending_inbound_batch(&self, keys: &[PendingInboundKey<'_>]) -> Result<()> {
        let name = |key: &PendingInboundKey<'_>| named(PENDING, &[key.chat, key.sender, key.id]);
        self.stage(keys.iter().map(|key| (name(key), None)).collect())
    }
}
