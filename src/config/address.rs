//! `host:port` as operators write it.

use std::fmt;
use std::net::IpAddr;

/// A host, by name or by number, and a port. Resolved where it is used, at each use (SPEC K4).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort {
    /// A DNS name or an address; an IPv6 address without its brackets.
    pub host: String,
    /// The port; 0 asks the system for a free one where something listens.
    pub port: u16,
}

impl HostPort {
    /// Reads `host:port`, `1.2.3.4:port` or `[::1]:port`.
    ///
    /// ```
    /// use botmesh::config::HostPort;
    /// assert_eq!(HostPort::parse("[::1]:9101").unwrap().host, "::1");
    /// assert!(HostPort::parse("9101").is_err());
    /// ```
    pub fn parse(text: &str) -> Result<Self, String> {
        let fault = || "write HOST:PORT, for instance 127.0.0.1:9101".to_owned();
        let (host, port) = text.rsplit_once(':').ok_or_else(fault)?;
        let port = port.parse().map_err(|_| "the port is a number from 0 to 65535".to_owned())?;
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(Some(inner)) if inner.parse::<std::net::Ipv6Addr>().is_ok() => inner,
            Some(_) => return Err(fault()),
            None if host.contains(':') => {
                return Err("put an IPv6 address in brackets, [::1]:9101".to_owned());
            }
            None => host,
        };
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || !host.chars().all(fits) {
            return Err(fault());
        }
        Ok(Self { host: host.to_owned(), port })
    }

    /// The same host, that many ports further; `None` past the last port. Port 0 stays 0.
    pub fn nth(&self, offset: usize) -> Option<Self> {
        let port = match self.port {
            0 => 0,
            port => u16::try_from(usize::from(port) + offset).ok()?,
        };
        Some(Self { host: self.host.clone(), port })
    }

    /// The same, as somebody on this machine dials it.
    #[must_use]
    pub fn dialled_here(&self) -> Self {
        let host = if self.is_unspecified() { "127.0.0.1".to_owned() } else { self.host.clone() };
        Self { host, port: self.port }
    }

    /// Whether the host means "every address of this machine", which nobody can dial.
    pub fn is_unspecified(&self) -> bool {
        self.host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified())
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}
