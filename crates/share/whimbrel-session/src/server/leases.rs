//! Leases of a server: the table with its lock, the wait for what was recalled, and changes from outside.

use super::{
    lease_table::{HolderId, LeaseLimits, LeaseTable, Turn},
    outside_changes::OutsideChanges,
    refuse,
    sessions::Limits,
};
use crate::proto::{Attr, Ident, MAX_LEASES, Watch, Watched, code};
use rand::Rng;
use rustix::io::Errno;
use std::{
    os::fd::AsFd,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::Notify;
use whimbrel_core::lock;
use whimbrel_wire::Refusal;

/// Longest time that the answer to a renewal without news takes.
const POLL: Duration = Duration::from_secs(5);
/// Longest pause between two looks whether the term of a silent holder is over.
const LOOK: Duration = Duration::from_millis(500);
/// Most leases of a session, and of all: some 150 bytes each.
const MAX_HELD: (usize, usize) = (1 << 18, 1 << 20);

/// The leases of a server.
pub(super) struct Leases {
    table: Mutex<LeaseTable>,
    /// Told of every recall, return and end.
    moved: Notify,
    wants_outside: bool,
    poll: Duration,
    outside: OnceLock<Option<OutsideChanges>>,
    /// Whether something leased cannot be watched.
    uncovered: AtomicBool,
}

/// Refuses for now if leases of others come back first. Such a refusal is never sent.
fn after(turn: Turn) -> Result<(), Refusal> {
    match turn {
        Turn::Free => Ok(()),
        Turn::Wait => Err(Refusal::new(code::RECALLING, "leases of other sessions are being recalled")),
    }
}

impl Leases {
    /// No leases yet.
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        let (term, wants_outside) = (limits.lease_term, limits.watch);
        let limits = LeaseLimits { term, per_holder: MAX_HELD.0, total: MAX_HELD.1 };
        Arc::new(Self {
            table: Mutex::new(LeaseTable::new(limits, rand::rng().random())),
            moved: Notify::new(),
            wants_outside,
            poll: POLL.min(term / 3),
            outside: OnceLock::new(),
            uncovered: AtomicBool::new(false),
        })
    }

    /// Uses the table, and wakes who waits if something moved.
    fn with<T>(&self, uses: impl FnOnce(&mut LeaseTable) -> T) -> T {
        let mut table = lock(&self.table);
        let result = uses(&mut table);
        if table.take_moved() {
            self.moved.notify_waiters();
        }
        result
    }

    /// What watches for changes from outside; none if this system does not tell of them.
    fn outside(self: &Arc<Self>) -> Option<&OutsideChanges> {
        let begin = || {
            let begun = self.wants_outside.then(|| OutsideChanges::start(self));
            begun?.inspect_err(|error| tracing::info!(%error, "cannot watch for changes of others")).ok()
        };
        self.outside.get_or_init(begin).as_ref()
    }

    /// What watches already.
    pub(super) fn outside_now(&self) -> Option<&OutsideChanges> {
        self.outside.get()?.as_ref()
    }

    pub(super) fn join(&self) -> HolderId {
        self.with(|table| table.join(Instant::now()))
    }

    pub(super) fn leave(&self, id: HolderId) {
        self.with(|table| table.leave(id));
    }

    /// Answers a renewal: at once if there is news, else after a while. None if the session has ended.
    pub(super) async fn watch(self: &Arc<Self>, id: HolderId, wanted: &Watch) -> Option<Watched> {
        self.with(|table| table.renew(id, Instant::now()))?;
        let patience = self.poll.min(Duration::from_millis(u64::from(wanted.wait)));
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let mut moved = std::pin::pin!(self.moved.notified());
            moved.as_mut().enable();
            let mut news = self.with(|table| table.news(id, Instant::now()))?;
            news.standing.covers_outside = self.covers_outside();
            let over = tokio::time::Instant::now() >= deadline;
            if over || news.standing != wanted.known || !news.recalled.is_empty() {
                return Some(news);
            }
            // Either way, the next look decides.
            let _ = tokio::time::timeout_at(deadline, moved).await;
        }
    }

    fn covers_outside(self: &Arc<Self>) -> bool {
        self.outside().is_some() && !self.uncovered.load(Ordering::Acquire)
    }

    pub(super) fn returned(&self, id: HolderId, generation: u64, files: &[Ident]) {
        let files = &files[..files.len().min(MAX_LEASES)];
        self.with(|table| table.returned(id, generation, files));
    }

    pub(super) fn claim(&self, id: HolderId, generation: u64, files: &[Ident]) {
        let files = &files[..files.len().min(MAX_LEASES)];
        self.with(|table| table.claim(id, generation, files, Instant::now()));
    }

    /// Runs what answers a request, and again whenever a lease comes back that it had to wait for.
    pub(super) async fn when_free<T, F: Future<Output = Result<T, Refusal>>>(
        &self,
        run: impl Fn() -> F,
    ) -> Result<T, Refusal> {
        loop {
            let mut moved = std::pin::pin!(self.moved.notified());
            moved.as_mut().enable();
            match run().await {
                Err(refusal) if refusal.code == code::RECALLING => {
                    // Either way, the next attempt decides.
                    let _ = tokio::time::timeout(LOOK, moved).await;
                }
                answer => return answer,
            }
        }
    }

    /// Whether no other session can have leases.
    pub(super) fn is_alone(&self, by: Option<HolderId>) -> bool {
        self.with(|table| table.is_alone(by, Instant::now()))
    }

    /// Number of times that a session came, or came back after its term.
    pub(super) fn arrivals(&self) -> u64 {
        self.with(|table| table.arrivals())
    }

    /// Refuses for now if others have leases of what is about to be changed.
    pub(super) fn before_change(&self, by: Option<HolderId>, files: &[Ident]) -> Result<(), Refusal> {
        after(self.with(|table| table.before_change(by, files, Instant::now())))
    }

    /// Refuses for now if others have changed what is about to be read, and not sent it yet.
    pub(super) fn before_read(&self, by: Option<HolderId>, files: &[Ident]) -> Result<(), Refusal> {
        after(self.with(|table| table.before_read(by, files, Instant::now())))
    }

    pub(super) fn changed(&self, by: Option<HolderId>, files: &[Ident]) {
        self.with(|table| table.changed(by, files, Instant::now()));
    }

    /// Ends the leases of all sessions but one, because it is not known which files were changed.
    pub(super) fn start_all_anew(&self, but: Option<HolderId>) {
        self.with(|table| table.start_all_anew(but));
    }

    pub(super) fn moment(&self) -> u64 {
        self.with(|table| table.moment())
    }

    pub(super) fn holds(&self, id: HolderId, file: &Ident) -> bool {
        self.with(|table| table.holds(id, file))
    }

    pub(super) fn is_held(&self, file: &Ident) -> bool {
        self.with(|table| table.is_held(file))
    }

    pub(super) fn grant(&self, id: HolderId, files: &[Ident], moment: u64) {
        self.with(|table| table.grant(id, files, moment, Instant::now()));
    }

    /// Watches a directory, and files by what lies in it, for changes from outside; true if it was not
    /// watched before.
    pub(super) fn cover_dir(self: &Arc<Self>, dir: impl AsFd, ident: &Ident) -> bool {
        let Some(outside) = self.outside() else { return false };
        self.note(outside.cover_dir(dir.as_fd(), ident))
    }

    /// Watches a name in a watched directory; true if the file was not watched before.
    pub(super) fn cover(self: &Arc<Self>, dir: impl AsFd, name: &std::ffi::OsStr, attr: &Attr) -> bool {
        let Some(outside) = self.outside() else { return false };
        self.note(outside.cover(dir.as_fd(), name, attr, |file| self.is_held(file)))
    }

    fn note(&self, covered: Result<bool, Errno>) -> bool {
        match covered {
            Ok(new) => new,
            // The file is gone: the answer will not have it.
            Err(Errno::NOENT | Errno::STALE) => false,
            Err(errno) => {
                self.uncover(errno);
                false
            }
        }
    }

    /// From now on, changes from outside may be missed.
    pub(super) fn uncover(&self, errno: Errno) {
        if !self.uncovered.swap(true, Ordering::AcqRel) {
            tracing::info!(%errno, "cannot watch all directories for changes of others");
            self.moved.notify_waiters();
        }
    }
}

/// Refuses a request about leases of a session that has none.
pub(super) fn without_leases() -> Refusal {
    refuse("renew leases of a session of an older version")(Errno::INVAL)
}
