//! Telling the survivors that a process is dead.
//!
//! One of them has to hear it, and nobody knows which of them lives or leads: so all are told at
//! once, with short deadlines, and again until one answers that the group has committed it. Said
//! twice it counts once; not said at all it costs a lease.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use reqwest::{Client, StatusCode};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Order;
use super::link::Contacts;
use crate::types::ProcessToken;

/// The path a death is reported to, on any cluster listener.
pub const DEATH_PATH: &str = "/cluster/declare-dead";

/// How long a connection may take: a host that answers at all does so at once.
const CONNECT: Duration = Duration::from_millis(500);
/// How long one survivor may take, which may have to wait for an election.
const ANSWER: Duration = Duration::from_secs(3);
/// Between two rounds.
const PAUSE: Duration = Duration::from_millis(50);
/// After that long most leases have ended anyway.
const GIVE_UP: Duration = Duration::from_secs(30);

/// Sends reports. Clones share their connections.
#[derive(Clone, Debug)]
pub(super) struct Reporter {
    http: Client,
}

impl Reporter {
    pub(super) fn new() -> Result<Self, String> {
        // No proxy: the cluster's own traffic never leaves by one.
        let http = Client::builder().no_proxy().connect_timeout(CONNECT).build();
        http.map(|http| Self { http }).map_err(|error| format!("cannot make a client: {error}"))
    }

    /// Tells until one has committed it; once only where this process itself is to stop.
    pub(super) async fn report(
        &self,
        process: ProcessToken,
        contacts: &Contacts,
        orders: watch::Receiver<Order>,
    ) -> Result<Duration, String> {
        let began = Instant::now();
        loop {
            let why = match self.round(process, contacts).await {
                Ok(()) => return Ok(began.elapsed()),
                Err(why) => why,
            };
            if *orders.borrow() != Order::Run || began.elapsed() >= GIVE_UP {
                return Err(why);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Tells all of them; the first that has committed it is enough.
    async fn round(&self, process: ProcessToken, contacts: &Contacts) -> Result<(), String> {
        let others = contacts.peers.iter().filter(|peer| **peer != contacts.own);
        let mut asked: FuturesUnordered<_> =
            others.map(|peer| self.tell(process, peer, &contacts.secret)).collect();
        let mut why = "there is no other member".to_owned();
        while let Some(told) = asked.next().await {
            match told {
                Ok(()) => return Ok(()),
                Err(reason) => why = reason,
            }
        }
        Err(why)
    }

    async fn tell(&self, process: ProcessToken, peer: &str, secret: &str) -> Result<(), String> {
        let answer = self
            .http
            .post(format!("http://{peer}{DEATH_PATH}"))
            .bearer_auth(secret)
            .timeout(ANSWER)
            .json(&serde_json::json!({ "process": process.to_string() }))
            .send()
            .await;
        match answer.map(|answer| answer.status()) {
            Ok(StatusCode::OK) => Ok(()),
            Ok(status) => Err(format!("{peer} answers {status}")),
            Err(error) => Err(format!("{peer}: {error}")),
        }
    }
}
