//! `stripes`, `buffers`, `dedup`: figures 2 to 7 of the paper. Manager, benefactors and client are hosts on
//! one switch.
//!
//! OAB is what the program sees until `close` has returned, ASB what is stored until the file can be seen by
//! others. With the sliding window and the incremental protocol ours are the same: `close` returns when every
//! chunk is stored and the map committed, where the paper's returned with data still in the buffer. Local
//! files are on the disk of this machine, benefactors' data on a tmpfs.

use super::{BLOCK, Context, Place, Processes, noise, processes::Mount};
use crate::harness::{Row, Samples, scratch};
use anyhow::{Result, ensure};
use std::{
    fs::File,
    io::Write as _,
    time::{Duration, Instant},
};
use tempfile::TempDir;
use whimbrel_pool::{chunk::Chunking, client::Pool, policy::Policy};
use whimbrel_testkit::lab::Lab;

const NAMES: [&str; 10] = ["manager", "client", "b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7"];
const MIB: usize = 1 << 20;
/// A file that is not there after so long does not come.
const PATIENCE: Duration = Duration::from_secs(120);

/// Eight benefactors on a switch.
pub(super) struct Site {
    lab: Lab,
    pub(super) pool: Processes,
    spool: TempDir,
    files: u64,
}

impl Site {
    pub(super) fn new() -> Result<Self> {
        let lab = Lab::with_hosts(&NAMES)?;
        let place = |name: &str| Place {
            namespace: (**lab.host(name)).clone(),
            address: format!("{}:7500", lab.host(name).address()),
        };
        let members = NAMES[2..].iter().map(|name| place(name)).collect();
        let dir = TempDir::new_in("/dev/shm")?;
        let pool = Processes::at(place("manager"), members, place("client"), dir)?;
        Ok(Self { lab, pool, spool: scratch("spool")?, files: 0 })
    }

    /// Mbit/s of each benefactor, and of the client.
    pub(super) fn limit(&self, benefactor: u64, client: u64) -> Result<()> {
        NAMES[2..].iter().try_for_each(|name| self.lab.limit(name, benefactor))?;
        Ok(self.lab.limit("client", client)?)
    }

    /// One copy, in chunks of 1 MiB as in the paper, over so many benefactors.
    pub(super) fn stripe(&self, width: u16) -> Result<()> {
        let policy =
            Policy { copies: 1, width, cutting: Chunking::Fixed { size: 1 << 20 }, ..Policy::default() };
        self.pool.ask(async move |pool: Pool| Ok(pool.set_policy(whimbrel_fuse::ROOT, Some(policy)).await?))
    }

    fn mount(&self, protocol: &str, buffer: usize) -> Result<Mount> {
        let (spool, buffer) = (self.spool.path().display().to_string(), format!("{}M", buffer / MIB));
        self.pool.mount_with("writer", &["--write-mode", protocol, "--buffer", &buffer, "--spool", &spool])
    }

    /// OAB and ASB, in MB/s, of a file that is written; the one before goes.
    pub(super) fn write(&mut self, mount: &Mount, data: &[u8]) -> Result<(f64, f64)> {
        self.files += 1;
        let name = format!("figure.N1.T{}", self.files);
        let begun = Instant::now();
        let mut file = File::create(mount.path.join(&name))?;
        data.chunks(BLOCK).try_for_each(|block| file.write_all(block))?;
        drop(file);
        let observed = begun.elapsed();
        let (length, looked) = (data.len() as u64, name.clone());
        self.pool.ask(async move |pool: Pool| {
            while !pool.find(&looked).await.is_ok_and(|node| node.size == length) {
                ensure!(begun.elapsed() < PATIENCE, "{looked} did not come");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            Ok(())
        })?;
        let achieved = begun.elapsed();
        let before = mount.path.join(format!("figure.N1.T{}", self.files - 1));
        if before.exists() {
            std::fs::remove_file(before)?;
        }
        let rate = |time: Duration| data.len() as f64 / 1e6 / time.as_secs_f64();
        Ok((rate(observed), rate(achieved)))
    }

    /// The rows of one way to write.
    fn rows(
        &mut self,
        row: &'static str,
        case: &str,
        mount: &Mount,
        sizes: (usize, usize),
    ) -> Result<Vec<Row>> {
        let (bytes, times) = sizes;
        let (mut observed, mut achieved) = (Vec::new(), Vec::new());
        for seed in 0..times as u64 {
            let (oab, asb) = self.write(mount, &noise(bytes, self.files * 100 + seed + 1))?;
            observed.push(oab);
            achieved.push(asb);
        }
        let row =
            |what: &str, values| Row::new(row, format!("{case}: {what}"), "MB/s", &Samples::new(values));
        Ok(vec![row("OAB", observed), row("ASB", achieved)])
    }
}

/// Protocols, and the size of what stands between: the paper's 64 MB buffer and its temporary files.
const PROTOCOLS: [(&str, &str, usize); 3] = [
    ("complete local write", "complete-local", 64 * MIB),
    ("incremental write", "incremental", 64 * MIB),
    ("sliding window", "sliding-window", 64 * MIB),
];

/// Figures 2, 3 and 6: bandwidth and the width of a stripe.
pub(crate) fn stripes(context: &Context) -> Result<Vec<Row>> {
    let (mut site, mut rows) = (Site::new()?, Vec::new());
    let times = context.times(5, 1);
    for (benefactor, bytes) in [(1000, context.times(1024, 256) * MIB), (100, context.times(256, 64) * MIB)] {
        site.limit(benefactor, 1000)?;
        for (name, protocol, buffer) in PROTOCOLS {
            for width in [1, 2, 4, 8] {
                site.stripe(width)?;
                let mount = site.mount(protocol, buffer)?;
                let case = format!("{name}, width {width}, {benefactor} Mbit/s each, client 1000");
                rows.extend(site.rows("stripes", &case, &mount, (bytes, times))?);
            }
        }
    }
    site.limit(1000, 10_000)?;
    for width in [1, 2, 3, 4] {
        site.stripe(width)?;
        let mount = site.mount("sliding-window", 512 * MIB)?;
        let case = format!("sliding window, width {width}, 1000 Mbit/s each, client 10000");
        rows.extend(site.rows("stripes", &case, &mount, (context.times(1024, 512) * MIB, times))?);
    }
    Ok(rows)
}

/// Figures 4 and 5: bandwidth and the size of the window.
pub(crate) fn buffers(context: &Context) -> Result<Vec<Row>> {
    let (mut site, mut rows) = (Site::new()?, Vec::new());
    site.limit(1000, 1000)?;
    for width in [1, 2, 4, 8] {
        site.stripe(width)?;
        for buffer in [32, 64, 128, 256] {
            let mount = site.mount("sliding-window", buffer * MIB)?;
            let sizes = (context.times(1024, 256) * MIB, context.times(5, 1));
            rows.extend(site.rows("buffers", &format!("width {width}, {buffer} MiB"), &mount, sizes)?);
        }
    }
    Ok(rows)
}

/// Figure 7: a series in which most of each file is in the one before, and one with nothing of that.
pub(crate) fn dedup(context: &Context) -> Result<Vec<Row>> {
    let (mut site, mut rows) = (Site::new()?, Vec::new());
    site.limit(1000, 1000)?;
    site.stripe(4)?;
    let length = context.times(75, 8);
    for buffer in [64, 256] {
        for (name, fresh) in [("three quarters of it there before", 4), ("all of it new", 1)] {
            let mount = site.mount("sliding-window", buffer * MIB)?;
            let mut data = noise(280 * MIB, buffer as u64 + fresh);
            let (mut observed, mut achieved) = (Vec::new(), Vec::new());
            for version in 0..length as u64 {
                // The first byte of a chunk makes it another.
                let chunks = data.chunks_mut(MIB).step_by(fresh as usize);
                chunks.for_each(|chunk| chunk[..8].copy_from_slice(&(version * 1000 + fresh).to_le_bytes()));
                let (oab, asb) = site.write(&mount, &data)?;
                observed.push(oab);
                achieved.push(asb);
            }
            let row = |what: &str, values| {
                let case = format!("{length} of 280 MiB, {buffer} MiB of window, {name}: {what}");
                Row::new("dedup", case, "MB/s", &Samples::new(values))
            };
            rows.extend([row("OAB", observed), row("ASB", achieved)]);
        }
    }
    Ok(rows)
}
