//! One NBD connection, from the greeting to its end, or from where another server left it.

use crate::execution::Executor;
use crate::handshake::{Agreed, Export, Handshake, HandshakeError, Progress};
use crate::input::Input;
use crate::output::Output;
use crate::request::REQUEST_SIZE;
use crate::transmission::{self, TransmissionError};
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use whimbrel_block::Device;

/// Kernel buffer for replies: several large reads in flight without a wake-up for each part. The kernel
/// bounds it.
const SEND_BUFFER: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    #[error("the handshake failed")]
    Handshake(#[from] HandshakeError),
    #[error("the handshake timed out")]
    TooSlow,
    #[error("the connection to the client failed")]
    Socket(#[from] io::Error),
    #[error("the transmission failed")]
    Transmission(#[from] TransmissionError),
}

/// Place in a connection at which nobody serves it and no request is open, in plain types: another server
/// goes on there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionState {
    agreed: Agreed,
    /// Bytes received of the next request.
    rest: Vec<u8>,
}

impl ConnectionState {
    /// Whether the bytes could have been left by a server.
    pub(crate) fn is_valid(&self) -> bool {
        self.rest.len() < REQUEST_SIZE
    }
}

/// What a connection is served with.
pub(crate) struct Service<'a> {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) export: &'a Export,
    pub(crate) handshake_timeout: Duration,
    pub(crate) workers: usize,
    /// Readable once connections have to be left.
    pub(crate) stop: BorrowedFd<'a>,
}

impl Service<'_> {
    /// Negotiates with one client; none if it left in an orderly way.
    pub(crate) fn negotiate(&self, socket: &UnixStream) -> Result<Option<ConnectionState>, ConnectionError> {
        let mut input = Input::new(socket);
        let deadline = Instant::now() + self.handshake_timeout;
        let Some(agreed) = shake_hands(socket, &mut input, self.export, deadline)? else {
            return Ok(None);
        };
        // A client may be idle, or stopped in a debugger, for any time.
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)?;
        // Without the privilege to exceed the system's limit, that limit applies.
        if rustix::net::sockopt::set_socket_send_buffer_size_force(socket, SEND_BUFFER).is_err() {
            rustix::net::sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER)
                .map_err(io::Error::from)?;
        }
        Ok(Some(ConnectionState { agreed, rest: input.available().to_vec() }))
    }

    /// Serves one client until it disconnects or violates the protocol. If the connection has to be left,
    /// returns where.
    pub(crate) fn serve(
        &self,
        socket: &UnixStream,
        state: &ConnectionState,
    ) -> Result<Option<ConnectionState>, ConnectionError> {
        let agreed = state.agreed;
        let input = Input::begun(socket, &state.rest);
        let (device, output) = (self.device.clone(), Output::new(socket));
        let session = Executor { device, export: self.export, agreed, output };
        let rest = transmission::run(&session, input, self.workers, self.stop)?;
        Ok(rest.map(|rest| ConnectionState { agreed, rest }))
    }
}

/// Runs the handshake; none if the client left in an orderly way.
fn shake_hands(
    socket: &UnixStream,
    input: &mut Input<'_>,
    export: &Export,
    deadline: Instant,
) -> Result<Option<Agreed>, ConnectionError> {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(export, &mut out);
    loop {
        let progress = handshake.step(input.available(), &mut out)?;
        // One deadline for all of it, so that a client that sends a byte now and then gains nothing.
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectionError::TooSlow);
        }
        socket.set_write_timeout(Some(left))?;
        (&*socket).write_all(&out).map_err(too_slow)?;
        out.clear();
        match progress {
            Progress::Used(count) => input.consume(count),
            Progress::Transmission(count, agreed) => {
                input.consume(count);
                return Ok(Some(agreed));
            }
            Progress::Abort => return Ok(None),
            Progress::More => {
                socket.set_read_timeout(Some(left))?;
                if !input.receive().map_err(too_slow)? {
                    return Ok(None);
                }
            }
        }
    }
}

fn too_slow(error: io::Error) -> ConnectionError {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ConnectionError::TooSlow,
        _ => ConnectionError::Socket(error),
    }
}
