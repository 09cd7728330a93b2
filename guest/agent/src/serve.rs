//! The loop of the program that serves the host: orders in, words out, wishes from inside, and time.
//!
//! One thread, because whoever traces a process is a thread. If the port is gone or hangs up, whoever is held
//! goes on, and the port is tried again.

use crate::{
    announce,
    config::{self, Config},
    memory::{self, Layout},
    port::{Heard, Port},
    stun::{Bounds, Sample, Stunned},
    wish::{Desk, Wish},
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

/// Between two looks for a port, or for somebody at its other end.
const LOOK_FOR_HOST: Duration = Duration::from_millis(500);
/// The longest lease that is believed.
const LEASE_MAX: Duration = Duration::from_secs(30);

/// Serves until the guest ends.
pub(crate) fn forever() -> ExitCode {
    let (config, wrong) = Config::parse(&fs::read_to_string(config::PATH).unwrap_or_default());
    wrong.iter().for_each(|line| eprintln!("whimbrel-guest: {}: not understood: {line}", config::PATH));
    let session = match session() {
        Ok(session) => session,
        Err(error) => return fail(&format!("no random number: {error}")),
    };
    let desk = match Desk::open() {
        Ok(desk) => desk,
        Err(error) => return fail(&format!("cannot listen for wishes: {error}")),
    };
    let mut server = Server { config, session, desk, stunned: Stunned::default(), machine: None };
    loop {
        match Port::open() {
            Ok(Some(mut port)) => {
                if let Err(error) = server.serve(&mut port) {
                    eprintln!("whimbrel-guest: the port fails: {error}");
                }
            }
            Ok(None) => {}
            Err(error) => eprintln!("whimbrel-guest: cannot open the port: {error}"),
        }
        server.stunned.release();
        thread::sleep(LOOK_FOR_HOST);
    }
}

fn fail(words: &str) -> ExitCode {
    eprintln!("whimbrel-guest: {words}");
    ExitCode::FAILURE
}

fn session() -> io::Result<u32> {
    let mut bytes = [0; 4];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    // Orders to nobody in particular have session 0.
    Ok(u32::from_le_bytes(bytes) | 1)
}

struct Server {
    config: Config,
    session: u32,
    desk: Desk,
    stunned: Stunned,
    /// How the memory of the machine lies, once the host has said how much there is.
    machine: Option<Layout>,
}

impl Server {
    /// Until the port fails.
    fn serve(&mut self, port: &mut Port) -> io::Result<()> {
        self.report(port, &self.here(), 0)?;
        loop {
            self.wait(port)?;
            let let_go = self.stunned.tick();
            if let_go > 0 {
                eprintln!("whimbrel-guest: the host is silent, {let_go} processes go on");
            }
            match port.read()? {
                Heard::Frames(frames) => {
                    for frame in frames {
                        self.obey(port, &frame)?;
                    }
                }
                Heard::HungUp => self.wait_for_host(port)?,
            }
            while let Some((id, ask)) = self.desk.next_wish() {
                if let Err(error) = self.report(port, &Report::Ask(ask), id) {
                    self.desk.answer(id, &Wish::Failed(format!("the host cannot be asked: {error}")));
                }
            }
        }
    }

    fn here(&self) -> Report {
        Report::Ready { features: FEATURES, version: env!("CARGO_PKG_VERSION").to_owned() }
    }

    /// Waits for the port, for somebody inside, or for a lease to end.
    fn wait(&self, port: &Port) -> io::Result<()> {
        let timeout = self.stunned.next_tick().and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)];
        fds.extend(self.desk.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Nobody is at the other end: nobody may hold anything. A port that hangs up is always ready, so this
    /// sleeps instead.
    fn wait_for_host(&mut self, port: &Port) -> io::Result<()> {
        let released = self.stunned.release();
        if released > 0 {
            eprintln!("whimbrel-guest: the host is gone, {released} processes go on");
        }
        loop {
            let mut fds = [PollFd::from_borrowed_fd(port.as_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default()))?;
            if !fds[0].revents().contains(PollFlags::HUP) {
                return self.report(port, &self.here(), 0);
            }
            self.stunned.tick();
            self.desk.refuse_all("the host is not there");
            thread::sleep(LOOK_FOR_HOST);
        }
    }

    fn report(&self, port: &Port, word: &Report, id: u32) -> io::Result<()> {
        match port.write(&word.to_frame(self.session, id)) {
            // Whoever comes next says hello.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(()),
            outcome => outcome,
        }
    }

    fn obey(&mut self, port: &Port, frame: &Frame) -> io::Result<()> {
        let order = match Command::of(frame) {
            Ok(order) => order,
            Err(error) => return self.report(port, &Report::Failed { reason: error.to_string() }, frame.id),
        };
        // What was meant for another start of this program, or for another guest, is not obeyed.
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
                self.desk.host_is(&host);
                Some(self.here())
            }
            Command::FreeCaches if !self.config.free_caches => Some(cannot("the settings forbid it")),
            Command::FreeCaches => Some(match memory::drop_caches() {
                Ok((before, after)) => Report::Freed { before, after },
                Err(error) => cannot(&error.to_string()),
            }),
            Command::Stun { lease_ms, limit, spare, each, sample } => {
                Some(self.stun(&sample, lease_ms, each, Bounds { limit, spare }))
            }
            Command::ExtendStun { lease_ms } => {
                self.stunned.extend(lease(lease_ms), self.config.stun_max);
                None
            }
            Command::Release => Some(Report::Released { count: self.stunned.release() }),
            Command::Announce if !self.config.announce => Some(cannot("the settings forbid it")),
            Command::Announce => Some(match announce::now() {
                Ok(frames) => Report::Announced { frames },
                Err(error) => cannot(&error.to_string()),
            }),
            Command::RequestResult(outcome) => {
                self.desk.answer(id, &outcome.into());
                None
            }
        }
    }

    fn stun(&mut self, sample: &[u32], lease_ms: u32, each: u32, bounds: Bounds) -> Report {
        let Some(layout) = self.machine.filter(|_| self.config.stun) else {
            return cannot(if self.config.stun { "nobody said hello" } else { "the settings forbid it" });
        };
        let choice = self.stunned.hold(&Sample::new(sample), layout, each, bounds, &self.config);
        self.stunned.extend(lease(lease_ms), self.config.stun_max);
        Report::Stunned { held: choice.hold, spared: choice.spare }
    }
}

fn lease(ms: u32) -> Duration {
    Duration::from_millis(u64::from(ms)).min(LEASE_MAX)
}

fn cannot(reason: &str) -> Report {
    Report::Failed { reason: reason.to_owned() }
}
