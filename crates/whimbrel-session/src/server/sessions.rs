//! Sessions of a server: keys, whom they belong to, and what each holds.
//!
//! A key is worth something only to the peer it was given to, and only until its session ends or was not used for the
//! time allowed. What a session holds is bounded in number; the oldest goes first.

use super::{files::Files, listing::Listings, tree::Tree};
use crate::proto::{SessionKey, code};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use whimbrel_wire::{PeerIdentity, Refusal};

/// What a server allows.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Sessions at once.
    pub sessions: usize,
    /// A session that was not used for so long is over.
    pub idle: Duration,
    /// Files kept open for a session.
    pub files: usize,
    /// Clients may share among the users of their host what more than one of them may read.
    pub share: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { sessions: 256, idle: Duration::from_secs(24 * 3600), files: 256, share: false }
    }
}

/// One session.
pub(super) struct Session {
    key: SessionKey,
    peer: PeerIdentity,
    pub(super) tree: Tree,
    pub(super) files: Files,
    pub(super) listings: Listings,
    used: Mutex<Instant>,
}

impl Session {
    pub(super) fn new(peer: PeerIdentity, tree: Tree, limits: &Limits) -> Self {
        Self {
            key: SessionKey::random(),
            peer,
            tree,
            files: Files::new(limits.files),
            listings: Listings::default(),
            used: Mutex::new(Instant::now()),
        }
    }

    pub(super) fn key(&self) -> SessionKey {
        self.key
    }

    fn idle(&self) -> Duration {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct Sessions {
    living: Mutex<Vec<Arc<Session>>>,
}

impl Sessions {
    fn living(&self) -> MutexGuard<'_, Vec<Arc<Session>>> {
        self.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a session in. If there are too many, the one that was not used for longest is over: whose it was begins
    /// another.
    pub(super) fn add(&self, session: Session, limits: &Limits) -> Arc<Session> {
        let mut living = self.living();
        living.retain(|session| session.idle() < limits.idle);
        if living.len() >= limits.sessions.max(1) {
            let longest = (0..living.len()).max_by_key(|at| living[*at].idle());
            longest.map(|at| living.swap_remove(at));
        }
        let session = Arc::new(session);
        living.push(session.clone());
        session
    }

    /// The session of this key, if it is this peer's.
    pub(super) fn of(
        &self,
        key: &SessionKey,
        peer: &PeerIdentity,
        limits: &Limits,
    ) -> Result<Arc<Session>, Refusal> {
        let mut found = None;
        for session in self.living().iter() {
            if session.key.matches(key) {
                found = Some(session.clone());
            }
        }
        let found = found.filter(|session| session.peer == *peer && session.idle() < limits.idle);
        let session =
            found.ok_or_else(|| Refusal::new(code::KEY, "the key is not that of a living session"))?;
        *session.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        Ok(session)
    }

    /// Ends a session.
    pub(super) fn end(&self, session: &Arc<Session>) {
        self.living().retain(|living| !Arc::ptr_eq(living, session));
    }

    pub(super) fn len(&self) -> usize {
        self.living().len()
    }
}
