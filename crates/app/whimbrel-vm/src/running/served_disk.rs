//! NBD server of one disk of a machine. Its content is set when the machine is known.

use super::RunningError;
use std::{
    io,
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use whimbrel_block::{BeforeSet, SwappableDevice};
use whimbrel_nbd::{ConnectionState, Options, Server, ServerParts, serve, serve_parts};
use whimbrel_qemu::MachineUser;

/// Sockets of connections, and where each was left.
type ConnectionCopies = Vec<(OwnedFd, ConnectionState)>;

/// Disk that QEMU reads and writes.
pub(crate) struct ServedDisk {
    device: Arc<SwappableDevice>,
    socket: PathBuf,
    serving: Serving,
}

enum Serving {
    Running(Server),
    /// Nobody serves it here.
    Suspended(ServerParts),
    /// Serving failed; clients cannot connect.
    Broken,
}

impl ServedDisk {
    /// Serves a disk of `size` bytes on `socket`, for this user or that of a QEMU.
    pub(super) fn serve(
        socket: PathBuf,
        user: Option<MachineUser>,
        (size, before): (u64, BeforeSet),
    ) -> Result<Self, RunningError> {
        let device = Arc::new(SwappableDevice::new(size, before));
        let server = whimbrel_nbd::bind(&socket).and_then(|listener| {
            user.map_or(Ok(()), |user| user.give(&socket))?;
            serve(device.clone(), listener, Options::default())
        });
        let server = server.map_err(|source| RunningError::io("serve a disk on", &socket, source))?;
        Ok(Self { device, socket, serving: Serving::Running(server) })
    }

    /// Disk of `size` bytes that another process serves on `listener`, until this one does.
    pub(super) fn passed(socket: PathBuf, size: u64, listener: UnixListener) -> Self {
        let device = Arc::new(SwappableDevice::new(size, BeforeSet::Wait));
        let parts = ServerParts { listener, connections: Vec::new() };
        Self { device, socket, serving: Serving::Suspended(parts) }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn device(&self) -> &Arc<SwappableDevice> {
        &self.device
    }

    /// Copy of the socket on which clients connect.
    pub(crate) fn listener(&self) -> io::Result<UnixListener> {
        match &self.serving {
            Serving::Running(server) => server.listener(),
            Serving::Suspended(parts) => parts.listener.try_clone(),
            Serving::Broken => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Lets the threads of the server end, without waiting for them.
    pub(crate) fn begin_suspend(&self) {
        if let Serving::Running(server) = &self.serving {
            server.begin_suspend();
        }
    }

    /// Stops serving; connections stay open.
    pub(crate) fn suspend(&mut self, patience: Duration) -> Result<(), RunningError> {
        self.serving = match std::mem::replace(&mut self.serving, Serving::Broken) {
            Serving::Running(server) => Serving::Suspended(server.suspend(patience).map_err(self.failed())?),
            other => other,
        };
        Ok(())
    }

    /// Copies of the connections of a suspended server.
    pub(crate) fn connections(&self) -> Result<ConnectionCopies, RunningError> {
        let Serving::Suspended(parts) = &self.serving else {
            return Err(self.failed()(io::ErrorKind::NotConnected.into()));
        };
        let copy = |(socket, state): &(UnixStream, ConnectionState)| {
            Ok((OwnedFd::from(socket.try_clone()?), state.clone()))
        };
        parts.connections.iter().map(copy).collect::<io::Result<_>>().map_err(self.failed())
    }

    /// Goes on with connections of another process once it serves.
    pub(crate) fn take_connections(&mut self, connections: Vec<(UnixStream, ConnectionState)>) {
        if let Serving::Suspended(parts) = &mut self.serving {
            parts.connections = connections;
        }
    }

    /// Ends the connections of a suspended server, because another process may have used them: QEMU connects
    /// again and sends again what was not answered.
    pub(crate) fn disconnect(&mut self) {
        if let Serving::Suspended(parts) = &mut self.serving {
            for (socket, _) in parts.connections.drain(..) {
                // Fails only if QEMU closed it first.
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }

    /// Serves the disk, if the server is suspended.
    pub(crate) fn resume(&mut self) -> Result<(), RunningError> {
        self.serving = match std::mem::replace(&mut self.serving, Serving::Broken) {
            Serving::Suspended(parts) => {
                let server = serve_parts(self.device.clone(), parts, Options::default());
                Serving::Running(server.map_err(self.failed())?)
            }
            other => other,
        };
        Ok(())
    }

    fn failed(&self) -> impl Fn(io::Error) -> RunningError + use<> {
        let socket = self.socket.clone();
        move |source| RunningError::io("serve a disk on", &socket, source)
    }
}
