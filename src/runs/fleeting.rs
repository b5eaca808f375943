//! Spaces in memory: they go when whoever holds them is done.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::launcher::plan::SpaceId;
use crate::zygote::{ANSWER_FIRST, Launch};

/// Deletes a space when it is dropped, and with it what still runs there.
pub(super) struct Fleeting {
    space: SpaceId,
    launcher: Arc<dyn Launch>,
    standing: Standing,
}

/// The sandbox of a run that is over: it stands still, and is ended when this is dropped.
pub(super) type Standing = Option<Box<dyn Send>>;

impl Fleeting {
    /// `None` for a space that is kept.
    pub(super) fn of(space: SpaceId, launcher: &Arc<dyn Launch>) -> Option<Fleeting> {
        space.is_transient().then(|| Fleeting { space, launcher: Arc::clone(launcher), standing: None })
    }

    /// Ends the run's sandbox together with the space, behind the answer.
    pub(super) fn ends(&mut self, standing: Standing) {
        self.standing = standing;
    }
}

impl Drop for Fleeting {
    fn drop(&mut self) {
        let (space, launcher, standing) = (self.space, Arc::clone(&self.launcher), self.standing.take());
        // Without a runtime the daemon is at its end, and the launcher with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                tokio::time::sleep(ANSWER_FIRST).await;
                drop(standing);
                if let Err(error) = launcher.delete_space(space).await {
                    tracing::debug!(%space, %error, "a space in memory was not deleted; it goes by itself");
                }
            });
        }
    }
}

impl std::fmt::Debug for Fleeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Fleeting").field(&self.space).finish()
    }
}
