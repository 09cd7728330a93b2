//! Served sessions: their keys, peers and resources.
//!
//! A key is valid only for the peer that it was given to, until its session ends or was idle for too long.
//! The resources of a session are bounded in number; the oldest goes first.
//!
//! A request outlives the connection on which it arrived. When a client begins another session, its earlier
//! ones are ended first: their changes in progress are waited for, and no more begin. Otherwise a repeated
//! change could be made the second time after the changes that followed it. Other processes that serve the
//! client are handled in `fencing.rs`.

use super::{
    exports::{ExportAccess, ExportTree},
    fencing::FencingToken,
    lease_table::HolderId,
    leases::Leases,
    listing::Listings,
    open_files::{OpenFiles, WriteLocks},
    refuse,
};
use crate::proto::{ClientId, SessionKey, code};
use rustix::io::Errno;
use std::{
    fs::File,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard},
    time::{Duration, Instant},
};
use whimbrel_core::lock;
use whimbrel_wire::{PeerIdentity, Refusal};

/// A session that a server gave, refused or ended, for an audit log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionEvent<'a> {
    /// The client that asked.
    pub peer: &'a PeerIdentity,
    /// The directory that was asked for; empty when a session ends.
    pub directory: &'a [u8],
    /// What became of the session.
    pub outcome: SessionOutcome<'a>,
}

/// What became of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionOutcome<'a> {
    /// The session began, with this access.
    Opened(ExportAccess),
    /// The session was refused, for this reason.
    Refused(&'a str),
    /// The client has ended the session.
    Ended,
}

/// Limits of a server.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Most sessions at once.
    pub sessions: usize,
    /// Idle time after which a session ends.
    pub idle: Duration,
    /// Most files kept open for a session.
    pub files: usize,
    /// Directory for fencing tokens, accessible to this server's user only, if several processes may serve
    /// one client.
    pub token_dir: Option<PathBuf>,
    /// Whether users of a client host may share content that they all may read.
    pub share: bool,
    /// Whether clients may set owners and groups, and the bits that run a program with the rights of its
    /// owner or group.
    pub ownership: bool,
    /// Whether changes by other processes of this host recall leases, where the system reports them. Without
    /// it, clients ask again when what they know gets old.
    pub watch: bool,
    /// Time that leases last after the last sign of life of their client.
    pub lease_term: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 256,
            idle: Duration::from_secs(24 * 3600),
            files: 256,
            token_dir: None,
            share: false,
            ownership: false,
            watch: true,
            lease_term: Duration::from_secs(20),
        }
    }
}

pub(super) struct ServedSession {
    key: SessionKey,
    peer: PeerIdentity,
    client: Option<ClientId>,
    pub(super) access: ExportAccess,
    pub(super) tree: ExportTree,
    pub(super) files: OpenFiles,
    pub(super) listings: Listings,
    pub(super) leases: Arc<Leases>,
    /// Number among the sessions that have leases; none for a client of an older version.
    pub(super) holder: Option<HolderId>,
    used: Mutex<Instant>,
    /// Whether the session is over; read-locked during every change.
    ended: RwLock<bool>,
    token: Option<FencingToken>,
}

/// Held during a change.
pub(super) struct ChangeGuard<'a> {
    _session: RwLockReadGuard<'a, bool>,
    _token: Option<File>,
}

impl ServedSession {
    pub(super) fn new(
        peer: PeerIdentity,
        client: Option<ClientId>,
        (tree, access): (ExportTree, ExportAccess),
        limits: &Limits,
        (locks, leases, leased): (Arc<WriteLocks>, Arc<Leases>, bool),
    ) -> Result<Self, Refusal> {
        let turn = match (&limits.token_dir, &client) {
            (Some(dir), Some(client)) => Some(FencingToken::start(dir, client)?),
            _ => None,
        };
        Ok(Self {
            key: SessionKey::random(),
            peer,
            client,
            access,
            tree,
            files: OpenFiles::new(limits.files, locks),
            listings: Listings::default(),
            holder: leased.then(|| leases.join()),
            leases,
            used: Mutex::new(Instant::now()),
            ended: RwLock::new(false),
            token: turn,
        })
    }

    /// Whether the session may change anything.
    pub(super) fn may_change(&self) -> Result<(), Refusal> {
        match self.access {
            ExportAccess::Write => Ok(()),
            ExportAccess::Read => Err(refuse("change a read-only export")(Errno::ROFS)),
        }
    }

    /// Begins a change; it lasts until the guard is dropped.
    pub(super) fn start_change(&self) -> Result<ChangeGuard<'_>, Refusal> {
        let over = self.ended.read().unwrap_or_else(PoisonError::into_inner);
        if *over {
            return Err(unknown_key());
        }
        let anywhere = match &self.token {
            Some(turn) => Some(turn.lock()?.ok_or_else(unknown_key)?),
            None => None,
        };
        Ok(ChangeGuard { _session: over, _token: anywhere })
    }

    /// Waits for the changes in progress, and prevents new ones.
    fn end_changes(&self) {
        *self.ended.write().unwrap_or_else(PoisonError::into_inner) = true;
    }

    fn succeeds(&self, other: &ServedSession) -> bool {
        self.client.is_some() && self.client == other.client && self.peer == other.peer
    }

    /// Id of the client, if it has said who it is.
    pub(super) fn client(&self) -> Option<ClientId> {
        self.client
    }

    pub(super) fn key(&self) -> SessionKey {
        self.key
    }

    fn idle(&self) -> Duration {
        lock(&self.used).elapsed()
    }
}

pub(super) fn unknown_key() -> Refusal {
    Refusal::new(code::KEY, "there is no session with this key")
}

#[derive(Default)]
pub(super) struct Sessions {
    sessions: Mutex<Vec<Arc<ServedSession>>>,
    /// Locks of the files that any session has open.
    pub(super) locks: Arc<WriteLocks>,
}

impl Sessions {
    /// Adds a session, and ends earlier ones of its client. If there are too many, the one idle for longest
    /// ends, and its client begins another.
    pub(super) fn add(&self, session: ServedSession, limits: &Limits) -> Arc<ServedSession> {
        let before: Vec<_> = lock(&self.sessions).extract_if(.., |before| session.succeeds(before)).collect();
        before.iter().for_each(|session| session.end_changes());
        before.iter().for_each(|session| session.leave());
        let mut living = lock(&self.sessions);
        living.retain(|session| session.idle() < limits.idle);
        if living.len() >= limits.sessions.max(1) {
            let longest = (0..living.len()).max_by_key(|at| living[*at].idle());
            if let Some(at) = longest {
                living.swap_remove(at).leave();
            }
        }
        let session = Arc::new(session);
        living.push(session.clone());
        session
    }

    /// The session with this key, if it belongs to this peer.
    pub(super) fn find(
        &self,
        key: &SessionKey,
        peer: &PeerIdentity,
        limits: &Limits,
    ) -> Result<Arc<ServedSession>, Refusal> {
        let mut found = None;
        for session in lock(&self.sessions).iter() {
            if session.key.matches(key) {
                found = Some(session.clone());
            }
        }
        let found = found.filter(|session| session.peer == *peer && session.idle() < limits.idle);
        let session = found.ok_or_else(unknown_key)?;
        *lock(&session.used) = Instant::now();
        Ok(session)
    }

    pub(super) fn end(&self, session: &Arc<ServedSession>) {
        lock(&self.sessions).retain(|living| !Arc::ptr_eq(living, session));
        session.leave();
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.sessions).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread};

    fn session(client: Option<ClientId>) -> ServedSession {
        let tree = crate::server::Export::new("/".as_ref())
            .unwrap()
            .tree(&crate::proto::RelPath::root(), false)
            .unwrap();
        let tree = (tree, ExportAccess::Write);
        let shared = (Arc::default(), Leases::new(&Limits::default()), false);
        ServedSession::new(PeerIdentity::Stdio, client, tree, &Limits::default(), shared).unwrap()
    }

    #[test]
    fn a_session_begins_when_the_changes_of_its_clients_last_one_are_done() {
        let (sessions, limits) = (Arc::new(Sessions::default()), Limits::default());
        let client = Some(ClientId::random());
        let first = sessions.add(session(client), &limits);
        let changing = first.start_change().unwrap();
        let (begun, begins) = mpsc::channel();
        let others = sessions.clone();
        let adding = thread::spawn(move || begun.send(others.add(session(client), &Limits::default())));
        // Sessions of other clients do not wait for it.
        sessions.add(session(Some(ClientId::random())), &limits);
        sessions.add(session(None), &limits);
        assert!(begins.recv_timeout(Duration::from_millis(50)).is_err());
        drop(changing);
        let second = begins.recv().unwrap();
        adding.join().unwrap().unwrap();
        assert!(first.start_change().is_err() && second.start_change().is_ok());
        assert!(sessions.find(&first.key(), &PeerIdentity::Stdio, &limits).is_err());
        assert_eq!(sessions.len(), 3);
    }

    #[test]
    fn sessions_of_clients_that_do_not_say_who_they_are_live_side_by_side() {
        let (sessions, limits) = (Sessions::default(), Limits::default());
        let both = [(); 2].map(|()| sessions.add(session(None), &limits));
        assert!(both.iter().all(|session| session.start_change().is_ok()));
    }
}
