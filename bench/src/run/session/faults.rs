//! `session.faults`: what a program synced under write-back, while client, server and link die at random
//! instants.
//!
//! Both sides are the released program in processes of their own. A writer overwrites pages, replaces files
//! by way of temporary names, and rewrites one from its begin; what it has synced is promised. After each
//! death of the client the next mount writes back first, and then the server's files are compared with the
//! promises; at the end, with everything that was written. What lies in `kept` was taken for a conflict
//! though nobody else wrote, and counts as lost.

use super::{far::ONE_WAY, sides::Sides};
use crate::harness::{Chance, Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Result, bail};
use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use whimbrel_testkit::lab::LinkConfig;

const FILES: u64 = 4;
const PAGES: u64 = 96;
const PAGE: usize = 4096;
const LARGE: usize = 300_000;

/// What a page or a whole file was given last, and what of it was synced. A file that is rewritten in place
/// is nothing certain before its sync.
#[derive(Debug, Clone, Copy, Default)]
struct Version {
    written: u64,
    synced: u64,
}

#[derive(Default)]
struct Promises {
    pages: BTreeMap<(u64, u64), Version>,
    replaced: BTreeMap<u64, Version>,
    rewritten: Version,
    next: u64,
}

fn filled(version: u64, place: u64, len: usize) -> Vec<u8> {
    let unit = [version.to_le_bytes(), place.to_le_bytes()].concat();
    unit.iter().copied().cycle().take(len).collect()
}

/// The version of bytes that `filled` made for this place.
fn version_of(bytes: &[u8], place: u64) -> Option<u64> {
    let version = u64::from_le_bytes(*bytes.first_chunk()?);
    (filled(version, place, bytes.len()) == bytes).then_some(version)
}

/// A program on the mount, until an error or the end.
struct Writer {
    dir: PathBuf,
    promises: Arc<Mutex<Promises>>,
    chance: Chance,
}

impl Writer {
    fn promises(&self) -> std::sync::MutexGuard<'_, Promises> {
        self.promises.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> u64 {
        let mut promises = self.promises();
        promises.next += 1;
        promises.next
    }

    fn pages(&mut self) -> std::io::Result<()> {
        let name = self.chance.below(FILES);
        let path = self.dir.join(format!("pages-{name}"));
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        for _ in 0..1 + self.chance.below(12) {
            let (page, version) = (self.chance.below(PAGES), self.next());
            self.promises().pages.entry((name, page)).or_default().written = version;
            file.write_all_at(&filled(version, page, PAGE), page * PAGE as u64)?;
        }
        if self.chance.below(3) == 0 {
            file.sync_all()?;
            let mut promises = self.promises();
            let all = promises.pages.range_mut((name, 0)..=(name, PAGES));
            all.for_each(|(_, version)| version.synced = version.written);
        }
        Ok(())
    }

    fn replace(&mut self) -> std::io::Result<()> {
        let (name, version) = (self.chance.below(3), self.next());
        self.promises().replaced.entry(name).or_default().written = version;
        let temporary = self.dir.join("replaced.tmp");
        let file = File::create(&temporary)?;
        file.write_all_at(&filled(version, name, 20_000), 0)?;
        file.sync_all()?;
        fs::rename(temporary, self.dir.join(format!("replaced-{name}")))?;
        File::open(&self.dir)?.sync_all()?;
        self.promises().replaced.entry(name).or_default().synced = version;
        Ok(())
    }

    fn rewrite(&mut self) -> std::io::Result<()> {
        let version = self.next();
        self.promises().rewritten.written = version;
        let file = File::create(self.dir.join("rewritten"))?;
        file.write_all_at(&filled(version, 0, LARGE), 0)?;
        file.sync_all()?;
        self.promises().rewritten.synced = version;
        Ok(())
    }

    fn work(mut self, stop: &AtomicBool) -> std::io::Result<()> {
        while !stop.load(Ordering::Relaxed) {
            match self.chance.below(10) {
                0..7 => self.pages()?,
                7..9 => self.replace()?,
                _ => self.rewrite()?,
            }
        }
        Ok(())
    }
}

/// Where the server has something, and how much of it.
enum Place {
    Page(u64, u64),
    Replaced(u64),
    Rewritten,
}

impl Place {
    fn name(&self) -> String {
        match self {
            Self::Page(name, page) => format!("page {page} of {name}"),
            Self::Replaced(name) => format!("replaced {name}"),
            Self::Rewritten => "rewritten".to_owned(),
        }
    }

    /// The version that is there; none if nothing whole is.
    fn found(&self, server: &Path) -> Option<u64> {
        let whole =
            |name: String, len: usize| fs::read(server.join(name)).ok().filter(|bytes| bytes.len() == len);
        match *self {
            Self::Page(name, page) => {
                let mut bytes = vec![0; PAGE];
                let file = File::open(server.join(format!("pages-{name}"))).ok()?;
                file.read_exact_at(&mut bytes, page * PAGE as u64).ok()?;
                version_of(&bytes, page)
            }
            Self::Replaced(name) => version_of(&whole(format!("replaced-{name}"), 20_000)?, name),
            Self::Rewritten => version_of(&whole("rewritten".to_owned(), LARGE)?, 0),
        }
    }
}

impl Promises {
    /// Mistakes of what the server has. With `all` everything that was written must be there; else the client
    /// has died, and what is there of what was not synced is what there is from here on.
    fn mistakes(&mut self, server: &Path, all: bool) -> Vec<String> {
        let pages = self.pages.iter_mut().map(|((name, page), version)| (Place::Page(*name, *page), version));
        let replaced = self.replaced.iter_mut().map(|(name, version)| (Place::Replaced(*name), version));
        let rewritten = std::iter::once((Place::Rewritten, &mut self.rewritten));
        let mut mistakes = Vec::new();
        for (place, version) in pages.chain(replaced).chain(rewritten) {
            let Version { written, synced } = *version;
            let least = if all { written } else { synced };
            let found = place.found(server);
            // A file that is rewritten in place was nothing certain when it was not synced.
            let open = matches!(place, Place::Rewritten) && written != synced && !all;
            if least > 0 && !open && !found.is_some_and(|found| (least..=written).contains(&found)) {
                mistakes.push(format!("{}: {found:?}, not {least} to {written}", place.name()));
            }
            let certain = found.filter(|_| !open).unwrap_or_default();
            *version = Version { written: certain, synced: certain };
        }
        mistakes
    }
}

type Working = (Arc<AtomicBool>, JoinHandle<std::io::Result<()>>);

fn start(sides: &Sides, promises: &Arc<Mutex<Promises>>, seed: u64) -> Working {
    let stop = Arc::new(AtomicBool::new(false));
    let writer = Writer { dir: sides.path("mount"), promises: promises.clone(), chance: Chance(seed) };
    let stopped = stop.clone();
    (stop, thread::spawn(move || writer.work(&stopped)))
}

/// Ends the writer; its error if it had one.
fn stop((stop, writer): Working) -> Result<Option<std::io::Error>> {
    stop.store(true, Ordering::Relaxed);
    match writer.join() {
        Ok(worked) => Ok(worked.err()),
        Err(_) => bail!("the writer panicked"),
    }
}

/// Kills until it was done `kills` times; everything that went wrong.
fn run(kills: u64) -> Result<Vec<String>> {
    let mut sides = Sides::new()?;
    let promises: Arc<Mutex<Promises>> = Arc::default();
    let (mut chance, mut mistakes) = (Chance(11), Vec::new());
    let mut working = start(&sides, &promises, 1);
    for kill in 0..kills {
        thread::sleep(Duration::from_millis(10 + chance.below(300)));
        match chance.below(10) {
            0..4 => {
                sides.kill_mount()?;
                stop(working)?;
                sides.mount()?;
                let found = promises
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .mistakes(&sides.path("server"), false);
                mistakes.extend(found.into_iter().map(|mistake| format!("kill {kill}: {mistake}")));
                working = start(&sides, &promises, kill + 2);
            }
            4..8 => sides.serve()?,
            _ => {
                sides.link.change(LinkConfig { loss: 1.0, ..LinkConfig::new(100, ONE_WAY) });
                thread::sleep(Duration::from_millis(50 + chance.below(400)));
                sides.link.change(LinkConfig::new(100, ONE_WAY));
            }
        }
    }
    if let Some(error) = stop(working)? {
        mistakes.push(format!("the writer failed: {error}"));
    }
    sides.session("flush")?;
    mistakes.extend(
        promises.lock().unwrap_or_else(PoisonError::into_inner).mistakes(&sides.path("server"), true),
    );
    mistakes.extend((0..sides.put_aside()).map(|_| "a file was taken for a conflict".to_owned()));
    sides.session("unmount")?;
    Ok(mistakes)
}

/// Synced writes that were lost, and whatever else should not be.
pub(crate) fn faults(context: &Context) -> Result<Vec<Row>> {
    let kills = if context.quick { 60 } else { 500 };
    let mistakes = run(kills)?;
    mistakes.iter().for_each(|mistake| println!("session.faults: {mistake}"));
    let case = format!("{kills} kills of client, server or link, write-back, 32 ms, 100 Mbit/s");
    let lost = Samples::new(vec![mistakes.len() as f64]);
    Ok(vec![Row::new("session.faults", case, "lost", &lost).goal(Goal::AtMost(0.0))])
}
