//! Who sent a request.
//!
//! A webhook's address is no secret, so what comes in is checked against one before anything of it is
//! parsed: over the raw bytes, for what was decoded and encoded again is other bytes (case w6), and in
//! a time that does not depend on where it differs (SPEC M1).

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// A secret shared with the other side. Never shown.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// A secret as it was agreed.
    pub fn new(secret: impl AsRef<[u8]>) -> Self {
        Self(secret.as_ref().into())
    }

    /// HMAC-SHA256 of the body, in hexadecimal digits.
    pub fn sign(&self, body: &[u8]) -> String {
        let mac = self.mac(body).finalize().into_bytes();
        mac.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Whether this is the HMAC-SHA256 of the body; `sha256=` may stand before it.
    pub fn signed(&self, body: &[u8], signature: &str) -> bool {
        let digits = signature.strip_prefix("sha256=").unwrap_or(signature);
        match unhex(digits) {
            Some(given) => self.mac(body).verify_slice(&given).is_ok(),
            None => false,
        }
    }

    /// Whether this is the secret itself. What differs in length is told apart in the same time.
    pub fn is(&self, token: &str) -> bool {
        let (own, given) = (Sha256::digest(&self.0), Sha256::digest(token));
        own.ct_eq(&given).into()
    }

    /// The secret, for the other side to be told.
    #[cfg(feature = "telegram")]
    pub(super) fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.0)
    }

    fn mac(&self, body: &[u8]) -> Hmac<Sha256> {
        let keyed = Hmac::<Sha256>::new_from_slice(&self.0);
        keyed.expect("HMAC takes a key of any length").chain_update(body)
    }
}

fn unhex(digits: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m1_only_the_signature_of_these_very_bytes_is_taken() {
        let secret = Secret::new("app secret");
        let body = "{\"text\":\"Grüße \\u00e9 🦀\r\n\"}".as_bytes();
        let signature = format!("sha256={}", secret.sign(body));
        assert!(secret.signed(body, &signature));
        assert!(secret.signed(body, &signature.replace("sha256=", "").to_uppercase()));
        for bit in 0..body.len() * 8 {
            let mut other = body.to_vec();
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!secret.signed(&other, &signature), "bit {bit}");
        }
        let long = format!("{signature}00");
        for wrong in ["", "sha256=", "sha256=zz", "sha1=00", &signature[..70], &long] {
            assert!(!secret.signed(body, wrong), "{wrong:?}");
        }
        assert!(!Secret::new("another").signed(body, &signature));
    }

    #[test]
    fn m1_the_known_answer_of_rfc_4231() {
        let signature = Secret::new("Jefe").sign(b"what do ya want for nothing?");
        assert_eq!(signature, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn m1_only_the_whole_token_is_taken() {
        let secret = Secret::new("token");
        assert!(secret.is("token"));
        for wrong in ["", "toke", "tokem", "token "] {
            assert!(!secret.is(wrong), "{wrong:?}");
        }
        assert!(!format!("{secret:?}").contains("token"));
    }
}
