//! What a job is, and the pure part of it: which instants it means.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::{TimeZone, TimeZoneDatabase};
use serde::{Deserialize, Serialize};

use crate::bot::error::Fault;
use crate::types::check_key;

/// The shortest period: each occurrence of a durable job is two commits.
const PERIOD_MIN: Duration = Duration::from_millis(100);

/// Most missed occurrences that may be made up for.
const MISSED_MAX: u32 = 10_000;

/// Times an occurrence is run, where the job does not say.
const ATTEMPTS: u32 = 5;

/// What becomes of occurrences that nobody ran in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missed {
    /// They are passed over (default).
    #[default]
    Skip,
    /// One run makes up for all of them.
    Once,
    /// Each is run, one after the other, but only the latest so many.
    All(u32),
}

/// When a job runs, and how. See the [module](self).
#[derive(Clone, Debug)]
pub struct Job {
    id: Option<String>,
    when: When,
    zone: Option<String>,
    pub(crate) missed: Missed,
    pub(crate) attempts: u32,
    pub(crate) within: Option<Duration>,
}

#[derive(Clone, Debug)]
enum When {
    Every(String),
    Cron(String),
}

impl Job {
    /// A job at multiples of a period since the Unix epoch: `30s`, `5m`, `1h 30m`.
    pub fn every(period: impl Into<String>) -> Self {
        Self::at(When::Every(period.into()))
    }

    /// A job at the times of a cron expression: `0 9 * * MON-FRI`, in UTC unless [`Job::zone`] says
    /// otherwise.
    pub fn cron(expression: impl Into<String>) -> Self {
        Self::at(When::Cron(expression.into()))
    }

    fn at(when: When) -> Self {
        let (missed, attempts) = (Missed::default(), ATTEMPTS);
        Self { id: None, when, zone: None, missed, attempts, within: None }
    }

    /// Makes it durable under this id: each occurrence runs on one replica.
    #[must_use]
    pub fn id(mut self, id: impl Into<String>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// The zone of a cron expression, by its IANA name: `Europe/Berlin`.
    #[must_use]
    pub fn zone(mut self, zone: impl Into<String>) -> Self {
        self.zone = Some(zone.into());
        self
    }

    /// What becomes of missed occurrences of a durable job (default [`Missed::Skip`]). Those of one
    /// without an id are passed over.
    #[must_use]
    pub fn missed(mut self, missed: Missed) -> Self {
        self.missed = missed;
        self
    }

    /// How often an occurrence of a durable job is run, by one replica after the other, before it is
    /// given up with the event [`JobGivenUp`](crate::bot::Event::JobGivenUp) (default 5).
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts;
        self
    }

    /// The longest a run may take; one that takes longer is cut and counts as failed. Without it a
    /// run may take as long as its replica lives.
    #[must_use]
    pub fn within(mut self, within: Duration) -> Self {
        self.within = Some(within);
        self
    }

    pub(crate) fn durable_id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// Which instants it means, or everything that is wrong with it.
    pub(crate) fn check(&self, now_ms: u64, faults: &mut Vec<Fault>) -> Option<Schedule> {
        let job = self.to_string();
        if let Some(id) = &self.id
            && let Err(why) = checked_id(id)
        {
            faults.push(Fault::JobId { id: id.clone(), why });
        }
        if self.attempts == 0 {
            let allowed = "a job is run once at least";
            faults.push(Fault::Option { option: "attempts", given: "0".into(), allowed });
        }
        if let Missed::All(most) = self.missed
            && !(1..=MISSED_MAX).contains(&most)
        {
            let given = format!("All({most})");
            let allowed = "make up for 1 to 10000 missed occurrences";
            faults.push(Fault::Option { option: "missed", given, allowed });
        }
        match &self.when {
            When::Every(period) => match parsed_period(period) {
                Ok(period_ms) if self.zone.is_none() => Some(Schedule::Every { period_ms }),
                Ok(_) => {
                    let why = "a period has no zone; take .zone(..) away".to_owned();
                    faults.push(Fault::JobWhen { job, why });
                    None
                }
                Err(why) => {
                    faults.push(Fault::JobWhen { job, why });
                    None
                }
            },
            When::Cron(expression) => self.check_cron(expression, now_ms, faults),
        }
    }

    fn check_cron(
        &self,
        expression: &str,
        now_ms: u64,
        faults: &mut Vec<Fault>,
    ) -> Option<Schedule> {
        let (job, zone) = (self.to_string(), self.zone.as_deref().unwrap_or("UTC"));
        let cron = croner::Cron::from_str(expression);
        let zone = TimeZoneDatabase::bundled().get(zone).map_err(|_| zone.to_owned());
        if let Err(why) = &cron {
            faults.push(Fault::JobWhen { job: job.clone(), why: why.to_string() });
        }
        if let Err(zone) = &zone {
            faults.push(Fault::JobZone { job: job.clone(), zone: zone.clone() });
        }
        let schedule = Schedule::Cron { cron: Box::new(cron.ok()?), zone: zone.ok()? };
        if schedule.after(now_ms).is_none() {
            faults.push(Fault::JobNever { job });
            return None;
        }
        Some(schedule)
    }

    /// What all replicas have to agree on to run its occurrences.
    pub(crate) fn definition(&self) -> Definition {
        match &self.when {
            When::Every(period) => {
                Definition { every: Some(period.clone()), ..Definition::default() }
            }
            When::Cron(cron) => Definition {
                every: None,
                cron: Some(cron.clone()),
                zone: Some(self.zone.clone().unwrap_or_else(|| "UTC".to_owned())),
            },
        }
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(id) = &self.id {
            write!(f, "{id:?}, ")?;
        }
        match &self.when {
            When::Every(period) => write!(f, "every {period:?}"),
            When::Cron(cron) => {
                write!(f, "cron {cron:?} in {}", self.zone.as_deref().unwrap_or("UTC"))
            }
        }
    }
}

/// A durable job as the group keeps it. Another definition under the same id is another release's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Definition {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    every: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cron: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zone: Option<String>,
}

impl Definition {
    pub(crate) fn encode(&self) -> Vec<u8> {
        // Three strings in a struct: nothing of it can fail to be JSON.
        serde_json::to_vec(self).expect("strings serialise")
    }
}

fn checked_id(id: &str) -> Result<(), String> {
    if id.is_empty() {
        return Err("it is empty".to_owned());
    }
    check_key("a job's id", id).map_err(|error| error.to_string())
}

fn parsed_period(period: &str) -> Result<u64, String> {
    let parsed = humantime::parse_duration(period).map_err(|error| error.to_string())?;
    if parsed < PERIOD_MIN {
        return Err(format!("the shortest period is {PERIOD_MIN:?}"));
    }
    u64::try_from(parsed.as_millis()).map_err(|_| "the period is too long".to_owned())
}

/// Which instants a job means, in ms since the Unix epoch. Pure: the same on every replica.
#[derive(Clone, Debug)]
pub(crate) enum Schedule {
    Every { period_ms: u64 },
    Cron { cron: Box<croner::Cron>, zone: TimeZone },
}

/// What to do with a claimed occurrence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Run it; then this one is next, and `None` the one after its end.
    Run { next: Next },
    /// It was missed and is passed over.
    Pass { next: Option<u64> },
}

/// The occurrence after the one that is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// This one, if there is one at all.
    Is(Option<u64>),
    /// The first after the run has ended.
    AfterTheRun,
}

impl Schedule {
    /// The first occurrence after an instant.
    pub(crate) fn after(&self, ms: u64) -> Option<u64> {
        match self {
            Self::Every { period_ms } => (ms / period_ms).checked_add(1)?.checked_mul(*period_ms),
            Self::Cron { cron, zone } => {
                let found = cron.find_next_occurrence(&zoned(ms, zone)?, false).ok()?;
                u64::try_from(found.timestamp().as_millisecond()).ok()
            }
        }
    }

    /// The last occurrence before an instant.
    fn before(&self, ms: u64) -> Option<u64> {
        match self {
            Self::Every { period_ms } => Some(ms.checked_sub(1)? / period_ms * period_ms),
            Self::Cron { cron, zone } => {
                let found = cron.find_previous_occurrence(&zoned(ms, zone)?, false).ok()?;
                u64::try_from(found.timestamp().as_millisecond()).ok()
            }
        }
    }

    /// What to do with the occurrence at `due_ms`, claimed at `now_ms`.
    pub(crate) fn plan(&self, due_ms: u64, now_ms: u64, missed: Missed, attempt: u32) -> Plan {
        let after = self.after(due_ms);
        let is_missed = attempt <= 1 && after.is_some_and(|after| after <= now_ms);
        match missed {
            Missed::Skip if is_missed => Plan::Pass { next: self.after(now_ms) },
            Missed::Skip => Plan::Run { next: Next::AfterTheRun },
            Missed::Once => Plan::Run { next: Next::Is(self.after(now_ms.max(due_ms))) },
            Missed::All(most) => match self.oldest_of(most, due_ms, now_ms) {
                Some(oldest) if is_missed => Plan::Pass { next: Some(oldest) },
                _ => Plan::Run { next: Next::Is(after) },
            },
        }
    }

    /// The oldest of the latest `most` occurrences up to `now_ms`, where it is later than `due_ms`.
    fn oldest_of(&self, most: u32, due_ms: u64, now_ms: u64) -> Option<u64> {
        let mut oldest = now_ms.saturating_add(1);
        for _ in 0..most {
            oldest = self.before(oldest)?;
            if oldest <= due_ms {
                return None;
            }
        }
        Some(oldest)
    }
}

fn zoned(ms: u64, zone: &TimeZone) -> Option<jiff::Zoned> {
    let at = Timestamp::from_millisecond(i64::try_from(ms).ok()?).ok()?;
    Some(at.to_zoned(zone.clone()))
}
