//! The coordination API in the words of a test: sessions, tickets, checkpoints of one prefix.

use std::time::Duration;

use reqwest::Method;
use serde_json::json;

use super::api::{Answer, Api, Request};

/// One prefix, as seen through the nodes of an [`Api`]. Every call goes to `node` first.
#[derive(Clone)]
pub struct Prefix {
    /// The client.
    pub api: Api,
    /// The prefix.
    pub name: String,
}

/// Where a ticket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stand {
    /// The ticket.
    pub ticket: u64,
    /// Its fence, once granted.
    pub fence: Option<u64>,
    /// How many are before it, while it waits.
    pub ahead: u64,
    /// The session of the turn before, once granted.
    pub previous: Option<u64>,
}

impl Stand {
    fn of(answer: &Answer) -> Self {
        let granted = answer.body["granted"].as_bool().expect("granted is a boolean");
        assert_eq!(answer.status, if granted { 200 } else { 202 }, "{}", answer.body);
        Self {
            ticket: answer.number("ticket"),
            fence: granted.then(|| answer.number("fence")),
            ahead: if granted { 0 } else { answer.number("ahead") },
            previous: answer.body["previous_holder"].as_u64(),
        }
    }
}

impl Prefix {
    /// This prefix.
    pub fn new(api: Api, name: impl Into<String>) -> Self {
        Self { api, name: name.into() }
    }

    /// A request under this prefix.
    pub fn request(&self, method: Method, rest: &str) -> Request {
        Request::new(method, format!("/v1/{}/{rest}", self.name))
    }

    /// Makes a write under a fresh key.
    pub async fn write(&self, node: usize, request: Request) -> Answer {
        let request = match request.key {
            Some(_) => request,
            None => request.key(uuid::Uuid::new_v4().to_string()),
        };
        self.api.call(node, &request).await.answer()
    }

    /// Opens a session.
    pub async fn open(&self, node: usize, lease_ms: u64) -> u64 {
        let request = self.request(Method::POST, "sessions").body(json!({ "lease_ms": lease_ms }));
        let answer = self.write(node, request).await;
        assert_eq!(answer.status, 201, "{}", answer.body);
        answer.number("session")
    }

    /// Renews a session; the answer may be a refusal.
    pub async fn renew(&self, node: usize, session: u64) -> Answer {
        let request = self.request(Method::POST, &format!("sessions/{session}/renew"));
        self.write(node, request.body(json!({}))).await
    }

    /// Takes a ticket.
    pub async fn take(&self, node: usize, session: u64, key: &str) -> Stand {
        let body = json!({ "session": session, "key": key });
        let answer = self.write(node, self.request(Method::POST, "turns").body(body)).await;
        Stand::of(&answer)
    }

    /// Asks for a ticket, waiting up to `wait` for its grant.
    pub async fn ask(&self, node: usize, ticket: u64, wait: Duration) -> Stand {
        Stand::of(&self.ask_raw(node, ticket, wait).await)
    }

    /// As [`Prefix::ask`], whatever the answer.
    pub async fn ask_raw(&self, node: usize, ticket: u64, wait: Duration) -> Answer {
        let path = format!("turns/{ticket}?wait_ms={}", wait.as_millis());
        let request = self.request(Method::GET, &path).waiting(wait);
        self.api.call(node, &request).await.answer()
    }

    /// Waits until a ticket is granted.
    pub async fn granted(&self, node: usize, ticket: u64, within: Duration) -> Stand {
        let until = self.api.now() + u64::try_from(within.as_nanos()).unwrap();
        loop {
            let stand = self.ask(node, ticket, Duration::from_secs(5).min(within)).await;
            if stand.fence.is_some() {
                return stand;
            }
            assert!(self.api.now() < until, "{ticket} is not granted within {within:?}: {stand:?}");
        }
    }

    /// Releases or withdraws a ticket.
    pub async fn release(&self, node: usize, session: u64, ticket: u64) {
        let path = format!("turns/{ticket}?session={session}");
        let answer = self.write(node, self.request(Method::DELETE, &path)).await;
        assert_eq!(answer.status, 204, "{}", answer.body);
    }

    /// Writes a checkpoint that must not exist yet; its revision, where it was answered.
    pub fn create(&self, key: &str, value: &serde_json::Value) -> Request {
        self.request(Method::PUT, &format!("checkpoints/{key}"))
            .header("If-None-Match", "*")
            .body(value.clone())
    }

    /// Reads a checkpoint: its value and revision.
    pub async fn read(&self, node: usize, key: &str) -> Option<(serde_json::Value, u64)> {
        let request = self.request(Method::GET, &format!("checkpoints/{key}"));
        let answer = self.api.call(node, &request).await.answer();
        match answer.status {
            200 => Some((answer.body, answer.etag.expect("GET answers an ETag"))),
            404 => None,
            status => panic!("GET of {key}: {status} {}", answer.body),
        }
    }
}
