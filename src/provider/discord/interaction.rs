//! Interactions: acknowledged once they are journaled, answered by the first reply.
//!
//! Whoever sends the reply needs the interaction's token, on whichever replica; and of several replies only
//! one becomes the answer. So an interaction is a row, written before the commit that journals it, and
//! which reply is its answer is written before that is sent: sent again, it is the same edit. A replica
//! knows those it took itself, and looks in the store only for those from before it was elected.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::Method;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::Notify;

use super::Discord;
use super::event::made_ms;
use super::rest::{Fault, PATIENCE, Route, content, send_error, sent_id};
use crate::provider::{DeliverError, Delivery, Link, SendError, SentId};

/// How long Discord takes answers for.
const ANSWERABLE: Duration = Duration::from_secs(15 * 60);
/// After this long Discord shows an interaction as failed.
const ACKNOWLEDGE_WITHIN: Duration = Duration::from_secs(3);
/// How long one try of that may take, and the pause before the next.
const ACKNOWLEDGE_TRY: Duration = Duration::from_secs(1);
const ACKNOWLEDGE_PAUSE: Duration = Duration::from_millis(200);
/// "Interaction has already been acknowledged": an earlier try arrived.
const ACKNOWLEDGED: u64 = 40_060;
/// How far this clock may be from Discord's.
const SKEW_MS: u64 = 120_000;
/// "An answer will come", and "understood".
const DEFERRED_ANSWER: u64 = 5;
const DEFERRED_UPDATE: u64 = 6;

/// An interaction, as it is stored. Not shown: who has the token may answer.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Asked {
    id: String,
    application: String,
    token: String,
    /// The first reply becomes its answer.
    answers: bool,
    /// The reply that does.
    answer: Option<String>,
}

impl Asked {
    pub(super) fn new(id: &str, application: &str, token: &str, answers: bool) -> Self {
        let (id, application, token) = (id.to_owned(), application.to_owned(), token.to_owned());
        Self { id, application, token, answers, answer: None }
    }

    fn row(&self) -> (String, Vec<u8>) {
        // Texts always serialise.
        (row_of(&self.id), serde_json::to_vec(self).unwrap_or_default())
    }
}

fn row_of(id: &str) -> String {
    format!("interaction:{id}")
}

/// Those this replica knows.
#[derive(Default)]
pub(super) struct Interactions {
    known: Mutex<Known>,
    /// One was acknowledged, or will not be.
    settled: Notify,
}

#[derive(Default)]
struct Known {
    /// With whether the acknowledgement is on its way.
    open: HashMap<String, (Asked, bool)>,
    /// What was taken before this is in the store alone.
    since_ms: u64,
}

impl Interactions {
    /// A run begins: what others took meanwhile is in the store.
    pub(super) fn begin(&self) {
        *self.known.lock() = Known { open: HashMap::new(), since_ms: now_ms() };
    }

    fn insert(&self, asked: &[Asked]) {
        let mut known = self.known.lock();
        let oldest = now_ms().saturating_sub(millis(ANSWERABLE) + SKEW_MS);
        known.open.retain(|id, _| made_ms(id).is_some_and(|made| made >= oldest));
        known.open.extend(asked.iter().map(|asked| (asked.id.clone(), (asked.clone(), true))));
    }

    fn settle(&self, id: &str) {
        if let Some((_, pending)) = self.known.lock().open.get_mut(id) {
            *pending = false;
        }
        self.settled.notify_waiters();
    }

    /// One that this replica took, once it is acknowledged.
    async fn find(&self, id: &str) -> Option<Asked> {
        let found = async {
            loop {
                let settled = self.settled.notified();
                tokio::pin!(settled);
                settled.as_mut().enable();
                match self.known.lock().open.get(id) {
                    Some((asked, false)) => return Some(asked.clone()),
                    Some((_, true)) => {}
                    None => return None,
                }
                settled.await;
            }
        };
        // What was not acknowledged by then never will be: there is nothing to answer.
        tokio::time::timeout(ACKNOWLEDGE_WITHIN, found).await.unwrap_or_default()
    }

    /// Whether another replica may have taken it.
    fn is_from_before(&self, made_ms: u64) -> bool {
        made_ms < self.known.lock().since_ms.saturating_add(SKEW_MS)
    }

    fn update(&self, asked: &Asked) {
        self.known.lock().open.insert(asked.id.clone(), (asked.clone(), false));
    }
}

impl Discord {
    /// Notes interactions before they are journaled: one that comes again changes nothing.
    pub(super) async fn note(&self, link: &Link, asked: &[Asked]) -> Result<(), DeliverError> {
        let rows: Vec<_> = asked.iter().filter(|one| one.answers).map(Asked::row).collect();
        if !rows.is_empty() {
            link.keep(&self.id, rows, ANSWERABLE).await?;
        }
        self.interactions.insert(asked);
        Ok(())
    }

    /// Tells Discord that the bot has it, again where no answer comes: told twice, it is told once.
    pub(super) async fn acknowledge(self, asked: Asked) {
        let kind = if asked.answers { DEFERRED_ANSWER } else { DEFERRED_UPDATE };
        let path = format!("/interactions/{}/{}/callback", asked.id, asked.token);
        let route = Route { by: &asked.token, shared: false };
        let body = json!({ "type": kind });
        let telling = async {
            loop {
                let told = self.call(Method::POST, &path, route, Some(&body), ACKNOWLEDGE_TRY);
                match told.await {
                    Ok(_) | Err(Fault::Said { code: ACKNOWLEDGED, .. }) => return,
                    Err(Fault::Wait(wait)) => tokio::time::sleep(wait).await,
                    Err(
                        Fault::Outward(_) | Fault::Foreign(_) | Fault::Said { status: 500.., .. },
                    ) => tokio::time::sleep(ACKNOWLEDGE_PAUSE).await,
                    Err(fault) => {
                        return tracing::debug!(id = %asked.id, %fault, "not acknowledged");
                    }
                }
            }
        };
        if tokio::time::timeout(ACKNOWLEDGE_WITHIN, telling).await.is_err() {
            tracing::warn!(id = %asked.id, "an interaction was not acknowledged in time");
        }
        self.interactions.settle(&asked.id);
    }

    /// Makes a reply the answer of the interaction that caused it; `None` where it is to be a message.
    pub(super) async fn answer(&self, delivery: &Delivery) -> Result<Option<SentId>, SendError> {
        let Some(mut asked) = self.answerable(&delivery.in_reply_to).await? else {
            return Ok(None);
        };
        match &asked.answer {
            Some(answer) if *answer == delivery.id => {}
            Some(_) => return Ok(None),
            None => {
                asked.answer = Some(delivery.id.clone());
                self.write(&asked).await?;
            }
        }
        let path = format!("/webhooks/{}/{}/messages/@original", asked.application, asked.token);
        let route = Route { by: &asked.token, shared: false };
        let body = content(&delivery.text);
        match self.call(Method::PATCH, &path, route, Some(&body), PATIENCE).await {
            Ok(message) => sent_id(&message).map(Some),
            // Never acknowledged, taken away by its user, or too old.
            Err(Fault::Said { status: 401 | 403 | 404, code, said }) => {
                tracing::debug!(id = %asked.id, code, said, "it takes no answer; sending a message");
                self.interactions.update(&Asked { answers: false, ..asked });
                Ok(None)
            }
            Err(fault) => Err(send_error(fault)),
        }
    }

    /// The interaction of that id, where its answer is still to be given.
    async fn answerable(&self, id: &str) -> Result<Option<Asked>, SendError> {
        let Some(made) = made_ms(id) else { return Ok(None) };
        if now_ms().saturating_sub(made) > millis(ANSWERABLE) {
            return Ok(None);
        }
        let found = match self.interactions.find(id).await {
            None if self.interactions.is_from_before(made) => self.read(id).await?,
            found => found,
        };
        Ok(found.filter(|asked| asked.answers))
    }

    async fn read(&self, id: &str) -> Result<Option<Asked>, SendError> {
        let row = self.link()?.kept(&self.id, &row_of(id)).await.map_err(not_sent)?;
        let asked: Option<Asked> = row.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(asked) = &asked {
            self.interactions.update(asked);
        }
        Ok(asked)
    }

    async fn write(&self, asked: &Asked) -> Result<(), SendError> {
        let kept = self.link()?.keep(&self.id, vec![asked.row()], ANSWERABLE).await;
        kept.map_err(not_sent)?;
        self.interactions.update(asked);
        Ok(())
    }

    fn link(&self) -> Result<Link, SendError> {
        let link = self.link.lock().clone();
        link.ok_or_else(|| SendError::Transport { why: "the bot has not started".to_owned() })
    }
}

fn not_sent(error: DeliverError) -> SendError {
    SendError::Transport { why: error.to_string() }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn now_ms() -> u64 {
    millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}
