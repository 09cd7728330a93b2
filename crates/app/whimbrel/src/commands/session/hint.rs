//! `whimbrel session note`: writes the note beside a file, on the server, where the file is.

use crate::{context::Context, error::CliError, table::fields};
use serde::Serialize;
use std::{
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
};
use whimbrel_core::ByteSize;
use whimbrel_session::{
    hint_file::{Hint, name_of},
    proto::Name,
};

#[derive(Debug, Serialize)]
struct Noted {
    file: PathBuf,
    note: PathBuf,
    /// Bytes of it.
    size: u64,
    /// Of these so many that nobody needs to ask for.
    zeros: u64,
    whole: Option<bool>,
}

/// Looks `file` through and writes down what it finds.
pub(super) fn note(file: &Path, whole: Option<bool>, context: &Context) -> Result<(), CliError> {
    let name = file.file_name().and_then(|name| Name::new(name.as_bytes()).ok());
    let path = name.and_then(|name| name_of(&name)).map(|name| file.with_file_name(name.as_os()));
    let Some(path) = path else {
        let problem = format!("there can be no note beside {}", file.display());
        return Err(CliError::Usage { problem, hint: "name a file".to_owned() });
    };
    let note = Hint::of_file(file, whole).map_err(CliError::io("look the file through"))?;
    whimbrel_wire::atomic_file::replace(&path, note.to_text().as_bytes())
        .map_err(CliError::io("write the note"))?;
    // It is believed only if it has the file's owner.
    let owner = std::fs::metadata(file).map_err(CliError::io("look at the file"))?;
    std::os::unix::fs::chown(&path, Some(owner.uid()), Some(owner.gid()))
        .map_err(CliError::io("give the note to the owner of the file"))?;
    let size = note.of.map_or(0, |(size, _)| size);
    let zeros = note.zeros.iter().map(|run| run.end - run.start).sum();
    let noted = Noted { file: file.to_owned(), note: path, size, zeros, whole };
    context.output.result(&noted, |noted| {
        let bytes = |bytes| ByteSize(bytes).to_string();
        fields(&[
            ("note", noted.note.display().to_string()),
            ("zeros", format!("{} of {}", bytes(noted.zeros), bytes(noted.size))),
        ])
    })
}
