//! One damaged file at a time.

use super::{
    files::{copy, files, put},
    folder::{self, Started, disk_is_whole, known, parsed},
};
use crate::{
    core::directories::{Directories, PLACES},
    examine::examine,
};
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::runtime::Runtime;
use whimbrel_api::{OperationState, Role, TokenRequest};
use whimbrel_migrate::protocol::HandoverId;
use whimbrel_store::MasterKey;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    Empty,
    Half,
    Flipped,
    Missing,
    Unreadable,
    Newer,
}

const DAMAGES: [Damage; 6] =
    [Damage::Empty, Damage::Half, Damage::Flipped, Damage::Missing, Damage::Unreadable, Damage::Newer];

impl Damage {
    /// Damages a file; false if that changes nothing.
    fn apply(self, path: &Path, content: &[u8]) -> bool {
        let changed = match self {
            Self::Empty => Vec::new(),
            Self::Half => content[..content.len() / 2].to_vec(),
            Self::Flipped => flipped(content),
            Self::Newer => newer(content),
            Self::Missing => {
                fs::remove_file(path).expect("a file");
                return true;
            }
            Self::Unreadable => {
                // Neither its content nor its size can be read, whoever asks.
                fs::remove_file(path).expect("a file");
                std::os::unix::fs::symlink(path.file_name().expect("a name"), path).expect("a loop");
                return true;
            }
        };
        put(path, &changed).expect("a damaged file");
        changed != content
    }
}

fn flipped(content: &[u8]) -> Vec<u8> {
    let mut content = content.to_vec();
    // In the middle of what is not zero. In a text a digit, which stays a digit: the damage that is hardest
    // to see.
    let used: Vec<usize> = (0..content.len()).filter(|at| content[*at] != 0).collect();
    let (before, after) = used.split_at(used.len() / 2);
    let digit = after.iter().chain(before).find(|at| content[**at].is_ascii_digit());
    if let Some(at) = digit.filter(|_| content.is_ascii()).or(after.first()) {
        content[*at] ^= 1;
    }
    content
}

/// The content with the format or version that follows.
fn newer(content: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(content);
    for (now, next) in [
        ("\"format\": 1", "\"format\": 2"),
        ("whimbrel store 1\n", "whimbrel store 3\n"),
        ("whimbrel store 2 ", "whimbrel store 3 "),
        ("whimbrel store keys 1", "whimbrel store keys 2"),
    ] {
        if text.contains(now) {
            return text.replacen(now, next, 1).into_bytes();
        }
    }
    let mut content = content.to_vec();
    // A binary layout has its version at byte 7 or 8.
    let magic = content.get(..8).is_some_and(|head| head[..2].iter().all(u8::is_ascii_uppercase));
    if let (true, Some(byte)) = (magic, content.get_mut(if text.starts_with("WHPACK") { 7 } else { 8 })) {
        *byte += 1;
    }
    content
}

/// Files without content that anybody could miss: logs, caches, locks, and room that is set aside.
fn is_dispensable(file: &str) -> bool {
    file.ends_with("lock")
        || file.ends_with("console.log")
        || ["audit/", "events/", "page-cache", "working-sets/", "store/reserve", "store/leases/"]
            .iter()
            .any(|it| file.starts_with(it))
}

/// Damage that nobody can see: text of a user, and content of a guest, have no checksums.
fn is_invisible(file: &str, damage: Damage) -> bool {
    let flipped = damage == Damage::Flipped;
    match file {
        "pool-secret" => true,
        "trust.toml" => flipped || matches!(damage, Damage::Empty | Damage::Missing),
        // A certificate that signs itself says nothing of what it was.
        "key/api.crt" | "key/api.key" => flipped || damage == Damage::Missing,
        "machines/web/disk0/data" => flipped || damage == Damage::Newer,
        "machines/web/disk0/owned" => flipped,
        // Only their names say something.
        _ if file.starts_with("store/partial/") => true,
        _ if file.starts_with("store/packs/") => flipped || damage == Damage::Newer,
        // Lists without a file are empty lists.
        _ if damage == Damage::Missing => {
            !matches!(file.split('/').next(), Some("machines"))
                && !file.starts_with("store/packs/")
                && !file.starts_with("store/keys")
                && file != "store/whimbrel-store"
        }
        _ => false,
    }
}

/// Files that are made again from others.
fn is_renewed(file: &str) -> bool {
    matches!(file, "store/keys" | "store/keys.copy" | "store/whimbrel-store" | "store/condemned")
        || file.starts_with("store/index/")
}

/// The first words of what a file is about, which may be unknown while it is damaged.
fn about(file: &str) -> Vec<String> {
    let stem = Path::new(file).file_stem().expect("a name").to_string_lossy().into_owned();
    let name = file.split('/').nth(1).unwrap_or_default();
    match file.split('/').next().expect("a name") {
        "machines" => vec![format!("machine {name}")],
        "protections" => vec!["machine guarded".into()],
        "tunnels" => vec!["machine roaming".into()],
        "schedules" => vec![format!("schedule {stem}")],
        "networks" => vec![format!("network {stem}")],
        "api-tokens.json" => vec!["token ".into()],
        "trust.toml" => vec!["peer ".into()],
        "migrations" => vec!["migration ".into()],
        "key" => vec!["key ".into()],
        "store" if file.starts_with("store/refs/") => vec![format!("tag {}", &file["store/refs/".len()..])],
        "store" if file.starts_with("store/packs/") => vec!["tag ".into()],
        "store" if file.starts_with("store/partial/") => vec!["partial ".into(), "tag half".into()],
        _ => vec![],
    }
}

/// Does what may write to every file of the daemon. Each may be refused.
fn use_it(started: &Started) {
    let Started { host, access } = started;
    let _ = host.handovers.start(HandoverId([7; 16]), &parsed("beta"));
    let (name, role) = (parsed("other"), Role::Viewer);
    let _ =
        access.tokens.create(TokenRequest { name, role, machines: None, capsules: None, expires_s: None });
    host.stop_upload(&parsed("web"));
    let _ = host.trust_remove(&parsed("nobody"));
    let operation = host.gc();
    let deadline = Instant::now() + Duration::from_secs(120);
    let running = || {
        host.operations().watch(operation.id).expect("the operation").borrow().state
            == OperationState::Running
    };
    while running() {
        assert!(Instant::now() < deadline, "the collection does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Case<'a> {
    runtime: &'a Runtime,
    key: Option<&'a MasterKey>,
    whole: &'a BTreeMap<String, Vec<u8>>,
    before: &'a BTreeMap<String, String>,
}

impl Case<'_> {
    /// Returns what is wrong.
    fn run(&self, file: &str, damage: Damage) -> Result<(), String> {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
        let data = dir.path().join("data");
        copy(self.whole, &data);
        let path = data.join(file);
        if !damage.apply(&path, &self.whole[file]) {
            return Ok(());
        }
        let damaged = fs::read(&path).ok();
        self.examined(&data, file, damage)?;
        // The one file that says who can read a store at all: a later version of it stops the daemon.
        let stops = file == "store/whimbrel-store" && damage == Damage::Newer
            || file.starts_with("store/whimbrel-store") && damage == Damage::Unreadable;
        match folder::start(dir.path(), self.runtime, self.key) {
            Err(error) if stops => drop(error),
            Err(error) => return Err(format!("the daemon does not start: {error}")),
            Ok(_) if stops => return Err("the daemon starts on a later store".into()),
            Ok(started) => {
                self.keeps_the_rest(&started, file)?;
                // The removal of a name's file untags the capsule.
                let is_untagged = damage == Damage::Missing && file.starts_with("store/refs/");
                if !is_untagged {
                    use_it(&started);
                }
                self.keeps_the_rest(&started, file)?;
            }
        }
        self.is_retained(&data, file, damaged.as_deref())?;
        let _ = fs::remove_file(&path);
        put(&path, &self.whole[file]).map_err(|error| format!("it cannot be restored: {error}"))?;
        let started = folder::start(dir.path(), self.runtime, self.key)
            .map_err(|error| format!("it does not start when restored: {error}"))?;
        self.compare(&known(&started), &[], "after the file was restored")?;
        let layout = Directories::of_data(&data);
        if !disk_is_whole(&Directories::create(&data, &dir.path().join("run")).expect("directories")) {
            return Err(format!("the disk in {} lost what its guest wrote", layout.machines().display()));
        }
        Ok(())
    }

    fn examined(&self, data: &Path, file: &str, damage: Damage) -> Result<(), String> {
        let found = examine(data);
        let path = data.join(file);
        let named =
            found.iter().any(|one| one.path == path && !one.reason.is_empty() && !one.remedy.is_empty());
        if named || is_dispensable(file) || is_invisible(file, damage) {
            return Ok(());
        }
        Err(format!("the examination does not name it: {found:?}"))
    }

    fn keeps_the_rest(&self, started: &Started, file: &str) -> Result<(), String> {
        self.compare(&known(started), &about(file), "while the file is damaged")
    }

    fn compare(&self, now: &BTreeMap<String, String>, but: &[String], when: &str) -> Result<(), String> {
        for (name, text) in self.before {
            if but.iter().any(|prefix| name.starts_with(prefix)) {
                // A machine stays listed, whatever is known of it.
                if name.starts_with("machine ") && !name.contains("roaming") && !now.contains_key(name) {
                    return Err(format!("{name} is hidden {when}"));
                }
                continue;
            }
            if now.get(name) != Some(text) {
                return Err(format!("{name} was {text}, and is {:?} {when}", now.get(name)));
            }
        }
        Ok(())
    }

    /// The damaged file is still there, or beside under a name that tells what it is.
    fn is_retained(&self, data: &Path, file: &str, damaged: Option<&[u8]>) -> Result<(), String> {
        let Some(damaged) = damaged else { return Ok(()) };
        if is_dispensable(file) || (is_renewed(file) && file != "store/whimbrel-store") {
            return Ok(());
        }
        let beside = format!("{file}.damaged");
        let is_it = |(name, content): (String, Vec<u8>)| {
            (name == file || name.starts_with(&beside)) && content == damaged
        };
        match files(data).into_iter().any(is_it) {
            true => Ok(()),
            false => Err("the damaged file was changed or removed".into()),
        }
    }
}

fn all_cases(key: Option<&MasterKey>) {
    let runtime = Runtime::new().expect("a runtime");
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
    folder::make(dir.path(), &runtime, key);
    // As it was made: a daemon that starts on it finishes what is under way.
    let whole = files(&dir.path().join("data"));
    let before = known(&folder::start(dir.path(), &runtime, key).expect("the folder"));
    let case = Case { runtime: &runtime, key, whole: &whole, before: &before };
    let (mut failures, mut count) = (Vec::new(), 0);
    for file in whole.keys().filter(|file| !whole[*file].is_empty()) {
        for damage in DAMAGES {
            count += 1;
            if let Err(error) = case.run(file, damage) {
                failures.push(format!("{file}, {damage:?}: {error}"));
            }
        }
    }
    assert!(failures.is_empty(), "{} of {count} cases:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn no_damaged_file_keeps_the_daemon_from_starting_or_loses_anything() {
    all_cases(None);
}

#[test]
fn no_damaged_file_of_an_encrypted_folder_loses_anything() {
    all_cases(Some(&"ab".repeat(32).parse().expect("a key")));
}

#[test]
fn a_folder_has_every_kind_of_file() {
    let runtime = Runtime::new().expect("a runtime");
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on a tmpfs");
    folder::make(dir.path(), &runtime, None);
    let files = files(&dir.path().join("data"));
    let missing: Vec<PathBuf> = PLACES
        .iter()
        .filter(|(root, name)| *root == "data" && !["trash", "imports"].contains(name))
        .filter(|(_, name)| !files.keys().any(|file| file.split('/').next() == Some(name)))
        .map(|(_, name)| PathBuf::from(name))
        .collect();
    assert!(missing.is_empty(), "`folder::make` makes no file in {missing:?}, so their damage is not tested");
}
