//! The cluster listener: Raft, administration, coordination API, and three paths for whoever
//! watches the process.
//!
//! Everything but `/livez`, `/readyz` and `/metrics` demands the cluster secret, on loopback too
//! (SPEC K5, K7): a process on the same machine is no friend for being there.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::gate::{self, Gate};
use super::metrics::{self, Requests, Text};
use super::{ApiError, coordination};
use crate::group::{Group, look};
use crate::machine::Machine;
use crate::raft::Secret;

/// What the process says of itself to `/readyz` and `/metrics`.
pub trait Probe: Send + Sync + 'static {
    /// Whether it serves: `Err` says why not (SPEC K7).
    fn ready(&self) -> Result<(), String>;

    /// Adds its own families to a scrape.
    fn measure(&self, text: &mut Text);
}

/// What the listener is made of.
pub struct Parts {
    /// What the coordination API works on.
    pub group: Arc<dyn Group>,
    /// Further routes behind the secret: a node's own.
    pub routes: Router,
    /// What answers for the process.
    pub probe: Arc<dyn Probe>,
    /// The cluster secret.
    pub secret: Secret,
    /// How long calls of the coordination API may take.
    pub options: coordination::Options,
    /// Calls of the coordination API under way, long polls included; further ones are refused.
    pub calls_max: usize,
}

/// Places for calls where nothing else is said: as many as there may be connections.
pub const CALLS_MAX: usize = 8_192;

/// The whole cluster listener.
pub fn router(parts: Parts) -> Router {
    let Parts { group, routes, probe, secret, options, calls_max } = parts;
    let gate = Gate::new(calls_max);
    let requests = Requests::default();
    let api = coordination::router_with(group.clone(), options)
        .layer(from_fn_with_state(gate.clone(), gate::admit));
    let watched = Watched { group, probe, gate, requests: requests.clone() };
    let open = Router::new()
        .route("/livez", get(async || "alive\n"))
        .route("/readyz", get(ready))
        .route("/metrics", get(scrape))
        .with_state(watched);
    Router::new()
        .merge(api)
        .merge(routes)
        .merge(open)
        .fallback(async || ApiError::NoRoute)
        .layer(from_fn_with_state(secret, demand_secret))
        .layer(from_fn_with_state(requests, metrics::count))
}

/// Paths that answer without the secret.
const OPEN: [&str; 3] = ["/livez", "/readyz", "/metrics"];

async fn demand_secret(State(secret): State<Secret>, request: Request, next: Next) -> Response {
    let given = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes());
    if OPEN.contains(&request.uri().path()) || secret.admits(given) {
        next.run(request).await
    } else {
        ApiError::Unauthorized.into_response()
    }
}

#[derive(Clone)]
struct Watched {
    group: Arc<dyn Group>,
    probe: Arc<dyn Probe>,
    gate: Gate,
    requests: Requests,
}

async fn ready(State(watched): State<Watched>) -> Response {
    match watched.probe.ready() {
        Ok(()) => "ready\n".into_response(),
        Err(why) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")).into_response()
        }
    }
}

async fn scrape(State(watched): State<Watched>) -> Response {
    let mut text = Text::default();
    watched.probe.measure(&mut text);
    let (sessions, (held, waiting), leads) = look(&*watched.group, |machine| {
        (machine.sessions().len() as u64, machine.turn_counts(), machine.leads().len() as u64)
    });
    let window = look(&*watched.group, Machine::dedupe_window_ms);
    let help = "How far back message ids are surely recognised, ms";
    text.gauge("botmesh_dedupe_window_ms", help, window);
    text.gauge("botmesh_sessions", "Live sessions, locks included", sessions);
    text.gauge("botmesh_leads_held", "Leads held", leads);
    text.gauge("botmesh_turns_held", "Turns held", held);
    text.gauge("botmesh_tickets_waiting", "Tickets waiting for a turn", waiting);
    let in_flight = watched.gate.in_flight() as u64;
    text.gauge("botmesh_api_calls_in_flight", "Calls of the coordination API under way", in_flight);
    watched.requests.write(&mut text);
    ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text.finish()).into_response()
}
