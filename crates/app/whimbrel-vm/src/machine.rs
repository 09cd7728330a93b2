//! Parts of a running machine that pass to another process: its QEMU, its memory, its disks, and what was
//! written to them.

use crate::{LazyMemory, PassablePort};
use std::{
    fs::File,
    io,
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::Arc,
    time::Duration,
};
use whimbrel_block::{
    BlockError, Cow, DiskPages, FileDevice, OverlayDir, OverlayError, OverlayFiles, OverlayState,
    TrackedDevice,
};
use whimbrel_capture::DirtyLog;
use whimbrel_core::Digest;
use whimbrel_memory::{AttachError, Attachment, StartError};
use whimbrel_nbd::{ConnectionState, Options, Server, ServerParts, serve_parts};
use whimbrel_net::NetError;
use whimbrel_qemu::{Console, Qemu};

/// Parts of a machine that runs under this process.
#[derive(Debug)]
pub struct MachineParts {
    /// QEMU under control.
    pub qemu: Qemu,
    /// Attachment to its memory.
    pub memory: Attachment,
    /// Disks, in the order of their device ids.
    pub disks: Vec<Disk>,
    /// Dirty pages of the memory, then of each disk.
    pub dirty_logs: Vec<DirtyLog>,
    /// Network ports, in the order of their devices.
    pub ports: Vec<PassablePort>,
    /// Serial console, if this process has it.
    pub console: Option<Console>,
    /// Content of memory that is filled on demand.
    pub lazy: Option<LazyMemory>,
}

/// Disk of a machine: an overlay over an image file, served to QEMU.
#[derive(Debug)]
pub struct Disk {
    base: File,
    base_id: Digest,
    cow: Arc<Cow>,
    device: Arc<TrackedDevice>,
    serving: Serving,
}

#[derive(Debug)]
enum Serving {
    Running(Server),
    /// Nobody serves it here.
    Suspended(ServerParts),
    /// Serving failed; clients cannot connect.
    Broken,
}

/// Cause of a part of a machine that cannot be opened or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartError {
    /// The overlay cannot be opened.
    #[error("cannot open a disk")]
    Overlay(#[from] OverlayError),
    /// A write or sync of the disk has failed.
    #[error("cannot pass on a disk")]
    Block(#[from] BlockError),
    /// A file or socket of the disk cannot be used.
    #[error("cannot serve a disk")]
    Serve(#[source] io::Error),
    /// The memory cannot be read.
    #[error("cannot read the memory")]
    Memory(#[from] AttachError),
    /// A disk or network port is not served.
    #[error("a disk or network port is not served")]
    NotServed,
    /// A network port cannot be opened, or is protected.
    #[error("cannot use a network port")]
    Port(#[from] NetError),
    /// A network port leads through a tunnel.
    #[error("a network port leads through a tunnel")]
    Tunnel,
    /// The memory cannot be filled on demand.
    #[error("cannot fill the memory")]
    Pager(#[from] StartError),
    /// The content of the memory cannot be opened.
    #[error("cannot open the content of the memory")]
    Content(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The console cannot be read.
    #[error("cannot use the console")]
    Console(#[source] io::Error),
}

/// Open files of a disk, with which another process goes on.
pub(crate) struct DiskFiles {
    pub(crate) base: File,
    pub(crate) overlay: OverlayFiles,
    pub(crate) listener: UnixListener,
}

impl MachineParts {
    /// A machine without ports and console, whose dirty pages nobody follows yet.
    pub fn new(qemu: Qemu, memory: Attachment, disks: Vec<Disk>) -> Result<Self, PartError> {
        let dirty_logs = dirty_logs(&memory, &disks)?;
        Ok(Self { qemu, memory, disks, dirty_logs, ports: Vec::new(), console: None, lazy: None })
    }
}

/// Dirty logs without consumers.
pub(crate) fn dirty_logs(memory: &Attachment, disks: &[Disk]) -> Result<Vec<DirtyLog>, PartError> {
    let mut logs = vec![DirtyLog::new(Box::new(memory.ram()?))];
    for (index, disk) in disks.iter().enumerate() {
        let pages = DiskPages { name: format!("disk{index}"), device: disk.device.clone() };
        logs.push(DirtyLog::new(Box::new(pages)));
    }
    Ok(logs)
}

impl Disk {
    /// Creates the overlay of a disk over the image `base`, and serves it on `listener`.
    pub fn create(
        place: &OverlayDir,
        base: File,
        base_id: Digest,
        listener: UnixListener,
    ) -> Result<Self, PartError> {
        let device = base.try_clone().and_then(|base| FileDevice::new(base, true));
        let cow = Cow::create(place, Arc::new(device.map_err(PartError::Serve)?), base_id)?;
        let parts = ServerParts { listener, connections: Vec::new() };
        let mut disk = Self::over(base, base_id, cow, parts);
        disk.serve()?;
        Ok(disk)
    }

    fn over(base: File, base_id: Digest, cow: Cow, parts: ServerParts) -> Self {
        let cow = Arc::new(cow);
        let device = Arc::new(TrackedDevice::new(cow.clone()));
        Self { base, base_id, cow, device, serving: Serving::Suspended(parts) }
    }

    /// Disk from the files of another process, and the state if that process told it. Nobody serves it yet.
    pub(crate) fn from_files(
        files: DiskFiles,
        base_id: Digest,
        state: Option<&OverlayState>,
        connections: Vec<(UnixStream, ConnectionState)>,
    ) -> Result<Self, PartError> {
        let DiskFiles { base, overlay, listener } = files;
        let device = base.try_clone().and_then(|base| FileDevice::new(base, true));
        let device = Arc::new(device.map_err(PartError::Serve)?);
        let cow = Cow::from_parts(overlay, state, device, base_id, None)?;
        Ok(Self::over(base, base_id, cow, ServerParts { listener, connections }))
    }

    /// Copies of the open files.
    pub(crate) fn files(&self) -> io::Result<DiskFiles> {
        let listener = match &self.serving {
            Serving::Running(server) => server.listener()?,
            Serving::Suspended(parts) => parts.listener.try_clone()?,
            Serving::Broken => return Err(io::ErrorKind::NotConnected.into()),
        };
        Ok(DiskFiles { base: self.base.try_clone()?, overlay: self.cow.files()?, listener })
    }

    pub(crate) fn base_id(&self) -> Digest {
        self.base_id
    }

    /// Content as the guest sees it, and which pages were written.
    pub fn device(&self) -> &Arc<TrackedDevice> {
        &self.device
    }

    /// Serves the disk, if it is suspended.
    pub(crate) fn serve(&mut self) -> Result<(), PartError> {
        self.serving = match std::mem::replace(&mut self.serving, Serving::Broken) {
            Serving::Suspended(parts) => {
                let server = serve_parts(self.device.clone(), parts, Options::default());
                Serving::Running(server.map_err(PartError::Serve)?)
            }
            other => other,
        };
        Ok(())
    }

    /// Lets the threads of the disk end, without waiting for them.
    pub(crate) fn begin_suspend(&self) {
        if let Serving::Running(server) = &self.serving {
            server.begin_suspend();
        }
    }

    /// Stops serving the disk; connections stay open.
    pub(crate) fn suspend(&mut self, patience: Duration) -> Result<(), PartError> {
        self.serving = match std::mem::replace(&mut self.serving, Serving::Broken) {
            Serving::Running(server) => {
                Serving::Suspended(server.suspend(patience).map_err(PartError::Serve)?)
            }
            other => other,
        };
        Ok(())
    }

    /// What another process needs beside the files of a suspended disk.
    pub(crate) fn state(&self) -> Result<OverlayState, PartError> {
        Ok(self.cow.state()?)
    }

    /// Copies of the connections of a suspended disk.
    pub(crate) fn connections(&self) -> Result<ConnectionCopies, PartError> {
        let Serving::Suspended(parts) = &self.serving else { return Err(PartError::NotServed) };
        let copy = |(socket, state): &(UnixStream, ConnectionState)| {
            Ok((OwnedFd::from(socket.try_clone()?), state.clone()))
        };
        parts.connections.iter().map(copy).collect::<io::Result<_>>().map_err(PartError::Serve)
    }

    /// Ends the connections of a suspended disk, because another process may have used them: QEMU connects
    /// again and sends again what was not answered.
    pub(crate) fn disconnect(&mut self) {
        if let Serving::Suspended(parts) = &mut self.serving {
            for (socket, _) in parts.connections.drain(..) {
                // Fails only if QEMU closed it first.
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}

/// Sockets of connections, and where each was left.
pub(crate) type ConnectionCopies = Vec<(OwnedFd, ConnectionState)>;
