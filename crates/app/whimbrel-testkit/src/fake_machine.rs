//! Fake machine: page arrays that change while they are read, and a pause that stops the changes.
//!
//! Deterministic: the changes come from a seed and happen inside the calls of an engine, never in the
//! background. So a seed repeats a run, and every interleaving that an engine can meet occurs in some run.
//! While the machine runs, every call changes some pages first, and a read may be torn: a page changes
//! between its two halves. Such a page is in the next dirty set, as the contract of [`PageArray`] requires.

use rand::{Rng, SeedableRng, rngs::SmallRng};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use whimbrel_core::{PAGE_SIZE, PageRun, PageSet};
use whimbrel_machine::{Machine, MachineError, PageArray, PageError};

/// Configuration of a fake machine.
#[derive(Debug, Clone)]
pub struct FakeConfig {
    /// Name and length in pages of each array.
    pub arrays: Vec<(String, u64)>,
    /// Seed of all changes.
    pub seed: u64,
    /// Most pages written in each call while the machine runs.
    pub writes_per_call: u64,
    /// Number of calls after which every further one fails; none never fails.
    pub fails_after: Option<u64>,
}

/// Fake machine. Clones share its state, so a test can retain one to inspect it.
#[derive(Debug, Clone)]
pub struct FakeMachine(Arc<Mutex<FakeState>>);

/// Array of a fake machine.
#[derive(Debug)]
pub struct FakeArray {
    name: String,
    index: usize,
    world: Arc<Mutex<FakeState>>,
}

#[derive(Debug)]
struct FakeState {
    arrays: Vec<Pages>,
    random: SmallRng,
    writes_per_call: u64,
    calls_left: Option<u64>,
    running: bool,
}

#[derive(Debug)]
struct Pages {
    content: Vec<u8>,
    dirty: PageSet,
}

/// Failure that [`FakeConfig::fails_after`] requested.
#[derive(Debug, thiserror::Error)]
#[error("the fake machine was told to fail")]
pub struct Injected;

impl FakeMachine {
    /// Creates a running machine whose arrays have some pages already; returns it with the arrays.
    pub fn new(config: &FakeConfig) -> (Self, Vec<FakeArray>) {
        let pages =
            |count: u64| Pages { content: vec![0; count as usize * PAGE_SIZE], dirty: PageSet::empty(count) };
        let mut world = FakeState {
            arrays: config.arrays.iter().map(|(_, count)| pages(*count)).collect(),
            random: SmallRng::seed_from_u64(config.seed),
            writes_per_call: config.writes_per_call,
            calls_left: config.fails_after,
            running: true,
        };
        for index in 0..world.arrays.len() {
            for _ in 0..world.arrays[index].dirty.len() / 2 {
                world.change_some_page(index);
            }
        }
        let world = Arc::new(Mutex::new(world));
        let array = |(index, (name, _)): (usize, &(String, u64))| FakeArray {
            name: name.clone(),
            index,
            world: Arc::clone(&world),
        };
        let arrays = config.arrays.iter().enumerate().map(array).collect();
        (Self(world), arrays)
    }

    /// Present content of array number `index`.
    pub fn content(&self, index: usize) -> Vec<u8> {
        lock(&self.0).arrays[index].content.clone()
    }

    /// Pages of array number `index` that were written and not taken, which a failed attempt must leave.
    pub fn dirty(&self, index: usize) -> PageSet {
        lock(&self.0).arrays[index].dirty.clone()
    }

    /// Whether the machine runs.
    pub fn is_running(&self) -> bool {
        lock(&self.0).running
    }

    /// Disables further failures.
    pub fn stop_failing(&self) {
        lock(&self.0).calls_left = None;
    }
}

impl FakeState {
    /// Step of every call: the machine runs for a moment, then the call may fail.
    fn step(&mut self) -> Result<(), Injected> {
        if self.running && self.writes_per_call > 0 {
            for _ in 0..self.random.random_range(0..=self.writes_per_call) {
                let index = self.random.random_range(0..self.arrays.len());
                self.change_some_page(index);
            }
        }
        match &mut self.calls_left {
            None => Ok(()),
            Some(0) => Err(Injected),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }

    fn change_some_page(&mut self, index: usize) {
        let count = self.arrays[index].dirty.len();
        if count > 0 {
            // Half of the writes go to an eighth of the pages: machines have a writable working set.
            let span = if self.random.random() { count } else { count.div_ceil(8) };
            let page = self.random.random_range(0..span);
            self.change_page(index, page);
        }
    }

    fn change_page(&mut self, index: usize, page: u64) {
        let pages = &mut self.arrays[index];
        let at = page as usize * PAGE_SIZE;
        let content = &mut pages.content[at..at + PAGE_SIZE];
        match self.random.random_range(0..8) {
            0 => content.fill(0),
            1 => content[self.random.random_range(0..PAGE_SIZE)] ^= 1,
            _ => self.random.fill(content),
        }
        pages.dirty.insert(page);
    }
}

impl PageArray for FakeArray {
    fn name(&self) -> &str {
        &self.name
    }

    fn page_count(&self) -> u64 {
        lock(&self.world).arrays[self.index].dirty.len()
    }

    fn populated(&mut self) -> Result<PageSet, PageError> {
        let mut world = lock(&self.world);
        world.step().map_err(|error| PageError::new(&self.name, "scan", error))?;
        let pages = &world.arrays[self.index];
        let mut populated = PageSet::empty(pages.dirty.len());
        for (page, content) in (0..).zip(pages.content.chunks_exact(PAGE_SIZE)) {
            if !whimbrel_core::is_zero(content) {
                populated.insert(page);
            }
        }
        Ok(populated)
    }

    fn take_dirty(&mut self) -> Result<PageSet, PageError> {
        let mut world = lock(&self.world);
        world.step().map_err(|error| PageError::new(&self.name, "scan", error))?;
        Ok(world.arrays[self.index].dirty.take())
    }

    fn put_back(&mut self, pages: &PageSet) {
        lock(&self.world).arrays[self.index].dirty.union(pages);
    }

    fn read(&self, run: PageRun, out: &mut [u8]) -> Result<(), PageError> {
        let mut world = lock(&self.world);
        world.step().map_err(|error| PageError::new(&self.name, "read", error))?;
        let at = run.offset() as usize;
        out.copy_from_slice(&world.arrays[self.index].content[at..at + run.bytes()]);
        if world.running && world.writes_per_call > 0 && world.random.random() {
            // Torn read: the first half is the old page, the second half the new one.
            let page = world.random.random_range(run.pages());
            world.change_page(self.index, page);
            let half = page as usize * PAGE_SIZE + PAGE_SIZE / 2;
            let new = &world.arrays[self.index].content[half..half + PAGE_SIZE / 2];
            out[half - at..half - at + PAGE_SIZE / 2].copy_from_slice(new);
        }
        Ok(())
    }
}

impl Machine for FakeMachine {
    fn pause(&mut self) -> Result<(), MachineError> {
        let mut world = lock(&self.0);
        world.step().map_err(|error| MachineError::new("pause", error))?;
        world.running = false;
        Ok(())
    }

    fn unpause(&mut self) -> Result<(), MachineError> {
        let mut world = lock(&self.0);
        // Never fails: tests examine what an engine does after a failure.
        world.running = true;
        Ok(())
    }

    fn device_state(&mut self) -> Result<Vec<u8>, MachineError> {
        let mut world = lock(&self.0);
        world.step().map_err(|error| MachineError::new("save the devices of", error))?;
        if world.running {
            return Err(MachineError::new("save the devices of", "it runs"));
        }
        Ok(vec![0xd5; 3000])
    }
}

/// A test that panicked in one of these calls has ended; its state does not matter.
fn lock(world: &Mutex<FakeState>) -> MutexGuard<'_, FakeState> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(seed: u64) -> FakeConfig {
        let arrays = vec![("memory".to_owned(), 64), ("disk0".to_owned(), 32)];
        FakeConfig { arrays, seed, writes_per_call: 3, fails_after: None }
    }

    fn copy(array: &mut FakeArray, pages: &PageSet, copy: &mut [u8]) {
        for run in pages.runs() {
            let at = run.offset() as usize;
            array.read(run, &mut copy[at..at + run.bytes()]).unwrap();
        }
    }

    #[test]
    fn a_copy_that_follows_the_dirty_sets_is_exact_after_the_pause() {
        for seed in 0..50 {
            let (mut machine, mut arrays) = FakeMachine::new(&config(seed));
            let mut copies = [vec![0; 64 * PAGE_SIZE], vec![0; 32 * PAGE_SIZE]];
            for round in 0..4 {
                if round == 3 {
                    machine.pause().unwrap();
                }
                for (array, content) in arrays.iter_mut().zip(&mut copies) {
                    let pages = array.take_dirty().unwrap();
                    copy(array, &pages, content);
                }
            }
            assert_eq!([machine.content(0), machine.content(1)], copies, "seed {seed}");
        }
    }

    #[test]
    fn the_devices_of_a_running_machine_are_refused() {
        let (mut machine, _arrays) = FakeMachine::new(&config(1));
        assert!(machine.device_state().is_err());
        machine.pause().unwrap();
        assert!(machine.device_state().is_ok());
    }
}
