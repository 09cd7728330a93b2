//! Room on the server's disk: asked for when the session begins, since `find` and others look at it before
//! anything else, and believed for some seconds.

use super::session::Core;
use crate::proto::{FilesystemSpace, StatfsCall};
use bytes::Bytes;
use std::{
    sync::PoisonError,
    time::{Duration, Instant},
};
use whimbrel_fuse::Result;

/// Others use the disk as well.
const BELIEVED: Duration = Duration::from_secs(10);

impl Core {
    /// Room as it was lately.
    pub(super) fn room(&self) -> Result<FilesystemSpace> {
        let known = *self.room.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, room)) = known.filter(|(at, _)| at.elapsed() < BELIEVED.min(self.ttl())) {
            return Ok(room);
        }
        let (room, _) = self.link.call::<StatfsCall, _>(()).map_err(|fail| fail.errno())?;
        self.has_room(room);
        Ok(room)
    }

    /// Has it on its way.
    pub(super) fn room_ahead(&self) {
        let (link, me) = (self.link.clone(), self.me.clone());
        self.link.runtime().spawn(async move {
            // Who wants to know asks again.
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
