//! Main loop of the guest agent: commands and reports on the port, guest requests from users, and timers.
//!
//! One thread, because the tracer of a process is a thread. If the port vanishes or hangs up, stunned
//! processes continue, and the port is opened again.

use crate::{
    announce, clock,
    config::{self, Config},
    memory::{self, Layout},
    port::{Port, PortInput},
    requests::{RequestListener, RequestStatus},
    stun::{Bounds, Sample, Stunned},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    fs,
    io::{self, Read as _},
    process::ExitCode,
    thread,
    time::Duration,
};
use whimbrel_guest_protocol::{Command, FEATURES, Report, frame::Frame};

/// Interval of attempts to find the port, or a host at its other end.
const HOST_POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Longest lease that is accepted.
const LEASE_MAX: Duration = Duration::from_secs(30);

/// Serves until the guest ends.
pub(crate) fn forever() -> ExitCode {
    let (config, wrong) = Config::parse(&fs::read_to_string(config::PATH).unwrap_or_default());
    wrong.iter().for_each(|line| eprintln!("whimbrel-guest: {}: invalid line: {line}", config::PATH));
    let session = match session() {
        Ok(session) => session,
        Err(error) => return fail(&format!("cannot read a random number: {error}")),
    };
    let desk = match RequestListener::open() {
        Ok(desk) => desk,
        Err(error) => return fail(&format!("cannot listen for requests: {error}")),
    };
    let mut server = Server { config, session, requests: desk, stunned: Stunned::default(), machine: None };
    loop {
        match Port::open() {
            Ok(Some(mut port)) => {
                if let Err(error) = server.serve(&mut port) {
                    eprintln!("whimbrel-guest: the port failed: {error}");
                }
            }
            Ok(None) => {}
            Err(error) => eprintln!("whimbrel-guest: cannot open the port: {error}"),
        }
        server.stunned.release();
        thread::sleep(HOST_POLL_INTERVAL);
    }
}

fn fail(words: &str) -> ExitCode {
    eprintln!("whimbrel-guest: {words}");
    ExitCode::FAILURE
}

fn session() -> io::Result<u32> {
    let mut bytes = [0; 4];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    // Commands without a session have session 0.
    Ok(u32::from_le_bytes(bytes) | 1)
}

struct Server {
    config: Config,
    session: u32,
    requests: RequestListener,
    stunned: Stunned,
    /// Memory layout of the machine, once the host has sent its size.
    machine: Option<Layout>,
}

impl Server {
    /// Serves until the port fails.
    fn serve(&mut self, port: &mut Port) -> io::Result<()> {
        self.report(port, &self.ready_report(), 0)?;
        loop {
            self.wait(port)?;
            let let_go = self.stunned.tick();
            if let_go > 0 {
                eprintln!("whimbrel-guest: the host is silent, {let_go} processes continue");
            }
            match port.read()? {
                PortInput::Frames(frames) => {
                    for frame in frames {
                        self.handle_frame(port, &frame)?;
                    }
                }
                PortInput::HungUp => self.wait_for_host(port)?,
            }
            while let Some((id, ask)) = self.requests.next_request() {
                if let Err(error) = self.report(port, &Report::Request(ask), id) {
                    self.requests.answer(id, &RequestStatus::Failed(format!("cannot ask the host: {error}")));
                }
            }
        }
    }

    fn ready_report(&self) -> Report {
        Report::Ready { features: FEATURES, version: env!("CARGO_PKG_VERSION").to_owned() }
    }

    /// Waits for the port, for a user request, or for the end of a lease.
    fn wait(&self, port: &Port) -> io::Result<()> {
        let timeout = self.stunned.next_tick().and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)];
        fds.extend(self.requests.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits while the other end of the port is closed; releases all processes first. Such a port is always
    /// ready to poll, so this sleeps instead.
    fn wait_for_host(&mut self, port: &Port) -> io::Result<()> {
        let released = self.stunned.release();
        if released > 0 {
            eprintln!("whimbrel-guest: the host closed the port, {released} processes continue");
        }
        loop {
            let mut fds = [PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default()))?;
            if !fds[0].revents().contains(PollFlags::HUP) {
                return self.report(port, &self.ready_report(), 0);
            }
            self.stunned.tick();
            self.requests.refuse_all("the host is not connected");
            thread::sleep(HOST_POLL_INTERVAL);
        }
    }

    fn report(&self, port: &Port, word: &Report, id: u32) -> io::Result<()> {
        match port.write(&word.to_frame(self.session, id)) {
            // The next host sends a new hello.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(()),
            outcome => outcome,
        }
    }

    fn handle_frame(&mut self, port: &Port, frame: &Frame) -> io::Result<()> {
        let order = match Command::from_frame(frame) {
            Ok(order) => order,
            Err(error) => return self.report(port, &Report::Failed { reason: error.to_string() }, frame.id),
        };
        // Commands for an earlier run of this program, or for another guest, are ignored.
        let is_hello = matches!(order, Command::Hello { .. });
        if !is_hello && frame.session != self.session {
            return Ok(());
        }
        match self.answer(order, frame.id) {
            Some(word) => self.report(port, &word, frame.id),
            None => Ok(()),
        }
    }

    fn answer(&mut self, order: Command, id: u32) -> Option<Report> {
        match order {
            Command::Hello { host, machine: _, pages } => {
                self.stunned.release();
                self.machine = Some(Layout::of(pages));
                self.requests.handle_hello(&host);
                Some(self.ready_report())
            }
            Command::FreeCaches if !self.config.free_caches => Some(failed("the settings forbid it")),
            Command::FreeCaches => Some(match memory::drop_caches() {
                Ok((before, after)) => Report::Freed { before, after },
                Err(error) => failed(&error.to_string()),
            }),
            Command::Stun { lease_ms, limit, spare, each, sample } => {
                Some(self.stun(&sample, lease_ms, each, Bounds { limit, spare }))
            }
            Command::ExtendStun { lease_ms } => {
                self.stunned.extend(lease(lease_ms), self.config.stun_max);
                None
            }
            Command::Release => Some(Report::Released { count: self.stunned.release() }),
            Command::Announce if !self.config.announce => Some(failed("the settings forbid it")),
            Command::Announce => Some(match announce::now() {
                Ok(frames) => Report::Announced { frames },
                Err(error) => failed(&error.to_string()),
            }),
            Command::SetClock { .. } if !self.config.clock => Some(failed("the settings forbid it")),
            Command::SetClock { unix_ms } => Some(match clock::set_forward(Duration::from_millis(unix_ms)) {
                Ok(forward) => Report::ClockSet { forward_ms: forward.as_millis() as u64 },
                Err(error) => failed(&error.to_string()),
            }),
            Command::RequestResult(outcome) => {
                self.requests.answer(id, &outcome.into());
                None
            }
        }
    }

    fn stun(&mut self, sample: &[u32], lease_ms: u32, each: u32, bounds: Bounds) -> Report {
        let Some(layout) = self.machine.filter(|_| self.config.stun) else {
            return failed(if self.config.stun { "no hello from a host" } else { "the settings forbid it" });
        };
        let choice = self.stunned.stun(&Sample::new(sample), layout, each, bounds, &self.config);
        self.stunned.extend(lease(lease_ms), self.config.stun_max);
        Report::Stunned { held: choice.stun, spared: choice.exempt }
    }
}

fn lease(ms: u32) -> Duration {
    Duration::from_millis(u64::from(ms)).min(LEASE_MAX)
}

fn failed(reason: &str) -> Report {
    Report::Failed { reason: reason.to_owned() }
}
