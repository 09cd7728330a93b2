//! Encryption at rest with a real guest: what is in its memory and on its disk is on no disk of the host.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest};
use whimbrel_testkit::{
    guest::CheckResult,
    leaked_content::{ContentSamples, files_below},
};

#[test]
fn a_host_becomes_encrypted_under_a_guest_and_its_disk_shows_nothing_of_it() {
    let mut cluster = Cluster::start(&["alpha"]);
    Guest::small("web").run(&cluster, cluster.host("alpha"));
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let born = witness.write(500).expect("a first life");
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web", "--tag", "first"]);
    let samples = |file: &Path| ContentSamples::of_file(file).expect("a file to take samples of");
    let (memory, disk) =
        (samples(&largest(alpha.run_dir())), samples(&alpha.data().join("machines/web/disk0/data")));
    // The memory has the kernel and the initial RAM disk, too, which are no secret and lie in files.
    let memory = memory.without(&within(&alpha.data().join("boot"), &memory));
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
    assert_eq!(within(alpha.data(), &memory), ContentSamples::default(), "memory");
    assert_eq!(within(alpha.data(), &disk), ContentSamples::default(), "disk");

    alpha.run(&["encryption", "rotate", "--key-file", second.to_str().expect("a path in UTF-8")]);
    drop(witness);
    cluster.host_mut("alpha").restart_with(&settings(&second));
    let alpha = cluster.host("alpha");
    alpha.run(&["verify"]);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let last = witness.check().expect("the same life");
    assert!(matches!(last.disk, CheckResult::Good(_)), "{last:?}");
}

fn within(folder: &Path, samples: &ContentSamples) -> ContentSamples {
    samples.found_below(folder).expect("files that can be read")
}

/// The largest file below a folder: the memory of the only machine.
fn largest(folder: &Path) -> PathBuf {
    let files = files_below(folder).expect("a folder that can be read");
    let length = |path: &PathBuf| fs::metadata(path).map_or(0, |found| found.len());
    files.into_iter().max_by_key(length).expect("a file with memory")
}
