//! One NBD connection, from the greeting to its end.

use crate::execution::Executor;
use crate::handshake::{Agreed, Export, Handshake, HandshakeError, Progress};
use crate::input::Input;
use crate::output::Output;
use crate::transmission::{self, TransmissionError};
use std::io::{self, Write};
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

/// Serves one client until it disconnects or violates the protocol.
pub(crate) fn serve(
    socket: &UnixStream,
    device: Arc<dyn Device>,
    export: &Export,
    handshake_timeout: Duration,
    workers: usize,
) -> Result<(), ConnectionError> {
    let mut input = Input::new(socket);
    let Some(agreed) = shake_hands(socket, &mut input, export, Instant::now() + handshake_timeout)? else {
        return Ok(());
    };
    // A client may be idle, or stopped in a debugger, for any time.
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    // Without the privilege to exceed the system's limit, that limit applies.
    if rustix::net::sockopt::set_socket_send_buffer_size_force(socket, SEND_BUFFER).is_err() {
        rustix::net::sockopt::set_socket_send_buffer_size(socket, SEND_BUFFER).map_err(io::Error::from)?;
    }
    let session = Executor { device, export, agreed, output: Output::new(socket) };
    Ok(transmission::run(&session, input, workers)?)
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
