//! Stream probe: reads the numbered stream of the test agent (TCP 7001); a connection that survives shows
//! every number once, in order.

use super::{Namespace, datagram_probe::longest_gap};
use std::{
    io::{self, BufRead, BufReader, Read},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Running stream probe.
pub struct StreamProbe {
    stream: TcpStream,
    lines: Arc<AtomicU64>,
    reader: JoinHandle<(Vec<Instant>, StreamEnd)>,
    begin: Instant,
}

/// End of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// The probe ended the stream.
    Stopped,
    /// The connection was lost or closed by the guest.
    Lost,
    /// A number was missing, repeated or invalid.
    Broken {
        /// Number that was expected.
        expected: u64,
    },
}

/// Report of a stream probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamReport {
    /// Number of lines received in order.
    pub lines: u64,
    /// Longest time without a line.
    pub longest_gap: Duration,
    /// End of the stream; anything but [`StreamEnd::Stopped`] is a fault.
    pub end: StreamEnd,
}

impl StreamProbe {
    /// Connects to `address` from `namespace` and reads.
    pub fn start(namespace: &Namespace, address: SocketAddr, patience: Duration) -> io::Result<Self> {
        let stream = namespace.connect(address, patience)?;
        let (reading, lines) = (stream.try_clone()?, Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&lines);
        let reader = thread::spawn(move || read(reading, &count));
        Ok(Self { stream, lines, reader, begin: Instant::now() })
    }

    /// Number of lines so far.
    pub fn lines(&self) -> u64 {
        self.lines.load(Ordering::Relaxed)
    }

    /// Ends the probe and returns its report.
    pub fn stop(self) -> StreamReport {
        let end_at = Instant::now();
        let lost_before = self.reader.is_finished();
        // Fails only if the connection is closed already, which the reader reports.
        let _ = self.stream.shutdown(Shutdown::Both);
        let (times, end) = self.reader.join().expect("the stream's reader does not panic");
        let end = if end == StreamEnd::Lost && !lost_before { StreamEnd::Stopped } else { end };
        let (longest_gap, _) = longest_gap(self.begin, times.iter().copied(), end_at);
        StreamReport { lines: times.len() as u64, longest_gap, end }
    }
}

fn read(stream: TcpStream, count: &AtomicU64) -> (Vec<Instant>, StreamEnd) {
    let (mut reader, mut times, mut line) = (BufReader::new(stream), Vec::new(), Vec::new());
    for expected in 0u64.. {
        line.clear();
        match reader.by_ref().take(128).read_until(b'\n', &mut line) {
            Ok(len) if len > 0 && line.ends_with(b"\n") => {}
            _ => return (times, StreamEnd::Lost),
        }
        let number = std::str::from_utf8(&line)
            .ok()
            .and_then(|text| text.trim_end().trim_end_matches('.').parse().ok());
        if number != Some(expected) {
            return (times, StreamEnd::Broken { expected });
        }
        times.push(Instant::now());
        count.fetch_add(1, Ordering::Relaxed);
    }
    (times, StreamEnd::Stopped)
}
