//! `model.error`, `model.scale`: hundreds of members in a model ([`super::model`]), after the same model was
//! checked against real ones.

use super::{
    Context,
    figures::Site,
    model::{self, Setting},
    noise,
    processes::Mount,
    rate,
};
use crate::harness::{Goal, Row, Samples};
use anyhow::Result;
use std::time::Instant;

const MIB: f64 = 1_048_576.0;
const CHUNK: f64 = MIB;
/// Of the paper's figure 8, and the default.
const WINDOW: f64 = 64.0 * MIB;
/// What of a line is content: headers of Ethernet, IP, TCP with time stamps and TLS, 1448 of 1538 bytes.
const CONTENT: f64 = 0.94;

fn line(mbit: f64) -> f64 {
    mbit * 1e6 / 8.0 * CONTENT
}

/// Bandwidth of clients that write a file each at the same time, in MB/s.
fn measure(site: &Site, clients: usize, bytes: usize, seed: u64) -> Result<f64> {
    let name = |client: usize| format!("model.N{client}.T{seed}");
    let mounts: Vec<Mount> =
        (0..clients).map(|client| site.pool.mount(&format!("m{client}"))).collect::<Result<_>>()?;
    let contents: Vec<Vec<u8>> =
        (0..clients as u64).map(|client| noise(bytes, seed * 10 + client + 1)).collect();
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let each = mounts.iter().zip(&contents).enumerate();
        let running: Vec<_> = each
            .map(|(client, (mount, data))| {
                scope.spawn(move || super::write(&mount.path.join(name(client)), data))
            })
            .collect();
        running
            .into_iter()
            .try_for_each(|one| one.join().map_err(|_| anyhow::anyhow!("a client died"))?.map(drop))
    })?;
    let measured = rate(bytes * clients, begun);
    for (client, mount) in mounts.iter().enumerate() {
        std::fs::remove_file(mount.path.join(name(client)))?;
    }
    Ok(measured)
}

/// Seconds that a file costs that has next to nothing in it.
fn small_file(site: &mut Site) -> Result<f64> {
    let mount = site.pool.mount("small")?;
    let mut times = Vec::new();
    for number in 0..40_u8 {
        let begun = Instant::now();
        site.write(&mount, &[number; 10])?;
        times.push(begun.elapsed().as_secs_f64());
    }
    Ok(Samples::new(times).median())
}

fn setting(clients: usize, benefactors: usize, width: usize, mbit: f64, manager: f64) -> Setting {
    Setting {
        clients,
        benefactors,
        client_rate: line(1000.0),
        benefactor_rate: line(mbit),
        width,
        chunk: CHUNK,
        window: WINDOW,
        file: 100e6,
        files: 4,
        manager,
        apart: 0.0,
    }
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let (mut site, mut rows, mut errors) = (Site::new()?, Vec::new(), Vec::new());
    let manager = small_file(&mut site)?;
    let bytes = context.times(256, 64) << 20;
    site.limit(100, 10_000)?;
    for (clients, width) in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8)] {
        site.stripe(width)?;
        let real: Vec<f64> = (0..context.times(5, 1) as u64)
            .map(|seed| measure(&site, clients, bytes, seed * 100 + u64::from(width) * 10 + clients as u64))
            .collect::<Result<_>>()?;
        // All clients are one host, whose link nothing limits here.
        let made = Setting {
            client_rate: f64::MAX,
            file: bytes as f64,
            files: 1,
            ..setting(clients, 8, usize::from(width), 100.0, manager)
        };
        let (real, made) = (Samples::new(real), model::run(&made).mean / 1e6);
        errors.push((made / real.median() - 1.0).abs() * 100.0);
        let case = format!("{clients} clients, 8 benefactors of 100 Mbit/s, width {width}, by the model");
        rows.push(
            Row::new("model.error", case, "MB/s", &Samples::new(vec![made])).against("measured", &real),
        );
    }
    let row = Row::new("model.error", "the model beside what was measured", "%", &Samples::new(errors));
    rows.push(row.goal(Goal::AtMost(10.0)));
    for (clients, benefactors) in [(7, 20), (35, 100), (70, 200), (140, 400)] {
        let outcome = model::run(&setting(clients, benefactors, 4, 1000.0, manager));
        let least = outcome.each.iter().copied().fold(f64::INFINITY, f64::min);
        let one = |value: f64| Samples::new(vec![value]);
        let row = |what: &str, unit, value| {
            let case = format!("{clients} clients, {benefactors} benefactors, 1 Gbit/s each: {what}");
            Row::new("model.scale", case, unit, &one(value))
        };
        rows.push(row("all together", "MB/s", outcome.mean / 1e6));
        rows.push(row("the slowest client", "MB/s", least / 1e6));
        rows.push(row("the manager is busy", "%", outcome.manager * 100.0));
    }
    Ok(rows)
}
