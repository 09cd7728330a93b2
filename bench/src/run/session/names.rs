//! `session.names`: memory of a client that has seen very many names of its server.

use super::{far::seconds, sides::Sides};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs::{self, File},
    path::Path,
    time::Duration,
};
use whimbrel_testkit::lab::LinkConfig;

/// Names in each directory.
const IN_DIR: usize = 1000;

/// The largest resident size that a process has had, in MiB.
fn peak(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no peak of memory")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}

fn fill(server: &Path, dirs: usize) -> Result<()> {
    for dir in 0..dirs {
        let path = server.join(format!("directory-{dir:05}"));
        fs::create_dir(&path)?;
        (0..IN_DIR).try_for_each(|name| File::create(path.join(format!("file-{name:04}"))).map(drop))?;
    }
    Ok(())
}

/// Lists everything with its attributes, as `ls -lR` does.
fn look(mount: &Path) -> Result<usize> {
    let mut seen = 0;
    for dir in fs::read_dir(mount)? {
        for entry in fs::read_dir(dir?.path())? {
            entry?.metadata()?;
            seen += 1;
        }
    }
    Ok(seen)
}

/// A client lists the whole tree of a server.
pub(crate) fn names(context: &Context) -> Result<Vec<Row>> {
    let dirs = if context.quick { 1000 } else { 10_000 };
    let mut sides = Sides::new()?;
    sides.link.change(LinkConfig::new(1000, Duration::from_micros(100)));
    // Below a name of its own, which the walk at the begin of the session has not seen.
    let tree = sides.path("server").join("tree");
    fs::create_dir(&tree)?;
    fill(&tree, dirs)?;
    // What the first mount was told of while the tree was made is of no interest.
    sides.kill_mount()?;
    sides.mount()?;
    let took = seconds(|| {
        let seen = look(&sides.path("mount").join("tree"))?;
        ensure!(seen == dirs * IN_DIR, "{seen} names");
        Ok(())
    })?;
    eprintln!("    all names seen in {took:.0} s");
    let memory = Samples::new(vec![peak(sides.mount.as_ref().context("no mount")?.id())?]);
    sides.session("unmount")?;
    let case = format!("{} names listed with their attributes", dirs * IN_DIR);
    Ok(vec![Row::new("session.names", case, "MiB", &memory).goal(Goal::AtMost(1024.0))])
}
