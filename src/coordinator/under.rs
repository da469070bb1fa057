//! Admission in the name of a lead: what a transport of which one replica is connected hands over.
//!
//! A deposed replica's connection may go on to deliver (case w15), and its cursor would take the
//! transport back. So both are accepted in one commit whose authority is the lead: exactly this
//! fence, held by exactly this session (SPEC D5, D6).

use super::group::Shared;
use super::{CoordinationError, Lead, LostReason};
use crate::group::{ExecuteError, Unavailable};
use crate::machine::{
    Admission, Admit, Authority, Command, Expect, Limit, Op, Refusal, Reply, RowKey as Row,
};
use crate::store::RowKey;

fn lost(lead: &Lead, reason: LostReason) -> CoordinationError {
    CoordinationError::LeaseLost { key: lead.key().clone(), reason }
}

pub(super) async fn admit(
    shared: &Shared,
    lead: &Lead,
    messages: Vec<Admit>,
    cursor: Option<(RowKey, Vec<u8>)>,
) -> Result<Vec<Admission>, CoordinationError> {
    lead.check().map_err(|reason| lost(lead, reason))?;
    let session = lead.incarnation();
    let by = Authority::Holder {
        queue: lead.queue().clone(),
        fence: lead.fence(),
        session: Some(session),
    };
    let put = |(row, value): (RowKey, Vec<u8>)| {
        let row = Row { table: row.table, prefix: shared.prefix.clone(), key: row.key };
        Op::Put { row, value, expect: Expect::Any, ttl_ms: None }
    };
    let ops = cursor.into_iter().map(put).collect();
    let command = Command::Admit {
        prefix: shared.prefix.clone(),
        session,
        messages,
        cursor: Some(Box::new(Command::Commit { by, ops })),
    };
    // No act may outlast the right to it (DESIGN 3 rule 7).
    let deadline = shared.until_patience_ends().min(lead.valid_until());
    match shared.execute(command, deadline).await {
        Ok(Reply::Admitted(admissions)) => Ok(admissions),
        Ok(Reply::SessionExpired) => Err(lost(lead, LostReason::Superseded)),
        Ok(Reply::Refused(Refusal::Fenced { .. } | Refusal::SessionExpired)) => {
            Err(lost(lead, LostReason::Superseded))
        }
        Ok(Reply::Full(limit) | Reply::Refused(Refusal::Full { limit, .. })) => Err(full(limit)),
        Ok(other) => {
            let why = format!("an admission was answered with {other:?}");
            Err(CoordinationError::OutcomeUnknown { why })
        }
        Err(ExecuteError::NotExecuted(Unavailable::Overloaded { waiting })) => {
            let why = format!("{waiting} commands wait at this node");
            Err(CoordinationError::Overloaded { why })
        }
        Err(ExecuteError::NotExecuted(why)) => {
            Err(CoordinationError::Overloaded { why: why.to_string() })
        }
        Err(ExecuteError::OutcomeUnknown(why)) => {
            Err(CoordinationError::OutcomeUnknown { why: why.to_string() })
        }
    }
}

fn full(limit: Limit) -> CoordinationError {
    CoordinationError::Overloaded { why: format!("the group is at its limit of {limit:?}") }
}
