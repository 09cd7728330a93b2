//! Late frames: network frames that reached the old host after the pause of a migration are forwarded to the
//! target.
//!
//! They are sent right after the commit, and again when the machine runs, for those that came until the
//! network was switched. Nothing depends on them, because a network may lose frames. So nobody waits for the
//! first ones, they have no order with other messages, and what cannot be delivered is dropped.
//!
//! Nothing is sent before the commit: until then the machine may continue on the source, and would get them
//! there as well.

use crate::{
    error::TargetError,
    link::{Answer, Link, LinkError},
    protocol::{self, HandoverId},
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

const FRAMES_MAX: usize = 4096;
/// Most bytes of one message; one frame is smaller.
const BYTES_MAX: usize = 1 << 20;

/// Network frame that arrived too late on the old host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LateFrame {
    /// Index of the machine's port in the configuration.
    pub port: u16,
    /// Ethernet frame of the guest.
    pub frame: Box<[u8]>,
}

/// Header of [`protocol::LATE_FRAMES`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LateFramesHeader {
    /// Id of the handover by which the machine arrived.
    pub handover: HandoverId,
    /// Port and length of each frame of the payload, in which they are concatenated.
    pub frames: Vec<(u16, u32)>,
}

/// Sends late frames of a machine that was handed over; returns the outstanding replies.
pub fn send(
    link: &dyn Link,
    handover: HandoverId,
    strays: &[LateFrame],
) -> Result<Vec<Box<dyn Answer>>, LinkError> {
    messages(handover, strays)
        .into_iter()
        .map(|(head, payload)| {
            let head = postcard::to_stdvec(&head).expect("a header is always encodable");
            link.ask(protocol::LATE_FRAMES, head, payload)
        })
        .collect()
}

fn messages(handover: HandoverId, strays: &[LateFrame]) -> Vec<(LateFramesHeader, Bytes)> {
    let (mut messages, mut rest) = (Vec::new(), strays);
    while !rest.is_empty() {
        let mut bytes = 0;
        let fit = rest.iter().take(FRAMES_MAX).take_while(|stray| {
            bytes += stray.frame.len();
            bytes <= BYTES_MAX
        });
        // Takes at least one, whatever its length: the target refuses a frame that is too long.
        let (these, after) = rest.split_at(fit.count().max(1));
        let frames = these.iter().map(|stray| (stray.port, stray.frame.len() as u32)).collect();
        let payload: Vec<&[u8]> = these.iter().map(|stray| &*stray.frame).collect();
        messages.push((LateFramesHeader { handover, frames }, payload.concat().into()));
        rest = after;
    }
    messages
}

pub(crate) fn decode(head: &LateFramesHeader, payload: &[u8]) -> Result<Vec<LateFrame>, TargetError> {
    const WRONG: TargetError = TargetError::Invalid { what: "frames whose lengths do not match" };
    if head.frames.len() > FRAMES_MAX || payload.len() > BYTES_MAX {
        return Err(TargetError::Invalid { what: "too many frames" });
    }
    let mut rest = payload;
    let stray = |(port, len): &(u16, u32)| {
        let (frame, after) = rest.split_at_checked(*len as usize).ok_or(WRONG)?;
        rest = after;
        Ok(LateFrame { port: *port, frame: frame.into() })
    };
    let strays = head.frames.iter().map(stray).collect::<Result<_, TargetError>>()?;
    if rest.is_empty() { Ok(strays) } else { Err(WRONG) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: HandoverId = HandoverId([3; 16]);

    proptest! {
        #[test]
        fn frames_come_as_they_were_sent(
            frames in prop::collection::vec((0u16..4, 1usize..70_000, any::<u8>()), 0..60),
        ) {
            let strays: Vec<_> = frames
                .into_iter()
                .map(|(port, len, byte)| LateFrame { port, frame: vec![byte; len].into() })
                .collect();
            let mut came = Vec::new();
            for (head, payload) in messages(ID, &strays) {
                came.extend(decode(&head, &payload).unwrap());
            }
            prop_assert_eq!(came, strays);
        }
    }

    #[test]
    fn a_message_that_says_other_lengths_than_it_has_is_refused() {
        let head = |frames: &[(u16, u32)]| LateFramesHeader { handover: ID, frames: frames.to_vec() };
        assert_eq!(decode(&head(&[(0, 2), (1, 3)]), b"abcde").unwrap().len(), 2);
        for (wrong, payload) in [
            (head(&[(0, 6)]), &b"abcde"[..]),
            (head(&[(0, 4)]), b"abcde"),
            (head(&[(0, u32::MAX), (0, 2)]), b"abcde"),
            (head(&[]), b"abcde"),
            (head(&vec![(0, 0); FRAMES_MAX + 1]), b""),
        ] {
            assert!(decode(&wrong, payload).is_err(), "{:?}", wrong.frames);
        }
    }
}
