//! A chat comes from another replica, or from an earlier life: its conversation continues from what
//! is stored (SPEC C1, C8), or the fallback decides (SPEC C7).

use super::checkpoint::Checkpoint;
use super::conversation::core::{Given, Midway, Replay};
use super::conversation::{BeginError, From};
use super::ctx::Ctx;
use super::drive::drive;
use super::error::RuntimeError;
use super::events::Event;
use super::handover::{Fallback, HandoverOutcome, Interrupted, Interruption, Migration};
use super::job::{End, Job};
use super::memory::{Live, LiveRow};
use super::scope::Stored;
use super::talk::Fresh;

/// How a stored step is run again.
struct Resumed {
    visit: u32,
    replay: Option<Replay>,
    given: Vec<Given>,
    /// What is stored of the step that now runs again.
    stored: Option<(u32, Midway)>,
    outcome: HandoverOutcome,
}

/// Why it is not, in short and in words.
type Lost = (Interruption, String);

impl Job {
    /// Continues from a checkpoint, or leaves it to the fallback.
    pub(super) async fn resume(&self, checkpoint: Checkpoint, ctx: &mut Ctx) -> End {
        if let Some(flow) = self.runtime.flows.get(checkpoint.flow.as_str())
            && let Some(end) = self.cancelled(flow, &checkpoint.conversation, ctx).await
        {
            return end;
        }
        let name = checkpoint.flow.clone();
        match self.revive(&checkpoint, ctx) {
            Ok((live, resumed)) => {
                self.handover(&name, resumed.outcome);
                self.converse(live, resumed.given, true, ctx.is_changed()).await
            }
            Err((reason, why)) => {
                let stored = checkpoint.stub.is_none();
                let lost = Interrupted {
                    name,
                    reason,
                    step: Some(checkpoint.step),
                    state: stored.then_some(checkpoint.state),
                    initial: checkpoint.initial,
                };
                self.fall_back(lost, checkpoint.version, why, ctx).await
            }
        }
    }

    /// What is stored does not even decode.
    pub(super) async fn garbage(&self, why: String, ctx: &mut Ctx) -> End {
        let (name, reason) = ("?".to_owned(), Interruption::Undecodable);
        let lost = Interrupted { name, reason, step: None, state: None, initial: None };
        self.fall_back(lost, 1, why, ctx).await
    }

    fn revive(&self, checkpoint: &Checkpoint, ctx: &Ctx) -> Result<(Live, Resumed), Lost> {
        let changed = |why: &str| Err((Interruption::Changed, why.to_owned()));
        if let Some(stub) = checkpoint.stub {
            return Err((stub.into(), "it could not be stored".to_owned()));
        }
        let Some(flow) = self.runtime.flows.get(checkpoint.flow.as_str()) else {
            return changed("this bot has no such flow");
        };
        if flow.plan.stackful {
            return changed("it has no steps any more");
        }
        if checkpoint.ephemeral && *checkpoint.fingerprint != *flow.fingerprint {
            return changed("its steps or its state are others now");
        }
        let resumed = self.how(checkpoint, ctx);
        let fresh = Fresh { id: checkpoint.conversation.clone(), visit: resumed.visit };
        let (step, state) = (checkpoint.step.clone(), checkpoint.state.clone());
        let same = checkpoint.version == flow.plan.version;
        let from = From::Checkpoint { step, state, same };
        let live = self.live(flow, fresh, resumed.replay, from, checkpoint.initial.clone());
        match live {
            Ok(live) => {
                let row = match self.scope.stored() {
                    Stored::Known(Some(revision)) => Some(LiveRow { revision, stub: false }),
                    _ => None,
                };
                Ok((Live { row, stored: resumed.stored, ..live }, resumed))
            }
            Err(BeginError::Undecodable(why)) => Err((Interruption::Undecodable, why)),
            Err(BeginError::UnknownStep) => changed("it has no such step any more"),
            Err(BeginError::OtherVersion | BeginError::OtherState) => {
                changed("it is of another version, and nothing migrates it")
            }
        }
    }

    /// Where in its step it goes on, and what it is given.
    fn how(&self, checkpoint: &Checkpoint, ctx: &Ctx) -> Resumed {
        // Entering the step again makes the visit one higher.
        let (this, another) = (checkpoint.visit.saturating_sub(1), checkpoint.visit);
        let here = Given::Message(ctx.heard());
        let answered = |visit, sends, tries, given, stored| Resumed {
            visit,
            replay: Some(Replay { sends, tries }),
            given,
            stored,
            outcome: HandoverOutcome::Continued,
        };
        let restarted = |visit, stored| Resumed {
            visit,
            replay: None,
            given: Vec::new(),
            stored,
            outcome: HandoverOutcome::Restarted,
        };
        match (&checkpoint.answer, checkpoint.waits) {
            // It waited at its first question: up to there the step runs silently. From there on
            // it is a visit of its own: this replica or another may have gone on from here before,
            // with another message or without one, and what was said then may be known already.
            (_, Some(waits)) if waits.question == 0 => {
                answered(another, checkpoint.sends, waits.tries, vec![here], None)
            }
            // At a later one: it runs again, a visit of its own, so that what it asks again is not
            // taken for what was asked.
            (_, Some(_)) => restarted(another, None),
            // It was cut with its first question answered: by this very message, which the journal
            // kept; by one that the checkpoint kept, and this message is for the next question; or
            // by one that is gone, and then this message is the answer, to which nothing was said.
            (Some(kept), None) => {
                let stored = Some((checkpoint.visit, Midway::Answered));
                let (sends, tries) = (kept.sends, kept.tries);
                match &kept.message {
                    _ if kept.again => restarted(another, None),
                    _ if self.is_its(checkpoint) => {
                        answered(this, sends, tries, vec![here], stored)
                    }
                    Some(message) if checkpoint.ticket.is_none() => {
                        let kept = Given::Message(message.clone().into());
                        answered(this, sends, tries, vec![kept, here], stored)
                    }
                    _ => answered(another, sends, tries, vec![here], None),
                }
            }
            // It was entered and had not asked.
            (None, None) => restarted(this, Some((checkpoint.visit, Midway::Entered))),
        }
    }

    /// Whether the checkpoint was written while this very message was at work.
    fn is_its(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.ticket.is_some() && checkpoint.ticket == self.scope.journaled()
    }

    fn handover(&self, name: &str, outcome: HandoverOutcome) {
        let (key, name) = (self.chat(), name.to_owned());
        self.runtime.events.emit(Event::Handover { key, name, outcome });
    }

    /// A conversation cannot continue.
    async fn fall_back(&self, lost: Interrupted, version: u32, why: String, ctx: &mut Ctx) -> End {
        let reason = lost.reason;
        if reason != Interruption::NotForwarded {
            let (chat, flow) = (self.chat(), lost.name.clone());
            let error = RuntimeError::Checkpoint { chat, flow, why };
            self.runtime.events.error(Some(self.chat()), error);
        }
        match self.runtime.handover.fallback.clone() {
            Fallback::Drop => {}
            Fallback::Notify => return self.notify(lost, ctx).await,
            Fallback::Restart => match self.restarted(&lost, version) {
                Some(live) => {
                    self.handover(&lost.name, HandoverOutcome::Reentered(reason));
                    return self.converse(live, Vec::new(), true, ctx.is_changed()).await;
                }
                None => tracing::warn!(chat = %self.scope.chat(), name = %lost.name, "no restart"),
            },
            Fallback::Function(function) => match self.decided(&function, &lost, ctx).await {
                Ok(None) => {}
                Ok(Some(end)) => {
                    self.handover(&lost.name, HandoverOutcome::Handled(reason));
                    return end;
                }
                Err(end) => return end,
            },
        }
        self.handover(&lost.name, HandoverOutcome::Dropped(reason));
        self.route(ctx).await
    }

    async fn notify(&self, lost: Interrupted, ctx: &Ctx) -> End {
        let id = format!("{}/{}/interrupted", self.scope.chat(), self.scope.origin());
        let notice = self.runtime.handover.notice(ctx.lang());
        match self.scope.send(id.clone(), notice).await {
            Ok(()) => {
                self.handover(&lost.name, HandoverOutcome::Notified(lost.reason));
                End::Over
            }
            Err(source) => End::Failed(RuntimeError::Send { chat: self.chat(), id, source }),
        }
    }

    /// The conversation from its beginning; `None` where that is not known any more.
    fn restarted(&self, lost: &Interrupted, version: u32) -> Option<Live> {
        let flow = self.runtime.flows.get(lost.name.as_str())?;
        let initial = lost.initial.clone()?;
        let from = From::Start { state: initial.clone(), same: version == flow.plan.version };
        let fresh = Fresh { id: self.scope.origin().to_owned(), visit: 0 };
        self.live(flow, fresh, None, from, Some(initial)).ok()
    }

    /// Asks the bot's own function; `Some` = it consumed the message.
    async fn decided(
        &self,
        function: &Migration,
        lost: &Interrupted,
        ctx: &mut Ctx,
    ) -> Result<Option<End>, End> {
        let driven = {
            let mut running = function.call(lost.clone(), ctx);
            let early = self.scope.clone();
            drive(&self.runtime, &self.scope, running.as_mut(), || false, early).await
        };
        let consumed = self.handled("fallback", driven)?;
        Ok(match ctx.take_entering() {
            Some(entering) => Some(self.enter(entering, ctx).await),
            None => consumed.then_some(End::Over),
        })
    }
}
