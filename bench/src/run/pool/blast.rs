//! A real program that computes for long, and its checkpoints: BLAST, as in section V of the paper, over
//! proteins that are made up.
//!
//! A checkpoint is what BLCR would write of it: the process stopped, its private writable memory in the order
//! of addresses. (CRIU, which is packaged, does not start on every kernel that this runs on.) The data base
//! is mapped from files and no part of it.

use crate::harness::{Chance, scratch};
use anyhow::{Context as _, Result, ensure};
use std::{
    fmt::Write as _,
    fs::{self, File},
    io::Write,
    os::unix::fs::FileExt as _,
    path::Path,
    process::{Child, Command, Stdio},
};
use tempfile::TempDir;

/// Families of proteins that resemble each other, so that there is something to be found.
const FAMILIES: usize = 300;
const PROTEINS: usize = 60_000;
/// Amino acids, the frequent ones more than once.
const ACIDS: &[u8] = b"AAAALLLLGGGGVVVEEESSSIIIKKKRRDDTTPPNNQFYMHCW";

/// A run of the program.
pub(super) struct Blast {
    dir: TempDir,
    child: Child,
}

/// Where proteins come from.
struct Nature(Chance);

impl Nature {
    fn below(&mut self, most: usize) -> usize {
        self.0.below(most as u64) as usize
    }

    fn acid(&mut self) -> u8 {
        ACIDS[self.below(ACIDS.len())]
    }

    fn protein(&mut self, least: usize, most: usize) -> Vec<u8> {
        (0..least + self.below(most - least)).map(|_| self.acid()).collect()
    }

    /// The same with so many of a hundred acids changed.
    fn relative(&mut self, of: &[u8], percent: usize) -> Vec<u8> {
        of.iter().map(|acid| if self.below(100) < percent { self.acid() } else { *acid }).collect()
    }
}

/// Proteins as FASTA: the data base, and the questions.
fn write_proteins(dir: &Path, questions: usize) -> Result<()> {
    let mut nature = Nature(Chance(7));
    let families: Vec<Vec<u8>> = (0..FAMILIES).map(|_| nature.protein(150, 600)).collect();
    let (mut base, mut asked) = (String::new(), String::new());
    for number in 0..PROTEINS {
        let protein = match nature.below(10) {
            0..3 => {
                let family = nature.below(FAMILIES);
                nature.relative(&families[family], 50)
            }
            _ => nature.protein(100, 500),
        };
        writeln!(base, ">s{number}\n{}", String::from_utf8_lossy(&protein))?;
    }
    for number in 0..questions {
        let family = nature.below(FAMILIES);
        let protein = nature.relative(&families[family], 30);
        writeln!(asked, ">q{number}\n{}", String::from_utf8_lossy(&protein))?;
    }
    fs::write(dir.join("base.fa"), base)?;
    Ok(fs::write(dir.join("asked.fa"), asked)?)
}

impl Blast {
    /// Starts to look for so many proteins: about six a second of one processor.
    pub(super) fn start(questions: usize) -> Result<Self> {
        let dir = scratch("blast")?;
        write_proteins(dir.path(), questions)?;
        let made = Command::new("makeblastdb")
            .args(["-in", "base.fa", "-dbtype", "prot", "-out", "base"])
            .current_dir(dir.path())
            .stdout(Stdio::null())
            .status()
            .context("no makeblastdb: scripts/bootstrap bench installs it")?;
        ensure!(made.success(), "makeblastdb: {made}");
        let child = Command::new("blastp")
            .args(["-query", "asked.fa", "-db", "base", "-evalue", "10", "-outfmt", "5", "-out", "found.xml"])
            .current_dir(dir.path())
            .stdout(Stdio::null())
            .spawn()?;
        Ok(Self { dir, child })
    }

    /// Whether it has come to its end; an error if that was a bad one.
    pub(super) fn is_done(&mut self) -> Result<bool> {
        let Some(status) = self.child.try_wait()? else { return Ok(false) };
        ensure!(status.success(), "blastp: {status}");
        ensure!(self.dir.path().join("found.xml").metadata()?.len() > 0, "blastp found nothing");
        Ok(true)
    }

    fn signal(&self, name: &str) -> Result<()> {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status()?;
        ensure!(sent.success(), "kill {name}: {sent}");
        Ok(())
    }

    /// Has its memory written somewhere; the program stands still until that is done.
    pub(super) fn checkpoint<T>(&self, write: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        self.signal("-STOP")?;
        let written = self.memory().and_then(|memory| write(&memory));
        self.signal("-CONT")?;
        written
    }

    /// What lies in `maps` as `rw-p`, proc_pid_maps(5).
    fn memory(&self) -> Result<Vec<u8>> {
        let id = self.child.id();
        let (maps, memory) =
            (fs::read_to_string(format!("/proc/{id}/maps"))?, File::open(format!("/proc/{id}/mem"))?);
        let mut out = Vec::new();
        for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let (start, end) = range.with_context(|| format!("maps: {line}"))?;
            let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
            let at = out.len();
            out.resize(at + (end - start) as usize, 0);
            memory.read_exact_at(&mut out[at..], start)?;
            // Where it lies, as a checkpoint has to say: a page of its own leaves the rest aligned.
            let mut header = [0; 4096];
            header[..16].copy_from_slice(&[start.to_le_bytes(), end.to_le_bytes()].concat());
            out.write_all(&header)?;
        }
        Ok(out)
    }
}

impl Drop for Blast {
    fn drop(&mut self) {
        // It may have come to its end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
