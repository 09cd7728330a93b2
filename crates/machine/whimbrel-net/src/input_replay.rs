//! Input replay: delivers recorded inputs to a guest again, in their order and no faster than they came, and
//! drops output that the guest repeats.
//!
//! Pure. A TCP segment that acknowledges data which the guest has not sent again yet would be discarded by
//! the guest together with its own data. So it waits for the guest's data, for at most a second. A guest
//! picks other sequence numbers for new connections; for these nothing is waited for. Segments that the guest
//! repeats are passed: to its peer they are retransmissions. Other frames are dropped if their fingerprint
//! was recorded, as often as it was recorded.

use crate::Input;
use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

/// Longest time that a segment waits for the data that it acknowledges.
const MAX_WAIT: Duration = Duration::from_secs(1);
/// Distance of sequence numbers above which they belong to different connections.
const WINDOW_MAX: u32 = 1 << 26;
/// Time after the last input in which a frame may still be a repeated one.
const REPEAT_WINDOW: Duration = Duration::from_secs(1);
/// Most connections that are tracked; with more of them segments are delivered without waiting.
const FLOWS_MAX: usize = 1 << 16;

/// Addresses and ports of the peer and of the guest.
type Flow = [u8; 36];

pub(crate) struct InputReplay {
    inputs: VecDeque<Input>,
    sent: HashMap<u64, u32>,
    /// Time of the first input in the log, and time of its delivery.
    origin: Option<(Duration, Instant)>,
    /// End of the data that the guest has sent on each connection, none if the sequence numbers are from
    /// another connection.
    flows: HashMap<Flow, Option<u32>>,
    waiting_since: Option<Instant>,
    over_at: Option<Instant>,
}

/// Action for the next input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Deliver(Vec<u8>),
    Wait(Duration),
    Nothing,
}

impl InputReplay {
    pub(crate) fn new(inputs: Vec<Input>, sent: &[u64]) -> Self {
        let mut counted = HashMap::new();
        sent.iter().for_each(|print| *counted.entry(*print).or_insert(0) += 1);
        let inputs = VecDeque::from(inputs);
        Self {
            inputs,
            sent: counted,
            origin: None,
            flows: HashMap::new(),
            waiting_since: None,
            over_at: None,
        }
    }

    /// Returns the next input, if it is due.
    pub(crate) fn next(&mut self, now: Instant) -> Next {
        let Some(head) = self.inputs.front() else {
            self.over_at.get_or_insert(now + REPEAT_WINDOW);
            return Next::Nothing;
        };
        let (first, begun) = *self.origin.get_or_insert((head.at, now));
        let due = begun + head.at.saturating_sub(first);
        if due > now {
            return Next::Wait(due - now);
        }
        let segment = Segment::parse(&head.frame, Side::Peer);
        if let Some(segment) = &segment
            && self.is_ahead(segment)
        {
            let waits = *self.waiting_since.get_or_insert(now);
            if now < waits + MAX_WAIT {
                return Next::Wait(Duration::from_millis(1));
            }
            // The acknowledged data will not be sent.
            self.flows.insert(segment.flow, None);
        }
        if let Some(Segment { flow, ack: Some(ack), .. }) = segment
            && self.flows.len() < FLOWS_MAX
        {
            // The first segment of a connection tells what the guest had sent before.
            self.flows.entry(flow).or_insert(Some(ack));
        }
        self.waiting_since = None;
        self.inputs.pop_front().map_or(Next::Nothing, |input| Next::Deliver(input.frame))
    }

    /// Whether a segment acknowledges data that was not sent again yet.
    fn is_ahead(&self, segment: &Segment) -> bool {
        let (Some(ack), Some(Some(sent))) = (segment.ack, self.flows.get(&segment.flow)) else {
            return false;
        };
        (1..WINDOW_MAX).contains(&ack.wrapping_sub(*sent))
    }

    pub(crate) fn is_repeated(&mut self, frame: &[u8]) -> bool {
        if let Some(segment) = Segment::parse(frame, Side::Guest) {
            let known = self.flows.len() < FLOWS_MAX;
            if let Some(sent) = self.flows.get_mut(&segment.flow).and_then(Option::as_mut) {
                let more = segment.end.wrapping_sub(*sent);
                // A new connection starts with other sequence numbers.
                if more < WINDOW_MAX || segment.opens {
                    *sent = segment.end;
                }
            } else if known {
                self.flows.entry(segment.flow).or_insert(Some(segment.end));
            }
            return false;
        }
        let count =
            fingerprint(frame).and_then(|print| self.sent.get_mut(&print)).filter(|count| **count > 0);
        count.map(|count| *count -= 1).is_some()
    }

    /// Whether the uplink has to wait.
    pub(crate) fn is_active(&self) -> bool {
        !self.inputs.is_empty()
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        self.inputs.is_empty() && self.over_at.is_some_and(|at| now >= at)
    }
}

/// Fingerprint of a frame: a hash without the fields that a guest counts up. None for TCP segments.
pub(crate) fn fingerprint(frame: &[u8]) -> Option<u64> {
    if Segment::parse(frame, Side::Guest).is_some() {
        return None;
    }
    let ipv4 = frame.get(12..14) == Some(&[8, 0]);
    // Identification, flags, time to live and header checksum (RFC 791).
    let counted = |at: usize| ipv4 && ((18..22).contains(&at) || at == 22 || (24..26).contains(&at));
    let bytes = frame.iter().enumerate().filter(|(at, _)| !counted(*at));
    Some(bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, (_, byte)| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    }))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Peer,
    Guest,
}

/// Relevant fields of a TCP segment.
struct Segment {
    flow: Flow,
    /// Sequence number after the segment.
    end: u32,
    ack: Option<u32>,
    opens: bool,
}

impl Segment {
    /// Segment in a frame that this side has sent; none if it is not TCP or truncated.
    fn parse(frame: &[u8], side: Side) -> Option<Self> {
        const TCP: u8 = 6;
        let packet = frame.get(14..)?;
        let (addresses, payload) = match frame.get(12..14)? {
            [0x08, 0x00] if packet.get(9) == Some(&TCP) => {
                let (header, len) = (usize::from(packet[0] & 15) * 4, usize::from(be16(packet, 2)?));
                (packet.get(12..20)?, packet.get(header..len.min(packet.len()))?)
            }
            [0x86, 0xdd] if packet.get(6) == Some(&TCP) => {
                let len = 40 + usize::from(be16(packet, 4)?);
                (packet.get(8..40)?, packet.get(40..len.min(packet.len()))?)
            }
            _ => return None,
        };
        let (source, target) = addresses.split_at(addresses.len() / 2);
        let (source_port, target_port) = (payload.get(..2)?, payload.get(2..4)?);
        let mut flow = [0; 36];
        let (peer, guest) = match side {
            Side::Peer => ((source, source_port), (target, target_port)),
            Side::Guest => ((target, target_port), (source, source_port)),
        };
        flow[..peer.0.len()].copy_from_slice(peer.0);
        flow[16..16 + guest.0.len()].copy_from_slice(guest.0);
        flow[32..34].copy_from_slice(peer.1);
        flow[34..].copy_from_slice(guest.1);
        let word = |at: usize| payload.get(at..at + 4)?.first_chunk().map(|word| u32::from_be_bytes(*word));
        let (sequence, ack, flags) = (word(4)?, word(8)?, *payload.get(13)?);
        let data = payload.len().saturating_sub(usize::from(*payload.get(12)? >> 4) * 4) as u32;
        let (fin, syn) = (u32::from(flags & 1), u32::from(flags >> 1 & 1));
        let end = sequence.wrapping_add(data).wrapping_add(fin + syn);
        Some(Self { flow, end, ack: (flags & 16 != 0).then_some(ack), opens: syn == 1 })
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.first_chunk().map(|pair| u16::from_be_bytes(*pair))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// TCP segment between 10.0.0.9:4000 and the guest 10.0.0.1:80.
    fn segment(from: Side, sequence: u32, ack: u32, flags: u8, data: usize) -> Vec<u8> {
        let mut frame = vec![2; 12];
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((40 + data as u16).to_be_bytes());
        frame.extend([0, 0, 0, 0, 64, 6, 0, 0]);
        let (peer, guest) = ([10, 0, 0, 9], [10, 0, 0, 1]);
        let (ports, addresses) = match from {
            Side::Peer => ([0x0f, 0xa0, 0, 80], [peer, guest]),
            Side::Guest => ([0, 80, 0x0f, 0xa0], [guest, peer]),
        };
        frame.extend(addresses.concat());
        frame.extend(ports);
        frame.extend(sequence.to_be_bytes());
        frame.extend(ack.to_be_bytes());
        frame.extend([0x50, flags, 0, 0, 0, 0, 0, 0]);
        frame.resize(frame.len() + data, 9);
        frame
    }

    fn input(ms: u64, frame: Vec<u8>) -> Input {
        Input { port: 0, at: Duration::from_millis(ms), frame }
    }

    #[test]
    fn a_request_waits_for_the_answer_that_it_acknowledges() {
        let (one, two) = (segment(Side::Peer, 100, 500, 24, 10), segment(Side::Peer, 110, 700, 24, 10));
        let mut replay = InputReplay::new(vec![input(5, one.clone()), input(5, two.clone())], &[]);
        let now = Instant::now();
        assert_eq!(replay.next(now), Next::Deliver(one));
        assert!(matches!(replay.next(now), Next::Wait(_)), "the guest has not answered yet");
        assert!(!replay.is_repeated(&segment(Side::Guest, 500, 110, 24, 100)), "segments pass");
        assert!(matches!(replay.next(now), Next::Wait(_)), "half an answer is none");
        replay.is_repeated(&segment(Side::Guest, 600, 110, 24, 100));
        assert_eq!(replay.next(now), Next::Deliver(two));
        assert_eq!((replay.next(now), replay.is_over(now)), (Next::Nothing, false));
        assert!(replay.is_over(now + REPEAT_WINDOW));
    }

    #[test]
    fn nothing_is_faster_than_it_was_and_what_never_comes_is_not_waited_for_twice() {
        let frames: Vec<_> =
            (0..3).map(|nth| input(nth * 40, segment(Side::Peer, 1, 500 + nth as u32 * 9, 16, 0))).collect();
        let mut replay = InputReplay::new(frames, &[]);
        let now = Instant::now();
        assert!(matches!(replay.next(now), Next::Deliver(_)));
        assert_eq!(replay.next(now), Next::Wait(Duration::from_millis(40)));
        let later = now + Duration::from_millis(100);
        assert!(matches!(replay.next(later), Next::Wait(_)));
        assert!(matches!(replay.next(later + MAX_WAIT), Next::Deliver(_)));
        assert!(matches!(replay.next(later + MAX_WAIT), Next::Deliver(_)));
    }

    #[test]
    fn a_connection_that_is_made_anew_is_counted_anew() {
        let syn = segment(Side::Peer, 99, 0, 2, 0);
        let ack = segment(Side::Peer, 100, 5_000_001, 16, 0);
        let mut replay = InputReplay::new(vec![input(0, syn), input(0, ack)], &[]);
        let now = Instant::now();
        assert!(matches!(replay.next(now), Next::Deliver(_)));
        replay.is_repeated(&segment(Side::Guest, 3_000_000_000, 100, 18, 0));
        assert!(
            matches!(replay.next(now), Next::Deliver(_)),
            "its guest says itself that there is no such connection"
        );
    }

    #[test]
    fn what_had_left_is_dropped_as_often_as_it_had() {
        let mut datagram = segment(Side::Guest, 1, 1, 0, 20);
        datagram[23] = 17;
        let mut again = datagram.clone();
        again[18..20].copy_from_slice(&[7, 7]);
        let print = fingerprint(&datagram).unwrap();
        let mut replay = InputReplay::new(Vec::new(), &[print]);
        assert!(replay.is_repeated(&again) && !replay.is_repeated(&again));
        again[50] ^= 1;
        assert_ne!(fingerprint(&again), Some(print));
        assert_eq!(fingerprint(&segment(Side::Guest, 1, 1, 0, 20)), None);
    }

    proptest! {
        #[test]
        fn hostile_frames_are_read_without_harm(mut frame in prop::collection::vec(any::<u8>(), 0..120), kind in 0..3, cut in 0..90usize) {
            let whole = segment(Side::Peer, 1, 2, 24, 30);
            match kind {
                0 => frame = whole[..cut.min(whole.len())].to_vec(),
                1 => if let Some(place) = frame.get_mut(12..14) { place.copy_from_slice(&[0x86, 0xdd]) },
                _ => {}
            }
            let mut replay = InputReplay::new(vec![input(0, frame.clone())], &[]);
            prop_assert_eq!(replay.next(Instant::now()), Next::Deliver(frame.clone()));
            replay.is_repeated(&frame);
        }
    }
}
