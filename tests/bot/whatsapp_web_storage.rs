//! The storage of WhatsApp's client over the replicated store: each of its five traits, what another
//! replica finds of it, and that a deposed one writes nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use botmesh::clock::ManualClock;
use botmesh::provider::DeliverError;
use botmesh::provider::whatsapp_web::{Storage, WhatsAppWeb};
use botmesh::testing::MemoryHub;
use bytes::Bytes;
use whatsapp_rust::traits::{
    AppStateSyncKey, AppSyncStore, DeviceInfo, DeviceListRecord, DeviceStore, LidPnMappingEntry,
    MsgSecretEntry, MsgSecretStore, PendingInboundKey, PendingInboundRow, ProtocolStore,
    SignalStore, TcTokenEntry,
};
use whatsapp_rust::wacore::appstate::hash::HashState;
use whatsapp_rust::wacore::appstate::processor::AppStateMutationMAC;
use whatsapp_rust::wacore::store::Device;

use super::support::PAST_LEASE;
use super::whatsapp_web::{Lingering, Replica, echo, pass, rows, start};

/// A replica that leads and leaves the connection to the test.
async fn leads(hub: &MemoryHub) -> (Replica, Storage) {
    let provider = Lingering::new(WhatsAppWeb::new("wa"), false);
    let replica = start(hub, provider.clone(), echo).await;
    let storage = Storage::open(provider.link().await, "wa").await.unwrap();
    (replica, storage)
}

/// Its replica dies; another leads.
async fn taken_over(hub: &MemoryHub, clock: &ManualClock, dies: &Replica) -> (Replica, Storage) {
    dies.coordinator.crash();
    pass(clock, PAST_LEASE).await;
    leads(hub).await
}

fn hub() -> (ManualClock, MemoryHub) {
    let clock = ManualClock::new();
    (clock.clone(), MemoryHub::with_clock(clock))
}

const ANN: &str = "15550001@s.whatsapp.net.0";

#[tokio::test]
async fn d5_signal_keys_are_found_by_the_next_replica() {
    let (clock, hub) = hub();
    let (a, one) = leads(&hub).await;
    assert!(one.is_empty());
    one.put_identity(ANN, [1; 32]).await.unwrap();
    let two: Arc<str> = "100@lid.0".into();
    one.put_identities_batch(&[(two.clone(), [2; 32])]).await.unwrap();
    one.put_session(ANN, b"session").await.unwrap();
    one.put_sessions_batch(&[(two.clone(), Bytes::from_static(b"batch"))]).await.unwrap();
    one.put_session("gone@s.whatsapp.net.0", b"x").await.unwrap();
    one.delete_session("gone@s.whatsapp.net.0").await.unwrap();
    one.put_identity("gone@s.whatsapp.net.0", [3; 32]).await.unwrap();
    one.delete_identity("gone@s.whatsapp.net.0").await.unwrap();
    one.store_prekey(9, b"nine", false).await.unwrap();
    let batch: Vec<(u32, Bytes)> = (10..700).map(|id| (id, Bytes::from_static(b"key"))).collect();
    one.store_prekeys_batch(&batch, false).await.unwrap();
    one.mark_prekeys_uploaded(&[9, 10]).await.unwrap();
    one.remove_prekey(10).await.unwrap();
    one.mark_prekeys_uploaded(&[10]).await.unwrap();
    one.store_signed_prekey(1, b"signed").await.unwrap();
    one.store_signed_prekey(2, b"second").await.unwrap();
    one.store_signed_prekey(3, b"third").await.unwrap();
    one.remove_signed_prekey(3).await.unwrap();
    one.put_sender_key("g@g.us::a", b"sender").await.unwrap();
    one.put_sender_keys_batch(&[("g@g.us::b".into(), Bytes::from_static(b"b"))]).await.unwrap();
    one.put_sender_key("g@g.us::c", b"c").await.unwrap();
    one.delete_sender_key("g@g.us::c").await.unwrap();

    let (_b, next) = taken_over(&hub, &clock, &a).await;
    for storage in [&one, &next] {
        assert_eq!(storage.load_identity(ANN).await.unwrap(), Some([1; 32]));
        assert_eq!(storage.load_identity("100@lid.0").await.unwrap(), Some([2; 32]));
        assert_eq!(storage.load_identity("gone@s.whatsapp.net.0").await.unwrap(), None);
        assert_eq!(storage.get_session(ANN).await.unwrap().unwrap(), &b"session"[..]);
        assert_eq!(storage.get_session("100@lid.0").await.unwrap().unwrap(), &b"batch"[..]);
        assert!(storage.has_session(ANN).await.unwrap());
        assert!(!storage.has_session("gone@s.whatsapp.net.0").await.unwrap());
        assert!(storage.has_signal_state_for_user("15550001").await.unwrap());
        assert!(!storage.has_signal_state_for_user("1555000").await.unwrap());
        assert!(!storage.has_signal_state_for_user("gone").await.unwrap());
        assert_eq!(storage.load_prekey(9).await.unwrap().unwrap(), &b"nine"[..]);
        assert_eq!(storage.load_prekey(10).await.unwrap(), None, "it is not brought back");
        let some = storage.load_prekeys_batch(&[9, 10, 11]).await.unwrap();
        assert_eq!(some.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [9, 11]);
        assert_eq!(storage.get_max_prekey_id().await.unwrap(), 699);
        assert_eq!(storage.load_signed_prekey(1).await.unwrap().unwrap(), b"signed");
        let signed = storage.load_all_signed_prekeys().await.unwrap();
        assert_eq!(signed, [(1, b"signed".to_vec()), (2, b"second".to_vec())]);
        assert_eq!(storage.get_sender_key("g@g.us::a").await.unwrap().unwrap(), b"sender");
        assert_eq!(storage.get_sender_key("g@g.us::b").await.unwrap().unwrap(), b"b");
        assert_eq!(storage.get_sender_key("g@g.us::c").await.unwrap(), None);
    }
}

#[tokio::test]
async fn d5_the_account_is_found_by_the_next_replica() {
    let (clock, hub) = hub();
    let (a, one) = leads(&hub).await;
    assert!(!one.exists().await.unwrap());
    assert!(one.load().await.unwrap().is_none());
    one.create().await.unwrap();
    let made = one.load().await.unwrap().unwrap();
    one.create().await.unwrap();
    let mut device = one.load().await.unwrap().unwrap();
    let identity = |device: &Device| device.identity_key.public_key.public_key_bytes().to_vec();
    assert_eq!(identity(&device), identity(&made), "it is made once");
    device.pn = Some("15550000:7@s.whatsapp.net".parse().unwrap());
    device.push_name = "Bot".to_owned();
    one.save(&device).await.unwrap();
    one.save(&Device::new()).await.unwrap_err();
    let key = AppStateSyncKey { key_data: vec![1], fingerprint: vec![2], timestamp: 3 };
    one.set_sync_key(b"first", key.clone()).await.unwrap();
    one.set_sync_key(b"second", key).await.unwrap();
    let state = HashState { version: 5, ..HashState::default() };
    one.set_version("regular", state).await.unwrap();
    let mac =
        |index: u8| AppStateMutationMAC { index_mac: vec![index; 32], value_mac: vec![index] };
    one.put_mutation_macs("regular", 5, &[mac(1), mac(2), mac(3)]).await.unwrap();
    one.put_mutation_macs("critical", 5, &[mac(1)]).await.unwrap();
    one.delete_mutation_macs("regular", &[vec![3; 32]]).await.unwrap();
    one.put_mutation_macs("gone", 1, &[mac(9)]).await.unwrap();
    one.clear_mutation_macs("gone").await.unwrap();
    let secret = |id: &str, byte: u8, expires_at: i64, message_ts: i64| MsgSecretEntry {
        chat: "c@s.whatsapp.net".into(),
        sender: "s@s.whatsapp.net".into(),
        msg_id: id.into(),
        secret: [byte; 32],
        expires_at,
        message_ts,
    };
    one.put_msg_secrets(vec![secret("1", 1, 100, 7), secret("2", 2, 0, 0)]).await.unwrap();
    one.put_msg_secrets(vec![secret("1", 3, 50, 0), secret("1", 4, 60, 0)]).await.unwrap();
    one.put_msg_secret("c@s.whatsapp.net", "s@s.whatsapp.net", "3", &[5; 32]).await.unwrap();
    assert_eq!(one.delete_expired_msg_secrets(99).await.unwrap(), 0, "the later end counts");

    // What is staged goes with what is written.
    one.set_version("last", HashState::default()).await.unwrap();
    let (_b, next) = taken_over(&hub, &clock, &a).await;
    for storage in [&one, &next] {
        let found = storage.load().await.unwrap().unwrap();
        assert_eq!((identity(&found), &*found.push_name), (identity(&device), "Bot"));
        assert_eq!(found.pn, device.pn);
        assert!(found.device_props == device.device_props);
        assert!(storage.exists().await.unwrap());
        assert_eq!(storage.get_sync_key(b"first").await.unwrap().unwrap().fingerprint, [2]);
        assert!(storage.get_sync_key(b"third").await.unwrap().is_none());
        assert_eq!(storage.get_latest_sync_key_id().await.unwrap().unwrap(), b"second");
        assert_eq!(storage.get_version("regular").await.unwrap().version, 5);
        assert_eq!(storage.get_version("none").await.unwrap().version, 0);
        let mac = storage.get_mutation_mac("regular", &[1; 32]).await.unwrap();
        assert_eq!(mac, Some(vec![1]));
        let found =
            storage.get_mutation_macs("regular", &[[1; 32], [2; 32], [3; 32]]).await.unwrap();
        assert_eq!(found, HashMap::from([([1; 32], vec![1]), ([2; 32], vec![2])]));
        assert!(storage.get_mutation_mac("gone", &[9; 32]).await.unwrap().is_none());
        assert!(storage.get_mutation_mac("critical", &[1; 32]).await.unwrap().is_some());
        let secret = async |id| {
            let found = storage.get_msg_secret_with_ts("c@s.whatsapp.net", "s@s.whatsapp.net", id);
            found.await.unwrap()
        };
        assert_eq!(secret("1").await, Some((vec![4; 32], 7)));
        assert_eq!(secret("3").await, Some((vec![5; 32], 0)));
        let plain = storage.get_msg_secret("c@s.whatsapp.net", "s@s.whatsapp.net", "2").await;
        assert_eq!(plain.unwrap(), Some(vec![2; 32]));
    }
    assert_eq!(next.delete_expired_msg_secrets(100).await.unwrap(), 1);
}

#[tokio::test]
async fn d5_what_is_known_of_others_is_found_by_the_next_replica() {
    let (clock, hub) = hub();
    let (a, one) = leads(&hub).await;
    one.set_sender_key_status("g@g.us", &[("1:0@lid", true), ("2:0@lid", true)]).await.unwrap();
    one.set_sender_key_status("g@g.us", &[("2:0@lid", false), ("3:0@lid", true)]).await.unwrap();
    one.set_sender_key_status("h@g.us", &[("3:0@lid", true)]).await.unwrap();
    one.delete_sender_key_device_rows(&["3:0@lid"]).await.unwrap();
    one.set_sender_key_status("i@g.us", &[("4:0@lid", true)]).await.unwrap();
    one.clear_sender_key_devices("i@g.us").await.unwrap();
    let mapping = |lid: &str, number: &str| LidPnMappingEntry {
        lid: lid.to_owned(),
        phone_number: number.to_owned(),
        created_at: 1,
        updated_at: 2,
        learning_source: "usync".to_owned(),
    };
    one.put_lid_mapping(&mapping("100", "1555")).await.unwrap();
    // The number moves to another id, and the id to another number.
    one.put_lid_mappings(&[mapping("200", "1555"), mapping("100", "1666")]).await.unwrap();
    one.save_base_key(ANN, "m1", b"base").await.unwrap();
    one.save_base_key(ANN, "m2", b"base").await.unwrap();
    one.delete_base_key(ANN, "m2").await.unwrap();
    let record = |user: &str| DeviceListRecord {
        user: user.to_owned(),
        devices: vec![DeviceInfo::new(0, None), DeviceInfo::new(5, Some(2)).with_hosting(true)],
        timestamp: 9,
        phash: Some("2:x".to_owned()),
        raw_id: Some(4),
    };
    one.update_device_list(record("1555")).await.unwrap();
    one.update_device_lists(vec![record("1666"), record("1777")]).await.unwrap();
    one.delete_devices("1777").await.unwrap();
    one.put_group_metadata("g@g.us", b"blob").await.unwrap();
    one.put_group_metadata("h@g.us", b"blob").await.unwrap();
    one.delete_group_metadata("h@g.us").await.unwrap();
    let token =
        |at: i64| TcTokenEntry { token: vec![1], token_timestamp: at, sender_timestamp: None };
    one.put_tc_token("a@lid", &token(10)).await.unwrap();
    one.touch_tc_token_sender_timestamp("a@lid", 30).await.unwrap();
    one.touch_tc_token_sender_timestamp("a@lid", 20).await.unwrap();
    one.store_received_tc_token("a@lid", b"older", 5).await.unwrap();
    one.store_received_tc_token("b@lid", b"new", 5).await.unwrap();
    one.touch_tc_token_sender_timestamp("c@lid", 8).await.unwrap();
    one.store_received_tc_token("c@lid", b"first", 1).await.unwrap();
    one.put_tc_token("d@lid", &token(10)).await.unwrap();
    one.delete_tc_token("d@lid").await.unwrap();

    let (_b, next) = taken_over(&hub, &clock, &a).await;
    for storage in [&one, &next] {
        let devices = storage.get_sender_key_devices("g@g.us").await.unwrap();
        assert_eq!(devices, [("1:0@lid".to_owned(), true), ("2:0@lid".to_owned(), false)]);
        assert_eq!(storage.get_sender_key_devices("h@g.us").await.unwrap(), []);
        assert_eq!(storage.get_sender_key_devices("i@g.us").await.unwrap(), []);
        let of = |found: Option<LidPnMappingEntry>| found.map(|m| (m.lid, m.phone_number));
        let pair = |lid: &str, number: &str| Some((lid.to_owned(), number.to_owned()));
        assert_eq!(of(storage.get_pn_mapping("1555").await.unwrap()), pair("200", "1555"));
        assert_eq!(of(storage.get_pn_mapping("1666").await.unwrap()), pair("100", "1666"));
        assert_eq!(of(storage.get_lid_mapping("100").await.unwrap()), pair("100", "1666"));
        assert_eq!(of(storage.get_lid_mapping("300").await.unwrap()), None);
        assert_eq!(storage.get_all_lid_mappings().await.unwrap().len(), 2);
        assert!(storage.has_same_base_key(ANN, "m1", b"base").await.unwrap());
        assert!(!storage.has_same_base_key(ANN, "m1", b"other").await.unwrap());
        assert!(!storage.has_same_base_key(ANN, "m2", b"base").await.unwrap());
        let found = storage.get_devices("1666").await.unwrap().unwrap();
        assert_eq!(
            (found.devices.len(), found.devices[1].is_hosted, found.raw_id),
            (2, true, Some(4))
        );
        assert!(storage.get_devices("1777").await.unwrap().is_none());
        assert_eq!(storage.get_group_metadata("g@g.us").await.unwrap().unwrap(), b"blob");
        assert!(storage.get_group_metadata("h@g.us").await.unwrap().is_none());
        let token = async |jid| {
            let found: TcTokenEntry = storage.get_tc_token(jid).await.unwrap().unwrap();
            (found.token, found.token_timestamp, found.sender_timestamp)
        };
        assert_eq!(token("a@lid").await, (vec![1], 10, Some(30)));
        assert_eq!(token("b@lid").await, (b"new".to_vec(), 5, None));
        assert_eq!(token("c@lid").await, (b"first".to_vec(), 1, Some(8)));
        let mut all = storage.get_all_tc_token_jids().await.unwrap();
        all.sort();
        assert_eq!(all, ["a@lid", "b@lid", "c@lid"]);
    }
    assert_eq!(
        next.delete_expired_tc_tokens(6, 9).await.unwrap(),
        2,
        "both of a row have to be past"
    );
    assert_eq!(next.get_all_tc_token_jids().await.unwrap(), ["a@lid"]);
    next.clear_all_sender_key_devices().await.unwrap();
    assert_eq!(next.get_sender_key_devices("g@g.us").await.unwrap(), []);
    next.delete_devices("1555").await.unwrap();
    assert!(next.get_devices("1555").await.unwrap().is_none());
}

/// What need not be durable by itself is durable with what is written next.
#[tokio::test]
async fn d5_messages_on_their_way_go_with_the_next_write() {
    let (clock, hub) = hub();
    let (a, one) = leads(&hub).await;
    one.store_pending_inbound("c", "s", "1", b"first").await.unwrap();
    let rows_of = [PendingInboundRow { chat: "c", sender: "s", id: "2", message: b"second" }];
    one.store_pending_inbound_batch(&rows_of).await.unwrap();
    one.store_pending_inbound("c", "s", "3", b"third").await.unwrap();
    one.delete_pending_inbound("c", "s", "3").await.unwrap();
    one.store_sent_message("c", "m1", b"sent").await.unwrap();
    one.store_sent_message("c", "m2", b"sent").await.unwrap();
    let long = "x".repeat(2_000);
    one.store_sent_message("c", &long, b"long").await.unwrap();
    assert_eq!(one.take_sent_message("c", "m2").await.unwrap().unwrap(), b"sent");
    assert_eq!(one.take_sent_message("c", "m2").await.unwrap(), None);
    assert_eq!(rows(&hub).await.len(), 0, "nothing of it went alone");
    one.put_session(ANN, b"session").await.unwrap();
    let stored = rows(&hub).await;
    assert_eq!(stored.len(), 5, "{:?}", stored.iter().map(|(key, _)| key).collect::<Vec<_>>());

    let (_b, next) = taken_over(&hub, &clock, &a).await;
    assert_eq!(next.get_pending_inbound("c", "s", "1").await.unwrap().unwrap(), b"first");
    assert_eq!(next.get_pending_inbound("c", "s", "2").await.unwrap().unwrap(), b"second");
    assert_eq!(next.get_pending_inbound("c", "s", "3").await.unwrap(), None);
    assert_eq!(next.take_sent_message("c", &long).await.unwrap().unwrap(), b"long");
    assert_eq!(next.delete_expired_sent_messages(0).await.unwrap(), 0);
    assert_eq!(next.delete_expired_sent_messages(i64::MAX).await.unwrap(), 1);
    let keys = [PendingInboundKey { chat: "c", sender: "s", id: "1" }];
    next.delete_pending_inbound_batch(&keys).await.unwrap();
    assert_eq!(next.delete_expired_pending_inbound(0).await.unwrap(), 0);
    assert_eq!(next.delete_expired_pending_inbound(i64::MAX).await.unwrap(), 1);
    next.put_session(ANN, b"later").await.unwrap();
    assert_eq!(rows(&hub).await.len(), 1, "only the session is left");
}

#[tokio::test]
async fn d6_a_deposed_replica_writes_nothing_and_reads_nothing_anew() {
    let (clock, hub) = hub();
    let provider = Lingering::new(WhatsAppWeb::new("wa"), false);
    let a = start(&hub, provider.clone(), echo).await;
    let link = provider.link().await;
    let one = Storage::open(link.clone(), "wa").await.unwrap();
    one.put_session(ANN, b"session").await.unwrap();
    one.store_sent_message("c", "m1", b"staged before").await.unwrap();
    let (_b, next) = taken_over(&hub, &clock, &a).await;
    next.put_session(ANN, b"newer").await.unwrap();
    let before = rows(&hub).await;
    let refused = one.put_session(ANN, b"older").await.unwrap_err();
    let said = std::error::Error::source(&refused).map(|why| why.to_string());
    let said = said.unwrap_or_default();
    assert!(said.contains("no longer leads"), "{refused:?}");
    // From then on at once, whatever it is.
    one.delete_session(ANN).await.unwrap_err();
    one.store_pending_inbound("c", "s", "1", b"m").await.unwrap_err();
    one.create().await.unwrap_err();
    one.clear_all_sender_key_devices().await.unwrap_err();
    let late = link.change("wa", vec![("device".to_owned(), None)]).await;
    assert!(matches!(late, Err(DeliverError::Deposed)), "{late:?}");
    assert!(matches!(Storage::open(link, "wa").await, Err(DeliverError::Deposed)));
    assert!(before == rows(&hub).await);
    assert_eq!(next.get_session(ANN).await.unwrap().unwrap(), &b"newer"[..]);
}

#[tokio::test]
async fn m3_a_row_that_is_too_large_is_refused_and_keeps_nothing_else_back() {
    let (_, hub) = hub();
    let (_a, one) = leads(&hub).await;
    let huge = vec![0; 1024 * 1024];
    one.put_session(ANN, &huge).await.unwrap_err();
    one.store_pending_inbound("c", "s", "1", &huge).await.unwrap_err();
    one.put_session(ANN, b"session").await.unwrap();
    let large = vec![7; 700 * 1024];
    let many: Vec<(Arc<str>, Bytes)> =
        (0..5).map(|n| (format!("{n}@lid.0").into(), Bytes::from(large.clone()))).collect();
    one.put_sessions_batch(&many).await.unwrap();
    let stored: BTreeMap<String, usize> =
        rows(&hub).await.into_iter().map(|(key, value)| (key, value.len())).collect();
    assert_eq!(stored.len(), 6);
    assert!(stored.values().all(|bytes| *bytes <= 1024 * 1024));
    assert_eq!(one.len(), 6);
}
