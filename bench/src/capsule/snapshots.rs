//! `snapshots.*`: somebody works at a desk; snapshots a minute apart go to a host that has all earlier ones
//! (the paper's 5.4).
//!
//! Told apart as in the paper's figure 8: raw, packed alone, only what the other side lacks by digests, and
//! both. Ours does both, and deltas on top; those are bytes on the link. The other three cannot be switched
//! on in the product: they are computed from the images of two snapshots. The paper's load was an office
//! benchmark on Windows in 256 MB, ballooned before each.

use super::desk;
use super::sites::{NAME, Sites, check_whole};
use super::tools::{without_zeros, zstd_bytes};
use crate::harness::{Row, Samples};
use crate::hosts::{Daemon, Machine};
use crate::run::Context;
use anyhow::{Context as _, Result};
use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};
use whimbrel_core::{ByteSize, PAGE_SIZE};
use whimbrel_testkit::guest::{DebianGuest, GuestOptions};

const INIT: &str = include_str!("desktop-init.sh");
const MEMORY: ByteSize = ByteSize(256 << 20);
const MB: f64 = 1e6;

/// What a snapshot costs, in bytes.
struct Snapshot {
    ours: f64,
    memory: Kinds,
    disk: Kinds,
}

/// One image of a snapshot.
struct Kinds {
    /// Pages that are not zero, or of a disk that changed.
    raw: f64,
    packed: f64,
    /// Contents that no earlier version of the image had.
    hashed: f64,
}

/// The rows.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let sites = Sites::start()?;
    let DebianGuest { kernel, initrd, .. } = DebianGuest::get()?;
    let options = GuestOptions { buffer_mib: 1, ..GuestOptions::default() };
    let machine =
        Machine { memory: MEMORY, boot: Some((kernel, initrd)), options, disks: vec![desk::disk(INIT)?] };
    machine.run(sites.alpha(), NAME)?;
    let (count, apart) = match context.quick {
        true => (3, Duration::from_secs(30)),
        false => (12, Duration::from_secs(60)),
    };
    // The paper began three minutes in.
    sleep(apart);
    let mut all = Vec::new();
    for number in 0..count {
        let begun = Instant::now();
        take(sites.alpha(), number)?;
        let ((pulled, _), ours) =
            sites.counting(|| sites.beta().timed(&["pull", &format!("alpha:{}", tag(number))]))?;
        check_whole(&pulled, &tag(number))?;
        if number > 0 {
            let images = ["memory", "disk0"].map(|image| kinds(&sites, number, image));
            let [memory, disk] = images;
            all.push(Snapshot { ours: ours as f64, memory: memory?, disk: disk? });
            eprintln!("    snapshot {}: {ours} bytes: {}", number + 1, pulled["result"]);
        }
        sleep((begun + apart).saturating_duration_since(Instant::now()));
    }
    Ok(rows(&all, apart))
}

fn rows(all: &[Snapshot], apart: Duration) -> Vec<Row> {
    let case = format!("{} s apart, ", apart.as_secs());
    let ours = Samples::of(all, |it| it.ours / MB);
    let peer = |name: &str, number: fn(&Snapshot) -> f64| {
        let theirs = Samples::of(all, |it| number(it) / MB);
        Row::new("snapshots.bytes", format!("{case}memory and disk"), "MB", &ours).against(name, &theirs)
    };
    let alone = |what: &str, number: fn(&Snapshot) -> f64| {
        Row::new("snapshots.bytes", format!("{case}{what}"), "MB", &Samples::of(all, |it| number(it) / MB))
    };
    vec![
        peer("neither (the paper: 256 MB and the disk)", |it| it.memory.raw + it.disk.raw),
        peer("zstd -3 alone", |it| it.memory.packed + it.disk.packed),
        peer("digests alone", |it| it.memory.hashed + it.disk.hashed),
        alone("memory, digests alone", |it| it.memory.hashed),
        alone("disk, digests alone", |it| it.disk.hashed),
        Row::new(
            "snapshots.bytes",
            format!("{case}on a DSL line (the paper: up to 6 min)"),
            "s",
            &Samples::of(all, |it| super::arrive::on_dsl(it.ours as u64)),
        ),
    ]
}

fn take(host: &Daemon, number: usize) -> Result<()> {
    let result = host.json(&["checkpoint", NAME, "--tag", &tag(number), "--balloon", "auto"])?;
    eprintln!("    taken: {}", result["result"]);
    Ok(())
}

fn tag(number: usize) -> String {
    format!("snapshot-{number}")
}

/// What an image of a snapshot would cost with less than all means.
fn kinds(sites: &Sites, number: usize, image: &str) -> Result<Kinds> {
    let path = sites.disk().join(image);
    let to = path.to_str().context("a path that is not UTF-8")?;
    sites.alpha().run(&["export", &tag(number), to, "--format", "raw", "--image", image])?;
    let diff = sites.alpha().json(&["diff", &tag(number - 1), &tag(number)])?;
    let images = diff["images"].as_array().context("`diff` without images")?;
    let found = images.iter().find(|it| it["name"] == *image).context("an image that is not compared")?;
    let pages = |field: &str| found[field].as_u64().map(|pages| pages as f64 * PAGE_SIZE as f64);
    let hashed = pages("new_contents").context("no count of new contents")?;
    let filled = without_zeros(&path)?;
    let (len, packed) = (fs::metadata(&filled)?.len() as f64, zstd_bytes(&filled)? as f64);
    let kinds = match image {
        "memory" => Kinds { raw: len, packed, hashed },
        // Of a disk the paper counts the layer of changes; its pages pack about as those of the disk do.
        _ => {
            let changed = pages("changed").context("no count of changes")?;
            Kinds { raw: changed, packed: changed * packed / len, hashed }
        }
    };
    fs::remove_file(filled)?;
    fs::remove_file(path)?;
    Ok(kinds)
}
