//! `manager.away`: how long a writer stands still when the manager that it uses is killed.

use super::{Context, Processes, noise, postgres::Postgres};
use crate::harness::{Goal, Row, Samples, scratch};
use anyhow::{Context as _, Result, ensure};
use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use whimbrel_testkit::lab::Namespace;

const MANAGERS: usize = 3;
const BENEFACTORS: usize = 3;
/// Bytes of a file; the program writes one after the other.
const FILE: usize = 4 << 20;
/// Time that is watched before and after a manager is killed.
const BEFORE: Duration = Duration::from_secs(2);
const AFTER: Duration = Duration::from_secs(8);

/// Writes files until it is told to stop; the longest time from the end of one to the end of the next.
fn write_on(folder: PathBuf, stop: &AtomicBool) -> Result<Duration> {
    let data = noise(FILE, 3);
    let (mut longest, mut last) = (Duration::ZERO, Instant::now());
    for number in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let mut file = File::create(folder.join(format!("f{number}")))?;
        // Not found as that of the file before.
        file.write_all(&number.to_le_bytes())?;
        file.write_all(&data[8..])?;
        file.sync_all()?;
        drop(file);
        longest = longest.max(last.elapsed());
        last = Instant::now();
    }
    Ok(longest)
}

/// The longest stall around the death of a manager.
fn stall(pool: &mut Processes, folder: &Path) -> Result<f64> {
    std::fs::create_dir(folder)?;
    let stop = Arc::new(AtomicBool::new(false));
    let writing = thread::spawn({
        let (folder, stop) = (folder.to_owned(), stop.clone());
        move || write_on(folder, &stop)
    });
    thread::sleep(BEFORE);
    // The first of the list is the one that clients and benefactors use.
    pool.kill_manager();
    thread::sleep(AFTER);
    stop.store(true, Ordering::Relaxed);
    let longest = writing.join().ok().context("the writer ended early")??;
    Ok(longest.as_secs_f64())
}

/// The first of three managers on one PostgreSQL is killed while a program writes to a mount.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let namespace = Namespace::new()?;
    // Its folder must be open for the user of PostgreSQL.
    let database = namespace.run(|| Postgres::start(Path::new("/var/tmp")))?;
    let mut pool =
        Processes::with_managers(&namespace, MANAGERS, BENEFACTORS, &database.url, scratch("pool")?)?;
    let mount = pool.mount("mount")?;
    let mut stalls = Vec::new();
    for round in 0..context.times(10, 2) {
        stalls.push(stall(&mut pool, &mount.path.join(format!("round{round}")))?);
        pool.start_manager()?;
        pool.wait_online(BENEFACTORS)?;
        // The next one is to meet all as they were.
        thread::sleep(BEFORE);
    }
    ensure!(!stalls.is_empty(), "nothing was measured");
    let case = "a program that writes files of 4 MiB, the manager that it uses is killed, one of three";
    Ok(vec![Row::new("manager.away", case, "s", &Samples::new(stalls)).goal(Goal::AtMost(2.0))])
}
