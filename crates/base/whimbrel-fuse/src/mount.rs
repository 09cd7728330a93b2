//! Mounting: options, worker threads and unmounting.
//!
//! A process that dies leaves a mount that answers `ENOTCONN`; the next mount on the directory removes it
//! first.

use crate::{FileSystem, adapter::Adapter, connection::Connection};
use rustix::{
    fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx},
    io::Errno as Os,
    mount::{UnmountFlags, unmount},
};
use std::{
    ffi::OsStr,
    fs, io,
    mem::ManuallyDrop,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Time for the threads of an unmounted file system to end, before the connection is aborted for everybody.
const THREADS_END_TIMEOUT: Duration = Duration::from_millis(500);
/// Time to wait for the threads after an abort. A method that blocks may take longer.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// How a file system is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// Source that `mount` shows.
    pub source: String,
    /// Type that `mount` shows after `fuse.`.
    pub kind: String,
    /// Whether the mount is read-only.
    pub read_only: bool,
    /// Whether users other than the mounting one have access; the kernel then checks modes and owners.
    pub allow_others: bool,
    /// Number of threads that read requests. Each takes as much memory as one write. Beyond half of them,
    /// requests are answered by other threads, so that many may block at once.
    pub threads: usize,
    /// Largest write in bytes, at most 1 MiB unless `fs.fuse.max_pages_limit` is raised.
    pub max_write: u32,
    /// Bytes that the kernel reads ahead in cached files.
    pub read_ahead: u32,
    /// Whether the kernel combines small writes to cached files.
    pub writeback: bool,
    /// Whether device nodes of the file system may be opened.
    pub devices: bool,
    /// Whether programs of the file system run with the rights of their owner or group if their mode says so.
    pub set_user_id: bool,
    /// Whether the kernel checks POSIX access lists, which it reads as extended attributes.
    pub access_lists: bool,
    /// Whether files opened without page cache may be mapped shared; otherwise `mmap` fails with `ENODEV`.
    pub shared_maps: bool,
    /// Whether locks are those of the file system; otherwise they apply among the programs of the mount.
    pub locks: bool,
}

impl MountOptions {
    /// Default options with this source and type.
    pub fn new(source: impl Into<String>, kind: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            kind: kind.into(),
            read_only: false,
            allow_others: false,
            threads: 16,
            max_write: 1 << 20,
            read_ahead: 1 << 20,
            writeback: false,
            devices: false,
            set_user_id: false,
            access_lists: false,
            shared_maps: true,
            locks: false,
        }
    }

    fn config(&self) -> fuser::Config {
        use fuser::MountOption as M;
        let mut config = fuser::Config::default();
        // A comma would start another option.
        let plain = |text: &str| text.replace(',', "_");
        config.mount_options = vec![M::FSName(plain(&self.source)), M::Subtype(plain(&self.kind))];
        config.mount_options.push(if self.devices { M::Dev } else { M::NoDev });
        config.mount_options.push(if self.set_user_id { M::Suid } else { M::NoSuid });
        if self.read_only {
            config.mount_options.push(M::RO);
        }
        if self.allow_others {
            config.mount_options.push(M::DefaultPermissions);
            config.acl = fuser::SessionACL::All;
        }
        config.n_threads = Some(self.threads.max(1));
        config.clone_fd = true;
        config
    }
}

/// Reasons why a file system could not be mounted or unmounted.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The directory cannot be mounted on.
    #[error("cannot mount on {}", path.display())]
    Directory {
        /// Directory to mount on.
        path: PathBuf,
        /// Cause reported by the system.
        source: io::Error,
    },
    /// The kernel, or `fusermount3` for users other than root, refused.
    #[error("cannot mount a FUSE file system on {}", path.display())]
    Mount {
        /// Directory to mount on.
        path: PathBuf,
        /// Cause reported by the kernel or `fusermount3`.
        source: io::Error,
    },
    /// The mount could not be undone.
    #[error("cannot unmount {}", path.display())]
    Unmount {
        /// Directory of the mount.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
}

/// A mounted file system. Dropping it unmounts, even while files are open or another namespace has a copy of
/// the mount: later calls on those fail.
#[derive(Debug)]
pub struct Mounted {
    path: PathBuf,
    connection: Option<Connection>,
    session: Option<fuser::BackgroundSession>,
}

impl Mounted {
    /// Mounts `files` on the existing directory `path`. The mount answers when this returns.
    pub fn new(files: impl FileSystem, path: &Path, options: &MountOptions) -> Result<Self, MountError> {
        let unusable = |source| MountError::Directory { path: path.to_owned(), source };
        clear_stale(path).map_err(unusable)?;
        let path = path.canonicalize().map_err(unusable)?;
        let adapter = Adapter::new(files, options);
        let session = fuser::spawn_mount(adapter, &path, &options.config())
            .map_err(|source| MountError::Mount { path: path.clone(), source })?;
        let connection = Connection::of(&path)
            .inspect_err(|error| tracing::debug!(%error, "cannot open the connection of the mount"))
            .ok();
        let mounted = Self { path, connection, session: Some(session) };
        if options.read_ahead > 0 {
            mounted.read_ahead(options.read_ahead);
        }
        Ok(mounted)
    }

    /// Directory of the mount.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A handle to invalidate what the kernel has cached.
    pub fn notifier(&self) -> Option<Notifier> {
        self.session.as_ref().map(|session| Notifier { inner: session.notifier() })
    }

    /// Whether the mount has ended, for instance because somebody else unmounted it.
    pub fn is_gone(&self) -> bool {
        self.session.as_ref().is_none_or(|session| session.guard.is_finished())
    }

    /// Unmounts and waits until the last request is answered. A mount with open files stays and is reported
    /// as busy. If somebody else has unmounted it, the path is left alone: another mount may be there by now.
    pub fn unmount(&mut self) -> Result<(), MountError> {
        if self.is_gone() {
            self.end();
            return Ok(());
        }
        match unmount(&self.path, UnmountFlags::empty()) {
            Ok(()) | Err(Os::INVAL) => {
                self.end();
                Ok(())
            }
            Err(error) => Err(MountError::Unmount { path: self.path.clone(), source: error.into() }),
        }
    }

    /// Sets the read-ahead of the mount's device: FUSE itself negotiates 128 KiB at most.
    fn read_ahead(&self, bytes: u32) {
        let Ok(meta) = fs::metadata(&self.path) else { return };
        let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
        let setting = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
        if let Err(error) = fs::write(&setting, (bytes / 1024).to_string()) {
            tracing::debug!(%error, setting, "cannot set the read-ahead of the mount");
        }
    }

    fn ends_within(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while !self.is_gone() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(1));
        }
        self.is_gone()
    }

    /// Aborts the connection; true if no request can arrive any more.
    fn abort_connection(&self) -> bool {
        let aborted = self.connection.as_ref().map(Connection::abort);
        if let Some(Err(error)) = &aborted {
            tracing::debug!(%error, path = %self.path.display(), "cannot abort the connection of the mount");
        }
        matches!(aborted, Some(Ok(())))
    }

    fn end(&mut self) {
        if !self.ends_within(THREADS_END_TIMEOUT) {
            self.abort_connection();
        }
        let next = self.is_gone() && is_mount_point(&self.path);
        let Some(session) = self.session.take() else { return };
        if next {
            // fuser would unmount the path, whatever is mounted there by now. So it gets no chance, which
            // costs a descriptor of this process.
            let _left = ManuallyDrop::new(session);
            return;
        }
        // `umount_and_join` finds nothing left to unmount, or detaches a busy mount.
        if let Err(error) = session.umount_and_join() {
            tracing::debug!(%error, path = %self.path.display(), "the mount ended with an error");
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.session.is_none() {
            return;
        }
        if !self.is_gone() {
            let busy = unmount(&self.path, UnmountFlags::empty()).is_err();
            if busy {
                // Open files would keep a detached mount alive until they are closed.
                let _ = unmount(&self.path, UnmountFlags::DETACH);
                if !self.abort_connection() || !self.ends_within(ABORT_TIMEOUT) {
                    // The remaining threads end by themselves.
                    self.session.take();
                    return;
                }
            }
        }
        self.end();
    }
}

/// Whether something is mounted at the path; it is asked nothing, because it may not answer.
fn is_mount_point(path: &Path) -> bool {
    let asked = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
    asked.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Invalidates what the kernel has cached.
#[derive(Debug, Clone)]
pub struct Notifier {
    inner: fuser::Notifier,
}

impl Notifier {
    /// Invalidates cached bytes (`length` 0: to the end) and attributes of `inode`.
    pub fn invalidate_inode(&self, inode: u64, offset: u64, length: u64) -> io::Result<()> {
        let (offset, length) =
            (i64::try_from(offset).unwrap_or(i64::MAX), i64::try_from(length).unwrap_or(0));
        ignore_not_found(self.inner.inval_inode(fuser::INodeNo(inode), offset, length))
    }

    /// Invalidates `name` in `parent`. Must not be called from a file system method on `parent`: the kernel
    /// would deadlock with itself.
    pub fn invalidate_entry(&self, parent: u64, name: &OsStr) -> io::Result<()> {
        ignore_not_found(self.inner.inval_entry(fuser::INodeNo(parent), name))
    }
}

/// Ignores `ENOENT`: the kernel has not cached what was invalidated.
fn ignore_not_found(told: io::Result<()>) -> io::Result<()> {
    match told {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Removes the dead mount that a killed process left on `path`, if any.
pub fn clear_stale(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            unmount(path, UnmountFlags::DETACH)?;
            Ok(())
        }
        Err(error) => Err(error),
        Ok(meta) if !meta.is_dir() => Err(io::ErrorKind::NotADirectory.into()),
        Ok(_) => Ok(()),
    }
}
