//! Jobs that run at given times (SPEC G4).
//!
//! A [`Job`] without an id runs on every replica: for what a process does for itself. With an id it
//! is *durable*: the group keeps its next occurrence, and each occurrence is claimed by one replica,
//! which runs it and sets the next. What was claimed by a replica that dies, fails or panics is run
//! again by another, a bounded number of times.
//!
//! ```
//! use botmesh::bot::{Bot, Job, Missed, Result};
//! # use botmesh::provider::webchat::Webchat;
//! use botmesh::types::ChatKey;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result {
//! let team = ChatKey::new("webchat", "team");
//! let bot = Bot::builder()
//!     .provider(Webchat)
//!     // On every replica, every half minute.
//!     .every("30s", async |_| { println!("alive"); Ok(()) })
//!     // Once in the whole group, at nine in Tokyo, wherever the replicas run.
//!     .job(
//!         Job::cron("0 9 * * MON-FRI").zone("Asia/Tokyo").id("standup").missed(Missed::Once),
//!         async move |tick| Ok(tick.post(&team, "What do you plan today?").await?),
//!     )
//!     .build()
//!     .await?;
//! # bot.stop().await?;
//! # Ok(()) }
//! ```
//!
//! **When.** `every` counts from the Unix epoch, so that all replicas mean the same instants: `5m` is
//! at :00, :05, :10 and so on. Cron has five fields, or six with seconds before them, or seven with
//! a year after them; its zone is one of the IANA database that is compiled in, UTC by default, and
//! never the host's.
//!
//! **Daylight saving.** A job at fixed hours whose time does not exist (the clock is put forward)
//! runs at the first instant after the gap; one whose time comes twice runs once, the first time. A
//! job with `*` or a step in seconds, minutes or hours follows the clock on the wall: nothing in
//! the gap, both passes of the hour that is repeated.
//!
//! **Missed.** An occurrence is missed when the one after it is due too. [`Missed`] says what
//! becomes of it. An occurrence that has begun is never missed: it is run again.
//!
//! **One replica for as long as it lives**, rather than one occurrence at a time: that is a lead.
//! [`Coordinator::try_lead`](crate::coordinator::Coordinator::try_lead) gives it to one and `None` to
//! the others, `campaign` waits for it.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use botmesh::coordinator::{Coordinator, MemoryCoordinator};
//! use botmesh::group::MemoryHub;
//! let hub = MemoryHub::new();
//! let (a, b) = (MemoryCoordinator::new(&hub, "a"), MemoryCoordinator::new(&hub, "b"));
//! a.open().await.unwrap();
//! b.open().await.unwrap();
//! let lead = a.try_lead("job:report").await.unwrap().expect("nobody has it");
//! assert!(b.try_lead("job:report").await.unwrap().is_none());
//! // Work under it until `lead.lost()` resolves; `lead.check()` before every act.
//! lead.release().await.unwrap();
//! assert!(b.try_lead("job:report").await.unwrap().is_some());
//! # })
//! ```

mod job;
mod run;
#[cfg(test)]
mod tests;
mod tick;

pub use job::{Job, Missed};
pub use tick::{JobHandler, Tick};

pub(crate) use job::Schedule;
pub(crate) use run::{durable, local};
pub(crate) use tick::AnyJobHandler;

/// A job as the bot keeps it: checked.
pub(crate) struct Scheduled {
    pub(crate) job: Job,
    pub(crate) schedule: Schedule,
    pub(crate) handler: Box<dyn AnyJobHandler>,
}
