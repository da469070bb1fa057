//! The changes of a large cut, packed, until they are moved to where they belong.
//!
//! A large cut is written twice, so that all of it or none survives a crash. What is staged is only
//! ever read in one go, so it needs no key a record: it is packed into blocks, and the staging costs a
//! few large writes instead of an insertion and a removal for each record.
//!
//! ```text
//!   p · number u32                        a block, numbered in the order they were written
//!     { length u16 · key · length u32 · value } …      an empty value is a removal
//!   s · length u16 · key · part u16       as programs before this one staged; still moved, not written
//! ```

use super::disk::{Change, sled};
use crate::codec::{self, Kind};

/// Bytes of a block. Only one change that is larger by itself makes it longer: no value of the database
/// is much larger than the largest part of a record, which is as large as sled bears.
const BLOCK_BYTES: usize = 24 << 10;
/// What a change weighs beside its key and value.
const LENGTH_BYTES: usize = 2 + 4;

/// What blocks begin with, and what comes behind them.
pub(super) const BLOCKS: [&[u8]; 2] = [b"p", b"q"];
/// The same of what earlier programs staged.
pub(super) const SINGLES: [&[u8]; 2] = [b"s", b"t"];

/// How changes are staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// In so many blocks.
    Blocks(u32),
    /// Each under a key of its own.
    Singles,
}

/// Packs changes into blocks.
#[derive(Debug)]
pub(super) struct Packing {
    block: Vec<u8>,
    /// Changes in it.
    holds: usize,
    number: u32,
}

impl Packing {
    pub(super) fn new() -> Self {
        Self { block: codec::begin(Kind::StateBlock, BLOCK_BYTES), holds: 0, number: 0 }
    }

    /// Takes a change. Where the block has no room for it, the block comes back, with its key.
    pub(super) fn add(&mut self, (key, value): Change) -> Option<(Vec<u8>, Vec<u8>)> {
        let value = value.unwrap_or_default();
        let after = self.block.len() + LENGTH_BYTES + key.len() + value.len();
        let full = (after > BLOCK_BYTES && self.holds > 0).then(|| self.close());
        self.holds += 1;
        // The machine's keys are bounded far below this, and values come in parts (SPEC M3).
        let key_len = u16::try_from(key.len()).expect("a record's key is shorter than 64 KiB");
        let len = u32::try_from(value.len()).expect("a part of a record is shorter than 4 GiB");
        self.block.extend_from_slice(&key_len.to_le_bytes());
        self.block.extend_from_slice(&key);
        self.block.extend_from_slice(&len.to_le_bytes());
        self.block.extend_from_slice(&value);
        full
    }

    /// How many blocks were closed.
    pub(super) fn blocks(&self) -> u32 {
        self.number
    }

    /// The last block.
    pub(super) fn close(&mut self) -> (Vec<u8>, Vec<u8>) {
        let next = codec::begin(Kind::StateBlock, BLOCK_BYTES);
        let block = codec::finish(std::mem::replace(&mut self.block, next));
        let key = block_key(self.number);
        (self.number, self.holds) = (self.number + 1, 0);
        (key, block)
    }
}

/// The changes in a block.
fn unpack(block: &[u8]) -> Result<Vec<Change>, String> {
    let mut rest = codec::open_raw(Kind::StateBlock, block).map_err(|error| error.to_string())?;
    let mut changes = Vec::new();
    while !rest.is_empty() {
        let (change, left) = one(rest).ok_or("a block of staged records is cut off")?;
        changes.push(change);
        rest = left;
    }
    Ok(changes)
}

fn one(bytes: &[u8]) -> Option<(Change, &[u8])> {
    let (len, bytes) = bytes.split_first_chunk::<2>()?;
    let (key, bytes) = bytes.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
    let (len, bytes) = bytes.split_first_chunk::<4>()?;
    let (value, bytes) = bytes.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    let value = (!value.is_empty()).then(|| value.to_vec());
    Some(((key.to_vec(), value), bytes))
}

/// Everything staged in this form; what is there in the other one is left from a cut that never
/// counted.
pub(super) fn staged(
    db: &::sled::Db,
    form: Form,
) -> Box<dyn Iterator<Item = Result<Change, String>>> {
    let all = |of: [&'static [u8]; 2]| db.range(of[0]..of[1]).map(|stored| sled(|| stored));
    match form {
        Form::Singles => Box::new(all(SINGLES).map(|stored| {
            let (key, value) = stored?;
            Ok((key[1..].to_vec(), (!value.is_empty()).then(|| value.to_vec())))
        })),
        Form::Blocks(count) => {
            let db = db.clone();
            let blocks = (0..count).map(move |number| {
                let block = sled(|| db.get(block_key(number)))?;
                unpack(&block.ok_or_else(|| format!("block {number} of a cut is missing"))?)
            });
            Box::new(blocks.flat_map(|block| match block {
                Ok(changes) => changes.into_iter().map(Ok).collect(),
                Err(why) => vec![Err(why)],
            }))
        }
    }
}

fn block_key(number: u32) -> Vec<u8> {
    [BLOCKS[0], &number.to_be_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packed(changes: &[Change]) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut packing = Packing::new();
        let mut blocks: Vec<_> = changes.iter().filter_map(|c| packing.add(c.clone())).collect();
        blocks.push(packing.close());
        blocks
    }

    /// Format 1 for ever: a crash in the middle of a cut leaves it to the next program.
    #[test]
    fn golden_bytes_of_a_block() {
        let changes = [(b"key".to_vec(), Some(b"value".to_vec())), (b"gone".to_vec(), None)];
        let [(key, block)] = &packed(&changes)[..] else { panic!("one block") };
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(key), "7000000000");
        assert_eq!(hex(&block[8..]), "03006b65790500000076616c75650400676f6e6500000000");
    }

    proptest! {
        #[test]
        fn blocks_give_back_what_was_packed(
            changes in proptest::collection::vec(
                (any::<Vec<u8>>(), proptest::option::of(proptest::collection::vec(any::<u8>(), 1..9000))),
                0..20,
            ),
        ) {
            let blocks = packed(&changes);
            prop_assert!(blocks.is_sorted());
            let found: Result<Vec<Vec<Change>>, String> =
                blocks.iter().map(|(_, block)| unpack(block)).collect();
            prop_assert_eq!(found.unwrap().concat(), changes);
            prop_assert!(blocks.iter().all(|(_, block)| block.len() <= BLOCK_BYTES));
        }

        #[test]
        fn a_damaged_block_is_refused(bytes: Vec<u8>, sealed: bool) {
            // Whatever it holds, it decodes to the same bytes or is refused; it never panics.
            let block = if sealed { codec::seal_raw(Kind::StateBlock, &bytes) } else { bytes };
            let Ok(changes) = unpack(&block) else { return Ok(()) };
            let mut packing = Packing::new();
            prop_assert!(changes.into_iter().all(|change| packing.add(change).is_none()));
            prop_assert_eq!(packing.close().1, block);
        }
    }
}
