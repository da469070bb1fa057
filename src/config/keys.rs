//! Every setting, once: its key in the file, its flag, its environment variable, its default and
//! its meaning. `--help`, the README's table and the parser all read this list.

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The key in the TOML file. The flag is `--` and the key with `-` for `_`; the environment
    /// variable is `BOTMESH_` and the key in capitals.
    pub name: &'static str,
    /// What applies where nobody set it, in words.
    pub default: &'static str,
    /// What it does, in one line.
    pub meaning: &'static str,
}

impl Key {
    /// Its environment variable.
    pub fn variable(&self) -> String {
        format!("BOTMESH_{}", self.name.to_ascii_uppercase())
    }

    /// Its flag.
    pub fn flag(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }
}

const fn key(name: &'static str, default: &'static str, meaning: &'static str) -> Key {
    Key { name, default, meaning }
}

/// All settings, in the order the README lists them.
pub const KEYS: &[Key] = &[
    key("name", "the host's name", "`run`: what people call this node; unique in the group"),
    key("dir", ".botmesh", "data directory; `up` keeps node i in `DIR/n{i}/`"),
    key("public", "127.0.0.1:8101", "listener for webhooks and the chat page; `up` adds i − 1"),
    key("cluster", "127.0.0.1:9101", "listener for peers and operators; `up` adds i − 1"),
    key("advertise", "the cluster address", "`HOST:PORT` by which the peers reach this node"),
    key(
        "public_peers",
        "none",
        "`run`: public addresses of all nodes; the chat page changes over to them",
    ),
    key("secret_file", "DIR/secret", "file that holds the cluster secret; mode 0600"),
    key("reply_url", "none", "where the demo webhook POSTs its replies; unset, they are listed"),
    key("lease", "15s", "how long a silent replica keeps its chats; 500ms to 1h"),
    key("turn_wait", "2m", "how long a message waits for its turn before an error is raised"),
    key("settle", "1m", "how long one step may run before it is stopped"),
    key(
        "sticky",
        "true",
        "`run`, `up`: a chat that nobody else wants stays with its node (`--no-sticky`)",
    ),
    key("bootstrap", "false", "`run`: found a new group of one, once"),
    key("join", "none", "`run`: `HOST:PORT` of any member to join by"),
    key("bootstrap_expect", "none", "`run`: found the group once this many peers are there"),
    key("peers", "none", "`run`: cluster addresses for `bootstrap_expect`, the own included"),
    key("nodes", "3", "`up`: how many nodes, 1 to 9"),
    key("restart", "true", "`up`, `supervise`: start what ended again (`--no-restart`)"),
    key(
        "supervise",
        "true",
        "`up`, `supervise`: report deaths to the survivors (`--no-supervise`)",
    ),
    key(
        "hang_kill",
        "off",
        "`up`, `supervise`: kill what is stopped or shows no life for this long; 100ms to 1h",
    ),
    key(
        "disk_low_water",
        "64MiB",
        "free space below which a node takes nothing more until there is room again; `off` = never",
    ),
    key(
        "beat",
        "50ms",
        "time between two heartbeats, alike on all nodes; elections wait 3 to 6 of them; 20ms to 5s",
    ),
    key("dedupe_window", "7d", "how long a message id is recognised, alike on all nodes; 1s to 1y"),
    key(
        "dedupe_ids",
        "1000000",
        "message ids recognised at most, alike on all nodes; each takes some 80 bytes of memory",
    ),
    key("snapshot_every", "50000", "log entries after which a snapshot is built; 50 at the least"),
    key(
        "snapshot_every_bytes",
        "64MiB",
        "bytes of log after which a snapshot is built, or as many as the last one has; `off` = entries \
         alone decide",
    ),
    key(
        "log",
        "info,openraft=warn",
        "what is logged: error, warn, info, debug, trace, or a filter",
    ),
];

/// The setting of this name.
pub fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The known key most like this one, where one is near enough to have been meant.
pub(super) fn nearest(name: &str) -> Option<&'static str> {
    let near = KEYS.iter().map(|key| (distance(name, key.name), key.name)).min()?;
    (near.0 <= 2.max(name.len() / 4)).then_some(near.1)
}

/// Levenshtein distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replace = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
