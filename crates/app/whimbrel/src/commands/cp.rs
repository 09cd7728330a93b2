//! `whimbrel cp`: copies a file into a guest or out of it, through qemu-ga.

use crate::{context::Context, error::CliError, output, table::count};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Serialize;
use std::{
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    str::FromStr,
};
use whimbrel_api::{FileReadRequest, FileWriteRequest};
use whimbrel_core::MachineName;

/// Bytes in one call.
const CHUNK: usize = 256 << 10;

const EXAMPLES: &str = "\
Examples:
  whimbrel cp nginx.conf web:/etc/nginx/nginx.conf
  whimbrel cp web:/var/log/syslog .
  tar c site | whimbrel cp - web:/root/site.tar
  whimbrel cp web:/etc/hostname -";

/// Copy a file into the guest of a machine, or out of it
///
/// Needs the program qemu-ga in the guest (in most distributions the package qemu-guest-agent). Copies
/// content only; owner and mode are those that qemu-ga gives. For folders, use tar.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// File to copy: a path here, NAME:PATH in a guest, or - for standard input
    from: Place,
    /// Copy: a path here, NAME:PATH in a guest, or - for standard output
    to: Place,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Here(PathBuf),
    Stream,
    Guest(MachineName, String),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            _ if text == "-" => Ok(Self::Stream),
            // A path with a colon is a path if it says so: `./a:b`.
            Some((name, path)) if !name.contains('/') && !name.is_empty() => {
                let name = name.parse().map_err(|error| format!("{error}"))?;
                match path.starts_with('/') {
                    true => Ok(Self::Guest(name, path.to_owned())),
                    false => Err("a path in a guest begins with /".to_owned()),
                }
            }
            _ => Ok(Self::Here(text.into())),
        }
    }
}

/// Result of a copy.
#[derive(Debug, Serialize)]
struct Copied {
    bytes: u64,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let bytes = match (self.from, self.to) {
            (Place::Guest(name, path), to @ (Place::Here(_) | Place::Stream)) => {
                let mut out = Target::open(to, &path)?;
                let bytes = fetch(context, &name, &path, |part| out.write(part)).await?;
                out.finish()?;
                bytes
            }
            (Place::Here(path), Place::Guest(name, to)) => {
                let failed = |source| CliError::File { path: path.clone(), source };
                let file = File::open(&path).map_err(failed)?;
                if file.metadata().map_err(failed)?.is_dir() {
                    return Err(CliError::Usage {
                        problem: format!("{} is a folder", path.display()),
                        hint: format!("`tar c {} | whimbrel cp - {name}:/FILE.tar`", path.display()),
                    });
                }
                send(context, &name, &to, file).await?
            }
            (Place::Stream, Place::Guest(name, to)) => send(context, &name, &to, io::stdin().lock()).await?,
            _ => {
                return Err(CliError::Usage {
                    problem: "one of the two places is in a guest, and one is here".to_owned(),
                    hint: "write a place in a guest as NAME:PATH".to_owned(),
                });
            }
        };
        if context.output.json {
            return context.output.result(&Copied { bytes }, |_| String::new());
        }
        context.output.remark(&format!("copied {}", count(bytes, "byte")));
        Ok(())
    }
}

async fn fetch(
    context: &Context,
    name: &MachineName,
    path: &str,
    mut write: impl FnMut(&[u8]) -> Result<(), CliError>,
) -> Result<u64, CliError> {
    let mut offset = 0;
    loop {
        let request = FileReadRequest { path: path.to_owned(), offset, length: CHUNK as u32 };
        let part = context.client.read_file(name, &request).await?;
        let bytes = STANDARD.decode(&part.data);
        let bytes = bytes.map_err(|error| CliError::io("read the answer")(io::Error::other(error)))?;
        write(&bytes)?;
        offset += bytes.len() as u64;
        if part.end || bytes.is_empty() {
            return Ok(offset);
        }
    }
}

pub(crate) async fn send(
    context: &Context,
    name: &MachineName,
    path: &str,
    mut from: impl Read,
) -> Result<u64, CliError> {
    let (mut offset, mut buffer) = (0, Vec::with_capacity(CHUNK));
    loop {
        buffer.clear();
        let read = from.by_ref().take(CHUNK as u64).read_to_end(&mut buffer);
        let read = read.map_err(CliError::io("read the file"))?;
        // An empty file is made as well.
        if read == 0 && offset > 0 {
            return Ok(offset);
        }
        let request = FileWriteRequest { path: path.to_owned(), offset, data: STANDARD.encode(&buffer) };
        context.client.write_file(name, &request).await?;
        offset += read as u64;
        if read < CHUNK {
            return Ok(offset);
        }
    }
}

/// Where a copy out of a guest goes: a file that has its name once it is whole, or standard output.
enum Target {
    File(tempfile::NamedTempFile, PathBuf),
    Stream,
}

impl Target {
    fn open(place: Place, from: &str) -> Result<Self, CliError> {
        let Place::Here(mut path) = place else { return Ok(Self::Stream) };
        if path.is_dir() {
            path.push(Path::new(from).file_name().unwrap_or_default());
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let file =
            tempfile::Builder::new().prefix(".whimbrel-cp").tempfile_in(folder.unwrap_or(Path::new(".")));
        Ok(Self::File(file.map_err(CliError::io("create the copy"))?, path))
    }

    fn write(&mut self, part: &[u8]) -> Result<(), CliError> {
        match self {
            Self::File(file, _) => file.write_all(part).map_err(CliError::io("write the copy")),
            Self::Stream => output::write(part),
        }
    }

    fn finish(self) -> Result<(), CliError> {
        let Self::File(file, path) = self else { return Ok(()) };
        let synced = file.as_file().sync_all();
        synced.and_then(|()| Ok(file.persist(path)?)).map(drop).map_err(CliError::io("write the copy"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_in_a_guest_only_if_it_says_so() {
        let place = |text: &str| text.parse::<Place>();
        assert_eq!(place("web:/etc/motd"), Ok(Place::Guest("web".parse().unwrap(), "/etc/motd".into())));
        assert_eq!(place("./a:b"), Ok(Place::Here("./a:b".into())));
        assert_eq!([place("-"), place("motd")], [Ok(Place::Stream), Ok(Place::Here("motd".into()))]);
        assert!(place("web:motd").is_err() && place("not a name:/x").is_err());
    }
}
