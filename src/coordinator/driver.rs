//! The life of a replica's sessions: open, renew, give up, come back.
//!
//! Problem: the holder of a lease must stop before the group may give its rights to another, though
//! answers are late or lost, the process pauses, and clocks run apart. Idea (DESIGN 3): count from
//! the instant just *before the first attempt* of the last renewal that was answered, which is
//! earlier than any node's apply of it; stop a margin before that instant + lease.
//!
//! Invariants:
//! * `seq` strictly increases; a retry keeps its seq and its sent instant.
//! * Giving up is final: the session is closed and a new incarnation is opened. An answer that comes
//!   afterwards changes nothing ([`super::guards::Tenure`] sees to that).
//! * One task runs it all, dispatch and renewal in turn: a process whose runtime does not get to
//!   run its tasks does not renew either (DESIGN 3 rule 11).

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;

use super::group::{Phase, Shared};
use super::guards::{Returned, Tenure};
use super::namesakes::Namesakes;
use super::session::Session;
use super::{CoordinationError, CoordinatorEvent, LostReason};
use crate::clock::BootInstant;
use crate::group::{ExecuteError, SessionEvent, SessionEvents, Unavailable, look};
use crate::machine::{
    Authority, Command, Effect, EndReason, Op, QueueKey, Refusal, Reply, SessionKind,
};
use crate::types::{Incarnation, TicketId};

/// How long opening may fail before the log says so (case c21), and how often it does then.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// How long a release that nobody waits for may wait for another command to share an entry with: the
/// chat's next ticket, most often.
const RELEASE_WITHIN: Duration = Duration::from_millis(5);

/// How often it is looked for turns that lapsed: they go together.
const LAPSE_MIN: Duration = Duration::from_millis(50);
const LAPSE_MAX: Duration = Duration::from_secs(5);

/// Between two attempts of anything that failed at once.
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Outboxes named again at each renewal: an event that its reader was too slow for is made good.
const OUTBOXES_NAMED_MAX: usize = 1_000;

/// Lease under which an election can outlast it (SPEC E2).
const LEASE_SHORT: Duration = Duration::from_secs(3);

/// How far before the lease's end the holder stops (DESIGN 3).
pub(super) fn margin(lease: Duration) -> Duration {
    if lease < Duration::from_secs(1) {
        lease / 3
    } else {
        (lease / 10).max(Duration::from_millis(250))
    }
}

/// Whether the coordinator goes on after a session.
enum After {
    Reopen,
    Stop,
}

/// Runs sessions until the coordinator is closed.
pub(super) async fn run(shared: Arc<Shared>) {
    if shared.lease < LEASE_SHORT {
        tracing::warn!(
            lease = ?shared.lease,
            "a lease this short can end while the group elects a leader or a machine is busy: its \
             holder then loses its turns and comes back; from 3 s on it survives both"
        );
    }
    let mut namesakes = Namesakes::default();
    loop {
        let opened = tokio::select! {
            biased;
            opened = open(&shared) => opened,
            () = shared.asked_to_close() => break,
        };
        let session = opened.session.clone();
        let after = serve(&shared, opened, &mut namesakes).await;
        shared.group.wakeups().forget_session(session.incarnation());
        if let After::Stop = after {
            break;
        }
    }
    shared.closed();
}

/// A session just opened.
struct Opened {
    session: Arc<Session>,
    returned: mpsc::UnboundedReceiver<Returned>,
    orphans: mpsc::UnboundedReceiver<Returned>,
    stranded: mpsc::UnboundedReceiver<QueueKey>,
    events: SessionEvents,
    lease: Duration,
    /// Just before the first attempt of its opening.
    sent: BootInstant,
}

/// Opens a session, however long that takes, and says so where it takes long (case c21).
async fn open(shared: &Arc<Shared>) -> Opened {
    let began = shared.clock.now();
    let report = async {
        loop {
            shared.clock.sleep_until(shared.clock.now() + REPORT_EVERY).await;
            tracing::warn!(
                prefix = %shared.prefix,
                replica = %shared.replica,
                waited = ?(shared.clock.now() - began),
                trouble = shared.trouble().map(tracing::field::display),
                "cannot open a session yet: the group does not answer; still trying"
            );
        }
    };
    let attempts = async {
        loop {
            match open_once(shared).await {
                Ok(opened) => return opened,
                Err(fault) => tracing::debug!(prefix = %shared.prefix, fault, "no session yet"),
            }
            shared.clock.sleep_until(shared.clock.now() + PAUSE_MAX).await;
        }
    };
    tokio::select! {
        biased;
        opened = attempts => opened,
        () = report => unreachable!("it reports for ever"),
    }
}

async fn open_once(shared: &Arc<Shared>) -> Result<Opened, String> {
    let sent = shared.clock.now();
    // An answer later than that is of no use, and the session it tells of ends by itself.
    let deadline = sent + (shared.lease - margin(shared.lease));
    let command = Command::OpenSession {
        prefix: shared.prefix.clone(),
        kind: SessionKind::Replica,
        replica: shared.replica.0.clone(),
        node: shared.group.node_id(),
        lease_ms: shared.lease.as_millis() as u64,
    };
    // The session lives in this process and ends with it (SPEC E6).
    let command = match shared.group.process() {
        Some(process) => Command::ForProcess { process, command: Box::new(command) },
        None => command,
    };
    let reply = shared.execute(command, deadline).await.map_err(|fault| fault.to_string())?;
    let Reply::Session { session: incarnation, lease_ms, .. } = reply else {
        shared.note(Some(Unavailable::NotServing { why: format!("{reply:?}") }));
        return Err(format!("the group refused: {reply:?}"));
    };
    let lease = Duration::from_millis(lease_ms);
    let events = shared.group.wakeups().session(incarnation);
    let (tenure, returned) =
        Tenure::new(incarnation, shared.clock.clone(), sent + (lease - margin(lease)));
    let (group, prefix) = (shared.group.clone(), shared.prefix.clone());
    let how = *shared.sticky.borrow();
    let (session, orphans, stranded) =
        Session::new(tenure, group, prefix, shared.journaled.clone(), how);
    let session = Arc::new(session);
    Ok(Opened { session, returned, orphans, stranded, events, lease, sent })
}

/// Serves one session to its end.
async fn serve(shared: &Arc<Shared>, opened: Opened, namesakes: &mut Namesakes) -> After {
    let Opened { session, returned, orphans, stranded, events, lease, sent } = opened;
    let incarnation = session.incarnation();
    namesakes.opened(incarnation, &look(&*shared.group, |machine| machine.namesakes(incarnation)));
    tracing::info!(prefix = %shared.prefix, replica = %shared.replica, %incarnation, "session open");
    shared.enter(Phase::Open(session.clone()));
    shared.tell(CoordinatorEvent::Opened { incarnation });
    // Effects of the opening itself came before anybody could listen.
    session.resync();
    adopt_outboxes(shared, incarnation);

    let ended = {
        let reason = tokio::select! {
            biased;
            () = shared.asked_to_close() => None,
            reason = session.tenure.lost() => Some(reason),
            reason = watch_over(shared, &session) => Some(reason),
            reason = dispatch(shared, &session, events) => Some(reason),
            reason = renew(shared, &session, lease, sent, namesakes) => Some(reason),
            () = give_back(shared, &session, lease, returned, orphans) => Some(LostReason::Expired),
            () = sticking(shared, &session, lease, stranded) => Some(LostReason::Expired),
        };
        reason.map(|reason| session.tenure.end(reason))
    };
    let Some(reason) = ended else {
        session.tenure.end(LostReason::SteppedDown);
        let closing = Command::CloseSession { session: incarnation };
        close(shared, closing, Duration::from_secs(5)).await;
        return After::Stop;
    };
    tracing::warn!(prefix = %shared.prefix, %incarnation, ?reason, "session lost; opening another");
    shared.enter(Phase::Opening);
    shared.tell(CoordinatorEvent::Lost { incarnation, reason });
    // Others need not wait for the lease to run out. No harm where it comes late: it names only
    // this incarnation. What it was sending when it was lost is in doubt, as if it had died.
    let giving_up = Command::GiveUpSession { session: incarnation };
    if giving_up.level() <= shared.group.command_level() {
        close(shared, giving_up, lease / 3).await;
    }
    After::Reopen
}

/// Closes a session as well as can be: what is not closed expires.
async fn close(shared: &Shared, closing: Command, within: Duration) {
    let deadline = shared.clock.now() + within;
    loop {
        let asked = shared.execute(closing.clone(), deadline);
        let answer = tokio::select! {
            biased;
            answer = asked => answer,
            () = shared.clock.sleep_until(deadline) => return,
        };
        match answer {
            Ok(_) => return,
            Err(fault) => tracing::debug!(?closing, %fault, "closing the session failed"),
        }
        shared.clock.sleep_until((shared.clock.now() + PAUSE_MAX).min(deadline)).await;
        if shared.clock.now() >= deadline {
            return;
        }
    }
}

/// Wakes at the give-up instant. Whoever acts asks the clock itself; this wakes who waits.
async fn watch_over(shared: &Shared, session: &Session) -> LostReason {
    loop {
        shared.clock.sleep_until(session.tenure.until()).await;
        if let Err(reason) = session.tenure.check() {
            return reason;
        }
    }
}

/// Takes in what applies on this node did to the session.
async fn dispatch(shared: &Shared, session: &Session, mut events: SessionEvents) -> LostReason {
    let mut dead_letters = shared.group.wakeups().dead_letters();
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            biased;
            Some(letter) = dead_letters.recv() => {
                if let Effect::DeadLettered { prefix, chat, ticket, id } = letter
                    && prefix == shared.prefix
                {
                    shared.tell(CoordinatorEvent::DeadLettered { chat, ticket, id });
                }
            }
            got = events.recv_many(&mut batch, 256) => if got == 0 {
                // Another listener took over this session: two coordinators never share one.
                return LostReason::Superseded;
            },
        }
        let mut grants = Vec::new();
        for event in batch.drain(..) {
            match event {
                SessionEvent::Effect(Effect::Granted { queue, ticket, grant, .. }) => {
                    grants.push((queue, ticket, grant));
                }
                SessionEvent::Effect(Effect::TicketEnded { ticket, .. }) => {
                    // In order: its grant may be among those just gathered.
                    session.granted(grants.drain(..));
                    session.ended(ticket);
                }
                SessionEvent::Effect(Effect::CalledBack { queue, .. }) => {
                    session.called_back(&queue);
                }
                SessionEvent::Effect(Effect::SessionEnded { reason, .. }) => {
                    return match reason {
                        EndReason::Closed => LostReason::SteppedDown,
                        EndReason::Expired | EndReason::Dead => LostReason::Expired,
                    };
                }
                SessionEvent::Effect(Effect::OutboxAdopted { chat, .. }) => {
                    shared.tell(CoordinatorEvent::OutboxAdopted { chat });
                }
                SessionEvent::Effect(Effect::OutboxReady { chat, .. }) => {
                    shared.tell(CoordinatorEvent::OutboxReady { chat });
                }
                // An adopted ticket is granted like any other; arming is the keeper's.
                SessionEvent::Effect(_) => {}
                SessionEvent::Resync => {
                    grants.clear();
                    session.resync();
                    name_outboxes(shared, session.incarnation(), 0);
                    let alive = |machine: &crate::machine::Machine| {
                        machine.session(session.incarnation()).is_some()
                    };
                    if !look(&*shared.group, alive) {
                        return LostReason::Expired;
                    }
                }
            }
        }
        session.granted(grants);
    }
}

/// Tells of the outboxes a session has from its first moment: each is left by one that ended.
fn adopt_outboxes(shared: &Shared, session: Incarnation) {
    for (_, chat) in look(&*shared.group, |machine| machine.outboxes_of(session)) {
        shared.tell(CoordinatorEvent::OutboxAdopted { chat: chat.clone() });
        shared.tell(CoordinatorEvent::OutboxReady { chat });
    }
}

/// Tells of outboxes that wait to be sent, from the `from`-th on.
fn name_outboxes(shared: &Shared, session: Incarnation, from: usize) -> usize {
    let all = look(&*shared.group, |machine| machine.outboxes_of(session));
    let from = if from < all.len() { from } else { 0 };
    let named = all.into_iter().skip(from).take(OUTBOXES_NAMED_MAX);
    let chats: Vec<String> = named.map(|(_, chat)| chat).collect();
    let next = from + chats.len();
    for chat in chats {
        shared.tell(CoordinatorEvent::OutboxReady { chat });
    }
    next
}

/// Renews every lease / 3, until the session is lost.
async fn renew(
    shared: &Shared,
    session: &Session,
    mut lease: Duration,
    opened: BootInstant,
    namesakes: &mut Namesakes,
) -> LostReason {
    let tenure = &session.tenure;
    let mut last_seq = 0;
    let mut renewed = opened;
    let mut outbox = 0;
    loop {
        shared.clock.sleep_until(renewed + lease / 3).await;
        outbox = name_outboxes(shared, session.incarnation(), outbox);
        let seen = look(&*shared.group, |machine| machine.session(session.incarnation()));
        last_seq = seen.map_or(last_seq, |view| last_seq.max(view.seq)) + 1;
        let sent = shared.clock.now();
        let answer = match renew_once(shared, tenure, lease, last_seq).await {
            Ok(answer) => answer,
            Err(reason) => return reason,
        };
        match answer {
            // The answer names a newer session under this replica id, but not whether it lives: the
            // namesakes are judged by their own renewals.
            Reply::Renewed { lease_ms, .. } => {
                lease = Duration::from_millis(lease_ms);
                if let Err(reason) = tenure.extend(sent + (lease - margin(lease))) {
                    return reason;
                }
                renewed = sent;
                let own = session.incarnation();
                let live = look(&*shared.group, |machine| machine.namesakes(own));
                for other in namesakes.renewed(own, &live) {
                    shared.tell(CoordinatorEvent::ReplicaIdShared { other });
                }
            }
            // An attempt before this one arrived, so the session lives; but only an answer that
            // says so counts. The next number goes out at once.
            Reply::Stale => {}
            _ => return LostReason::Expired,
        }
    }
}

/// Asks with one number until there is an answer.
async fn renew_once(
    shared: &Shared,
    tenure: &Tenure,
    lease: Duration,
    seq: u64,
) -> Result<Reply, LostReason> {
    let session = tenure.incarnation();
    loop {
        // Every attempt is an act (DESIGN 3 rule 4).
        tenure.check()?;
        let deadline = (shared.clock.now() + lease / 3).min(tenure.until());
        let asked = shared.execute(Command::RenewSession { session, seq: Some(seq) }, deadline);
        let answer = tokio::select! {
            biased;
            answer = asked => answer,
            // Its own deadline is the carrier's to keep; one that does not must not stop this.
            () = shared.clock.sleep_until(deadline) => continue,
        };
        match answer {
            Ok(reply) => return Ok(reply),
            Err(fault) => {
                tracing::debug!(%session, seq, %fault, "renewal has no answer; asking again");
                shared.clock.sleep_until(shared.clock.now() + pause(lease)).await;
            }
        }
    }
}

fn pause(lease: Duration) -> Duration {
    (lease / 20).min(PAUSE_MAX)
}

/// Ends in the group what was given back here.
async fn give_back(
    shared: &Shared,
    session: &Session,
    lease: Duration,
    mut returned: mpsc::UnboundedReceiver<Returned>,
    mut orphans: mpsc::UnboundedReceiver<Returned>,
) {
    let mut under_way = FuturesUnordered::new();
    loop {
        let next = tokio::select! {
            biased;
            // First: what is under way goes on only when it is looked at.
            Some(()) = under_way.next(), if !under_way.is_empty() => continue,
            Some(next) = returned.recv() => next,
            Some(next) = orphans.recv() => next,
            else => return,
        };
        under_way.push(release(shared, session.incarnation(), lease, next));
    }
}

/// Looks after turns that stay here: gives back those that lapse, and takes tickets for messages
/// that waited for one that ended.
async fn sticking(
    shared: &Shared,
    session: &Arc<Session>,
    lease: Duration,
    mut stranded: mpsc::UnboundedReceiver<QueueKey>,
) {
    let mut how = shared.sticky.subscribe();
    let mut under_way = FuturesUnordered::new();
    loop {
        let now = *how.borrow_and_update();
        session.keep_turns(now);
        let every = now.map(|how| (how.idle / 12).clamp(LAPSE_MIN, LAPSE_MAX));
        let next_look = async {
            match every {
                Some(every) => shared.clock.sleep_until(shared.clock.now() + every).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            // The coordinator keeps the sender.
            _ = how.changed() => {}
            Some(()) = under_way.next(), if !under_way.is_empty() => {}
            Some(queue) = stranded.recv() => {
                under_way.push(requeue(shared, session, lease, queue));
            }
            () = next_look => {}
        }
    }
}

/// Takes a ticket for the messages that waited for a turn that ended, where they need one. It serves
/// them all, and is asked for before the ticket of any that comes later.
async fn requeue(shared: &Shared, session: &Arc<Session>, lease: Duration, queue: QueueKey) {
    while session.needs_ticket(&queue) {
        let take = session.taking(queue.clone());
        let command = Command::TakeTicket {
            session: session.incarnation(),
            queue: queue.clone(),
            if_free: false,
        };
        let deadline = shared.clock.now() + lease / 3;
        match shared.execute(command, deadline).await {
            Ok(Reply::Ticket { ticket, .. }) => take.answered_for_oldest(ticket),
            Ok(other) => {
                // Whoever waits is told that its turn is lost.
                tracing::warn!(?other, "a message's turn ended before it, and it got no ticket");
                session.refuse_stranded(&queue);
            }
            // A ticket that was taken after all is an orphan. The next is asked for later, and until
            // then nobody else does.
            Err(fault) => {
                tracing::debug!(%fault, "a ticket has no answer; asking again");
                shared.clock.sleep_until(shared.clock.now() + pause(lease)).await;
                drop(take);
            }
        }
    }
}

/// Releases or withdraws one ticket; asks until there is an answer (SPEC E4).
async fn release(shared: &Shared, session: Incarnation, lease: Duration, returned: Returned) {
    let Returned { ticket, granted, answer } = returned;
    // Whoever asked, or stands in the queue, is not kept waiting.
    let rides = answer.is_none()
        && granted.as_ref().is_some_and(|(queue, fence)| {
            look(&*shared.group, |machine| machine.is_alone(queue, ticket, *fence))
        });
    let key = granted.as_ref().map(|(queue, _)| queue.name.clone());
    let prefix = shared.prefix.clone();
    let command = match granted {
        // Under its fence, so that asking again never ends a later grant of the same ticket
        // (a journaled message that was returned is granted again).
        Some((queue, fence)) => Command::Commit {
            by: Authority::Holder { queue, fence, session: Some(session) },
            ops: vec![Op::Release { prefix, ticket }],
        },
        None => Command::Release { prefix, ticket, session },
    };
    let latest = shared.clock.now() + if rides { RELEASE_WITHIN } else { Duration::ZERO };
    let reply = loop {
        let deadline = shared.clock.now() + lease / 6;
        let asked = shared.execute_by(command.clone(), latest, deadline);
        let outcome = tokio::select! {
            biased;
            outcome = asked => outcome,
            () = shared.clock.sleep_until(deadline) => continue,
        };
        match outcome {
            Ok(reply) => break reply,
            Err(fault) => {
                tracing::debug!(%ticket, %fault, "a release has no answer; asking again");
                shared.clock.sleep_until(shared.clock.now() + pause(lease)).await;
            }
        }
    };
    let key = key.unwrap_or_else(|| format!("ticket {ticket}"));
    let outcome = released(ticket, key, &reply);
    if let Some(answer) = answer {
        // Whoever asked may have stopped waiting.
        let _ = answer.send(outcome);
    }
}

/// What the answer to a release means: whatever says that it is not held is success.
fn released(ticket: TicketId, key: String, reply: &Reply) -> Result<(), CoordinationError> {
    match reply {
        Reply::SessionExpired | Reply::Refused(Refusal::SessionExpired) => {
            Err(CoordinationError::LeaseLost { key, reason: LostReason::Expired })
        }
        Reply::Done
        | Reply::Committed(_)
        | Reply::TicketGone
        | Reply::UnknownTicket
        | Reply::NotYours
        | Reply::Refused(Refusal::Fenced { .. }) => Ok(()),
        other => {
            tracing::error!(%ticket, ?other, "a release was answered with what it cannot be");
            Err(CoordinationError::OutcomeUnknown { why: format!("{other:?}") })
        }
    }
}

/// Whether nothing was done and asking again may help.
pub(super) fn may_repeat(fault: &ExecuteError) -> bool {
    matches!(fault, ExecuteError::NotExecuted(why) if !matches!(why, Unavailable::Overloaded { .. }))
}
