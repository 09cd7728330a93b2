//! Virtio port to the host: finds and opens it, and reads and writes without blocking.

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
};
use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    time::Duration,
};
use whimbrel_guest_protocol::{
    PORT,
    frame::{Decoder, Frame},
};

/// Time that the host may take to accept a frame. A host that listens reads at once.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
const READ_SIZE: usize = 16 << 10;

pub(crate) struct Port {
    fd: OwnedFd,
    decoder: Decoder,
}

#[derive(Debug)]
pub(crate) enum PortInput {
    /// Frames of the host, maybe none.
    Frames(Vec<Frame>),
    /// Hang-up: the other end is closed.
    HungUp,
}

impl Port {
    /// Opens the port; none if there is no such port.
    pub(crate) fn open() -> io::Result<Option<Self>> {
        let Some(device) = device()? else { return Ok(None) };
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open(device, flags, Mode::empty())?;
        Ok(Some(Self { fd, decoder: Decoder::default() }))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn read(&mut self) -> io::Result<PortInput> {
        let mut frames = Vec::new();
        let mut piece = [0; READ_SIZE];
        loop {
            match rustix::io::read(&self.fd, &mut piece) {
                // If the other end is closed, a read returns end of file at once.
                Ok(0) if frames.is_empty() => return Ok(PortInput::HungUp),
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(PortInput::Frames(frames)),
                Ok(len) => {
                    self.decoder.push(&piece[..len]);
                    frames.extend(std::iter::from_fn(|| self.decoder.next_frame()));
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends a frame. A frame that the host does not accept is dropped: a later reader sends a new hello.
    pub(crate) fn write(&self, frame: &Frame) -> io::Result<()> {
        let bytes = frame.encode();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match rustix::io::write(&self.fd, rest) {
                Ok(len) => rest = &rest[len..],
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.wait_writable()?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn wait_writable(&self) -> io::Result<()> {
        let timeout = Timespec::try_from(WRITE_TIMEOUT).map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        poll(&mut fds, Some(&timeout))?;
        let writable = fds[0].revents().contains(PollFlags::OUT);
        if writable { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
    }
}

/// Device of the port, found by the name that the host gave it.
fn device() -> io::Result<Option<PathBuf>> {
    let ports = match fs::read_dir("/sys/class/virtio-ports") {
        Ok(ports) => ports,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let ours = ports
        .flatten()
        .find(|port| fs::read_to_string(port.path().join("name")).is_ok_and(|name| name.trim() == PORT));
    Ok(ours.map(|port| PathBuf::from("/dev").join(port.file_name())))
}
