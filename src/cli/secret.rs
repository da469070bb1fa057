//! The file that holds the cluster secret (SPEC K5, N1): made once, readable by its owner only.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::config::Settings;
use crate::raft::{Secret, SecretError};

use super::failure::Failure;

/// Where the settings say the secret is.
pub(super) fn path(settings: &Settings) -> PathBuf {
    settings.secret_file.clone().unwrap_or_else(|| settings.dir.join("secret"))
}

/// Reads the secret.
pub(super) fn read(path: &Path) -> Result<Secret, Failure> {
    let shown = path.display();
    let secret = Secret::from_file(path).map_err(|error| match error {
        SecretError::Read { source, .. } => Failure::Usage(format!(
            "cannot read the cluster secret {shown}: {source}; copy it from a node of the group, \
             or name it with --secret-file"
        )),
        other => Failure::Usage(format!("{shown}: {other}")),
    })?;
    let mode = std::fs::metadata(path).map_or(0, |data| data.permissions().mode());
    if mode & 0o077 != 0 {
        tracing::warn!("the cluster secret {shown} can be read by others; chmod 600 {shown}");
    }
    Ok(secret)
}

/// Makes a secret where there is none. Two that start at once get the same one.
pub(super) fn make(path: &Path) -> Result<(), Failure> {
    if path.exists() {
        return Ok(());
    }
    let fault = |error: std::io::Error| {
        Failure::Directory(format!("cannot make the cluster secret {}: {error}", path.display()))
    };
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).map_err(fault)?;
    // Complete under another name first: a reader never sees half a secret.
    let draft = path.with_extension(format!("new-{}", std::process::id()));
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&draft)
        .map_err(fault)?;
    let text = format!("{}\n", Secret::random().reveal());
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(fault)?;
    // A link fails where the name exists: the first secret stays.
    let made = std::fs::hard_link(&draft, path);
    std::fs::remove_file(&draft).map_err(fault)?;
    match made {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(fault(error)),
        Ok(()) => File::open(dir).and_then(|dir| dir.sync_all()).map_err(fault),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n1_the_secret_is_made_once_and_for_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/secret");
        assert!(matches!(read(&path), Err(Failure::Usage(text)) if text.contains("--secret-file")));
        make(&path).unwrap();
        let first = read(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        make(&path).unwrap();
        assert_eq!(read(&path).unwrap().reveal(), first.reveal());
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        std::fs::write(&path, "short").unwrap();
        assert!(matches!(read(&path), Err(Failure::Usage(text)) if text.contains("16 to 1024")));
    }
}
