//! The world: everything outside the program under test, in one value that only the thread with the baton
//! touches.
//!
//! [`with`] lends it for a moment; nothing may stop, or call the program under test, meanwhile. All that
//! stops a thread is in [`baton`]. Decisions come from the streams of one seed, so the seed decides all.

pub(crate) mod baton;
pub(crate) mod calls;
pub(crate) mod disk;
pub(crate) mod faults;
pub(crate) mod files;
pub(crate) mod hosts;
pub(crate) mod network;
pub(crate) mod processes;
pub(crate) mod schedule;
pub(crate) mod story;

use crate::{random::Random, report};
use faults::Faults;
use files::Descriptors;
use hosts::Host;
use processes::Processes;
use schedule::{ProcessId, Schedule, ThreadId};
use std::{
    cell::Cell,
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};
use story::Story;

/// Hosts of every world.
const HOSTS: usize = 4;

/// How a seed is run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    /// Changes of thread by chance after which there are no more.
    pub(crate) switches_max: Option<u64>,
    /// Numbers of faults that do not happen.
    pub(crate) without: BTreeSet<u64>,
    /// Whether to print every call as it is made.
    pub(crate) trace: bool,
}

/// Everything outside the program under test.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) schedule: Schedule,
    pub(crate) hosts: Vec<Host>,
    pub(crate) descriptors: Descriptors,
    pub(crate) processes: Processes,
    pub(crate) faults: Faults,
    pub(crate) story: Story,
    /// Decisions of the scene.
    pub(crate) work: Random,
    /// What the program under test reads as random bytes.
    pub(crate) entropy: Random,
}

static WORLD: Mutex<Option<World>> = Mutex::new(None);

thread_local! {
    static ME: Cell<ThreadId> = const { Cell::new(0) };
    /// Whether calls of this thread go to the real system.
    static OUTSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Lends the world. Calls that `use_it` makes go to the real system.
pub(crate) fn with<T>(use_it: impl FnOnce(&mut World) -> T) -> T {
    let before = OUTSIDE.replace(true);
    let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
    let result = use_it(world.as_mut().expect("the world has begun"));
    drop(world);
    OUTSIDE.set(before);
    result
}

/// Looks at something that all processes share, as no process of a real system could: nothing stops
/// meanwhile.
pub(crate) fn observe<T>(look: impl FnOnce() -> T) -> T {
    let before = OUTSIDE.replace(true);
    let result = look();
    OUTSIDE.set(before);
    result
}

/// Whether the calls of this thread are the world's.
pub(crate) fn is_inside() -> bool {
    ME.get() != 0 && !OUTSIDE.get()
}

/// The thread that has the baton, which is the one that asks.
pub(crate) fn me() -> ThreadId {
    ME.get()
}

pub(crate) fn set_me(id: ThreadId) {
    ME.set(id);
}

/// Begins a world with this thread in it, as the one that watches the others.
pub(crate) fn begin(config: &Config) {
    let stream = |purpose| Random::new(config.seed, purpose);
    let mut schedule = Schedule::new(stream(1), config.switches_max.unwrap_or(u64::MAX));
    let me = schedule.add(0, baton::new_word());
    let world = World {
        schedule,
        hosts: (0..HOSTS).map(|_| Host::default()).collect(),
        descriptors: Descriptors::default(),
        processes: Processes::default(),
        faults: Faults::new(stream(2), config.without.clone()),
        story: Story::new(config.seed, config.trace),
        work: stream(3),
        entropy: stream(4),
    };
    *WORLD.lock().unwrap_or_else(PoisonError::into_inner) = Some(world);
    ME.set(me);
}

/// A number below `n`, for the scene to decide by.
pub(crate) fn draw(n: u64) -> u64 {
    with(|world| world.work.below(n))
}

/// Tells the reader of the report what happens.
pub(crate) fn log(text: &str) {
    with(|world| world.log(text));
}

/// The simulated time since the beginning, in nanoseconds.
pub(crate) fn elapsed() -> u64 {
    with(|world| world.schedule.now - schedule::BEGINNING)
}

impl World {
    pub(crate) fn process(&self, thread: ThreadId) -> ProcessId {
        self.schedule.threads.get(&thread).map_or(0, |thread| thread.process)
    }

    /// Adds a line to the story.
    pub(crate) fn log(&mut self, text: &str) {
        let process = self.processes.name(self.process(me()));
        self.story.log(self.schedule.now, &process, text);
    }
}

/// Ends the seed: the scene has come to its end and every rule has held.
pub(crate) fn end() -> ! {
    report::finish(None)
}
