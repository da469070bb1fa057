//! A user who speaks to whichever replica is there.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::Sim;
use crate::outside::seeded;
use crate::provider::scripted::{Heard, ScriptedProvider};

/// For how long a user tries, and listens.
const PATIENCE: Duration = Duration::from_secs(180);
/// Between two tries.
const AGAIN: Duration = Duration::from_millis(200);

/// A user of a channel. What they say is sent, under one id, to one replica after the other until
/// one has taken it, as a transport's webhook would be. Clones listen on together.
#[derive(Clone, Debug)]
pub struct SimUser {
    sim: Sim,
    provider: ScriptedProvider,
    channel: String,
    name: String,
    listened: Arc<AtomicUsize>,
}

impl SimUser {
    pub(super) fn new(sim: Sim, provider: ScriptedProvider, channel: &str, name: &str) -> Self {
        let (channel, name) = (channel.to_owned(), name.to_owned());
        Self { sim, provider, channel, name, listened: Arc::default() }
    }

    /// Says something; returns when a replica has taken it.
    ///
    /// # Panics
    /// Where none has for three minutes.
    pub async fn says(&self, text: &str) -> &Self {
        let first = self.sim.random(self.sim.hosts() as u64) as usize;
        self.says_at(first, text).await;
        self
    }

    /// As [`SimUser::says`], to this replica first; the id it was taken under.
    ///
    /// # Panics
    /// As there.
    pub async fn says_at(&self, first: usize, text: &str) -> String {
        let id = format!("{}-{}", self.name, seeded::number().unwrap_or_default());
        let began = self.sim.now();
        let mut host = first;
        while !self.offers(host, &id, text).await {
            assert!(self.sim.now() - began < PATIENCE, "{}: nobody takes {text:?}", self.name);
            host = (host + 1) % self.sim.hosts();
            self.sim.sleep(AGAIN).await;
        }
        id
    }

    /// Says something to one replica, once; whether it was taken. Where it was not, it may have been
    /// all the same.
    pub async fn offers(&self, host: usize, id: &str, text: &str) -> bool {
        let (channel, name) = (self.channel.clone(), self.name.clone());
        let (id, text) = (id.to_owned(), text.to_owned());
        let offered = self.sim.on(host, |replica| async move {
            replica.provider(&channel).user(&name).offers(&id, &text).await
        });
        // Whoever sends a webhook does not wait for ever either.
        let within = tokio::time::timeout(Duration::from_secs(5), offered).await;
        matches!(within, Ok(Ok(true)))
    }

    /// Listens for the next reply, which has to be this text.
    ///
    /// # Panics
    /// Where it is another, or none comes.
    pub async fn hears(&self, text: &str) -> &Self {
        let heard = self.next(&format!("{text:?}")).await;
        assert_eq!(heard.text, text, "{} heard something else", self.name);
        self
    }

    /// Listens for the next reply.
    ///
    /// # Panics
    /// Where none comes.
    pub async fn hears_any(&self) -> Heard {
        self.next("anything").await
    }

    /// All this user was told so far.
    pub fn heard(&self) -> Vec<Heard> {
        self.provider.user(&self.name).heard()
    }

    async fn next(&self, wanted: &str) -> Heard {
        let listened = self.listened.fetch_add(1, Ordering::Relaxed);
        let began = self.sim.now();
        loop {
            if let Some(heard) = self.heard().get(listened) {
                return heard.clone();
            }
            let waited = self.sim.now() - began;
            assert!(waited < PATIENCE, "{} waited {waited:?} for {wanted}", self.name);
            tokio::time::sleep(super::TICK).await;
        }
    }
}
