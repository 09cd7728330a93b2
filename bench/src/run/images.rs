//! Two versions of a guest's memory, ten seconds of compiling apart: what a store of machines meets every
//! day.
//!
//! Made once a checkout and kept in `target/bench/images`, because a Debian guest takes minutes to make.
//! Other images come with `--images`.

use super::Context;
use super::qemu_nbd::QemuNbd;
use crate::guest::{Guest, GuestPlan};
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;
use whimbrel_core::ByteSize;
use whimbrel_testkit::guest::{DebianGuest, GuestOptions, Work};

const MEMORY: ByteSize = ByteSize(512 << 20);
/// Until the compiler is in full swing.
const WARM_UP: Duration = Duration::from_secs(20);
const APART: Duration = Duration::from_secs(10);

/// The first version and the later one.
pub(crate) fn pair(context: &Context) -> Result<(PathBuf, PathBuf)> {
    if let Some(pair) = &context.images {
        return Ok(pair.clone());
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench/images");
    std::fs::create_dir_all(&folder)?;
    let (first, later) = (folder.join("first.mem"), folder.join("later.mem"));
    // The later one is written last, under another name first: where it is, both are whole.
    if !later.exists() {
        eprintln!("    making two memory images of a Debian guest that compiles; this takes minutes, once");
        let part = folder.join("later.part");
        make(&first, &part)?;
        std::fs::rename(part, &later)?;
    }
    Ok((first, later))
}

fn make(first: &Path, later: &Path) -> Result<()> {
    let debian = DebianGuest::get()?;
    let work = tempfile::tempdir()?;
    let disk = QemuNbd::snapshot(&debian.disk, &work.path().join("disk"))?;
    let options = GuestOptions { buffer_mib: 1, work: Work::Compile, ..GuestOptions::default() };
    let mut guest = Guest::boot(&GuestPlan::debian(&debian, MEMORY, options, disk.socket())?)?;
    sleep(WARM_UP);
    guest.dump(first)?;
    sleep(APART);
    guest.dump(later)
}
