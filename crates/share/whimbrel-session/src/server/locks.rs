//! Locks of clients: the kernel holds them, for a descriptor of this process for each owner.
//!
//! So they exclude the locks of other clients, of other servers and of programs on this host (open file
//! description locks and those of processes, fcntl(2)). They belong to a client and not to a session: one
//! that comes back within the term of its leases finds them as it left them. After the term they are
//! released.

use super::{exports::ExportAccess, refuse, sessions::ServedSession};
use crate::proto::{ClientId, Ident, Lock, LockAction, Locked};
use nix::fcntl::{FcntlArg, fcntl};
use rustix::io::Errno;
use std::{
    collections::HashMap,
    fs::File,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_wire::Refusal;

/// Most files with locks of a client, each for one owner.
const MAX_LOCKED: usize = 256;
/// Largest offset of a byte; as the last one of a range it stands for the end of the file.
const LAST: u64 = i64::MAX as u64;

struct Locker {
    until: Instant,
    files: HashMap<(Ident, u64), File>,
}

/// The locks of all clients of a server.
pub(super) struct Locks {
    term: Duration,
    clients: Mutex<HashMap<ClientId, Locker>>,
}

impl Locks {
    pub(super) fn new(term: Duration) -> Arc<Self> {
        Arc::new(Self { term, clients: Mutex::default() })
    }

    /// A client gives a sign of life. Locks of clients that have not done so are released.
    pub(super) fn renew(&self, client: &ClientId) {
        let now = Instant::now();
        let mut clients = lock(&self.clients);
        if let Some(locker) = clients.get_mut(client) {
            locker.until = now + self.term;
        }
        clients.retain(|_, locker| now < locker.until);
    }

    /// Releases the locks of a client.
    pub(super) fn release(&self, client: &ClientId) {
        lock(&self.clients).remove(client);
    }

    /// Handles a request for a lock.
    pub(super) fn handle(
        self: &Arc<Self>,
        session: &ServedSession,
        wanted: &Lock,
    ) -> Result<Locked, Refusal> {
        let Some(client) = session.client() else { return Err(refuse("lock a file")(Errno::NOLCK)) };
        if wanted.start > wanted.end || wanted.start > LAST {
            return Err(refuse("lock a range")(Errno::INVAL));
        }
        self.renew(&client);
        let key = (wanted.file.ident, wanted.owner);
        let known =
            lock(&self.clients).get(&client).and_then(|locker| locker.files.get(&key)?.try_clone().ok());
        let file = match (known, wanted.action) {
            (Some(file), _) => file,
            (None, LockAction::Unlock) => return Ok(Locked { in_the_way: None }),
            (None, _) => open(session, wanted)?,
        };
        let done = act(&file, wanted)?;
        match wanted.action {
            LockAction::Shared | LockAction::Exclusive => self.remember(client, key, file)?,
            LockAction::Unlock if (wanted.start, wanted.end.min(LAST)) == (0, LAST) => {
                self.forget(&client, &key)
            }
            LockAction::Unlock | LockAction::TestShared | LockAction::TestExclusive => {}
        }
        Ok(done)
    }

    fn remember(self: &Arc<Self>, client: ClientId, key: (Ident, u64), file: File) -> Result<(), Refusal> {
        let mut clients = lock(&self.clients);
        if !clients.contains_key(&client) {
            self.release_in_time(client);
        }
        let new = || Locker { until: Instant::now() + self.term, files: HashMap::new() };
        let files = &mut clients.entry(client).or_insert_with(new).files;
        if files.len() >= MAX_LOCKED && !files.contains_key(&key) {
            // Dropping the descriptor removes the lock.
            return Err(refuse("lock so many files")(Errno::NOLCK));
        }
        files.entry(key).or_insert(file);
        Ok(())
    }

    fn forget(&self, client: &ClientId, key: &(Ident, u64)) {
        if let Some(locker) = lock(&self.clients).get_mut(client) {
            locker.files.remove(key);
        }
    }

    /// Releases the locks of a client once it is gone, although nobody asks for them here.
    fn release_in_time(self: &Arc<Self>, client: ClientId) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (locks, term) = (Arc::downgrade(self), self.term);
        runtime.spawn(async move {
            loop {
                tokio::time::sleep(term / 3).await;
                let Some(locks) = locks.upgrade() else { return };
                let mut clients = lock(&locks.clients);
                match clients.get(&client) {
                    Some(locker) if Instant::now() < locker.until => {}
                    _ => {
                        clients.remove(&client);
                        return;
                    }
                }
            }
        });
    }
}

/// Opens a file to lock it; for writing if that is possible, because an exclusive lock needs it.
fn open(session: &ServedSession, wanted: &Lock) -> Result<File, Refusal> {
    let writes = session.access == ExportAccess::Write;
    match session.tree.file(&wanted.file, writes) {
        Err(refusal) if writes && crate::proto::errno(&refusal).is_some() => {
            session.tree.file(&wanted.file, false)
        }
        opened => opened,
    }
}

/// Does what is wanted with the kernel's locks.
fn act(file: &File, wanted: &Lock) -> Result<Locked, Refusal> {
    let (kind, tests) = match wanted.action {
        LockAction::TestShared => (libc::F_RDLCK, true),
        LockAction::TestExclusive => (libc::F_WRLCK, true),
        LockAction::Shared => (libc::F_RDLCK, false),
        LockAction::Exclusive => (libc::F_WRLCK, false),
        LockAction::Unlock => (libc::F_UNLCK, false),
    };
    let length = if wanted.end >= LAST { 0 } else { (wanted.end - wanted.start + 1) as i64 };
    let mut range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: wanted.start as i64,
        l_len: length,
        l_pid: 0,
    };
    let done = match tests {
        true => fcntl(file, FcntlArg::F_OFD_GETLK(&mut range)),
        false => fcntl(file, FcntlArg::F_OFD_SETLK(&range)),
    };
    done.map_err(|errno| refuse("lock the file")(Errno::from_raw_os_error(errno as i32)))?;
    let found = tests && range.l_type != libc::F_UNLCK as libc::c_short;
    let end = if range.l_len == 0 { LAST } else { (range.l_start + range.l_len - 1) as u64 };
    let exclusive = range.l_type == libc::F_WRLCK as libc::c_short;
    Ok(Locked { in_the_way: found.then_some((range.l_start as u64, end, exclusive)) })
}
