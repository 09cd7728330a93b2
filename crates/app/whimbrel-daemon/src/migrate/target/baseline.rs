//! Baselines on the target: chooses the content that the arrays of an incoming machine start from.
//!
//! See [`whimbrel_migrate::baseline`]. Of the capsules that the source offers, the first complete one is
//! taken: disks use its images as bases, and memory is filled from it while the source starts to send. Of the
//! files under the source's disks, those are used that are the same here, which the source's storage marker
//! proves.

use crate::{core::state::Core, machine::record::DiskBase};
use std::{
    fs::File,
    io::{self, Read},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
};
use whimbrel_core::{CapsuleId, lock};
use whimbrel_image::Manifest;
use whimbrel_migrate::{
    baseline::Baseline,
    protocol::{Offer, SharedFile},
    target::HostError as Cause,
};
use whimbrel_store::{Pin, StoredImage};

const FILL_THREADS: usize = 2;

pub(crate) struct IncomingBaseline {
    pub(crate) baselines: Vec<Baseline>,
    pub(crate) bases: Vec<DiskBase>,
    /// The capsule whose images are the bases of the disks.
    pub(crate) capsule: Option<CapsuleId>,
    memory: Option<(StoredImage, Pin)>,
}

impl Core {
    /// Chooses the baselines of an offered machine.
    pub(crate) fn choose_baseline(&self, offer: &Offer) -> IncomingBaseline {
        let whole: Vec<(CapsuleId, Manifest)> = offer
            .bases
            .iter()
            .filter(|id| self.store.has(&[id.0]) == [true] && !self.is_partial(id))
            .filter_map(|id| Some((*id, self.store.manifest(id).ok()?)))
            .collect();
        let mut begun_as = vec![Baseline::Zeros; offer.arrays.len()];
        let memory = whole.iter().find_map(|(id, manifest)| {
            let image = manifest.image("memory")?;
            let fits = image.pages == offer.config.memory_pages() && image.cuts.is_none();
            let root = image.root.filter(|_| fits)?;
            let pin = self.store.pin(id).ok()?;
            begun_as[0] = Baseline::Capsule(*id);
            Some((self.store.image(Some(root), image.pages), pin))
        });
        let over = whole.iter().find_map(|(id, manifest)| {
            let bases = bases_from_capsule(offer, manifest)?;
            // A check only: whoever opens the images pins them for the life of the machine.
            self.store.pin(id).ok()?;
            Some((*id, bases))
        });
        let (capsule, bases) = match over {
            Some((id, bases)) => {
                begun_as[1..].fill(Baseline::Capsule(id));
                (Some(id), bases)
            }
            None => (None, bases_from_files(offer, &mut begun_as[1..])),
        };
        IncomingBaseline { baselines: begun_as, bases, capsule, memory }
    }
}

/// Bases from the images of a capsule, if it has all disks.
fn bases_from_capsule(offer: &Offer, manifest: &Manifest) -> Option<Vec<DiskBase>> {
    let base = |(index, disk): (usize, &whimbrel_core::DiskConfig)| {
        let image = manifest.image(&format!("disk{index}")).filter(|image| image.size() == disk.size.0)?;
        Some(match image.root {
            Some(root) => DiskBase::image(root, image.cuts.clone()),
            None => DiskBase::Blank,
        })
    };
    let disks = &offer.config.disks;
    if disks.is_empty() { None } else { disks.iter().enumerate().map(base).collect() }
}

/// Bases from files that are the same here; otherwise blank.
fn bases_from_files(offer: &Offer, begun_as: &mut [Baseline]) -> Vec<DiskBase> {
    let base = |(index, begun_as): (usize, &mut Baseline)| {
        let file = offer.files.iter().find(|file| file.disk as usize == index);
        match file.filter(|file| is_same_file(file)) {
            Some(file) => {
                *begun_as = Baseline::File;
                DiskBase::File { path: PathBuf::from(&file.path) }
            }
            None => DiskBase::Blank,
        }
    };
    begun_as.iter_mut().enumerate().map(base).collect()
}

/// Whether the file at that path here is the source's: the marker is beside it, and the file was not written
/// since.
fn is_same_file(file: &SharedFile) -> bool {
    let path = Path::new(&file.path);
    let is_name = Path::new(&file.mark).components().count() == 1 && !file.mark.starts_with('.');
    let (Some(folder), true) = (path.parent(), path.is_absolute() && is_name) else { return false };
    let marked = || -> io::Result<bool> {
        let mut secret = Vec::new();
        File::open(folder.join(&file.mark))?.take(file.secret.len() as u64 + 1).read_to_end(&mut secret)?;
        let meta = std::fs::metadata(path)?;
        let (len, changed) = (meta.len(), changed_ns(&meta));
        Ok(secret == file.secret && meta.is_file() && (len, changed) == (file.len, file.changed))
    };
    marked().unwrap_or(false)
}

/// Time at which a file was last written.
pub(crate) fn changed_ns(meta: &std::fs::Metadata) -> i64 {
    meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec())
}

impl IncomingBaseline {
    /// Starts to fill `ram`, the memory of a machine, in the background. Does nothing the second time.
    pub(crate) fn fill(&mut self, ram: File) -> io::Result<BaselineFill> {
        let Some((image, pin)) = self.memory.take() else { return Ok(BaselineFill::nothing()) };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let fill = move || {
            let _pin = pin;
            image.restore(FILL_THREADS, |run, data| match stopped.load(Ordering::Relaxed) {
                true => Err(io::ErrorKind::Interrupted.into()),
                false => ram.write_all_at(data, run.offset()),
            })
        };
        let thread = thread::Builder::new().name("fill".into()).spawn(fill)?;
        Ok(BaselineFill { stop, state: Mutex::new(State::Running(thread)) })
    }
}

pub(crate) struct BaselineFill {
    stop: Arc<AtomicBool>,
    state: Mutex<State>,
}

enum State {
    Running(JoinHandle<whimbrel_store::Result<()>>),
    Done,
    Failed,
}

impl BaselineFill {
    /// A fill without anything to do.
    pub(crate) fn nothing() -> Self {
        Self { stop: Arc::default(), state: Mutex::new(State::Done) }
    }

    /// Waits until the memory has its baseline.
    pub(crate) fn wait(&self) -> Result<(), Cause> {
        let mut state = lock(&self.state);
        match std::mem::replace(&mut *state, State::Failed) {
            State::Running(thread) => {
                thread.join().map_err(|_| "filling memory failed")??;
                *state = State::Done;
                Ok(())
            }
            State::Done => {
                *state = State::Done;
                Ok(())
            }
            State::Failed => Err("memory could not be filled from its baseline".into()),
        }
    }
}

impl Drop for BaselineFill {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // The result no longer matters.
        let _ = self.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_only_with_the_mark_and_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        std::fs::write(&path, [1; 512]).unwrap();
        std::fs::write(folder.path().join("mark"), [7; 32]).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        let file = SharedFile {
            disk: 0,
            path: path.to_str().unwrap().to_owned(),
            len: 512,
            changed: changed_ns(&meta),
            mark: "mark".into(),
            secret: [7; 32],
        };
        assert!(is_same_file(&file));
        assert!(!is_same_file(&SharedFile { secret: [8; 32], ..file.clone() }), "another mark");
        assert!(!is_same_file(&SharedFile { mark: "none".into(), ..file.clone() }));
        assert!(!is_same_file(&SharedFile { mark: "../mark".into(), ..file.clone() }), "a way out");
        assert!(!is_same_file(&SharedFile { len: 513, ..file.clone() }));
        assert!(!is_same_file(&SharedFile { changed: file.changed + 1, ..file.clone() }));
        std::fs::write(folder.path().join("mark"), [7; 33]).unwrap();
        assert!(!is_same_file(&file), "a longer mark");
    }
}
