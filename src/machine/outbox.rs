//! Outboxes: what a chat was told, in order, and who has yet to send it (SPEC G3).
//!
//! Entries of a chat are numbered from 1 without gaps. `first..=last` are listed; those above `sent`
//! wait to be sent, one after another, by one session: the outbox's *owner*. It stays the same while
//! anything is unsent, so sends of a later turn queue behind those of an earlier one (SPEC E2). An
//! entry that only has to be listed counts as sent once those before it are.
//!
//! The id of an entry is known as long as it is listed and for a bounded time after, so a step that
//! runs again adds nothing.

use std::sync::Arc;

use super::Outgoing;
use super::commit::Acting;
use super::index::send_digest;
use super::state::{Machine, OutboxEntry};
use super::tables::{ChatName, EntryKey, Outbox, PrefixId};
use super::{Effect, Reply, SessionKind};
use crate::types::{Incarnation, Prefix};

/// How many ids of a chat's newest entries are known, listed or not.
const IDS_MAX: u64 = 1_000;

impl Machine {
    /// Adds an entry the draft found room for. The prefix is interned.
    pub(super) fn send(
        &mut self,
        acting: &Acting,
        prefix: &Prefix,
        chat: &str,
        send: &Outgoing,
        effects: &mut Vec<Effect>,
    ) {
        let prefix_id = self.prefix_id(prefix).expect("the caller interned it");
        let name = ChatName { prefix: prefix_id, chat: chat.to_owned() };
        let entry = OutboxEntry {
            number: 0,
            id: send.id.clone(),
            in_reply_to: send.in_reply_to.clone(),
            body: send.body.clone(),
            fence: acting.fence,
            turn_seq: send.turn_seq,
            unsent: send.deliver,
            keep: send.keep,
        };
        let sender = self.sender(acting, prefix_id, prefix, chat);
        self.append(&name, prefix, entry, sender, effects);
    }

    /// Adds an entry at the end of a chat's outbox, unless its id is known there. `sender` is to send
    /// it where nobody is to send yet.
    pub(super) fn append(
        &mut self,
        name: &ChatName,
        prefix: &Prefix,
        entry: OutboxEntry,
        sender: Option<Incarnation>,
        effects: &mut Vec<Effect>,
    ) {
        let OutboxEntry { unsent: deliver, keep, .. } = entry;
        self.settle_outbox(name, effects);
        if !self.index.send_ids.insert(send_digest(name, &entry.id)) {
            return;
        }
        let chat_name = match self.tables.outboxes.get_key(name) {
            Some(shared) => shared.clone(),
            None => {
                let shared = Arc::new(name.clone());
                let empty = Outbox { first: 1, known: 1, ..Outbox::default() };
                self.tables.outboxes.insert(shared.clone(), empty);
                shared
            }
        };
        let outbox = self.tables.outboxes.get_mut(&chat_name).expect("found or put there above");
        outbox.last += 1;
        outbox.keep = keep;
        let number = outbox.last;
        let was_idle = outbox.sent + 1 == number;
        if was_idle && !deliver {
            outbox.sent = number;
        }
        let entry = OutboxEntry { number, ..entry };
        let owner = outbox.owner;
        self.tables.entries.insert(EntryKey { chat: chat_name.clone(), number }, Arc::new(entry));
        self.trim(&chat_name);
        effects.push(Effect::Replied { prefix: prefix.clone(), chat: name.chat.clone() });
        match (deliver, owner) {
            (true, None) => {
                self.index.orphan_outboxes.remove(&chat_name);
                self.set_outbox_owner(&chat_name, sender, effects);
            }
            (true, Some(session)) => {
                let (prefix, chat) = (prefix.clone(), name.chat.clone());
                effects.push(Effect::OutboxReady { session, prefix, chat });
            }
            (false, _) => {}
        }
    }

    /// Who is to send: the leader of its home, else the replica that commits, else any.
    fn sender(
        &self,
        acting: &Acting,
        prefix_id: PrefixId,
        prefix: &Prefix,
        chat: &str,
    ) -> Option<Incarnation> {
        if self.home(prefix_id, chat).is_some() {
            return self.pick_replica(prefix_id, chat);
        }
        let committer = acting.session.filter(|session| {
            let session = self.tables.sessions.get(session);
            session.is_some_and(|s| s.kind == SessionKind::Replica && s.prefix == *prefix)
        });
        committer.or_else(|| self.pick_replica(prefix_id, chat))
    }

    /// Gives an outbox with unsent entries, that has no owner or whose owner has ended, another.
    pub(super) fn set_outbox_owner(
        &mut self,
        chat: &Arc<ChatName>,
        owner: Option<Incarnation>,
        effects: &mut Vec<Effect>,
    ) {
        let outbox = self.tables.outboxes.get_mut(chat).expect("an owned outbox exists");
        outbox.owner = owner;
        match owner.and_then(|owner| Some((owner, self.index.holdings.get_mut(&owner)?))) {
            Some((session, holdings)) => {
                holdings.outboxes.insert(chat.clone());
                self.outbox_ready(chat, session, effects);
            }
            None => drop(self.index.orphan_outboxes.insert(chat.clone())),
        }
    }

    fn outbox_ready(&self, chat: &ChatName, session: Incarnation, effects: &mut Vec<Effect>) {
        let prefix = self.tables.sessions.get(&session).map(|session| session.prefix.clone());
        let prefix = prefix.expect("outboxes belong to live sessions of their prefix");
        effects.push(Effect::OutboxReady { session, prefix, chat: chat.chat.clone() });
    }

    pub(super) fn mark_sent(
        &mut self,
        prefix: &Prefix,
        chat: &str,
        up_to: u64,
        session: Incarnation,
        effects: &mut Vec<Effect>,
    ) -> Reply {
        let Some(prefix_id) = self.acting(session, prefix) else { return Reply::SessionExpired };
        let name = ChatName { prefix: prefix_id, chat: chat.to_owned() };
        self.settle_outbox(&name, effects);
        let Some(chat) = self.tables.outboxes.get_key(&name).cloned() else {
            return Reply::NotYours;
        };
        let Some(outbox) = self.tables.outboxes.get(&chat) else { return Reply::NotYours };
        if outbox.owner != Some(session) {
            return Reply::NotYours;
        }
        let (mut sent, last) = (outbox.sent, outbox.last);
        while sent < last {
            let key = EntryKey { chat: chat.clone(), number: sent + 1 };
            let entry = self.tables.entries.get(&key).expect("unsent entries are listed");
            if entry.unsent {
                if sent >= up_to {
                    break;
                }
                let entry = self.tables.entries.get_mut(&key).expect("it was there above");
                Arc::make_mut(entry).unsent = false;
            }
            sent += 1;
        }
        let outbox = self.tables.outboxes.get_mut(&chat).expect("it was there above");
        outbox.sent = sent;
        if sent == last {
            outbox.owner = None;
            if let Some(holdings) = self.index.holdings.get_mut(&session) {
                holdings.outboxes.remove(&chat);
            }
        }
        self.trim(&chat);
        if sent < last {
            self.outbox_ready(&chat, session, effects);
        }
        Reply::Done
    }

    /// Takes entries that are no longer listed out, and forgets ids that are too old.
    fn trim(&mut self, chat: &Arc<ChatName>) {
        let outbox = self.tables.outboxes.get_mut(chat).expect("the caller found it");
        let Outbox { last, sent, first, known, keep, .. } = *outbox;
        let listed = first.max((sent + 1).saturating_sub(u64::from(keep)));
        let remembered = known.max((last + 1).saturating_sub(IDS_MAX)).min(listed);
        outbox.first = listed;
        outbox.known = remembered;
        for number in first..listed {
            let key = EntryKey { chat: chat.clone(), number };
            let entry = self.tables.entries.remove(&key).expect("a listed entry exists");
            self.tables.sent_ids.insert(key, send_digest(chat, &entry.id));
        }
        for number in known..remembered {
            let key = EntryKey { chat: chat.clone(), number };
            let digest = self.tables.sent_ids.remove(&key).expect("a known id is stored");
            self.index.send_ids.remove(&digest);
        }
    }

    /// The session that is to send what a chat's outbox holds.
    pub fn outbox_owner(&self, prefix: &Prefix, chat: &str) -> Option<Incarnation> {
        let name = ChatName { prefix: self.prefix_id(prefix)?, chat: chat.to_owned() };
        self.tables.outboxes.get(&name)?.owner.filter(|owner| !self.left_something(*owner))
    }

    /// A chat's listed outbox entries with a number above `after`, in order.
    pub fn outbox(
        &self,
        prefix: &Prefix,
        chat: &str,
        after: u64,
        limit: usize,
    ) -> Vec<OutboxEntry> {
        let Some(prefix) = self.prefix_id(prefix) else { return Vec::new() };
        let name = ChatName { prefix, chat: chat.to_owned() };
        let Some(chat) = self.tables.outboxes.get_key(&name) else { return Vec::new() };
        let Some(outbox) = self.tables.outboxes.get(chat) else { return Vec::new() };
        let numbers = outbox.first.max(after.saturating_add(1))..=outbox.last;
        let entries = numbers
            .take(limit)
            .filter_map(|number| self.tables.entries.get(&EntryKey { chat: chat.clone(), number }));
        entries.map(|entry| OutboxEntry::clone(entry)).collect()
    }
}
