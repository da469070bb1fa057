//! What a process takes from outside it besides time: chance, and threads for what blocks.
//!
//! Problem: a simulated group has to do the same again under the same seed, and random ids, random
//! pauses and the moment at which another thread is done are different each time. Idea: whoever
//! needs one of them asks here. A program gets what the system gives; on the thread of a simulation
//! (feature `test-util`) chance comes from its seed, and what blocks runs at once, in its place.

use std::time::Duration;

use rand::Rng;
use uuid::Uuid;

/// A random UUID.
pub(crate) fn uuid() -> Uuid {
    #[cfg(feature = "test-util")]
    if let Some(bytes) = seeded::draw(|chance| chance.random()) {
        return uuid::Builder::from_random_bytes(bytes).into_uuid();
    }
    Uuid::new_v4()
}

/// What openraft's chance begins with.
#[cfg(feature = "test-util")]
pub(crate) fn seed() -> u64 {
    seeded::draw(|chance| chance.random()).unwrap_or_else(rand::random)
}

/// A random time between two, both included.
pub(crate) fn between(min: Duration, max: Duration) -> Duration {
    #[cfg(feature = "test-util")]
    if let Some(drawn) = seeded::draw(|chance| chance.random_range(min..=max)) {
        return drawn;
    }
    rand::rng().random_range(min..=max)
}

/// Runs what blocks off the runtime, and answers what it returns.
pub(crate) async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, tokio::task::JoinError> {
    #[cfg(feature = "test-util")]
    if seeded::is_on() {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await
}

/// Whether there may be other threads than this one.
pub(crate) fn has_threads() -> bool {
    #[cfg(feature = "test-util")]
    if seeded::is_on() {
        return false;
    }
    true
}

/// Runs what takes long, and nobody waits for, off the runtime.
pub(crate) fn aside(work: impl FnOnce() + Send + 'static) {
    #[cfg(feature = "test-util")]
    if seeded::is_on() {
        return work();
    }
    // Not awaited: it ends by itself.
    drop(tokio::task::spawn_blocking(work));
}

#[cfg(feature = "test-util")]
pub(crate) mod seeded {
    //! The thread of a simulation.

    use std::cell::{Cell, RefCell};
    use std::marker::PhantomData;

    use rand::SeedableRng;
    use rand::rngs::StdRng;

    thread_local! {
        static CHANCE: RefCell<Option<StdRng>> = const { RefCell::new(None) };
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }

    /// From here on this thread is a simulation's, until the guard is dropped.
    pub(crate) fn begin(seed: u64) -> Guard {
        CHANCE.with(|chance| *chance.borrow_mut() = Some(StdRng::seed_from_u64(seed)));
        NUMBER.set(0);
        Guard(PhantomData)
    }

    /// Ends what [`begin`] began.
    #[derive(Debug)]
    pub(crate) struct Guard(PhantomData<*const ()>);

    impl Drop for Guard {
        fn drop(&mut self) {
            CHANCE.with(|chance| *chance.borrow_mut() = None);
        }
    }

    /// Whether this thread is a simulation's.
    pub(crate) fn is_on() -> bool {
        CHANCE.with(|chance| chance.borrow().is_some())
    }

    /// Draws, on the thread of a simulation.
    pub(crate) fn draw<T>(draw: impl FnOnce(&mut StdRng) -> T) -> Option<T> {
        CHANCE.with(|chance| chance.borrow_mut().as_mut().map(draw))
    }

    /// The next number of the simulation, from 1 on; `None` outside one.
    pub(crate) fn number() -> Option<u64> {
        is_on().then(|| {
            NUMBER.set(NUMBER.get() + 1);
            NUMBER.get()
        })
    }
}
