//! Target processes for the tests, killed when the test ends in any way.

#![allow(dead_code, unreachable_pub)] // Each test file uses a part; `pub` is for them.

use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Condvar, Mutex},
    time::Duration,
};
use tempfile::{NamedTempFile, TempPath};
use whimbrel_core::{PageRun, PageSet};
use whimbrel_machine::PageError;
use whimbrel_memory::{PageSource, RamTarget};

pub const PAGE: usize = 4096;
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_memory-target");

/// A child that is killed when dropped.
pub struct Target {
    pub child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pub base: u64,
}

impl Target {
    /// Process that maps `pages` pages of `path`; `kind` is `shared`, `private` or `anonymous`.
    pub fn serving(kind: &str, path: &str, pages: u64) -> Self {
        let mut target = Self::spawn(&["serve", kind, path, &pages.to_string()]);
        let line = target.line();
        target.base = u64::from_str_radix(line.trim_start_matches("0x"), 16).expect("an address");
        target
    }

    pub fn spawn(args: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start the target");
        let (input, output) = (child.stdin.take().expect("stdin"), child.stdout.take().expect("stdout"));
        Self { child, input, output: BufReader::new(output), base: 0 }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("an answer");
        line.trim().to_owned()
    }

    pub fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("send");
    }

    pub fn write(&mut self, page: u64, byte: u8) {
        self.send(&format!("write {page} {byte}"));
        self.line();
    }

    pub fn sum(&mut self, page: u64) -> u64 {
        self.send(&format!("sum {page}"));
        self.line().parse().expect("a sum")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Answer of [`Target::sum`] for this content.
pub fn sum_of(content: &[u8]) -> u64 {
    content.iter().fold(0, |sum: u64, byte| sum.rotate_left(5) ^ u64::from(*byte))
}

/// A file of `pages` pages on tmpfs, removed with the value. `label` becomes a part of its name.
pub fn ram_file(label: &str, pages: u64) -> TempPath {
    let file: NamedTempFile = tempfile::Builder::new().prefix(label).tempfile_in("/dev/shm").expect("tmpfs");
    file.as_file().set_len(pages * PAGE as u64).expect("size");
    file.into_temp_path()
}

pub fn by_path(path: &TempPath) -> RamTarget {
    RamTarget::Path(PathBuf::from(&**path))
}

pub fn text(path: &TempPath) -> &str {
    path.to_str().expect("a name in ASCII")
}

/// Source with content derived from the page number. Every eighth page is zero.
pub struct Image {
    present: PageSet,
    frame: u64,
    pub failing: Mutex<bool>,
    pub gate: Gate,
}

/// Reads of a source that wait for each other.
#[derive(Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    closed: bool,
    /// Reads that wait now, and the most that ever did.
    waiting: usize,
    most: usize,
}

impl Gate {
    pub fn close(&self, closed: bool) {
        self.state.lock().expect("no panic").closed = closed;
        self.changed.notify_all();
    }

    pub fn waiting(&self) -> usize {
        self.state.lock().expect("no panic").waiting
    }

    pub fn most(&self) -> usize {
        self.state.lock().expect("no panic").most
    }

    fn pass(&self) {
        let mut state = self.state.lock().expect("no panic");
        state.waiting += 1;
        state.most = state.most.max(state.waiting);
        // Bounded, so that a test that fails ends.
        let bound = Duration::from_secs(30);
        state = self.changed.wait_timeout_while(state, bound, |state| state.closed).expect("no panic").0;
        state.waiting -= 1;
    }
}

impl Image {
    pub fn new(pages: u64, frame: u64) -> Self {
        let mut present = PageSet::empty(pages);
        (0..pages).filter(|page| page % 8 != 5).for_each(|page| {
            present.insert(page);
        });
        Self { present, frame, failing: Mutex::new(false), gate: Gate::default() }
    }

    pub fn page(&self, page: u64) -> Vec<u8> {
        if !self.present.contains(page) {
            return vec![0; PAGE];
        }
        let seed = (page + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..PAGE as u64 / 8).flat_map(|i| seed.wrapping_mul(2 * i + 1).to_le_bytes()).collect()
    }
}

impl PageSource for Image {
    fn page_count(&self) -> u64 {
        self.present.len()
    }

    fn present(&self) -> &PageSet {
        &self.present
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        self.gate.pass();
        if *self.failing.lock().expect("no panic") {
            return Err(PageError::new("image", "read", "the link is down"));
        }
        for (page, part) in run.pages().zip(out.chunks_exact_mut(PAGE)) {
            part.copy_from_slice(&self.page(page));
        }
        Ok(())
    }

    fn preferred_run(&self, page: u64) -> PageRun {
        PageRun::new(page / self.frame * self.frame, self.frame)
    }
}
