//! Flow control: how many bytes may be under way, each way, in two classes.
//!
//! **Bulk** is every frame with a payload and every ordered request; **control** is the rest. Classes have
//! windows of their own, so a cancel gets through while page batches wait. A frame costs its whole length, so
//! headers cannot be used to get around the limit. The sender takes credit before a frame is queued. The
//! receiver gives it back for a request when it has been answered, so a busy service holds a window and no
//! more; for a reply when it has arrived: it was asked for, and a caller that awaits its replies in another
//! order than they come must not be stuck for want of the one at the far side of a full window.
//!
//! No deadlock by hoarding: a receiver keeps back less than a quarter of a window before it sends a grant,
//! and the other three quarters hold the largest frame (see [`MIN_WINDOW`]).

use crate::frame::{Flags, FrameHead, HEAD_SIZE, MAX_HEADER, MAX_PAYLOAD, WireFrameError};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;

/// Bytes of bulk in flight unless settings say otherwise: 250 ms at 1 Gbit/s.
pub const DEFAULT_WINDOW: u32 = 32 << 20;
/// Smallest bulk window: three quarters of it hold the largest frame.
pub const MIN_WINDOW: u32 = 12 << 20;
/// Bytes of control in flight: some hundred thousand empty calls.
pub const CONTROL_WINDOW: u32 = 4 << 20;

const LARGEST: u32 = HEAD_SIZE as u32 + MAX_HEADER + MAX_PAYLOAD;
const _: () =
    assert!(LARGEST <= MIN_WINDOW / 4 * 3 && HEAD_SIZE as u32 + MAX_HEADER <= CONTROL_WINDOW / 4 * 3);

/// Which window a frame counts against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Bulk,
    Control,
}

impl Class {
    pub(crate) fn of(head: &FrameHead) -> Self {
        if head.payload_len > 0 || head.flags == Flags::ORDERED { Class::Bulk } else { Class::Control }
    }
}

/// One value for each class.
#[derive(Debug)]
pub(crate) struct PerClass<T> {
    bulk: T,
    control: T,
}

impl<T> PerClass<T> {
    pub(crate) fn new(window: u32, make: impl Fn(u32) -> T) -> Self {
        Self { bulk: make(window), control: make(CONTROL_WINDOW) }
    }

    pub(crate) fn of(&self, class: Class) -> &T {
        match class {
            Class::Bulk => &self.bulk,
            Class::Control => &self.control,
        }
    }
}

/// The sender's side of one class. Waiters are served in the order they came.
#[derive(Debug)]
pub(crate) struct SendCredit {
    free: Semaphore,
    in_flight: AtomicU64,
}

impl SendCredit {
    pub(crate) fn new(window: u32) -> Self {
        Self { free: Semaphore::new(window as usize), in_flight: AtomicU64::new(0) }
    }

    /// Waits for `bytes` of credit; false when the connection ended meanwhile.
    pub(crate) async fn take(&self, bytes: u32) -> bool {
        let Ok(permit) = self.free.acquire_many(bytes).await else { return false };
        permit.forget();
        self.in_flight.fetch_add(u64::from(bytes), Ordering::AcqRel);
        true
    }

    /// The peer gave `bytes` back.
    pub(crate) fn grant(&self, bytes: u64) -> Result<(), WireFrameError> {
        let used =
            self.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| used.checked_sub(bytes));
        used.map_err(|used| WireFrameError::GrantExceeded { over: bytes - used })?;
        self.free.add_permits(bytes as usize);
        Ok(())
    }

    /// Wakes every waiter: there will be no more credit.
    pub(crate) fn close(&self) {
        self.free.close();
    }

    /// Bytes sent or queued and not yet given back.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Acquire)
    }
}

/// The receiver's side of one class.
#[derive(Debug)]
pub(crate) struct ReceiveCredit {
    window: u64,
    /// Received and not yet granted back, used up or not.
    held: AtomicU64,
    /// Used up, to be granted.
    used: AtomicU64,
}

impl ReceiveCredit {
    pub(crate) fn new(window: u32) -> Self {
        Self { window: u64::from(window), held: AtomicU64::new(0), used: AtomicU64::new(0) }
    }

    /// A frame of `bytes` begins to arrive.
    pub(crate) fn admit(&self, bytes: u32) -> Result<(), WireFrameError> {
        let held = self.held.fetch_add(u64::from(bytes), Ordering::AcqRel) + u64::from(bytes);
        match held.checked_sub(self.window) {
            None | Some(0) => Ok(()),
            Some(over) => Err(WireFrameError::CreditExceeded { over }),
        }
    }

    /// `bytes` were used up. True when it is time to tell the peer.
    pub(crate) fn release(&self, bytes: u32) -> bool {
        let before = self.used.fetch_add(u64::from(bytes), Ordering::AcqRel);
        let due = self.window / 4;
        before < due && before + u64::from(bytes) >= due
    }

    /// What to grant now.
    pub(crate) fn grant(&self) -> u64 {
        let used = self.used.swap(0, Ordering::AcqRel);
        self.held.fetch_sub(used, Ordering::AcqRel);
        used
    }

    /// Bytes that arrived and were not used up.
    pub(crate) fn queued(&self) -> u64 {
        self.held.load(Ordering::Acquire).saturating_sub(self.used.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_cannot_send_or_grant_more_than_the_window() {
        let credit = ReceiveCredit::new(100);
        credit.admit(60).unwrap();
        assert!(credit.release(60), "a quarter is due");
        assert_eq!(credit.admit(60), Err(WireFrameError::CreditExceeded { over: 20 }), "not granted yet");
        let send = SendCredit::new(100);
        assert_eq!(send.grant(1), Err(WireFrameError::GrantExceeded { over: 1 }));
    }

    #[test]
    fn small_releases_are_gathered() {
        let credit = ReceiveCredit::new(100);
        credit.admit(50).unwrap();
        let due: Vec<_> = (0..5).map(|_| credit.release(10)).collect();
        assert_eq!(due, [false, false, true, false, false]);
        assert_eq!((credit.grant(), credit.grant(), credit.queued()), (50, 0, 0));
    }
}
