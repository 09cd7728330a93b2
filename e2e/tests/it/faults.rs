//! What breaks is noticed, said, and contained.

use std::{
    fs,
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};
use whimbrel_e2e::{Cluster, Guest, PATIENCE, console};
use whimbrel_testkit::guest::{CheckResult, assert_same_life};

fn quiet(name: &str) -> Guest {
    Guest { address: None, ..Guest::small(name) }
}

#[test]
fn a_machine_that_ends_by_itself_is_shown_so_and_its_name_can_be_had_again() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    quiet("gone").run(&cluster, alpha);
    let mut witness = console(alpha, "gone");
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    alpha.run(&["pause", "gone"]);
    alpha.wait_state("gone", &["paused"]);
    alpha.run(&["unpause", "gone"]);
    alpha.run(&["balloon", "gone", "160M"]);
    witness.check().expect("a guest with less memory is the same guest");
    witness.power_off().expect("a request to switch off");
    alpha.wait_state("gone", &["stopped"]);
    alpha.run(&["delete", "gone"]);

    quiet("gone").run(&cluster, alpha);
    let pid = alpha.json(&["ps"])[0]["pid"].as_u64().expect("a pid").to_string();
    alpha.exec("kill", &["-9", &pid]);
    alpha.wait_state("gone", &["crashed"]);
    assert_eq!(alpha.refuse(&["checkpoint", "gone"]).code, 4);
    alpha.run(&["delete", "gone"]);
    assert!(alpha.machines().is_empty());
}

#[test]
fn a_checkpoint_into_a_full_store_fails_and_the_next_one_is_whole() {
    let mut cluster = Cluster::start(&["alpha"]);
    let data = cluster.host("alpha").data().to_owned();
    let data = data.to_str().expect("a path in UTF-8");
    cluster.host_mut("alpha").kill_daemon();
    cluster.host("alpha").exec("mount", &["-t", "tmpfs", "-o", "size=120m", "tmpfs", data]);
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    quiet("web").run(&cluster, alpha);
    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    let born = witness.write(50).expect("a first life");
    let ballast = format!("{data}/ballast");
    alpha.exec("sh", &["-c", &format!("head -c 200m /dev/urandom > {ballast} 2>/dev/null; true")]);

    let refusal = alpha.refuse(&["checkpoint", "web", "--tag", "full"]);
    assert!(refusal.text.contains("hint:"), "{refusal:?}");
    assert_same_life(&born, &witness.check().expect("a machine that runs on"));
    assert_eq!(alpha.refuse(&["show", "full"]).code, 3, "half a capsule has a name");

    alpha.exec("rm", &[&ballast]);
    // A store that failed to write takes no more until it is opened again.
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    alpha.run(&["checkpoint", "web", "--tag", "whole"]);
    alpha.run(&["verify"]);
    alpha.run(&["stop", "web", "--kill"]);
    alpha.run(&["resume", "whole", "--name", "again", "--full"]);
    let mut witness = console(alpha, "again");
    witness.wait_ready(PATIENCE).expect("a guest that goes on");
    let again = witness.check().expect("an answer");
    assert_same_life(&born, &again);
    assert!(
        matches!(again.ram, CheckResult::Good(_)) && matches!(again.disk, CheckResult::Good(_)),
        "{again:?}"
    );
}

/// A folder in the place of a record, which no file can replace.
struct Obstacle {
    record: PathBuf,
    aside: PathBuf,
}

impl Obstacle {
    fn place(&self) {
        fs::rename(&self.record, &self.aside).expect("a record");
        fs::create_dir(&self.record).expect("an obstacle");
    }
    fn remove(&self) {
        fs::remove_dir(&self.record).expect("the obstacle, empty as it was");
        fs::rename(&self.aside, &self.record).expect("the record as it was");
    }
}

#[test]
fn a_resume_or_start_that_fails_at_its_last_step_leaves_the_machine_as_it_was() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    quiet("web").run(&cluster, alpha);
    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    let born = witness.write(50).expect("a first life");
    let (record, _) = alpha.record("web");
    let obstacle = Obstacle { aside: record.with_extension("aside"), record };
    let state = |word: &str| [("web".to_owned(), word.to_owned())];

    alpha.run(&["suspend", "web"]);
    obstacle.place();
    alpha.refuse(&["resume", "web"]);
    assert_eq!(alpha.machines(), state("suspended"));
    obstacle.remove();
    alpha.run(&["resume", "web"]);
    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that goes on");
    let resumed = witness.check().expect("an answer");
    assert_same_life(&born, &resumed);
    assert!(matches!(resumed.disk, CheckResult::Good(_)), "{resumed:?}");

    alpha.run(&["stop", "web", "--kill"]);
    obstacle.place();
    alpha.refuse(&["start", "web"]);
    assert_eq!(alpha.machines(), state("stopped"));
    obstacle.remove();
    alpha.run(&["start", "web"]);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that has booted");
}

#[test]
fn a_damaged_capsule_is_named_and_not_run() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    quiet("web").run(&cluster, alpha);
    console(alpha, "web").wait_ready(PATIENCE).expect("a guest that is up");
    alpha.run(&["suspend", "web"]);
    let packs = alpha.data().join("store/packs");
    cluster.host_mut("alpha").kill_daemon();
    damage(&packs);
    cluster.host_mut("alpha").start_daemon();
    let alpha = cluster.host("alpha");
    let refusal = alpha.refuse(&["resume", "web", "--full"]);
    assert_eq!(refusal.code, 6, "{refusal:?}");
    assert_eq!(alpha.machines(), [("web".to_owned(), "suspended".to_owned())], "nothing of it runs");
    let verified = alpha.refuse(&["verify"]);
    assert_eq!(verified.code, 6, "{verified:?}");
}

/// Overwrites a stretch in the middle of every pack that is large enough to hold pages.
fn damage(packs: &Path) {
    let mut damaged = 0;
    for pack in fs::read_dir(packs).expect("packs").flatten() {
        let len = pack.metadata().expect("a file").len();
        if len > 1 << 20 {
            let mut file = fs::File::options().write(true).open(pack.path()).expect("a pack");
            for part in 1..16 {
                file.seek(SeekFrom::Start(len * part / 16)).expect("a place");
                file.write_all(&[0x5a; 300]).expect("damage");
            }
            damaged += 1;
        }
    }
    assert!(damaged > 0, "no pack was large enough to damage");
}

#[test]
fn a_disk_leaves_as_raw_and_qcow2_and_comes_back_the_same() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    quiet("web").run(&cluster, alpha);
    let mut witness = console(alpha, "web");
    witness.wait_ready(PATIENCE).expect("a guest that is up");
    witness.write(200).expect("a disk with something on it");
    alpha.run(&["suspend", "web"]);
    let path = |name: &str| cluster.disk.path().join(name).to_str().expect("a path in UTF-8").to_owned();
    let (raw, qcow2, capsule, back) = (path("a.raw"), path("a.qcow2"), path("a.capsule"), path("b.raw"));
    alpha.run(&["export", "web", &raw, "--format", "raw"]);
    alpha.run(&["export", "web", &qcow2, "--format", "qcow2"]);
    alpha.run(&["export", "web", &capsule]);
    assert_eq!(alpha.refuse(&["export", "web", &raw, "--format", "raw"]).code, 1, "an existing file is kept");
    alpha.run(&["import", &qcow2, "disk"]);
    alpha.run(&["export", "disk", &back, "--format", "raw"]);
    let content = fs::read(&raw).expect("the exported disk");
    assert!(content == fs::read(&back).expect("the disk that came back"), "the disk has changed on its way");
    assert!(content.iter().any(|byte| *byte != 0), "the disk is empty");
    alpha.run(&["import", &capsule, "copy"]);
    alpha.run(&["resume", "copy", "--name", "copy"]);
    console(alpha, "copy").wait_ready(PATIENCE).expect("an imported capsule that goes on");
    assert_eq!(alpha.refuse(&["import", "/does/not/exist", "x"]).code, 3);
}
