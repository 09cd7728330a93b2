//! Page sharing: lets one hosted standby read pages of another, for machines that have equal pages.
//!
//! The caller holds its own receiver, and the other may request a page of this one at the same time. So
//! nobody waits long for another's receiver, and a page that cannot be read in time is requested from the
//! primary again. Only machines of one primary share pages: a host must not find out what is in the machines
//! of others.

use super::hosted::HostedStandby;
use crate::daemon::Daemon;
use std::{
    sync::TryLockError,
    time::{Duration, Instant},
};
use whimbrel_core::HostName;
use whimbrel_protect::{codec::shared_pages::PageReference, standby::SiblingPages};

/// How long a batch may wait for other receivers in total, and the polling interval.
const LOCK_TIMEOUT: Duration = Duration::from_millis(50);
const POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The standbys of machines of one primary, for one batch.
pub(in crate::protect) struct SiblingStandbys<'a> {
    host: &'a Daemon,
    primary: &'a HostName,
    until: Instant,
}

impl<'a> SiblingStandbys<'a> {
    pub(in crate::protect) fn new(host: &'a Daemon, primary: &'a HostName) -> Self {
        Self { host, primary, until: Instant::now() + LOCK_TIMEOUT }
    }
}

impl SiblingPages for SiblingStandbys<'_> {
    fn read(&self, name: &PageReference, out: &mut [u8]) -> bool {
        let standing = self.host.standby_of(self.primary, name.of);
        standing.is_some_and(|standing| standing.read_shared(name, self.until, out))
    }
}

impl HostedStandby {
    fn read_shared(&self, name: &PageReference, until: Instant, out: &mut [u8]) -> bool {
        loop {
            match self.receiver.try_lock() {
                Ok(receiver) => {
                    return receiver.as_ref().is_some_and(|one| one.read_shared(name.array, name.page, out));
                }
                Err(TryLockError::WouldBlock) if Instant::now() < until => std::thread::sleep(POLL_INTERVAL),
                Err(_) => return false,
            }
        }
    }
}
