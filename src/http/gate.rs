//! Shedding at the door (SPEC M3): at most so many requests under way, the rest refused at once.
//!
//! A request that waits for a place holds memory and a connection and is often given up by its
//! caller before it is served; a refusal costs nothing and says when to come again.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::sync::Semaphore;

use super::ApiError;

/// How many requests may be under way. Clones share the places.
#[derive(Clone, Debug)]
pub struct Gate {
    places: Arc<Semaphore>,
    max: usize,
}

impl Gate {
    /// A gate with `max` places.
    pub fn new(max: usize) -> Self {
        Self { places: Arc::new(Semaphore::new(max)), max }
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.max - self.places.available_permits()
    }
}

/// Middleware: lets a request through while there is a place, else answers 503.
pub async fn admit(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    match gate.places.clone().try_acquire_owned() {
        Ok(_place) => next.run(request).await,
        Err(_full) => ApiError::Overloaded { in_flight: gate.max }.into_response(),
    }
}
