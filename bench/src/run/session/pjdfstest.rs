//! `session.pjdfstest`: the public suite of POSIX calls, on a mount of root.
//!
//! The suite is the reader's own: `WHIMBREL_PJDFSTEST` names the folder of its sources, with the program
//! `pjdfstest` built in it.

use super::far::Far;
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{
    env, fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};
use whimbrel_session::server::Limits;

/// First letters of the mark of checks that may fail, in the Test Anything Protocol.
const EXPECTED: &str = "TOD";

/// Files of the suite in order.
fn cases(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("no suite in {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(cases(&path)?);
        } else if path.extension().is_some_and(|end| end == "t") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Checks that pass, and all checks, of one file.
fn run(case: &Path, dir: &Path) -> Result<(u64, u64)> {
    let done = Command::new("sh").arg(case).current_dir(dir).output()?;
    let (mut passed, mut all) = (0, 0);
    for line in String::from_utf8_lossy(&done.stdout).lines() {
        // What the suite itself expects to fail is marked by a word in capitals after the number sign.
        let expected = line.rsplit_once("# ").is_some_and(|(_, mark)| mark.starts_with(EXPECTED));
        let fails = line.starts_with("not ok") && !expected;
        if line.starts_with("ok ") || line.starts_with("not ok ") {
            all += 1;
            passed += u64::from(!fails);
            if fails {
                println!("session.pjdfstest: {}: {line}", case.display());
            }
        }
    }
    Ok((passed, all))
}

/// Share of the checks that pass.
pub(crate) fn pjdfstest(context: &Context) -> Result<Vec<Row>> {
    let suite = env::var_os("WHIMBREL_PJDFSTEST").map(PathBuf::from);
    let suite = suite.context("WHIMBREL_PJDFSTEST must name the folder of the suite pjdfstest, built")?;
    let limits = Limits { ownership: true, ..Limits::default() };
    let far = Far::with(limits, 1000, |server| {
        Ok(fs::set_permissions(server, fs::Permissions::from_mode(0o1777))?)
    })?;
    let near = far.mount_for_root("cache")?;
    let (mut passed, mut all) = (0, 0);
    let cases = cases(&suite.join("tests"))?;
    // Of `quick`, a tenth of the files.
    for case in cases.iter().step_by(if context.quick { 10 } else { 1 }) {
        let (right, checks) = run(case, &near.path)?;
        (passed, all) = (passed + right, all + checks);
    }
    near.end()?;
    ensure!(all > 0, "the suite has checked nothing");
    let case = format!("{all} checks, root session");
    let row =
        Row::new("session.pjdfstest", case, "%", &Samples::new(vec![100.0 * passed as f64 / all as f64]));
    Ok(vec![row.goal(Goal::AtLeast(99.5))])
}
