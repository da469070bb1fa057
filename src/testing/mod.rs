//! The test kit: bots that share a hub, a clock that moves when told to, a provider that plays users.
//!
//! ```
//! use std::time::Duration;
//! use botmesh::bot::{Bot, Coordination};
//! use botmesh::testing::{ManualClock, MemoryCoordinator, MemoryHub, ScriptedProvider};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let clock = ManualClock::new();
//! let hub = MemoryHub::with_clock(clock.clone());
//! let (pa, ca) = (ScriptedProvider::new("x"), MemoryCoordinator::new(&hub, "a"));
//! let (pb, cb) = (pa.replica(), MemoryCoordinator::new(&hub, "b"));
//! for (provider, coordinator) in [(&pa, &ca), (&pb, &cb)] {
//!     let bot = botmesh::cli::demo::flows(Bot::builder())
//!         .provider(provider.clone())
//!         .store(hub.store(MemoryHub::default_prefix()))
//!         .coordination(Coordination::new(coordinator.clone()))
//!         .build()
//!         .await?;
//!     bot.start().await?;
//! }
//! pa.user("ann").says("order").await.hears("What would you like?").await;
//! ca.crash();
//! clock.advance(Duration::from_secs(16));
//! pb.user("ann").says("tea").await.hears("How many?").await;
//! # Ok(()) }
//! ```

mod sim;

pub use crate::clock::ManualClock;
pub use crate::coordinator::{CoordinatorOptions, MemoryCoordinator};
pub use crate::group::{Limits, MemoryHub};
pub use crate::provider::scripted::{Heard, ScriptedProvider, ScriptedUser};
pub use crate::store::MemoryStore;
pub use sim::{Gone, Replica, Sim, SimCluster, SimCounts, SimReport, SimUser};
