//! Random operations on files of a mount against a model, with every kind of failure.
//!
//! The cache is too small, the link breaks, the server restarts, cached pages are damaged, the client dies.

use crate::common::{self, World};
use rand::{Rng, SeedableRng, rngs::StdRng};
use rustix::fs::copy_file_range;
use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
    time::Duration,
};
use whimbrel_session::client::{Policy, SessionOptions};

const MAX: u64 = 600_000;

struct Run {
    random: StdRng,
    world: World,
    /// Content as programs see it, by name.
    model: Vec<Option<Vec<u8>>>,
    seed: u64,
}

fn begin(seed: u64, policy: Policy) -> Run {
    let change = |options: &mut SessionOptions| {
        options.settings.policy = policy;
        options.settings.delay = Some(seed % 2);
        options.settings.fresh = None;
        options.block = [4096, 16384, 65536][(seed % 3) as usize];
        options.capacity = 1 << 20;
        options.settings.patience = 20;
        if seed.is_multiple_of(4) {
            // Everything is compared before it is sent.
            options.slow_round_trip = Duration::ZERO;
        }
        options.settings.direct =
            if seed.is_multiple_of(2) { vec![] } else { vec![whimbrel_session::client::Glob::new("*")] };
    };
    let world = World::new(change, |server| fs::write(server.join("0"), vec![7; 300_000]).unwrap());
    let model = (0..4).map(|name| (name == 0).then(|| vec![7; 300_000])).collect();
    Run { random: StdRng::seed_from_u64(seed), world, model, seed }
}

impl Run {
    fn file(&self, name: usize) -> std::path::PathBuf {
        self.world.mount().join(name.to_string())
    }

    fn write(&mut self, name: usize) {
        let offset = self.random.random_range(0..MAX / 2);
        let len = self.random.random_range(1..60_000);
        let bytes: Vec<u8> = if self.random.random_ratio(1, 4) {
            vec![0; len]
        } else {
            (0..len).map(|_| self.random.random()).collect()
        };
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(self.file(name)).unwrap();
        file.write_all_at(&bytes, offset).unwrap();
        if self.random.random() {
            file.sync_all().unwrap();
        }
        let content = self.model[name].get_or_insert_default();
        let end = offset as usize + len;
        content.resize(content.len().max(end), 0);
        content[offset as usize..end].copy_from_slice(&bytes);
    }

    fn cut(&mut self, name: usize) {
        if let Some(content) = &mut self.model[name] {
            let size = self.random.random_range(0..MAX) as usize;
            let path = self.world.mount().join(name.to_string());
            OpenOptions::new().write(true).open(path).unwrap().set_len(size as u64).unwrap();
            content.resize(size, 0);
        }
    }

    /// Copies a part of a file over a part of another, through the server or not.
    fn copy(&mut self, from: usize, to: usize) {
        let Some(source) = self.model[from].clone().filter(|_| from != to) else { return };
        let (offset, place) = (self.random.random_range(0..MAX / 2), self.random.random_range(0..MAX / 2));
        let wanted = self.random.random_range(1..300_000_usize);
        let input = fs::File::open(self.file(from)).unwrap();
        let output = OpenOptions::new().write(true).create(true).truncate(false).open(self.file(to)).unwrap();
        let (mut read_at, mut write_at) = (offset, place);
        let mut left = wanted.min(source.len().saturating_sub(offset as usize));
        while left > 0 {
            let copied = copy_file_range(&input, Some(&mut read_at), &output, Some(&mut write_at), left);
            left -= copied.unwrap_or_else(|errno| {
                panic!("seed {}: {errno} {:?}", self.seed, self.world.session().status())
            });
        }
        if self.random.random() {
            output.sync_all().unwrap();
        }
        let (from, len) = (offset as usize, (read_at - offset) as usize);
        let content = self.model[to].get_or_insert_default();
        if len > 0 {
            let (at, end) = (place as usize, place as usize + len);
            content.resize(content.len().max(end), 0);
            content[at..end].copy_from_slice(&source[from..from + len]);
        }
    }

    /// Writes the whole file again, as editors and compilers do, with little changed.
    fn rewrite(&mut self, name: usize) {
        let Some(mut content) = self.model[name].clone() else { return };
        let size = self.random.random_range(0..MAX / 2) as usize;
        if self.random.random() {
            content.resize(size, 3);
        }
        if let Some(byte) = content.get_mut(size) {
            *byte = byte.wrapping_add(1);
        }
        fs::write(self.file(name), &content).unwrap();
        if self.random.random() {
            fs::File::open(self.file(name)).unwrap().sync_all().unwrap();
        }
        self.model[name] = Some(content);
    }

    fn read(&mut self, name: usize) {
        let Some(content) = &self.model[name] else {
            assert!(!self.file(name).exists());
            return;
        };
        let offset = self.random.random_range(0..MAX);
        let mut out = vec![0; self.random.random_range(1..100_000)];
        let read = fs::File::open(self.file(name)).unwrap().read_at(&mut out, offset).unwrap();
        let from = (offset as usize).min(content.len());
        let expected = &content[from..content.len().min(from + out.len())];
        assert!(
            out[..read] == expected[..read] && (read > 0 || expected.is_empty()),
            "seed {}: {name} at {offset}",
            self.seed
        );
    }

    fn step(&mut self) {
        let name = self.random.random_range(0..self.model.len());
        match self.random.random_range(0..26) {
            0..=6 => self.write(name),
            7..=11 => self.read(name),
            12..=13 => self.cut(name),
            14 => {
                if self.model[name].take().is_some() {
                    fs::remove_file(self.file(name)).unwrap();
                }
            }
            15 => {
                let to = self.random.random_range(0..self.model.len());
                if self.model[name].is_some() && to != name {
                    fs::rename(self.file(name), self.file(to)).unwrap();
                    self.model[to] = self.model[name].take();
                }
            }
            16 => self.world.session().flush().unwrap_or_else(|errno| {
                panic!("seed {}: {errno} {:?}", self.seed, self.world.session().status())
            }),
            17 => self.world.wire.cut(false),
            20..=22 => self.rewrite(name),
            23..=25 => {
                let to = self.random.random_range(0..self.model.len());
                self.copy(name, to);
            }
            18 => self.world.wire.restart(common::server_of(&self.world.server())),
            _ => self.world.session().invalidate().unwrap(),
        }
    }

    fn compare(&self, dir: &Path, what: &str) {
        for (name, content) in self.model.iter().enumerate() {
            let found = fs::read(dir.join(name.to_string())).ok();
            let lens = (found.as_ref().map(Vec::len), content.as_ref().map(Vec::len));
            let events = self.world.session.as_ref().map(|session| session.status().events);
            assert!(found == *content, "seed {}: {name} on {what}: {lens:?} {events:?}", self.seed);
        }
    }
}

fn run(seed: u64, policy: Policy, steps: usize) {
    let mut run = begin(seed, policy);
    for _ in 0..steps {
        run.step();
    }
    run.compare(&run.world.mount(), "the mount");
    run.world.session().flush().unwrap();
    run.compare(&run.world.server(), "the server");
    let events = run.world.session().status().events;
    assert_eq!(events, [], "seed {seed}");
}

#[test]
fn random_operations_are_those_of_a_local_disk_under_write_through() {
    (0..6).for_each(|seed| run(seed, Policy::Through, 60));
}

#[test]
fn random_operations_are_those_of_a_local_disk_under_write_back() {
    (100..112).for_each(|seed| run(seed, Policy::Back, 120));
}

/// Every operation is synced: after the death of the client nothing of it may be missing.
#[test]
fn nothing_that_was_done_is_lost_when_the_client_dies_at_any_time() {
    for seed in 200..212 {
        let mut run = begin(seed, Policy::Back);
        for _ in 0..3 {
            for _ in 0..run.random.random_range(1..25) {
                run.step();
            }
            run.world.crash();
            run.world.begin();
            let events = run.world.session().status().events;
            assert!(
                events.iter().all(|event| event.text.contains("earlier session")),
                "seed {seed}: {events:?}"
            );
            run.compare(&run.world.server(), "the server after a crash");
        }
        run.compare(&run.world.mount(), "the mount after crashes");
    }
}
