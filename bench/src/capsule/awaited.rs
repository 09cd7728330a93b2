//! Commands at beta after which a guest there should answer: run, timed, and given up as soon as a command
//! fails.

use super::sites::Sites;
use crate::hosts::GUEST;
use anyhow::{Context as _, Result};
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

/// How often a client asks whether a guest is there.
const ASK: Duration = Duration::from_millis(20);

/// What happened, in seconds since the first command began.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    /// The first answer that a client beside the guest got.
    pub(super) answered: f64,
    /// The end of the last command.
    pub(super) returned: f64,
    /// Bytes on the link until the answer.
    pub(super) bytes: u64,
}

/// Runs commands at beta, one after another, and waits until the guest answers there.
pub(super) fn arrive(sites: &Sites, commands: &[&[&str]], patience: Duration) -> Result<Arrival> {
    let (begun, before) = (Instant::now(), sites.link_bytes());
    let given_up = Arc::new(AtomicBool::new(false));
    let (answered, returned) = scope(|scope| {
        let commands = scope.spawn(|| {
            let done = commands.iter().try_for_each(|words| sites.beta().run(words).map(drop));
            given_up.store(done.is_err(), Ordering::Relaxed);
            done.map(|()| begun.elapsed())
        });
        let answered = wait(sites, patience, &given_up).map(|at| (at, sites.link_bytes() - before));
        let returned = commands.join().ok().context("a command panicked")??;
        anyhow::Ok((answered?, returned))
    })?;
    let (at, bytes) = answered;
    let arrival = Arrival { answered: (at - begun).as_secs_f64(), returned: returned.as_secs_f64(), bytes };
    eprintln!(
        "    answered after {:.1} s, commands returned after {:.1} s, {bytes} bytes",
        arrival.answered, arrival.returned
    );
    Ok(arrival)
}

/// Waits until the guest answers a client beside it, or somebody gives up.
fn wait(sites: &Sites, patience: Duration, given_up: &Arc<AtomicBool>) -> Result<Instant> {
    let (until, given_up) = (Instant::now() + patience, given_up.clone());
    let asked = sites.network("beta").spawn(move || ask(until, &given_up));
    let answered = asked.join().ok().context("the client panicked")??;
    answered.with_context(|| format!("the guest does not answer within {patience:?}"))
}

/// Asks the guest's echo of datagrams until it answers; nothing if it does not in time.
fn ask(until: Instant, given_up: &AtomicBool) -> Result<Option<Instant>> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(ASK))?;
    let mut answer = [0; 64];
    while Instant::now() < until && !given_up.load(Ordering::Relaxed) {
        let sent = socket.send_to(b"are you there", format!("{GUEST}:7003"));
        // Nobody there yet: the kernel says so at once, and asking again at once would keep a processor busy.
        if sent.is_err() || socket.recv_from(&mut answer).is_err_and(|error| !is_timeout(&error)) {
            sleep(ASK);
            continue;
        }
        if answer.starts_with(b"are you there") {
            return Ok(Some(Instant::now()));
        }
    }
    Ok(None)
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
}
