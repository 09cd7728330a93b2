//! Datagram probe: sends a machine one datagram each millisecond and records the answers.

use super::{LabError, Namespace};
use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Time between two probes.
const PERIOD: Duration = Duration::from_millis(1);
/// Time to wait for the last answers.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// Running datagram probe.
pub struct Probe {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    sender: JoinHandle<Vec<Instant>>,
    receiver: JoinHandle<Vec<(u64, Instant)>>,
}

/// Report of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeReport {
    /// Number of probes sent.
    pub sent: u64,
    /// Number of probes answered.
    pub answered: u64,
    /// Numbers of the probes without an answer, in order.
    pub lost: Vec<u64>,
    /// Longest time between two answers, less the period: the downtime. The time from the last answer to the
    /// end counts too, so a machine that never came back is visible.
    pub downtime: Duration,
    /// Start of the longest gap, since the first probe.
    pub downtime_at: Duration,
    /// Number of probes sent during that gap.
    pub sent_in_gap: u64,
    /// Number of those that were never answered.
    pub lost_in_gap: u64,
    /// Median time from probe to answer.
    pub round_trip: Duration,
}

impl Probe {
    /// Probes `address` (a UDP echo) from `namespace`.
    pub fn start(namespace: &Namespace, address: SocketAddr) -> Result<Self, LabError> {
        let socket = namespace.run(move || {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            // Late answers, many at once after a pause, must not be lost in this socket.
            socket.set_read_timeout(Some(Duration::from_millis(50)))?;
            socket.connect(address).map(|()| socket)
        });
        let socket = socket.map_err(LabError::system("make a probe's socket"))?;
        let other = socket.try_clone().map_err(LabError::system("share a probe's socket"))?;
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop_sending, stop_receiving, count) =
            (Arc::clone(&stop), Arc::clone(&stop), Arc::clone(&answered));
        let sender = thread::spawn(move || send(&socket, &stop_sending));
        let receiver = thread::spawn(move || receive(&other, &stop_receiving, &count));
        Ok(Self { stop, answered, sender, receiver })
    }

    /// Number of probes answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits until `count` more probes are answered; false if that takes longer than `patience`.
    pub fn wait_answers(&self, count: u64, patience: Duration) -> bool {
        let (goal, deadline) = (self.answered() + count, Instant::now() + patience);
        while self.answered() < goal {
            if Instant::now() > deadline {
                return false;
            }
            thread::sleep(PERIOD);
        }
        true
    }

    /// Ends the probe and returns its report.
    pub fn stop(self) -> ProbeReport {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.sender.join().expect("the probe's sender does not panic");
        let answers = self.receiver.join().expect("the probe's receiver does not panic");
        report(&sent, &answers)
    }
}

fn send(socket: &UdpSocket, stop: &AtomicBool) -> Vec<Instant> {
    let (begin, mut sent) = (Instant::now(), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        // An error belongs to an earlier probe that was refused; the probe counts as sent and lost.
        let number = sent.len() as u64;
        sent.push(Instant::now());
        let _ = socket.send(&number.to_le_bytes());
        thread::sleep((begin + PERIOD * sent.len() as u32).saturating_duration_since(Instant::now()));
    }
    sent
}

fn receive(socket: &UdpSocket, stop: &AtomicBool, count: &AtomicU64) -> Vec<(u64, Instant)> {
    let (mut answers, mut datagram, mut end) = (Vec::new(), [0; 64], None);
    while end.is_none_or(|end| Instant::now() < end) {
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(Instant::now() + LAST_ANSWERS);
        }
        // Otherwise nothing arrived, or a refusal: the loop's condition ends the waiting.
        if let Ok(8) = socket.recv(&mut datagram) {
            let number = u64::from_le_bytes(datagram[..8].try_into().expect("eight bytes"));
            answers.push((number, Instant::now()));
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
    answers
}

fn report(sent: &[Instant], answers: &[(u64, Instant)]) -> ProbeReport {
    let mut lost = vec![true; sent.len()];
    let mut round_trips = Vec::new();
    for (number, at) in answers {
        if let (Some(lost), Some(sent)) = (lost.get_mut(*number as usize), sent.get(*number as usize)) {
            round_trips.push(at.duration_since(*sent));
            *lost = false;
        }
    }
    round_trips.sort();
    let begin = sent.first().copied().unwrap_or_else(Instant::now);
    let end = sent.last().copied().unwrap_or(begin);
    let (downtime, at) = longest_gap(begin, answers.iter().map(|(_, at)| *at), end);
    let in_gap = |(sent, _): &(&Instant, &bool)| (at..at + downtime).contains(*sent);
    let gap: Vec<_> = sent.iter().zip(&lost).filter(in_gap).collect();
    ProbeReport {
        sent_in_gap: gap.len() as u64,
        lost_in_gap: gap.iter().filter(|(_, lost)| **lost).count() as u64,
        sent: sent.len() as u64,
        answered: lost.iter().filter(|lost| !**lost).count() as u64,
        lost: (0..).zip(&lost).filter(|(_, lost)| **lost).map(|(number, _)| number).collect(),
        downtime: downtime.saturating_sub(PERIOD),
        downtime_at: at.saturating_duration_since(begin),
        round_trip: round_trips.get(round_trips.len() / 2).copied().unwrap_or_default(),
    }
}

/// Longest time between neighbours of `begin`, `events`, `end`, and its start.
pub(super) fn longest_gap(
    begin: Instant,
    events: impl Iterator<Item = Instant>,
    end: Instant,
) -> (Duration, Instant) {
    let (mut last, mut longest, mut at) = (begin, Duration::ZERO, begin);
    for event in events.chain([end]) {
        let gap = event.saturating_duration_since(last);
        if gap > longest {
            (longest, at) = (gap, last);
        }
        last = last.max(event);
    }
    (longest, at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_never_came_back_is_not_up() {
        let begin = Instant::now();
        let sent: Vec<_> = (0..100).map(|ms| begin + Duration::from_millis(ms)).collect();
        let answers: Vec<_> = (0..10).map(|number| (number, sent[number as usize])).collect();
        let report = report(&sent, &answers);
        assert_eq!((report.sent, report.answered, report.lost.len()), (100, 10, 90));
        assert_eq!(report.downtime, Duration::from_millis(89));
        assert_eq!(report.downtime_at, Duration::from_millis(9));
    }

    #[test]
    fn the_longest_silence_is_found_in_the_middle() {
        let begin = Instant::now();
        let sent: Vec<_> = (0..100).map(|ms| begin + Duration::from_millis(ms)).collect();
        let kept = |n: &u64| !(40..60).contains(n);
        let answers: Vec<_> = (0..100).filter(kept).map(|number| (number, sent[number as usize])).collect();
        let report = report(&sent, &answers);
        assert_eq!(report.downtime, Duration::from_millis(20));
        // The gap begins with the last answer, which belongs to a probe of that instant.
        assert_eq!((report.sent_in_gap, report.lost_in_gap), (21, 20));
    }
}
