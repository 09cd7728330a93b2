//! Free space on the server's disk: requested when the session begins, because `find` and others ask for it
//! first.

use crate::client::session::Core;
use crate::proto::{FilesystemSpace, StatfsCall};
use bytes::Bytes;
use std::time::{Duration, Instant};
use whimbrel_core::lock;
use whimbrel_fuse::Result;

/// How long it is cached; other programs use the disk as well.
const SPACE_TTL: Duration = Duration::from_secs(10);

impl Core {
    /// Space of the server's file system, at most [`SPACE_TTL`] old.
    pub(in crate::client) fn free_space(&self) -> Result<FilesystemSpace> {
        let known = *lock(&self.free_space);
        if let Some((_, room)) = known.filter(|(at, _)| at.elapsed() < SPACE_TTL.min(self.ttl())) {
            return Ok(room);
        }
        let (room, _) = self.connection.call::<StatfsCall, _>(()).map_err(|fail| fail.errno())?;
        self.store_free_space(room);
        Ok(room)
    }

    /// Requests the space without waiting.
    pub(in crate::client) fn prefetch_free_space(&self) {
        let (link, me) = (self.connection.clone(), self.me.clone());
        self.connection.runtime().spawn(async move {
            // After a failure, the next `statfs` asks again.
            if let Ok((room, _)) = link.send::<StatfsCall, _>((), Bytes::new(), None).await.0
                && let Some(core) = me.upgrade()
            {
                core.store_free_space(room);
            }
        });
    }

    fn store_free_space(&self, room: FilesystemSpace) {
        *lock(&self.free_space) = Some((Instant::now(), room));
    }
}
