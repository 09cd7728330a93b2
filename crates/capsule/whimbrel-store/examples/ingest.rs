//! Measures a store on memory-like data: `cargo run --release -p whimbrel-store --example ingest -- DIR
//! [MiB]`.
//!
//! The image is 35 % zero pages; the rest is text, pointer tables, code from /usr and a little noise. Then a
//! second checkpoint of it with 1,845 changed pages, as a compiling guest leaves after ten seconds.

use std::{
    collections::BTreeMap,
    hint::black_box,
    path::Path,
    time::{Duration, Instant},
};
use whimbrel_core::{Accel, ByteSize, MachineConfig, PAGE_SIZE, PageRun};
use whimbrel_image::{FORMAT, ImageRef, Manifest};
use whimbrel_store::{FinishedImage, Options, Store, StoreError};

type Failure = Box<dyn std::error::Error>;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// Bytes of real programs, libraries and texts.
fn material(want: usize) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::with_capacity(want);
    for dir in ["/usr/lib/x86_64-linux-gnu", "/usr/bin", "/usr/include", "/usr/share/perl5"] {
        let mut paths: Vec<_> =
            std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
        paths.sort();
        for path in paths.into_iter().filter(|path| path.is_file()) {
            bytes.extend(std::fs::read(path)?);
            if bytes.len() >= want {
                return Ok(bytes);
            }
        }
    }
    Ok(bytes)
}

fn pointers(page: &mut [u8], random: &mut Random) {
    let heap = 0x7f00_0000_0000 + (random.below(1 << 20) << 12);
    for word in page.chunks_exact_mut(8) {
        let value = match random.below(4) {
            0 => 0,
            1 => random.below(512),
            _ => heap + random.below(1 << 20) * 8,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

fn memory(pages: usize, random: &mut Random) -> Result<Vec<u8>, Failure> {
    let material = material(pages * PAGE_SIZE / 2)?;
    let mut image = vec![0; pages * PAGE_SIZE];
    let mut at = 0;
    while at < pages {
        let run = (1 + random.below(64) as usize).min(pages - at);
        let kind = random.below(100);
        let from = random.below((material.len() / PAGE_SIZE - 64) as u64) as usize * PAGE_SIZE;
        for (i, page) in image[at * PAGE_SIZE..(at + run) * PAGE_SIZE].chunks_exact_mut(PAGE_SIZE).enumerate()
        {
            match kind {
                0..35 => {}
                35..70 => page.copy_from_slice(&material[from + i * PAGE_SIZE..][..PAGE_SIZE]),
                70..98 => pointers(page, random),
                _ => page
                    .chunks_exact_mut(8)
                    .for_each(|word| word.copy_from_slice(&random.next().to_le_bytes())),
            }
        }
        at += run;
    }
    Ok(image)
}

/// Ten seconds later: most changed pages changed in a few words, some are new altogether, some moved.
fn age(image: &mut [u8], random: &mut Random) -> Vec<u64> {
    let pages = (image.len() / PAGE_SIZE) as u64;
    let mut changed = Vec::new();
    while changed.len() < 1845 {
        let start = random.below(pages - 8);
        for page in start..start + 1 + random.below(8) {
            let bytes = &mut image[page as usize * PAGE_SIZE..(page as usize + 1) * PAGE_SIZE];
            match random.below(20) {
                0 => pointers(bytes, random),
                1..4 => bytes.copy_within(64.., 0),
                _ => (0..1 + random.below(40)).for_each(|_| {
                    let word = random.below(PAGE_SIZE as u64 / 8) as usize * 8;
                    bytes[word..word + 8].copy_from_slice(&random.next().to_le_bytes());
                }),
            }
            changed.push(page);
        }
    }
    changed.sort_unstable();
    changed.dedup();
    changed
}

fn manifest(image: FinishedImage) -> Manifest {
    let machine = MachineConfig {
        memory: ByteSize(image.pages * PAGE_SIZE as u64),
        cpus: 1,
        machine: "q35".into(),
        cpu: "max".into(),
        accel: Accel::Tcg,
        disks: vec![],
        nics: vec![],
        boot: None,
    };
    let images = vec![ImageRef { name: "memory".into(), pages: image.pages, root: image.root, cuts: None }];
    let (parents, labels, host) = (vec![], BTreeMap::new(), "bench".into());
    Manifest {
        format: FORMAT,
        machine,
        device: vec![],
        images,
        parents,
        time: 0,
        host,
        labels,
        working_set: None,
    }
}

fn stored(dir: &Path) -> Result<u64, Failure> {
    let mut bytes = 0;
    for part in ["packs", "index"] {
        for file in std::fs::read_dir(dir.join(part))? {
            bytes += file?.metadata()?.len();
        }
    }
    Ok(bytes)
}

fn rate(bytes: usize, time: Duration) -> String {
    format!("{:.3} s, {:.0} MB/s", time.as_secs_f64(), bytes as f64 / 1e6 / time.as_secs_f64())
}

fn ingest(store: &Store, image: &[u8], nonzero: usize) -> Result<FinishedImage, Failure> {
    let begin = Instant::now();
    let writer = store.writer()?;
    let mut out = writer.image(None, (image.len() / PAGE_SIZE) as u64)?;
    for (i, part) in image.chunks(1 << 20).enumerate() {
        out.put(PageRun::new(i as u64 * 256, (part.len() / PAGE_SIZE) as u64), part)?;
    }
    let finished = out.finish()?;
    let encoded = begin.elapsed();
    writer.commit(&manifest(finished), &["a".parse()?])?;
    println!("ingest encoded  {} of non-zero pages", rate(nonzero, encoded));
    println!("ingest durable  {} of non-zero pages", rate(nonzero, begin.elapsed()));
    Ok(finished)
}

fn checkpoint(
    store: &Store,
    image: &[u8],
    changed: &[u64],
    base: FinishedImage,
) -> Result<FinishedImage, Failure> {
    let begin = Instant::now();
    let writer = store.writer()?;
    let mut out = writer.image(base.root, base.pages)?;
    for page in changed {
        out.put(PageRun::new(*page, 1), &image[*page as usize * PAGE_SIZE..][..PAGE_SIZE])?;
    }
    let finished = out.finish()?;
    let encoded = begin.elapsed();
    writer.commit(&manifest(finished), &["b".parse()?])?;
    println!(
        "checkpoint      {} pages, encoded {encoded:.1?}, durable {:.1?}",
        changed.len(),
        begin.elapsed()
    );
    Ok(finished)
}

fn restore(store: &Store, image: FinishedImage, wanted: &[u8], nonzero: usize) -> Result<(), Failure> {
    let begin = Instant::now();
    store.image(image.root, image.pages).restore(2, |_, data| {
        black_box(data[0]);
        Ok::<_, StoreError>(())
    })?;
    println!("restore         {} of non-zero pages, 2 threads", rate(nonzero, begin.elapsed()));
    let stored = store.image(image.root, image.pages);
    stored.restore(2, |run, data| {
        assert!(wanted[run.offset() as usize..][..data.len()] == *data, "{run:?}");
        Ok::<_, StoreError>(())
    })?;
    Ok(())
}

fn latency(dir: &Path, image: FinishedImage, pages: &[u64]) -> Result<(), Failure> {
    let store = Store::open(dir, Options { cache: 1, ..Options::default() })?;
    let stored = store.image(image.root, image.pages);
    let mut page = [0; PAGE_SIZE];
    let mut times = Vec::new();
    for number in pages {
        let begin = Instant::now();
        stored.read(PageRun::new(*number, 1), &mut page)?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    println!("cold page       p50 {:.1?}, p99 {:.1?}", times[times.len() / 2], times[times.len() * 99 / 100]);
    Ok(())
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: ingest DIR [MiB]")?;
    let dir = Path::new(&dir);
    let pages = args.next().map_or(Ok(1536), |mib| mib.parse::<usize>())? << 8;
    let mut random = Random(0x5eed);
    let mut image = memory(pages, &mut random)?;
    let nonzero = image.chunks_exact(PAGE_SIZE).filter(|p| !whimbrel_core::is_zero(p)).count() * PAGE_SIZE;
    println!("{} MiB, {} MiB not zero", image.len() >> 20, nonzero >> 20);
    let store = Store::open(dir, Options::create())?;
    let first = ingest(&store, &image, nonzero)?;
    let full = stored(dir)?;
    println!("stored          {:.1} MB, {:.2} : 1", full as f64 / 1e6, nonzero as f64 / full as f64);
    restore(&store, first, &image, nonzero)?;
    let random_pages: Vec<u64> = (0..2000).map(|_| random.below(pages as u64)).collect();
    latency(dir, first, &random_pages)?;

    std::fs::write(dir.join("old.raw"), &image)?;
    let changed = age(&mut image, &mut random);
    std::fs::write(dir.join("new.raw"), &image)?;
    let second = checkpoint(&store, &image, &changed, first)?;
    println!("checkpoint cost {:.1} KB", (stored(dir)? - full) as f64 / 1e3);
    restore(&store, second, &image, nonzero)?;
    latency(dir, second, &changed)
}
