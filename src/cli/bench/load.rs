//! Users at the webhooks of a group, so many messages a second.
//!
//! A user is one chat. It posts a message, again wherever a node takes it until one has, and the next
//! one at its time, whether or not that was answered by a reply: that is the bot's affair, and the
//! ledger's.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval_at};

use super::sink::Sink;
use crate::cli::failure::Failure;
use crate::config::HostPort;

/// How long a message may take until somebody has it.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long one node may take with it; it may be gone without a word.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Between two rounds.
const AGAIN: Duration = Duration::from_millis(1);

/// How the messages of a chat go to the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Spread {
    /// There are none.
    None,
    /// All to one node, while that takes them.
    Affine,
    /// To all nodes in turn.
    RoundRobin,
}

impl Spread {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Affine => "affine",
            Self::RoundRobin => "round-robin",
        }
    }
}

/// The webhooks of a group.
#[derive(Clone, Debug)]
pub(super) struct Doors {
    http: reqwest::Client,
    urls: Vec<String>,
    attempt: Duration,
}

impl Doors {
    pub(super) fn new(public: &[HostPort]) -> Result<Self, Failure> {
        let http = reqwest::Client::builder().no_proxy().build();
        let http =
            http.map_err(|error| Failure::Other(format!("cannot make an HTTP client: {error}")))?;
        let urls = public.iter().map(|address| format!("http://{address}/webhooks/demo")).collect();
        Ok(Self { http, urls, attempt: ATTEMPT })
    }

    /// These, where one node takes no longer.
    pub(super) fn impatient(mut self, attempt: Duration) -> Self {
        self.attempt = attempt;
        self
    }

    /// Gives a message to the first of these nodes that takes it, again and again; how long that one
    /// took, and all of it.
    pub(super) async fn post(
        &self,
        nodes: &[usize],
        id: &str,
        chat: &str,
    ) -> Result<Duration, Failure> {
        let body = serde_json::json!({ "id": id, "chat": chat, "text": "hello" });
        let began = Instant::now();
        let mut why = "nobody was asked".to_owned();
        while began.elapsed() < PATIENCE {
            for &node in nodes {
                let asked = self.http.post(&self.urls[node]).json(&body).timeout(self.attempt);
                why = match asked.send().await {
                    Ok(answer) if answer.status().is_success() => return Ok(began.elapsed()),
                    Ok(answer) => format!("n{} answers {}", node + 1, answer.status()),
                    Err(error) => format!("n{}: {}", node + 1, error.without_url()),
                };
            }
            tokio::time::sleep(AGAIN).await;
        }
        Err(Failure::Other(format!("nobody takes a message: {why}")))
    }
}

/// What is posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) spread: Spread,
    /// Messages a second, of all chats together.
    pub(super) rate: u32,
    pub(super) chats: u32,
}

/// Users at work. Dropping it ends them where they are.
pub(super) struct Load {
    stop: watch::Sender<bool>,
    users: JoinSet<Result<Vec<f64>, Failure>>,
}

impl Load {
    pub(super) fn start(doors: &Doors, sink: &Sink, plan: Plan) -> Self {
        let (stop, mut users) = (watch::Sender::new(false), JoinSet::new());
        let chats = if plan.spread == Spread::None { 0 } else { plan.chats };
        for chat in 0..chats {
            let user = User { doors: doors.clone(), sink: sink.clone(), chat, plan };
            users.spawn(user.talk(stop.subscribe()));
        }
        Self { stop, users }
    }

    /// Lets them end the message they are at; how long the webhook took to answer each, in ms.
    pub(super) async fn stop(mut self) -> Result<Vec<f64>, Failure> {
        self.stop.send_replace(true);
        let mut answers = Vec::new();
        while let Some(ended) = self.users.join_next().await {
            let ended = ended.map_err(|error| Failure::Other(format!("a user: {error}")))?;
            answers.extend(ended?);
        }
        Ok(answers)
    }
}

struct User {
    doors: Doors,
    sink: Sink,
    chat: u32,
    plan: Plan,
}

impl User {
    async fn talk(self, mut stop: watch::Receiver<bool>) -> Result<Vec<f64>, Failure> {
        let Plan { rate, chats, spread } = self.plan;
        let apart = Duration::from_secs(1) / rate;
        let first = tokio::time::Instant::now() + apart * self.chat;
        let mut due = interval_at(first, apart * chats);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut answers, nodes) = (Vec::new(), self.doors.urls.len());
        for number in 1_usize.. {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                _ = due.tick() => {}
            }
            let turn = if spread == Spread::RoundRobin { number } else { 0 };
            let first = self.chat as usize + turn;
            let order: Vec<usize> = (0..nodes).map(|next| (first + next) % nodes).collect();
            let (id, chat) = (format!("l{}-{number}", self.chat), format!("l{}", self.chat));
            let took = self.doors.post(&order, &id, &chat).await?;
            self.sink.ledger(|ledger| ledger.taken(&id));
            answers.push(took.as_secs_f64() * 1_000.0);
        }
        Ok(answers)
    }
}
