//! What a write is about to do to a file, noted on the file itself, so that its half is not taken for
//! somebody else's work.
//!
//! The system sets the last change of a file with every write, and we set the writer's stamp afterwards. A
//! server that is killed between the two leaves a last change that nobody expects. The note, an extended
//! attribute, says which stamp was to come and when: a last change of about that time is ours. Where a file
//! system knows no such attributes there is no note, and such a write is said to be a conflict, with both
//! contents kept. Somebody who writes within the same moment as a server that is killed is overlooked; that
//! is the window which the check before a write has anyway.

use crate::proto::Time;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr};
use std::fs::File;

const NAME: &str = "user.whimbrel.write";
const LEN: usize = 24;
/// The system's stamps are as coarse as its tick, and so may be this much older than the clock.
const TICK: i128 = 20_000_000;
/// Longer than any write of one request, in nanoseconds.
const LONGEST: i128 = 2_000_000_000;

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

/// A write that ends in `stamp` begins now.
pub(super) fn record(file: &File, stamp: Time) {
    let value = [encode(stamp), encode(Time::now())].concat();
    // Without the note a killed server costs a conflict, and no more.
    let _ = fsetxattr(file, NAME, &value, XattrFlags::empty());
}

/// It is over, and the file has its stamp.
pub(super) fn end(file: &File) {
    // A note that stays explains nothing but the moment it is of.
    let _ = fremovexattr(file, NAME);
}

/// The stamp that the write was to end in which made `found` the last change, if that was half a write.
pub(super) fn stamp_of(file: &File, found: Time) -> Option<Time> {
    let mut value = [0; LEN];
    let len = fgetxattr(file, NAME, &mut value[..]).ok()?;
    let (stamp, began) = (decode(&value[..12])?, decode(&value[12..])?);
    let since = nanoseconds(found) - nanoseconds(began);
    (len == LEN && (-TICK..LONGEST).contains(&since)).then_some(stamp)
}
