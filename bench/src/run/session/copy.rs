//! `session.copy`: `cp` of a disk on the mount, until the server has the copy.
//!
//! The first copy is of a file that was never read here; the others of one that sshfs and rclone have in
//! their caches by then. Ours is made by the server each time. A `cp` on the server itself, over ssh, says
//! what there is to win at most.

use super::{
    far::{Far, ONE_WAY, SERVER, seconds},
    peers::{DISK, PORT, Sshd, fill, on_mounts},
    save::arrives,
};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};
use whimbrel_session::client::Policy;

fn cp(dir: &Path, to: &str) -> Result<()> {
    let done = Command::new("cp").arg(dir.join("disk.raw")).arg(dir.join(to)).status()?;
    ensure!(done.success(), "cp failed");
    Ok(())
}

/// Times of copies whose ends are seen at the server, each under another name.
fn copies(
    far: &Far,
    (who, times): (&str, usize),
    content: &[u8],
    copy: impl Fn(&str) -> Result<()>,
) -> Result<Vec<f64>> {
    let one = |number: usize| {
        let name = format!("{who}-{number}.raw");
        let took = seconds(|| {
            copy(&name)?;
            arrives(far, &name, content)
        });
        took.with_context(|| format!("copy {number} by {who}"))
    };
    (0..times).map(one).collect()
}

fn over_ssh(far: &Far, sshd: &Sshd, to: &str) -> Result<()> {
    let mut command = Command::new("ssh");
    command.args(["-p", &PORT.to_string(), "-i"]).arg(&sshd.key);
    command.arg("-o").arg(format!("UserKnownHostsFile={}", sshd.known.display()));
    let (from, to) = (far.served().join("disk.raw"), far.served().join(to));
    command.arg(format!("root@{SERVER}")).arg(format!("cp {} {}", from.display(), to.display()));
    command.stdin(Stdio::null());
    let done = far.namespaces[0].start(command)?.wait()?;
    ensure!(done.success(), "cp over ssh failed");
    Ok(())
}

/// Ours and theirs, over 30 Mbit/s.
pub(crate) fn copy(context: &Context) -> Result<Vec<Row>> {
    let times = context.times(10, 3) + 1;
    let far = Far::new(30, fill)?;
    let content = fs::read(far.served().join("disk.raw"))?;
    let near = far.mount("cache", Policy::Back)?;
    let ours = copies(&far, ("whimbrel", times), &content, |name| {
        cp(&near.path, name)?;
        near.flush()
    })?;
    near.end()?;
    let sshd = Sshd::start(&far)?;
    let others =
        on_mounts(&far, &sshd, |name, mounted| copies(&far, (name, times), &content, |to| cp(mounted, to)))?;
    let there = copies(&far, ("ssh", times), &content, |to| over_ssh(&far, &sshd, to))?;
    let row = |case: &str, range: std::ops::Range<usize>, (name, theirs): &(&str, Vec<f64>)| {
        let what = format!("{} MiB, {case}, {} ms, 30 Mbit/s", DISK >> 20, 2 * ONE_WAY.as_millis());
        let samples = |took: &[f64]| Samples::new(took[range.clone()].to_vec());
        Row::new("session.copy", what, "s", &samples(&ours)).against(*name, &samples(theirs))
    };
    let mut rows = Vec::new();
    for peer in &others {
        rows.push(row("never read here", 0..1, peer).goal(Goal::PeerAtMost(1.0)));
        rows.push(row("read here before", 1..times, peer).goal(Goal::PeerAtMost(1.0)));
    }
    rows.push(row("read here before", 1..times, &("cp over ssh", there)));
    Ok(rows)
}
