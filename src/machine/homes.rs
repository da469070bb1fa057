//! Homes: channels whose messages and replies belong to whoever leads their transport.
//!
//! Problem: some transports take one connection, so one elected replica has it (SPEC D1). A message of
//! such a channel that another replica handles is answered by nobody: its replies cannot go out there.
//! Idea: a channel may have a lead as its *home*. Its journaled tickets and its outboxes belong to the
//! session that holds that lead; they move with it, and wait while nobody does (SPEC D6).
//!
//! Invariants:
//! * A ticket at home that is not granted belongs to the leader, or to nobody while there is none.
//! * So does an outbox with something unsent.
//! * A granted turn is not moved: it ends where it runs, and goes home if it comes back.

use std::sync::Arc;

use super::state::Machine;
use super::tables::{ChatName, PrefixId, TicketKey};
use super::{Effect, QueueKey, QueueKind, SessionKind};
use crate::types::{Incarnation, Prefix};

/// The channel of a chat, as the chat's canonical string has it.
fn channel_of(chat: &str) -> &str {
    chat.split(':').next().unwrap_or(chat)
}

impl Machine {
    /// The lead a chat's channel belongs to, where it does.
    pub(super) fn home(&self, prefix: PrefixId, chat: &str) -> Option<&Arc<QueueKey>> {
        if self.tables.homes.len() == 0 {
            return None;
        }
        self.tables.homes.get(&(prefix, channel_of(chat).to_owned()))
    }

    /// The live replica that holds a lead.
    pub(super) fn leader_of(&self, lead: &QueueKey) -> Option<Incarnation> {
        let head = self.live_ticket(self.head(lead)?);
        let owner = head.grant.and(head.owner)?;
        let session = self.tables.sessions.get(&owner)?;
        (session.kind == SessionKind::Replica).then_some(owner)
    }

    /// Whom a chat's next message belongs to: the leader at home, else whoever was meant.
    pub(super) fn owner_at_home(
        &self,
        prefix: PrefixId,
        chat: &str,
        meant: Option<Incarnation>,
    ) -> Option<Incarnation> {
        match self.home(prefix, chat) {
            Some(lead) => self.leader_of(lead),
            None => meant,
        }
    }

    /// Gives a channel a home, another, or none, and moves what it has there.
    pub(super) fn set_home(
        &mut self,
        prefix: &Prefix,
        channel: &str,
        lead: Option<&str>,
        effects: &mut Vec<Effect>,
    ) {
        let prefix_id = self.prefix_id(prefix).expect("the draft found room, and it was interned");
        let key = (prefix_id, channel.to_owned());
        let lead = lead.map(|name| {
            let (prefix, name) = (prefix.clone(), name.to_owned());
            Arc::new(QueueKey { kind: QueueKind::Lead, prefix, name })
        });
        if self.tables.homes.get(&key) == lead.as_ref() {
            return;
        }
        match lead {
            Some(lead) => drop(self.tables.homes.insert(key, lead)),
            None => drop(self.tables.homes.remove(&key)),
        }
        let is = |prefix: PrefixId, chat: &str| prefix == prefix_id && channel_of(chat) == channel;
        let journaled = self.tables.journal.iter();
        let mut tickets: Vec<TicketKey> = journaled
            .filter(|(key, record)| is(key.prefix, &record.chat))
            .map(|(k, _)| *k)
            .collect();
        tickets.sort_unstable();
        let outboxes = self.tables.outboxes.iter();
        let unsent = outboxes
            .filter(|(chat, outbox)| is(chat.prefix, &chat.chat) && outbox.sent < outbox.last);
        let mut outboxes: Vec<Arc<ChatName>> = unsent.map(|(chat, _)| chat.clone()).collect();
        outboxes.sort_unstable();
        self.bring_home(tickets, outboxes, effects);
    }

    /// A lead was granted: what waited for its holder is the holder's.
    pub(super) fn lead_granted(&mut self, lead: &Arc<QueueKey>, effects: &mut Vec<Effect>) {
        let at_home = |machine: &Self, prefix, chat: &str| machine.home(prefix, chat) == Some(lead);
        if self.tables.homes.len() == 0 {
            return;
        }
        let orphans = self.index.orphans.iter().filter(|key| {
            let queue = &self.live_ticket(**key).queue;
            at_home(self, key.prefix, &queue.name)
        });
        let tickets: Vec<TicketKey> = orphans.copied().collect();
        let orphans = self.index.orphan_outboxes.iter();
        let outboxes = orphans.filter(|chat| at_home(self, chat.prefix, &chat.chat)).cloned();
        let outboxes = outboxes.collect();
        self.bring_home(tickets, outboxes, effects);
    }

    /// A lead ended, and its holder lives on: what it had by it is the next leader's, or nobody's.
    pub(super) fn lead_left(
        &mut self,
        lead: &Arc<QueueKey>,
        session: Incarnation,
        effects: &mut Vec<Effect>,
    ) {
        if self.tables.homes.len() == 0 {
            return;
        }
        let Some(held) = self.index.holdings.get(&session) else { return };
        let tickets = held.tickets.iter().filter(|key| {
            let queue = &self.live_ticket(**key).queue;
            queue.kind == QueueKind::Turn && self.home(key.prefix, &queue.name) == Some(lead)
        });
        let tickets = tickets.copied().collect();
        let outboxes = held.outboxes.iter();
        let outboxes = outboxes.filter(|chat| self.home(chat.prefix, &chat.chat) == Some(lead));
        let outboxes = outboxes.cloned().collect();
        self.bring_home(tickets, outboxes, effects);
    }

    /// A message that comes back goes to where it belongs now.
    pub(super) fn return_home(&mut self, key: TicketKey, effects: &mut Vec<Effect>) {
        let at_home = self.home(key.prefix, &self.live_ticket(key).queue.name).is_some();
        if at_home {
            self.bring_home(vec![key], Vec::new(), effects);
        }
    }

    /// Gives tickets that are journaled and not granted, and outboxes with something unsent, to whom
    /// they belong.
    fn bring_home(
        &mut self,
        tickets: Vec<TicketKey>,
        outboxes: Vec<Arc<ChatName>>,
        effects: &mut Vec<Effect>,
    ) {
        for key in tickets {
            let ticket = self.live_ticket(key);
            let queue = ticket.queue.clone();
            let owner = self.pick_replica(key.prefix, &queue.name);
            let journaled = self.tables.journal.contains(&key);
            // Without a home, whoever has it keeps it.
            let kept = ticket.owner.is_some() && self.home(key.prefix, &queue.name).is_none();
            if ticket.grant.is_some() || ticket.owner == owner || kept || !journaled {
                continue;
            }
            match ticket.owner.and_then(|owner| self.index.holdings.get_mut(&owner)) {
                Some(holdings) => drop(holdings.tickets.remove(&key)),
                None => drop(self.index.orphans.remove(&key)),
            }
            self.own(key, owner, effects);
            self.grant_head(&queue, effects);
        }
        for chat in outboxes {
            let had = self.tables.outboxes.get(&chat).and_then(|outbox| outbox.owner);
            let owner = self.pick_replica(chat.prefix, &chat.chat);
            let kept = had.is_some() && self.home(chat.prefix, &chat.chat).is_none();
            if had == owner || kept {
                continue;
            }
            match had.and_then(|had| self.index.holdings.get_mut(&had)) {
                Some(holdings) => drop(holdings.outboxes.remove(&chat)),
                None => drop(self.index.orphan_outboxes.remove(&chat)),
            }
            // Whoever had it may have been at a send.
            let adopter = owner.and_then(|owner| Some((owner, self.tables.sessions.get(&owner)?)));
            if let Some((session, record)) = adopter {
                let (prefix, chat) = (record.prefix.clone(), chat.chat.clone());
                effects.push(Effect::OutboxAdopted { session, prefix, chat });
            }
            self.set_outbox_owner(&chat, owner, effects);
        }
    }
}
