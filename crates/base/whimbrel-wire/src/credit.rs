//! Flow control by credit: how many bytes may be in flight in each direction, in two classes.
//!
//! **Bulk** is every wire frame with a payload and every ordered request; **control** is the rest. Each class
//! has its own window, so a cancel gets through while page batches wait. A wire frame costs its whole length,
//! so headers count too. The sender takes credit before it queues a frame. The receiver returns the credit of
//! a request after answering it, so a busy service holds at most one window. It returns the credit of a reply
//! on arrival: the reply was requested, and a caller that awaits replies in another order than they arrive
//! would deadlock on a full window.
//!
//! A receiver cannot deadlock the sender by withholding: it sends a grant at the latest when a quarter of a
//! window was used up, and the other three quarters hold the largest wire frame (see [`MIN_WINDOW`]).

use crate::frame::{Flags, FrameHead, HEAD_SIZE, MAX_HEADER, MAX_PAYLOAD, WireFrameError};
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Semaphore;

/// Default bytes of bulk in flight: 250 ms at 1 Gbit/s.
pub const DEFAULT_WINDOW: u32 = 32 << 20;
/// Smallest bulk window; three quarters of it hold the largest wire frame.
pub const MIN_WINDOW: u32 = 12 << 20;
/// Bytes of control in flight, some hundred thousand empty calls.
pub const CONTROL_WINDOW: u32 = 4 << 20;

const LARGEST: u32 = HEAD_SIZE as u32 + MAX_HEADER + MAX_PAYLOAD;
const _: () =
    assert!(LARGEST <= MIN_WINDOW / 4 * 3 && HEAD_SIZE as u32 + MAX_HEADER <= CONTROL_WINDOW / 4 * 3);

/// The window that a wire frame counts against.
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

/// The sender's side of one class. Waiters are served in order of arrival.
#[derive(Debug)]
pub(crate) struct SendCredit {
    free: Semaphore,
    in_flight: AtomicU64,
}

impl SendCredit {
    pub(crate) fn new(window: u32) -> Self {
        Self { free: Semaphore::new(window as usize), in_flight: AtomicU64::new(0) }
    }

    /// Waits for `bytes` of credit; false if the connection ended meanwhile.
    pub(crate) async fn take(&self, bytes: u32) -> bool {
        let Ok(permit) = self.free.acquire_many(bytes).await else { return false };
        permit.forget();
        self.in_flight.fetch_add(u64::from(bytes), Ordering::AcqRel);
        true
    }

    /// Adds `bytes` of credit that the peer returned.
    pub(crate) fn grant(&self, bytes: u64) -> Result<(), WireFrameError> {
        let used =
            self.in_flight.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| used.checked_sub(bytes));
        used.map_err(|used| WireFrameError::GrantExceeded { over: bytes - used })?;
        self.free.add_permits(bytes as usize);
        Ok(())
    }

    /// Fails all waiters, because there will be no more credit.
    pub(crate) fn close(&self) {
        self.free.close();
    }

    /// Bytes sent or queued whose credit was not returned.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Acquire)
    }
}

/// The receiver's side of one class.
#[derive(Debug)]
pub(crate) struct ReceiveCredit {
    window: u64,
    /// Bytes received and not yet granted back, used up or not.
    held: AtomicU64,
    /// Bytes used up and not yet granted back.
    used: AtomicU64,
}

impl ReceiveCredit {
    pub(crate) fn new(window: u32) -> Self {
        Self { window: u64::from(window), held: AtomicU64::new(0), used: AtomicU64::new(0) }
    }

    /// Counts a wire frame of `bytes` whose head has arrived.
    pub(crate) fn admit(&self, bytes: u32) -> Result<(), WireFrameError> {
        let held = self.held.fetch_add(u64::from(bytes), Ordering::AcqRel) + u64::from(bytes);
        match held.checked_sub(self.window) {
            None | Some(0) => Ok(()),
            Some(over) => Err(WireFrameError::CreditExceeded { over }),
        }
    }

    /// Counts `bytes` as used up. True if a grant is due.
    pub(crate) fn release(&self, bytes: u32) -> bool {
        let before = self.used.fetch_add(u64::from(bytes), Ordering::AcqRel);
        let due = self.window / 4;
        before < due && before + u64::from(bytes) >= due
    }

    pub(crate) fn grant(&self) -> u64 {
        let used = self.used.swap(0, Ordering::AcqRel);
        self.held.fetch_sub(used, Ordering::AcqRel);
        used
    }

    /// Bytes that arrived and are not used up.
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
