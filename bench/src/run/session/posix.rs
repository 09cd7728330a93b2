//! `session.posix`: wrong bytes and unexpected errors of programs on a mount, while links are cut and pages
//! of the cache are damaged: fio's own verification, random operations against a model, git and a compiler.

use super::{
    build,
    far::{Far, Near},
};
use crate::harness::{Chance, Goal, Row, Samples, scratch};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    process::Command,
};
use whimbrel_session::client::Policy;

fn command(dir: &Path, line: &str) -> Result<()> {
    let done = Command::new("sh").args(["-ec", line]).current_dir(dir).output()?;
    ensure!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

fn fio(near: &Near, context: &Context) -> Result<()> {
    let mib = if context.quick { 16 } else { 128 };
    for kind in ["randwrite", "write", "randrw"] {
        command(
            &near.path,
            &format!(
                "fio --name=v-{kind} --directory=. --rw={kind} --bsrange=512-96k --size={mib}M --verify=crc32c --verify_fatal=1 \
             --ioengine=psync --fsync=64 --minimal >/dev/null"
            ),
        )?;
    }
    Ok(())
}

const SIZE: u64 = 3 << 20;

/// One file and what it should be.
struct Model<'a> {
    far: &'a Far,
    near: &'a Near,
    file: File,
    content: Vec<u8>,
    chance: Chance,
}

impl Model<'_> {
    fn step(&mut self) -> Result<()> {
        let offset = self.chance.below(SIZE);
        let len = 1 + self.chance.below(200_000) as usize;
        match self.chance.below(100) {
            0..40 => {
                let byte = self.chance.below(256) as u8;
                let data: Vec<u8> = (0..len).map(|at| byte.wrapping_mul(at as u8 | 1)).collect();
                self.file.write_all_at(&data, offset)?;
                let end = offset as usize + len;
                self.content.resize(self.content.len().max(end), 0);
                self.content[offset as usize..end].copy_from_slice(&data);
            }
            40..80 => self.compare(offset as usize, len)?,
            80..88 => {
                self.file.set_len(offset)?;
                self.content.resize(offset as usize, 0);
            }
            88..92 => self.file.sync_all()?,
            92..95 => {
                self.file =
                    OpenOptions::new().read(true).write(true).open(self.near.path.join("model.img"))?
            }
            95..97 => self.far.cut(),
            97 => self.near.session.invalidate().map_err(|errno| anyhow::anyhow!("{errno}"))?,
            98 => self.near.session.flush().map_err(|errno| anyhow::anyhow!("{errno}"))?,
            _ => self.damage()?,
        }
        Ok(())
    }

    fn compare(&self, offset: usize, len: usize) -> Result<()> {
        let mut out = vec![0; len];
        let read = self.file.read_at(&mut out, offset as u64)?;
        let from = offset.min(self.content.len());
        let expected = &self.content[from..self.content.len().min(from + len)];
        // A read may be short, but not empty.
        ensure!(out[..read] == expected[..read.min(expected.len())], "wrong bytes at {offset}");
        ensure!(read > 0 || expected.is_empty(), "nothing at {offset}");
        Ok(())
    }

    /// Flips bytes of the cache, of which the server has everything.
    fn damage(&mut self) -> Result<()> {
        self.near.session.flush().map_err(|errno| anyhow::anyhow!("{errno}"))?;
        let frames =
            OpenOptions::new().read(true).write(true).open(self.far.dir.path().join("cache/frames"))?;
        let len = frames.metadata()?.len();
        for _ in 0..50 {
            let (at, mut byte) = (self.chance.below(len), [0]);
            if frames.read_at(&mut byte, at)? == 1 {
                frames.write_all_at(&[!byte[0]], at)?;
            }
        }
        Ok(())
    }
}

fn random(far: &Far, near: &Near, context: &Context) -> Result<()> {
    let path = near.path.join("model.img");
    // Larger than what goes through the kernel's pages, so that the cache is what is read.
    let content = vec![1; SIZE as usize];
    fs::write(&path, &content)?;
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    let mut model = Model { far, near, file, content, chance: Chance(7) };
    for number in 0..if context.quick { 600 } else { 6000 } {
        model.step().with_context(|| format!("step {number}"))?;
    }
    near.session.flush().map_err(|errno| anyhow::anyhow!("{errno}"))?;
    ensure!(fs::read(far.served().join("model.img"))? == model.content, "the server has other bytes");
    Ok(())
}

fn git_and_compiler(far: &Far, near: &Near) -> Result<()> {
    let plain = scratch("session-posix")?;
    build::source(plain.path(), true)?;
    let git = "git -c user.name=bench -c user.email=bench@localhost -c gc.auto=0";
    command(plain.path(), &format!("{git} init -q; {git} add .; {git} commit -qm source"))?;
    command(&near.path, &format!("{git} clone -q --no-hardlinks {} clone", plain.path().display()))?;
    far.cut();
    command(
        &near.path,
        &format!(
            "cd clone; {git} fsck --strict; {git} checkout -q -b other; {git} status --porcelain > ../status; test ! -s ../status"
        ),
    )?;
    build::make(&near.path.join("clone"))?;
    build::make(plain.path())?;
    ensure!(
        fs::read(near.path.join("clone/lib.a"))? == fs::read(plain.path().join("lib.a"))?,
        "another library was built"
    );
    near.session.flush().map_err(|errno| anyhow::anyhow!("{errno}"))?;
    command(
        &far.served().join("clone"),
        &format!("{git} fsck --strict; make -s; cmp lib.a {}/lib.a", plain.path().display()),
    )
}

/// What went wrong, counted. A mistake that stops one kind of work does not stop the others.
pub(crate) fn posix(context: &Context) -> Result<Vec<Row>> {
    let mut wrong = 0.0;
    for policy in [Policy::Back, Policy::Through] {
        let far = Far::new(100, |_| Ok(()))?;
        let near = far.mount("cache", policy)?;
        type Work<'a> = (&'a str, Box<dyn Fn() -> Result<()> + 'a>);
        let works: [Work<'_>; 3] = [
            ("fio", Box::new(|| fio(&near, context))),
            ("random operations", Box::new(|| random(&far, &near, context))),
            ("git and a compiler", Box::new(|| git_and_compiler(&far, &near))),
        ];
        for (name, work) in works {
            if let Err(error) = work() {
                println!("session.posix: {name}, write-{policy}: {error:#}");
                wrong += 1.0;
            }
        }
        if let Err(error) = near.end() {
            println!("session.posix: the end, write-{policy}: {error:#}");
            wrong += 1.0;
        }
    }
    let case = "fio verify, random operations, git and a build; links cut, pages damaged";
    Ok(vec![Row::new("session.posix", case, "mistakes", &Samples::new(vec![wrong])).goal(Goal::AtMost(0.0))])
}
