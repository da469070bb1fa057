//! The coordination API (SPEC K6): sessions, turns, leads, locks and checkpoints as JSON over
//! HTTP, for programs in any language.
//!
//! Problem: outside programs act on what they are told here, so an answer must never be older than
//! its question, and a question asked twice must act once. Idea: every write is one command that
//! the group executes exactly once and that is answered after *this* node applied it; what is then
//! read from this node's machine is at least as new as the write. Every read but
//! `?consistency=local` first passes the group's barrier (ReadIndex). So every answer is true at
//! some instant between question and answer: the API is linearizable, through any node.
//!
//! Invariants:
//! - Nothing polls. A long poll registers with [`Wakeups`](crate::group::Wakeups), looks at the
//!   machine, and sleeps until its ticket is granted or ends (SPEC B7).
//! - A connection owns nothing: tickets, leads and locks belong to sessions and tokens, and a
//!   dropped connection changes nothing.
//! - A refusal says `not_executed` only where that is certain.
//!
//! | file | resource |
//! |---|---|
//! | `sessions` | open, renew, close |
//! | `turns` | take a ticket, wait for it, end it |
//! | `leads` | take a lead, end it |
//! | `locks` | acquire, renew, release |
//! | `checkpoints` | read, write and delete by compare-and-set |
//! | `call` | one request, taken apart and checked |
//! | `openapi.json` | the whole of it, described |

mod call;
mod checkpoints;
mod leads;
mod locks;
mod sessions;
mod turns;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::{MethodRouter, delete, get, post};
use tokio_util::sync::CancellationToken;

use self::call::Once;
use super::ApiError;
use crate::clock::BootInstant;
use crate::group::{Group, look};
use crate::machine::{Command, IdempotencyKey, Reply, SessionKind};
use crate::types::{Incarnation, Prefix};

/// The OpenAPI 3.1 document.
pub const OPENAPI: &str = include_str!("openapi.json");

/// How long calls may take.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long the group may take over one command or one barrier.
    pub deadline: Duration,
    /// The longest a long poll waits, whatever the caller asks.
    pub wait_max: Duration,
    /// Ends long polls when this node stops: they answer how things stand.
    pub stop: CancellationToken,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(5),
            wait_max: Duration::from_secs(60),
            stop: CancellationToken::new(),
        }
    }
}

/// The API over a group, under `/v1`. Carries no authentication: the cluster listener adds it.
pub fn router<S: Clone + Send + Sync + 'static>(group: Arc<dyn Group>) -> Router<S> {
    router_with(group, Options::default())
}

/// [`router`], with bounds of one's own.
pub fn router_with<S: Clone + Send + Sync + 'static>(
    group: Arc<dyn Group>,
    options: Options,
) -> Router<S> {
    let api = Api { group, options: Arc::new(options) };
    let below = routes()
        .into_iter()
        .fold(Router::new(), |router, (path, methods)| router.route(path, methods))
        .fallback(async || ApiError::NoRoute)
        .method_not_allowed_fallback(async || ApiError::Method)
        .with_state(api);
    Router::new().nest("/v1", below)
}

/// Every route, below `/v1`. A table, so that a test can hold it against the OpenAPI document.
fn routes() -> Vec<(&'static str, MethodRouter<Api>)> {
    vec![
        ("/openapi.json", get(openapi)),
        ("/{prefix}/sessions", post(sessions::open)),
        ("/{prefix}/sessions/{session}", delete(sessions::close)),
        ("/{prefix}/sessions/{session}/renew", post(sessions::renew)),
        ("/{prefix}/turns", post(turns::take)),
        ("/{prefix}/turns/{ticket}", get(turns::wait).delete(turns::end)),
        ("/{prefix}/leads/{name}", post(leads::take).delete(leads::end)),
        ("/{prefix}/locks/{key}", post(locks::acquire).delete(locks::release)),
        ("/{prefix}/locks/{key}/renew", post(locks::renew)),
        (
            "/{prefix}/checkpoints/{key}",
            get(checkpoints::read).put(checkpoints::write).delete(checkpoints::delete),
        ),
    ]
}

async fn openapi() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], OPENAPI)
}

/// What every handler works with.
#[derive(Clone)]
pub(super) struct Api {
    group: Arc<dyn Group>,
    options: Arc<Options>,
}

impl Api {
    /// Until when the group may take over a call that came in now.
    fn deadline(&self) -> BootInstant {
        self.group.clock().now() + self.options.deadline
    }

    /// Executes a command, once for its idempotency key where the caller sent one. What refuses
    /// any command alike comes back as an error; the rest is the caller's to read.
    async fn execute(
        &self,
        prefix: &Prefix,
        session: Option<Incarnation>,
        once: Option<Once>,
        command: Command,
        deadline: BootInstant,
    ) -> Result<Reply, ApiError> {
        let command = match once {
            None => command,
            Some(Once { key, fingerprint }) => Command::Keyed {
                key: IdempotencyKey { prefix: prefix.clone(), session, key },
                fingerprint,
                command: Box::new(command),
            },
        };
        match self.group.execute(command, deadline).await? {
            Reply::SessionExpired => Err(ApiError::SessionExpired),
            Reply::KeyReused => Err(ApiError::KeyReused),
            Reply::Full(limit) => Err(ApiError::Full(limit)),
            reply => Ok(reply),
        }
    }

    /// Returns once this node has applied all that was committed when it was called.
    async fn barrier(&self) -> Result<(), ApiError> {
        // A read that was not made changed nothing, so this is certain.
        self.group.barrier(self.deadline()).await.map_err(ApiError::NotExecuted)
    }

    /// Refuses a session that lives under another prefix than the path's, and one that is a bot's
    /// or a lock's own: those are none of this API's. One this node does not know may be dead or
    /// not have reached it yet; the command itself finds out.
    async fn check_prefix(&self, prefix: &Prefix, session: Incarnation) -> Result<(), ApiError> {
        let known = |api: &Self| {
            look(&*api.group, |machine| {
                let found = machine.session(session)?;
                Some(found.kind == SessionKind::Remote && found.prefix == *prefix)
            })
        };
        let same = match known(self) {
            Some(same) => Some(same),
            None => {
                self.barrier().await?;
                known(self)
            }
        };
        if same == Some(false) { Err(ApiError::SessionExpired) } else { Ok(()) }
    }
}
