//! Disk test: blocks on the disk with content that the test agent remembers.
//!
//! Blocks go to `/mnt/witness.dat` if a file system is mounted on `/mnt`, otherwise directly to `/dev/vda`.
//! They always bypass the page cache: a check answered from the guest's own memory would prove nothing about
//! the disk. Every block has its sequence number and noise derived from nonce and number; a later write to
//! the same block replaces the expectation.

use crate::{
    life::CheckResult,
    random::{Checksum, Noise, mix},
};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
};

const BLOCK: usize = 4096;
/// Blocks of the file on a mounted file system.
const FILE_BLOCKS: u64 = 4096;

/// One block, aligned as direct I/O requires.
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

/// Record of the blocks written.
#[derive(Default)]
pub(crate) struct Disk {
    /// Sequence number of the last write, by block number.
    written: BTreeMap<u64, u64>,
    sequence: u64,
}

impl Disk {
    /// Writes `count` blocks at pseudorandom positions, then syncs.
    pub(crate) fn write(&mut self, nonce: u64, count: u64) -> io::Result<()> {
        let (file, blocks) = open()?;
        let mut block = Box::new(Block([0; BLOCK]));
        for _ in 0..count {
            let sequence = self.sequence;
            let place = mix(nonce ^ mix(sequence)) % blocks;
            fill(&mut block, nonce, sequence);
            file.write_all_at(&block.0, place * BLOCK as u64)?;
            self.written.insert(place, sequence);
            self.sequence += 1;
        }
        file.sync_all()
    }

    /// Reads every block written so far; none if nothing was written.
    pub(crate) fn check(&self, nonce: u64) -> io::Result<Option<CheckResult>> {
        if self.written.is_empty() {
            return Ok(None);
        }
        let (file, _) = open()?;
        let (mut found, mut expected) = (Box::new(Block([0; BLOCK])), Box::new(Block([0; BLOCK])));
        let (mut sum, mut good) = (Checksum::default(), true);
        for (place, sequence) in &self.written {
            file.read_exact_at(&mut found.0, place * BLOCK as u64)?;
            fill(&mut expected, nonce, *sequence);
            good &= found.0 == expected.0;
            words(&found).for_each(|word| sum.add(word));
        }
        Ok(Some(CheckResult { sum: sum.value(), good }))
    }
}

fn words(block: &Block) -> impl Iterator<Item = u64> {
    block.0.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word))
}

fn fill(block: &mut Block, nonce: u64, sequence: u64) {
    let mut noise = Noise::new(nonce ^ mix(sequence + 1));
    let (chunks, _) = block.0.as_chunks_mut::<8>();
    chunks.iter_mut().for_each(|chunk| *chunk = noise.next().to_le_bytes());
    chunks[0] = sequence.to_le_bytes();
}

/// File or device to write to, and its size in blocks.
fn open() -> io::Result<(File, u64)> {
    let mounts = std::fs::read_to_string("/proc/mounts")?;
    let mounted = mounts.lines().any(|line| line.split(' ').nth(1) == Some("/mnt"));
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let path = if mounted { "/mnt/witness.dat" } else { "/dev/vda" };
    let file = OpenOptions::new().read(true).write(true).create(mounted).custom_flags(direct).open(path)?;
    if mounted {
        file.set_len(FILE_BLOCKS * BLOCK as u64)?;
        return Ok((file, FILE_BLOCKS));
    }
    let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?;
    match size / BLOCK as u64 {
        0 => Err(io::Error::other("the disk is smaller than a block")),
        blocks => Ok((file, blocks)),
    }
}
