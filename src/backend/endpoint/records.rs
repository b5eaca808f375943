//! Which kernels we have started and the server has not deleted yet, as the store knows it: a daemon that is killed
//! deletes nothing, so the next one does.
#![forbid(unsafe_code)]

use rusqlite::params;
use uuid::Uuid;

use crate::backend::endpoint::rest::KernelId;
use crate::store::{Store, StoreError};

/// The records of one life of the daemon's at one server.
#[derive(Debug)]
pub(super) struct Records {
    store: Store,
    /// Its URL. Those of another server stay until that one is named again: nobody else can delete them.
    server: String,
    life: String,
}

impl Records {
    pub(super) fn new(store: Store, server: String) -> Records {
        Records { store, server, life: Uuid::new_v4().simple().to_string() }
    }

    /// Written down when this returns. Without a record the kernel serves all the same.
    pub(super) async fn keep(&self, kernel: &KernelId) {
        let (server, kernel, life) = (self.server.clone(), kernel.as_str().to_owned(), self.life.clone());
        let kept = self.store.write(move |connection| {
            let mut keep = connection.prepare_cached(
                "INSERT OR REPLACE INTO endpoint_kernels (server, kernel, life) VALUES (?, ?, ?)",
            )?;
            keep.execute(params![server, kernel, life])
        });
        if let Err(error) = kept.await {
            tracing::error!(%error, "a kernel of the Jupyter server was not written down");
        }
    }

    /// The server has deleted it.
    pub(super) async fn forget(&self, kernel: &KernelId) {
        let (server, kernel) = (self.server.clone(), kernel.as_str().to_owned());
        let forgotten = self.store.write_behind(move |connection| {
            let mut forget =
                connection.prepare_cached("DELETE FROM endpoint_kernels WHERE server = ? AND kernel = ?")?;
            forget.execute(params![server, kernel]).map(drop)
        });
        if let Err(error) = forgotten.await {
            tracing::error!(%error, "a kernel of the Jupyter server was not forgotten");
        }
    }

    /// Kernels of earlier lives.
    pub(super) async fn left_behind(&self) -> Result<Vec<KernelId>, StoreError> {
        let (server, life) = (self.server.clone(), self.life.clone());
        let read = self.store.read(move |connection| {
            let mut left = connection
                .prepare_cached("SELECT kernel FROM endpoint_kernels WHERE server = ? AND life <> ?")?;
            let rows = left.query_map(params![server, life], |row| row.get::<_, String>(0))?;
            rows.collect::<rusqlite::Result<Vec<String>>>()
        });
        Ok(read.await?.into_iter().filter_map(KernelId::parse).collect())
    }
}
