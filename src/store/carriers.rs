//! The store trait passed on: by [`super::MemoryStore`] and behind an `Arc`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{
    Authority, Claim, CommitError, Consistency, DeadLetter, Feature, FencedLock, JournalRecord,
    MemoryStore, Op, OutboxEntry, RekeyError, Row, RowKey, Store, StoreError, Table, Taken, Task,
};
use crate::clock::BootInstant;
use crate::types::{ChatKey, Incarnation, Prefix, Revision, TicketId};

/// Implements the trait by passing every call on to `$inner`.
macro_rules! pass_on {
    ([$($generics:tt)*] $name:ty, |$this:ident| $inner:expr) => {
        #[async_trait]
        impl<$($generics)*> Store for $name {
            fn prefix(&self) -> &Prefix {
                let $this = self;
                $inner.prefix()
            }
            fn is_shared(&self) -> bool {
                let $this = self;
                $inner.is_shared()
            }
            fn supports(&self, feature: Feature) -> bool {
                let $this = self;
                $inner.supports(feature)
            }
            async fn read(
                &self,
                key: &RowKey,
                how: Consistency<'_>,
            ) -> Result<Option<Row>, StoreError> {
                let $this = self;
                $inner.read(key, how).await
            }
            async fn scan(
                &self,
                table: Table,
                after: Option<&str>,
                limit: usize,
            ) -> Result<Vec<(RowKey, Row)>, StoreError> {
                let $this = self;
                $inner.scan(table, after, limit).await
            }
            async fn commit(
                &self,
                by: Authority<'_>,
                ops: Vec<Op>,
            ) -> Result<Vec<Revision>, CommitError> {
                let $this = self;
                $inner.commit(by, ops).await
            }
            async fn acquire_lock_fenced(
                &self,
                key: &str,
                ttl_ms: u64,
            ) -> Result<Option<FencedLock>, CommitError> {
                let $this = self;
                $inner.acquire_lock_fenced(key, ttl_ms).await
            }
            async fn renew_lock(
                &self,
                key: &str,
                token: Incarnation,
                ttl_ms: u64,
            ) -> Result<bool, CommitError> {
                let $this = self;
                $inner.renew_lock(key, token, ttl_ms).await
            }
            async fn release_lock(
                &self,
                key: &str,
                token: Incarnation,
            ) -> Result<bool, CommitError> {
                let $this = self;
                $inner.release_lock(key, token).await
            }
            async fn journal(
                &self,
                ticket: TicketId,
            ) -> Result<Option<JournalRecord>, StoreError> {
                let $this = self;
                $inner.journal(ticket).await
            }
            async fn outbox(
                &self,
                chat: &str,
                after: u64,
                limit: usize,
            ) -> Result<Vec<OutboxEntry>, StoreError> {
                let $this = self;
                $inner.outbox(chat, after, limit).await
            }
            async fn outbox_owner(&self, chat: &str) -> Result<Option<Incarnation>, StoreError> {
                let $this = self;
                $inner.outbox_owner(chat).await
            }
            async fn outbox_beyond(&self, chat: &str, after: u64) -> Result<(), StoreError> {
                let $this = self;
                $inner.outbox_beyond(chat, after).await
            }
            async fn mark_sent(
                &self,
                chat: &str,
                up_to: u64,
                sender: Incarnation,
                within: Duration,
            ) -> Result<bool, CommitError> {
                let $this = self;
                $inner.mark_sent(chat, up_to, sender, within).await
            }
            async fn rekey(
                &self,
                from: &ChatKey,
                to: &ChatKey,
                taken: Taken,
            ) -> Result<(), RekeyError> {
                let $this = self;
                $inner.rekey(from, to, taken).await
            }
            async fn dead_letters(&self) -> Result<Vec<DeadLetter>, StoreError> {
                let $this = self;
                $inner.dead_letters().await
            }
            async fn settle_dead_letter(
                &self,
                ticket: TicketId,
                retry: bool,
            ) -> Result<bool, CommitError> {
                let $this = self;
                $inner.settle_dead_letter(ticket, retry).await
            }
            fn now_ms(&self) -> u64 {
                let $this = self;
                $inner.now_ms()
            }
            async fn ensure_task(
                &self,
                id: &str,
                due_ms: u64,
                body: Vec<u8>,
            ) -> Result<bool, CommitError> {
                let $this = self;
                $inner.ensure_task(id, due_ms, body).await
            }
            async fn task(&self, id: &str) -> Result<Option<Task>, StoreError> {
                let $this = self;
                $inner.task(id).await
            }
            async fn task_changed(&self, id: &str, seen: Option<&Task>) -> Result<(), StoreError> {
                let $this = self;
                $inner.task_changed(id, seen).await
            }
            async fn claim_task(
                &self,
                id: &str,
                due_ms: u64,
                session: Incarnation,
            ) -> Result<Option<Claim>, CommitError> {
                let $this = self;
                $inner.claim_task(id, due_ms, session).await
            }
            async fn finish_task(
                &self,
                id: &str,
                due_ms: u64,
                session: Incarnation,
                next_ms: Option<u64>,
            ) -> Result<bool, CommitError> {
                let $this = self;
                $inner.finish_task(id, due_ms, session, next_ms).await
            }
            async fn return_task(
                &self,
                id: &str,
                due_ms: u64,
                session: Incarnation,
            ) -> Result<bool, CommitError> {
                let $this = self;
                $inner.return_task(id, due_ms, session).await
            }
            fn deadline(&self) -> BootInstant {
                let $this = self;
                $inner.deadline()
            }
        }
    };
}

pass_on!([] MemoryStore, |this| (**this));
pass_on!([S: Store + ?Sized] Arc<S>, |this| (**this));
