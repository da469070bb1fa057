//! What openraft runs on: tokio. With the test kit, tokio whose chance and whose watched values a
//! seed can repeat.

#[cfg(not(feature = "test-util"))]
pub(crate) use openraft::impls::TokioRuntime as Runtime;

#[cfg(feature = "test-util")]
pub(crate) use seeded::Runtime;

#[cfg(feature = "test-util")]
mod seeded {
    use std::future::Future;
    use std::io;
    use std::time::Duration;

    use futures_util::FutureExt;
    use openraft::impls::TokioRuntime;
    use openraft::rt::deterministic_rng::DeterministicRng;
    use openraft::rt::watch as channel;
    use openraft::rt::{AsyncRuntime, OptionalSend, OptionalSync};

    use crate::{outside, watch};

    /// tokio but for [`outside`] and [`watch`].
    #[derive(Debug)]
    pub(crate) struct Runtime(TokioRuntime);

    impl AsyncRuntime for Runtime {
        type JoinError = <TokioRuntime as AsyncRuntime>::JoinError;
        type JoinHandle<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::JoinHandle<T>;
        type Sleep = <TokioRuntime as AsyncRuntime>::Sleep;
        type Instant = <TokioRuntime as AsyncRuntime>::Instant;
        type TimeoutError = <TokioRuntime as AsyncRuntime>::TimeoutError;
        type Timeout<R, T: Future<Output = R> + OptionalSend> =
            <TokioRuntime as AsyncRuntime>::Timeout<R, T>;
        type ThreadLocalRng = <DeterministicRng<TokioRuntime> as AsyncRuntime>::ThreadLocalRng;

        fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
        where
            T: Future + OptionalSend + 'static,
            T::Output: OptionalSend + 'static,
        {
            TokioRuntime::spawn(future)
        }

        fn sleep(duration: Duration) -> Self::Sleep {
            TokioRuntime::sleep(duration)
        }

        fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
            TokioRuntime::sleep_until(deadline)
        }

        fn timeout<R, F: Future<Output = R> + OptionalSend>(
            duration: Duration,
            future: F,
        ) -> Self::Timeout<R, F> {
            TokioRuntime::timeout(duration, future)
        }

        fn timeout_at<R, F: Future<Output = R> + OptionalSend>(
            deadline: Self::Instant,
            future: F,
        ) -> Self::Timeout<R, F> {
            TokioRuntime::timeout_at(deadline, future)
        }

        fn is_panic(join_error: &Self::JoinError) -> bool {
            TokioRuntime::is_panic(join_error)
        }

        fn thread_rng() -> Self::ThreadLocalRng {
            // openraft's own type is the only one of its version of `rand` that is at hand here.
            let drawn = async { DeterministicRng::<TokioRuntime>::thread_rng() };
            let drawn = DeterministicRng::<TokioRuntime>::scope(outside::seed(), drawn);
            drawn.now_or_never().expect("it waits for nothing")
        }

        type Mpsc = <TokioRuntime as AsyncRuntime>::Mpsc;
        type Watch = Watch;
        type Oneshot = <TokioRuntime as AsyncRuntime>::Oneshot;
        type Mutex<T: OptionalSend + 'static> = <TokioRuntime as AsyncRuntime>::Mutex<T>;

        fn new(threads: usize) -> Self {
            Self(TokioRuntime::new(threads))
        }

        fn block_on<F, T>(&mut self, future: F) -> T
        where
            F: Future<Output = T>,
        {
            self.0.block_on(future)
        }

        async fn spawn_blocking<F, T>(f: F) -> Result<T, io::Error>
        where
            F: FnOnce() -> T + Send + 'static,
            T: Send + 'static,
        {
            outside::off_thread(f).await.map_err(io::Error::other)
        }
    }

    /// [`watch`] as openraft wants it.
    pub(crate) struct Watch;

    pub(crate) struct Sender<T>(watch::Sender<T>);

    impl<T> Clone for Sender<T> {
        fn clone(&self) -> Self {
            Self(self.0.clone())
        }
    }

    pub(crate) struct Receiver<T>(watch::Receiver<T>);

    impl<T> Clone for Receiver<T> {
        fn clone(&self) -> Self {
            Self(self.0.clone())
        }
    }

    impl channel::Watch for Watch {
        type Sender<T: OptionalSend + OptionalSync> = Sender<T>;
        type Receiver<T: OptionalSend + OptionalSync> = Receiver<T>;
        type Ref<'a, T: OptionalSend + 'a> = watch::Ref<'a, T>;

        fn channel<T: OptionalSend + OptionalSync>(
            init: T,
        ) -> (Self::Sender<T>, Self::Receiver<T>) {
            let (sender, receiver) = watch::channel(init);
            (Sender(sender), Receiver(receiver))
        }
    }

    impl<T: OptionalSend + OptionalSync> channel::WatchSender<Watch, T> for Sender<T> {
        fn send(&self, value: T) -> Result<(), channel::SendError<T>> {
            self.0.send(value).map_err(channel::SendError)
        }

        fn send_if_modified<F>(&self, modify: F) -> bool
        where
            F: FnOnce(&mut T) -> bool,
        {
            self.0.send_if_modified(modify)
        }

        fn borrow_watched(&self) -> watch::Ref<'_, T> {
            self.0.borrow()
        }

        fn subscribe(&self) -> Receiver<T> {
            Receiver(self.0.subscribe())
        }
    }

    impl<T: OptionalSend + OptionalSync> channel::WatchReceiver<Watch, T> for Receiver<T> {
        async fn changed(&mut self) -> Result<(), channel::RecvError> {
            self.0.changed().await.map_err(|_| channel::RecvError(()))
        }

        fn borrow_watched(&self) -> watch::Ref<'_, T> {
            self.0.borrow()
        }

        fn borrow_and_update(&mut self) -> watch::Ref<'_, T> {
            self.0.borrow_and_update()
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn i3_openraft_accepts_the_runtime() {
            openraft::rt::testing::Suite::<Runtime>::test_all();
        }
    }
}
