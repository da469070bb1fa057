//! One fixed hash for message ids, bodies and the state: SipHash-2-4 with 128 bits out.
//!
//! The dedupe table keeps a hash instead of a provider's id of any length (SPEC G1). Two ids that
//! met would lose a message, so it is 128 bits of a well-mixed function; its keys are fixed because
//! every node has to come to the same value. Parts are fed with their lengths, so that ("ab", "c")
//! and ("a", "bc") differ.

/// 128 bits.
pub(super) type Digest = [u8; 16];

const KEY: (u64, u64) = (0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908);

/// The digest of several parts.
pub(super) fn of_parts(parts: &[&[u8]]) -> Digest {
    let size = parts.iter().map(|part| part.len() + 8).sum();
    let mut bytes = Vec::with_capacity(size);
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    of(&bytes)
}

/// 64 bits of the digest of one part.
pub(super) fn short(bytes: &[u8]) -> u64 {
    let (low, _) = sip128(bytes);
    low
}

fn of(bytes: &[u8]) -> Digest {
    let (low, high) = sip128(bytes);
    let mut digest = [0; 16];
    digest[..8].copy_from_slice(&low.to_le_bytes());
    digest[8..].copy_from_slice(&high.to_le_bytes());
    digest
}

fn sip128(bytes: &[u8]) -> (u64, u64) {
    let mut v = [
        KEY.0 ^ 0x736f_6d65_7073_6575,
        KEY.1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
        KEY.0 ^ 0x6c79_6765_6e65_7261,
        KEY.1 ^ 0x7465_6462_7974_6573,
    ];
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        absorb(&mut v, u64::from_le_bytes(word));
    }
    let mut word = [0; 8];
    word[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    word[7] = bytes.len() as u8;
    absorb(&mut v, u64::from_le_bytes(word));
    v[2] ^= 0xee;
    (0..4).for_each(|_| round(&mut v));
    let low = v[0] ^ v[1] ^ v[2] ^ v[3];
    v[1] ^= 0xdd;
    (0..4).for_each(|_| round(&mut v));
    (low, v[0] ^ v[1] ^ v[2] ^ v[3])
}

fn absorb(v: &mut [u64; 4], word: u64) {
    v[3] ^= word;
    round(v);
    round(v);
    v[0] ^= word;
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first vectors of the reference implementation (key 00 01 … 0f, message 00 01 …).
    #[test]
    fn agrees_with_the_reference_vectors() {
        let empty = [
            0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55,
            0x02, 0x93,
        ];
        assert_eq!(of(&[]), empty);
        let one = [
            0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22,
            0xfc, 0x45,
        ];
        assert_eq!(of(&[0]), one);
    }

    #[test]
    fn parts_do_not_run_together() {
        assert_ne!(of_parts(&[b"ab", b"c"]), of_parts(&[b"a", b"bc"]));
    }
}
