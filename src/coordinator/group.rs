//! The coordinator over a group: a node of a Raft group, or a hub in memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinHandle;

use super::driver::{self, may_repeat};
use super::group_clock::GroupClock;
use super::place::Place;
use super::session::{Journaled, Session};
use super::sticky::Sticky;
use super::{
    CoordinationError, Coordinator, CoordinatorEvent, JournaledTurn, Lead, LostReason, Ticket,
    Turn, UnavailableCause, under,
};
use crate::clock::{BootInstant, Clock};
use crate::group::{ExecuteError, Group, Unavailable, look};
use crate::machine::{Admission, Admit, Command, QueueKey, QueueKind, Reply, TicketState};
use crate::store::RowKey;
use crate::types::{ChatKey, Incarnation, Prefix, ReplicaId, TicketId};

/// Events a slow reader may fall behind by.
const EVENTS_KEPT: usize = 4_096;

/// The shortest lease (SPEC E2).
const LEASE_MIN: Duration = Duration::from_millis(500);

/// A question to the group waits at least so long.
const PATIENCE_MIN: Duration = Duration::from_secs(5);

/// Between two attempts of what was certainly not done.
const PAUSE: Duration = Duration::from_millis(50);

/// How a replica coordinates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorOptions {
    /// How long the group waits for a silent replica before it passes on what that held: the time a
    /// take-over needs, and how long a replica may freeze. At least 500 ms.
    pub lease: Duration,
    /// What this replica calls itself; a random UUID where `None`. Unique among running replicas.
    pub replica_id: Option<ReplicaId>,
}

impl Default for CoordinatorOptions {
    fn default() -> Self {
        Self { lease: Duration::from_secs(15), replica_id: None }
    }
}

/// Where a coordinator stands.
#[derive(Clone)]
pub(super) enum Phase {
    /// Never opened.
    New,
    /// No session yet, or not again yet.
    Opening,
    /// A session is open.
    Open(Arc<Session>),
    /// Asked to close.
    Closing,
    /// Closed; may be opened again.
    Closed,
    /// Dead, for good.
    Crashed,
}

impl Phase {
    fn is_ending(&self) -> bool {
        matches!(self, Self::Closing | Self::Closed | Self::Crashed)
    }
}

/// What the coordinator and its task share.
pub(super) struct Shared {
    pub(super) group: Arc<dyn Group>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) prefix: Prefix,
    pub(super) replica: ReplicaId,
    pub(super) lease: Duration,
    pub(super) phase: crate::watch::Sender<Phase>,
    pub(super) journaled: mpsc::UnboundedSender<Journaled>,
    events: broadcast::Sender<CoordinatorEvent>,
    /// How turns stay here, for this session and the next ones.
    pub(super) sticky: crate::watch::Sender<Option<Sticky>>,
    /// Why the last question to the group had no answer.
    trouble: Mutex<Option<Unavailable>>,
}

impl Shared {
    /// Asks the group, remembering whether it answers.
    pub(super) async fn execute(
        &self,
        command: Command,
        deadline: BootInstant,
    ) -> Result<Reply, ExecuteError> {
        let answer = self.group.execute(command, deadline).await;
        self.noted(answer)
    }

    /// The same for what may share an entry until `latest`.
    pub(super) async fn execute_by(
        &self,
        command: Command,
        latest: BootInstant,
        deadline: BootInstant,
    ) -> Result<Reply, ExecuteError> {
        let answer = self.group.execute_by(command, latest, deadline).await;
        self.noted(answer)
    }

    fn noted(&self, answer: Result<Reply, ExecuteError>) -> Result<Reply, ExecuteError> {
        self.note(match &answer {
            Ok(_) => None,
            Err(ExecuteError::NotExecuted(why) | ExecuteError::OutcomeUnknown(why)) => {
                Some(why.clone())
            }
        });
        answer
    }

    pub(super) fn note(&self, trouble: Option<Unavailable>) {
        *self.trouble.lock() = trouble;
    }

    pub(super) fn trouble(&self) -> Option<Unavailable> {
        self.trouble.lock().clone()
    }

    pub(super) fn tell(&self, event: CoordinatorEvent) {
        // Nobody has to listen.
        let _ = self.events.send(event);
    }

    /// Resolves when the coordinator is to close.
    pub(super) async fn asked_to_close(&self) {
        // `self` keeps the sender.
        let _ = self.phase.subscribe().wait_for(Phase::is_ending).await;
    }

    /// The task goes on to this phase, unless the coordinator is to end.
    pub(super) fn enter(&self, next: Phase) {
        self.phase.send_if_modified(|phase| {
            let goes_on = !phase.is_ending();
            if goes_on {
                *phase = next;
            }
            goes_on
        });
    }

    /// The task is done.
    pub(super) fn closed(&self) {
        self.phase.send_modify(|phase| {
            if !matches!(phase, Phase::Crashed) {
                *phase = Phase::Closed;
            }
        });
    }

    fn queue(&self, kind: QueueKind, name: impl Into<String>) -> QueueKey {
        QueueKey { kind, prefix: self.prefix.clone(), name: name.into() }
    }

    pub(super) fn until_patience_ends(&self) -> BootInstant {
        self.clock.now() + self.lease.max(PATIENCE_MIN)
    }

    /// The error of one who waited in vain since then.
    fn unavailable(&self, queue: &QueueKey, since: BootInstant) -> CoordinationError {
        let trouble = self.trouble();
        let (cause, advice) = match &trouble {
            Some(why @ Unavailable::NoQuorum { .. }) => {
                (UnavailableCause::NoQuorum, why.to_string())
            }
            Some(why) => (UnavailableCause::Timeout, why.to_string()),
            None => (
                UnavailableCause::Timeout,
                "the holder is still at work: wait longer, or let it settle sooner".to_owned(),
            ),
        };
        let holder = look(&*self.group, |machine| machine.holder(queue));
        CoordinationError::Unavailable {
            cause,
            key: queue.name.clone(),
            holder: holder.map(|holder| holder.session),
            fence: holder.and_then(|holder| holder.fence),
            age_ms: (self.clock.now() - since).as_millis() as u64,
            advice,
        }
    }

    /// The session that is open; waits for one.
    async fn live(
        &self,
        queue: &QueueKey,
        since: BootInstant,
        deadline: BootInstant,
    ) -> Result<Arc<Session>, CoordinationError> {
        let mut phase = self.phase.subscribe();
        loop {
            match &*phase.borrow_and_update() {
                Phase::Open(session) if session.tenure.check().is_ok() => {
                    return Ok(session.clone());
                }
                Phase::Opening | Phase::Open(_) => {}
                Phase::New | Phase::Closing | Phase::Closed | Phase::Crashed => {
                    return Err(CoordinationError::Closed);
                }
            }
            tokio::select! {
                biased;
                // `self` keeps the sender.
                _ = phase.changed() => {}
                () = self.clock.sleep_until(deadline) => {
                    return Err(self.unavailable(queue, since));
                }
            }
        }
    }

    /// Takes a place in a queue; `None` where `if_free` and it was not.
    async fn take(
        &self,
        queue: QueueKey,
        if_free: bool,
        deadline: BootInstant,
    ) -> Result<Option<Place>, CoordinationError> {
        let since = self.clock.now();
        loop {
            let session = self.live(&queue, since, deadline).await?;
            if !if_free && let Some(place) = session.local(&queue, since) {
                return Ok(Some(place));
            }
            let take = session.taking(queue.clone());
            let command = Command::TakeTicket {
                session: session.incarnation(),
                queue: queue.clone(),
                if_free,
            };
            // Where the session is lost meanwhile, what was taken ends with it.
            let asked = self.execute(command, deadline);
            let answer = tokio::select! {
                biased;
                answer = asked => answer,
                _ = session.tenure.lost() => continue,
                () = self.clock.sleep_until(deadline) => return Err(self.unavailable(&queue, since)),
            };
            match answer {
                Ok(Reply::Ticket { ticket, grant, .. }) => {
                    let place = take.answered(ticket, since);
                    // With `if_free` only a grant will do; a place without one withdraws itself.
                    return Ok((grant.is_some() || !if_free).then_some(place));
                }
                Ok(Reply::Held(_)) => return Ok(None),
                Ok(Reply::SessionExpired) => {
                    session.tenure.end(LostReason::Expired);
                }
                Ok(Reply::Full(limit)) => {
                    let why = format!("{} is at its limit of {limit:?}", queue.name);
                    return Err(CoordinationError::Overloaded { why });
                }
                Ok(other) => {
                    let why = format!("a ticket was answered with {other:?}");
                    return Err(CoordinationError::OutcomeUnknown { why });
                }
                Err(ExecuteError::NotExecuted(Unavailable::Overloaded { waiting })) => {
                    let why = format!("{waiting} commands wait at this node");
                    return Err(CoordinationError::Overloaded { why });
                }
                Err(fault) if may_repeat(&fault) && self.clock.now() < deadline => {
                    drop(take);
                    self.clock.sleep_until((self.clock.now() + PAUSE).min(deadline)).await;
                }
                // A ticket it may have taken is an orphan and given back when its turn comes, so to
                // the caller nothing was done.
                Err(_) => return Err(self.unavailable(&queue, since)),
            }
        }
    }
}

/// A replica's coordinator over a group. Cheap to clone: clones are the same replica.
///
/// The last clone dropped without [`Coordinator::close`] leaves the session to its lease.
#[derive(Clone)]
pub struct GroupCoordinator {
    shared: Arc<Shared>,
    owner: Arc<Owner>,
}

/// What ends with the last clone.
struct Owner {
    shared: Arc<Shared>,
    driver: Mutex<Option<JoinHandle<()>>>,
    /// Grants of journaled messages. Async, because it is held while waiting for one.
    journaled: tokio::sync::Mutex<mpsc::UnboundedReceiver<Journaled>>,
}

impl Owner {
    /// Stops at once; nothing is released.
    fn stop(&self, reason: LostReason) {
        if let Some(driver) = self.driver.lock().take() {
            driver.abort();
        }
        if let Phase::Open(session) = self.shared.phase.send_replace(Phase::Crashed) {
            session.tenure.end(reason);
            self.shared.group.wakeups().forget_session(session.incarnation());
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop(LostReason::SteppedDown);
    }
}

impl fmt::Debug for GroupCoordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupCoordinator")
            .field("prefix", &self.shared.prefix)
            .field("replica", &self.shared.replica)
            .field("incarnation", &self.incarnation())
            .finish()
    }
}

impl GroupCoordinator {
    /// A coordinator of this prefix; open it before use.
    pub fn new(group: Arc<dyn Group>, prefix: Prefix, options: CoordinatorOptions) -> Self {
        let (journaled, handed) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            clock: Arc::new(GroupClock(group.clone())),
            group,
            prefix,
            replica: options.replica_id.unwrap_or_else(ReplicaId::random),
            lease: options.lease.max(LEASE_MIN),
            phase: crate::watch::channel(Phase::New).0,
            journaled,
            events: broadcast::channel(EVENTS_KEPT).0,
            sticky: crate::watch::channel(None).0,
            trouble: Mutex::default(),
        });
        let owner = Owner {
            shared: shared.clone(),
            driver: Mutex::default(),
            journaled: tokio::sync::Mutex::new(handed),
        };
        Self { shared, owner: Arc::new(owner) }
    }

    /// The replica dies, as a killed process would: it stops renewing and acts no more; nothing is
    /// released, and the group finds out when the lease ends.
    pub fn crash(&self) {
        self.owner.stop(LostReason::Expired);
    }

    /// The group it stands on.
    pub fn group(&self) -> &Arc<dyn Group> {
        &self.shared.group
    }
}

#[async_trait]
impl Coordinator for GroupCoordinator {
    fn prefix(&self) -> &Prefix {
        &self.shared.prefix
    }

    fn replica(&self) -> &ReplicaId {
        &self.shared.replica
    }

    fn incarnation(&self) -> Option<Incarnation> {
        match &*self.shared.phase.borrow() {
            Phase::Open(session) if session.tenure.check().is_ok() => Some(session.incarnation()),
            _ => None,
        }
    }

    fn valid_until(&self) -> Option<BootInstant> {
        match &*self.shared.phase.borrow() {
            Phase::Open(session) if session.tenure.check().is_ok() => Some(session.tenure.until()),
            _ => None,
        }
    }

    fn journals(&self) -> bool {
        true
    }

    async fn open(&self) -> Result<(), CoordinationError> {
        let mut phase = self.shared.phase.subscribe();
        {
            let mut driver = self.owner.driver.lock();
            let idle = matches!(*phase.borrow_and_update(), Phase::New | Phase::Closed);
            if idle {
                self.shared.phase.send_replace(Phase::Opening);
                *driver = Some(tokio::spawn(driver::run(self.shared.clone())));
            }
        }
        let settled = |phase: &Phase| !matches!(phase, Phase::New | Phase::Opening);
        // `self` keeps the sender.
        match phase.wait_for(settled).await.as_deref() {
            Ok(Phase::Open(_)) => Ok(()),
            _ => Err(CoordinationError::Closed),
        }
    }

    async fn close(&self) -> Result<(), CoordinationError> {
        self.shared.phase.send_modify(|phase| {
            if matches!(phase, Phase::Opening | Phase::Open(_)) {
                *phase = Phase::Closing;
            }
        });
        let done = |phase: &Phase| matches!(phase, Phase::New | Phase::Closed | Phase::Crashed);
        // `self` keeps the sender.
        let _ = self.shared.phase.subscribe().wait_for(done).await;
        Ok(())
    }

    async fn take_ticket(&self, key: &ChatKey) -> Result<Ticket, CoordinationError> {
        let queue = self.shared.queue(QueueKind::Turn, key.to_string());
        let deadline = self.shared.until_patience_ends();
        match self.shared.take(queue, false, deadline).await? {
            Some(place) => Ok(Ticket::new(key.clone(), place)),
            None => Err(CoordinationError::OutcomeUnknown {
                why: "the group answered as if the ticket had been wanted only if free".to_owned(),
            }),
        }
    }

    async fn wait_turn(
        &self,
        ticket: &mut Ticket,
        until: BootInstant,
    ) -> Result<Turn, CoordinationError> {
        let place = ticket.place();
        let granted = tokio::select! {
            biased;
            granted = place.granted() => {
                let key = place.queue.name.clone();
                granted.map_err(|reason| CoordinationError::LeaseLost { key, reason })?
            }
            () = self.shared.clock.sleep_until(until) => {
                return Err(self.shared.unavailable(&place.queue, place.since));
            }
        };
        Ok(ticket.granted(&granted))
    }

    async fn admit(&self, messages: Vec<Admit>) -> Result<Vec<Admission>, CoordinationError> {
        let since = self.shared.clock.now();
        let deadline = self.shared.until_patience_ends();
        let first = messages.first().map(|message| message.chat.clone()).unwrap_or_default();
        let queue = self.shared.queue(QueueKind::Turn, first);
        loop {
            let session = self.shared.live(&queue, since, deadline).await?;
            let command = Command::Admit {
                prefix: self.shared.prefix.clone(),
                session: session.incarnation(),
                // Cloned, for the session may end first.
                messages: messages.clone(),
                cursor: None,
            };
            match self.shared.execute(command, deadline).await {
                Ok(Reply::Admitted(admissions)) => return Ok(admissions),
                Ok(Reply::SessionExpired) => {
                    session.tenure.end(LostReason::Expired);
                }
                Ok(Reply::Full(limit)) => {
                    let why = format!("the group is at its limit of {limit:?}");
                    return Err(CoordinationError::Overloaded { why });
                }
                Ok(other) => {
                    let why = format!("an admission was answered with {other:?}");
                    return Err(CoordinationError::OutcomeUnknown { why });
                }
                Err(ExecuteError::NotExecuted(Unavailable::Overloaded { waiting })) => {
                    let why = format!("{waiting} commands wait at this node");
                    return Err(CoordinationError::Overloaded { why });
                }
                Err(ExecuteError::OutcomeUnknown(why)) => {
                    return Err(CoordinationError::OutcomeUnknown { why: why.to_string() });
                }
                Err(ExecuteError::NotExecuted(_)) if self.shared.clock.now() >= deadline => {
                    return Err(self.shared.unavailable(&queue, since));
                }
                Err(ExecuteError::NotExecuted(_)) => {
                    let again = (self.shared.clock.now() + PAUSE).min(deadline);
                    self.shared.clock.sleep_until(again).await;
                }
            }
        }
    }

    async fn admit_under(
        &self,
        lead: &Lead,
        messages: Vec<Admit>,
        cursor: Option<(RowKey, Vec<u8>)>,
    ) -> Result<Vec<Admission>, CoordinationError> {
        under::admit(&self.shared, lead, messages, cursor).await
    }

    async fn next_journaled(&self) -> Option<JournaledTurn> {
        let mut journaled = self.owner.journaled.lock().await;
        let mut phase = self.shared.phase.subscribe();
        loop {
            let next = tokio::select! {
                biased;
                _ = phase.wait_for(Phase::is_ending) => return None,
                next = journaled.recv() => next?,
            };
            let Journaled { tenure, queue, ticket, grant, said, record } = next;
            // One of a session that was lost meanwhile is another's now.
            if tenure.check().is_err() {
                continue;
            }
            match queue.name.parse::<ChatKey>() {
                Ok(key) => {
                    let turn = Turn::new(key, queue, ticket, grant, tenure).after(said);
                    return Some(JournaledTurn { turn, record });
                }
                Err(fault) => {
                    // It was admitted under that name by other means than a bot's; give it back
                    // until it is a dead letter.
                    tracing::error!(name = %queue.name, %fault, "a journaled message has no chat");
                    drop(Lead::new(queue.name.clone(), queue, ticket, grant, tenure));
                }
            }
        }
    }

    async fn try_lead(&self, name: &str) -> Result<Option<Lead>, CoordinationError> {
        let queue = self.shared.queue(QueueKind::Lead, name);
        let deadline = self.shared.until_patience_ends();
        let Some(mut place) = self.shared.take(queue, true, deadline).await? else {
            return Ok(None);
        };
        let lost = |reason| CoordinationError::LeaseLost { key: name.to_owned(), reason };
        let granted = place.granted().await.map_err(lost)?;
        Ok(Some(Lead::at(name, &place, granted.grant)))
    }

    async fn campaign(&self, name: &str) -> Result<Lead, CoordinationError> {
        loop {
            let queue = self.shared.queue(QueueKind::Lead, name);
            let deadline = self.shared.until_patience_ends();
            let mut place = match self.shared.take(queue, false, deadline).await {
                Ok(Some(place)) => place,
                Ok(None) => continue,
                // A campaign waits as long as it takes.
                Err(CoordinationError::Unavailable { .. }) => continue,
                Err(fault) => return Err(fault),
            };
            // Lost with its session: campaign again under the next.
            if let Ok(granted) = place.granted().await {
                return Ok(Lead::at(name, &place, granted.grant));
            }
        }
    }

    fn keep_turns(&self, how: Option<Sticky>) {
        self.shared.sticky.send_replace(how);
        // At once, not only as its task gets to it: a turn that ends right now asks already.
        if let Phase::Open(session) = &*self.shared.phase.borrow() {
            session.keep_turns(how);
        }
    }

    fn overdue(&self, ticket: TicketId, since: BootInstant) -> Option<CoordinationError> {
        let state = look(&*self.shared.group, |m| m.ticket(&self.shared.prefix, ticket));
        match state {
            TicketState::Waiting { queue, .. } => Some(self.shared.unavailable(&queue, since)),
            _ => None,
        }
    }

    fn leader(&self, name: &str) -> Option<ReplicaId> {
        let queue = self.shared.queue(QueueKind::Lead, name);
        look(&*self.shared.group, |machine| {
            let holder = machine.holder(&queue).filter(|holder| holder.fence.is_some())?;
            machine.session(holder.session).map(|session| ReplicaId(session.replica))
        })
    }

    fn events(&self) -> broadcast::Receiver<CoordinatorEvent> {
        self.shared.events.subscribe()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.shared.clock.clone()
    }
}
