//! Binds listeners, and says who is in the way when a port is taken.
//!
//! "Address already in use" sends people searching. Linux tells the owner: `/proc/net/tcp` has the
//! inode of the listening socket, and some process has a descriptor that points at that inode. Only
//! the owner's own user (or root) may see the descriptors, so the answer is best effort.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::config::HostPort;

use super::failure::Failure;

/// A process that listens on a port.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) pid: u32,
    pub(super) name: String,
}

/// How long a taken port that nobody visible holds is waited for, at start only.
const OWNERLESS_WAIT: Duration = Duration::from_secs(2);

/// Listens there. `what` names the listener in the error.
pub(super) fn bind(what: &str, address: &HostPort) -> Result<TcpListener, Failure> {
    let resolved = (address.host.as_str(), address.port)
        .to_socket_addrs()
        .ok()
        .and_then(|mut found| found.next())
        .ok_or_else(|| {
            Failure::Usage(format!("{what} {address}: the host {:?} has no address", address.host))
        })?;
    let until = Instant::now() + OWNERLESS_WAIT;
    loop {
        match TcpListener::bind(resolved) {
            // A killed process shows no descriptors before the kernel has closed its last socket.
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && owner(resolved.port()).is_none()
                    && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            bound => return bound.map_err(|error| refused(what, address, resolved, &error)),
        }
    }
}

fn refused(what: &str, address: &HostPort, resolved: SocketAddr, error: &io::Error) -> Failure {
    if error.kind() != io::ErrorKind::AddrInUse {
        return Failure::Usage(format!("{what} {address}: cannot listen there: {error}"));
    }
    let by = match owner(resolved.port()) {
        Some(Owner { pid, name }) => format!("by pid {pid} ({name}); stop it"),
        None => "by another process (not visible to this user); stop it".to_owned(),
    };
    Failure::PortTaken(format!(
        "{what} {address}: port {} is in use {by} or choose another address",
        resolved.port()
    ))
}

/// Who listens on this TCP port, if it can be seen.
pub(super) fn owner(port: u16) -> Option<Owner> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
        let table = std::fs::read_to_string(table).ok()?;
        table.lines().skip(1).find_map(|line| listening_inode(line, port))
    })?;
    let wanted = format!("socket:[{inode}]");
    let holds = |process: &Path| -> bool {
        let Ok(descriptors) = std::fs::read_dir(process.join("fd")) else { return false };
        descriptors
            .flatten()
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .any(|target| target.as_os_str() == wanted.as_str())
    };
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        holds(&entry.path()).then(|| Owner {
            pid,
            name: std::fs::read_to_string(entry.path().join("comm"))
                .map_or_else(|_| "?".to_owned(), |name| name.trim().to_owned()),
        })
    })
}

/// The inode in a line of `/proc/net/tcp`, if it is a listening socket on this port.
fn listening_inode(line: &str, port: u16) -> Option<u64> {
    // sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode …
    let mut fields = line.split_ascii_whitespace();
    let local = fields.nth(1)?;
    let state = fields.nth(1)?;
    let (_, hex) = local.rsplit_once(':')?;
    let listens = state == "0A" && u16::from_str_radix(hex, 16).ok()? == port;
    if listens { fields.nth(5)?.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a5_a_taken_port_names_its_owner() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = held.local_addr().unwrap().port();
        let address = HostPort::parse(&format!("127.0.0.1:{port}")).unwrap();
        let Err(Failure::PortTaken(text)) = bind("public listener", &address) else {
            panic!("the port is taken")
        };
        assert!(text.contains(&format!("port {port}")), "{text}");
        assert!(text.contains(&format!("pid {}", std::process::id())), "{text}");
        drop(held);
        assert!(owner(port).is_none());
        bind("public listener", &address).unwrap();
    }

    #[test]
    fn a_host_without_address_is_named() {
        let address = HostPort::parse("no-such-host.invalid:1").unwrap();
        let error = bind("cluster listener", &address).unwrap_err().to_string();
        assert!(error.contains("no-such-host.invalid"), "{error}");
    }
}
