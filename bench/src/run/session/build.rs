//! `session.build`: a C library of some hundred files built on a mount, beside the same build on a local
//! disk.
//!
//! The source is what this workspace's own TLS depends on (`aws-lc-sys`), so it is there wherever this
//! program was built.

use super::{
    far::Line,
    scenario::{self, Cache, Ran, Work},
};
use crate::harness::{Goal, Row};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const MAKEFILE: &str = "\
SRC := $(shell find crypto -name '*.c' | LC_ALL=C sort)
lib.a: $(SRC:.c=.o)
\tar rcsD $@ $^
%.o: %.c
\tcc -O2 -Iinclude -I. -DOPENSSL_NO_ASM -c $< -o $@
";

/// Where cargo keeps the package's source.
fn package() -> Result<PathBuf> {
    let home = env::var_os("CARGO_HOME").map(PathBuf::from);
    let home =
        home.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo"))).context("no HOME")?;
    let registries = fs::read_dir(home.join("registry/src")).context("no packages of cargo here")?;
    let packages =
        registries.flatten().filter_map(|registry| fs::read_dir(registry.path()).ok()).flatten().flatten();
    let found =
        packages.map(|package| package.path().join("aws-lc")).find(|path| path.join("crypto").is_dir());
    found.context("the source of aws-lc-sys is not here; `cargo fetch` brings it")
}

/// Copies what a build needs: C and headers, without tests and what is built by other means.
fn copy(from: &Path, to: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, place) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&path, &place, wanted)?;
        } else if wanted(&path) {
            fs::copy(&path, &place)?;
        }
    }
    Ok(())
}

/// The tree; of `quick` two thirds are left out.
pub(super) fn source(to: &Path, quick: bool) -> Result<()> {
    let package = package()?;
    let wanted = |path: &Path| {
        let text = path.to_string_lossy();
        let header = [".h", ".inc"].iter().any(|end| text.ends_with(end));
        let other =
            ["fipsmodule/", "test", "ml_kem", "kyber", "dilithium"].iter().any(|part| text.contains(part));
        let few = !quick || ["/asn1/", "/pem/", "/conf/", "/bio/"].iter().any(|part| text.contains(part));
        header || (text.ends_with(".c") && !other && few)
    };
    // Relative to the package: its own path must not decide.
    let below =
        |path: &Path| path.strip_prefix(&package).is_ok_and(|rest| wanted(&Path::new("/").join(rest)));
    copy(&package.join("crypto"), &to.join("crypto"), &below)?;
    copy(&package.join("include"), &to.join("include"), &below)?;
    Ok(fs::write(to.join("Makefile"), MAKEFILE)?)
}

pub(super) fn make(dir: &Path) -> Result<()> {
    let made = Command::new("make").args(["-s", "-j2"]).current_dir(dir).output().context("make")?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}

pub(super) fn clean(dir: &Path) -> Result<()> {
    let cleaned = Command::new("find")
        .arg(dir)
        .args(["-name", "*.o", "-delete", "-o", "-name", "lib.a", "-delete"])
        .status()?;
    ensure!(cleaned.success(), "cannot clean {}", dir.display());
    Ok(())
}

struct Library {
    quick: bool,
}

impl Work for Library {
    const ROW: &'static str = "session.build";
    const PARTS: &'static [&'static str] = &[];
    const WAITS: bool = true;
    const WARM: Option<&'static str> = Some("session.warm.build");

    fn what(&self) -> String {
        "C library".to_owned()
    }

    fn fill(&self, dir: &Path) -> Result<()> {
        source(dir, self.quick)
    }

    fn run(&self, dir: &Path) -> Result<Ran> {
        Ran::of(|| make(dir).map(|()| Vec::new()))
    }

    fn clean(&self, dir: &Path) -> Result<()> {
        clean(dir)
    }

    fn compare(&self, local: &Path, served: &Path) -> Result<()> {
        let same = fs::read(local.join("lib.a"))? == fs::read(served.join("lib.a"))?;
        ensure!(same, "another library came about on the server");
        Ok(())
    }

    fn goal(&self, line: Line, cache: Cache) -> Option<Goal> {
        let times = match cache {
            Cache::Absent => return None,
            Cache::Cold => 1.4,
            Cache::Warm => 1.04,
        };
        line.is_wan().then_some(Goal::PeerAtMost(times))
    }
}

/// The same build at every place.
pub(crate) fn builds(context: &Context) -> Result<Vec<Row>> {
    scenario::rows(&Library { quick: context.quick }, context.times(3, 2))
}
