//! Bounds of connections whose peer is not known yet. Pure: no socket, no clock.

use std::{collections::VecDeque, net::IpAddr};
use tokio::sync::oneshot;

/// The handshakes under way, each with the sender whose drop ends it. Connections are accepted without
/// waiting for any of them: when there are too many, the oldest of the address that has the most gives way.
/// Strangers thus keep out others of their address at most, and only as fast as they connect.
#[derive(Debug)]
pub struct Handshakes {
    max: usize,
    under_way: VecDeque<(IpAddr, oneshot::Sender<()>)>,
}

impl Handshakes {
    /// For at most `max` at once.
    pub fn new(max: usize) -> Self {
        Self { max: max.max(1), under_way: VecDeque::new() }
    }

    /// Adds a handshake; the receiver fires when it has to end.
    pub fn begin(&mut self, from: IpAddr) -> oneshot::Receiver<()> {
        // A handshake that is over has dropped its receiver.
        self.under_way.retain(|(_, evict)| !evict.is_closed());
        if self.under_way.len() >= self.max {
            let of = |at: &usize| self.under_way[*at].0;
            let count = |address: IpAddr| self.under_way.iter().filter(|(from, _)| *from == address).count();
            // From the back, because the last of equals is taken.
            let oldest = (0..self.under_way.len()).rev().max_by_key(|at| count(of(at)));
            oldest.map(|at| self.under_way.remove(at));
        }
        let (evict, evicted) = oneshot::channel();
        self.under_way.push_back((from, evict));
        evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot::error::TryRecvError;

    #[test]
    fn the_oldest_handshake_of_the_busiest_address_gives_way() {
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mut handshakes = Handshakes::new(4);
        let mut begun: Vec<_> = [1, 2, 2, 2].map(|last| handshakes.begin(address(last))).into();
        let mut is_over = |at: usize| begun[at].try_recv() == Err(TryRecvError::Closed);
        let new = handshakes.begin(address(3));
        assert_eq!([0, 1, 2, 3].map(&mut is_over), [false, true, false, false]);
        drop(new);
        let _next = handshakes.begin(address(4));
        assert!(!is_over(2), "what is over has left its place");
        let _another = handshakes.begin(address(5));
        assert_eq!([0, 2, 3].map(&mut is_over), [false, true, false]);
    }
}
