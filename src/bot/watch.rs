//! Keeps time for steps from a thread of its own (SPEC B5).
//!
//! Problem: a step that blocks its thread is never dropped at an `.await`, and where enough of them
//! block, no timer of the runtime fires: nobody would notice that `settle` is over.
//! Idea: one operating-system thread looks at all that runs. What is overdue is fenced off at once:
//! its turn is revoked and given back, so that it can neither say nor write anything from then on,
//! however long it blocks (SPEC C10). Its thread cannot be taken from it; that is reported.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::scope::Scope;

/// How often it looks while something runs: an eighth of `settle`, within these.
const LOOK_MIN: Duration = Duration::from_millis(10);
const LOOK_MAX: Duration = Duration::from_millis(250);

/// The watch of one bot. Its thread starts with the first step and ends with the bot.
pub(crate) struct Watch {
    shared: Arc<Shared>,
}

struct Shared {
    settle: Duration,
    // One lock for all; held for a look at the running steps, which are at most some thousands.
    state: Mutex<State>,
    // Wakes the thread where it had nothing to watch.
    woken: Condvar,
}

#[derive(Default)]
struct State {
    running: HashMap<u64, Arc<Scope>>,
    next: u64,
    started: bool,
    sleeps: bool,
    ended: bool,
}

/// A step is watched as long as this lives.
pub(crate) struct Watched {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.shared.state.lock().running.remove(&self.number);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.woken.notify_one();
    }
}

impl Watch {
    pub(crate) fn new(settle: Duration) -> Self {
        let (state, woken) = (Mutex::default(), Condvar::new());
        Self { shared: Arc::new(Shared { settle, state, woken }) }
    }

    /// Watches what runs under this turn.
    pub(crate) fn over(&self, scope: &Arc<Scope>) -> Watched {
        let mut state = self.shared.state.lock();
        let number = state.next;
        state.next += 1;
        state.running.insert(number, scope.clone());
        // In a simulation no step blocks the one thread there is.
        if !state.started && crate::outside::has_threads() {
            state.started = true;
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("botmesh-watch".to_owned());
            if let Err(error) = thread.spawn(move || watch(&shared)) {
                state.started = false;
                tracing::error!(%error, "no thread to watch steps with; trying again later");
            }
        } else if state.sleeps {
            state.sleeps = false;
            self.shared.woken.notify_one();
        }
        Watched { shared: self.shared.clone(), number }
    }
}

fn watch(shared: &Shared) {
    let look = (shared.settle / 8).clamp(LOOK_MIN, LOOK_MAX);
    let mut state = shared.state.lock();
    while !state.ended {
        if state.running.is_empty() {
            state.sleeps = true;
            shared.woken.wait(&mut state);
            continue;
        }
        let overdue: Vec<Arc<Scope>> =
            state.running.values().filter(|scope| scope.is_overdue()).cloned().collect();
        // Still locked: a step that returns in this moment waits here, so its turn cannot end, nor
        // the chat's next one begin, before this one is fenced off.
        overdue.iter().for_each(|scope| scope.fence_off());
        drop(state);
        overdue.iter().for_each(|scope| scope.tell_blocked());
        state = shared.state.lock();
        if !state.ended {
            let _ = shared.woken.wait_for(&mut state, look);
        }
    }
}
