//! Disk-only capsules: the disks and the configuration of a machine at one instant, without its memory.
//!
//! A machine that runs is paused while its last pages are copied, so all disks are of one instant. They look
//! as after a power failure, which file systems survive. The disks of a machine that is switched off are
//! copied as they are. A suspended machine has its disks in its capsule, so nothing is copied.

use crate::{
    capsule::checkpoint::{self, CheckpointOptions},
    capsule::disk_alignment::image_pages,
    core::{error::DaemonError, operations::ProgressReporter, refs},
    daemon::Daemon,
    machine::{
        entry::MachineLock,
        record::{DiskBase, Phase, Record},
    },
};
use std::time::Instant;
use whimbrel_api::{CaptureReport, RoundInfo, Unit};
use whimbrel_capture::AfterCapture;
use whimbrel_core::{CapsuleId, EXTENT_PAGES, PAGE_SIZE, PageSet};
use whimbrel_image::ImageRef;
use whimbrel_store::CapsuleWriter;
use whimbrel_vm::{RunningMachine, StoppedDisk};

/// Refuses a guest that cannot freeze its file systems, if it is to.
fn check_quiescible(
    record: &Record,
    live: &RunningMachine,
    wanted: &CheckpointOptions,
) -> Result<(), DaemonError> {
    let name = record.name.clone();
    match (wanted.quiesce, live.is_paused(), &live.qemu_ga) {
        (false, ..) | (true, false, Some(_)) => Ok(()),
        (true, true, _) => Err(DaemonError::State { name, state: "paused", needed: "running" }),
        (true, false, None) => Err(DaemonError::NoAgentPort { name }),
    }
}

impl Daemon {
    /// Takes a disk-only capsule of a machine, whether it runs or not.
    pub(crate) fn take_disk_only_capsule(
        &self,
        turn: &mut MachineLock<'_>,
        wanted: &CheckpointOptions,
        reporter: &ProgressReporter,
    ) -> Result<CaptureReport, DaemonError> {
        let begun = Instant::now();
        if turn.record.config.disks.is_empty() {
            return Err(DaemonError::invalid(format!("{} has no disks", turn.record.name)));
        }
        let report = match turn.record.phase.clone() {
            Phase::Here => {
                let (record, live) = turn.parts()?;
                check_quiescible(record, live, wanted)?;
                self.take_capsule_as_is(record, live, AfterCapture::Unpause, wanted, (&mut None, reporter))?
            }
            Phase::Stopped | Phase::Crashed { .. } => {
                self.take_stopped_disks(&mut turn.record, wanted, reporter)?
            }
            Phase::Suspended { capsule } => self.take_suspended_disks(&mut turn.record, &capsule, wanted)?,
            other => {
                let (name, state) = (turn.record.name.clone(), other.name());
                return Err(DaemonError::State { name, state, needed: "on this host" });
            }
        };
        Ok(CaptureReport { total_ms: begun.elapsed().as_secs_f64() * 1e3, ..report })
    }

    /// Takes a disk-only capsule of a machine that is switched off.
    pub(super) fn take_stopped_disks(
        &self,
        record: &mut Record,
        wanted: &CheckpointOptions,
        reporter: &ProgressReporter,
    ) -> Result<CaptureReport, DaemonError> {
        let (begun, before) = (Instant::now(), self.stored_bytes());
        let writer = self.store.writer().map_err(refs::store_error("begin to write"))?;
        let (mut images, mut pages) = (Vec::new(), 0);
        for index in 0..record.config.disks.len() {
            let (image, written) = self.write_stopped_disk(record, index, &writer, reporter)?;
            images.push(image);
            pages += written;
        }
        let capsule = self.commit_disks(record, images, &writer, wanted)?;
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let rounds = vec![RoundInfo { pages, bytes: pages * PAGE_SIZE as u64, ms, ..RoundInfo::default() }];
        Ok(self.report_disks(capsule, before, rounds))
    }

    /// Writes one disk: the pages that differ from its base image, or all of them.
    fn write_stopped_disk(
        &self,
        record: &Record,
        index: usize,
        writer: &CapsuleWriter,
        reporter: &ProgressReporter,
    ) -> Result<(ImageRef, u64), DaemonError> {
        let write = refs::store_error("write the image");
        let failed = |source: whimbrel_machine::PageError| DaemonError::Disk {
            disk: format!("disk{index}"),
            source: source.into(),
        };
        if let Some(owed) = &record.owed {
            let (name, from) = (record.name.clone(), owed.from.clone());
            return Err(DaemonError::MissingPages { name, from });
        }
        let (size, base) = (record.config.disks[index].size.0, &record.bases[index]);
        let dirs = self.directories.machine_dirs(&record.name);
        let disk = StoppedDisk::open((&dirs, &self.store), (index, size), base)?;
        let cuts = self.alignment_for(record, index, disk.device());
        let mut pages = disk.pages(cuts.as_ref())?;
        let owned = || image_pages(cuts.as_ref(), disk.allocated_pages());
        let (root, wanted): (_, Option<PageSet>) = match (base, base.whole_image()) {
            (_, Some((root, _))) => (Some(*root), owned()),
            (DiskBase::Blank, _) => (None, owned()),
            // Every page is read of a file, and of an image that has another number of pages.
            (DiskBase::File { .. } | DiskBase::Image { .. }, None) => (None, None),
        };
        let wanted = wanted.map_or_else(|| pages.populated().map_err(failed), Ok)?;
        let mut image = writer.image(root, pages.page_count()).map_err(&write)?;
        let (mut buffer, mut done, total) = (Vec::new(), 0, wanted.count());
        for run in wanted.runs().flat_map(|run| run.chunks(EXTENT_PAGES as u64)) {
            buffer.resize(run.bytes(), 0);
            pages.read(run, &mut buffer).map_err(failed)?;
            image.put(run, &buffer).map_err(&write)?;
            done += run.len;
            reporter.progress("copying", Unit::Pages, done, Some(total));
            if reporter.is_cancelled() {
                return Err(DaemonError::Cancelled { left: "nothing was stored".into() });
            }
        }
        let image = image.finish().map_err(&write)?;
        Ok((ImageRef { name: format!("disk{index}"), pages: image.pages, root: image.root, cuts }, done))
    }

    /// Makes a capsule of the disks of another capsule. The trees are shared, so no page is read.
    fn take_suspended_disks(
        &self,
        record: &mut Record,
        capsule: &CapsuleId,
        wanted: &CheckpointOptions,
    ) -> Result<CaptureReport, DaemonError> {
        let before = self.stored_bytes();
        let _whole = self.store.pin(capsule).map_err(refs::store_error("read the capsule"))?;
        let manifest = self.store.manifest(capsule).map_err(refs::store_error("read the capsule"))?;
        let writer = self.store.writer().map_err(refs::store_error("begin to write"))?;
        let images = manifest.images.into_iter().filter(|image| image.name != "memory").collect();
        // The machine resumes from its own capsule: this one is a child of that, and not the newest.
        let names = wanted.tag.clone().into_iter().collect::<Vec<_>>();
        if names.is_empty() {
            return Err(DaemonError::invalid(format!(
                "{} is suspended and its name refers to the capsule that it resumes from: choose a tag for its disks",
                record.name
            )));
        }
        let labels = checkpoint::labels_of(record, wanted);
        let mut child = record.clone();
        child.last = Some(*capsule);
        let id = self.commit_as(&child, images, &writer, ([&[], &[]], labels), &names)?;
        Ok(self.report_disks(id, before, Vec::new()))
    }

    fn commit_disks(
        &self,
        record: &mut Record,
        images: Vec<ImageRef>,
        writer: &CapsuleWriter,
        wanted: &CheckpointOptions,
    ) -> Result<CapsuleId, DaemonError> {
        let labels = checkpoint::labels_of(record, wanted);
        let capsule = self.commit(record, images, writer, [&[], &[]], (wanted, labels))?;
        record.last = Some(capsule);
        Ok(capsule)
    }

    fn report_disks(&self, capsule: CapsuleId, before: u64, rounds: Vec<RoundInfo>) -> CaptureReport {
        let bytes_added = self.stored_bytes().saturating_sub(before);
        CaptureReport { capsule, pause_ms: 0.0, total_ms: 0.0, bytes_added, rounds, balloon_freed: None }
    }
}
