//! Process at the other end of a channel. Its end is known for certain, which the end of a connection is
//! not.

use super::{ChannelError, failed};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::sockopt::socket_peercred,
    process::{PidfdFlags, Signal, geteuid, pidfd_open, pidfd_send_signal},
};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

/// Process at the other end of a channel.
#[derive(Debug)]
pub struct Peer {
    pid: i32,
    pidfd: OwnedFd,
}

impl Peer {
    /// Checks who is at the other end of `socket`: the process that connected, or the one that called
    /// `listen`.
    pub(super) fn of(socket: &OwnedFd) -> Result<Self, ChannelError> {
        let who = socket_peercred(socket).map_err(|errno| failed("identify")(errno.into()))?;
        let uid = who.uid.as_raw();
        if uid != geteuid().as_raw() && uid != 0 {
            return Err(ChannelError::Stranger { uid });
        }
        let pidfd = pidfd_open(who.pid, PidfdFlags::empty());
        let pidfd = pidfd.map_err(|errno| failed("identify")(errno.into()))?;
        // As long as it has its end open it lives, and its number was not another's a moment ago.
        let mut events = [PollFd::new(socket, PollFlags::empty())];
        let now = poll(&mut events, Some(&Timespec::default()));
        if now.is_err() || events[0].revents().contains(PollFlags::HUP) {
            return Err(ChannelError::Ended);
        }
        Ok(Self { pid: who.pid.as_raw_nonzero().get(), pidfd })
    }

    /// Number of the process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Whether the process has ended, or does within `patience`.
    pub fn has_ended(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut events = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match poll(&mut events, Timespec::try_from(left).ok().as_ref()) {
                Ok(ready) => return ready > 0,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    tracing::warn!(%errno, "cannot poll a pidfd");
                    return false;
                }
            }
        }
    }

    /// Ends the process. That it has ended already is no error.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}
