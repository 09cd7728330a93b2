//! A build in which clippy compiles what it checks, and which remembers how: rustdoc then checks the
//! documentation against the artefacts of that build. `cargo doc` would have every dependency checked anew.
//!
//! Cargo starts this program in place of rustc for each crate of the workspace (`RUSTC_WORKSPACE_WRAPPER`).
//! The program writes down the arguments and becomes clippy.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Has cargo start this program, and says where it notes what it compiles.
const NOTES: &str = "WHIMBREL_LINT_NOTES";
/// How `cargo clippy` passes on its arguments (`src/main.rs` of clippy).
const CLIPPY_ARGS: (&str, &str) = ("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
/// Arguments of rustc, with the values after them, that rustdoc has as well.
const SHARED: [&str; 7] =
    ["--crate-name", "--crate-type", "--cfg", "--check-cfg", "--extern", "-L", "--cap-lints"];
/// Beginnings of the names of variables that cargo sets for a crate and its `env!`.
const VARIABLES: [&str; 5] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_NAME", "CARGO_BIN_", "OUT_DIR"];
/// Programs of rustdoc beside each other.
const BESIDE: usize = 2;

/// How a crate was compiled.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    arguments: Vec<String>,
    folder: PathBuf,
    /// What `env!` may ask for.
    variables: BTreeMap<String, String>,
}

/// Sets a cargo command up for such a build.
pub(crate) fn prepare(command: &mut Command, root: &Path) -> Result<()> {
    let notes = notes_of(root);
    fs::create_dir_all(&notes).with_context(|| format!("cannot create {}", notes.display()))?;
    let own = std::env::current_exe().context("cannot find this program")?;
    command.env("RUSTC_WORKSPACE_WRAPPER", own).env(NOTES, notes).envs([CLIPPY_ARGS]);
    Ok(())
}

fn notes_of(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from).join("lint-notes")
}

/// Becomes clippy if cargo has started this program as its compiler. Returns only if it has not, or with an
/// error.
pub(crate) fn become_compiler() -> Result<()> {
    let Some(notes) = std::env::var_os(NOTES) else { return Ok(()) };
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let is_compiler = arguments.first().is_some_and(|first| Path::new(first).ends_with("rustc"));
    if !is_compiler {
        return Ok(());
    }
    if let Some(note) = note(&arguments) {
        let path = Path::new(&notes).join(note.file_name());
        fs::write(&path, serde_json::to_vec(&note)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Err(Command::new("clippy-driver").args(arguments).exec()).context("cannot start clippy-driver")
}

impl Note {
    fn source(&self) -> &str {
        self.arguments.iter().find(|word| word.ends_with(".rs")).map_or("", String::as_str)
    }

    fn is_test(&self) -> bool {
        self.arguments.iter().any(|word| word == "--test")
    }

    fn is_library(&self) -> bool {
        self.source().ends_with("lib.rs")
    }

    /// One for each source, and for what is made of it.
    fn file_name(&self) -> String {
        let kind = if self.is_test() { "test" } else { "crate" };
        format!("{}.{kind}.json", self.source().replace('/', "+"))
    }
}

/// What is to be remembered of a call of rustc: that of a library, program or example.
fn note(arguments: &[OsString]) -> Option<Note> {
    let words: Option<Vec<String>> = arguments.iter().map(|word| word.to_str().map(str::to_owned)).collect();
    let arguments = words?.split_off(1);
    let of_cargo = |(name, _): &(String, String)| VARIABLES.iter().any(|begin| name.starts_with(begin));
    let variables = std::env::vars().filter(of_cargo).collect();
    let note = Note { arguments, folder: std::env::current_dir().ok()?, variables };
    let documented = ["src/", "examples/"].iter().any(|folder| note.source().contains(folder));
    documented.then_some(note)
}

/// Has rustdoc check the documentation of every crate that the build compiled.
pub(crate) fn check_documentation(root: &Path) -> Result<()> {
    let notes = notes_of(root);
    let entries = fs::read_dir(&notes).with_context(|| format!("cannot read {}", notes.display()))?;
    let mut notes = Vec::new();
    for entry in entries.flatten() {
        let note: Note = serde_json::from_slice(&fs::read(entry.path())?)?;
        notes.push(note);
    }
    // Those of earlier builds, too: a source may be gone.
    notes.retain(|note| note.folder.join(note.source()).exists());
    // A program that no test starts was compiled as a test alone.
    let compiled: BTreeSet<String> =
        notes.iter().filter(|note| !note.is_test()).map(|note| note.source().to_owned()).collect();
    notes.retain(|note| !note.is_test() || !compiled.contains(note.source()));
    if notes.is_empty() {
        bail!(
            "the build compiled no crate of the workspace, so there is nothing whose documentation could be checked"
        );
    }
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..BESIDE {
            scope.spawn(|| {
                while let Some(note) = notes.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match check_one(note) {
                        Ok(status) if status.success() => {}
                        outcome => failed
                            .lock()
                            .unwrap_or_else(|lock| lock.into_inner())
                            .push((note.source(), outcome)),
                    }
                }
            });
        }
    });
    match failed.into_inner().unwrap_or_else(|lock| lock.into_inner()).first() {
        Some((source, Err(error))) => bail!("{source}: {error:#}"),
        Some((source, Ok(status))) => bail!("rustdoc on {source}: {status}; repeat it with: cargo doc"),
        None => Ok(()),
    }
}

fn check_one(note: &Note) -> Result<ExitStatus> {
    let mut rustdoc = Command::new("rustdoc");
    rustdoc.args(for_rustdoc(&note.arguments)).args(["--document-private-items", "-D", "warnings"]);
    if !note.is_library() {
        // As cargo has it: nobody else reads what a program is made of.
        rustdoc.args(["-A", "rustdoc::private-intra-doc-links"]);
    }
    // Checks without pages, which are unstable options of rustdoc.
    rustdoc.args(["-Z", "unstable-options", "--check"]).env("RUSTC_BOOTSTRAP", "1");
    rustdoc.current_dir(&note.folder).envs(&note.variables).status().context("cannot start rustdoc")
}

/// The arguments of rustc that rustdoc has as well: what is compiled, of what, and with which features.
fn for_rustdoc(arguments: &[String]) -> Vec<&str> {
    let mut kept = Vec::new();
    let mut words = arguments.iter().map(String::as_str);
    while let Some(word) = words.next() {
        if SHARED.contains(&word) {
            kept.push(word);
            kept.extend(words.next());
        } else if ["-C", "--out-dir", "--error-format", "--json"].contains(&word) {
            words.next();
        } else if word.ends_with(".rs") || word.starts_with("--edition") {
            kept.push(word);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rustdoc_gets_what_it_knows_of_a_call_of_rustc() {
        let call = "--crate-name store --edition=2024 src/lib.rs --error-format=json --json=artifacts --crate-type lib \
                    --emit=dep-info,metadata,link -C opt-level=1 --cfg feature=\"x\" --check-cfg cfg(docsrs) \
                    -C metadata=1 --out-dir /t/deps -L dependency=/t/deps --extern core=/t/libcore.rmeta";
        let words: Vec<String> = call.split_whitespace().map(str::to_owned).collect();
        let kept = for_rustdoc(&words).join(" ");
        assert_eq!(
            kept,
            "--crate-name store --edition=2024 src/lib.rs --crate-type lib --cfg feature=\"x\" --check-cfg cfg(docsrs) \
             -L dependency=/t/deps --extern core=/t/libcore.rmeta"
        );
        let os = |words: &[String]| -> Vec<OsString> {
            ["rustc".to_owned()].iter().chain(words).map(OsString::from).collect()
        };
        assert_eq!(note(&os(&words)).unwrap().arguments, words);
        assert_eq!(note(&os(&words)).unwrap().file_name(), "src+lib.rs.crate.json");
        let test = [words, vec!["--test".to_owned()]].concat();
        assert!(note(&os(&test)).unwrap().is_test() && note(&os(&["-vV".to_owned()])).is_none());
    }
}
