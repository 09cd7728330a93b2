//! Sends closed files to the pool after `close` has returned (complete local write), in the order in which they
//! were closed.
//!
//! The end of a mount waits until they are sent. What cannot be sent stays in the spool folder, and the next
//! mount sends it.

use super::{file_system::State, writer::OpenWrite};
use crate::{
    client::{LeftFile, Pool, PoolError, WriteFile, WriteMode, WriteOptions, left},
    protocol::{Node, code},
};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

enum Item {
    /// A file that was closed, by its inode.
    Closed(u64, Arc<OpenWrite>),
    /// A file that an earlier mount left.
    Left(Box<LeftFile>, WriteOptions),
}

/// The queue of closed files, and the thread that sends them. Dropping it waits for the thread.
#[derive(Debug)]
pub(super) struct FileSender {
    queue: Option<Sender<Item>>,
    thread: Option<JoinHandle<()>>,
    /// Whether the mount has ended, so that a file is tried once.
    ending: Arc<AtomicBool>,
}

impl FileSender {
    pub(super) fn start(pool: Pool, state: Arc<Mutex<State>>) -> Self {
        let (queue, items) = channel();
        let ending = Arc::new(AtomicBool::new(false));
        let worker = Worker { pool, state, ending: ending.clone() };
        let thread = thread::spawn(move || worker.run(&items));
        Self { queue: Some(queue), thread: Some(thread), ending }
    }

    /// Has a file committed and, if it has no more descriptors, forgotten.
    pub(super) fn send(&self, inode: u64, writing: Arc<OpenWrite>) {
        self.put(Item::Closed(inode, writing));
    }

    /// Has the files sent that an earlier mount left.
    pub(super) fn send_left(&self, options: &WriteOptions) {
        // They have been written already.
        let sending = WriteOptions { mode: WriteMode::SlidingWindow, ..options.clone() };
        match left(&options.spool) {
            Ok(files) => {
                files.into_iter().for_each(|file| self.put(Item::Left(Box::new(file), sending.clone())));
            }
            Err(error) => tracing::debug!(%error, "the spool folder cannot be listed"),
        }
    }

    fn put(&self, item: Item) {
        // The thread lives as long as the queue.
        let _ = self.queue.as_ref().map(|queue| queue.send(item));
    }
}

impl Drop for FileSender {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        self.queue = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Worker {
    pool: Pool,
    state: Arc<Mutex<State>>,
    ending: Arc<AtomicBool>,
}

impl Worker {
    fn run(&self, items: &Receiver<Item>) {
        for item in items {
            let sent = match &item {
                Item::Closed(_, writing) if writing.is_unlinked() => {
                    writing.file.abandon();
                    Ok(())
                }
                Item::Closed(_, writing) => writing.file.commit().map(drop),
                Item::Left(file, options) => self.send_left(file, options),
            };
            if let Err(error) = &sent {
                let error: &dyn std::error::Error = error;
                tracing::error!(error, file = name(&item), "a closed file could not be sent");
            }
            match item {
                Item::Closed(inode, writing) => {
                    self.state.lock().unwrap_or_else(PoisonError::into_inner).forget(inode, &writing);
                }
                Item::Left(file, _) if sent.is_ok() => file.remove(),
                Item::Left(..) => {}
            }
            let unreachable = matches!(sent, Err(PoolError::ManagerUnreachable { .. }));
            if unreachable && self.ending.load(Ordering::Relaxed) {
                tracing::error!("closed files stay in the spool folder; the next mount with it sends them");
                return;
            }
        }
    }

    /// Sends a file that an earlier mount left, unless the pool has it or a newer one.
    fn send_left(&self, left: &LeftFile, options: &WriteOptions) -> Result<(), PoolError> {
        let (closed, pool) = (&left.description, &self.pool);
        let refused = |why: &'static str| Err(PoolError::LeftFile { path: left.path.clone(), why });
        if closed.pool != pool.block(pool.id())? {
            return refused("it belongs to another pool");
        }
        if closed.encrypted && !pool.encrypts() {
            return refused("it must be encrypted, and this mount has no secret");
        }
        let node = self.node(left)?;
        match node.as_ref().map_or(i64::MIN, |node| node.modified) {
            there if there == closed.modified => return Ok(()),
            there if there > closed.modified => return refused("the pool has a newer file of this name"),
            _ => {}
        }
        left.read(|_| Ok(()))?;
        let opened = WriteFile::open(pool, closed.make.clone(), node, true, options.clone());
        let file = pool.block(opened)?.with_content_time(closed.modified);
        let mut at = 0;
        left.read(|block| {
            file.write_at(at, block)?;
            at += block.len() as u64;
            Ok(())
        })?;
        file.commit().map(drop)
    }

    /// The file in the pool: the one that was written, or the one that has its name now.
    fn node(&self, left: &LeftFile) -> Result<Option<Node>, PoolError> {
        let (closed, pool) = (&left.description, &self.pool);
        let known = |found: Result<Node, PoolError>| match found {
            Err(error) if error.code() == Some(code::NOT_FOUND) => Ok(None),
            found => found.map(Some),
        };
        if let Some(id) = closed.node
            && let Some(node) = known(pool.block(pool.node(id)))?
        {
            return Ok(Some(node));
        }
        known(pool.block(pool.lookup(closed.make.parent, &closed.make.name)))
    }
}

fn name(item: &Item) -> &str {
    match item {
        Item::Closed(_, writing) => &writing.make.name,
        Item::Left(file, _) => &file.description.make.name,
    }
}
