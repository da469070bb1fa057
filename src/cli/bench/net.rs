//! Where the nodes of a measurement are.
//!
//! Problem: on loopback a dead host still refuses connections, which flatters whoever waits for one,
//! and nothing can be dropped on the way. Idea: a network namespace a node, joined by a router in one
//! more, with nothing but iproute2. The router drops by a rule of its routing (`blackhole`), from one
//! address or to one, and tells nobody: that is a cable pulled out, or a firewall that went wrong in one
//! direction.
//!
//! ```text
//!  n1 .11 ──┐
//!  n2 .12 ──┤ router .1 ── .2 whoever measures, and the far end of the bots' sends
//!  n3 .13 ──┘
//! ```

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

use rand::Rng;

use crate::cli::failure::Failure;
use crate::config::HostPort;

/// Where the nodes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Net {
    /// On 127.0.0.1.
    Loopback,
    /// Each in a network namespace of its own.
    Namespaces,
}

impl Net {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Namespaces => "namespaces",
        }
    }
}

/// Which packets of a node are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// Those to the other nodes.
    ToTheOthers,
    /// All that it sends, and all that is sent to it.
    Whole,
}

/// The network of one measurement.
#[derive(Debug)]
pub(super) enum Network {
    Loopback,
    Namespaces(Namespaces),
}

impl Network {
    pub(super) fn open(net: Net, nodes: usize) -> Result<Self, Failure> {
        Ok(match net {
            Net::Loopback => Self::Loopback,
            Net::Namespaces => Self::Namespaces(Namespaces::open(nodes)?),
        })
    }

    /// Where whoever measures listens, port 0.
    pub(super) fn far_end(&self) -> HostPort {
        match self {
            Self::Loopback => HostPort { host: "127.0.0.1".to_owned(), port: 0 },
            Self::Namespaces(spaces) => HostPort { host: spaces.address(FAR_END), port: 0 },
        }
    }

    /// A listener for a node; `which` tells its listeners apart.
    pub(super) fn listener(&self, node: usize, which: u16) -> HostPort {
        match self {
            Self::Loopback => free_address(),
            Self::Namespaces(spaces) => {
                HostPort { host: spaces.address(host_of(node)), port: 9_000 + which }
            }
        }
    }

    /// The command of a program on a node's host.
    pub(super) fn command(&self, node: usize, program: &Path) -> Command {
        match self {
            Self::Loopback => Command::new(program),
            Self::Namespaces(spaces) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &spaces.node(node)]).arg(program);
                command
            }
        }
    }

    /// Drops packets of these nodes from now on.
    pub(super) fn cut(&self, nodes: &[usize], of: usize, how: Cut) -> Result<(), Failure> {
        match self {
            Self::Loopback => Err(Failure::Other("loopback cannot be cut".to_owned())),
            Self::Namespaces(spaces) => spaces.cut(nodes, of, how),
        }
    }

    /// Drops nothing any more.
    pub(super) fn heal(&self) -> Result<(), Failure> {
        match self {
            Self::Loopback => Ok(()),
            Self::Namespaces(spaces) => spaces.heal(),
        }
    }
}

/// An address that is free now, below the range of outgoing connections: a node that is down must
/// find it free when it comes back.
fn free_address() -> HostPort {
    loop {
        let port = rand::rng().random_range(14_000..32_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return HostPort { host: "127.0.0.1".to_owned(), port };
        }
    }
}

/// The host numbers of the subnet.
const ROUTER: u8 = 1;
const FAR_END: u8 = 2;

fn host_of(node: usize) -> u8 {
    // Five nodes at most.
    11 + u8::try_from(node).unwrap_or(u8::MAX - 11)
}

/// Namespaces, links and routes; they go when this is dropped.
#[derive(Debug)]
pub(super) struct Namespaces {
    /// Begins the names of all that is made.
    name: String,
    nodes: usize,
    /// The third byte of the subnet.
    subnet: u8,
}

/// The preference of the rules that drop: before those that route.
const RULE: &str = "50";

impl Namespaces {
    fn open(nodes: usize) -> Result<Self, Failure> {
        let mut random = rand::rng();
        let name = format!("bm{:05x}", random.random_range(0..0x10_0000));
        // Dropped, it removes what was made of it before something failed.
        let spaces = Self { name, nodes, subnet: random.random_range(1..255) };
        spaces.make().map_err(|why| {
            Failure::Forbidden(format!(
                "this machine makes no network namespaces (they need root and iproute2): {why}"
            ))
        })?;
        Ok(spaces)
    }

    fn router(&self) -> String {
        format!("{}r", self.name)
    }

    fn node(&self, node: usize) -> String {
        format!("{}n{}", self.name, node + 1)
    }

    /// This side of the link of whoever measures.
    fn own_link(&self) -> String {
        format!("{}h", self.name)
    }

    fn address(&self, host: u8) -> String {
        format!("10.213.{}.{host}", self.subnet)
    }

    fn make(&self) -> Result<(), String> {
        let (router, own) = (self.router(), self.own_link());
        let [gate, far_end] = [ROUTER, FAR_END].map(|host| self.address(host));
        let subnet = format!("10.213.{}.0/24", self.subnet);
        let mut outside = format!("netns add {router}\n");
        for node in 0..self.nodes {
            let _ = writeln!(outside, "netns add {}", self.node(node));
        }
        let _ = write!(
            outside,
            "link add name {own} type veth peer name far netns {router}\n\
             addr add {far_end}/32 dev {own}\nlink set {own} up\n\
             route add {gate}/32 dev {own}\nroute add {subnet} via {gate}\n"
        );
        let mut routed = format!(
            "link set lo up\naddr add {gate}/32 dev far\nlink set far up\n\
             route add {far_end}/32 dev far\n"
        );
        for node in 0..self.nodes {
            let (space, host) = (self.node(node), self.address(host_of(node)));
            let _ = writeln!(
                outside,
                "link add name eth0 netns {space} type veth peer name n{node} netns {router}"
            );
            let _ = write!(
                routed,
                "addr add {gate}/32 dev n{node}\nlink set n{node} up\n\
                 route add {host}/32 dev n{node}\n"
            );
        }
        ip(None, &outside)?;
        ip(Some(&router), &routed)?;
        for node in 0..self.nodes {
            let host = self.address(host_of(node));
            let inside = format!(
                "link set lo up\naddr add {host}/32 dev eth0\nlink set eth0 up\n\
                 route add {gate}/32 dev eth0\nroute add default via {gate}\n"
            );
            ip(Some(&self.node(node)), &inside)?;
        }
        let forward = "echo 1 > /proc/sys/net/ipv4/ip_forward";
        done(Command::new("ip").args(["netns", "exec", &router, "sh", "-c", forward]), "")
    }

    fn cut(&self, nodes: &[usize], of: usize, how: Cut) -> Result<(), Failure> {
        let mut rules = String::new();
        for &node in nodes {
            let host = self.address(host_of(node));
            match how {
                Cut::Whole => {
                    let _ = write!(
                        rules,
                        "rule add pref {RULE} from {host} blackhole\n\
                         rule add pref {RULE} to {host} blackhole\n"
                    );
                }
                Cut::ToTheOthers => {
                    for other in (0..of).filter(|other| *other != node) {
                        let other = self.address(host_of(other));
                        let _ = writeln!(
                            rules,
                            "rule add pref {RULE} from {host} to {other} blackhole"
                        );
                    }
                }
            }
        }
        let cut = ip(Some(&self.router()), &rules);
        cut.map_err(|why| Failure::Forbidden(format!("this machine drops no packets: {why}")))
    }

    fn heal(&self) -> Result<(), Failure> {
        // Each call removes one rule; the last one finds none.
        let router = self.router();
        let rules = || {
            let asked = Command::new("ip").args(["-n", &router, "rule", "show"]).output();
            let text = asked.map_err(|error| error.to_string());
            text.map(|output| String::from_utf8_lossy(&output.stdout).matches("blackhole").count())
        };
        let healed = rules().and_then(|count| {
            let all = format!("rule del pref {RULE}\n").repeat(count);
            ip(Some(&router), &all)
        });
        healed.map_err(|why| Failure::Other(format!("the network does not heal: {why}")))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // What was not made is not there to be removed; the links go with their ends.
        let mut all: Vec<String> = (0..self.nodes).map(|node| self.node(node)).collect();
        all.push(self.router());
        for space in all {
            let _ = Command::new("ip").args(["netns", "del", &space]).output();
        }
        let _ = Command::new("ip").args(["link", "del", &self.own_link()]).output();
    }
}

/// Runs lines of iproute2 in a namespace, or in that of this process.
fn ip(space: Option<&str>, lines: &str) -> Result<(), String> {
    let mut command = Command::new("ip");
    if let Some(space) = space {
        command.args(["-n", space]);
    }
    done(command.args(["-batch", "-"]), lines)
}

fn done(command: &mut Command, input: &str) -> Result<(), String> {
    let running = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut running = running.spawn().map_err(|error| format!("ip: {error}"))?;
    if let Some(mut stdin) = running.stdin.take() {
        // One that ends early says why on stderr.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = running.wait_with_output().map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(said.lines().next().unwrap_or("ip failed").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l6_every_host_of_a_namespace_net_has_an_address_of_its_own() {
        let spaces = Namespaces { name: "bm-test".to_owned(), nodes: 0, subnet: 7 };
        let mut hosts: Vec<u8> = (0..5).map(host_of).collect();
        hosts.extend([ROUTER, FAR_END]);
        let mut all: Vec<String> = hosts.iter().map(|host| spaces.address(*host)).collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 7);
        assert!(all.iter().all(|address| address.parse::<std::net::Ipv4Addr>().is_ok()));
    }

    #[test]
    fn l6_a_line_that_iproute_refuses_is_told() {
        let refused = ip(Some("no-such-namespace"), "link show\n").unwrap_err();
        assert!(!refused.is_empty());
    }
}
