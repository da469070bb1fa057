//! One node of a measurement's group: `botmesh run` with the demo bot, and on demand an exclusive
//! transport or handlers that sleep.
//!
//! The transport is the smallest one that has everything a failover needs: it is polled by the replica
//! that leads it, keeps a cursor, and sends what its chats are answered. The far end is the
//! measurement's own sink.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::args::MemberArgs;
use super::sink::{Poll, Updates};
use crate::bot::{BotBuilder, Ctx, Route};
use crate::cli::failure::Failure;
use crate::cli::{demo, run};
use crate::config::Settings;
use crate::provider::webhook::WebhookProvider;
use crate::provider::{
    Capabilities, Closed, DeliverError, Delivery, Link, Provider, ProviderError, SendError, SentId,
    Webhook,
};
use crate::types::{ChatKey, Message};

/// The transport's id.
pub(super) const TRANSPORT: &str = "poll";
/// What a poll may take; the far end answers within a second.
const ANSWER: Duration = Duration::from_secs(10);
/// Between two polls after one that failed.
const AGAIN: Duration = Duration::from_millis(50);

pub(super) fn run(settings: &Settings, args: &MemberArgs) -> Result<(), Failure> {
    let poller = match (&args.poll, &settings.reply_url) {
        (Some(poll), Some(reply)) => Some(Poller::new(poll, reply)?),
        _ => None,
    };
    let sleep = args.handlers_sleep;
    run::run(settings, move |bot| {
        let bot = match sleep {
            None => demo::flows(bot),
            Some(sleep) => sleeping(bot, sleep),
        };
        match poller {
            Some(poller) => bot.provider(poller),
            None => bot,
        }
    })
}

fn sleeping(bot: BotBuilder, sleep: Duration) -> BotBuilder {
    bot.on(Route::Any, async move |ctx: &mut Ctx| {
        tokio::time::sleep(sleep).await;
        Ok(ctx.reply("well rested").await?)
    })
}

struct Poller {
    url: String,
    http: reqwest::Client,
    /// Its replies go where the webhook's go, in the same form.
    replies: WebhookProvider,
}

impl Poller {
    fn new(url: &str, replies: &str) -> Result<Self, Failure> {
        let replies = WebhookProvider::new(TRANSPORT).reply_url(replies);
        let replies = replies.map_err(|error| Failure::Usage(error.to_string()))?;
        let http = reqwest::Client::builder().no_proxy().build();
        let http =
            http.map_err(|error| Failure::Other(format!("cannot make a client: {error}")))?;
        Ok(Self { url: url.to_owned(), http, replies })
    }

    async fn ask(&self, poll: &Poll) -> reqwest::Result<Updates> {
        let Poll { offset, wait } = poll;
        let url = format!("{}?offset={offset}&wait={wait}", self.url);
        let answer = self.http.get(url).timeout(ANSWER).send().await?;
        answer.error_for_status()?.json().await
    }

    async fn poll(&self, link: &Link) -> Result<Closed, ProviderError> {
        let fault = |why: String| ProviderError { provider: TRANSPORT.to_owned(), why };
        let stored = link.cursor(TRANSPORT).await.map_err(|error| fault(error.to_string()))?;
        let stored = stored.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        // Until it was answered once nobody knows whether it is let in: the first one does not wait.
        let mut poll = Poll { offset: stored.unwrap_or(0), wait: false };
        loop {
            let updates = match self.ask(&poll).await {
                Ok(answer) => answer.updates,
                Err(error) => {
                    tracing::debug!(%error, "a poll failed");
                    link.connected(TRANSPORT, false);
                    poll.wait = false;
                    tokio::time::sleep(AGAIN).await;
                    continue;
                }
            };
            link.connected(TRANSPORT, true);
            poll.wait = true;
            let next = poll.offset + updates.len();
            let message = |update: super::sink::Update| {
                Message::text(update.id, ChatKey::new(TRANSPORT, update.chat), "hello")
            };
            let messages: Vec<Message> = updates.into_iter().map(message).collect();
            if messages.is_empty() {
                continue;
            }
            match link.deliver_past(TRANSPORT, messages, next.to_string().into_bytes()).await {
                Ok(_) => poll.offset = next,
                // Not taken, so the same comes again.
                Err(DeliverError::Unavailable { retry_after, .. }) => {
                    tokio::time::sleep(retry_after.min(AGAIN)).await;
                }
                Err(DeliverError::Deposed) => return Ok(Closed::ByPeer),
                Err(error) => return Err(fault(error.to_string())),
            }
        }
    }
}

#[async_trait]
impl Provider for Poller {
    fn id(&self) -> &str {
        TRANSPORT
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { exclusive_session: true, listed: 0, sends: true }
    }

    async fn run(&self, link: Link) -> Result<Closed, ProviderError> {
        tokio::select! {
            biased;
            () = link.closing() => Ok(Closed::Asked),
            closed = self.poll(&link) => closed,
        }
    }

    async fn send(&self, delivery: &Delivery) -> Result<SentId, SendError> {
        self.replies.send(delivery).await
    }

    fn webhook(&self) -> Option<Arc<dyn Webhook>> {
        None
    }
}
