//! Changed pages of a writer, collected to be framed together as deltas.
//!
//! The size of a delta depends on which older pages can be its bases. So pages written over an older version
//! are not framed batch by batch: those of all images are collected, and framed when there are many, when an
//! image is finished, and before every flush. They were claimed, so other threads rely on them already. That
//! is sound because a flush frames them first, and a failure to do so fails the writer. A page that was
//! written again meanwhile is not stored at all, unless another thread claimed the same content: of the pages
//! that a running guest writes, a tenth changes again before the last round.

use crate::{
    error::{Result, StoreError},
    image_writer::ImageState,
    pack_writer::Message,
    page_worker::{Framer, NICE, WriteContext},
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
    ShortDigest,
    delta::{self, Part},
    pack_frame::Bases,
};

/// Most pages framed together, and most other old pages collected as bases: 48 MiB while that takes.
const MAX_PENDING: usize = 4096;

pub(crate) type Page = Box<[u8; PAGE_SIZE]>;

pub(crate) struct OldPage {
    pub(crate) key: ShortDigest,
    pub(crate) bytes: Page,
    pub(crate) depth: u8,
}

/// Page that is claimed and not yet in a frame.
pub(crate) struct ChangedPage {
    pub(crate) image: Arc<ImageState>,
    pub(crate) page: u64,
    pub(crate) order: u64,
    pub(crate) digest: Digest,
    pub(crate) bytes: Page,
    pub(crate) old: Option<OldPage>,
}

#[derive(Default)]
pub(crate) struct UnpackedPages {
    pub(crate) pages: Vec<ChangedPage>,
    /// Old pages from the same frames as the older versions: further candidates for bases.
    pub(crate) frame_siblings: Vec<OldPage>,
}

/// Changed pages of a writer that are not yet in frames.
#[derive(Default)]
pub(crate) struct PendingPages {
    batch: Mutex<UnpackedPages>,
}

impl PendingPages {
    /// Adds pages; returns all of them for framing once there are many.
    pub(crate) fn add(&self, batch: UnpackedPages) -> UnpackedPages {
        let mut gathered = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        gathered.pages.extend(batch.pages);
        let room = MAX_PENDING.saturating_sub(gathered.frame_siblings.len());
        gathered.frame_siblings.extend(batch.frame_siblings.into_iter().take(room));
        if gathered.pages.len() < MAX_PENDING {
            UnpackedPages::default()
        } else {
            std::mem::take(&mut gathered)
        }
    }

    fn take(&self) -> UnpackedPages {
        std::mem::take(&mut *self.batch.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Frames the pages collected so far; a failure is the writer's.
pub(crate) fn frame_pending(session: &Arc<WriteContext>, pack: &SyncSender<Message>) -> Result<()> {
    session.wait_for_claims();
    frame(session, pack, session.pending_pages.take()).inspect_err(|_| {
        // Pages that others rely on are lost, so nothing of this writer may be committed.
        let _ = session.failure.set(Arc::new(StoreError::Latched { action: "framing of changed pages" }));
    })
}

pub(crate) fn frame(session: &WriteContext, pack: &SyncSender<Message>, batch: UnpackedPages) -> Result<()> {
    let pages = without_superseded(session, batch.pages);
    if pages.is_empty() {
        return Ok(());
    }
    // Each old page once: the older version of one page is often in the same frame as that of another.
    let (mut old, mut numbers) = (Vec::new(), HashMap::new());
    for page in pages.iter().filter_map(|page| page.old.as_ref()).chain(&batch.frame_siblings) {
        numbers.entry(page.key).or_insert_with(|| {
            old.push(page);
            old.len() - 1
        });
    }
    let number = |page: &OldPage| numbers.get(&page.key).copied();
    let changed: Vec<_> = pages
        .iter()
        .map(|page| delta::ChangedPages { new: &page.bytes, old: page.old.as_ref().and_then(number) })
        .collect();
    let olds: Vec<_> =
        old.iter().map(|old| delta::OldPages { bytes: &old.bytes, depth: old.depth }).collect();
    let parts = delta::plan(&changed, &olds, delta::PART_PAGES);
    let next = AtomicUsize::new(0);
    let work = || {
        // If this is refused, the thread works at normal priority.
        let _ = rustix::process::setpriority_process(None, NICE);
        let mut framer = Framer::new(&session.inner, pack.clone());
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            frame_part(&mut framer, part, &pages, &old)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers = session.inner.options.workers.clamp(1, parts.len().max(1));
        let start = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let threads: Vec<_> = (0..workers).filter_map(start).collect();
        if threads.is_empty() {
            return work();
        }
        let joined =
            threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<Vec<Result<()>>>().into_iter().collect()
    })
}

/// Removes pages that were written again, unless another thread relies on them.
fn without_superseded(session: &WriteContext, mut pages: Vec<ChangedPage>) -> Vec<ChangedPage> {
    let mut last = HashMap::new();
    pages.retain(|page| {
        let puts = last.entry(Arc::as_ptr(&page.image)).or_insert_with(|| page.image.last_puts());
        let superseded = puts.get(&page.page).is_some_and(|order| *order > page.order);
        !superseded || !session.unclaim(&page.digest)
    });
    pages
}

fn frame_part(framer: &mut Framer, part: &Part, pages: &[ChangedPage], old: &[&OldPage]) -> Result<()> {
    let objects: Vec<(Digest, &[u8])> =
        part.pages.iter().map(|i| (pages[*i].digest, &pages[*i].bytes[..])).collect();
    let old: Vec<&OldPage> = part.bases.iter().map(|i| old[*i]).collect();
    let keys: Vec<ShortDigest> = old.iter().map(|old| old.key).collect();
    let raw: Vec<u8> = old.iter().flat_map(|old| &old.bytes[..]).copied().collect();
    let depth = old.iter().map(|old| old.depth).max().unwrap_or(0);
    framer.changed(&objects, Bases { keys: &keys, raw: &raw, depth })
}
