//! Conversations that wait in this process's memory.
//!
//! Invariant: whoever works on a chat holds its slot from before it looks until after it put back
//! what it leaves; so the next turn of the chat, granted by the very commit that ended this one,
//! never finds the slot empty for being early.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use serde_json::Value;

use super::conversation::core::{Core, Midway};
use super::conversation::{AnyFlow, Running};
use super::timers::Sleeper;
use crate::types::{ChatKey, Revision};
use crate::watch;

/// A conversation that waits for its next message.
pub(crate) struct Live {
    pub(crate) flow: AnyFlow,
    pub(crate) core: Arc<Core>,
    pub(crate) running: Running,
    /// The stored row that matches it; `None` = it has none.
    pub(crate) row: Option<LiveRow>,
    /// The state it began with, where the fallback may want it.
    pub(crate) initial: Option<Value>,
    /// What its row says of a step under way.
    pub(crate) stored: Option<(u32, Midway)>,
    /// Wakes it when its wait is due for something.
    pub(crate) sleeper: Option<Sleeper>,
}

/// See [`Live::row`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveRow {
    pub(crate) revision: Revision,
    /// It is a note, which need not be written again.
    pub(crate) stub: bool,
}

impl Live {
    pub(crate) fn matching(&self) -> Matching {
        let revision = self.row.map(|row| row.revision);
        Matching { revision, may_end: !self.flow.plan.persistent }
    }
}

/// What has to be stored for a memory to be the chat's conversation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matching {
    revision: Option<Revision>,
    /// The row may have ended by itself.
    may_end: bool,
}

impl Matching {
    pub(crate) fn with(self, stored: Option<Revision>) -> bool {
        stored == self.revision || (stored.is_none() && self.may_end)
    }
}

type Slot = Arc<tokio::sync::Mutex<Option<Live>>>;

/// All of them.
pub(crate) struct Chats {
    // Guards the map only; a slot has a lock of its own, held for a whole turn.
    slots: Arc<Mutex<HashMap<ChatKey, Slot>>>,
    // Raised when slots are left to those who hold them: whoever waits for one takes another.
    left: watch::Sender<()>,
}

impl Default for Chats {
    fn default() -> Self {
        Self { slots: Arc::default(), left: watch::channel(()).0 }
    }
}

/// A chat's slot, held.
pub(crate) struct Held {
    chat: ChatKey,
    slots: Arc<Mutex<HashMap<ChatKey, Slot>>>,
    // `None` only while it is dropped.
    guard: Option<OwnedMutexGuard<Option<Live>>>,
}

impl Chats {
    /// The chat's slot, once nobody else holds it.
    pub(crate) async fn hold(&self, chat: &ChatKey) -> Held {
        let mut left = self.left.subscribe();
        let guard = loop {
            let slot = self.slots.lock().entry(chat.clone()).or_default().clone();
            tokio::select! {
                biased;
                guard = slot.lock_owned() => break guard,
                // The sender is `self`'s own.
                _ = left.changed() => {}
            }
        };
        Held { chat: chat.clone(), slots: self.slots.clone(), guard: Some(guard) }
    }

    /// Leaves the chat's slot to whoever holds it: the chat's next turn gets another. For a turn
    /// that was taken from a step which does not let go.
    pub(crate) fn abandon(&self, chat: &ChatKey) {
        self.slots.lock().remove(chat);
        self.left.send_replace(());
    }

    /// How many chats are known here: conversations that wait, and turns at work.
    pub(crate) fn len(&self) -> usize {
        self.slots.lock().len()
    }

    /// Cuts every conversation that waits. What is worked on has lost its turn, and its slot is left
    /// to it: a step that does not let go must not keep the chat's later turns waiting.
    pub(crate) fn clear(&self) {
        let slots = std::mem::take(&mut *self.slots.lock());
        for slot in slots.into_values() {
            if let Ok(mut live) = slot.try_lock() {
                *live = None;
            }
        }
        self.left.send_replace(());
    }
}

impl Held {
    pub(crate) fn take(&mut self) -> Option<Live> {
        self.guard.as_mut().and_then(|live| live.take())
    }

    pub(crate) fn put(&mut self, live: Live) {
        if let Some(guard) = &mut self.guard {
            **guard = Some(live);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take() else { return };
        let empty = guard.is_none();
        let mut slots = self.slots.lock();
        // One count is the map's, one is the guard's; more means that somebody waits for it. An
        // abandoned slot is not the map's any more.
        let mine = OwnedMutexGuard::mutex(&guard);
        let alone = slots
            .get(&self.chat)
            .is_some_and(|slot| Arc::ptr_eq(slot, mine) && Arc::strong_count(slot) == 2);
        if empty && alone {
            slots.remove(&self.chat);
        }
    }
}
