//! Where the listener stands.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

/// A session of the gateway, as it is stored: what it takes to go on where the last one stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Session {
    id: String,
    /// The last event that is journaled, or was nothing to journal.
    seq: u64,
    /// Where it is resumed.
    url: String,
    /// What it was begun with; it keeps them.
    intents: u64,
}

impl Session {
    /// As `READY` tells of it.
    pub(super) fn of(ready: &Value, seq: u64, intents: u64) -> Option<Self> {
        let text = |name: &str| ready.get(name).and_then(Value::as_str).map(str::to_owned);
        Some(Self { id: text("session_id")?, seq, url: text("resume_gateway_url")?, intents })
    }
}

/// Something that was dispatched and is not handled yet.
#[derive(Debug)]
pub(super) enum Dispatch {
    /// A session began.
    Ready(Session),
    /// An event.
    Event { seq: u64, kind: String, data: Value },
}

/// Where this replica stands, across its connections.
#[derive(Debug, Default)]
pub(super) struct State {
    /// As far as it was handled.
    pub(super) session: Option<Session>,
    /// Up to there the store has it; 0 where it does not.
    pub(super) stored: u64,
    /// The store is to have it, whether a message came or not.
    pub(super) due: bool,
    /// Not handled yet. Kept over connections: what a RESUME repeats of it is known by its number.
    pub(super) pending: VecDeque<Dispatch>,
    /// The address of the session did not answer.
    pub(super) astray: bool,
    /// RESUMEs in a row that were followed by no event.
    pub(super) resumes: u32,
    /// When the gateway greeted, on this connection.
    pub(super) greeted: Option<Instant>,
}

/// After so many RESUMEs in a row that nothing followed, the session is taken for lost.
pub(super) const RESUMES_MAX: u32 = 5;

impl State {
    /// Begins with what is stored; a session that was begun with other intents is none.
    pub(super) fn new(stored: Option<Vec<u8>>, intents: u64) -> Self {
        let session = stored.and_then(|bytes| serde_json::from_slice::<Session>(&bytes).ok());
        let session = session.filter(|session| session.intents == intents);
        let stored = session.as_ref().map_or(0, |session| session.seq);
        Self { session, stored, ..Self::default() }
    }

    /// The session as it was told of, id, number and address. The number is what is stored: no more
    /// was ever acknowledged.
    pub(super) fn resumable(&self) -> Option<(&str, u64, &str)> {
        let Session { id, seq, url, .. } = self.session.as_ref()?;
        let stored = Some(self.stored).filter(|stored| *stored > 0);
        Some((id, stored.unwrap_or(*seq), url))
    }

    /// It was tried to resume often enough.
    pub(super) fn is_hopeless(&self) -> bool {
        self.session.is_some() && self.resumes >= RESUMES_MAX
    }

    /// The store has it up to there; it may have been passed meanwhile.
    pub(super) fn stored(&mut self, session: &Session) {
        self.stored = session.seq;
    }

    /// The store does not have all of it.
    pub(super) fn is_ahead(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.seq > self.stored)
    }

    /// The session is over; what was read of it is handled by now.
    pub(super) fn lost(&mut self) -> bool {
        self.stored = 0;
        self.resumes = 0;
        self.due = false;
        self.session.take().is_some()
    }
}

impl Session {
    /// Moves past an event; `false` where it was handled before.
    pub(super) fn pass(&mut self, seq: u64) -> bool {
        let fresh = seq > self.seq;
        self.seq = self.seq.max(seq);
        fresh
    }

    /// As it is stored.
    pub(super) fn encode(&self) -> Vec<u8> {
        // Texts and numbers always serialise.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn d5_a_session_is_resumed_with_what_it_was_begun_with() {
        let ready = json!({ "session_id": "s", "resume_gateway_url": "wss://x", "v": 10 });
        let mut session = Session::of(&ready, 1, 512).unwrap();
        assert!(session.pass(7) && !session.pass(7) && !session.pass(2));
        let stored = session.encode();
        let state = State::new(Some(stored.clone()), 512);
        assert_eq!(state.resumable(), Some(("s", 7, "wss://x")));
        assert_eq!(state.stored, 7);
        // What was passed since and is not stored is asked for again.
        let mut state = state;
        assert!(state.session.as_mut().unwrap().pass(9));
        assert_eq!(state.resumable(), Some(("s", 7, "wss://x")));
        assert_eq!(State::new(Some(stored), 513).resumable(), None, "other intents");
        assert_eq!(State::new(Some(b"odd".to_vec()), 512).resumable(), None);
        for odd in [json!(null), json!({}), json!({ "session_id": 1, "resume_gateway_url": "" })] {
            assert_eq!(Session::of(&odd, 1, 0), None);
        }
    }
}
