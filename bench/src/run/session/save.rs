//! `session.save`: a file of the server's is written anew with little changed, until the server has it as it
//! is now.
//!
//! That is what editors, compilers and converters of images do. sshfs and rclone are mounts of the same
//! directory over the same link; rsync is given the new file on this side, and sends what differs.

use super::{
    far::{Far, ONE_WAY, SERVER, seconds},
    peers::{DISK, PORT, Sshd, fill, installed, on_mounts},
};
use crate::harness::{Goal, Row, Samples};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs::{self, File},
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use whimbrel_session::client::Policy;

const PATIENCE: Duration = Duration::from_secs(60);
/// One page of so many is another one each time.
const ONE_IN: usize = 100;
const PAGE: usize = 4096;

/// Versions of one file, each with other pages changed.
struct Versions {
    content: Vec<u8>,
    number: usize,
}

impl Versions {
    fn of(far: &Far) -> Result<Self> {
        Ok(Self { content: fs::read(far.served().join("disk.raw"))?, number: 0 })
    }

    fn next(&mut self) -> &[u8] {
        self.number += 1;
        for page in self.content.chunks_mut(PAGE).skip(self.number % ONE_IN).step_by(ONE_IN) {
            page.iter_mut().for_each(|byte| *byte = byte.wrapping_add(self.number as u8 | 1));
        }
        &self.content
    }
}

fn write(dir: &Path, content: &[u8]) -> Result<()> {
    let mut file = File::create(dir.join("disk.raw"))?;
    file.write_all(content)?;
    Ok(file.sync_all()?)
}

/// Waits until a file of the server's has this content.
pub(super) fn arrives(far: &Far, name: &str, content: &[u8]) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while fs::read(far.served().join(name)).unwrap_or_default() != content {
        ensure!(Instant::now() < deadline, "the server has another content");
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// By a mount that says nothing of when it has sent everything.
fn saved(far: &Far, dir: &Path, versions: &mut Versions, times: usize) -> Result<Vec<f64>> {
    let save = |number| {
        let content = versions.next();
        let took = seconds(|| {
            write(dir, content)?;
            arrives(far, "disk.raw", content)
        });
        took.with_context(|| format!("version {number} of {times}"))
    };
    (1..=times).map(save).collect()
}

fn rsync(far: &Far, sshd: &Sshd, content: &[u8]) -> Result<f64> {
    let from = far.dir.path().join("disk.new");
    fs::write(&from, content)?;
    let mut command = Command::new("rsync");
    // Without the third it passes over what is as long, and of the same second.
    command.args(["--inplace", "--no-whole-file", "--ignore-times", "-e"]).arg(format!(
        "ssh -p {PORT} -i {} -o UserKnownHostsFile={}",
        sshd.key.display(),
        sshd.known.display()
    ));
    command.arg(&from).arg(format!("root@{SERVER}:{}/disk.raw", far.served().display()));
    command.stdin(Stdio::null());
    seconds(|| {
        let done = far.namespaces[0].start(command)?.wait()?;
        ensure!(done.success(), "rsync failed");
        Ok(())
    })
}

/// Ours and theirs, over 30 Mbit/s.
pub(crate) fn save(context: &Context) -> Result<Vec<Row>> {
    let times = if context.quick { 3 } else { 10 };
    let far = Far::new(30, fill)?;
    let mut versions = Versions::of(&far)?;
    let near = far.mount("cache", Policy::Back)?;
    let mut ours = Vec::new();
    for _ in 0..times {
        let content = versions.next();
        ours.push(seconds(|| {
            write(&near.path, content)?;
            near.flush()
        })?);
        arrives(&far, "disk.raw", content).context("ours")?;
    }
    near.end()?;
    let sshd = Sshd::start(&far)?;
    let mut others = on_mounts(&far, &sshd, |_, mounted| saved(&far, mounted, &mut versions, times))?;
    if installed("rsync") {
        let took = (0..times).map(|_| {
            let content = versions.next();
            let took = rsync(&far, &sshd, content)?;
            arrives(&far, "disk.raw", content).map(|()| took)
        });
        others.push(("rsync", took.collect::<Result<_>>()?));
    }
    let what = format!(
        "{} MiB written anew, one page in {ONE_IN} another, {} ms, 30 Mbit/s",
        DISK >> 20,
        2 * ONE_WAY.as_millis()
    );
    let ours = Samples::new(ours);
    let against = |(name, theirs): (&str, Vec<f64>)| {
        Row::new("session.save", what.clone(), "s", &ours)
            .against(name, &Samples::new(theirs))
            .goal(Goal::PeerAtMost(1.0))
    };
    Ok(others.into_iter().map(against).collect())
}
