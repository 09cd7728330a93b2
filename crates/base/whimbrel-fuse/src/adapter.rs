//! Adapter from the [`FileSystem`] trait to the `fuser` package: one short function for each FUSE request.

use crate::{
    Access, Attributes, Caller, Entry, Errno, FileKind, FileSystem, MountOptions, Opened, Result,
    SetAttributes, SetTime,
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

fn reply_entry(reply: ReplyEntry, entry: &Entry) {
    let (attributes, generation) = (entry.attributes.to_fuser(), Generation(entry.generation));
    reply.entry_with_ttls(&entry.entry_ttl, &entry.attributes_ttl, &attributes, generation);
}

fn reply_created(reply: ReplyCreate, entry: &Entry, opened: &Opened) {
    let (attributes, generation) = (entry.attributes.to_fuser(), Generation(entry.generation));
    let ttl = entry.entry_ttl.min(entry.attributes_ttl);
    reply.created(&ttl, &attributes, generation, FileHandle(opened.handle), opened.flags());
}

/// Replies with an extended attribute; a request of size 0 asks for its length.
fn reply_xattr(reply: ReplyXattr, size: u32, value: &[u8]) {
    match value.len() {
        length if length > XATTR_MAX => reply.error(fuser::Errno::E2BIG),
        length if size == 0 => reply.size(length as u32),
        length if length > size as usize => reply.error(fuser::Errno::ERANGE),
        _ => reply.data(value),
    }
}

fn handle_of(handle: Option<FileHandle>) -> Option<u64> {
    handle.map(|handle| handle.0)
}

/// Defines methods that call one method of the file system: parameters, kind of reply, call, and the answer
/// if the call succeeds.
macro_rules! requests {
    ($($name:ident($request:ident $(, $arg:ident: $kind:ty)*) $reply:ident: $to:ty,
        $call:expr => $value:pat => $answer:expr;)*) => {
        $(fn $name(&self, $request: &Request, $($arg: $kind,)* $reply: $to) {
            match self.call($call) {
                Ok($value) => $answer,
                Err(error) => $reply.error(error),
            }
        })*
    };
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
        match found {
            Ok(entry) => reply_entry(reply, &entry),
            Err(error) => reply.error(error),
        }
    }

    fn forget(&self, _request: &Request, inode: INodeNo, count: u64) {
        let _ = self.call(|files| {
            files.forget(inode.0, count);
            Ok(())
        });
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

    fn listxattr(&self, request: &Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        let names = self.call(|files| files.listxattr(caller(request), inode.0)).map(|names| {
            names.iter().flat_map(|name| name.as_bytes().iter().copied().chain([0])).collect::<Vec<u8>>()
        });
        match names {
            Ok(names) => reply_xattr(reply, size, &names),
            Err(error) => reply.error(error),
        }
    }

    requests! {
        getattr(request, inode: INodeNo, handle: Option<FileHandle>) reply: ReplyAttr,
            |files| files.getattr(caller(request), inode.0, handle_of(handle)) => (attributes, ttl) => reply.attr(&ttl, &attributes.to_fuser());
        access(request, inode: INodeNo, mask: fuser::AccessFlags) reply: ReplyEmpty,
            |files| files.access(caller(request), inode.0, mask.bits()) => () => reply.ok();
        readlink(_request, inode: INodeNo) reply: ReplyData,
            |files| files.readlink(inode.0) => target => reply.data(&target);
        mknod(request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, device: u32) reply: ReplyEntry,
            |files| files.mknod(caller(request), parent.0, name, mode, device) => entry => reply_entry(reply, &entry);
        mkdir(request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32) reply: ReplyEntry,
            |files| files.mkdir(caller(request), parent.0, name, mode) => entry => reply_entry(reply, &entry);
        unlink(request, parent: INodeNo, name: &OsStr) reply: ReplyEmpty,
            |files| files.unlink(caller(request), parent.0, name) => () => reply.ok();
        rmdir(request, parent: INodeNo, name: &OsStr) reply: ReplyEmpty,
            |files| files.rmdir(caller(request), parent.0, name) => () => reply.ok();
        symlink(request, parent: INodeNo, name: &OsStr, target: &Path) reply: ReplyEntry,
            |files| files.symlink(caller(request), parent.0, name, target) => entry => reply_entry(reply, &entry);
        rename(request, parent: INodeNo, name: &OsStr, new_parent: INodeNo, new_name: &OsStr, flags: RenameFlags) reply: ReplyEmpty,
            |files| files.rename(caller(request), (parent.0, name), (new_parent.0, new_name), flags.bits()) => () => reply.ok();
        link(request, inode: INodeNo, parent: INodeNo, name: &OsStr) reply: ReplyEntry,
            |files| files.link(caller(request), inode.0, parent.0, name) => entry => reply_entry(reply, &entry);
        open(request, inode: INodeNo, flags: OpenFlags) reply: ReplyOpen,
            |files| files.open(caller(request), inode.0, Access { flags: flags.0 }) => opened => reply.opened(FileHandle(opened.handle), opened.flags());
        create(request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, flags: i32) reply: ReplyCreate,
            |files| files.create(caller(request), parent.0, name, mode, Access { flags }) => (entry, opened) => reply_created(reply, &entry, &opened);
        read(_request, inode: INodeNo, handle: FileHandle, offset: u64, size: u32, _flags: OpenFlags, _owner: Option<LockOwner>) reply: ReplyData,
            |files| files.read(inode.0, handle.0, offset, size) => data => reply.data(&data[..data.len().min(size as usize)]);
        write(request, inode: INodeNo, handle: FileHandle, offset: u64, data: &[u8], _write_flags: WriteFlags, _flags: OpenFlags, _owner: Option<LockOwner>) reply: ReplyWrite,
            |files| files.write(caller(request), inode.0, handle.0, offset, data) => written => reply.written(written);
        flush(request, inode: INodeNo, handle: FileHandle, _owner: LockOwner) reply: ReplyEmpty,
            |files| files.flush(caller(request), inode.0, handle.0) => () => reply.ok();
        release(_request, inode: INodeNo, handle: FileHandle, _flags: OpenFlags, _owner: Option<LockOwner>, _flush: bool) reply: ReplyEmpty,
            |files| files.release(inode.0, handle.0) => () => reply.ok();
        fsync(_request, inode: INodeNo, handle: FileHandle, data_only: bool) reply: ReplyEmpty,
            |files| files.fsync(inode.0, handle.0, data_only) => () => reply.ok();
        opendir(request, inode: INodeNo, _flags: OpenFlags) reply: ReplyOpen,
            |files| files.opendir(caller(request), inode.0) => handle => reply.opened(FileHandle(handle), fuser::FopenFlags::empty());
        releasedir(_request, inode: INodeNo, handle: FileHandle, _flags: OpenFlags) reply: ReplyEmpty,
            |files| files.releasedir(inode.0, handle.0) => () => reply.ok();
        fsyncdir(_request, inode: INodeNo, handle: FileHandle, _data_only: bool) reply: ReplyEmpty,
            |files| files.fsyncdir(inode.0, handle.0) => () => reply.ok();
        setxattr(request, inode: INodeNo, name: &OsStr, value: &[u8], flags: i32, _position: u32) reply: ReplyEmpty,
            |files| files.setxattr(caller(request), inode.0, name, value, flags) => () => reply.ok();
        getxattr(request, inode: INodeNo, name: &OsStr, size: u32) reply: ReplyXattr,
            |files| files.getxattr(caller(request), inode.0, name) => value => reply_xattr(reply, size, &value);
        removexattr(request, inode: INodeNo, name: &OsStr) reply: ReplyEmpty,
            |files| files.removexattr(caller(request), inode.0, name) => () => reply.ok();
        fallocate(_request, inode: INodeNo, handle: FileHandle, offset: u64, length: u64, mode: i32) reply: ReplyEmpty,
            |files| files.fallocate(inode.0, handle.0, offset, length, mode) => () => reply.ok();
        copy_file_range(_request, inode: INodeNo, _handle: FileHandle, offset: u64, to_inode: INodeNo, _to_handle: FileHandle, to_offset: u64, length: u64, _flags: fuser::CopyFileRangeFlags) reply: ReplyWrite,
            |files| files.copy_file_range((inode.0, offset), (to_inode.0, to_offset), length) => copied => reply.written(copied);
        lseek(_request, inode: INodeNo, handle: FileHandle, offset: i64, whence: i32) reply: ReplyLseek,
            |files| files.lseek(inode.0, handle.0, offset, whence) => offset => reply.offset(offset);
    }
}
