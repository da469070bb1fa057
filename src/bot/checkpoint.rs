//! A conversation as it is stored: self-describing JSON (DESIGN 8), one row a chat.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::conversation::AnyFlow;
use super::conversation::core::{Core, Stand};
use crate::store::{RowKey, Table};
use crate::types::ChatKey;

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
    /// The conversation's stable name.
    pub(crate) conversation: String,
    pub(crate) step: String,
    /// Counts the entries into steps.
    pub(crate) visit: u32,
    /// The state at the entry of that visit.
    pub(crate) state: Value,
    /// What was said in that visit.
    pub(crate) sends: u32,
    /// Where it waits; absent = the step was entered and has not asked yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) waits: Option<Waits>,
}

/// A wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Waits {
    /// Which question of the step, from 0.
    pub(crate) question: u32,
}

impl Checkpoint {
    /// What the conversation's checkpoint is now.
    pub(crate) fn of(flow: &AnyFlow, core: &Core) -> Self {
        let Stand { step, visit, state, sends, waits_at } = core.stand();
        Self {
            format: FORMAT,
            flow: flow.plan.name.to_owned(),
            fingerprint: flow.fingerprint(),
            conversation: core.id.clone(),
            step: step.to_owned(),
            visit,
            state,
            sends,
            waits: waits_at.map(|question| Waits { question }),
        }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let checkpoint: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if checkpoint.format > FORMAT {
            return Err(format!("format {} is newer than {FORMAT}", checkpoint.format));
        }
        Ok(checkpoint)
    }
}
