//! `whimbrel session hint`: writes the hint file beside a file, on the server.

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
    size: u64,
    /// Bytes in zero blocks, which clients need not request.
    zeros: u64,
    whole: Option<bool>,
}

/// Reads `file` and writes its hint.
pub(super) fn write(file: &Path, whole: Option<bool>, context: &Context) -> Result<(), CliError> {
    let name = file.file_name().and_then(|name| Name::new(name.as_bytes()).ok());
    let path = name.and_then(|name| name_of(&name)).map(|name| file.with_file_name(name.as_os()));
    let Some(path) = path else {
        let problem = format!("{} cannot have a hint file", file.display());
        return Err(CliError::Usage { problem, hint: "name a file".to_owned() });
    };
    let note = Hint::of_file(file, whole).map_err(CliError::io("read the file"))?;
    whimbrel_wire::atomic_file::replace(&path, note.to_text().as_bytes())
        .map_err(CliError::io("write the hint"))?;
    // Clients ignore a hint of another owner.
    let owner = std::fs::metadata(file).map_err(CliError::io("find the owner of the file"))?;
    std::os::unix::fs::chown(&path, Some(owner.uid()), Some(owner.gid()))
        .map_err(CliError::io("give the hint to the owner of the file"))?;
    let size = note.version.map_or(0, |(size, _)| size);
    let zeros = note.zeros.iter().map(|run| run.end - run.start).sum();
    let noted = Noted { file: file.to_owned(), note: path, size, zeros, whole };
    context.output.result(&noted, |noted| {
        let bytes = |bytes| ByteSize(bytes).to_string();
        fields(&[
            ("hint", noted.note.display().to_string()),
            ("zeros", format!("{} of {}", bytes(noted.zeros), bytes(noted.size))),
        ])
    })
}
