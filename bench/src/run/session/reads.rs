//! `session.open-dir`, `session.read`, `session.random.reads`, `session.ls.behind`: a directory of many
//! files, a large file from end to end and at random places, and a listing that a write-back must not hold
//! up.

use super::far::{Far, LAN_1000, seconds};
use crate::harness::{Chance, Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Result, anyhow, ensure};
use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    thread,
    time::Duration,
};
use whimbrel_session::client::Policy;

/// Readers at once, and reads of each.
const READERS: usize = 64;
const READS: usize = 100;

/// `ls` of a directory of many files.
pub(crate) fn open_dir(context: &Context) -> Result<Vec<Row>> {
    let files = if context.quick { 20_000 } else { 100_000 };
    let far = Far::new(100, |server| {
        fs::create_dir(server.join("many"))?;
        (0..files)
            .try_for_each(|number| File::create(server.join(format!("many/file-{number:06}"))).map(drop))?;
        Ok(())
    })?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for round in 0..context.times(5, 2) {
        let near = far.mount(&format!("cache-{round}"), Policy::None)?;
        let list = || {
            let count = fs::read_dir(near.path.join("many"))?.count();
            ensure!(count == files, "{count} of {files} files");
            Ok(())
        };
        cold.push(seconds(list)?);
        warm.push(seconds(list)?);
        near.end()?;
    }
    let case = |what: &str| format!("{files} files, 32 ms, 100 Mbit/s, {what}");
    Ok(vec![
        Row::new("session.open-dir", case("cold"), "s", &Samples::new(cold)).goal(Goal::AtMost(3.0)),
        Row::new("session.open-dir", case("warm"), "s", &Samples::new(warm)).goal(Goal::AtMost(0.3)),
    ])
}

/// One large file, read once over the link and once more after the mount was made anew.
pub(crate) fn whole_file(context: &Context) -> Result<Vec<Row>> {
    let mut rows = over(context, 100, 9.0)?;
    // As near to what the line carries as the other goal is, and nearer: a round trip weighs less.
    rows.extend(over(context, 30, 3.2)?);
    Ok(rows)
}

fn over(context: &Context, mbit: u64, goal: f64) -> Result<Vec<Row>> {
    let mib = if context.quick { 16 } else { 64 };
    let far = Far::new(mbit, |server| Ok(fs::write(server.join("disk.raw"), noise(mib << 20))?))?;
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for round in 0..context.times(3, 1) {
        for times in [&mut cold, &mut warm] {
            let near = far.mount(&format!("cache-{round}"), Policy::None)?;
            times.push(
                mib as f64
                    / seconds(|| {
                        ensure!(fs::read(near.path.join("disk.raw"))?.len() == mib << 20, "a short read");
                        Ok(())
                    })?,
            );
            near.end()?;
        }
    }
    let case = |what: &str| format!("{mib} MiB of noise, 32 ms, {mbit} Mbit/s, {what}");
    Ok(vec![
        Row::new("session.read", case("cold"), "MiB/s", &Samples::new(cold)).goal(Goal::AtLeast(goal)),
        Row::new("session.read", case("warm"), "MiB/s", &Samples::new(warm)),
    ])
}

/// Reads that wait for the link, many at a time.
pub(crate) fn random_reads(context: &Context) -> Result<Vec<Row>> {
    let size = if context.quick { 64 << 20 } else { 256 << 20 };
    let far = Far::new(100, |server| Ok(fs::write(server.join("disk.raw"), noise(size))?))?;
    let mut rates = Vec::new();
    for round in 0..context.times(3, 1) {
        let near = far.mount(&format!("cache-{round}"), Policy::None)?;
        let file = File::open(near.path.join("disk.raw"))?;
        let took = seconds(|| read_at_random(&file, size as u64, round as u64))?;
        rates.push((READERS * READS) as f64 / took);
        drop(file);
        near.end()?;
    }
    let case = format!("4 KiB each, {READERS} at once, 32 ms, 100 Mbit/s, cold");
    let row = Row::new("session.random.reads", case, "reads/s", &Samples::new(rates));
    Ok(vec![row.goal(Goal::AtLeast(2000.0))])
}

fn read_at_random(file: &File, size: u64, seed: u64) -> Result<()> {
    let read = |reader: u64| -> std::io::Result<()> {
        let (mut chance, mut page) = (Chance(0x9e37_79b9_7f4a_7c15 ^ (seed << 32 | (reader + 1))), [0; 4096]);
        (0..READS).try_for_each(|_| file.read_exact_at(&mut page, chance.below(size / 4096) * 4096))
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS as u64).map(|reader| scope.spawn(move || read(reader))).collect();
        readers
            .into_iter()
            .try_for_each(|reader| Ok(reader.join().map_err(|_| anyhow!("a reader panicked"))??))
    })
}

/// A listing while much is owed to the server.
pub(crate) fn listing_behind(context: &Context) -> Result<Vec<Row>> {
    let (owed, listings) = (if context.quick { 128 << 20 } else { 1 << 30 }, context.times(5, 3));
    let far = Far::new(30, |server| {
        let folder = |number| -> Result<()> {
            fs::create_dir(server.join(format!("folder-{number}")))?;
            let file = |file| File::create(server.join(format!("folder-{number}/file-{file}"))).map(drop);
            Ok((0..100).try_for_each(file)?)
        };
        (0..listings).try_for_each(folder)
    })?;
    let near = far.mount("cache", Policy::Back)?;
    fs::write(near.path.join("large.raw"), noise(owed))?;
    let (mut times, session) = (Vec::new(), near.session.clone());
    thread::scope(|scope| {
        let flush =
            scope.spawn(move || session.flush().map_err(|errno| anyhow!("not written back: {errno}")));
        for number in 0..listings {
            thread::sleep(Duration::from_secs(2));
            ensure!(!flush.is_finished(), "all was written back before the listing began");
            times.push(
                1e3 * seconds(|| {
                    let count = fs::read_dir(near.path.join(format!("folder-{number}")))?.count();
                    ensure!(count == 100, "{count} files");
                    Ok(())
                })?,
            );
        }
        // The rest of it is of no interest.
        far.change(LAN_1000);
        flush.join().map_err(|_| anyhow!("the write-back panicked"))?
    })?;
    near.end()?;
    let case = format!("100 files, 32 ms, 30 Mbit/s, {} MiB owed", owed >> 20);
    let row = Row::new("session.ls.behind", case, "ms", &Samples::new(times));
    Ok(vec![row.goal(Goal::AtMost(300.0))])
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}
