//! MAC table: stations at the other end of a tunnel, so that only frames for them are sent there. Pure,
//! bounded.
//!
//! A switch floods frames for unknown stations. Over a slow link that would be unrelated traffic; and the
//! addresses of a machine are known from its configuration and from every frame that it sends.

use crate::{Addresses, Mac};

/// Stations at the other end.
#[derive(Debug, Clone, Default)]
pub struct MacTable(Addresses);

impl MacTable {
    /// Creates a table with the stations known from the start.
    pub fn new(stations: impl IntoIterator<Item = Mac>) -> Self {
        let mut reach = Self::default();
        stations.into_iter().for_each(|mac| reach.0.insert(mac, None));
        reach
    }

    /// Learns from a frame that came from the other end.
    pub fn record(&mut self, frame: &[u8]) {
        self.0.record(frame);
    }

    /// Whether a frame should be sent: it is for one of the stations, broadcast or multicast.
    pub fn wants(&self, frame: &[u8]) -> bool {
        let Some(to) = frame.first_chunk::<6>() else { return false };
        to[0] & 1 == 1 || self.0.stations().iter().any(|station| station.mac.0 == *to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
        [&to[..], &from, &[0x88, 0xb5], &[0; 46]].concat()
    }

    #[test]
    fn frames_for_others_stay_here_until_those_others_speak_from_there() {
        let (known, other) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let mut reach = MacTable::new([Mac(known)]);
        assert!(reach.wants(&frame(known, other)) && reach.wants(&frame([0xff; 6], other)));
        assert!(!reach.wants(&frame(other, known)) && !reach.wants(&[2, 0]));
        reach.record(&frame(known, other));
        assert!(reach.wants(&frame(other, known)));
    }

    #[test]
    fn a_guest_that_invents_stations_fills_no_memory() {
        let mut reach = MacTable::default();
        for number in 0..100_000u32 {
            let [a, b, c, d] = number.to_be_bytes();
            reach.record(&frame([0xff; 6], [2, 0, a, b, c, d]));
        }
        assert!(reach.0.stations().len() <= 64);
    }
}
