//! Lease keeper: renews the leases of a session, and hears of recalls.
//!
//! One renewal waits at the server at any time, so a recall arrives within half a round trip.

use super::{
    lease_state::{LeaseState, Reliance},
    recalls::handle_recalls,
};
use crate::client::session::Core;
use crate::proto::{Ident, Watch, Watched};
use std::{
    collections::HashSet,
    sync::{Mutex, Weak},
    time::{Duration, Instant},
};
use tokio::{sync::Notify, time::sleep};
use whimbrel_core::lock;

/// Most milliseconds that a renewal waits for news.
const WAIT: u32 = 5_000;
/// Pause before a renewal that failed is tried again.
const PAUSE: Duration = Duration::from_millis(50);
/// Pause before a server that knows no leases is looked at again: it may be replaced by a newer one.
const OLD_SERVER_PAUSE: Duration = Duration::from_secs(5);

/// Files and directories with unsent changes.
#[derive(Default)]
pub(super) struct Claims {
    /// All that the server was told of, or will be next.
    pub(super) known: HashSet<Ident>,
    pub(super) untold: HashSet<Ident>,
}

/// The leases of a session.
#[derive(Default)]
pub(in crate::client) struct Leases {
    state: Mutex<LeaseState>,
    pub(super) claims: Mutex<Claims>,
    pub(super) claim: Notify,
}

impl Core {
    /// Asks for the first leases, and keeps them until the session ends.
    pub(in crate::client) fn begin_leases(&self) {
        let session = self.connection.session_number();
        if let Some(Ok((sent, watched))) = self.connection.runtime().block_on(async {
            let asked = self.connection.renewal()?;
            Some(asked.send(Watch { wait: 0, known: Default::default() }).await)
        }) {
            self.leases_renewed(session, sent, &watched);
        }
        let me = self.me.clone();
        self.connection.runtime().spawn(renew_leases(me.clone()));
        self.connection.runtime().spawn(super::recalls::keep_claims(me));
    }

    /// Whether what is known here may be used without a question.
    pub(in crate::client) fn reliance(&self) -> Reliance {
        lock(&self.leases.state).reliance(self.connection.session_number(), Instant::now())
    }

    /// Generation of the leases, if unsent changes must be claimed.
    pub(super) fn shared_generation(&self) -> Option<u64> {
        lock(&self.leases.state).shared_generation(self.connection.session_number())
    }

    /// Takes the answer to a renewal.
    fn leases_renewed(&self, session: u64, sent: Instant, watched: &Watched) {
        let (is_new, is_first, known, was_shared) = {
            let state = lock(&self.leases.state);
            let shared = state.shared_generation(session).is_some();
            (state.is_new(session, watched), state.is_first(), state.knows(session), shared)
        };
        // Before anything is relied on. What the first session was opened with is leased already.
        let from = if known { Instant::now() } else { self.connection.session_asked_at() };
        let listed = if is_new && !is_first { self.inodes().all_recalled(from) } else { Vec::new() };
        lock(&self.leases.state).renewed(session, sent, watched);
        if is_new {
            self.invalidate_kernel_names();
            self.walk_listed(listed);
            if let Some(core) = self.me.upgrade().filter(|core| !lock(&core.locks).all().is_empty()) {
                self.connection.runtime().spawn_blocking(move || core.reclaim_locks());
            }
        }
        if !watched.standing.alone && (is_new || !was_shared) {
            *lock(&self.leases.claims) = Claims::default();
            self.claim_unsent();
        }
    }
}

/// Renews the leases, again and again, until the session ends.
async fn renew_leases(core: Weak<Core>) {
    loop {
        let Some(now) = core.upgrade().filter(|core| !core.writeback.is_stopped()) else { return };
        let session = now.connection.session_number();
        let known = lock(&now.leases.state).standing(session);
        let (renewal, connected) = (now.connection.renewal(), now.connection.connected());
        drop(now);
        let Some(renewal) = renewal else {
            connected.await;
            // An older server is replaced by a newer one at some time.
            another_session(&core, session, OLD_SERVER_PAUSE).await;
            continue;
        };
        let renewed = renewal.send(Watch { wait: WAIT, known }).await;
        drop(renewal);
        let Some(now) = core.upgrade() else { return };
        match renewed {
            Ok((sent, watched)) => {
                now.leases_renewed(session, sent, &watched);
                if !watched.recalled.is_empty() {
                    let generation = watched.standing.generation;
                    tokio::spawn(handle_recalls(core.clone(), generation, watched.recalled));
                }
            }
            Err(_) => {
                // The connection has broken, and is restored. Or the server has ended the session: the next
                // request of a program begins another.
                drop(now);
                another_session(&core, session, OLD_SERVER_PAUSE).await;
            }
        }
    }
}

/// Waits until the server session is another one, for a while.
async fn another_session(core: &Weak<Core>, session: u64, patience: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        match core.upgrade() {
            Some(now) if now.connection.session_number() == session => {}
            _ => return,
        }
        sleep(PAUSE).await;
    }
}
