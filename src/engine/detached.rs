//! A future that outlives who waits for it.
#![forbid(unsafe_code)]

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Runs inside its caller, which costs no hand-over between threads; dropped before its end, it goes on as a
/// task of its own. A session's cell runs like this: when its caller hangs up, the session's names must not
/// stay half-changed.
pub(super) struct Detached<T: Send + 'static> {
    work: Option<Work<T>>,
}

impl<T: Send + 'static> Detached<T> {
    pub(super) fn new(work: impl Future<Output = T> + Send + 'static) -> Detached<T> {
        Detached { work: Some(Box::pin(work)) }
    }
}

impl<T: Send + 'static> Future for Detached<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let work = self.work.as_mut().expect("not polled again after its end");
        let polled = work.as_mut().poll(context);
        if polled.is_ready() {
            self.work = None;
        }
        polled
    }
}

impl<T: Send + 'static> Drop for Detached<T> {
    fn drop(&mut self) {
        // Without a runtime the daemon is at its end, and the work with it. A panic is not polled again.
        if let (Some(work), Ok(runtime), false) =
            (self.work.take(), Handle::try_current(), std::thread::panicking())
        {
            runtime.spawn(work);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn work_goes_on_when_nobody_waits_any_more() {
        let (done, seen) = oneshot::channel();
        let work = Detached::new(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            done.send(7).ok();
        });
        assert!(tokio::time::timeout(Duration::from_millis(1), work).await.is_err());
        assert_eq!(seen.await, Ok(7));
    }

    #[tokio::test]
    async fn work_that_is_awaited_answers() {
        assert_eq!(Detached::new(async { 7 }).await, 7);
    }
}
