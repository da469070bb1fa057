//! Settings: one TOML file, each key overridable by environment and by flag (SPEC L4).
//!
//! Problem: three sources, and a mistake in any of them has to be shown where it was made. Idea:
//! every source is read into the same form first, key → text with its place ([`Layers`]), and only
//! then understood ([`Settings`]). So one parser checks files, variables and flags alike, and its
//! error names the key, the value and the line, variable or flag it came from.
//!
//! Invariants: a later layer wins over an earlier one, whole keys only; an unknown key is an error,
//! never passed over; what [`Settings`] holds is possible (ranges, addresses, names are checked).

mod address;
mod keys;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::{DeTable, DeValue};

pub use address::HostPort;
pub use keys::{KEYS, Key, find};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A line of the file, from 1.
    Line(PathBuf, usize),
    /// An environment variable.
    Variable(String),
    /// A flag of the command line.
    Flag(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(path, line) => write!(f, "{} line {line}", path.display()),
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// Why the settings cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {why}")]
    Read {
        /// Which file.
        path: String,
        /// The system's word.
        why: String,
    },
    /// The file is not TOML.
    #[error("{place}: this is not TOML: {why}")]
    Syntax {
        /// Where.
        place: Place,
        /// The parser's word.
        why: String,
    },
    /// No setting has this name.
    #[error("{place}: unknown key `{key}`{hint}")]
    Unknown {
        /// Where.
        place: Place,
        /// The key.
        key: String,
        /// The key that was probably meant, or where the list is.
        hint: String,
    },
    /// The value cannot be.
    #[error("{place}: `{key}` cannot be {value:?}: {why}")]
    Impossible {
        /// Where.
        place: Place,
        /// The key.
        key: &'static str,
        /// The value.
        value: String,
        /// What is possible.
        why: String,
    },
    /// Two keys that exclude each other.
    #[error("{place}: `{key}` contradicts `{other}` ({other_place}); give one of them")]
    Contradiction {
        /// Where.
        place: Place,
        /// The key.
        key: &'static str,
        /// The other.
        other: &'static str,
        /// Where the other is.
        other_place: Place,
    },
    /// A key that is needed.
    #[error("`{key}` is not set: {why}")]
    Missing {
        /// The key.
        key: &'static str,
        /// Who needs it, and how to give it.
        why: &'static str,
    },
}

#[derive(Clone, Debug)]
struct Given {
    text: String,
    place: Place,
}

/// Values as they were given, the winning layer a key.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    values: BTreeMap<&'static str, Given>,
}

impl Layers {
    /// Reads the file. Later layers win, so call this first.
    pub fn file(&mut self, path: &Path) -> Result<(), Error> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::Read {
            path: path.display().to_string(),
            why: error.to_string(),
        })?;
        self.text(path, &text)
    }

    /// Reads a file's text; `path` is what errors call it.
    pub fn text(&mut self, path: &Path, text: &str) -> Result<(), Error> {
        let place = |offset: usize| {
            let line = 1 + text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count();
            Place::Line(path.to_owned(), line)
        };
        let table = DeTable::parse(text).map_err(|error| Error::Syntax {
            place: place(error.span().map_or(0, |span| span.start)),
            why: error.message().to_owned(),
        })?;
        for (name, value) in table.get_ref() {
            let key = known(name.get_ref(), || place(name.span().start))?;
            let place = place(value.span().start);
            let text = plain(value.get_ref()).ok_or_else(|| Error::Impossible {
                place: place.clone(),
                key: key.name,
                value: value.get_ref().type_str().to_owned(),
                why: "write a string, a number, true or false, or an array of strings".to_owned(),
            })?;
            self.values.insert(key.name, Given { text, place });
        }
        Ok(())
    }

    /// Reads the environment: every variable that starts with `BOTMESH_`, but for those of the
    /// program itself (`BOTMESH__…`) and the file's own (`BOTMESH_CONFIG`).
    pub fn environment(
        &mut self,
        variables: impl Iterator<Item = (String, String)>,
    ) -> Result<(), Error> {
        for (name, text) in variables {
            let Some(rest) = name.strip_prefix("BOTMESH_") else { continue };
            if rest.starts_with('_') || rest == "CONFIG" {
                continue;
            }
            let key = known(&rest.to_ascii_lowercase(), || Place::Variable(name.clone()))?;
            self.values.insert(key.name, Given { text, place: Place::Variable(name) });
        }
        Ok(())
    }

    /// Sets a key by its flag, where the flag was given.
    pub fn flag(&mut self, key: &'static str, text: Option<String>) {
        debug_assert!(find(key).is_some(), "a flag for a key that is not listed: {key}");
        if let Some(text) = text {
            let place = Place::Flag(format!("--{}", key.replace('_', "-")));
            self.values.insert(key, Given { text, place });
        }
    }

    fn read<T>(
        &self,
        key: &'static str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, Error> {
        let Some(given) = self.values.get(key) else { return Ok(None) };
        parse(given.text.trim()).map(Some).map_err(|why| Error::Impossible {
            place: given.place.clone(),
            key,
            value: given.text.clone(),
            why,
        })
    }

    fn place(&self, key: &'static str) -> Option<Place> {
        self.values.get(key).map(|given| given.place.clone())
    }
}

fn known(name: &str, place: impl FnOnce() -> Place) -> Result<&'static Key, Error> {
    find(name).ok_or_else(|| Error::Unknown {
        place: place(),
        key: name.to_owned(),
        hint: match keys::nearest(name) {
            Some(near) => format!("; did you mean `{near}`?"),
            None => "; `botmesh --help` lists the keys".to_owned(),
        },
    })
}

/// A value of the file in the form flags and variables have.
fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(yes) => Some(yes.to_string()),
        DeValue::Array(items) => {
            let items: Option<Vec<String>> =
                items.iter().map(|item| item.get_ref().as_str().map(str::to_owned)).collect();
            items.map(|items| items.join(","))
        }
        _ => None,
    }
}

/// How a node without data comes to a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// It founds one.
    Bootstrap,
    /// It joins by this member.
    Join(HostPort),
    /// It waits for that many of these peers; the first by name founds, the others join it.
    Expect(usize, Vec<HostPort>),
    /// Nothing was said: right for a member that restarts, an error for an empty directory.
    Member,
}

/// What the program is to do, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The node's name.
    pub name: Option<String>,
    /// The data directory.
    pub dir: PathBuf,
    /// The public listener.
    pub public: HostPort,
    /// The cluster listener.
    pub cluster: HostPort,
    /// How peers reach this node, where that is not the cluster listener's address.
    pub advertise: Option<HostPort>,
    /// Public addresses of all nodes, for the chat page.
    pub public_peers: Vec<HostPort>,
    /// The file with the secret; `None` = `secret` in the data directory.
    pub secret_file: Option<PathBuf>,
    /// Where the demo POSTs replies.
    pub reply_url: Option<String>,
    /// The lease of this replica's session.
    pub lease: Duration,
    /// How long a message waits for its turn.
    pub turn_wait: Duration,
    /// How long a step may run.
    pub settle: Duration,
    /// Whether turns stay with their replica while nobody else wants them.
    pub sticky: bool,
    /// How an empty directory comes to a group.
    pub beginning: Beginning,
    /// How many nodes `up` starts.
    pub nodes: usize,
    /// Whether `up` starts an ended node again.
    pub restart: bool,
    /// Whether deaths are reported.
    pub supervise: bool,
    /// How long a supervised process may hang before it is killed; `None` = for ever.
    pub hang_kill: Option<Duration>,
    /// Free bytes of the disk below which a node takes no entries; 0 = it is not looked at.
    pub disk_low_water: u64,
    /// Time between two heartbeats.
    pub beat: Duration,
    /// How long a message id is recognised.
    pub dedupe_window: Duration,
    /// Message ids recognised at most.
    pub dedupe_ids: u32,
    /// Log entries after which a snapshot is built.
    pub snapshot_every: u64,
    /// Bytes of log after which a snapshot is built; 0 = entries alone decide.
    pub snapshot_every_bytes: u64,
    /// The log filter.
    pub log: String,
}

impl Settings {
    /// Understands the values.
    pub fn from_layers(layers: &Layers) -> Result<Self, Error> {
        let or = |key, default: &str| -> Result<HostPort, Error> {
            let found = layers.read(key, HostPort::parse)?;
            // The defaults are addresses by the test below.
            Ok(found.unwrap_or_else(|| HostPort::parse(default).expect("a default is valid")))
        };
        Ok(Self {
            name: layers.read("name", name)?,
            dir: layers.read("dir", path)?.unwrap_or_else(|| PathBuf::from(".botmesh")),
            public: or("public", "127.0.0.1:8101")?,
            cluster: or("cluster", "127.0.0.1:9101")?,
            advertise: layers.read("advertise", advertised)?,
            public_peers: layers.read("public_peers", addresses)?.unwrap_or_default(),
            secret_file: layers.read("secret_file", path)?,
            reply_url: layers.read("reply_url", url)?,
            lease: duration(layers, "lease", "15s", LEASE)?,
            turn_wait: duration(layers, "turn_wait", "2m", WAIT)?,
            settle: duration(layers, "settle", "1m", WAIT)?,
            sticky: layers.read("sticky", boolean)?.unwrap_or(true),
            beginning: beginning(layers)?,
            nodes: layers.read("nodes", |text| number(text, 1..=9))?.unwrap_or(3),
            restart: layers.read("restart", boolean)?.unwrap_or(true),
            supervise: layers.read("supervise", boolean)?.unwrap_or(true),
            hang_kill: match layers.read("hang_kill", |text| Ok(text != "off"))? {
                Some(true) => Some(duration(layers, "hang_kill", "1s", HANG)?),
                _ => None,
            },
            disk_low_water: layers.read("disk_low_water", bytes)?.unwrap_or(64 << 20),
            beat: duration(layers, "beat", "50ms", BEAT)?,
            dedupe_window: duration(layers, "dedupe_window", "7d", DEDUPE)?,
            dedupe_ids: layers
                .read("dedupe_ids", |text| number(text, 1..=100_000_000))?
                .map_or(1_000_000, |ids| ids as u32),
            snapshot_every: layers
                .read("snapshot_every", |text| number(text, 50..=1_000_000_000))?
                .unwrap_or(50_000) as u64,
            snapshot_every_bytes: layers.read("snapshot_every_bytes", bytes)?.unwrap_or(64 << 20),
            log: layers.read("log", filter)?.unwrap_or_else(|| "info,openraft=warn".to_owned()),
        })
    }
}

/// Below 500 ms a lease is shorter than an election (SPEC E2); above an hour a dead replica's
/// chats would be mute for longer than anybody waits.
const LEASE: RangeInclusive<Duration> = Duration::from_millis(500)..=Duration::from_secs(3600);
const BEAT: RangeInclusive<Duration> = Duration::from_millis(20)..=Duration::from_secs(5);
const DEDUPE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(31_557_600);
const HANG: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);
const WAIT: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(86_400);

/// `64MiB`, `1GiB`, `500KiB`, plain bytes, or `off`.
fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u32); 4] = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("", 0)];
    if text == "off" {
        return Ok(0);
    }
    let (number, shift) = UNITS
        .iter()
        .find_map(|(unit, shift)| text.strip_suffix(unit).map(|number| (number, *shift)))
        .unwrap_or((text, 0));
    let number = number.trim().parse::<u64>().ok();
    number
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| "write a size such as \"64MiB\" or \"1GiB\", or \"off\"".to_owned())
}

fn beginning(layers: &Layers) -> Result<Beginning, Error> {
    let bootstrap = layers.read("bootstrap", boolean)?.unwrap_or(false);
    let join = layers.read("join", advertised)?;
    let expect = layers.read("bootstrap_expect", |text| number(text, 1..=9))?;
    let peers = layers.read("peers", peers)?;
    let asked = [
        ("bootstrap", bootstrap),
        ("join", join.is_some()),
        ("bootstrap_expect", expect.is_some()),
    ];
    let mut asked = asked.iter().filter(|(_, given)| *given).map(|(key, _)| *key);
    if let (Some(first), Some(second)) = (asked.next(), asked.next())
        && let (Some(place), Some(other_place)) = (layers.place(second), layers.place(first))
    {
        return Err(Error::Contradiction { place, key: second, other: first, other_place });
    }
    match (bootstrap, join, expect, peers) {
        (true, ..) => Ok(Beginning::Bootstrap),
        (_, Some(peer), ..) => Ok(Beginning::Join(peer)),
        (_, _, Some(count), Some(peers)) if peers.len() < count => Err(Error::Impossible {
            place: layers.place("peers").unwrap_or(Place::Flag("--peers".to_owned())),
            key: "peers",
            value: peers.iter().map(HostPort::to_string).collect::<Vec<_>>().join(","),
            why: format!("bootstrap_expect is {count}; name {count} peers, the own included"),
        }),
        (_, _, Some(count), Some(peers)) => Ok(Beginning::Expect(count, peers)),
        (_, _, Some(_), None) => Err(Error::Missing {
            key: "peers",
            why: "bootstrap_expect needs the cluster addresses of all peers; add --peers A,B,C",
        }),
        (_, _, None, Some(_)) => Err(Error::Missing {
            key: "bootstrap_expect",
            why: "peers are for symmetric starts; add --bootstrap-expect N, or use --join",
        }),
        (_, _, None, None) => Ok(Beginning::Member),
    }
}

fn name(text: &str) -> Result<String, String> {
    crate::types::check_name("name", text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

fn path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("give a path".to_owned()) } else { Ok(PathBuf::from(text)) }
}

fn advertised(text: &str) -> Result<HostPort, String> {
    let address = HostPort::parse(text)?;
    if address.port == 0 || address.is_unspecified() {
        return Err("peers cannot dial that; give a host they can resolve and a port".to_owned());
    }
    Ok(address)
}

fn addresses(text: &str) -> Result<Vec<HostPort>, String> {
    text.split(',').map(|address| HostPort::parse(address.trim())).collect()
}

fn peers(text: &str) -> Result<Vec<HostPort>, String> {
    let list: Vec<HostPort> =
        text.split(',').map(|peer| advertised(peer.trim())).collect::<Result<_, _>>()?;
    let mut seen = std::collections::BTreeSet::new();
    match list.iter().find(|peer| !seen.insert(peer.to_string())) {
        Some(twice) => Err(format!("{twice} is named twice")),
        None => Ok(list),
    }
}

fn url(text: &str) -> Result<String, String> {
    match text.parse::<reqwest::Url>() {
        Ok(url) if url.scheme() == "http" && url.has_host() => Ok(text.to_owned()),
        Ok(_) => Err("give an http:// address; for TLS put a proxy in front of it".to_owned()),
        Err(error) => Err(format!("not a URL: {error}")),
    }
}

fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "true" | "1" | "yes" => Ok(true),
        "false" | "0" | "no" => Ok(false),
        _ => Err("write true or false".to_owned()),
    }
}

fn number(text: &str, range: RangeInclusive<usize>) -> Result<usize, String> {
    let fault = || format!("give a number from {} to {}", range.start(), range.end());
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(fault)
}

fn filter(text: &str) -> Result<String, String> {
    tracing_subscriber::EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|error| format!("not a log filter: {error}"))
}

fn duration(
    layers: &Layers,
    key: &'static str,
    default: &'static str,
    range: RangeInclusive<Duration>,
) -> Result<Duration, Error> {
    let parse = |text: &str| {
        let found = humantime::parse_duration(text)
            .map_err(|error| format!("{error}; write a duration such as \"15s\" or \"500ms\""))?;
        if range.contains(&found) {
            return Ok(found);
        }
        let show = |bound: &Duration| humantime::format_duration(*bound).to_string();
        Err(format!("give {} to {}", show(range.start()), show(range.end())))
    };
    match layers.read(key, parse)? {
        Some(found) => Ok(found),
        None => Ok(humantime::parse_duration(default).expect("a default is a duration")),
    }
}

#[cfg(test)]
mod tests;
