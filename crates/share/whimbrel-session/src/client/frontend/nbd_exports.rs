//! NBD exports: files of a session, each served on a unix socket that only this user may open.
//!
//! An export lasts until it or the session is ended. Ending it disconnects its clients after their pending
//! requests, and then closes the file. Unflushed writes of a client are as safe as unsynced writes of a
//! program.

use super::block_device::FileDisk;
use crate::client::session::Session;
use crate::proto::RelPath;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use whimbrel_block::Device;
use whimbrel_nbd::{Options, Server, bind_private, serve};

/// Most exports of one session: each has its own thread and one for each client.
const MAX_EXPORTS: usize = 64;

/// Status of one export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportStatus {
    /// Path of the file in the session's directory.
    pub file: String,
    /// Socket of the export.
    pub socket: PathBuf,
    /// Size in bytes.
    pub size: u64,
    /// Whether the file is read-only.
    pub read_only: bool,
    /// Number of connected clients.
    pub clients: usize,
}

struct Export {
    file: String,
    socket: PathBuf,
    disk: Arc<FileDisk>,
    server: Server,
}

pub(in crate::client) struct NbdExports {
    session: Session,
    served: Mutex<Vec<Export>>,
}

impl NbdExports {
    pub(in crate::client) fn new(session: Session) -> Self {
        Self { session, served: Mutex::default() }
    }

    fn served(&self) -> MutexGuard<'_, Vec<Export>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves `file` at `socket`; the error is a text.
    pub(in crate::client) fn start(&self, file: &str, socket: &Path) -> Result<(), String> {
        let path = RelPath::new(file.as_bytes()).map_err(|error| error.to_string())?;
        let disk = FileDisk::open(&self.session.core, &path)
            .map_err(|errno| format!("cannot open {file:?}: {errno}"))?;
        let disk = Arc::new(disk);
        // Hold the lock while the socket is made, so that of two requests for one file the second fails.
        let mut served = self.served();
        if served.len() >= MAX_EXPORTS || served.iter().any(|export| export.file == file) {
            return Err(format!("{file:?} is already served, or {MAX_EXPORTS} files are"));
        }
        let unusable = |error| format!("cannot serve at {}: {error}", socket.display());
        let listener = bind_private(socket).map_err(unusable)?;
        let server = serve(disk.clone(), listener, Options::default()).map_err(unusable)?;
        served.push(Export { file: file.to_owned(), socket: socket.to_owned(), disk, server });
        Ok(())
    }

    /// Ends the export of `file`; the error is a text.
    pub(in crate::client) fn end(&self, file: &str) -> Result<(), String> {
        let mut served = self.served();
        let at = served.iter().position(|export| export.file == file);
        let export = served.remove(at.ok_or_else(|| format!("{file:?} is not served"))?);
        drop(served);
        export.end()
    }

    pub(in crate::client) fn end_all(&self) {
        let all = std::mem::take(&mut *self.served());
        for export in all {
            if let Err(error) = export.end() {
                tracing::warn!("{error}");
            }
        }
    }

    pub(in crate::client) fn status(&self) -> Vec<ExportStatus> {
        let status = |export: &Export| ExportStatus {
            file: export.file.clone(),
            socket: export.socket.clone(),
            size: export.disk.size(),
            read_only: export.disk.is_read_only(),
            clients: export.server.connections(),
        };
        self.served().iter().map(status).collect()
    }
}

impl Export {
    fn end(self) -> Result<(), String> {
        // No new client finds the socket, which may be gone already.
        let _ = fs::remove_file(&self.socket);
        self.server.stop();
        self.disk.close().map_err(|errno| format!("{:?} is not written back: {errno}", self.file))
    }
}
