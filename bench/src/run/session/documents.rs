//! `session.documents`: many runs of a document build on small files: read all inputs, think, write and replace what is made of
//! them.

use super::far::{Far, seconds};
use crate::harness::{Goal, Row, Samples, scratch};
use crate::run::Context;
use anyhow::{Context as _, Result, ensure};
use std::{fs, path::Path};
use whimbrel_session::client::Policy;

const INPUTS: usize = 120;
const ROUNDS: usize = 20;

/// Passes of a typesetter over its text. Three megabytes are some hundred pages with their macros and fonts, of which pdflatex
/// sets some hundreds a second: about a third of a second of a processor.
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

/// Runs as of a document: read all inputs, think, write small files and one large one, by way of a temporary name.
pub(super) fn documents(dir: &Path, rounds: usize) -> Result<()> {
    for round in 0..rounds {
        let mut whole = Vec::new();
        for number in 0..INPUTS {
            whole.extend(fs::read(dir.join(format!("in/{number:03}.tex")))?);
        }
        let digest = think(whole.clone(), PASSES);
        for name in ["aux", "toc", "log", "out"] {
            fs::write(dir.join(format!("main.{name}")), &whole[..40_000 + round * 100])?;
        }
        let temporary = dir.join("main.dvi.tmp");
        fs::write(&temporary, &digest)?;
        fs::rename(&temporary, dir.join("main.dvi"))?;
        fs::write(dir.join("scratch"), &digest[..100_000])?;
        fs::remove_file(dir.join("scratch"))?;
    }
    Ok(())
}

/// The same twenty runs on a local disk, on a mount with an empty cache and with a full one.
pub(crate) fn document_runs(context: &Context) -> Result<Vec<Row>> {
    let (mut local, mut cold, mut warm) = (Vec::new(), Vec::new(), Vec::new());
    let far = Far::new(100, inputs)?;
    for round in 0..context.times(5, 2) {
        let plain = scratch("session-local")?;
        inputs(plain.path())?;
        local.push(seconds(|| documents(plain.path(), ROUNDS))?);
        let cache = format!("cache-{round}");
        let near = far.mount(&cache, Policy::Back)?;
        cold.push(seconds(|| documents(&near.path, ROUNDS))?);
        near.end()?;
        let near = far.mount(&cache, Policy::Back)?;
        warm.push(seconds(|| documents(&near.path, ROUNDS))?);
        near.end()?;
        let written = fs::read(far.dir.path().join("server/main.dvi")).context("what was written back")?;
        ensure!(
            written == fs::read(plain.path().join("main.dvi"))?,
            "another document came about on the server"
        );
    }
    let local = Samples::new(local);
    let case = |what: &str| format!("20 document runs, 32 ms, 100 Mbit/s, {what}");
    Ok(vec![
        Row::new("session.documents", case("cold"), "s", &Samples::new(cold)).against("local disk", &local),
        Row::new("session.documents", case("warm"), "s", &Samples::new(warm))
            .against("local disk", &local)
            .goal(Goal::PeerAtMost(1.03)),
    ])
}
