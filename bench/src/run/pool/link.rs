//! `oab.1g`: the client, two benefactors and the manager are hosts on one switch, each with 1 Gbit/s both
//! ways, as in figures 2 and 3 of the paper. What crosses is TLS over TCP over Ethernet, so 108 MB/s of a
//! client's data is 0.92 of the line.

use super::{BLOCK, Context, GIB, Place, Processes, noise, rate};
use crate::harness::{Goal, Row, Samples};
use anyhow::{Result, ensure};
use std::{fs::File, io::Read as _, time::Instant};
use tempfile::TempDir;
use whimbrel_pool::{client::Pool, policy::Policy};
use whimbrel_testkit::lab::Lab;

const MBIT: u64 = 1000;

/// Application bandwidth of a write over such links, and of reading back.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let names = ["manager", "b0", "b1", "client"];
    let lab = Lab::with_hosts(&names)?;
    names.iter().try_for_each(|name| lab.limit(name, MBIT))?;
    let place = |name: &str| Place {
        namespace: (**lab.host(name)).clone(),
        address: format!("{}:7500", lab.host(name).address()),
    };
    let dir = TempDir::new_in("/dev/shm")?;
    let pool = Processes::at(place("manager"), vec![place("b0"), place("b1")], place("client"), dir)?;
    let policy = Policy { copies: 1, ..Policy::default() };
    pool.ask(async move |pool: Pool| Ok(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)).await?))?;
    let (mut written, mut read) = (Vec::new(), Vec::new());
    for seed in 0..context.times(3, 1) as u64 {
        let (data, name) = (noise(GIB, seed + 1), format!("f{seed}"));
        let mount = pool.mount("writer")?;
        written.push(super::write(&mount.path.join(&name), &data)?);
        drop(mount);
        let mount = pool.mount("reader")?;
        let (begun, mut at, mut block) = (Instant::now(), 0, vec![0; BLOCK]);
        let mut file = File::open(mount.path.join(&name))?;
        while at < data.len() {
            let count = file.read(&mut block)?;
            ensure!(count > 0 && block[..count] == data[at..at + count], "something else came back");
            at += count;
        }
        read.push(rate(data.len(), begun));
        drop(file);
        std::fs::remove_file(mount.path.join(&name))?;
    }
    let row = |case, samples| Row::new("oab.1g", case, "MB/s", &Samples::new(samples));
    let case = "1 GiB written, 2 benefactors, 1 Gbit/s each host";
    Ok(vec![row(case, written).goal(Goal::AtLeast(108.0)), row("and read back", read)])
}
