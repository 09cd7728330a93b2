//! Encryption at rest with a real guest: what is in its memory and on its disk is on no disk of the host.

use std::{collections::BTreeSet, fs, os::unix::fs::PermissionsExt, path::Path};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest};
use whimbrel_testkit::guest::CheckResult;

/// Bytes of a sample.
const SAMPLE: usize = 16;
type Samples = BTreeSet<[u8; SAMPLE]>;

#[test]
fn a_host_becomes_encrypted_under_a_guest_and_its_disk_shows_nothing_of_it() {
    let mut cluster = Cluster::start(&["alpha"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(500).expect("a first life");
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web", "--tag", "first"]);
    let (memory, disk) =
        (samples(&largest(alpha.run_dir())), samples(&alpha.data().join("machines/web/disk0/data")));
    // The memory has the kernel and the initial RAM disk, too, which are no secret and lie in files.
    let boot = within(&alpha.data().join("boot"), &memory);
    let memory: Samples = memory.difference(&boot).copied().collect();
    assert!(memory.len() > 100 && disk.len() > 100, "{} {}", memory.len(), disk.len());
    for samples in [&memory, &disk] {
        assert!(within(alpha.data(), samples).len() * 4 > samples.len(), "the search finds what is there");
    }

    let keys = tempfile::tempdir().expect("a folder for keys");
    let [first, second] = ["ab", "cd"].map(|byte| {
        let path = keys.path().join(byte);
        fs::write(&path, byte.repeat(32)).expect("a key");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a key of its owner");
        path
    });
    let settings = |key: &Path| format!("encrypt = true\nkey_file = {key:?}\n");
    drop(witness);
    cluster.host_mut("alpha").restart_with(&settings(&first));
    let alpha = cluster.host("alpha");
    // A new overlay is encrypted, and nothing needs the old one.
    alpha.run(&["suspend", "web"]);
    alpha.run(&["resume", "web"]);
    let sealed = alpha.json(&["encryption", "seal"]);
    assert_eq!(sealed["result"]["plain"], 0, "{sealed}");
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let resumed = witness.check().expect("a life that goes on");
    assert_eq!(resumed.nonce, born.nonce);
    assert!(matches!(resumed.disk, CheckResult::Good(_)), "{resumed:?}");
    witness.write(500).expect("more on an encrypted disk");
    alpha.run(&["checkpoint", "web"]);
    assert_eq!(within(alpha.data(), &memory), Samples::new(), "memory");
    assert_eq!(within(alpha.data(), &disk), Samples::new(), "disk");

    alpha.run(&["encryption", "rotate", "--key-file", second.to_str().expect("a path in UTF-8")]);
    drop(witness);
    cluster.host_mut("alpha").restart_with(&settings(&second));
    let alpha = cluster.host("alpha");
    alpha.run(&["verify"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let last = witness.check().expect("the same life");
    assert!(matches!(last.disk, CheckResult::Good(_)), "{last:?}");
}

/// The largest file below a folder: the memory of the only machine.
fn largest(folder: &Path) -> std::path::PathBuf {
    let files = files(folder).into_iter();
    let length = |path: &std::path::PathBuf| fs::metadata(path).map_or(0, |found| found.len());
    files.max_by_key(length).expect("a file with memory")
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let (mut left, mut all) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = left.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => left.push(entry.path()),
                Ok(kind) if kind.is_file() => all.push(entry.path()),
                _ => {}
            }
        }
    }
    all
}

/// Bytes from the middle of pages of noise, which no compression changes. A page of programs may have as many
/// values, and zeros in its middle, which are everywhere.
fn samples(file: &Path) -> Samples {
    let bytes = fs::read(file).expect("a file to take samples of");
    let values = |bytes: &[u8]| bytes.iter().copied().collect::<BTreeSet<u8>>().len();
    let pages = bytes.as_chunks::<4096>().0.iter().filter(|page| values(*page) > 240);
    let middle = |page: &[u8; 4096]| std::array::from_fn(|i| page[2000 + i]);
    pages.map(middle).filter(|sample| values(sample) > 10).take(20_000).collect()
}

/// The samples that are somewhere below a folder.
fn within(folder: &Path, samples: &Samples) -> Samples {
    let begin =
        |bytes: &[u8]| usize::from(bytes[0]) << 16 | usize::from(bytes[1]) << 8 | usize::from(bytes[2]);
    let mut begins = vec![false; 1 << 24];
    samples.iter().for_each(|sample| begins[begin(sample)] = true);
    let mut found = Samples::new();
    for path in files(folder) {
        let bytes = fs::read(&path).unwrap_or_default();
        for window in bytes.windows(SAMPLE) {
            if begins[begin(window)]
                && let Ok(sample) = window.try_into()
                && samples.contains(&sample)
            {
                found.insert(sample);
            }
        }
    }
    found
}
