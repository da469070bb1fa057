//! Runs a model to its end.

use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

/// A model is checked by so many threads; tests run beside one another.
const THREADS: usize = 2;

/// Whether to explore as far as takes hours and not seconds: `BOTMESH_MODELS=long`, best with
/// `--release`.
pub fn is_long() -> bool {
    std::env::var("BOTMESH_MODELS").is_ok_and(|value| value == "long")
}

/// A model that can be explored by several threads.
pub trait Checkable:
    Model<
        State: Clone + PartialEq + Hash + Debug + Send + Sync + 'static,
        Action: Clone + PartialEq + Debug,
    > + Send
    + Sync
    + 'static
{
}

impl<M> Checkable for M where
    M: Model<
            State: Clone + PartialEq + Hash + Debug + Send + Sync + 'static,
            Action: Clone + PartialEq + Debug,
        > + Send
        + Sync
        + 'static
{
}

/// What exploring found.
pub struct Found {
    /// States, each counted once.
    pub states: usize,
    /// The properties that do not hold, each with a way that leads there.
    pub broken: Vec<(&'static str, String)>,
}

fn explore(model: impl Checkable) -> Found {
    let began = Instant::now();
    let checker = model
        .checker()
        .threads(THREADS)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    let mut broken = Vec::new();
    for (property, path) in checker.discoveries() {
        let actions: Vec<String> = path.into_actions().iter().map(|a| format!("{a:?}")).collect();
        broken.push((property, actions.join(", ")));
    }
    println!("{states} states, depth {depth}, {:?}: {broken:?}", began.elapsed());
    Found { states, broken }
}

/// Explores a model in which everything has to hold.
pub fn holds(model: impl Checkable) -> Found {
    let found = explore(model);
    assert!(found.broken.is_empty(), "{:?}", found.broken);
    found
}

/// Explores a model without one of its rules until something is broken, which must be this.
pub fn breaks(model: impl Checkable, property: &str) {
    let found = explore(model);
    assert!(
        found.broken.iter().any(|(broken, _)| *broken == property),
        "of {} states none breaks {property:?}: {:?}",
        found.states,
        found.broken
    );
}
