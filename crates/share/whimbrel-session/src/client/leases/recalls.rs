//! Recalls: what the server takes back is not relied on any more, and what was unsent under it is sent.
//!
//! The order matters. First nothing here counts as known any more, for the kernel either; then unsent changes
//! are sent; then the lease is given back. What was asked for before it was back is used once and not
//! remembered.

use crate::client::{namespace::inodes::InodeTable, session::Core};
use crate::proto::{Claim, ClaimCall, Ident, MAX_LEASES, Return, ReturnCall};
use std::{
    collections::HashSet,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tokio::time::timeout;
use whimbrel_core::lock;

/// Longest wait for the kernel to drop what it has cached. It may be busy with a call that waits for a lease
/// of another client, which in turn waits for this one.
const KERNEL: Duration = Duration::from_millis(100);
/// Longest wait until unsent changes were sent. Later, the server finds a conflict if there is one.
const FLUSH: Duration = Duration::from_secs(5);

/// Longest pause of the task that claims, after which it looks whether the session has ended.
const CLAIM_PAUSE: Duration = Duration::from_secs(10);

/// Handles recalls of one message.
pub(super) async fn handle_recalls(core: Weak<Core>, generation: u64, files: Vec<Ident>) {
    let Some(now) = core.upgrade() else { return };
    let ids = now.forget_leased(&files);
    drop_in_kernel(&now, ids).await;
    let unsent: Vec<Ident> = files.iter().copied().filter(|file| now.is_unsent(file)).collect();
    if !unsent.is_empty() {
        let flushing = now.clone();
        let sent = tokio::task::spawn_blocking(move || flushing.send_recalled(&unsent));
        // A failure is tried again, and reported, by the write-back.
        let _ = timeout(FLUSH, sent).await;
    }
    let (link, returned) = (now.connection.clone(), Return { generation, files: files.clone() });
    drop(now);
    // If it fails, the connection has broken, and the leases are over.
    let _ = link.lease_call::<ReturnCall, _>(returned).await;
    drop(link);
    let Some(now) = core.upgrade() else { return };
    // What was asked for meanwhile is not leased.
    let ids = now.forget_leased(&files);
    drop_in_kernel(&now, ids).await;
}

/// Makes the kernel drop what it has of these inodes, and names that it believes absent.
async fn drop_in_kernel(core: &Arc<Core>, ids: Vec<u64>) {
    let Some(notifier) = core.notifier.get().cloned() else { return };
    let names = core.inodes().take_appeared();
    if ids.is_empty() && names.is_empty() {
        return;
    }
    let told = tokio::task::spawn_blocking(move || {
        // An error means that the kernel had nothing cached.
        ids.into_iter().for_each(|id| drop(notifier.invalidate_inode(id, 0, 0)));
        names.into_iter().for_each(|(dir, name)| drop(notifier.invalidate_entry(dir, name.as_os())));
    });
    let _ = timeout(KERNEL, told).await;
}

/// Tells the server which files were changed here, as long as others have leases.
pub(super) async fn keep_claims(core: Weak<Core>) {
    loop {
        let Some(now) = core.upgrade().filter(|core| !core.writeback.is_stopped()) else { return };
        let files: Vec<Ident> = {
            let mut claims = lock(&now.leases.claims);
            let some: Vec<Ident> = claims.untold.iter().copied().take(MAX_LEASES).collect();
            some.iter().for_each(|file| _ = claims.untold.remove(file));
            some
        };
        let (link, generation) = (now.connection.clone(), now.shared_generation());
        match generation.filter(|_| !files.is_empty()) {
            Some(generation) => {
                drop(now);
                // If it fails, the connection has broken, and what is unsent is claimed in the next session.
                let _ = link.lease_call::<ClaimCall, _>(Claim { generation, files }).await;
            }
            None => {
                drop(link);
                let leases = now.leases.clone();
                drop(now);
                let _ = timeout(CLAIM_PAUSE, leases.claim.notified()).await;
            }
        }
    }
}

impl Core {
    /// Nothing here counts as known of these files any more; returns the inodes that the kernel may know.
    fn forget_leased(&self, files: &[Ident]) -> Vec<u64> {
        let mut claims = lock(&self.leases.claims);
        files.iter().for_each(|file| _ = claims.known.remove(file));
        drop(claims);
        let (mut nodes, now) = (self.inodes(), Instant::now());
        files.iter().filter_map(|file| nodes.recalled(file, now)).collect()
    }

    /// Whether a file has unsent content, or a directory unsent names.
    fn is_unsent(&self, ident: &Ident) -> bool {
        let (id, file) = {
            let nodes = self.inodes();
            let Some(id) = nodes.by_ident(ident) else { return false };
            (id, nodes.get(id).and_then(|node| node.file))
        };
        let dirty = file.and_then(|file| self.cache.file(file)).is_some_and(|record| record.dirty);
        dirty || self.writeback.affects(id, &[])
    }

    /// Sends unsent changes of files whose leases are recalled. What is being sent already is not waited for:
    /// it may wait for a lease of the client that wants this one.
    fn send_recalled(&self, files: &[Ident]) {
        let files: Vec<_> = {
            let nodes = self.inodes();
            let file = |id: &u64| nodes.get(*id)?.file;
            let ids: Vec<u64> = files.iter().filter_map(|ident| nodes.by_ident(ident)).collect();
            // New files of a directory come with what is in them.
            let new = |id: &u64| nodes.get(*id).is_some_and(|node| node.local);
            let entries = ids.iter().filter_map(|id| Some(&nodes.get(*id)?.dir.as_ref()?.entries)).flatten();
            let below: Vec<u64> = entries.map(|(_, id)| *id).filter(new).collect();
            ids.iter().chain(&below).filter_map(file).collect()
        };
        if let Some(turn) = self.writeback.try_lock() {
            // A failure is reported as an event, and tried again.
            let _ = self.send_files(|| files, false);
            drop(turn);
        }
    }

    /// Files and directories were changed here, and the server has yet to get it.
    pub(in crate::client) fn claim(&self, nodes: &InodeTable, ids: &[u64]) {
        if self.shared_generation().is_none() {
            return;
        }
        let mut claims = lock(&self.leases.claims);
        for node in ids.iter().filter_map(|id| nodes.get(*id)).filter(|node| !node.local) {
            if claims.known.insert(node.attr.ident) {
                claims.untold.insert(node.attr.ident);
                self.leases.claim.notify_one();
            }
        }
    }

    /// Others have leases from now on: claims everything that is unsent here.
    pub(super) fn claim_unsent(&self) {
        let dirty: HashSet<_> = self.cache.dirty_files().into_iter().collect();
        let nodes = self.inodes();
        let unsent = nodes.ids().into_iter().filter(|id| {
            let file = nodes.get(*id).and_then(|node| node.file);
            file.is_some_and(|file| dirty.contains(&file)) || self.writeback.affects(*id, &[])
        });
        self.claim(&nodes, &unsent.collect::<Vec<_>>());
    }
}
