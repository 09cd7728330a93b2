//! Clients of a guest, as Clark et al. (NSDI 2005, section 6) had them: many that fetch files from a web
//! server (6.2), a few players of a game who are told what happens some dozen times a second (6.4). What they
//! see is when something came.

use anyhow::{Result, ensure};
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};
use whimbrel_testkit::lab::Namespace;

/// Length of a file: 512 KB, as in section 6.2.
pub(super) const FILE: usize = 512 << 10;
/// A request that is not answered for so long has failed.
const ANSWER_PATIENCE: Duration = Duration::from_secs(30);
/// Updates a second that the players get.
const PLAYERS: [u32; 6] = [20, 25, 30, 35, 40, 50];
/// How often a player who hears nothing asks again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// What clients of a web server ask for.
#[derive(Clone, Copy)]
pub(super) struct Asked {
    /// The path of the `n`-th request of all.
    pub(super) path: fn(u64) -> String,
    /// An answer that has no more bytes than this is cut off.
    pub(super) more_than: usize,
}

/// The same file of 512 KB each time.
pub(super) const FILES: Asked = Asked { path: |_| format!("/bytes/{FILE}"), more_than: FILE };

/// A web mix: of ten requests five for small files, two for pictures, three for pages that are made anew.
pub(super) fn web_mix(number: u64) -> String {
    match number % 10 {
        0..5 => "/small".to_owned(),
        5..7 => "/picture".to_owned(),
        _ => format!("/cgi-bin/page?{}", number.wrapping_mul(2_654_435_761) >> 7),
    }
}

/// Clients that fetch files over and over, each over a connection of its own a file.
pub(super) struct Web {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Vec<(Instant, usize)>>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    fetched: AtomicU64,
    failed: AtomicU64,
}

/// When how much came, in order.
pub(super) struct Events(pub(super) Vec<(Instant, usize)>);

/// What they saw.
pub(super) struct WebReport {
    /// When how many bytes came, to any of them.
    pub(super) events: Events,
    pub(super) fetched: u64,
    pub(super) failed: u64,
}

impl Web {
    /// Starts `clients` of them in `namespace`, each of which waits for `think` between two files.
    pub(super) fn start(
        namespace: &Namespace,
        server: SocketAddr,
        (clients, think): (u64, Duration),
        asked: Asked,
    ) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let start = |client| {
            let shared = Arc::clone(&shared);
            let requests = (client * 1000..).map(asked.path);
            namespace.spawn(move || fetch_on(server, think, (requests, asked.more_than), &shared))
        };
        let threads = (0..clients).map(start).collect();
        Ok(Self { shared, threads })
    }

    /// Waits until `count` more files have come.
    pub(super) fn wait_fetched(&self, count: u64, patience: Duration) -> Result<()> {
        let (goal, deadline) =
            (self.shared.fetched.load(Ordering::Relaxed) + count, Instant::now() + patience);
        while self.shared.fetched.load(Ordering::Relaxed) < goal {
            ensure!(Instant::now() < deadline, "the web server does not answer");
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Ends them, each after the file that it is at.
    pub(super) fn stop(self) -> WebReport {
        self.shared.stop.store(true, Ordering::Relaxed);
        let events = self.threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default());
        let mut events: Vec<_> = events.collect();
        events.sort();
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        WebReport {
            events: Events(events),
            fetched: count(&self.shared.fetched),
            failed: count(&self.shared.failed),
        }
    }
}

impl Events {
    /// The longest time within these two in which nothing came to anybody.
    pub(super) fn silence(&self, from: Instant, to: Instant) -> Duration {
        let within = self.0.iter().map(|(at, _)| *at).filter(|at| (from..=to).contains(at));
        longest_gap(std::iter::once(from).chain(within).chain([to]))
    }

    /// How much came a second between these two.
    pub(super) fn rate(&self, from: Instant, to: Instant) -> f64 {
        let within = self.0.iter().filter(|(at, _)| (from..to).contains(at));
        within.map(|(_, bytes)| *bytes as f64).sum::<f64>() / (to - from).as_secs_f64()
    }
}

fn fetch_on(
    server: SocketAddr,
    think: Duration,
    (requests, more_than): (impl Iterator<Item = String>, usize),
    shared: &Shared,
) -> Vec<(Instant, usize)> {
    let mut events = Vec::new();
    for path in requests {
        if shared.stop.load(Ordering::Relaxed) {
            break;
        }
        match fetch(server, (&path, more_than), &mut events) {
            Ok(()) => shared.fetched.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                eprintln!("a request failed: {error}");
                shared.failed.fetch_add(1, Ordering::Relaxed)
            }
        };
        sleep(think);
    }
    events
}

fn fetch(
    server: SocketAddr,
    (path, more_than): (&str, usize),
    events: &mut Vec<(Instant, usize)>,
) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&server, ANSWER_PATIENCE)?;
    stream.set_read_timeout(Some(ANSWER_PATIENCE))?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
    let (mut buffer, mut got) = (vec![0; 64 << 10], 0);
    loop {
        match stream.read(&mut buffer)? {
            0 if got > more_than => return Ok(()),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => {
                got += bytes;
                events.push((Instant::now(), bytes));
            }
        }
    }
}

/// Players who are told what happens, each as often as it likes.
pub(super) struct Game {
    stop: Arc<AtomicBool>,
    threads: Vec<(u32, JoinHandle<io::Result<Vec<Instant>>>)>,
}

impl Game {
    /// Starts all of them in `namespace`. They are told from now on.
    pub(super) fn start(namespace: &Namespace, server: SocketAddr) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let start = |rate| {
            let stop = Arc::clone(&stop);
            (rate, namespace.spawn(move || play(server, rate, &stop)))
        };
        let threads = PLAYERS.map(start).into();
        Self { stop, threads }
    }

    /// Ends them. By how much the time between two updates was longer than it should be, at most, of any
    /// player between these two moments.
    pub(super) fn stop(self, from: Instant, to: Instant) -> Result<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        let mut longest = Duration::ZERO;
        for (rate, thread) in self.threads {
            let told = thread.join().map_err(|_| anyhow::anyhow!("a player panicked"))??;
            let within: Vec<_> = told.into_iter().filter(|at| (from..=to).contains(at)).collect();
            ensure!(within.len() > 2, "a player was told nothing");
            let gap = longest_gap(within.into_iter());
            longest = longest.max(gap.saturating_sub(Duration::from_secs(1) / rate));
        }
        Ok(longest)
    }
}

fn play(server: SocketAddr, rate: u32, stop: &AtomicBool) -> io::Result<Vec<Instant>> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(ASK_AGAIN))?;
    let (mut told, mut update) = (Vec::new(), [0; 2048]);
    while !stop.load(Ordering::Relaxed) {
        if told.is_empty() {
            // Lost, or refused while nobody listens: it asks again.
            let _ = socket.send(rate.to_string().as_bytes());
        }
        if socket.recv(&mut update).is_ok() {
            told.push(Instant::now());
        }
    }
    Ok(told)
}

/// The longest time between neighbours.
fn longest_gap(mut events: impl Iterator<Item = Instant>) -> Duration {
    let Some(mut last) = events.next() else { return Duration::ZERO };
    let mut longest = Duration::ZERO;
    for event in events {
        longest = longest.max(event.saturating_duration_since(last));
        last = event;
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_at_an_end_counts_and_what_lies_outside_does_not() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let report = Events([0, 500, 510, 560].map(|ms| (at(ms), 100)).into());
        assert_eq!(report.silence(at(500), at(600)), Duration::from_millis(50));
        assert_eq!(report.silence(at(450), at(560)), Duration::from_millis(50));
        assert_eq!(report.rate(at(500), at(600)), 3_000.0);
    }
}
