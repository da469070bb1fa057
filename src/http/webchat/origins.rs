//! Where pages come from: the public addresses of the nodes, and which browser origins mean them.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Why an address is none a browser could use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a public address; write host:port or http(s)://host[:port]")]
pub struct OriginError {
    /// What was given.
    pub text: String,
}

/// A node's public address as a browser sees it: scheme, host, port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    scheme: &'static str,
    /// Lower case; IPv6 in brackets.
    host: String,
    port: u16,
}

impl Origin {
    /// Whether the host is every address of its machine: then any name may lead there.
    fn is_unspecified(&self) -> bool {
        self.ip().is_some_and(|ip| ip.is_unspecified())
    }

    fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.ip().is_some_and(|ip| ip.is_loopback())
    }

    fn ip(&self) -> Option<IpAddr> {
        self.host.trim_start_matches('[').trim_end_matches(']').parse().ok()
    }

    /// Whether a page of `origin` is a page of this node, under whatever spelling of its host.
    pub fn is_same_node(&self, origin: &Self) -> bool {
        self.scheme == origin.scheme
            && self.port == origin.port
            && (self.host == origin.host
                || self.is_unspecified()
                || (self.is_loopback() && origin.is_loopback()))
    }

    /// The URLs a page may find this node under.
    pub fn spellings(&self) -> Vec<String> {
        if self.is_unspecified() {
            return vec![format!("{}://*:{}", self.scheme, self.port)];
        }
        let mut found = vec![self.to_string()];
        if self.is_loopback() {
            for host in ["localhost", "127.0.0.1"] {
                let other = Self { host: host.to_owned(), ..self.clone() };
                if other != *self {
                    found.push(other.to_string());
                }
            }
        }
        found
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}", self.scheme, self.host, self.port)
    }
}

impl FromStr for Origin {
    type Err = OriginError;

    fn from_str(text: &str) -> Result<Self, OriginError> {
        let fault = || OriginError { text: text.chars().take(100).collect() };
        let (scheme, rest) = match text.split_once("://") {
            None => ("http", text),
            Some(("http", rest)) => ("http", rest),
            Some(("https", rest)) => ("https", rest),
            Some(_) => return Err(fault()),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.rsplit_once(':') {
            // A colon inside brackets is IPv6's own.
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| fault())?)
            }
            _ => (rest, if scheme == "https" { 443 } else { 80 }),
        };
        let bracketed = host.starts_with('[') && host.ends_with(']');
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let fits = if bracketed {
            host[1..host.len() - 1].parse::<std::net::Ipv6Addr>().is_ok()
        } else {
            !host.is_empty() && host.chars().all(named)
        };
        if !fits || port == 0 {
            return Err(fault());
        }
        Ok(Self { scheme, host: host.to_ascii_lowercase(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(text: &str) -> Origin {
        text.parse().unwrap()
    }

    #[test]
    fn k5_only_pages_of_the_nodes_are_let_in() {
        let node = origin("127.0.0.1:8101");
        for page in ["http://127.0.0.1:8101", "http://localhost:8101", "http://[::1]:8101"] {
            assert!(node.is_same_node(&origin(page)), "{page}");
        }
        for page in ["http://127.0.0.1:8102", "https://127.0.0.1:8101", "http://evil.example:8101"]
        {
            assert!(!node.is_same_node(&origin(page)), "{page}");
        }
        assert!(origin("0.0.0.0:8101").is_same_node(&origin("http://shop.example:8101")));
        assert!(!origin("0.0.0.0:8101").is_same_node(&origin("http://shop.example:9999")));
        let https = origin("https://chat.example");
        assert!(https.is_same_node(&origin("https://Chat.Example:443/")));
    }

    #[test]
    fn m1_what_is_no_address_is_refused() {
        for bad in ["", ":80", "a b:80", "ftp://a:1", "a:port", "a:0", "null", "[::g]:1", "a/b:1"] {
            // "null" is the origin of a sandboxed page: it parses as a host and matches no node.
            if bad == "null" {
                assert!(!origin("127.0.0.1:8101").is_same_node(&origin(bad)));
            } else {
                assert!(bad.parse::<Origin>().is_err(), "{bad}");
            }
        }
    }
}
