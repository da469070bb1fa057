//! Linearizable reads (ReadIndex): many callers, one round trip.
//!
//! A barrier has to learn up to where to apply from a leader that a majority confirmed *after* the
//! barrier began (DESIGN 3 rule 9; a leader's lease proves nothing, DESIGN 5.4). So a caller may
//! share only a round that starts after it came: those that come while a round is under way wait
//! for the next one, all together.

use std::future::Future;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::group::Unavailable;

type Waiting = Vec<oneshot::Sender<Result<u64, Unavailable>>>;

/// The rounds of one node.
#[derive(Debug, Default)]
pub(crate) struct Barriers {
    next: Mutex<Round>,
}

#[derive(Debug, Default)]
struct Round {
    /// Who takes part in the round that starts next.
    waiting: Waiting,
    /// Whether some task is running rounds.
    running: bool,
}

impl Barriers {
    /// The index of a round that starts from now on. `ask` runs one round.
    pub(crate) async fn index<F, R>(self: &Arc<Self>, ask: F) -> Result<u64, Unavailable>
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = Result<u64, Unavailable>> + Send + 'static,
    {
        let (sender, answer) = oneshot::channel();
        let first = {
            let mut round = self.next.lock();
            round.waiting.push(sender);
            !std::mem::replace(&mut round.running, true)
        };
        if first {
            // Its own task: a caller that gives up must not end the round of the others.
            tokio::spawn(self.clone().run(ask));
        }
        answer.await.unwrap_or_else(|_| {
            Err(Unavailable::NotServing { why: "it is shutting down".to_owned() })
        })
    }

    /// Runs rounds until nobody waits.
    async fn run<F, R>(self: Arc<Self>, ask: F)
    where
        F: Fn() -> R + Send + Sync + 'static,
        R: Future<Output = Result<u64, Unavailable>> + Send + 'static,
    {
        loop {
            let round = {
                let mut next = self.next.lock();
                if next.waiting.is_empty() {
                    next.running = false;
                    return;
                }
                std::mem::take(&mut next.waiting)
            };
            let found = ask().await;
            for caller in round {
                // Whoever asked may be gone.
                let _ = caller.send(found.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn f4_a_barrier_shares_only_a_round_that_starts_after_it() {
        let barriers = Arc::new(Barriers::default());
        let rounds = Arc::new(AtomicU64::new(0));
        let ask = {
            let rounds = rounds.clone();
            move || {
                // The number is taken when the round starts.
                let number = rounds.fetch_add(1, Ordering::SeqCst);
                async move {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    Ok(number)
                }
            }
        };
        let first = tokio::spawn({
            let (barriers, ask) = (barriers.clone(), ask.clone());
            async move { barriers.index(ask).await }
        });
        tokio::time::sleep(Duration::from_millis(5)).await;
        let late: Vec<_> = (0..100)
            .map(|_| {
                let (barriers, ask) = (barriers.clone(), ask.clone());
                tokio::spawn(async move { barriers.index(ask).await })
            })
            .collect();
        assert_eq!(first.await.unwrap(), Ok(0));
        for one in late {
            assert_eq!(one.await.unwrap(), Ok(1), "they came during round 0");
        }
        assert_eq!(rounds.load(Ordering::SeqCst), 2, "one round for all of them");
    }
}
