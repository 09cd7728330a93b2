//! Adapter from the [`FileSystem`] trait to the `fuser` package: one short function for each FUSE request.

use crate::{
    Access, Attributes, Caller, Entry, Errno, FileKind, FileSystem, MountOptions, Result, SetAttributes,
    SetTime,
};
use fuser::{
    BsdFileFlags, FileHandle, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek,
    ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    time::SystemTime,
};

/// The longest value that the kernel accepts for an extended attribute (`XATTR_SIZE_MAX`).
const XATTR_MAX: usize = 64 << 10;

pub(crate) struct Adapter<F> {
    files: F,
    max_write: u32,
    read_ahead: u32,
    writeback: bool,
    shared_maps: bool,
}

impl<F: FileSystem> Adapter<F> {
    pub(crate) fn new(files: F, options: &MountOptions) -> Self {
        let MountOptions { max_write, read_ahead, writeback, shared_maps, .. } = *options;
        Self { files, max_write, read_ahead, writeback, shared_maps }
    }

    /// Calls a method; a panic becomes an I/O error of this request.
    fn call<T>(&self, method: impl FnOnce(&F) -> Result<T>) -> std::result::Result<T, fuser::Errno> {
        let answer = catch_unwind(AssertUnwindSafe(|| method(&self.files)));
        answer
            .unwrap_or_else(|_| {
                tracing::error!("a file system method panicked");
                Err(Errno::EIO)
            })
            .map_err(|error| fuser::Errno::from_i32(error.number()))
    }
}

fn caller(request: &Request) -> Caller {
    Caller { uid: request.uid(), gid: request.gid(), pid: request.pid() }
}

fn reply_entry(reply: ReplyEntry, found: std::result::Result<Entry, fuser::Errno>) {
    match found {
        Ok(entry) => {
            let (attributes, generation) = (entry.attributes.to_fuser(), Generation(entry.generation));
            reply.entry_with_ttls(&entry.entry_ttl, &entry.attributes_ttl, &attributes, generation);
        }
        Err(error) => reply.error(error),
    }
}

fn reply_done(reply: ReplyEmpty, done: std::result::Result<(), fuser::Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

/// Replies with an extended attribute; a request of size 0 asks for its length.
fn reply_xattr(reply: ReplyXattr, size: u32, value: std::result::Result<Vec<u8>, fuser::Errno>) {
    match value {
        Err(error) => reply.error(error),
        Ok(value) if value.len() > XATTR_MAX => reply.error(fuser::Errno::E2BIG),
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(fuser::Errno::ERANGE),
        Ok(value) => reply.data(&value),
    }
}

fn handle_of(handle: Option<FileHandle>) -> Option<u64> {
    handle.map(|handle| handle.0)
}

impl<F: FileSystem> fuser::Filesystem for Adapter<F> {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A capability that the kernel lacks is not used.
        let _ = config.set_max_write(self.max_write.max(4096));
        let _ = config.set_max_readahead(self.read_ahead.max(4096));
        let _ = config.set_max_background(64);
        for wanted in
            [InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_ATOMIC_O_TRUNC]
        {
            let _ = config.add_capabilities(wanted);
        }
        if self.shared_maps {
            let _ = config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
        }
        if self.writeback {
            let _ = config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE);
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.call(|files| files.lookup(caller(request), parent.0, name));
        if found.as_ref().is_err_and(|error| error.code() == libc::ENOENT) {
            let kept = self.call(|files| Ok(files.negative_ttl(parent.0, name))).unwrap_or_default();
            if !kept.is_zero() {
                // In the FUSE protocol, an entry with inode 0 is a negative entry.
                let nothing = Attributes::new(0, FileKind::File, 0).to_fuser();
                return reply.entry(&kept, &nothing, Generation(0));
            }
        }
        reply_entry(reply, found);
    }

    fn forget(&self, _request: &Request, inode: INodeNo, count: u64) {
        let _ = self.call(|files| {
            files.forget(inode.0, count);
            Ok(())
        });
    }

    fn getattr(&self, request: &Request, inode: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        match self.call(|files| files.getattr(caller(request), inode.0, handle_of(handle))) {
            Ok((attributes, ttl)) => reply.attr(&ttl, &attributes.to_fuser()),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        request: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        handle: Option<FileHandle>,
        _created: Option<SystemTime>,
        _flagged: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let (accessed, modified) = (accessed.map(SetTime::from_fuser), modified.map(SetTime::from_fuser));
        let change = SetAttributes { mode, uid, gid, size, accessed, modified };
        match self.call(|files| files.setattr(caller(request), inode.0, handle_of(handle), change)) {
            Ok((attributes, ttl)) => reply.attr(&ttl, &attributes.to_fuser()),
            Err(error) => reply.error(error),
        }
    }

    fn access(&self, request: &Request, inode: INodeNo, mask: fuser::AccessFlags, reply: ReplyEmpty) {
        reply_done(reply, self.call(|files| files.access(caller(request), inode.0, mask.bits())));
    }

    fn readlink(&self, _request: &Request, inode: INodeNo, reply: ReplyData) {
        match self.call(|files| files.readlink(inode.0)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(error),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        reply_entry(reply, self.call(|files| files.mknod(caller(request), parent.0, name, mode, device)));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        reply_entry(reply, self.call(|files| files.mkdir(caller(request), parent.0, name, mode)));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_done(reply, self.call(|files| files.unlink(caller(request), parent.0, name)));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_done(reply, self.call(|files| files.rmdir(caller(request), parent.0, name)));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        reply_entry(reply, self.call(|files| files.symlink(caller(request), parent.0, name, target)));
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((parent.0, name), (new_parent.0, new_name));
        reply_done(reply, self.call(|files| files.rename(caller(request), from, to, flags.bits())));
    }

    fn link(&self, request: &Request, inode: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply_entry(reply, self.call(|files| files.link(caller(request), inode.0, parent.0, name)));
    }

    fn open(&self, request: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.call(|files| files.open(caller(request), inode.0, Access { flags: flags.0 })) {
            Ok(opened) => reply.opened(FileHandle(opened.handle), opened.flags()),
            Err(error) => reply.error(error),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        match self.call(|files| files.create(caller(request), parent.0, name, mode, Access { flags })) {
            Ok((entry, opened)) => {
                let (attributes, generation) = (entry.attributes.to_fuser(), Generation(entry.generation));
                let ttl = entry.entry_ttl.min(entry.attributes_ttl);
                reply.created(&ttl, &attributes, generation, FileHandle(opened.handle), opened.flags());
            }
            Err(error) => reply.error(error),
        }
    }

    fn read(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.call(|files| files.read(inode.0, handle.0, offset, size)) {
            Ok(data) => reply.data(&data[..data.len().min(size as usize)]),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.call(|files| files.write(caller(request), inode.0, handle.0, offset, data)) {
            Ok(written) => reply.written(written),
            Err(error) => reply.error(error),
        }
    }

    fn flush(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply_done(reply, self.call(|files| files.flush(caller(request), inode.0, handle.0)));
    }

    fn release(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply_done(reply, self.call(|files| files.release(inode.0, handle.0)));
    }

    fn fsync(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        reply_done(reply, self.call(|files| files.fsync(inode.0, handle.0, data_only)));
    }

    fn opendir(&self, request: &Request, inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        match self.call(|files| files.opendir(caller(request), inode.0)) {
            Ok(handle) => reply.opened(FileHandle(handle), fuser::FopenFlags::empty()),
            Err(error) => reply.error(error),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let done = self.call(|files| {
            files.readdir(inode.0, handle.0, offset, &mut |entry| {
                !reply.add(INodeNo(entry.inode), entry.next, entry.kind.to_fuser(), &entry.name)
            })
        });
        match done {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        reply_done(reply, self.call(|files| files.releasedir(inode.0, handle.0)));
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        reply_done(reply, self.call(|files| files.fsyncdir(inode.0, handle.0)));
    }

    fn statfs(&self, _request: &Request, inode: INodeNo, reply: ReplyStatfs) {
        match self.call(|files| files.statfs(inode.0)) {
            Ok(said) => {
                let block = said.block.max(512);
                let (total, free) = (said.total / u64::from(block), said.free / u64::from(block));
                reply.statfs(total, free, free, said.files, said.files_free, block, said.name_max, block);
            }
            Err(error) => reply.error(error),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        inode: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        reply_done(reply, self.call(|files| files.setxattr(caller(request), inode.0, name, value, flags)));
    }

    fn getxattr(&self, request: &Request, inode: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        reply_xattr(reply, size, self.call(|files| files.getxattr(caller(request), inode.0, name)));
    }

    fn listxattr(&self, request: &Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        let names = self.call(|files| files.listxattr(caller(request), inode.0)).map(|names| {
            names.iter().flat_map(|name| name.as_bytes().iter().copied().chain([0])).collect::<Vec<u8>>()
        });
        reply_xattr(reply, size, names);
    }

    fn removexattr(&self, request: &Request, inode: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_done(reply, self.call(|files| files.removexattr(caller(request), inode.0, name)));
    }

    fn fallocate(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        reply_done(reply, self.call(|files| files.fallocate(inode.0, handle.0, offset, length, mode)));
    }

    fn copy_file_range(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        offset: u64,
        to_inode: INodeNo,
        _to_handle: FileHandle,
        to_offset: u64,
        length: u64,
        _flags: fuser::CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let (from, to) = ((inode.0, offset), (to_inode.0, to_offset));
        match self.call(|files| files.copy_file_range(from, to, length)) {
            Ok(copied) => reply.written(copied),
            Err(error) => reply.error(error),
        }
    }

    fn lseek(
        &self,
        _request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        match self.call(|files| files.lseek(inode.0, handle.0, offset, whence)) {
            Ok(offset) => reply.offset(offset),
            Err(error) => reply.error(error),
        }
    }
}
