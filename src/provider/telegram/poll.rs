//! Long polling: ask, journal, ask on from there.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::api::Fault;
use super::{Telegram, update};
use crate::provider::{Batch, Closed, DeliverError, Link, ProviderError};

/// Between two questions while another poller is at work: its end is met within a second (case w9).
const CONFLICT_WAIT: Duration = Duration::from_millis(400);
/// Between two questions after trouble, at first and at most.
const TROUBLE_WAIT: Duration = Duration::from_millis(250);
const TROUBLE_WAIT_MAX: Duration = Duration::from_secs(10);
/// What an answer may take beyond the time it was to wait for updates.
const GRACE: Duration = Duration::from_secs(10);
/// Updates asked for at once: what Telegram gives at most.
const LIMIT: u64 = 100;

/// Where the poller stands, as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Cursor {
    /// The first update not journaled yet; 0 before the first.
    offset: i64,
}

pub(super) struct Poller<'a> {
    pub(super) telegram: &'a Telegram,
    pub(super) link: Link,
}

impl Poller<'_> {
    pub(super) async fn run(&self) -> Result<Closed, ProviderError> {
        tokio::select! {
            biased;
            () = self.link.closing() => Ok(Closed::Asked),
            closed = self.poll() => closed,
        }
    }

    async fn poll(&self) -> Result<Closed, ProviderError> {
        let mut cursor = self.cursor().await?;
        let mut trouble = TROUBLE_WAIT;
        // Until a question was answered nobody knows that one will be: the first one does not wait.
        let mut wait_s = 0;
        loop {
            let wait = match self.updates(cursor, wait_s).await {
                Ok(updates) => {
                    self.connected(true);
                    wait_s = self.telegram.poll_s;
                    trouble = TROUBLE_WAIT;
                    match self.take(&updates, cursor).await {
                        Ok(next) => {
                            cursor = next;
                            continue;
                        }
                        // Not acknowledged, so the same updates come again.
                        Err(DeliverError::Unavailable { retry_after, .. }) => retry_after,
                        Err(DeliverError::Deposed) => return Ok(Closed::ByPeer),
                        Err(error) => return Err(self.fault(error.to_string())),
                    }
                }
                Err(fault) => {
                    self.connected(false);
                    wait_s = 0;
                    let wait = self.after(fault, trouble).await?;
                    trouble = (trouble * 2).min(TROUBLE_WAIT_MAX);
                    match wait {
                        Some(wait) => wait,
                        None => return Ok(Closed::Unlinked),
                    }
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// How long to wait after a failure; `None` where the token is no longer one.
    async fn after(
        &self,
        fault: Fault,
        trouble: Duration,
    ) -> Result<Option<Duration>, ProviderError> {
        match &fault {
            Fault::Said { code: 401 | 404, .. } => return Ok(None),
            Fault::Said { code: 409, said, .. } if said.contains("webhook") => {
                tracing::warn!(provider = %self.telegram.id, "a webhook is set; polling ends it");
                let nothing = json!({ "drop_pending_updates": false });
                let ended =
                    self.telegram.call("deleteWebhook", Some(&nothing), super::api::PATIENCE);
                ended.await.map_err(|fault| self.fault(fault.to_string()))?;
            }
            Fault::Said { code: 409, .. } => {
                tracing::info!(provider = %self.telegram.id, "another poller is still at work");
                return Ok(Some(CONFLICT_WAIT));
            }
            Fault::Said { retry_after: Some(wait), .. } => return Ok(Some(*wait)),
            _ => tracing::warn!(provider = %self.telegram.id, %fault, "polling failed"),
        }
        Ok(Some(trouble))
    }

    /// What comes from the cursor on, within so many seconds.
    async fn updates(&self, cursor: Cursor, wait_s: u64) -> Result<Vec<Value>, Fault> {
        let mut asked = json!({
            "timeout": wait_s,
            "limit": LIMIT,
            "allowed_updates": update::ALLOWED,
        });
        if cursor.offset > 0 {
            asked["offset"] = cursor.offset.into();
        }
        let patience = Duration::from_secs(wait_s) + GRACE;
        match self.telegram.call("getUpdates", Some(&asked), patience).await? {
            Value::Array(updates) => Ok(updates),
            _ => Err(Fault::Foreign(200)),
        }
    }

    /// Journals updates and moves past them, in one commit.
    async fn take(&self, updates: &[Value], cursor: Cursor) -> Result<Cursor, DeliverError> {
        let ids = updates.iter().filter_map(|update| update.get("update_id")?.as_i64());
        let last = match ids.max() {
            Some(last) => last,
            None if updates.is_empty() => return Ok(cursor),
            None => {
                let why = "no update has an update_id".to_owned();
                return Err(DeliverError::Unavailable { why, retry_after: TROUBLE_WAIT_MAX });
            }
        };
        let mut batch = Batch::default();
        for (n, update) in updates.iter().enumerate() {
            self.telegram.unpack(update, &format!("updates[{n}]"), &mut batch);
        }
        let next = Cursor { offset: last.saturating_add(1) };
        // A number always serialises.
        let stored = serde_json::to_vec(&next).unwrap_or_default();
        batch.take_past(&self.telegram.id, &self.link, &stored).await?;
        Ok(next)
    }

    async fn cursor(&self) -> Result<Cursor, ProviderError> {
        let stored = self.link.cursor(&self.telegram.id).await;
        let stored = stored.map_err(|error| self.fault(error.to_string()))?;
        // One that does not decode is none: Telegram still has what was not acknowledged.
        Ok(stored.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default())
    }

    fn connected(&self, connected: bool) {
        self.link.connected(&self.telegram.id, connected);
    }

    fn fault(&self, why: String) -> ProviderError {
        ProviderError { provider: self.telegram.id.clone(), why }
    }
}
