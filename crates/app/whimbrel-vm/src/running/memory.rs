//! Memory of a running machine: the attachment to its QEMU, and the source of its missing pages.

use super::{
    CapsuleImages, MachineSetup, RunningError, Stall,
    disk::RemoteDisks,
    missing_pages::{MemoryPageStore, MissingMemory},
    runtime_dir::RuntimeDir,
};
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{Arc, Mutex},
    time::Duration,
};
use whimbrel_api::MachineState;
use whimbrel_capture::dirty_observer::{DirtyObserver, observable};
use whimbrel_core::{Digest, PageRun, PageSet, lock};
use whimbrel_image::PrefetchList;
use whimbrel_machine::{PageArray, PageError};
use whimbrel_memory::{Attachment, Mode, PageSource, Pager, RamTarget};
use whimbrel_migrate::postcopy::{PageFetcher, page_fetcher::PageStore};
use whimbrel_qemu::Qemu;
use whimbrel_store::StoredImage;

/// Memory of a running machine.
pub struct RunningMemory {
    attachment: Attachment,
    file: File,
    lazy: Option<LazyPart>,
    /// Whether it is filled on demand, once its source is known.
    on_demand: bool,
}

/// Shared with the views, which are read while an operation works.
pub(super) type SharedPager = Arc<Mutex<Option<Pager>>>;

/// Parts of memory that is filled on demand.
struct LazyPart {
    root: Option<Digest>,
    source: Arc<dyn PageSource>,
    /// Whether some of its pages may be on other hosts only.
    is_remote: bool,
    pager: SharedPager,
}

impl LazyPart {
    fn of_image(images: &CapsuleImages, root: Option<Digest>, pages: u64) -> Result<Self, RunningError> {
        let source = ImageSource::new(images.image("memory", root, pages))?;
        let is_remote = source.image.fetches_missing();
        Ok(Self { root, source: Arc::new(source), is_remote, pager: Arc::default() })
    }

    /// Fills pages, unless it does already. A pager that was told to end is waited for.
    fn serve(&self, attachment: &Attachment) -> Result<(), RunningError> {
        let mut pager = lock(&self.pager);
        if pager.as_ref().is_some_and(|pager| pager.state().end.is_none()) {
            return Ok(());
        }
        *pager = None;
        *pager = Some(Pager::start(attachment, self.source.clone()).map_err(memory_error)?);
        Ok(())
    }
}

/// Progress and touched pages of memory that is filled on demand.
#[derive(Clone)]
pub struct PagerView {
    pager: SharedPager,
    fetcher: Option<Arc<PageFetcher>>,
    pub(super) stall: Arc<Stall>,
    pub(super) disks: RemoteDisks,
}

impl RunningMemory {
    /// Attaches to a QEMU that has not run yet. Memory that is filled on demand gets its source later.
    pub fn attach(qemu: &Qemu, slot: &RuntimeDir, lazy: bool) -> Result<Self, RunningError> {
        let mode = if lazy { Mode::Lazy } else { Mode::Track };
        let attachment = Attachment::attach(qemu.pid() as i32, RamTarget::Path(slot.ram()), mode);
        Self::with_file(attachment.map_err(memory_error)?, slot, lazy)
    }

    /// Attaches to a QEMU to which an earlier process was attached.
    pub(super) fn adopt(
        setup: &MachineSetup,
        pid: u32,
        slot: &RuntimeDir,
        image: Option<Option<Digest>>,
    ) -> Result<Self, RunningError> {
        let (pid, ram) = (pid as i32, RamTarget::Path(slot.ram()));
        let attachment = match image {
            Some(_) => Attachment::adopt(pid, ram, Mode::Lazy),
            None => Attachment::open(pid, ram),
        };
        let mut memory = Self::with_file(attachment.map_err(memory_error)?, slot, image.is_some())?;
        match (image, &setup.fetcher) {
            (Some(_), Some(fetcher)) => memory.fetch_on_demand(fetcher)?,
            (Some(root), None) => {
                memory.fill_on_demand(&setup.images, root, setup.config.memory_pages())?;
            }
            (None, _) => {}
        }
        Ok(memory)
    }

    fn with_file(attachment: Attachment, slot: &RuntimeDir, on_demand: bool) -> Result<Self, RunningError> {
        let path = slot.ram();
        let file = File::options().read(true).write(true).open(&path);
        let file = file.map_err(|source| RunningError::io("open", &path, source))?;
        Ok(Self { attachment, file, lazy: None, on_demand })
    }

    /// Memory of which another process has passed the attachment. `image` is what it is filled from on
    /// demand; nobody fills it yet.
    pub(crate) fn passed(
        attachment: Attachment,
        setup: &MachineSetup,
        slot: &RuntimeDir,
        image: Option<Option<Digest>>,
    ) -> Result<Self, RunningError> {
        let mut memory = Self::with_file(attachment, slot, image.is_some())?;
        let pages = setup.config.memory_pages();
        memory.lazy = image.map(|root| LazyPart::of_image(&setup.images, root, pages)).transpose()?;
        Ok(memory)
    }

    /// Attachment to the memory of QEMU.
    pub(crate) fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    /// Whether pages may be missing that are on other hosts only.
    pub(crate) fn lacks_remote_pages(&self) -> bool {
        self.lazy.as_ref().is_some_and(|lazy| lazy.is_remote) && !self.wait_resident(Duration::ZERO)
    }

    /// Fills pages on demand again, or for the first time in this process.
    pub(crate) fn serve(&self) -> Result<(), RunningError> {
        self.lazy.as_ref().map_or(Ok(()), |lazy| lazy.serve(&self.attachment))
    }

    /// Ends who fills pages, so that another process can: who touches a missing one waits for that. False if
    /// pages under way do not come within `patience`.
    pub(crate) fn suspend(&self, patience: Duration) -> bool {
        let Some(lazy) = &self.lazy else { return true };
        let mut pager = lock(&lazy.pager);
        let has_ended = pager.as_mut().is_none_or(|pager| pager.end_within(patience));
        if has_ended {
            *pager = None;
        }
        has_ended
    }

    /// Fills touched pages from the image `root` of a capsule.
    pub fn fill_on_demand(
        &mut self,
        images: &CapsuleImages,
        root: Option<Digest>,
        pages: u64,
    ) -> Result<(), RunningError> {
        if self.lazy.is_some() {
            return Ok(());
        }
        let lazy = LazyPart::of_image(images, root, pages)?;
        lazy.serve(&self.attachment)?;
        self.lazy = Some(lazy);
        Ok(())
    }

    /// Fills touched pages with missing pages from another host.
    pub(super) fn fetch_on_demand(&mut self, taking: &Arc<PageFetcher>) -> Result<(), RunningError> {
        if self.lazy.is_some() || !self.on_demand {
            return Ok(());
        }
        let source = Arc::new(MissingMemory::new(taking.clone()));
        let lazy = LazyPart { root: None, source, is_remote: true, pager: Arc::default() };
        lazy.serve(&self.attachment)?;
        self.lazy = Some(lazy);
        Ok(())
    }

    /// The store for pages that arrive without a request; none if all pages are here.
    pub(super) fn store(&self) -> Option<Arc<dyn PageStore>> {
        let store = |lazy: &LazyPart| Arc::new(MemoryPageStore(lazy.pager.clone())) as Arc<dyn PageStore>;
        self.lazy.as_ref().map(store)
    }

    /// The memory as a page array.
    pub fn view(&self) -> Result<Box<dyn PageArray>, RunningError> {
        self.attachment.ram().map(|ram| Box::new(ram) as Box<dyn PageArray>).map_err(memory_error)
    }

    /// Whether it is filled on demand, and from which image.
    pub fn origin(&self) -> (bool, Option<Digest>) {
        (self.on_demand, self.lazy.as_ref().and_then(|lazy| lazy.root))
    }

    /// The memory as a page array, and an observer of its dirty log.
    pub fn pages(&self) -> Result<(Box<dyn PageArray>, DirtyObserver), RunningError> {
        let view =
            || self.attachment.ram().map(|ram| Box::new(ram) as Box<dyn PageArray>).map_err(memory_error);
        Ok(observable(view()?, view()?))
    }

    /// The memory file, to be filled before the machine runs.
    pub fn file(&self) -> std::io::Result<File> {
        self.file.try_clone()
    }

    /// Stores pages before the machine runs.
    pub fn write(&self, run: PageRun, data: &[u8]) -> std::io::Result<()> {
        self.file.write_all_at(data, run.offset())
    }

    /// Reads pages before the machine runs.
    pub fn read(&self, run: PageRun, out: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(out, run.offset())
    }

    /// Zeroes pages before the machine runs.
    pub fn zero(&self, run: PageRun) -> std::io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, hole, run.offset(), run.bytes() as u64)?)
    }

    pub(super) fn pager_view(
        &self,
        stall: &Arc<Stall>,
        disks: RemoteDisks,
        taking: Option<Arc<PageFetcher>>,
    ) -> Option<PagerView> {
        let view = |lazy: &LazyPart| PagerView {
            pager: lazy.pager.clone(),
            fetcher: taking,
            stall: stall.clone(),
            disks,
        };
        self.lazy.as_ref().map(view)
    }

    /// Prefetches all pages in the background.
    pub fn prefetch_all(&self) {
        self.with_pager(Pager::prefetch_all);
    }

    /// Whether all pages are here, after waiting at most `patience`.
    pub fn wait_resident(&self, patience: Duration) -> bool {
        self.with_pager(|pager| pager.wait_resident(patience)).unwrap_or(true)
    }

    /// Resident pages, all pages, and the reason of a stall.
    pub fn progress(&self) -> (u64, u64, Option<String>) {
        let state = self.with_pager(Pager::state);
        state.map_or((0, 0, None), |state| (state.resident, state.total, state.stalled))
    }

    fn with_pager<T>(&self, ask: impl FnOnce(&Pager) -> T) -> Option<T> {
        let pager = lock(&self.lazy.as_ref()?.pager);
        pager.as_ref().map(ask)
    }
}

impl Drop for RunningMemory {
    fn drop(&mut self) {
        // Views may outlive the machine; the pager's threads must not.
        if let Some(lazy) = &self.lazy {
            lock(&lazy.pager).take();
        }
    }
}

impl PagerView {
    /// `Lazy` while pages are missing, `Running` after that.
    pub fn state(&self) -> MachineState {
        let pager = lock(&self.pager);
        let waits = self.stall.reason();
        if let Some(view) = self.fetcher.as_ref().map(|taking| taking.status())
            && view.progress.missing > 0
        {
            let stalled = pager.as_ref().and_then(|pager| pager.state().stalled);
            let why = || format!("{} is not connected", view.from);
            let cut_off = (!view.connected).then(|| stalled.clone().or(waits.clone()).unwrap_or_else(why));
            return MachineState::Loading {
                resident_pages: view.missing_at_start.saturating_sub(view.progress.missing),
                total_pages: view.missing_at_start,
                stalled: cut_off.or(stalled).or(waits).or(view.stalled),
                from: Some(view.from),
            };
        }
        match pager.as_ref().map(Pager::state) {
            Some(state) if state.resident < state.total || waits.is_some() => MachineState::Loading {
                resident_pages: state.resident,
                total_pages: state.total,
                stalled: state.stalled.or(waits),
                from: None,
            },
            _ => MachineState::Running,
        }
    }

    /// Prefetches all pages in the background.
    pub fn prefetch_all(&self) {
        let pager = lock(&self.pager);
        pager.iter().for_each(Pager::prefetch_all);
    }

    /// Fetches these pages of the memory in the background.
    pub fn prefetch(&self, pages: &PageSet) {
        let pager = lock(&self.pager);
        pager.iter().for_each(|pager| pager.prefetch(pages));
    }

    /// The prefetch list of the machine; none once it has ended.
    pub fn prefetch_list(&self) -> Option<PrefetchList> {
        let pager = lock(&self.pager);
        let memory = ("memory".to_owned(), pager.as_ref()?.touched());
        let disks = self.disks.iter().map(|(name, disk)| (name.clone(), disk.touched()));
        Some(PrefetchList(disks.chain([memory]).collect()))
    }
}

fn memory_error(source: impl std::error::Error + Send + Sync + 'static) -> RunningError {
    RunningError::Memory { source: source.into() }
}

/// A stored image as the source of memory that is filled on demand.
struct ImageSource {
    image: StoredImage,
    present: PageSet,
}

impl ImageSource {
    fn new(image: StoredImage) -> Result<Self, RunningError> {
        let action = "read the image of the memory";
        let present = image.possibly_present().map_err(|source| RunningError::Store { action, source })?;
        Ok(Self { image, present })
    }
}

impl PageSource for ImageSource {
    fn page_count(&self) -> u64 {
        self.image.page_count()
    }

    fn present(&self) -> &PageSet {
        &self.present
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        self.image.read(run, out).map_err(|error| PageError::new("memory", "read", error))
    }

    fn preferred_run(&self, page: u64) -> PageRun {
        self.image.preferred_run(page).unwrap_or(PageRun::new(page, 1))
    }
}
