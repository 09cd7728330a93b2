//! The right to change a bucket's store: one process of all hosts has it at a time.
//!
//! Who wants it stores an object in the folder `lock`, and then lists the folder. It has the right if no
//! other object there is alive; else it removes its own, waits, and tries again. Of two that come at once, at
//! least one sees the other, since listings show what was stored before (Amazon S3 user guide, "Strong
//! consistency"). Conditional writes would be shorter, but some servers accept and ignore them.
//!
//! An object is alive for [`TERM`] after it was stored, by the clock of the server, and its owner stores it
//! again long before. An owner that cannot do so for [`LOST`] makes no change any more. What it has begun
//! until then ends, or is given up, before somebody else has the right.

use crate::core::error::DaemonError;
use bytes::Bytes;
use std::{
    io,
    ops::ControlFlow,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};
use whimbrel_core::{HostName, lock};
use whimbrel_pool::benefactor::{Bucket, ObjectEntry, TierError};

const FOLDER: &str = "lock";
/// Time after which an object that was not stored again is dead: a change that began within [`LOST`], and one
/// attempt of a request, fit into it.
const TERM: Duration = Duration::from_secs(180);
const LOST: Duration = Duration::from_secs(60);
/// Interval at which it is stored again.
const RENEW: Duration = Duration::from_secs(15);
/// Shortest pause before another attempt to get the right; up to twice as long, by chance.
const RETRY: Duration = Duration::from_millis(500);

/// The right, until it is dropped.
pub(super) struct BucketLock {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

struct Shared {
    bucket: Arc<Bucket>,
    name: String,
    content: Bytes,
    renewed: Mutex<Renewed>,
    ends: AtomicBool,
    ended: Condvar,
}

/// When the object was stored last, by two clocks: one stands still while the computer sleeps, the other may
/// be put back.
#[derive(Clone, Copy)]
struct Renewed(Instant, SystemTime);

impl Renewed {
    fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    /// Whether nobody else can have the right yet. A clock that was put back says nothing, one that was put
    /// forward costs the right.
    fn is_recent(&self) -> bool {
        self.0.elapsed() < LOST && self.1.elapsed().map_or(true, |age| age < LOST)
    }
}

impl BucketLock {
    /// Waits for the right. `wait` gets the name of whoever has it.
    pub(super) fn take(
        bucket: &Arc<Bucket>,
        host: &HostName,
        wait: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Self, DaemonError> {
        let failed = |error: TierError| super::failed(bucket)(error.into());
        let (own, content) =
            (format!("{host}.{:016x}", rand::random::<u64>()), Bytes::from(host.to_string()));
        let name = format!("{FOLDER}/{own}");
        loop {
            let stored = Renewed::now();
            bucket.put(&name, content.clone()).map_err(failed)?;
            let other = bucket.list_dir(FOLDER).map(|entries| other_holder(&entries, &own));
            if let Ok(None) = other {
                return Self::held(bucket.clone(), (name, content), stored);
            }
            // Otherwise others would wait for nobody.
            bucket.delete(&name).map_err(failed)?;
            let other = other.map_err(failed)?.unwrap_or_default();
            if wait(&other).is_break() {
                return Err(DaemonError::Cancelled { left: "the bucket is as it was".into() });
            }
            thread::sleep(RETRY.mul_f64(1.0 + rand::random::<f64>()));
        }
    }

    fn held(
        bucket: Arc<Bucket>,
        (name, content): (String, Bytes),
        stored: Renewed,
    ) -> Result<Self, DaemonError> {
        let (renewed, ends, ended) = (Mutex::new(stored), AtomicBool::new(false), Condvar::new());
        let shared = Arc::new(Shared { bucket, name, content, renewed, ends, ended });
        let kept = shared.clone();
        let keeper = thread::Builder::new().name("bucket-lock".into()).spawn(move || kept.renew());
        match keeper {
            Ok(keeper) => Ok(Self { shared, keeper: Some(keeper) }),
            Err(source) => {
                shared.give_up();
                Err(DaemonError::Thread { source })
            }
        }
    }

    /// Fails if the right may be somebody else's.
    pub(super) fn check(&self) -> io::Result<()> {
        match lock(&self.shared.renewed).is_recent() {
            true => Ok(()),
            false => Err(io::Error::other(
                "the bucket could not be reached for a minute, and may be changed by another host",
            )),
        }
    }
}

/// Name of a host whose object is alive, apart from `own`, by the time at which the server has stored that.
fn other_holder(entries: &[ObjectEntry], own: &str) -> Option<String> {
    let Some(now) = entries.iter().find(|entry| entry.name == own).map(|entry| entry.stored) else {
        // Without a clock nobody is known to be dead.
        return Some("somebody who has removed the object of this host".to_owned());
    };
    let is_dead = |stored: SystemTime| now.duration_since(stored).is_ok_and(|age| age >= TERM);
    let alive = entries.iter().find(|entry| entry.name != own && !is_dead(entry.stored))?;
    Some(alive.name.rsplit_once('.').map_or(&*alive.name, |(host, _)| host).to_owned())
}

impl Shared {
    fn renew(&self) {
        while !self.ends.load(Ordering::Acquire) {
            let goes_on = |_: &mut Renewed| !self.ends.load(Ordering::Acquire);
            drop(self.ended.wait_timeout_while(lock(&self.renewed), RENEW, goes_on));
            if self.ends.load(Ordering::Acquire) {
                return;
            }
            let begun = Renewed::now();
            match self.bucket.put(&self.name, self.content.clone()) {
                Ok(()) if lock(&self.renewed).is_recent() => *lock(&self.renewed) = begun,
                // Somebody else may have had it meanwhile.
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "cannot renew the lock of a bucket"
                    )
                }
            }
        }
    }

    fn give_up(&self) {
        if let Err(error) = self.bucket.delete(&self.name) {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "the lock of a bucket stays until it expires");
        }
    }
}

impl Drop for BucketLock {
    fn drop(&mut self) {
        let renewed = lock(&self.shared.renewed);
        self.shared.ends.store(true, Ordering::Release);
        drop(renewed);
        self.shared.ended.notify_all();
        if let Some(keeper) = self.keeper.take() {
            // A keeper that panicked renews nothing.
            let _ = keeper.join();
        }
        self.shared.give_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, seconds: u64) -> ObjectEntry {
        ObjectEntry { name: name.into(), stored: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) }
    }

    #[test]
    fn another_holder_counts_until_its_term_is_over_by_the_clock_of_the_server() {
        let own = entry("alpha.1", 1000);
        let holder =
            |others: &[ObjectEntry]| other_holder(&[std::slice::from_ref(&own), others].concat(), "alpha.1");
        assert_eq!(holder(&[]), None);
        assert_eq!(holder(&[entry("beta.x.2", 821)]), Some("beta.x".into()));
        assert_eq!(holder(&[entry("beta.2", 820)]), None, "it is dead");
        assert_eq!(holder(&[entry("alpha.2", 1001)]), Some("alpha".into()), "another process of this host");
    }

    #[test]
    fn a_right_that_was_not_renewed_for_a_minute_is_lost_by_whichever_clock() {
        let Renewed(up, wall) = Renewed::now();
        let (long_up, long) = (up - LOST, wall - LOST);
        assert!(Renewed(up, wall).is_recent());
        assert!(!Renewed(long_up, wall).is_recent() && !Renewed(up, long).is_recent());
    }

    #[test]
    fn who_does_not_see_its_own_object_has_no_clock_and_no_right() {
        // As after a deletion by somebody: nothing is known of the others.
        assert!(other_holder(&[], "alpha.1").is_some());
    }
}
