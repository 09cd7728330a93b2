//! `session.open-dir` and `session.read`: a directory of many files, and one large file, twice.

use super::far::{Far, seconds};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Result, ensure};
use std::fs::{self, File};
use whimbrel_session::client::Policy;

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
    let far = Far::new(mbit, |server| {
        let mut state = 1u64;
        let noise: Vec<u8> = (0..mib << 20)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        Ok(fs::write(server.join("disk.raw"), noise)?)
    })?;
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
