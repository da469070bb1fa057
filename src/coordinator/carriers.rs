//! The coordinator by the names its users know: over a node, over a hub, behind an `Arc`.

use std::ops::Deref;
use std::sync::Arc;

use async_trait::async_trait;

use super::{
    CoordinationError, Coordinator, CoordinatorEvent, CoordinatorOptions, GroupCoordinator,
    JournaledTurn, Lead, Sticky, Ticket, Turn,
};
use crate::clock::{BootInstant, Clock};
use crate::group::MemoryHub;
use crate::machine::{Admission, Admit};
use crate::store::RowKey;
use crate::types::{ChatKey, Incarnation, NameError, Prefix, ReplicaId, TicketId};

/// The coordinator over a node of a Raft group: `RaftCoordinator::new(node, prefix, options)`.
pub type RaftCoordinator = GroupCoordinator;

/// The coordinator over a hub in this process (SPEC I1). See [`MemoryHub`].
#[derive(Clone, Debug)]
pub struct MemoryCoordinator(GroupCoordinator);

impl MemoryCoordinator {
    /// A replica of this name on the hub, in the hub's default prefix, with the default lease.
    pub fn new(hub: &MemoryHub, replica_id: impl Into<String>) -> Self {
        let options = CoordinatorOptions {
            replica_id: Some(ReplicaId(replica_id.into())),
            ..CoordinatorOptions::default()
        };
        Self::with(hub, MemoryHub::default_prefix(), options)
    }

    /// A replica on the hub.
    pub fn with(hub: &MemoryHub, prefix: Prefix, options: CoordinatorOptions) -> Self {
        Self(GroupCoordinator::new(hub.as_group(), prefix, options))
    }
}

impl Deref for MemoryCoordinator {
    type Target = GroupCoordinator;
    fn deref(&self) -> &GroupCoordinator {
        &self.0
    }
}

impl MemoryHub {
    /// The prefix of those that name none.
    pub fn default_prefix() -> Prefix {
        let prefix: Result<Prefix, NameError> = Prefix::new("bot");
        prefix.expect("a name of three letters")
    }
}

/// Implements the trait by passing every call on to `$inner`.
macro_rules! pass_on {
    ([$($generics:tt)*] $name:ty, |$this:ident| $inner:expr) => {
        #[async_trait]
        impl<$($generics)*> Coordinator for $name {
            fn prefix(&self) -> &Prefix {
                let $this = self;
                $inner.prefix()
            }
            fn replica(&self) -> &ReplicaId {
                let $this = self;
                $inner.replica()
            }
            fn incarnation(&self) -> Option<Incarnation> {
                let $this = self;
                $inner.incarnation()
            }
            fn valid_until(&self) -> Option<BootInstant> {
                let $this = self;
                $inner.valid_until()
            }
            fn journals(&self) -> bool {
                let $this = self;
                $inner.journals()
            }
            async fn open(&self) -> Result<(), CoordinationError> {
                let $this = self;
                $inner.open().await
            }
            async fn close(&self) -> Result<(), CoordinationError> {
                let $this = self;
                $inner.close().await
            }
            async fn take_ticket(&self, key: &ChatKey) -> Result<Ticket, CoordinationError> {
                let $this = self;
                $inner.take_ticket(key).await
            }
            async fn wait_turn(
                &self,
                ticket: &mut Ticket,
                until: BootInstant,
            ) -> Result<Turn, CoordinationError> {
                let $this = self;
                $inner.wait_turn(ticket, until).await
            }
            async fn admit(
                &self,
                messages: Vec<Admit>,
            ) -> Result<Vec<Admission>, CoordinationError> {
                let $this = self;
                $inner.admit(messages).await
            }
            async fn admit_under(
                &self,
                lead: &Lead,
                messages: Vec<Admit>,
                cursor: Option<(RowKey, Vec<u8>)>,
            ) -> Result<Vec<Admission>, CoordinationError> {
                let $this = self;
                $inner.admit_under(lead, messages, cursor).await
            }
            async fn next_journaled(&self) -> Option<JournaledTurn> {
                let $this = self;
                $inner.next_journaled().await
            }
            async fn try_lead(&self, name: &str) -> Result<Option<Lead>, CoordinationError> {
                let $this = self;
                $inner.try_lead(name).await
            }
            async fn campaign(&self, name: &str) -> Result<Lead, CoordinationError> {
                let $this = self;
                $inner.campaign(name).await
            }
            fn keep_turns(&self, how: Option<Sticky>) {
                let $this = self;
                $inner.keep_turns(how);
            }
            fn overdue(&self, ticket: TicketId, since: BootInstant) -> Option<CoordinationError> {
                let $this = self;
                $inner.overdue(ticket, since)
            }
            fn leader(&self, name: &str) -> Option<ReplicaId> {
                let $this = self;
                $inner.leader(name)
            }
            fn events(&self) -> tokio::sync::broadcast::Receiver<CoordinatorEvent> {
                let $this = self;
                $inner.events()
            }
            fn clock(&self) -> Arc<dyn Clock> {
                let $this = self;
                $inner.clock()
            }
        }
    };
}

pass_on!([] MemoryCoordinator, |this| this.0);
pass_on!([C: Coordinator + ?Sized] Arc<C>, |this| (**this));
