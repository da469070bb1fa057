//! A fake WhatsApp: a WebSocket server that speaks the real handshake (Noise XX and IK) and the real
//! binary stanzas, by the client library's own primitives. It lets in whom it was told by the phone to
//! let in, by the device's own noise key; evicts the older of two logins; keeps what was not
//! acknowledged and delivers it again; and is asked for keys and devices as the real one is.
//!
//! What it does not do: it signs its certificate with no key of WhatsApp's (the client of the tests is
//! built to skip that check), compresses nothing, and knows no history, calls, statuses or channels.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rand_10 as rand;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use whatsapp_rust::wacore::libsignal::protocol::KeyPair;
use whatsapp_rust::wacore_binary::builder::NodeBuilder;
use whatsapp_rust::wacore_binary::marshal::{marshal, unmarshal_ref};
use whatsapp_rust::wacore_binary::util::unpack;
use whatsapp_rust::wacore_binary::{Jid, Node};
use whatsapp_rust::waproto::whatsapp as wa;

use super::whatsapp_people::{Bundle, Person, Scanned};
use super::whatsapp_wire::{Login, Wire};

/// The account that the bot is linked to.
pub const ACCOUNT: &str = "15550000";
const ACCOUNT_LID: &str = "900000000000000";
/// The bot among its devices.
const DEVICE: u16 = 7;

/// What is to be put on a connection.
enum Out {
    Node(Node),
    End,
}

struct Connection {
    out: mpsc::UnboundedSender<Out>,
    /// The reference it is to be paired by.
    reference: String,
    logged_in: bool,
}

/// The linked device.
#[derive(Clone)]
struct Linked {
    noise: Vec<u8>,
}

#[derive(Default)]
struct State {
    connections: HashMap<u64, Connection>,
    made: u64,
    linked: Option<Linked>,
    bundle: Bundle,
    people: HashMap<String, Person>,
    /// Whose an anonymous id is.
    ids: HashMap<String, String>,
    logins: Vec<Login>,
    /// Not acknowledged yet: (id, stanza).
    queue: Vec<(String, Node)>,
    acknowledged: Vec<String>,
    /// Messages of the bot: stanzas.
    sent: Vec<Node>,
    /// Ids that were shown, each with whom, and those that came again.
    shown: Vec<(String, String)>,
    again: Vec<String>,
    /// What becomes of the next ones: `Some(code)` is refused, `None` unanswered.
    answers: Vec<Option<u16>>,
    refuse: Option<u16>,
    evicted: usize,
}

/// The server. It ends when it is dropped.
pub struct WhatsAppApi {
    pub url: String,
    state: Arc<Mutex<State>>,
    serving: JoinHandle<()>,
}

impl Drop for WhatsAppApi {
    fn drop(&mut self) {
        self.serving.abort();
        self.drop_connections();
    }
}

fn server() -> Jid {
    "s.whatsapp.net".parse().unwrap()
}

/// The bot's device.
pub fn bot() -> Jid {
    Jid::pn_device(ACCOUNT, DEVICE)
}

fn result(id: &str, children: Vec<Node>) -> Node {
    let iq = NodeBuilder::new("iq").attr("from", server()).attr("id", id).attr("type", "result");
    if children.is_empty() { iq.build() } else { iq.children(children).build() }
}

fn text(node: &Node, key: &str) -> String {
    node.attrs.get(key).map(|value| value.as_str().into_owned()).unwrap_or_default()
}

fn bytes(node: &Node, tag: &str) -> Vec<u8> {
    let child = node.get_optional_child(tag);
    child.and_then(content).unwrap_or_default()
}

/// The bytes a stanza holds.
pub fn content(node: &Node) -> Option<Vec<u8>> {
    node.as_node_ref().content_bytes().map(<[u8]>::to_vec)
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |number, byte| (number << 8) | u32::from(*byte))
}

impl WhatsAppApi {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("ws://{}/ws/chat", listener.local_addr().unwrap());
        let state: Arc<Mutex<State>> = Arc::default();
        state.lock().people.insert(ACCOUNT.to_owned(), Person::new(ACCOUNT));
        state.lock().ids.insert(ACCOUNT_LID.to_owned(), ACCOUNT.to_owned());
        let identity = Arc::new(KeyPair::generate(&mut rand::rng()));
        let shared = state.clone();
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (state, identity) = (shared.clone(), identity.clone());
                tokio::spawn(async move {
                    // A client that goes in the middle of it is no fault of the server's.
                    let _ = serve(stream, state, identity).await;
                });
            }
        });
        Self { url, state, serving }
    }

    /// Logins and registrations so far.
    pub fn logins(&self) -> Vec<Login> {
        self.state.lock().logins.clone()
    }

    /// Connections that were let in.
    pub fn connected(&self) -> usize {
        self.state.lock().connections.values().filter(|one| one.logged_in).count()
    }

    /// How many were evicted by a later login.
    pub fn evicted(&self) -> usize {
        self.state.lock().evicted
    }

    /// Ids of messages that were acknowledged.
    pub fn acknowledged(&self) -> Vec<String> {
        self.state.lock().acknowledged.clone()
    }

    /// Messages the bot has sent.
    pub fn sent(&self) -> Vec<Node> {
        self.state.lock().sent.clone()
    }

    /// How many one-time keys the server has of the bot.
    pub fn one_time_keys(&self) -> usize {
        self.state.lock().bundle.one_time.len()
    }

    /// The server has the bot's keys.
    pub fn has_keys(&self) -> bool {
        !self.state.lock().bundle.identity.is_empty()
    }

    pub fn identity(&self) -> Vec<u8> {
        self.state.lock().bundle.identity.clone()
    }

    /// Refuses logins with this code from now on.
    pub fn refuse(&self, code: Option<u16>) {
        self.state.lock().refuse = code;
    }

    /// What becomes of the bot's next messages: `Some(code)` refuses one, `None` leaves it unanswered.
    pub fn answers_next(&self, answers: &[Option<u16>]) {
        self.state.lock().answers.extend(answers.iter().rev());
    }

    /// Ends all connections without a word.
    pub fn drop_connections(&self) {
        for connection in self.state.lock().connections.values() {
            let _ = connection.out.send(Out::End);
        }
    }

    /// The phone removes the bot from its devices.
    pub fn unlinks(&self) {
        let mut state = self.state.lock();
        state.linked = None;
        let conflict = NodeBuilder::new("conflict").attr("type", "device_removed").build();
        let error = NodeBuilder::new("stream:error").attr("code", "401").children([conflict]);
        state.to_all(&error.build());
    }

    /// Somebody else logs in as the bot's device.
    pub fn replaced(&self) {
        self.state.lock().evict();
    }

    /// The phone scans a code; whether the connection it is of is still there.
    pub fn scans(&self, code: &str) -> bool {
        let mut state = self.state.lock();
        let Scanned { reference, noise, signed_identity, .. } = state.people[ACCOUNT].scans(code);
        let paired = state.connections.values().find(|one| one.reference == reference);
        let Some(out) = paired.map(|one| one.out.clone()) else { return false };
        state.linked = Some(Linked { noise: noise.to_vec() });
        let jid = NodeBuilder::new("device")
            .attr("jid", bot())
            .attr("lid", Jid::lid_device(ACCOUNT_LID, DEVICE))
            .build();
        let children = [
            NodeBuilder::new("device-identity").bytes(signed_identity).build(),
            NodeBuilder::new("biz").attr("name", "Bot").build(),
            NodeBuilder::new("platform").attr("name", "smba").build(),
            jid,
        ];
        let success = NodeBuilder::new("pair-success").children(children).build();
        let iq = NodeBuilder::new("iq").attr("from", server()).attr("id", "pair");
        out.send(Out::Node(iq.attr("type", "set").children([success]).build())).is_ok()
    }

    /// Somebody, from now on.
    pub fn person(&self, user: &str) {
        self.state.lock().people.insert(user.to_owned(), Person::new(user));
    }

    /// Somebody says something to the bot, in private or in a group. It is delivered now or when the
    /// bot connects, until it is acknowledged.
    pub async fn says(&self, user: &str, group: Option<&str>, id: &str, message: &wa::Message) {
        let own = format!("{user}@s.whatsapp.net");
        let own = own.as_str();
        match group {
            None => self.says_as(user, &[("from", own)], id, message).await,
            Some(group) => {
                self.says_as(user, &[("from", group), ("participant", own)], id, message).await;
            }
        }
    }

    /// As that, by whatever address; one by anonymous id is theirs from then on.
    pub async fn says_as(
        &self,
        user: &str,
        from: &[(&'static str, &str)],
        id: &str,
        message: &wa::Message,
    ) {
        let (mut person, mut bundle) = {
            let mut state = self.state.lock();
            (state.people.remove(user).unwrap(), std::mem::take(&mut state.bundle))
        };
        let sealed = person.says(&bot(), &mut bundle, message).await;
        let stanza = NodeBuilder::new("message").attr("id", id).attr("t", 1_700_000_000_u64);
        let mut stanza = stanza.attr("type", "text").attr("notify", user);
        let mut ids = Vec::new();
        for (name, address) in from {
            let address: Jid = address.parse().unwrap();
            ids.extend(address.is_lid().then(|| address.user.to_string()));
            stanza = stanza.attr(name, address);
        }
        let stanza = stanza.children([sealed]).build();
        let mut state = self.state.lock();
        state.ids.extend(ids.into_iter().map(|id| (id, user.to_owned())));
        state.people.insert(user.to_owned(), person);
        state.bundle = bundle;
        state.queue.push((id.to_owned(), stanza.clone()));
        state.to_all(&stanza);
    }

    /// Somebody has another number.
    pub fn renumbers(&self, old: &str, new: &str) {
        let modify = NodeBuilder::new("modify").attr("old", Jid::pn(old)).attr("new", Jid::pn(new));
        let notification = NodeBuilder::new("notification").attr("type", "contacts");
        let notification = notification.attr("from", server()).attr("id", "renumbered");
        self.state.lock().to_all(&notification.children([modify.build()]).build());
    }

    /// Ids of messages that came again, to whomever.
    pub fn again(&self) -> Vec<String> {
        self.state.lock().again.clone()
    }

    /// What somebody is shown that was sent since, decrypted: (id, text). As on a phone, what comes again
    /// under its id is not shown again.
    pub async fn heard(&self, user: &str) -> Vec<(String, String)> {
        let (mut person, sent, ids) = {
            let mut state = self.state.lock();
            let sent = std::mem::take(&mut state.sent);
            (state.people.remove(user).unwrap(), sent, state.ids.clone())
        };
        let mut heard = Vec::new();
        for stanza in &sent {
            for (to, kind, bytes) in addressed(stanza) {
                let to_user = ids.get(&*to.user).map_or(&*to.user, String::as_str);
                if to_user == user && to.device == 0 {
                    let message = person.hears(&bot(), &kind, &bytes).await;
                    heard.push((text(stanza, "id"), super::whatsapp_people::text_of(&message)));
                }
            }
        }
        let mut state = self.state.lock();
        state.people.insert(user.to_owned(), person);
        heard.retain(|(id, _)| {
            let shown = (user.to_owned(), id.clone());
            let fresh = !state.shown.contains(&shown);
            if fresh {
                state.shown.push(shown)
            } else {
                state.again.push(id.clone())
            }
            fresh
        });
        heard
    }
}

/// To whom a message goes, with what each is sent.
fn addressed(stanza: &Node) -> Vec<(Jid, String, Vec<u8>)> {
    let sealed = |node: &Node| {
        let enc = node.get_optional_child("enc")?;
        Some((text(enc, "type"), content(enc)?))
    };
    let mut found = Vec::new();
    if let Some((kind, bytes)) = sealed(stanza) {
        found.push((text(stanza, "to").parse().unwrap(), kind, bytes));
    }
    let participants = stanza.get_optional_child("participants");
    for to in participants.into_iter().flat_map(|node| node.get_children_by_tag("to")) {
        if let Some((kind, bytes)) = sealed(to) {
            found.push((text(to, "jid").parse().unwrap(), kind, bytes));
        }
    }
    found
}

impl State {
    /// To every connection that is let in.
    fn to_all(&self, node: &Node) {
        for connection in self.connections.values().filter(|one| one.logged_in) {
            let _ = connection.out.send(Out::Node(node.clone()));
        }
    }

    fn evict(&mut self) {
        for connection in self.connections.values_mut().filter(|one| one.logged_in) {
            let conflict = NodeBuilder::new("conflict").attr("type", "replaced").build();
            let error = NodeBuilder::new("stream:error").children([conflict]).build();
            let _ = connection.out.send(Out::Node(error));
            let _ = connection.out.send(Out::End);
            connection.logged_in = false;
            self.evicted += 1;
        }
    }

    /// Lets a connection in, or says why not.
    fn admit(&mut self, connection: u64, payload: &wa::ClientPayload, login: Login) {
        self.logins.push(login.clone());
        let out = self.connections[&connection].out.clone();
        let send = |node: Node| drop(out.send(Out::Node(node)));
        if payload.username.is_none() {
            let reference = self.connections[&connection].reference.clone();
            let refs = NodeBuilder::new("ref").bytes(reference.into_bytes()).build();
            let pair = NodeBuilder::new("pair-device").children([refs]).build();
            let iq = NodeBuilder::new("iq").attr("from", server()).attr("id", "pair-device");
            return send(iq.attr("type", "set").children([pair]).build());
        }
        let known = self.linked.as_ref().is_some_and(|linked| linked.noise == login.noise);
        let refused = self.refuse.or((!known).then_some(401));
        if let Some(code) = refused {
            send(NodeBuilder::new("failure").attr("reason", code.to_string()).build());
            let _ = out.send(Out::End);
            return;
        }
        self.evict();
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.logged_in = true;
        }
        let success = NodeBuilder::new("success").attr("t", 1_700_000_000_u64);
        send(success.attr("lid", Jid::lid_device(ACCOUNT_LID, DEVICE)).build());
    }

    /// Answers a stanza of a connection's.
    fn take(&mut self, node: &Node) -> Vec<Node> {
        let id = text(node, "id");
        match &*node.tag {
            "iq" if text(node, "type") == "result" => {
                // The new device has signed: it is to log in now.
                let signed = node.get_optional_child("pair-device-sign").is_some();
                let restart = NodeBuilder::new("stream:error").attr("code", "515").build();
                if signed { vec![restart] } else { Vec::new() }
            }
            "iq" => self.asked(node, &id),
            "message" => {
                let ack = NodeBuilder::new("ack").attr("class", "message").attr("id", &id);
                let ack = ack.attr("from", text(node, "to")).attr("t", 1_700_000_001_u64);
                let to: Jid = text(node, "to").parse().unwrap();
                if self.ids.get(&*to.user).map_or(&*to.user, String::as_str) == ACCOUNT {
                    // To its own phone: the client's affair.
                    return vec![ack.build()];
                }
                self.sent.push(node.clone());
                match self.answers.pop() {
                    None => vec![ack.build()],
                    Some(None) => Vec::new(),
                    Some(Some(code)) => vec![ack.attr("error", code.to_string()).build()],
                }
            }
            "receipt" | "ack" => {
                let list = node.get_optional_child("list").into_iter();
                let items = list.flat_map(|list| list.get_children_by_tag("item"));
                let also: Vec<String> = items.map(|item| text(item, "id")).collect();
                for id in [id.clone()].iter().chain(&also) {
                    if let Some(place) = self.queue.iter().position(|(queued, _)| queued == id) {
                        self.acknowledged.push(self.queue.remove(place).0);
                    }
                }
                if &*node.tag == "ack" {
                    return Vec::new();
                }
                let ack = NodeBuilder::new("ack").attr("class", "receipt").attr("id", &id);
                vec![ack.attr("from", text(node, "to")).build()]
            }
            _ => Vec::new(),
        }
    }

    fn asked(&mut self, iq: &Node, id: &str) -> Vec<Node> {
        match (&*text(iq, "xmlns"), &*text(iq, "type")) {
            ("encrypt", "set") if iq.get_optional_child("list").is_some() => {
                self.bundle = bundle(iq);
                vec![result(id, Vec::new())]
            }
            ("encrypt", "get") if iq.get_optional_child("key").is_some() => {
                let asked = iq.get_optional_child("key").unwrap();
                let users = asked.get_children_by_tag("user").filter_map(|user| {
                    let jid: Jid = text(user, "jid").parse().unwrap();
                    let known = self.ids.get(&*jid.user).map_or(&*jid.user, String::as_str);
                    Some(self.people.get(known)?.bundle(&jid))
                });
                let list = NodeBuilder::new("list").children(users.collect::<Vec<_>>()).build();
                vec![result(id, vec![list])]
            }
            ("usync", _) => vec![result(id, vec![devices(iq)])],
            ("passive", _) => {
                let waiting = self.queue.iter().map(|(_, stanza)| {
                    let mut stanza = stanza.clone();
                    stanza.attrs.insert("offline", "1");
                    stanza
                });
                let mut out: Vec<Node> = waiting.collect();
                let count = NodeBuilder::new("offline").attr("count", out.len().to_string());
                out.insert(0, result(id, Vec::new()));
                out.push(NodeBuilder::new("ib").children([count.build()]).build());
                out
            }
            ("encrypt", "get") => {
                let error = NodeBuilder::new("error").attr("code", "406").attr("text", "no");
                let iq = NodeBuilder::new("iq").attr("from", server()).attr("id", id);
                vec![iq.attr("type", "error").children([error.build()]).build()]
            }
            _ => vec![result(id, Vec::new())],
        }
    }
}

/// The bot's keys, as it gives them to the server.
fn bundle(iq: &Node) -> Bundle {
    let signed = iq.get_optional_child("skey").unwrap();
    let one_time = iq.get_optional_child("list").unwrap().get_children_by_tag("key");
    Bundle {
        registration: number(&bytes(iq, "registration")),
        identity: bytes(iq, "identity"),
        signed: (number(&bytes(signed, "id")), bytes(signed, "value"), bytes(signed, "signature")),
        one_time: one_time.map(|key| (number(&bytes(key, "id")), bytes(key, "value"))).collect(),
    }
}

/// The devices of whoever is asked for: one each.
fn devices(iq: &Node) -> Node {
    let asked = iq.get_optional_child("usync").and_then(|node| node.get_optional_child("list"));
    let users = asked.into_iter().flat_map(|list| list.get_children_by_tag("user")).map(|user| {
        let device = NodeBuilder::new("device").attr("id", 0_u32).build();
        let list = NodeBuilder::new("device-list").children([device]).build();
        let devices = NodeBuilder::new("devices").children([list]).build();
        NodeBuilder::new("user").attr("jid", text(user, "jid")).children([devices]).build()
    });
    let list = NodeBuilder::new("list").children(users.collect::<Vec<_>>()).build();
    NodeBuilder::new("usync").children([list]).build()
}

async fn serve(stream: TcpStream, state: Arc<Mutex<State>>, own: Arc<KeyPair>) -> Option<()> {
    let mut wire = Wire::accept(stream).await?;
    let (read, write, payload, login) = wire.shake(&own).await?;
    let (out, mut outgoing) = mpsc::unbounded_channel();
    let number = {
        let mut state = state.lock();
        state.made += 1;
        let number = state.made;
        let reference = format!("2@ref{number}");
        state.connections.insert(number, Connection { out, reference, logged_in: false });
        state.admit(number, &payload, login);
        number
    };
    let _gone = Gone { state: state.clone(), number };
    let (mut sent, mut received) = (0, 0);
    loop {
        tokio::select! {
            frame = wire.next() => {
                let mut frame = frame?;
                read.decrypt_in_place_with_counter(received, &mut frame).ok()?;
                received += 1;
                let plain = unpack(&frame).ok()?;
                let node = unmarshal_ref(&plain).ok()?.to_owned();
                let state = &mut *state.lock();
                let out = state.connections.get(&number)?.out.clone();
                for answer in state.take(&node) {
                    let _ = out.send(Out::Node(answer));
                }
            }
            next = outgoing.recv() => match next? {
                Out::End => return wire.close().await,
                Out::Node(node) => {
                    let sealed = write.encrypt_with_counter(sent, &marshal(&node).ok()?).ok()?;
                    sent += 1;
                    wire.send(&sealed).await?;
                }
            }
        }
    }
}

/// A connection that is over is none.
struct Gone {
    state: Arc<Mutex<State>>,
    number: u64,
}

impl Drop for Gone {
    fn drop(&mut self) {
        self.state.lock().connections.remove(&self.number);
    }
}
