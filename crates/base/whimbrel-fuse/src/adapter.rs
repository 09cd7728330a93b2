//! Adapter from the [`FileSystem`] trait to the `fuser` package: one short function for each FUSE request.
//!
//! A thread that reads requests from the kernel also answers them, as long as enough others are free. Beyond
//! that a request goes to a thread of its own ([`ElasticThreads`]), because it may wait. If there are too
//! many of those, what [needs no waiting](FileSystem::answers_now) is still answered at once.

use crate::{
    Access, Attributes, Caller, Entry, Errno, FileKind, FileLock, FileSystem, LockKind, MountOptions, Opened,
    Question, Result, SetAttributes, SetTime, elastic_threads::ElasticThreads,
};
use fuser::{
    BsdFileFlags, FileHandle, Generation, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLock,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

/// The longest value that the kernel accepts for an extended attribute (`XATTR_SIZE_MAX`).
const XATTR_MAX: usize = 64 << 10;

/// Most requests that wait at once on threads of their own.
const MAX_WAITING: usize = 1024;
/// How long a mount that ends waits for requests that are being answered.
const LAST_ANSWERS: Duration = Duration::from_secs(30);
/// Requests of the kernel for its page cache that may be in progress at once; while there are more, it sends
/// no others. So this is more than may wait.
const MAX_BACKGROUND: u16 = 2048;
/// Share of the threads that read requests which stays free for requests that need no waiting.
const RESERVE: usize = 2;

pub(crate) struct Adapter<F> {
    files: Arc<F>,
    /// Threads that read requests and are answering one.
    busy: Arc<AtomicUsize>,
    /// How many of them may.
    most_busy: usize,
    waiting: ElasticThreads,
    access_lists: bool,
    max_write: u32,
    read_ahead: u32,
    writeback: bool,
    shared_maps: bool,
    locks: bool,
}

impl<F: FileSystem> Adapter<F> {
    pub(crate) fn new(files: F, options: &MountOptions) -> Self {
        let MountOptions { max_write, read_ahead, writeback, shared_maps, access_lists, locks, .. } =
            *options;
        let threads = options.threads.max(1);
        Self {
            files: Arc::new(files),
            busy: Arc::default(),
            most_busy: threads - threads.div_ceil(RESERVE).min(threads - 1),
            waiting: ElasticThreads::new(MAX_WAITING),
            access_lists,
            max_write,
            read_ahead,
            writeback,
            shared_maps,
            locks,
        }
    }

    fn call<T>(&self, method: impl FnOnce(&F) -> Result<T>) -> std::result::Result<T, fuser::Errno> {
        call(&*self.files, method)
    }

    /// Answers a request on this thread if others are free, else on one that may wait.
    fn answer(&self, question: Question<'_>, answer: impl FnOnce(&F) + Send + 'static) {
        let busy = self.busy.fetch_add(1, Ordering::Relaxed);
        if busy < self.most_busy || (self.waiting.is_full() && self.files.answers_now(question)) {
            answer(&*self.files);
            self.busy.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        self.busy.fetch_sub(1, Ordering::Relaxed);
        let files = self.files.clone();
        self.waiting.run(move || answer(&*files));
    }
}

/// The file system ends with the mount, not later on a thread that has just answered: what it does at its end
/// belongs to the unmount, such as sending files that were closed.
impl<F> Drop for Adapter<F> {
    fn drop(&mut self) {
        self.waiting.wait(LAST_ANSWERS);
    }
}

/// Calls a method; a panic becomes an I/O error of this request.
fn call<F, T>(files: &F, method: impl FnOnce(&F) -> Result<T>) -> std::result::Result<T, fuser::Errno> {
    let answer = catch_unwind(AssertUnwindSafe(|| method(files)));
    answer
        .unwrap_or_else(|_| {
            tracing::error!("a file system method panicked");
            Err(Errno::EIO)
        })
        .map_err(|error| fuser::Errno::from_i32(error.number()))
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

/// Defines methods that call one method of the file system: parameters, what decides whether the answer needs
/// no waiting, kind of reply, call, and the answer if the call succeeds.
macro_rules! requests {
    ($($name:ident($by:ident $(, $arg:ident: $kind:ty)*) $question:expr, $reply:ident: $to:ty,
        $call:expr => $value:pat => $answer:expr;)*) => {
        $(fn $name(&self, request: &Request, $($arg: $kind,)* $reply: $to) {
            let $by = caller(request);
            let question = $question;
            $(#[allow(clippy::clone_on_copy, reason = "names are borrowed from the request")]
            let $arg = $arg.to_owned();)*
            self.answer(question, move |files: &F| match call(files, $call) {
                Ok($value) => $answer,
                Err(error) => $reply.error(error),
            });
        })*
    };
}

impl<F: FileSystem> fuser::Filesystem for Adapter<F> {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A capability that the kernel lacks is not used.
        let _ = config.set_max_write(self.max_write.max(4096));
        let _ = config.set_max_readahead(self.read_ahead.max(4096));
        let _ = config.set_max_background(MAX_BACKGROUND);
        for wanted in
            [InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_ASYNC_DIO, InitFlags::FUSE_ATOMIC_O_TRUNC]
        {
            let _ = config.add_capabilities(wanted);
        }
        if self.shared_maps {
            let _ = config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
        }
        if self.locks {
            let _ = config.add_capabilities(InitFlags::FUSE_POSIX_LOCKS);
            let _ = config.add_capabilities(InitFlags::FUSE_FLOCK_LOCKS);
        }
        if self.access_lists {
            let _ = config.add_capabilities(InitFlags::FUSE_POSIX_ACL);
        }
        if self.writeback {
            let _ = config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE);
        }
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (by, wanted) = (caller(request), name.to_owned());
        self.answer(Question::Lookup(parent.0, name), move |files| {
            let found = call(files, |files| files.lookup(by, parent.0, &wanted));
            if found.as_ref().is_err_and(|error| error.code() == libc::ENOENT) {
                let kept = call(files, |files| Ok(files.negative_ttl(parent.0, &wanted))).unwrap_or_default();
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
        });
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
        let by = caller(request);
        self.answer(Question::Other, move |files| {
            match call(files, |files| files.setattr(by, inode.0, handle_of(handle), change)) {
                Ok((attributes, ttl)) => reply.attr(&ttl, &attributes.to_fuser()),
                Err(error) => reply.error(error),
            }
        });
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
        self.answer(Question::Other, move |files| match call(files, |files| files.statfs(inode.0)) {
            Ok(said) => {
                let block = said.block.max(512);
                let (total, free) = (said.total / u64::from(block), said.free / u64::from(block));
                reply.statfs(total, free, free, said.files, said.files_free, block, said.name_max, block);
            }
            Err(error) => reply.error(error),
        });
    }

    fn listxattr(&self, request: &Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        let by = caller(request);
        self.answer(Question::Other, move |files| {
            let names = call(files, |files| files.listxattr(by, inode.0)).map(|names| {
                names.iter().flat_map(|name| name.as_bytes().iter().copied().chain([0])).collect::<Vec<u8>>()
            });
            match names {
                Ok(names) => reply_xattr(reply, size, &names),
                Err(error) => reply.error(error),
            }
        });
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
        let by = caller(request);
        // The data is copied only for another thread.
        let busy = self.busy.fetch_add(1, Ordering::Relaxed);
        if busy < self.most_busy {
            match self.call(|files| files.write(by, inode.0, handle.0, offset, data)) {
                Ok(written) => reply.written(written),
                Err(error) => reply.error(error),
            }
            self.busy.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        self.busy.fetch_sub(1, Ordering::Relaxed);
        let data = data.to_vec();
        self.answer(Question::Other, move |files| {
            match call(files, |files| files.write(by, inode.0, handle.0, offset, &data)) {
                Ok(written) => reply.written(written),
                Err(error) => reply.error(error),
            }
        });
    }

    fn flush(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let (by, locks) = (caller(request), self.locks);
        self.answer(Question::Other, move |files| {
            let flushed = call(files, |files| files.flush(by, inode.0, handle.0));
            if locks {
                // Others get the lock after the content.
                let _ = call(files, |files| {
                    files.unlock_all(inode.0, owner.0);
                    Ok(())
                });
            }
            match flushed {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            }
        });
    }

    fn getlk(
        &self,
        _request: &Request,
        inode: INodeNo,
        _handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        self.answer(Question::Other, move |files| {
            let found = call(files, |files| {
                let kind = LockKind::of(kind)?;
                files.getlk(inode.0, owner.0, FileLock { start, end, kind, pid })
            });
            match found {
                Ok(FileLock { start, end, kind, pid }) => reply.locked(start, end, kind.number(), pid),
                Err(error) => reply.error(error),
            }
        });
    }

    fn setlk(
        &self,
        request: &Request,
        inode: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let by = caller(request);
        let set = move |files: &F| {
            let done = call(files, |files| {
                let lock = FileLock { start, end, kind: LockKind::of(kind)?, pid };
                files.setlk(by, inode.0, handle.0, owner.0, lock, sleep)
            });
            match done {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(error),
            }
        };
        if sleep {
            // The wait may take for ever.
            let files = self.files.clone();
            return self.waiting.run(move || set(&files));
        }
        self.answer(Question::Other, set);
    }

    requests! {
        getattr(by, inode: INodeNo, handle: Option<FileHandle>) Question::Attributes(inode.0), reply: ReplyAttr,
            |files| files.getattr(by, inode.0, handle_of(handle)) => (attributes, ttl) => reply.attr(&ttl, &attributes.to_fuser());
        access(by, inode: INodeNo, mask: fuser::AccessFlags) Question::Other, reply: ReplyEmpty,
            |files| files.access(by, inode.0, mask.bits()) => () => reply.ok();
        readlink(_by, inode: INodeNo) Question::Other, reply: ReplyData,
            |files| files.readlink(inode.0) => target => reply.data(&target);
        mknod(by, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, device: u32) Question::Other, reply: ReplyEntry,
            |files| files.mknod(by, parent.0, &name, mode, device) => entry => reply_entry(reply, &entry);
        mkdir(by, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32) Question::Other, reply: ReplyEntry,
            |files| files.mkdir(by, parent.0, &name, mode) => entry => reply_entry(reply, &entry);
        unlink(by, parent: INodeNo, name: &OsStr) Question::Other, reply: ReplyEmpty,
            |files| files.unlink(by, parent.0, &name) => () => reply.ok();
        rmdir(by, parent: INodeNo, name: &OsStr) Question::Other, reply: ReplyEmpty,
            |files| files.rmdir(by, parent.0, &name) => () => reply.ok();
        symlink(by, parent: INodeNo, name: &OsStr, target: &Path) Question::Other, reply: ReplyEntry,
            |files| files.symlink(by, parent.0, &name, &target) => entry => reply_entry(reply, &entry);
        rename(by, parent: INodeNo, name: &OsStr, new_parent: INodeNo, new_name: &OsStr, flags: RenameFlags) Question::Other, reply: ReplyEmpty,
            |files| files.rename(by, (parent.0, &*name), (new_parent.0, &*new_name), flags.bits()) => () => reply.ok();
        link(by, inode: INodeNo, parent: INodeNo, name: &OsStr) Question::Other, reply: ReplyEntry,
            |files| files.link(by, inode.0, parent.0, &name) => entry => reply_entry(reply, &entry);
        open(by, inode: INodeNo, flags: OpenFlags) Question::Other, reply: ReplyOpen,
            |files| files.open(by, inode.0, Access { flags: flags.0 }) => opened => reply.opened(FileHandle(opened.handle), opened.flags());
        create(by, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, flags: i32) Question::Other, reply: ReplyCreate,
            |files| files.create(by, parent.0, &name, mode, Access { flags }) => (entry, opened) => reply_created(reply, &entry, &opened);
        read(_by, inode: INodeNo, handle: FileHandle, offset: u64, size: u32, _flags: OpenFlags, _owner: Option<LockOwner>) Question::Read(inode.0, offset, size), reply: ReplyData,
            |files| files.read(inode.0, handle.0, offset, size) => data => reply.data(&data[..data.len().min(size as usize)]);
        release(_by, inode: INodeNo, handle: FileHandle, _flags: OpenFlags, _owner: Option<LockOwner>, _flush: bool) Question::Other, reply: ReplyEmpty,
            |files| files.release(inode.0, handle.0) => () => reply.ok();
        fsync(_by, inode: INodeNo, handle: FileHandle, data_only: bool) Question::Other, reply: ReplyEmpty,
            |files| files.fsync(inode.0, handle.0, data_only) => () => reply.ok();
        opendir(by, inode: INodeNo, _flags: OpenFlags) Question::List(inode.0), reply: ReplyOpen,
            |files| files.opendir(by, inode.0) => handle => reply.opened(FileHandle(handle), fuser::FopenFlags::empty());
        releasedir(_by, inode: INodeNo, handle: FileHandle, _flags: OpenFlags) Question::Handle, reply: ReplyEmpty,
            |files| files.releasedir(inode.0, handle.0) => () => reply.ok();
        fsyncdir(_by, inode: INodeNo, handle: FileHandle, _data_only: bool) Question::Other, reply: ReplyEmpty,
            |files| files.fsyncdir(inode.0, handle.0) => () => reply.ok();
        setxattr(by, inode: INodeNo, name: &OsStr, value: &[u8], flags: i32, _position: u32) Question::Other, reply: ReplyEmpty,
            |files| files.setxattr(by, inode.0, &name, &value, flags) => () => reply.ok();
        getxattr(by, inode: INodeNo, name: &OsStr, size: u32) Question::Other, reply: ReplyXattr,
            |files| files.getxattr(by, inode.0, &name) => value => reply_xattr(reply, size, &value);
        removexattr(by, inode: INodeNo, name: &OsStr) Question::Other, reply: ReplyEmpty,
            |files| files.removexattr(by, inode.0, &name) => () => reply.ok();
        fallocate(_by, inode: INodeNo, handle: FileHandle, offset: u64, length: u64, mode: i32) Question::Other, reply: ReplyEmpty,
            |files| files.fallocate(inode.0, handle.0, offset, length, mode) => () => reply.ok();
        copy_file_range(_by, inode: INodeNo, _handle: FileHandle, offset: u64, to_inode: INodeNo, _to_handle: FileHandle, to_offset: u64, length: u64, _flags: fuser::CopyFileRangeFlags) Question::Other, reply: ReplyWrite,
            |files| files.copy_file_range((inode.0, offset), (to_inode.0, to_offset), length) => copied => reply.written(copied);
        lseek(_by, inode: INodeNo, handle: FileHandle, offset: i64, whence: i32) Question::Other, reply: ReplyLseek,
            |files| files.lseek(inode.0, handle.0, offset, whence) => offset => reply.offset(offset);
    }
}
