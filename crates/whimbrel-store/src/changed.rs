//! Changed pages of a session on their way to delta frames.
//!
//! How small a changed page gets depends on which older pages may be its bases, so pages written over an older version
//! are not framed batch by batch: they are gathered, whichever image they belong to, and framed together once there are
//! many, when an image is finished, and before every flush. They were claimed, so others count on them already; that
//! is sound because a flush frames them first, and a failure to do so fails the whole session. A page that was put
//! again in the meantime is not stored at all, unless somebody else found it and counts on it: of what a running guest
//! writes, a tenth changes again before the last round.

use crate::{
    append::Message,
    error::{Result, StoreError},
    image_writer::ImageState,
    worker::{Framer, NICE, Session},
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::SyncSender,
    },
    thread,
};
use whimbrel_core::{Digest, PAGE_SIZE};
use whimbrel_image::{
    Key,
    delta::{self, Part},
    frame::Bases,
};

/// Pages framed together at most: 32 MiB with their older versions, for as long as that takes.
const MANY: usize = 4096;

pub(crate) type Page = Box<[u8; PAGE_SIZE]>;

/// The older version of a page.
pub(crate) struct OldPage {
    pub(crate) key: Key,
    pub(crate) bytes: Page,
    pub(crate) depth: u8,
}

/// A page that is claimed and not yet in a frame.
pub(crate) struct ChangedPage {
    pub(crate) image: Arc<ImageState>,
    pub(crate) page: u64,
    /// Of the batch it was put with.
    pub(crate) order: u64,
    pub(crate) digest: Digest,
    pub(crate) bytes: Page,
    pub(crate) old: Option<OldPage>,
}

/// The changed pages of a session that are not yet in frames.
#[derive(Default)]
pub(crate) struct Gathered {
    pages: Mutex<Vec<ChangedPage>>,
}

impl Gathered {
    /// Adds pages; gives them all back for framing once there are many.
    pub(crate) fn add(&self, pages: Vec<ChangedPage>) -> Vec<ChangedPage> {
        let mut gathered = self.pages.lock().unwrap_or_else(PoisonError::into_inner);
        gathered.extend(pages);
        if gathered.len() < MANY { Vec::new() } else { std::mem::take(&mut gathered) }
    }

    fn take(&self) -> Vec<ChangedPage> {
        std::mem::take(&mut *self.pages.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Frames what was gathered so far; a failure is the session's.
pub(crate) fn frame_gathered(session: &Arc<Session>, pack: &SyncSender<Message>) -> Result<()> {
    session.settle_claims();
    let pages = session.gathered.take();
    frame(session, pack, pages).inspect_err(|_| {
        // What others count on is lost, so nothing of this session may be committed.
        let _ = session.failure.set(Arc::new(StoreError::Latched { action: "framing of changed pages" }));
    })
}

/// Frames `pages` on all of the session's processors.
pub(crate) fn frame(session: &Session, pack: &SyncSender<Message>, pages: Vec<ChangedPage>) -> Result<()> {
    let pages = without_superseded(session, pages);
    if pages.is_empty() {
        return Ok(());
    }
    let depth = |page: &ChangedPage| page.old.as_ref().map_or(0, |old| old.depth);
    let changed: Vec<delta::Changed<'_>> = pages
        .iter()
        .map(|page| delta::Changed {
            new: &page.bytes,
            old: page.old.as_ref().map(|old| &*old.bytes),
            depth: depth(page),
        })
        .collect();
    let parts = delta::plan(&changed, delta::PART_PAGES);
    let next = AtomicUsize::new(0);
    let work = || {
        // Refused, the thread works all the same.
        let _ = rustix::process::setpriority_process(None, NICE);
        let mut framer = Framer::new(&session.inner, pack.clone());
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            frame_part(&mut framer, part, &pages)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers = session.inner.options.workers.clamp(1, parts.len().max(1));
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let joined =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<Vec<Result<()>>>().into_iter().collect()
    })
}

/// `pages` without those that were put again since, as far as nobody counts on them.
fn without_superseded(session: &Session, mut pages: Vec<ChangedPage>) -> Vec<ChangedPage> {
    let mut last = HashMap::new();
    pages.retain(|page| {
        let puts = last.entry(Arc::as_ptr(&page.image)).or_insert_with(|| page.image.last_puts());
        let superseded = puts.get(&page.page).is_some_and(|order| *order > page.order);
        !superseded || !session.unclaim(&page.digest)
    });
    pages
}

fn frame_part(framer: &mut Framer, part: &Part, pages: &[ChangedPage]) -> Result<()> {
    let objects: Vec<(Digest, &[u8])> =
        part.pages.iter().map(|i| (pages[*i].digest, &pages[*i].bytes[..])).collect();
    let old: Vec<&OldPage> = part.bases.iter().filter_map(|i| pages[*i].old.as_ref()).collect();
    let keys: Vec<Key> = old.iter().map(|old| old.key).collect();
    let raw: Vec<u8> = old.iter().flat_map(|old| &old.bytes[..]).copied().collect();
    let depth = old.iter().map(|old| old.depth).max().unwrap_or(0);
    framer.changed(&objects, Bases { keys: &keys, raw: &raw, depth })
}
