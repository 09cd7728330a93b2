//! `align.found`: files copied into file systems that lie differently on their disks, found again by the
//! digests of their pages.
//!
//! File systems and partition tables are those of the test of the same name; the peer is the same disk cut at
//! multiples of the page size, as one would without looking at it.

#[allow(dead_code, reason = "the test uses more of it")]
#[path = "../../../crates/disk/whimbrel-block/tests/it/align_found/make.rs"]
mod make;

use crate::harness::{Goal, Row, Samples, scratch};
use crate::run::Context;
use anyhow::Result;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use whimbrel_alignment::PageAlignment;
use whimbrel_block::{AlignedDisk, Device, ExtentKind, FileDevice, layout_of};
use whimbrel_core::{Digest, PAGE_SIZE, is_zero};

/// Percent found, with the disk's own cuts and without.
struct Found {
    with: f64,
    without: f64,
}

/// The row: every file system in every place.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let folder = scratch("align")?;
    let files = make::files(folder.path());
    let wanted = pages_of(&files);
    // FAT12 and the large XFS add nothing but time to a quick run.
    let makers = make::MAKERS.iter().take(if context.quick { 4 } else { usize::MAX });
    let images: Vec<_> = makers.map(|maker| maker.make(folder.path(), &files)).collect();
    let mut found = Vec::new();
    for place in make::PLACES {
        let disk = place.make(folder.path());
        for image in &images {
            place.put(&disk, image);
            found.push(look(&disk, &wanted)?);
        }
        std::fs::remove_file(disk)?;
    }
    let with = Samples::of(&found, |it| it.with);
    let worst = Samples::new(vec![with.min()]);
    Ok(vec![
        Row::new("align.found", "the worst file system and place", "%", &worst).goal(Goal::AtLeast(95.0)),
        Row::new("align.found", "median of all", "%", &with)
            .against("cut at multiples of 4096", &Samples::of(&found, |it| it.without)),
    ])
}

fn look(disk: &Path, wanted: &[Digest]) -> Result<Found> {
    let device = Arc::new(FileDevice::open_read_only(disk)?);
    let cuts = layout_of(&*device).page_alignment()?;
    let share = |cuts| anyhow::Ok(share(wanted, &cut_pages(&device, cuts)?));
    Ok(Found { with: share(cuts)?, without: share(PageAlignment::identity(device.size())?)? })
}

/// Digests of the pages of `files` as a guest's page cache has them, the last of each filled up with zeros.
fn pages_of(files: &make::Files) -> Vec<Digest> {
    let pages = files.iter().flat_map(|(_, content)| content.chunks(PAGE_SIZE));
    let whole = |page: &[u8]| [page, &vec![0; PAGE_SIZE - page.len()]].concat();
    pages.map(|page| Digest::of(&whole(page))).collect()
}

/// Digests of the cut pages of `disk` that are not zero.
fn cut_pages(disk: &Arc<FileDevice>, cuts: PageAlignment) -> Result<HashSet<Digest>> {
    let disk = AlignedDisk::new(disk.clone(), cuts)?;
    let (mut found, mut at, mut buffer) = (HashSet::new(), 0, vec![0; 1 << 20]);
    while at < disk.size() {
        let window = &mut buffer[..(disk.size() - at).min(1 << 20) as usize];
        let extents = disk.extents(at, window.len() as u64)?;
        if extents.iter().any(|extent| extent.kind == ExtentKind::Data) {
            disk.read_at(at, window)?;
            found.extend(window.chunks(PAGE_SIZE).filter(|page| !is_zero(page)).map(Digest::of));
        }
        at += window.len() as u64;
    }
    Ok(found)
}

fn share(wanted: &[Digest], found: &HashSet<Digest>) -> f64 {
    100.0 * wanted.iter().filter(|digest| found.contains(digest)).count() as f64 / wanted.len() as f64
}
