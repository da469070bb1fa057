//! Discord's gateway and REST API, as far as bots of this project meet them: over real sockets, close
//! codes, refusals and waits included. `twilight-gateway` and `twilight-http`, clients that know nothing of
//! this project, work against them unchanged (`d4_an_independent_client_talks_to_the_fake_discord`), so what
//! passes here is the protocol and not our idea of it.
//!
//! A session keeps what it dispatched; a connection that resumes it gets what is after the number it names, and
//! the one before it is closed, unless a test lets it live on. REST is beside it, in `discord_rest`.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::{SinkExt, StreamExt};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};
use tokio_tungstenite::tungstenite::{Message, protocol::CloseFrame};

/// The token the fake knows.
pub const TOKEN: &str = "NDI0Mg.test.token";
/// The bot's user, and its application.
pub const BOT: &str = "4242";
/// The intents that exist, and those that have to be granted.
const INTENTS: u64 = (1 << 26) - 1;
const MESSAGE_CONTENT: u64 = 1 << 15;
/// Payloads a client may send in a minute.
const PAYLOADS_MAX: usize = 120;

/// A message that was made.
#[derive(Clone, Debug, PartialEq)]
pub struct Sent {
    pub channel: String,
    pub text: String,
    pub id: String,
    /// What was posted.
    pub body: Value,
}

/// An interaction, and what became of it.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    pub token: String,
    pub channel: String,
    /// The type of its acknowledgement, and how long after it was made that came.
    pub acknowledged: Option<(u64, Duration)>,
    /// Every text its answer ever had.
    pub answers: Vec<String>,
    pub(super) at: Option<Instant>,
}

/// What the next call of REST meets.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub status: u16,
    pub body: Value,
    pub headers: Vec<(&'static str, String)>,
    /// What was asked is done all the same.
    pub done: bool,
}

/// How many identifies are left.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub total: u64,
    pub remaining: u64,
    pub reset_after_ms: u64,
}

enum Out {
    Payload(Value),
    Close(u16),
}

#[derive(Default)]
struct Session {
    dispatched: Vec<Value>,
    /// The connection that has it.
    socket: Option<u64>,
    /// Those that had it and are still open.
    old: Vec<u64>,
}

#[derive(Default)]
pub(super) struct Inner {
    made: u64,
    sessions: HashMap<String, Session>,
    sockets: HashMap<u64, mpsc::UnboundedSender<Out>>,
    budget: Option<Budget>,
    heartbeat_ms: u64,
    // What was asked, in order.
    identified: Vec<Instant>,
    resumed: Vec<u64>,
    heartbeats: Vec<Option<u64>>,
    asked_for_gateway: u64,
    // What is to go wrong.
    deaf: bool,
    keeps_old: bool,
    denied: u64,
    refusals: VecDeque<Result<bool, u16>>,
    // REST.
    pub(super) troubles: VecDeque<Trouble>,
    pub(super) limited: Option<(u32, Duration)>,
    pub(super) windows: HashMap<String, (Instant, u32)>,
    pub(super) calls: u64,
    pub(super) too_many: u64,
    pub(super) sent: Vec<Sent>,
    pub(super) closed_channels: HashSet<String>,
    pub(super) interactions: HashMap<String, Asked>,
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct DiscordApi {
    /// Of the REST API.
    pub url: String,
    /// Of the gateway.
    pub gateway: String,
    pub(super) inner: Arc<Mutex<Inner>>,
    _servers: Arc<JoinSet<()>>,
}

impl Inner {
    /// An id, which says when it was made.
    pub(super) fn id(&mut self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
        let since = u64::try_from(now).unwrap() - 1_420_070_400_000;
        self.made += 1;
        ((since << 22) | (self.made & 0x3f_ffff)).to_string()
    }

    pub(super) fn dispatch(&mut self, kind: &str, data: &Value) {
        let names: Vec<String> = self.sessions.keys().cloned().collect();
        for name in names {
            self.dispatch_in(&name, kind, data);
        }
    }

    fn dispatch_in(&mut self, session: &str, kind: &str, data: &Value) {
        let Some(session) = self.sessions.get_mut(session) else { return };
        let number = session.dispatched.len() + 1;
        let named = Some(kind).filter(|kind| !kind.is_empty());
        let payload = json!({ "op": 0, "t": named, "s": number, "d": data });
        session.dispatched.push(payload.clone());
        for socket in session.old.iter().chain(&session.socket) {
            if let Some(socket) = self.sockets.get(socket) {
                let _ = socket.send(Out::Payload(payload.clone()));
            }
        }
    }

    pub(super) fn budget(&mut self) -> Budget {
        self.asked_for_gateway += 1;
        self.left()
    }

    fn left(&self) -> Budget {
        let usual = Budget { total: 1_000, remaining: 1_000, reset_after_ms: 86_400_000 };
        self.budget.unwrap_or(usual)
    }
}

impl DiscordApi {
    pub async fn start() -> Self {
        let rest = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/api/v10", rest.local_addr().unwrap());
        let gateway = format!("ws://{}", socket.local_addr().unwrap());
        let inner = Arc::new(Mutex::new(Inner { heartbeat_ms: 41_250, ..Inner::default() }));
        let mut servers = JoinSet::new();
        let app = super::discord_rest::router(inner.clone(), gateway.clone());
        servers.spawn(async move { drop(axum::serve(rest, app).await) });
        let (shared, own) = (inner.clone(), gateway.clone());
        servers.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = socket.accept().await {
                connections.spawn(serve(shared.clone(), own.clone(), stream));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { url, gateway, inner, _servers: Arc::new(servers) }
    }

    /// Something happened; an empty kind is none.
    pub fn dispatch(&self, kind: &str, data: &Value) {
        self.inner.lock().dispatch(kind, data);
    }

    /// A user says something in private; the message's id. Their channel is theirs alone.
    pub fn says(&self, user: u64, text: &str) -> String {
        let mut inner = self.inner.lock();
        let id = inner.id();
        let said = message(&id, &channel(user), &user.to_string(), text);
        inner.dispatch("MESSAGE_CREATE", &said);
        id
    }

    /// A message of a user in a channel of a guild, with an id of its own.
    pub fn in_guild(&self, channel: &str, user: u64, text: &str) -> Value {
        let id = self.inner.lock().id();
        let mut said = message(&id, channel, &user.to_string(), text);
        said["guild_id"] = "99".into();
        said
    }

    /// A user does something that is to be acknowledged: a command (2), a button (3), a form (5).
    pub fn asks(&self, user: u64, kind: u64, data: &Value) -> String {
        let mut inner = self.inner.lock();
        let (id, token) = (inner.id(), format!("token-of-{}", inner.made));
        let asked = json!({
            "id": id, "application_id": BOT, "type": kind, "token": token, "version": 1,
            "channel_id": channel(user), "user": self::user(&user.to_string(), false),
            "locale": "de", "data": data, "attachment_size_limit": 10_485_760,
            "app_permissions": "0", "authorizing_integration_owners": { "1": user.to_string() },
            "context": 1, "entitlements": [],
        });
        let (channel, at) = (channel(user), Some(Instant::now()));
        let open = Asked { token, channel, at, ..Asked::default() };
        inner.interactions.insert(id.clone(), open);
        inner.dispatch("INTERACTION_CREATE", &asked);
        id
    }

    pub fn interaction(&self, id: &str) -> Asked {
        self.inner.lock().interactions[id].clone()
    }

    pub fn sent(&self) -> Vec<Sent> {
        self.inner.lock().sent.clone()
    }

    /// What was said to a user in private, or in a channel.
    pub fn sent_to(&self, place: &str) -> Vec<String> {
        let sent = self.sent().into_iter().filter(|sent| sent.channel == place);
        sent.map(|sent| sent.text).collect()
    }

    /// What the next calls meet.
    pub fn trouble(&self, status: u16, body: Value, headers: &[(&'static str, &str)], done: bool) {
        let headers = headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        self.inner.lock().troubles.push_back(Trouble { status, body, headers, done });
    }

    /// So many messages a channel within so long.
    pub fn limit(&self, most: u32, within: Duration) {
        self.inner.lock().limited = Some((most, within));
    }

    /// Calls made, and those of them that were too many.
    pub fn calls(&self) -> (u64, u64) {
        let inner = self.inner.lock();
        (inner.calls, inner.too_many)
    }

    pub fn close_channel(&self, channel: &str) {
        self.inner.lock().closed_channels.insert(channel.to_owned());
    }

    /// IDENTIFYs that began a session or were to.
    pub fn identified(&self) -> Vec<Instant> {
        self.inner.lock().identified.clone()
    }

    /// The numbers RESUMEs asked from.
    pub fn resumed(&self) -> Vec<u64> {
        self.inner.lock().resumed.clone()
    }

    pub fn heartbeats(&self) -> Vec<Option<u64>> {
        self.inner.lock().heartbeats.clone()
    }

    /// How often it was asked where the gateway is, and how many identifies are left.
    pub fn asked_for_gateway(&self) -> u64 {
        self.inner.lock().asked_for_gateway
    }

    /// Connections that have a session, and all that are open.
    pub fn connections(&self) -> (usize, usize) {
        let inner = self.inner.lock();
        let listening = inner.sessions.values().filter(|session| session.socket.is_some());
        (listening.count(), inner.sockets.len())
    }

    /// The number of the last event.
    pub fn last(&self) -> u64 {
        let inner = self.inner.lock();
        let last = inner.sessions.values().map(|session| session.dispatched.len()).max();
        last.unwrap_or_default().try_into().unwrap()
    }

    pub fn heartbeat_every(&self, ms: u64) {
        self.inner.lock().heartbeat_ms = ms;
    }

    /// Heartbeats are not answered while this is true.
    pub fn deaf(&self, deaf: bool) {
        self.inner.lock().deaf = deaf;
    }

    /// Connections whose session another one resumed stay open and go on hearing it.
    pub fn keep_old(&self) {
        self.inner.lock().keeps_old = true;
    }

    /// Only connections whose session another one resumed hear this.
    pub fn tell_old(&self, number: u64, kind: &str, data: &Value) {
        let inner = self.inner.lock();
        for socket in inner.sessions.values().flat_map(|session| &session.old) {
            let payload = json!({ "op": 0, "t": kind, "s": number, "d": data });
            let _ = inner.sockets[socket].send(Out::Payload(payload));
        }
    }

    pub fn set_budget(&self, budget: Budget) {
        self.inner.lock().budget = Some(budget);
    }

    /// These intents are not granted.
    pub fn deny_content(&self) {
        self.inner.lock().denied = MESSAGE_CONTENT;
    }

    /// The next IDENTIFY or RESUME is answered so: INVALID SESSION, which may be resumed or not, or
    /// a close.
    pub fn refuse_next(&self, with: Result<bool, u16>) {
        self.inner.lock().refusals.push_back(with);
    }

    /// Every session is forgotten, as after a long silence.
    pub fn forget_sessions(&self) {
        self.inner.lock().sessions.clear();
    }

    /// Sends this to every connection (a text as it is), or closes it.
    pub fn to_all(&self, what: &Result<Value, u16>) {
        for socket in self.inner.lock().sockets.values() {
            let _ = socket.send(match what {
                Ok(payload) => Out::Payload(payload.clone()),
                Err(code) => Out::Close(*code),
            });
        }
    }
}

/// The private channel of a user.
pub fn channel(user: u64) -> String {
    (10_000 + user).to_string()
}

pub fn user(id: &str, bot: bool) -> Value {
    json!({
        "id": id, "username": format!("user{id}"), "discriminator": "0", "avatar": null,
        "global_name": "Ann", "bot": bot,
    })
}

pub fn message(id: &str, channel: &str, author: &str, text: &str) -> Value {
    json!({
        "id": id, "channel_id": channel, "author": user(author, author == BOT), "content": text,
        "type": 0, "timestamp": "2026-01-01T00:00:00.000000+00:00", "edited_timestamp": null,
        "tts": false, "mention_everyone": false, "mentions": [], "mention_roles": [],
        "attachments": [], "embeds": [], "pinned": false,
    })
}

/// A connection's own number, and what goes with it when it ends.
struct Open {
    inner: Arc<Mutex<Inner>>,
    number: u64,
    session: Option<String>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        inner.sockets.remove(&self.number);
        for session in inner.sessions.values_mut() {
            session.socket.take_if(|socket| *socket == self.number);
            session.old.retain(|socket| *socket != self.number);
        }
    }
}

async fn serve(inner: Arc<Mutex<Inner>>, own: String, stream: TcpStream) {
    let mut query = String::new();
    // The type of its error is the library's.
    #[allow(clippy::result_large_err)]
    let noted = |request: &Request, response: Response| {
        query = request.uri().query().unwrap_or_default().to_owned();
        Ok(response)
    };
    let Ok(mut socket) = tokio_tungstenite::accept_hdr_async(stream, noted).await else { return };
    let (sender, mut out) = mpsc::unbounded_channel();
    let (mut open, hello) = {
        let mut locked = inner.lock();
        locked.made += 1;
        let number = locked.made;
        locked.sockets.insert(number, sender.clone());
        let hello = json!({ "op": 10, "d": { "heartbeat_interval": locked.heartbeat_ms } });
        (Open { inner: inner.clone(), number, session: None }, hello)
    };
    let _ = sender.send(match query.contains("v=10") && query.contains("encoding=json") {
        true => Out::Payload(hello),
        false => Out::Close(4_012),
    });
    let mut heard = VecDeque::new();
    loop {
        let said = tokio::select! {
            out = out.recv() => {
                let sent = match out {
                    Some(Out::Payload(Value::String(text))) => socket.send(Message::text(text)).await,
                    Some(Out::Payload(payload)) => socket.send(Message::text(payload.to_string())).await,
                    Some(Out::Close(code)) => {
                        let frame = CloseFrame { code: code.into(), reason: "".into() };
                        // What is left is the client's to close.
                        drop(open);
                        let _ = socket.close(Some(frame)).await;
                        while let Some(Ok(_)) = socket.next().await {}
                        return;
                    }
                    None => return,
                };
                if sent.is_err() {
                    return;
                }
                continue;
            }
            said = socket.next() => said,
        };
        let text = match said {
            Some(Ok(Message::Text(text))) => text,
            Some(Ok(Message::Close(frame))) => {
                // These end the session, too.
                if frame.is_some_and(|frame| matches!(u16::from(frame.code), 1_000 | 1_001))
                    && let Some(session) = &open.session
                {
                    inner.lock().sessions.remove(session);
                }
                continue;
            }
            Some(Ok(_)) => continue,
            Some(Err(_)) | None => return,
        };
        heard.push_back(Instant::now());
        heard.retain(|at| at.elapsed() < Duration::from_secs(60));
        let done = match serde_json::from_str::<Value>(&text) {
            _ if heard.len() > PAYLOADS_MAX => Err(4_008),
            Ok(payload) if text.len() <= 4_096 => take(&mut open, &own, &payload),
            _ => Err(4_002),
        };
        if let Err(code) = done {
            let _ = sender.send(Out::Close(code));
        }
    }
}

/// Does what a client asks; the code it is shut out with.
fn take(open: &mut Open, own: &str, payload: &Value) -> Result<(), u16> {
    let inner = open.inner.clone();
    let mut inner = inner.lock();
    let answer = |inner: &Inner, payload: Value| {
        let _ = inner.sockets[&open.number].send(Out::Payload(payload));
    };
    let invalid = |inner: &Inner, resumable: bool| {
        answer(inner, json!({ "op": 9, "d": resumable }));
        Ok(())
    };
    let data = &payload["d"];
    let known =
        data["token"].as_str().is_some_and(|token| token.trim_start_matches("Bot ") == TOKEN);
    match payload["op"].as_u64() {
        Some(1) => {
            inner.heartbeats.push(data.as_u64());
            if !inner.deaf {
                answer(&inner, json!({ "op": 11 }));
            }
            return Ok(());
        }
        Some(2 | 6) if open.session.is_some() => return Err(4_005),
        Some(2 | 6) if !known => return Err(4_004),
        Some(2) => {
            let intents = data["intents"].as_u64().ok_or(4_013_u16)?;
            let budget = inner.left();
            inner.identified.push(Instant::now());
            // Beyond the limit the token is another.
            let remaining = budget.remaining.checked_sub(1).ok_or(4_004_u16)?;
            inner.budget = Some(Budget { remaining, ..budget });
            if intents & !INTENTS != 0 || !data["properties"].is_object() {
                return Err(4_013);
            }
            if intents & inner.denied != 0 {
                return Err(4_014);
            }
        }
        Some(6) => inner.resumed.push(data["seq"].as_u64().ok_or(4_007_u16)?),
        _ if open.session.is_none() => return Err(4_003),
        Some(3 | 4 | 8) => return Ok(()),
        _ => return Err(4_001),
    }
    match inner.refusals.pop_front() {
        Some(Ok(resumable)) => return invalid(&inner, resumable),
        Some(Err(code)) => return Err(code),
        None => {}
    }
    let name = match payload["op"] == 2 {
        true => {
            let name = format!("session-{}", open.number);
            let session = Session { socket: Some(open.number), ..Session::default() };
            inner.sessions.insert(name.clone(), session);
            let ready = json!({
                "v": 10, "session_id": name, "resume_gateway_url": own, "guilds": [],
                "application": { "id": BOT, "flags": 0 },
                "user": {
                    "id": BOT, "username": "bot", "discriminator": "0", "avatar": null, "bot": true,
                    "mfa_enabled": false, "verified": true, "email": null, "flags": 0,
                },
            });
            inner.dispatch_in(&name, "READY", &ready);
            name
        }
        false => {
            let name = data["session_id"].as_str().unwrap_or_default().to_owned();
            let keeps_old = inner.keeps_old;
            let Some(session) = inner.sessions.get_mut(&name) else {
                return invalid(&inner, false);
            };
            let seq = usize::try_from(data["seq"].as_u64().unwrap_or_default()).unwrap();
            let missed = session.dispatched.get(seq..).ok_or(4_007_u16)?.to_vec();
            if let Some(old) = session.socket.replace(open.number) {
                if keeps_old {
                    session.old.push(old);
                } else if let Some(old) = inner.sockets.get(&old) {
                    let _ = old.send(Out::Close(4_000));
                }
            }
            missed.into_iter().for_each(|payload| answer(&inner, payload));
            inner.dispatch_in(&name, "RESUMED", &json!({}));
            name
        }
    };
    open.session = Some(name);
    Ok(())
}
