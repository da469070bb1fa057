//! Listening: connect, resume or identify, journal, move on.
//!
//! Events are taken in the order of their numbers, those that gathered during one commit in the next
//! one. Heartbeats go on meanwhile, and name what is stored. What was read is never thrown away: before a
//! session is given up, all of it is taken.

use std::time::Duration;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Discord;
use super::event::Unpacked;
use super::interaction::{Asked, now_ms};
use super::pace::{Identified, Left, Seen};
use super::rest;
use super::session::{Dispatch, RESUMES_MAX, Session, State};
use super::socket::{Fault, Said, Socket};
use crate::provider::{BadItem, Batch, Closed, DeliverError, Link, Notice, ProviderError};

/// Between two connections, at first and at most.
const TROUBLE_WAIT: Duration = Duration::from_millis(250);
const TROUBLE_WAIT_MAX: Duration = Duration::from_secs(30);
/// After Discord said that this was too fast.
const SLOW_WAIT: Duration = Duration::from_secs(10);
/// A connection that lasted so long ended by no trouble of its own.
const LASTING: Duration = Duration::from_secs(60);
/// Events read ahead; and those of one commit.
const PENDING_MAX: usize = 1_024;
const BATCH_MAX: usize = 64;
/// How often it is asked again whether there is an identify left.
const BUDGET_WAIT_MAX: Duration = Duration::from_secs(60);
/// The row that says when a replica identified last, and how long it is of interest.
const IDENTIFIED: &str = "identified";
const IDENTIFIED_FOR: Duration = Duration::from_secs(24 * 3_600);
/// How long a stop waits for acknowledgements: after that they come too late anyway.
const TELLING_MAX: Duration = Duration::from_secs(3);

/// Why a connection is over.
enum End {
    /// It is made again, after this at least, and the session goes on.
    Again(String, Duration),
    /// The session does not go on.
    Lost(String),
    Closed(Closed),
    Failed(ProviderError),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Again(fault.to_string(), Duration::ZERO)
    }
}

type Taking<'a> = BoxFuture<'a, Result<Session, DeliverError>>;

/// When a heartbeat is due.
struct Beat {
    at: Instant,
    every: Duration,
    answered: bool,
    /// For a while since the last one nobody read what comes.
    blocked: bool,
}

impl Beat {
    fn new(every: Duration) -> Self {
        // Not all clients of a gateway that restarted are to beat at once.
        let at = Instant::now() + every.mul_f64(rand::random());
        Self { at, every, answered: true, blocked: false }
    }

    fn sent(&mut self) {
        self.at = Instant::now() + self.every;
        self.answered = false;
        self.blocked = false;
    }
}

pub(super) struct Gateway<'a> {
    discord: &'a Discord,
    link: Link,
    /// Acknowledgements on their way.
    telling: Mutex<JoinSet<()>>,
    seen: Mutex<Seen>,
}

impl<'a> Gateway<'a> {
    pub(super) fn new(discord: &'a Discord, link: Link) -> Self {
        Self { discord, link, telling: Mutex::default(), seen: Mutex::default() }
    }

    pub(super) async fn run(&self) -> Result<Closed, ProviderError> {
        tokio::select! {
            biased;
            () = self.link.closing() => {}
            closed = self.connections() => return closed,
        }
        // What is journaled is promised an answer, whoever gives it.
        let mut telling = std::mem::take(&mut *self.telling.lock());
        let told = async { while telling.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(TELLING_MAX, told).await;
        Ok(Closed::Asked)
    }

    /// One connection after another.
    async fn connections(&self) -> Result<Closed, ProviderError> {
        let stored = self.link.cursor(&self.discord.id).await;
        let stored = stored.map_err(|error| self.fault(error.to_string()))?;
        let mut state = State::new(stored, self.discord.intents);
        let mut trouble = TROUBLE_WAIT;
        loop {
            let end = self.connection(&mut state).await;
            self.connected(false);
            if state.greeted.take().is_some_and(|greeted| greeted.elapsed() >= LASTING) {
                trouble = TROUBLE_WAIT;
            }
            let provider = &self.discord.id;
            let wait = match self.settled(end, &mut state).await {
                End::Again(why, wait) => {
                    tracing::info!(%provider, %why, "connecting to the gateway anew");
                    wait
                }
                End::Lost(why) => {
                    if state.lost() {
                        let why = "the session is over, what was said meanwhile is lost: "
                            .to_owned()
                            + &why;
                        self.bad("session", &why);
                    }
                    // Each moment more is lost, too; how often it identifies is paced elsewhere.
                    trouble = TROUBLE_WAIT;
                    Duration::ZERO
                }
                End::Closed(closed) => return Ok(closed),
                End::Failed(error) => return Err(error),
            };
            tokio::time::sleep(wait.max(trouble)).await;
            trouble = (trouble * 2).min(TROUBLE_WAIT_MAX);
        }
    }

    /// What a connection's end comes to. Where no session repeats what was read, that is taken now.
    async fn settled(&self, end: End, state: &mut State) -> End {
        let end = match end {
            End::Again(why, _) if state.is_hopeless() => {
                End::Lost(format!("{why}, after {RESUMES_MAX} RESUMEs"))
            }
            end => end,
        };
        let over = match &end {
            End::Lost(_) => true,
            // READY may be among it: that is a session to resume.
            End::Again(..) => state.session.is_none(),
            End::Closed(_) | End::Failed(_) => false,
        };
        while over && let Some(taking) = self.next(state) {
            match taking.await {
                Ok(session) => state.stored(&session),
                Err(error) => return self.refused(error),
            }
        }
        end
    }

    async fn connection(&self, state: &mut State) -> End {
        match self.enter(state).await {
            Ok((mut socket, every)) => {
                let end = self.attend(&mut socket, every, state).await;
                socket.close().await;
                end
            }
            Err(end) => end,
        }
    }

    /// Connects, and says which session this is.
    async fn enter(&self, state: &mut State) -> Result<(Socket, Duration), End> {
        let url = match state.resumable() {
            Some((_, _, url)) if !state.astray => url.to_owned(),
            Some(_) => self.address(&self.ask().await?)?,
            None => self.leave_to_identify().await?,
        };
        let greeted = self.greeted(&url, state.session.is_some()).await;
        // The next try asks where the gateway is.
        state.astray = greeted.is_err() && !state.astray;
        let (mut socket, every) = greeted?;
        state.greeted = Some(Instant::now());
        let Discord { token, intents, .. } = self.discord;
        let mut resumes = false;
        let first = match state.resumable() {
            Some((id, seq, _)) => {
                resumes = true;
                json!({ "op": 6, "d": { "token": &**token, "session_id": id, "seq": seq } })
            }
            None => json!({ "op": 2, "d": {
                "token": &**token,
                "intents": intents,
                "properties": {
                    "os": std::env::consts::OS, "browser": "botmesh", "device": "botmesh",
                },
            } }),
        };
        state.resumes += u32::from(resumes);
        socket.send(&first).await?;
        Ok((socket, every))
    }

    /// Connects and is greeted; how often a heartbeat is wanted.
    async fn greeted(&self, url: &str, resumes: bool) -> Result<(Socket, Duration), End> {
        let plain = self.discord.base_url.starts_with("http://");
        let mut socket = Socket::open(url, plain).await?;
        let hello = match socket.first().await? {
            Said::Payload(payload) if payload["op"] == 10 => payload,
            Said::Closed(code) => return Err(closed(code, resumes)),
            _ => return Err(again("the gateway did not begin with HELLO")),
        };
        let every = hello.pointer("/d/heartbeat_interval").and_then(Value::as_u64);
        let every = every.filter(|ms| (10..=600_000).contains(ms)).map(Duration::from_millis);
        let every = every.ok_or_else(|| again("HELLO names no interval that makes sense"))?;
        Ok((socket, every))
    }

    /// Takes what comes until the connection is over.
    async fn attend(&self, socket: &mut Socket, every: Duration, state: &mut State) -> End {
        let resumes = state.session.is_some();
        let mut beat = Beat::new(every);
        let mut taking: Option<Taking<'_>> = None;
        let end = loop {
            if taking.is_none() {
                taking = self.next(state);
            }
            beat.blocked |= state.pending.len() >= PENDING_MAX;
            let said = tokio::select! {
                biased;
                () = tokio::time::sleep_until(beat.at) => {
                    match self.beat(socket, &mut beat, state).await {
                        Ok(()) => continue,
                        Err(end) => break end,
                    }
                }
                taken = ended(&mut taking) => {
                    taking = None;
                    match self.taken(taken, state) {
                        Ok(()) => continue,
                        Err(end) => break end,
                    }
                }
                said = socket.next(), if state.pending.len() < PENDING_MAX => said,
            };
            let payload = match said {
                Ok(Said::Payload(payload)) => payload,
                Ok(Said::Foreign) => {
                    self.bad("frame", "it is no JSON");
                    continue;
                }
                Ok(Said::Closed(code)) => break closed(code, resumes),
                Err(fault) => break fault.into(),
            };
            match payload["op"].as_u64() {
                Some(0) => {
                    if let Err(end) = self.dispatched(payload, state) {
                        break end;
                    }
                }
                // It may ask for one out of turn.
                Some(1) => {
                    if let Err(fault) = socket.send(&heartbeat(state)).await {
                        break fault.into();
                    }
                }
                Some(7) => break again("the gateway asked for it"),
                Some(9) if payload["d"] == true => break again("the session was not ready"),
                Some(9) => break End::Lost("Discord knows it no longer".to_owned()),
                Some(11) => beat.answered = true,
                _ => {}
            }
        };
        // What is at hand is taken to its end: it would only come again.
        match taking {
            Some(taking) => match self.taken(taking.await, state) {
                Ok(()) => end,
                Err(refused) => refused,
            },
            None => end,
        }
    }

    async fn beat(
        &self,
        socket: &mut Socket,
        beat: &mut Beat,
        state: &mut State,
    ) -> Result<(), End> {
        // Nobody was heard where nobody listened.
        if !beat.answered && !beat.blocked {
            return Err(again("a heartbeat was not answered"));
        }
        socket.send(&heartbeat(state)).await?;
        beat.sent();
        state.due = state.is_ahead();
        Ok(())
    }

    fn dispatched(&self, mut payload: Value, state: &mut State) -> Result<(), End> {
        // Whatever it is, the session was let in.
        state.resumes = 0;
        let Some(seq) = payload["s"].as_u64() else {
            self.bad("event", "it has no number");
            return Ok(());
        };
        let kind = payload["t"].as_str().unwrap_or("event without name").to_owned();
        let data = payload["d"].take();
        let begun = match kind.as_str() {
            "READY" => Session::of(&data, seq, self.discord.intents),
            "RESUMED" => {
                self.connected(true);
                None
            }
            _ => None,
        };
        state.pending.push_back(match begun {
            Some(session) => Dispatch::Ready(session),
            None if kind == "READY" && state.session.is_none() => {
                return Err(again("READY names no session"));
            }
            None => Dispatch::Event { seq, kind, data },
        });
        Ok(())
    }

    /// Begins to take what is pending, where that needs a commit.
    fn next<'s>(&'s self, state: &mut State) -> Option<Taking<'s>> {
        let mut unpacked = Unpacked::default();
        while unpacked.batch.messages.len() < BATCH_MAX {
            match state.pending.pop_front() {
                Some(Dispatch::Ready(session)) => {
                    state.session = Some(session);
                    state.due = true;
                }
                Some(Dispatch::Event { seq, kind, data }) => {
                    // None is dispatched before READY.
                    if !state.session.as_mut().is_some_and(|session| session.pass(seq)) {
                        continue;
                    }
                    if kind != "RESUMED" {
                        let at = format!("event {seq}");
                        self.discord.unpack(&kind, &data, &at, &mut unpacked);
                    }
                }
                None => break,
            }
        }
        let Unpacked { batch, asked } = unpacked;
        let session = state.session.clone()?;
        if batch.messages.is_empty() && !state.due {
            batch.tell(&self.discord.id, &self.link);
            return None;
        }
        state.due = false;
        Some(Box::pin(self.take(batch, asked, session)))
    }

    /// Journals messages and moves past them, in one commit.
    async fn take(
        &self,
        batch: Batch,
        asked: Vec<Asked>,
        session: Session,
    ) -> Result<Session, DeliverError> {
        let Discord { id, .. } = self.discord;
        let cursor = session.encode();
        loop {
            let taken = async {
                // First: one that is noted and not journaled comes again and changes nothing.
                self.discord.note(&self.link, &asked).await?;
                batch.clone().take_past(id, &self.link, &cursor).await
            };
            match taken.await {
                Ok(_) => break,
                // Nothing was taken, and the events are at hand.
                Err(DeliverError::Unavailable { retry_after, .. }) => {
                    tokio::time::sleep(retry_after).await;
                }
                Err(error) => return Err(error),
            }
        }
        let mut telling = self.telling.lock();
        while telling.try_join_next().is_some() {}
        for asked in asked {
            telling.spawn(self.discord.clone().acknowledge(asked));
        }
        Ok(session)
    }

    fn taken(&self, taken: Result<Session, DeliverError>, state: &mut State) -> Result<(), End> {
        let session = taken.map_err(|error| self.refused(error))?;
        let begins = state.stored == 0;
        state.stored(&session);
        if begins {
            self.connected(true);
        }
        Ok(())
    }

    /// Waits until this bot may identify; where the gateway is.
    async fn leave_to_identify(&self) -> Result<String, End> {
        let Discord { id, identify_every, .. } = self.discord;
        loop {
            let answer = self.ask().await?;
            let left = Left::of(&answer).ok_or_else(|| again("no limit of sessions was told"))?;
            let last = self.link.kept(id, IDENTIFIED).await.map_err(|e| self.refused(e))?;
            let last = last.and_then(|row| serde_json::from_slice::<Identified>(&row).ok());
            let since = |last| self.seen.lock().since(last, now_ms(), std::time::Instant::now());
            let Some(wait) = left.wait(last.map(since), *identify_every) else {
                // A number always serialises.
                let row = serde_json::to_vec(&Identified { at_ms: now_ms() }).unwrap_or_default();
                let rows = vec![(IDENTIFIED.to_owned(), row)];
                let kept = self.link.keep(id, rows, IDENTIFIED_FOR).await;
                kept.map_err(|error| self.refused(error))?;
                return self.address(&answer);
            };
            tracing::info!(provider = %id, ?left, ?wait, "waiting until it may identify");
            tokio::time::sleep(wait.min(BUDGET_WAIT_MAX)).await;
        }
    }

    async fn ask(&self) -> Result<Value, End> {
        self.discord.gateway_bot().await.map_err(|fault| match fault {
            rest::Fault::Said { status: 401, .. } => End::Closed(Closed::Unlinked),
            rest::Fault::Wait(wait) => End::Again(fault.to_string(), wait),
            fault => End::Again(fault.to_string(), Duration::ZERO),
        })
    }

    fn address(&self, answer: &Value) -> Result<String, End> {
        let url = answer.get("url").and_then(Value::as_str).map(str::to_owned);
        url.ok_or_else(|| again("the API does not say where the gateway is"))
    }

    /// Tells of something that was left out.
    fn bad(&self, at: &str, why: &str) {
        let item = BadItem { at: at.to_owned(), why: why.to_owned() };
        self.link.notice(&self.discord.id, Notice::Bad(item));
    }

    fn connected(&self, connected: bool) {
        self.link.connected(&self.discord.id, connected);
    }

    fn refused(&self, error: DeliverError) -> End {
        match error {
            DeliverError::Deposed => End::Closed(Closed::ByPeer),
            DeliverError::Unavailable { why, retry_after } => End::Again(why, retry_after),
            error => End::Failed(self.fault(error.to_string())),
        }
    }

    fn fault(&self, why: String) -> ProviderError {
        ProviderError { provider: self.discord.id.clone(), why }
    }
}

/// Resolves when what is being taken was; never, where nothing is.
async fn ended(taking: &mut Option<Taking<'_>>) -> Result<Session, DeliverError> {
    match taking {
        Some(taking) => taking.await,
        None => std::future::pending().await,
    }
}

/// Tells up to where events need not be said again.
fn heartbeat(state: &State) -> Value {
    json!({ "op": 1, "d": Some(state.stored).filter(|stored| *stored > 0) })
}

fn again(why: &str) -> End {
    End::Again(why.to_owned(), Duration::ZERO)
}

/// What follows from the code under which the gateway closed a connection.
fn closed(code: Option<u16>, resumes: bool) -> End {
    let refused = |why| End::Closed(Closed::Refused(why));
    match code {
        // Another token may have begun the session; whether this one is good an identify tells.
        Some(4_004) if resumes => End::Lost("4004: it is not this token's".to_owned()),
        Some(4_004) => End::Closed(Closed::Unlinked),
        Some(code @ (4_003 | 4_007 | 4_009)) => End::Lost(format!("closed with {code}")),
        Some(4_008) => End::Again("closed with 4008: too fast".to_owned(), SLOW_WAIT),
        Some(4_010) => refused("4010: this is no shard of the bot"),
        Some(4_011) => refused("4011: the bot is in too many guilds for one connection"),
        Some(4_012) => refused("4012: this version of the gateway is no longer spoken"),
        Some(4_013) => refused("4013: there are no such intents; see Discord::intents"),
        Some(4_014) => refused(
            "4014: it may not have these intents; grant MESSAGE_CONTENT in Discord's developer \
             portal, or leave it out with Discord::intents",
        ),
        Some(code) => End::Again(format!("closed with {code}"), Duration::ZERO),
        None => again("the connection broke"),
    }
}
