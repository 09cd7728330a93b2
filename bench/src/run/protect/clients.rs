//! Clients outside the guest: many that fetch over HTTP, one that asks for the time of day.

use crate::hosts::GUEST;
use anyhow::{Context as _, Result};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};
use whimbrel_testkit::lab::Namespace;

const PATIENCE: Duration = Duration::from_secs(10);

/// Clients that fetch one file after another, until they are dropped.
pub(super) struct Fetchers {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Fetchers {
    /// `count` of them; the `n`-th fetch of all is of the path `path(n)`.
    pub(super) fn start(network: &Namespace, count: u64, path: fn(u64) -> String) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let begin = |client: u64| {
            let (stop, done) = (stop.clone(), done.clone());
            network.spawn(move || {
                let mut number = client * 1000;
                while !stop.load(Ordering::Relaxed) {
                    number += 1;
                    match fetch(80, &path(number)) {
                        Ok(_) => drop(done.fetch_add(1, Ordering::Relaxed)),
                        Err(_) => sleep(Duration::from_millis(50)),
                    }
                }
            })
        };
        let threads = (0..count).map(begin).collect();
        Self { stop, done, threads }
    }

    /// Files that were fetched.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }
}

impl Drop for Fetchers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // One that panicked has fetched nothing more, which the figures show.
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Fetches a path of the guest from the network the caller is in.
fn fetch(port: u16, path: &str) -> Result<Vec<u8>> {
    let address: SocketAddr = format!("{GUEST}:{port}").parse()?;
    let mut stream = std::net::TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: guest\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    anyhow::ensure!(answer.starts_with(b"HTTP/1.") && answer[9..].starts_with(b"200"), "not found: {path}");
    Ok(answer)
}

/// How far the guest is with its work.
pub(super) fn rounds(network: &Namespace) -> Result<u64> {
    let answer = network.run(|| fetch(81, "/done"))?;
    let text = String::from_utf8_lossy(&answer);
    text.lines()
        .last()
        .and_then(|line| line.trim().parse().ok())
        .context("the guest does not say how far it is")
}

/// Round trips of `count` datagrams, in milliseconds, one after the other and at no regular distance.
pub(super) fn pings(network: &Namespace, count: u64) -> Result<Vec<f64>> {
    let work = move || -> Result<Vec<f64>> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(format!("{GUEST}:7003"))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut trips = Vec::new();
        for number in 0..count {
            let (begun, mut answer) = (Instant::now(), [0; 64]);
            socket.send(&number.to_le_bytes())?;
            while socket.recv(&mut answer)? != 8 || answer[..8] != number.to_le_bytes() {}
            trips.push(begun.elapsed().as_secs_f64() * 1e3);
            sleep(Duration::from_micros(20_000 + number * 7919 % 31_000));
        }
        Ok(trips)
    };
    network.run(work)
}
