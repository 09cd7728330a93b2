//! Calls of programs for locks.
//!
//! What a lock protects must be the same for whoever has it: what is known of a file is asked for again once
//! the lock is there, and what was written is sent before it goes. A lock that the server has given to
//! somebody else meanwhile is lost, and its program gets errors until it closes the file.

use super::pending_signal::is_interrupted;
use crate::client::{
    connection::server_connection::CallFailure, leases::lease_state::Reliance, session::Core,
};
use crate::proto::{FileRef, Kind, Lock, LockAction, LockCall, Locked};
use std::time::Duration;
use whimbrel_core::lock;
use whimbrel_fuse::{Caller, Errno, FileLock, LockKind, Result};

/// First and longest pause before a lock that somebody else has is tried again.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// The last byte of every file.
const LAST: u64 = i64::MAX as u64;

impl Core {
    /// The file as the server knows it. A new one is made there first.
    fn lock_subject(&self, id: u64) -> Result<FileRef> {
        let find = || {
            let nodes = self.inodes();
            let node = nodes.get(id).ok_or(Errno::ESTALE)?;
            if node.attr.kind != Kind::File {
                return Err(Errno::EBADF);
            }
            let path = nodes.path(id).unwrap_or_default();
            Ok((!node.local).then_some(FileRef { path, ident: node.attr.ident }))
        };
        if let Some(file) = find()? {
            return self.flush_changes(id).and_then(|()| find()).map(|found| found.unwrap_or(file));
        }
        self.flush_all(false)?;
        find()?.ok_or(Errno::EIO)
    }

    fn ask_lock(&self, file: FileRef, owner: u64, range: &FileLock, action: LockAction) -> Result<Locked> {
        let wanted = Lock { file, owner, start: range.start, end: range.end.min(LAST), action };
        let answer = self.connection.call::<LockCall, _>(wanted);
        answer.map(|(locked, _)| locked).map_err(|fail| match fail {
            fail if fail.is(whimbrel_wire::Code::UNKNOWN_KIND) => Errno::ENOLCK,
            CallFailure::Unreachable => Errno::ENOLCK,
            fail => fail.errno(),
        })
    }

    /// The first lock of others in the way of this one.
    pub(in crate::client) fn test_lock(&self, id: u64, owner: u64, wanted: FileLock) -> Result<FileLock> {
        let action = match wanted.kind {
            LockKind::Exclusive => LockAction::TestExclusive,
            _ => LockAction::TestShared,
        };
        let locked = self.ask_lock(self.lock_subject(id)?, owner, &wanted, action)?;
        Ok(match locked.in_the_way {
            None => FileLock { kind: LockKind::Unlock, ..wanted },
            Some((start, end, exclusive)) => {
                let kind = if exclusive { LockKind::Exclusive } else { LockKind::Shared };
                FileLock { start, end, kind, pid: 0 }
            }
        })
    }

    /// Sets or removes a lock.
    pub(in crate::client) fn set_lock(
        &self,
        caller: Caller,
        id: u64,
        (handle, owner): (u64, u64),
        wanted: FileLock,
        wait: bool,
    ) -> Result<()> {
        let action = match wanted.kind {
            LockKind::Shared => LockAction::Shared,
            LockKind::Exclusive => LockAction::Exclusive,
            LockKind::Unlock if lock(&self.locks).has(id, owner) => LockAction::Unlock,
            // There is none, and none to ask for.
            LockKind::Unlock => return Ok(()),
        };
        let file = self.lock_subject(id)?;
        if action == LockAction::Unlock {
            self.flush_locked(id)?;
        }
        let mut pause = PAUSE.0;
        loop {
            match self.ask_lock(file.clone(), owner, &wanted, action) {
                Err(Errno::EAGAIN) if wait => {}
                Err(errno) => return Err(errno),
                Ok(_) => break,
            }
            if is_interrupted(caller.pid) {
                return Err(Errno::EINTR);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE.1);
        }
        lock(&self.locks).set(id, handle, owner, wanted);
        if action == LockAction::Unlock { Ok(()) } else { self.see_locked(id) }
    }

    /// Sends what was written to a file under a lock.
    fn flush_locked(&self, id: u64) -> Result<()> {
        let file = self.inodes().get(id).and_then(|node| node.file);
        match file.filter(|file| self.cache.file(*file).is_some_and(|record| record.dirty)) {
            Some(file) => self.flush_file(file, false),
            None => Ok(()),
        }
    }

    /// Asks for the state of a file that was locked, unless it is leased.
    fn see_locked(&self, id: u64) -> Result<()> {
        if !matches!(self.reliance(), Reliance::Until(_))
            && let Some(node) = self.inodes().get_mut(id).filter(|node| !node.local)
        {
            node.expire();
        }
        self.revalidate(id)
    }

    /// Removes all locks of an owner, or of those who set them by way of a handle.
    pub(in crate::client) fn drop_locks(&self, id: u64, owners: Vec<u64>) {
        for owner in owners {
            if !lock(&self.locks).has(id, owner) {
                continue;
            }
            let all = FileLock { start: 0, end: LAST, kind: LockKind::Unlock, pid: 0 };
            // What cannot be sent stays dirty. A lock that the server does not hear of ends with the session.
            let _ = self.flush_locked(id);
            let _ =
                self.lock_subject(id).and_then(|file| self.ask_lock(file, owner, &all, LockAction::Unlock));
            lock(&self.locks).remove(id, owner);
        }
    }

    /// Asks for all locks again, because the server may have lost them.
    pub(in crate::client) fn reclaim_locks(&self) {
        let held = lock(&self.locks).all();
        for (id, owner, range) in held {
            let action =
                if range.kind == LockKind::Exclusive { LockAction::Exclusive } else { LockAction::Shared };
            let asked = self.lock_subject(id).and_then(|file| self.ask_lock(file, owner, &range, action));
            let Err(errno) = asked else { continue };
            let path = self.inodes().path(id).unwrap_or_default();
            self.event(format!("{path}: its lock is lost, because this host was away for too long: {errno}"));
            lock(&self.locks).remove(id, owner);
            if let Some(node) = self.inodes().get_mut(id) {
                node.lock_lost = true;
            }
        }
    }

    /// Fails if a program uses a file whose lock was lost.
    pub(in crate::client) fn check_lock(&self, id: u64) -> Result<()> {
        match self.inodes().get(id).is_some_and(|node| node.lock_lost) {
            true => Err(Errno::EIO),
            false => Ok(()),
        }
    }
}
