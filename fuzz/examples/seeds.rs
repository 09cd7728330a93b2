//! `seeds DIR`: writes the seeds of each target to `DIR/TARGET`, for libFuzzer to begin from.

use std::{fs, io, path::PathBuf};

fn main() -> io::Result<()> {
    let dir = std::env::args_os().nth(1).map(PathBuf::from).ok_or(io::ErrorKind::InvalidInput)?;
    for target in whimbrel_fuzz::TARGETS {
        let corpus = dir.join(target.name);
        fs::create_dir_all(&corpus)?;
        for (number, seed) in (target.seeds)().into_iter().enumerate() {
            fs::write(corpus.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
