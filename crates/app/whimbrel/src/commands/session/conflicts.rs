//! `whimbrel session conflicts`, `diff` and `keep`: local versions that a session put aside, and what becomes
//! of them.

use crate::{
    context::Context,
    error::CliError,
    table::{fields, table},
};
use clap::ValueEnum;
use serde::Serialize;
use std::{ops::Range, path::PathBuf};
use whimbrel_core::ByteSize;
use whimbrel_session::client::{CacheDir, ControlResponse, Keep, KeepError, KeptCopy, kept_copies, total};

/// Which version stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Choice {
    /// The local version, in place of the server's
    Ours,
    /// The server's version; the copy is removed
    Theirs,
    /// The server's version, and the local one beside it as FILE.ours
    Both,
}

/// A conflict, as it is listed.
#[derive(Debug, Serialize)]
struct Conflict {
    copy: String,
    file: String,
    why: String,
    at: i64,
    size: u64,
    /// Bytes that were written here.
    ours: u64,
    /// Bytes that never were on this host.
    absent: u64,
    local: PathBuf,
    server: PathBuf,
}

impl Conflict {
    fn of(copy: &KeptCopy, (session, cache): (&ControlResponse, &CacheDir)) -> Self {
        Self {
            copy: copy.name.clone(),
            file: copy.path.to_string(),
            why: copy.why.clone(),
            at: copy.at,
            size: copy.size,
            ours: total(&copy.ours),
            absent: total(&copy.absent),
            local: copy.file(cache),
            server: copy.theirs(&session.mount),
        }
    }
}

fn cache_of(session: &ControlResponse) -> Result<CacheDir, CliError> {
    let opened = CacheDir::open(&session.cache, session.cache_key.as_deref());
    opened.map_err(|error| CliError::Session(error.into()))
}

fn all(cache: &CacheDir) -> Result<Vec<KeptCopy>, CliError> {
    kept_copies(cache).map_err(CliError::io("list the conflicts of the session"))
}

/// The conflict with this name, or of this file if it has only one.
fn named(cache: &CacheDir, name: &str, copy: &str) -> Result<KeptCopy, CliError> {
    let mut found = all(cache)?;
    found.retain(|known| known.name == copy || known.path.to_string() == copy);
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => Err(unclear(format!("there is no conflict {copy:?}"), name)),
        more => Err(unclear(format!("{copy:?} has {more} conflicts"), name)),
    }
}

fn unclear(problem: String, name: &str) -> CliError {
    CliError::Usage { problem, hint: format!("see `whimbrel session conflicts {name}` for the copies") }
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

/// Lists the conflicts of a session.
pub(super) fn list(session: &ControlResponse, context: &Context) -> Result<(), CliError> {
    let cache = cache_of(session)?;
    let listed: Vec<Conflict> =
        all(&cache)?.iter().map(|copy| Conflict::of(copy, (session, &cache))).collect();
    context.output.result(&listed, |listed| {
        let rows = listed.iter().map(|row| {
            let absent = if row.absent == 0 { "-".to_owned() } else { size(row.absent) };
            [row.file.clone(), size(row.size), size(row.ours), absent, row.copy.clone()]
        });
        table(["FILE", "SIZE", "OURS", "ABSENT", "COPY"], rows, "no conflicts")
    })
}

#[derive(Debug, Serialize)]
struct Compared {
    conflict: Conflict,
    differs: Vec<Range<u64>>,
}

/// Compares what was written here with the server's version.
pub(super) fn compare(
    session: &ControlResponse,
    name: &str,
    copy: &str,
    context: &Context,
) -> Result<(), CliError> {
    let cache = cache_of(session)?;
    let kept = named(&cache, name, copy)?;
    let differs = kept.compare(&cache, &session.mount);
    let differs = differs.map_err(|error| CliError::Session(error.into()))?;
    let compared = Compared { conflict: Conflict::of(&kept, (session, &cache)), differs };
    context.output.result(&compared, |Compared { conflict, differs }| {
        let written = format!("{}, of which {} differ", size(conflict.ours), size(total(differs)));
        let mut text = fields(&[
            ("file", conflict.file.clone()),
            ("why", conflict.why.clone()),
            ("local version", conflict.local.display().to_string()),
            ("server's version", conflict.server.display().to_string()),
            ("written here", written),
            ("never here", size(conflict.absent)),
        ]);
        for range in differs {
            text += &format!("differs  byte {} to {}\n", range.start, range.end);
        }
        text
    })
}

#[derive(Debug, Serialize)]
struct Resolved {
    file: String,
    kept: &'static str,
}

/// Resolves a conflict.
pub(super) fn resolve(
    session: &ControlResponse,
    (name, copy): (&str, &str),
    (choice, partial): (Choice, bool),
    context: &Context,
) -> Result<(), CliError> {
    let cache = cache_of(session)?;
    let kept = named(&cache, name, copy)?;
    let (keep, said) = match (choice, partial) {
        (Choice::Ours, false) => (Keep::Ours, "the local version"),
        (Choice::Ours, true) => (Keep::OurWrites, "the server's version with what was written here"),
        (Choice::Theirs, _) => (Keep::Theirs, "the server's version"),
        (Choice::Both, _) => (Keep::Both, "both versions"),
    };
    match kept.resolve(&cache, &session.mount, keep) {
        Ok(()) => {}
        Err(error @ KeepError::Incomplete { .. }) => {
            return Err(CliError::Usage {
                problem: error.to_string(),
                hint: format!(
                    "`whimbrel session keep {name} {copy} ours --partial` writes what was written here over the \
                     server's version"
                ),
            });
        }
        Err(error) => return Err(CliError::Session(error.into())),
    }
    let resolved = Resolved { file: kept.path.to_string(), kept: said };
    context.output.result(&resolved, |resolved| format!("{}: kept {}\n", resolved.file, resolved.kept))
}
