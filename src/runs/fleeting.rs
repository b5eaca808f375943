//! Spaces in memory: they go when whoever holds them is done.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crate::launcher::plan::SpaceId;
use crate::zygote::Launch;

/// How long a space in memory outlives its run: unmounting would run beside the writing of the answer.
const DELETE_AFTER: Duration = Duration::from_millis(2);

/// Deletes a space when it is dropped, and with it what still runs there.
pub(super) struct Fleeting {
    space: SpaceId,
    launcher: Arc<dyn Launch>,
}

impl Fleeting {
    /// `None` for a space that is kept.
    pub(super) fn of(space: SpaceId, launcher: &Arc<dyn Launch>) -> Option<Fleeting> {
        space.is_transient().then(|| Fleeting { space, launcher: Arc::clone(launcher) })
    }
}

impl Drop for Fleeting {
    fn drop(&mut self) {
        let (space, launcher) = (self.space, Arc::clone(&self.launcher));
        // Without a runtime the daemon is at its end, and the launcher with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                tokio::time::sleep(DELETE_AFTER).await;
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
