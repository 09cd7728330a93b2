//! Write intent: a mark on a file about a write in progress, so that a partial write is not mistaken for
//! another writer's.
//!
//! The system updates the modification time with every write, and the server sets the writer's stamp
//! afterwards. A server that is killed in between leaves a time that nobody expects. The mark, an extended
//! attribute, has the coming stamp and the start time: a modification time of about that time belongs to this
//! write. On a file system without such attributes, a partial write is reported as a conflict, and both
//! contents are retained. A different writer at the same moment as the kill is overlooked; the check before
//! each write has the same window.

use crate::proto::Time;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use std::fs::File;

pub(super) const NAME: &str = "user.whimbrel.write";
const LEN: usize = 24;
/// Largest lag of the system's file times behind the clock, in nanoseconds: they are as coarse as its tick.
const TICK: i128 = 20_000_000;
/// Longest write of one request in nanoseconds.
const MAX_WRITE: i128 = 2_000_000_000;

fn nanoseconds(time: Time) -> i128 {
    i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos)
}

fn encode(time: Time) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&time.seconds.to_le_bytes());
    bytes[8..].copy_from_slice(&time.nanos.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<Time> {
    let (seconds, nanos) = bytes.split_first_chunk::<8>()?;
    Some(Time { seconds: i64::from_le_bytes(*seconds), nanos: u32::from_le_bytes(nanos.try_into().ok()?) })
}

/// Records that a write with this stamp begins now.
pub(super) fn record(file: &File, stamp: Time) {
    let value = [encode(stamp), encode(Time::now())].concat();
    // Without the mark, a killed server costs a conflict and no more.
    let _ = fsetxattr(file, NAME, &value, XattrFlags::empty());
}

/// Removes the mark after the file got its stamp.
pub(super) fn end(file: &File) {
    // A remaining mark explains only times close to its own.
    let _ = fremovexattr(file, NAME);
}

/// The stamp of the partial write that set the modification time `found`, if there was one.
pub(super) fn stamp_of(file: &File, found: Time) -> Option<Time> {
    let mut value = [0; LEN];
    let len = fgetxattr(file, NAME, &mut value[..]).ok()?;
    let (stamp, began) = (decode(&value[..12])?, decode(&value[12..])?);
    let since = nanoseconds(found) - nanoseconds(began);
    (len == LEN && (-TICK..MAX_WRITE).contains(&since)).then_some(stamp)
}
