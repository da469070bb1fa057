//! A value that tasks watch: tokio's `watch`, and for simulations one that wakes in order.
//!
//! Problem: tokio's channel spreads its waiters over eight lists by a random number that only an
//! unstable setting of tokio makes repeatable, so tasks that wait for one value are woken in another
//! order each time, and no seed would replay. Idea: programs have tokio's; with the test kit
//! (feature `test-util`) this module is a plain one of the same interface, whose waiters are woken
//! in the order they came.

#[cfg(not(feature = "test-util"))]
pub(crate) use tokio::sync::watch::{Receiver, Sender, channel};

#[cfg(feature = "test-util")]
pub(crate) use ordered::{Receiver, Ref, Sender, channel};

#[cfg(feature = "test-util")]
mod ordered {
    use std::fmt;
    use std::ops::Deref;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use parking_lot::{RwLock, RwLockReadGuard};
    use tokio::sync::Notify;

    struct Shared<T> {
        value: RwLock<T>,
        /// Raised under the write lock.
        version: AtomicUsize,
        senders: AtomicUsize,
        receivers: AtomicUsize,
        moved: Notify,
    }

    impl<T> Shared<T> {
        async fn changed(&self, seen: &mut usize) -> Result<(), RecvError> {
            loop {
                // Before the look: what happens after it is not missed.
                let moved = self.moved.notified();
                // Before the version: the last value of a sender that goes is not missed.
                let gone = self.senders.load(SeqCst) == 0;
                let version = self.version.load(SeqCst);
                if version != *seen {
                    *seen = version;
                    return Ok(());
                }
                if gone {
                    return Err(RecvError);
                }
                moved.await;
            }
        }
    }

    /// The sender is gone.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct RecvError;

    /// A look at the value.
    pub(crate) struct Ref<'a, T>(RwLockReadGuard<'a, T>);

    impl<T> Deref for Ref<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            &self.0
        }
    }

    impl<T: fmt::Debug> fmt::Debug for Ref<'_, T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.fmt(f)
        }
    }

    pub(crate) struct Sender<T>(Arc<Shared<T>>);

    pub(crate) struct Receiver<T> {
        shared: Arc<Shared<T>>,
        seen: usize,
    }

    pub(crate) fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
        let shared = Arc::new(Shared {
            value: RwLock::new(value),
            version: AtomicUsize::new(0),
            senders: AtomicUsize::new(1),
            receivers: AtomicUsize::new(1),
            moved: Notify::new(),
        });
        (Sender(shared.clone()), Receiver { shared, seen: 0 })
    }

    impl<T> Sender<T> {
        pub(crate) fn send_if_modified(&self, modify: impl FnOnce(&mut T) -> bool) -> bool {
            {
                let mut value = self.0.value.write();
                if !modify(&mut value) {
                    return false;
                }
                self.0.version.fetch_add(1, SeqCst);
            }
            self.0.moved.notify_waiters();
            true
        }

        pub(crate) fn send_modify(&self, modify: impl FnOnce(&mut T)) {
            self.send_if_modified(|value| {
                modify(value);
                true
            });
        }

        pub(crate) fn send_replace(&self, mut value: T) -> T {
            self.send_modify(|held| std::mem::swap(held, &mut value));
            value
        }

        /// Gives the value back where nobody watches.
        pub(crate) fn send(&self, value: T) -> Result<(), T> {
            if self.receiver_count() == 0 {
                return Err(value);
            }
            self.send_replace(value);
            Ok(())
        }

        pub(crate) fn borrow(&self) -> Ref<'_, T> {
            Ref(self.0.value.read())
        }

        pub(crate) fn subscribe(&self) -> Receiver<T> {
            self.0.receivers.fetch_add(1, SeqCst);
            let value = self.0.value.read();
            let seen = self.0.version.load(SeqCst);
            drop(value);
            Receiver { shared: self.0.clone(), seen }
        }

        pub(crate) fn receiver_count(&self) -> usize {
            self.0.receivers.load(SeqCst)
        }
    }

    impl<T> Receiver<T> {
        pub(crate) async fn changed(&mut self) -> Result<(), RecvError> {
            self.shared.changed(&mut self.seen).await
        }

        pub(crate) fn borrow(&self) -> Ref<'_, T> {
            Ref(self.shared.value.read())
        }

        pub(crate) fn borrow_and_update(&mut self) -> Ref<'_, T> {
            let value = self.shared.value.read();
            self.seen = self.shared.version.load(SeqCst);
            Ref(value)
        }

        pub(crate) async fn wait_for(
            &mut self,
            mut is: impl FnMut(&T) -> bool,
        ) -> Result<Ref<'_, T>, RecvError> {
            let Self { shared, seen } = self;
            let shared: &Shared<T> = shared;
            loop {
                {
                    let value = shared.value.read();
                    *seen = shared.version.load(SeqCst);
                    if is(&value) {
                        return Ok(Ref(value));
                    }
                }
                shared.changed(seen).await?;
            }
        }
    }

    impl<T> Clone for Sender<T> {
        fn clone(&self) -> Self {
            self.0.senders.fetch_add(1, SeqCst);
            Self(self.0.clone())
        }
    }

    impl<T> Drop for Sender<T> {
        fn drop(&mut self) {
            if self.0.senders.fetch_sub(1, SeqCst) == 1 {
                self.0.moved.notify_waiters();
            }
        }
    }

    impl<T> Clone for Receiver<T> {
        fn clone(&self) -> Self {
            self.shared.receivers.fetch_add(1, SeqCst);
            Self { shared: self.shared.clone(), seen: self.seen }
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            self.shared.receivers.fetch_sub(1, SeqCst);
        }
    }

    impl<T: fmt::Debug> fmt::Debug for Sender<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_tuple("Sender").field(&*self.borrow()).finish()
        }
    }

    impl<T: fmt::Debug> fmt::Debug for Receiver<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_tuple("Receiver").field(&*self.borrow()).finish()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn i3_waiters_of_one_value_are_woken_in_the_order_they_came() {
        let (sender, _) = channel(0);
        let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let waiting: Vec<_> = (0..32)
            .map(|number| {
                let (mut value, order) = (sender.subscribe(), order.clone());
                tokio::spawn(async move {
                    value.wait_for(|value| *value == 2).await.unwrap();
                    order.lock().push(number);
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(1)).await;
        sender.send_replace(1);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(order.lock().is_empty());
        sender.send_replace(2);
        for one in waiting {
            one.await.unwrap();
        }
        assert!(order.lock().is_sorted());
    }

    #[tokio::test]
    async fn what_was_sent_last_is_seen_and_then_the_end() {
        let (sender, mut value) = channel(0);
        sender.send_modify(|value| *value = 7);
        value.changed().await.unwrap();
        assert_eq!(*value.borrow_and_update(), 7);
        assert!(!sender.send_if_modified(|_| false));
        let more = sender.subscribe();
        assert_eq!(sender.receiver_count(), 2);
        drop(more);
        sender.send_replace(8);
        drop(sender);
        value.changed().await.unwrap();
        assert_eq!(*value.borrow(), 8);
        assert!(value.changed().await.is_err() && value.wait_for(|_| false).await.is_err());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_change_is_missed_between_threads() {
        let (sender, mut value) = channel(0u64);
        let watcher = tokio::spawn(async move {
            let mut before = 0;
            while before < 20_000 {
                value.changed().await.unwrap();
                let now = *value.borrow_and_update();
                assert!(now >= before);
                before = now;
            }
        });
        for next in 1..=20_000 {
            sender.send_replace(next);
            if next % 100 == 0 {
                tokio::task::yield_now().await;
            }
        }
        tokio::time::timeout(Duration::from_secs(60), watcher).await.unwrap().unwrap();
    }
}
