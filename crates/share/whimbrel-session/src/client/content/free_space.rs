//! Free space on the server's disk: requested when the session begins, because `find` and others ask for it
//! first.

use crate::client::session::Core;
use crate::proto::{FilesystemSpace, StatfsCall};
use bytes::Bytes;
use std::{
    sync::PoisonError,
    time::{Duration, Instant},
};
use whimbrel_fuse::Result;

/// How long it is cached; other programs use the disk as well.
const BELIEVED: Duration = Duration::from_secs(10);

impl Core {
    /// Space of the server's file system, at most [`BELIEVED`] old.
    pub(in crate::client) fn room(&self) -> Result<FilesystemSpace> {
        let known = *self.room.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, room)) = known.filter(|(at, _)| at.elapsed() < BELIEVED.min(self.ttl())) {
            return Ok(room);
        }
        let (room, _) = self.link.call::<StatfsCall, _>(()).map_err(|fail| fail.errno())?;
        self.has_room(room);
        Ok(room)
    }

    /// Requests the space without waiting.
    pub(in crate::client) fn room_ahead(&self) {
        let (link, me) = (self.link.clone(), self.me.clone());
        self.link.runtime().spawn(async move {
            // After a failure, the next `statfs` asks again.
            if let Ok((room, _)) = link.ask::<StatfsCall, _>((), Bytes::new(), None).await.0
                && let Some(core) = me.upgrade()
            {
                core.has_room(room);
            }
        });
    }

    fn has_room(&self, room: FilesystemSpace) {
        *self.room.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), room));
    }
}
