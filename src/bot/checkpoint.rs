//! A conversation as it is stored: self-describing JSON (DESIGN 8), one row a chat.
//!
//! Three kinds share the row. A persistent flow's checkpoint stays until the flow ends; an
//! *ephemeral* one, of a flow that is forwarded, ends by itself and carries a fingerprint; a *stub*
//! only says that there was a conversation. Fields are added with a default, so that what any
//! earlier release stored still decodes (case h7).

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::conversation::AnyFlow;
use super::conversation::core::{Core, First, Midway, Stand, Wait};
use super::handover::Interruption;
use crate::store::{RowKey, Table};
use crate::types::{ChatKey, Message, TicketId};

/// The row of a chat's conversation.
pub(crate) fn row(chat: &ChatKey) -> RowKey {
    RowKey::new(Table::Checkpoint, chat.to_string())
}

/// The format this code writes.
const FORMAT: u32 = 1;

/// See the module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    pub(crate) format: u32,
    pub(crate) flow: String,
    pub(crate) fingerprint: String,
    #[serde(default = "first_version")]
    pub(crate) version: u32,
    /// The conversation's stable name.
    pub(crate) conversation: String,
    pub(crate) step: String,
    /// Counts the entries into steps.
    pub(crate) visit: u32,
    /// The state at the entry of that visit.
    pub(crate) state: Value,
    /// What was said in that visit.
    pub(crate) sends: u32,
    /// Where it waits; absent = the step was entered and does not wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) waits: Option<Waits>,
    /// The answer to the step's first question, kept while the step goes on (SPEC C8).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) answer: Option<Kept>,
    /// The journaled message under whose turn this was written, where it is not acknowledged yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ticket: Option<TicketId>,
    /// It ends by itself, and only the very same flow continues it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) ephemeral: bool,
    /// It is a note only: why the conversation could not be stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stub: Option<Stub>,
    /// The state it began with, for a fallback that begins anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) initial: Option<Value>,
}

fn first_version() -> u32 {
    1
}

/// A wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waits {
    /// Which question of the step, from 0.
    pub(crate) question: u32,
    /// Answers it refused.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) tries: u32,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A kept answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// What had been said in this visit when it came.
    pub(crate) sends: u32,
    /// Answers its question had refused before it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) tries: u32,
    /// The message as the hooks left it. Absent: it is the journaled message itself, or it was too
    /// large to be kept here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<Message>,
    /// The question is asked again: the answer was too large to be kept, or its step failed with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) again: bool,
    /// What hooks made of the journaled message was too large to be kept: they run again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) unkept: bool,
}

/// Why a conversation left a stub; as stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stub {
    NotForwarded,
    Unserialisable,
    /// Of a later release.
    #[serde(other)]
    Unknown,
}

impl From<Stub> for Interruption {
    fn from(stub: Stub) -> Self {
        match stub {
            Stub::Unserialisable => Self::Unserialisable,
            Stub::NotForwarded | Stub::Unknown => Self::NotForwarded,
        }
    }
}

/// How a conversation is kept in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// Until it ends.
    Persistent,
    /// For a time, for the very same flow.
    Ephemeral,
    /// As a note.
    Stub(Stub),
    /// Not at all.
    Nothing,
}

impl Keeping {
    /// Whether it goes on from the store.
    pub(crate) fn is_checkpointed(self) -> bool {
        matches!(self, Self::Persistent | Self::Ephemeral)
    }
}

/// What the turn that writes a checkpoint knows besides the conversation.
pub(crate) struct Writing<'a> {
    pub(crate) keeping: Keeping,
    /// The journaled message at work, where it is not acknowledged by this very write.
    pub(crate) ticket: Option<TicketId>,
    /// Whether hooks changed it.
    pub(crate) hooked: bool,
    /// The largest answer embedded.
    pub(crate) answer_bytes_max: usize,
    /// The state it began with, where it is to be kept.
    pub(crate) initial: Option<&'a Value>,
}

impl Checkpoint {
    /// What the conversation's checkpoint is now; `None` where its state does not serialise.
    pub(crate) fn of(flow: &AnyFlow, core: &Core, writing: &Writing<'_>) -> Result<Self, String> {
        let stand = core.stand();
        let (ephemeral, stub) = match writing.keeping {
            Keeping::Stub(stub) => (false, Some(stub)),
            keeping => (keeping == Keeping::Ephemeral, None),
        };
        let answer = match stand.midway() {
            Some(Midway::Answered) => kept(&stand, writing),
            _ => None,
        };
        let wait = |Wait { question, tries, .. }| Waits { question, tries };
        Ok(Self {
            format: FORMAT,
            flow: flow.plan.name.to_owned(),
            fingerprint: flow.fingerprint.to_string(),
            version: flow.plan.version,
            conversation: core.id.clone(),
            step: stand.step.to_owned(),
            visit: stand.visit,
            state: if stub.is_some() { Value::Null } else { stand.state? },
            sends: stand.sends,
            waits: stand.waits.map(wait),
            answer,
            ticket: writing.ticket,
            ephemeral,
            stub,
            initial: writing.initial.cloned(),
        })
    }

    /// The same, but its step runs again from its start and asks anew.
    pub(crate) fn asking_again(self) -> Self {
        let answer = Kept { sends: 0, tries: 0, message: None, again: true, unkept: false };
        Self { waits: None, answer: Some(answer), ..self }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, String> {
        serde_json::to_vec(self).map_err(|error| error.to_string())
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let checkpoint: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if checkpoint.format > FORMAT {
            return Err(format!("format {} is newer than {FORMAT}", checkpoint.format));
        }
        Ok(checkpoint)
    }

    /// What hooks made of the message of this ticket, where it was at work when this was written:
    /// they do not run again for it (SPEC C8). `None` where they have to.
    pub(crate) fn hooked(&self, ticket: TicketId) -> Option<Option<&Message>> {
        let answer = self.answer.as_ref();
        let mine = self.ticket == Some(ticket) && !answer.is_some_and(|kept| kept.unkept);
        mine.then(|| answer.and_then(|kept| kept.message.as_ref()))
    }
}

fn kept(stand: &Stand, writing: &Writing<'_>) -> Option<Kept> {
    let First::Answered { message, sends, tries } = &stand.first else { return None };
    let (sends, tries) = (*sends, *tries);
    let message: &Arc<Message> = message;
    // The journal has it; only what hooks made of it has to be kept here.
    if writing.ticket.is_some() && !writing.hooked {
        return Some(Kept { sends, tries, message: None, again: false, unkept: false });
    }
    let bytes = serde_json::to_vec(&**message).map_or(usize::MAX, |bytes| bytes.len());
    let fits = bytes <= writing.answer_bytes_max;
    let message = fits.then(|| Message::clone(message));
    // With a journaled message what is lost is the hooks' work, and they run again.
    let (again, unkept) = (!fits && writing.ticket.is_none(), !fits && writing.ticket.is_some());
    Some(Kept { sends, tries, message, again, unkept })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows as each release wrote them.
    const GOLDEN: [&str; 3] = [
        r#"{"format":1,"flow":"order","fingerprint":"1:item,quantity","conversation":"m1.7",
            "step":"quantity","visit":2,"state":{"item":"tea"},"sends":1,"waits":{"question":0}}"#,
        r#"{"format":1,"flow":"order","fingerprint":"1:item,quantity","conversation":"m1.7",
            "step":"item","visit":1,"state":{"item":""},"sends":0}"#,
        r#"{"format":1,"flow":"order","fingerprint":"85944171f73967e8","version":3,
            "conversation":"m1.7","step":"item","visit":1,"state":null,"sends":2,
            "answer":{"sends":1,"tries":2,"message":{"id":"m2","chat":"x:ann","text":"tea",
            "type":"voice","lang":"de"}},"ticket":9,"ephemeral":true,"stub":"a_later_one",
            "initial":{"item":""}}"#,
    ];

    #[test]
    fn case_h7_checkpoints_of_every_release_decode() {
        let [waiting, entered, later] = GOLDEN.map(|row| Checkpoint::decode(row.as_bytes()));
        let waiting = waiting.unwrap();
        assert_eq!(waiting.waits, Some(Waits { question: 0, tries: 0 }));
        assert_eq!((waiting.version, waiting.ephemeral, waiting.stub), (1, false, None));
        assert_eq!(entered.unwrap().waits, None);
        let later = later.unwrap();
        let answer = later.answer.clone().unwrap();
        assert_eq!((answer.sends, answer.tries, answer.again), (1, 2, false));
        assert_eq!(answer.message.unwrap().kind, "voice");
        assert_eq!(later.stub, Some(Stub::Unknown));
        assert!(later.hooked(TicketId(9)).unwrap().is_some());
        assert_eq!(later.hooked(TicketId(8)), None);
        let again = Checkpoint::decode(&later.encode().unwrap()).unwrap();
        assert_eq!(again.answer, later.answer);
    }

    #[test]
    fn case_h7_a_checkpoint_of_a_newer_format_says_so() {
        let row = GOLDEN[0].replace(r#""format":1"#, r#""format":2"#);
        let error = Checkpoint::decode(row.as_bytes()).unwrap_err();
        assert_eq!(error, "format 2 is newer than 1");
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(1_000))]
        #[test]
        fn c12_whatever_a_stored_row_holds_is_read_as_it_is_or_refused(
            row in crate::codec::hostile::json_of(&GOLDEN),
            bytes in crate::codec::hostile::bytes(GOLDEN.map(|row| row.as_bytes().to_vec()).into()),
        ) {
            for row in [row.to_string().as_bytes(), &bytes] {
                let Ok(read) = Checkpoint::decode(row) else { continue };
                let once = read.encode().unwrap();
                let again = Checkpoint::decode(&once).unwrap().encode().unwrap();
                assert_eq!(again, once);
            }
        }
    }
}
