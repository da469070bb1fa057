//! The stored form: what is written is read back, on any node the same, and damage is seen.

use proptest::prelude::*;

use super::kit::*;
use crate::codec::hostile;
use crate::machine::*;

/// A state with a record in every table.
fn sample() -> Kit {
    let mut kit = Kit::with(Limits { attempts_max: 1, ..Limits::default() });
    let (a, b) = (kit.replica("a"), kit.open(SessionKind::Remote, ""));
    let (ticket, _) = kit.take(a, turn("idle"));
    kit.release(ticket, a);
    kit.take(b, queue(QueueKind::Lead, "jobs"));
    kit.run(Command::AcquireLock { prefix: p(), key: "k".into(), ttl_ms: 50, node: 2 });
    let (dead, _) = kit.fresh(a, "1", "demo:c");
    kit.fresh(a, "2", "demo:c");
    kit.release(dead, a);
    let short =
        Op::Put { row: row("u"), value: b"{}".into(), expect: Expect::Any, ttl_ms: Some(9) };
    let sends = vec![send("demo:c", "s1", false, 1), send("demo:c", "s2", false, 1)];
    let more = vec![short, put("demo:c", "state", Expect::Any), send("demo:c", "s3", true, 1)];
    kit.commit(Authority::Nobody, sends.into_iter().chain(more).collect());
    let (id, body) = ("t".to_owned(), b"job".to_vec());
    kit.run(Command::PutTask { prefix: p(), id: id.clone(), due_ms: 5, body });
    kit.run(Command::ClaimTask { prefix: p(), id, due_ms: 5, session: b });
    let key = IdempotencyKey { prefix: p(), session: Some(b), key: "key".into() };
    let command = Box::new(Command::Noop);
    kit.run(Command::Keyed { key, fingerprint: [7; 16], command });
    kit
}

#[test]
fn the_stored_form_of_version_1_does_not_change() {
    let bytes = sample().bytes();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/machine/tests/state_v1.bin");
    if std::env::var_os("BOTMESH_BLESS").is_some() {
        std::fs::write(path, &bytes).unwrap();
    }
    let golden = std::fs::read(path).unwrap();
    let tags: std::collections::BTreeSet<u8> =
        sample().machine.freeze().records().map(|record| record.0[0]).collect();
    assert_eq!(tags.into_iter().collect::<Vec<u8>>(), (1..=16).collect::<Vec<u8>>());
    assert!(bytes == golden, "a new form needs a new version, and code that reads this one");
    let read = Machine::read(&mut golden.as_slice()).unwrap();
    read.check_invariants();
    assert_eq!(super::kit::bytes(&read), golden);
}

/// The tables that came later: their records follow those of the first form, which a state without
/// them still has byte for byte. An older program refuses them by their tags.
#[test]
fn the_stored_form_of_processes_does_not_change() {
    let mut kit = Kit::new();
    let open = Command::OpenSession {
        prefix: p(),
        kind: SessionKind::Replica,
        replica: "a".into(),
        node: 1,
        lease_ms: 1_000,
    };
    let process = crate::types::ProcessToken(7);
    kit.run(Command::ForProcess { process, command: open.clone().into() });
    kit.run(Command::DeclareDead { process: crate::types::ProcessToken(8) });
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let records = kit.machine.freeze();
    let later = records.records().filter(|record| record.0[0] > 16);
    let later: Vec<String> = later.map(|(key, value)| hex(&key) + " " + &hex(&value)).collect();
    assert_eq!(later, ["1101 07", "1200 08"]);

    let commands = [
        open.clone(),
        Command::ForProcess { process, command: open.into() },
        Command::DeclareDead { process },
    ];
    let written: Vec<String> =
        commands.iter().map(|command| hex(&crate::machine::stored::encode(command))).collect();
    assert_eq!(written, ["01017000016101fbe803", "130701017000016101fbe803", "1407"]);
}

#[test]
fn damage_is_seen() {
    let good = sample().bytes();
    let read = |bytes: &[u8]| Machine::read(&mut &bytes[..]);
    for len in 0..good.len() {
        assert!(read(&good[..len]).is_err(), "cut to {len} bytes");
    }
    for place in 0..good.len() {
        let mut bad = good.clone();
        bad[place] ^= 1 << (place % 8);
        assert!(read(&bad).is_err(), "flipped at {place}");
    }
}

#[test]
fn records_that_contradict_each_other_are_refused() {
    let records: Vec<_> = sample().machine.freeze().records().collect();
    let without = |tag: u8| {
        let kept = records.iter().filter(|(key, _)| key[0] != tag).cloned();
        Machine::from_records(kept.collect::<Vec<_>>())
    };
    // Counters, sessions and queues: others refer to them.
    for tag in [1, 5, 6] {
        assert!(matches!(without(tag), Err(LoadError::Corrupt(_))), "without table {tag}");
    }
    let twice = records.iter().chain(&records[1..2]).cloned();
    assert!(Machine::from_records(twice.collect::<Vec<_>>()).is_err());
    let unknown = records.iter().cloned().chain([(vec![200], vec![])]);
    assert!(Machine::from_records(unknown.collect::<Vec<_>>()).is_err());
}

#[test]
fn what_came_and_went_between_two_cuts_leaves_no_record() {
    let mut kit = Kit::new();
    let a = kit.replica("a");
    let (old, _) = kit.take(a, turn("old"));
    assert!(!kit.machine.cut().is_empty());
    assert!(kit.machine.cut().is_empty());
    let (ticket, _) = kit.take(a, turn("c"));
    kit.release(ticket, a);
    kit.release(old, a);
    let cut = kit.machine.cut();
    // Of the tickets (table 7), only the one of the earlier cut is deleted.
    let tickets: Vec<_> = cut.records().filter(|record| record.0[0] == 7).collect();
    assert_eq!(tickets.len(), 1);
    assert_eq!(tickets[0].1, None);
}

#[test]
fn a_frozen_state_stays_as_it_was() {
    let mut kit = sample();
    let frozen = kit.machine.freeze();
    let (hash, before) = (frozen.hash(), kit.bytes());
    kit.commit(Authority::Nobody, vec![put("demo:c", "later", Expect::Any)]);
    let mut bytes = Vec::new();
    frozen.write(&mut bytes).unwrap();
    assert!(bytes == before);
    assert_eq!(frozen.hash(), hash);
    assert_ne!(kit.machine.freeze().hash(), hash);
}

/// Records of the sample, each as key and value behind their lengths.
fn framed(records: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in records.iter().flat_map(|(key, value)| [key, value]) {
        bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn m4_whatever_a_snapshot_holds_is_read_or_refused(
        stream in hostile::bytes(vec![sample().bytes()]),
    ) {
        let _ = Machine::read(&mut &stream[..]);
        // The same with a checksum that is right.
        let mut stream = stream;
        stream.truncate(stream.len().saturating_sub(4));
        let crc = crc32c::crc32c(&stream);
        stream.extend_from_slice(&crc.to_le_bytes());
        if let Ok(read) = Machine::read(&mut &stream[..]) {
            let written = super::kit::bytes(&read);
            let again = Machine::read(&mut &written[..]).unwrap();
            prop_assert_eq!(super::kit::bytes(&again), written);
        }
    }

    #[test]
    fn m4_whatever_one_record_holds_the_state_is_read_or_refused(
        nth: proptest::sample::Index,
        value in hostile::bytes(
            sample().machine.freeze().records().map(|record| record.1).collect()
        ),
        key in proptest::option::of(hostile::bytes(
            sample().machine.freeze().records().map(|record| record.0).collect()
        )),
    ) {
        let mut records: Vec<_> = sample().machine.freeze().records().collect();
        let nth = nth.index(records.len());
        records[nth] = (key.unwrap_or(records[nth].0.clone()), value);
        if let Ok(read) = Machine::from_records(records.clone()) {
            let written = super::kit::bytes(&read);
            prop_assert!(Machine::read(&mut &written[..]).is_ok(), "{:02x?}", framed(&records));
        }
    }
}

#[test]
fn m3_a_snapshots_length_that_lies_claims_no_memory() {
    let sample = sample().bytes();
    hostile::lies_claim_no_memory(&sample, |bytes| {
        let _ = Machine::read(&mut &bytes[..]);
    });
}
