//! The cluster secret (SPEC K5, N3): who knows it may speak to the cluster listener.
//!
//! Compared in constant time, so that the time of a refusal tells nothing about the secret. It
//! never appears in `Debug` output, in errors or in logs.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use subtle::ConstantTimeEq;

/// The shortest secret that is taken, in bytes.
const BYTES_MIN: usize = 16;
/// The longest, in bytes.
const BYTES_MAX: usize = 1024;

/// Why a secret was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// The file could not be read.
    #[error("reading the cluster secret from {} failed: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Too short or too long.
    #[error("the cluster secret has {bytes} bytes; use {BYTES_MIN} to {BYTES_MAX}")]
    Length {
        /// Its length, in bytes.
        bytes: usize,
    },
    /// It could not be carried in a header.
    #[error(
        "the cluster secret holds a blank, control or non-ASCII character; use printable ASCII"
    )]
    Character,
}

/// The secret all nodes of a group share.
#[derive(Clone)]
pub struct Secret(Arc<str>);

impl Secret {
    /// Checks and takes a secret.
    ///
    /// ```
    /// use botmesh::raft::Secret;
    /// let secret = Secret::new("0123456789abcdef").unwrap();
    /// assert!(secret.admits(Some(b"Bearer 0123456789abcdef")));
    /// assert!(!secret.admits(Some(b"Bearer 0123456789abcdeX")));
    /// assert!(!secret.admits(None));
    /// ```
    pub fn new(text: impl AsRef<str>) -> Result<Self, SecretError> {
        let text = text.as_ref();
        if !(BYTES_MIN..=BYTES_MAX).contains(&text.len()) {
            return Err(SecretError::Length { bytes: text.len() });
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(SecretError::Character);
        }
        Ok(Self(text.into()))
    }

    /// Reads a secret from a file; white space around it does not count.
    pub fn from_file(path: &Path) -> Result<Self, SecretError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| SecretError::Read { path: path.to_owned(), source })?;
        Self::new(text.trim())
    }

    /// A fresh random secret.
    pub fn random() -> Self {
        let text = format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple());
        Self(text.into())
    }

    /// The secret itself, to be written to its file.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// What a request carries in `Authorization`.
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }

    /// Whether this `Authorization` header opens the door.
    pub fn admits(&self, authorization: Option<&[u8]>) -> bool {
        let Some(given) = authorization.and_then(|header| {
            let (scheme, token) = header.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
        }) else {
            return false;
        };
        // Unequal lengths compare unequal at once; the length of the secret is not secret.
        bool::from(self.0.as_bytes().ct_eq(given))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k5_only_the_whole_secret_opens() {
        let secret = Secret::random();
        assert!(secret.admits(Some(secret.bearer().as_bytes())));
        let lower = secret.bearer().replace("Bearer", "bearer");
        assert!(secret.admits(Some(lower.as_bytes())));
        let whole = secret.bearer();
        for cut in 0..whole.len() {
            assert!(!secret.admits(Some(&whole.as_bytes()[..cut])));
        }
        assert!(!secret.admits(Some(format!("{whole}x").as_bytes())));
        assert!(!secret.admits(Some(secret.reveal().as_bytes())));
        assert!(!secret.admits(None));
    }

    #[test]
    fn k5_a_weak_secret_is_refused() {
        assert!(matches!(Secret::new("short"), Err(SecretError::Length { bytes: 5 })));
        assert!(matches!(Secret::new("sixteen bytes or more"), Err(SecretError::Character)));
        assert!(!format!("{:?}", Secret::random()).contains(Secret::random().reveal()));
    }
}
