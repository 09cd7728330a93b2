//! `peers`: a series of images of a guest that compiles, written to a pool and to what people use for the
//! same.
//!
//! All on one disk of this machine, everything durable when the clock stops: a pool of four benefactors and
//! MooseFS of four chunk servers, both with one copy; sshfs; the disk itself; restic and borg. sshfs stands
//! for the mount of one server: a kernel with an NFS client is rare where this runs, and the client in user
//! space does not write (`session::nfs` says why).

use super::{Context, Processes, images, moosefs::MooseFs, sftp::Sftp, write};
use crate::{
    harness::{Goal, Row, Samples, scratch},
    run::keeper::{Keeper as _, Peer, PeerKind},
};
use anyhow::{Result, ensure};
use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};
use whimbrel_pool::{client::Pool, policy::Policy};

/// States of one machine, in the order of a series.
struct Series {
    paths: [PathBuf; 2],
    content: [Vec<u8>; 2],
    length: usize,
}

impl Series {
    fn new(context: &Context) -> Result<Self> {
        let (first, later) = images::pair(context)?;
        let content = [fs::read(&first)?, fs::read(&later)?];
        // The machine goes back to an older state and on again, as after a failure.
        Ok(Self { paths: [first, later], content, length: context.times(6, 3) })
    }

    /// Seconds that it takes to write all to files of a folder.
    fn to_files(&self, folder: &Path) -> Result<f64> {
        let begun = Instant::now();
        for step in 0..self.length {
            write(&folder.join(format!("guest.N1.T{step}")), &self.content[step % 2])?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }

    fn to_pool(&self) -> Result<f64> {
        let pool = Processes::start(4, scratch("pool")?)?;
        let policy = Policy { copies: 1, ..Policy::default() };
        pool.ask(async move |pool: Pool| Ok(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)).await?))?;
        self.to_files(&pool.mount("mnt")?.path)
    }

    fn to_disk(&self) -> Result<f64> {
        self.to_files(scratch("pool")?.path())
    }

    fn to_moosefs(&self) -> Result<f64> {
        let dir = scratch("pool")?;
        self.to_files(&MooseFs::start(dir.path(), 4)?.mounted)
    }

    fn to_sftp(&self) -> Result<f64> {
        let dir = scratch("pool")?;
        self.to_files(&Sftp::start(dir.path())?.mounted)
    }

    fn to_keeper(&self, kind: PeerKind) -> Result<f64> {
        let dir = scratch("pool")?;
        let mut peer = Peer::new(kind, dir.path())?;
        let mut seconds = 0.0;
        for step in 0..self.length {
            seconds += peer.save(&self.paths[step % 2], &format!("T{step}"))?.as_secs_f64();
        }
        Ok(seconds)
    }
}

/// A peer, and how long the series takes there.
type Way = (&'static str, fn(&Series) -> Result<f64>);

const WAYS: [Way; 5] = [
    ("the disk itself", Series::to_disk),
    ("MooseFS", Series::to_moosefs),
    ("sshfs", Series::to_sftp),
    ("restic", |series| series.to_keeper(PeerKind::Restic)),
    ("borg", |series| series.to_keeper(PeerKind::Borg)),
];

/// Wall time of the series, ours and theirs in turn. Who is not installed, or does not run here, is named and
/// left out.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let series = Series::new(context)?;
    let case = format!("{} images of {} MB", series.length, series.content[0].len() / 1_000_000);
    let mut rows = Vec::new();
    for (name, way) in WAYS {
        let theirs = match way(&series) {
            Ok(seconds) => seconds,
            Err(error) => {
                eprintln!("    {name} is not measured: {error:#}");
                continue;
            }
        };
        let (mut ours, mut theirs) = (vec![series.to_pool()?], vec![theirs]);
        for _ in 1..context.times(3, 1) {
            ours.push(series.to_pool()?);
            theirs.push(way(&series)?);
        }
        let row = Row::new("peers", case.clone(), "s", &Samples::new(ours));
        rows.push(row.against(name, &Samples::new(theirs)).goal(Goal::PeerAtMost(0.8)));
    }
    ensure!(!rows.is_empty(), "no peer runs here");
    Ok(rows)
}
