//! `session.documents`: many runs of a document build on small files: read all inputs, think, write and
//! replace what is made of them.

use super::{
    far::{Line, seconds},
    scenario::{self, Cache, Ran, Work},
};
use crate::harness::{Goal, Row};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{fs, path::Path};

const INPUTS: usize = 120;
const SMALL: [&str; 4] = ["main.aux", "main.toc", "main.log", "main.out"];
const RESULT: &str = "main.dvi";

/// Passes of a typesetter over its text. Three megabytes are some hundred pages with their macros and fonts,
/// of which pdflatex sets some hundreds a second: about a third of a second of a processor.
const PASSES: u8 = 100;

/// Work that depends on every byte and on the one before.
pub(super) fn think(mut bytes: Vec<u8>, passes: u8) -> Vec<u8> {
    for pass in 0..passes {
        let mut state = pass;
        for byte in &mut bytes {
            state = state.wrapping_mul(31).wrapping_add(*byte);
            *byte = state;
        }
    }
    bytes
}

pub(super) fn inputs(server: &Path) -> Result<()> {
    fs::create_dir(server.join("in"))?;
    for number in 0..INPUTS {
        let text = format!("\\section{{{number}}} lorem ipsum dolor sit amet\n").repeat(200 + number * 7);
        fs::write(server.join(format!("in/{number:03}.tex")), text)?;
    }
    Ok(())
}

/// Runs as of a document: read all inputs, think, write small files and one large one, by way of a temporary
/// name. Seconds of each.
fn each(dir: &Path, rounds: usize) -> Result<Vec<f64>> {
    (0..rounds).map(|round| seconds(|| one(dir, round))).collect()
}

fn one(dir: &Path, round: usize) -> Result<()> {
    let mut whole = Vec::new();
    for number in 0..INPUTS {
        whole.extend(fs::read(dir.join(format!("in/{number:03}.tex")))?);
    }
    let digest = think(whole.clone(), PASSES);
    for name in SMALL {
        fs::write(dir.join(name), &whole[..40_000 + round * 100])?;
    }
    let temporary = dir.join("main.dvi.tmp");
    fs::write(&temporary, &digest)?;
    fs::rename(&temporary, dir.join(RESULT))?;
    fs::write(dir.join("scratch"), &digest[..100_000])?;
    Ok(fs::remove_file(dir.join("scratch"))?)
}

/// The same, as one thing.
pub(super) fn documents(dir: &Path, rounds: usize) -> Result<()> {
    each(dir, rounds).map(drop)
}

struct Runs(usize);

impl Work for Runs {
    const ROW: &'static str = "session.documents";
    const PARTS: &'static [&'static str] = &["first run", "each run after it"];
    const WARM: Option<&'static str> = Some("session.warm.documents");

    fn what(&self) -> String {
        format!("{} document runs", self.0)
    }

    fn fill(&self, dir: &Path) -> Result<()> {
        inputs(dir)
    }

    fn run(&self, dir: &Path) -> Result<Ran> {
        Ran::of(|| {
            let all = each(dir, self.0)?;
            let (first, rest) = all.split_first().context("no runs")?;
            Ok(vec![*first, rest.iter().sum::<f64>() / rest.len().max(1) as f64])
        })
    }

    fn clean(&self, dir: &Path) -> Result<()> {
        for name in SMALL.iter().chain([&RESULT]).filter(|name| dir.join(name).exists()) {
            fs::remove_file(dir.join(name))?;
        }
        Ok(())
    }

    fn compare(&self, local: &Path, served: &Path) -> Result<()> {
        let read = |dir: &Path| fs::read(dir.join(RESULT)).context("what was written back");
        ensure!(read(local)? == read(served)?, "another document came about on the server");
        Ok(())
    }

    fn goal(&self, line: Line, cache: Cache) -> Option<Goal> {
        (line.is_wan() && cache == Cache::Warm).then_some(Goal::PeerAtMost(1.02))
    }
}

/// The same runs at every place.
pub(crate) fn document_runs(context: &Context) -> Result<Vec<Row>> {
    let runs = Runs(if context.quick { 10 } else { 20 });
    scenario::rows(&runs, context.times(5, 2))
}
