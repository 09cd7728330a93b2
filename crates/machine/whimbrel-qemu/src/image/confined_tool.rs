//! Programs that read what comes from outside: each runs as a user of its own in a directory of its own,
//! without network, rights and other files, for a limited time.

use super::ImageError;
use crate::{
    confinement::{Confinement, tool_user},
    process::Reaped,
};
use rustix::{
    fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create},
    process::Resource,
};
use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read, Seek},
    os::unix::fs::chown,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Address space of a tool, of which stacks of its threads take most.
const ADDRESS_SPACE: u64 = 4 << 30;
/// Longest output of a tool.
const OUTPUT_MAX: u64 = 64 << 10;
/// Most open files: a tool that removes a tree has some for each folder on the way down.
const FILES_MAX: u64 = 1024;
/// Time for what does not depend on the size of an image.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes a second that the slowest disk takes.
const SLOWEST: u64 = 5 << 20;
const POLL: Duration = Duration::from_millis(10);
/// Where programs are looked for: those of e2fsprogs are in none of the folders of users.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A user and its directory, in which tools run one after another.
#[derive(Debug)]
pub(super) struct ConfinedTool<'a> {
    pub(super) dir: &'a Path,
    user: u32,
    /// Longest file that a tool can write, in bytes.
    file_max: u64,
}

/// One run of a program.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: Vec<String>,
    /// What it reads as its standard input.
    pub(super) input: Option<File>,
    pub(super) patience: Duration,
}

/// Time for so many bytes.
pub(super) fn patience_for(bytes: u64) -> Duration {
    PATIENCE + Duration::from_secs(bytes / SLOWEST)
}

impl<'a> ConfinedTool<'a> {
    /// A new user for the directory `dir`, which becomes its own.
    pub(super) fn new(dir: &'a Path, file_max: u64) -> Result<Self, ImageError> {
        let tool = Self { dir, user: tool_user(), file_max };
        tool.give(dir)?;
        Ok(tool)
    }

    /// Gives a file or directory to the user.
    pub(super) fn give(&self, path: &Path) -> Result<(), ImageError> {
        chown(path, Some(self.user), Some(self.user)).map_err(ImageError::Start)
    }

    /// Opens a file that a tool has made. The directory is the tool's: a link to a file of the host may have
    /// its name, or a fifo that nobody writes to.
    pub(super) fn open_made(&self, name: &str) -> Result<File, ImageError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let made = rustix::fs::open(self.dir.join(name), flags, Mode::empty());
        let made = File::from(made.map_err(|errno| ImageError::Read(errno.into()))?);
        match made.metadata().map_err(ImageError::Read)?.is_file() {
            true => Ok(made),
            false => Err(ImageError::Header { what: "what was made of it is no file" }),
        }
    }

    /// Runs a program of ours that unpacks its input, and returns what it prints.
    pub(super) fn unpack(&self, run: Run<'_>, cancelled: &dyn Fn() -> bool) -> Result<Vec<u8>, ImageError> {
        self.run(run, cancelled).map(|(printed, _)| printed).map_err(|error| match error {
            ImageError::Rejected { words, .. } => {
                // In one line, as an error of ours.
                let words = words.trim_start_matches("error: ").replace("\n  because: ", ": ");
                ImageError::Rejected { tool: "the unpacking process".to_owned(), words }
            }
            error => error,
        })
    }

    /// Runs a program and returns what it prints to its standard output, and to its standard error.
    pub(super) fn run(
        &self,
        run: Run<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(Vec<u8>, String), ImageError> {
        let (mut printed, mut words) = (output("output")?, output("errors")?);
        let limits = vec![
            (Resource::As, ADDRESS_SPACE),
            (Resource::Cpu, run.patience.as_secs()),
            (Resource::Fsize, self.file_max),
            (Resource::Nofile, FILES_MAX),
            (Resource::Core, 0),
        ];
        let dir = File::open(self.dir).map_err(ImageError::Start)?;
        let mut command = Command::new(run.program);
        let confinement = Confinement::of_tool(self.user, dir.into(), limits);
        // A process names its own program by a link; the folder that the program is in may be read.
        let program = std::fs::read_link(run.program).unwrap_or_else(|_| run.program.to_owned());
        confinement.with_files_of(&program).map_err(ImageError::Start)?.apply_to(&mut command);
        // The environment of a daemon may have secrets in it.
        command.env_clear().env("PATH", PATH);
        command
            .args(run.arguments)
            .stdin(run.input.map_or_else(Stdio::null, Stdio::from))
            .stdout(printed.try_clone().map_err(ImageError::Start)?)
            .stderr(words.try_clone().map_err(ImageError::Start)?);
        let child = Reaped(command.spawn().map_err(ImageError::Start)?);
        let status = ended(child, run.patience, cancelled)?;
        let words = String::from_utf8_lossy(&all_of(&mut words).unwrap_or_default()).trim().to_owned();
        if status.success() {
            return Ok((all_of(&mut printed).map_err(ImageError::Read)?, words));
        }
        let tool = run.program.file_name().unwrap_or(OsStr::new("the tool")).to_string_lossy().into_owned();
        Err(ImageError::Rejected { tool, words: if words.is_empty() { status.to_string() } else { words } })
    }
}

/// A file in memory that does not become longer than [`OUTPUT_MAX`].
fn output(name: &str) -> Result<File, ImageError> {
    let start = |errno: rustix::io::Errno| ImageError::Start(errno.into());
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(format!("tool-{name}"), flags).map_err(start)?);
    file.set_len(OUTPUT_MAX).map_err(ImageError::Start)?;
    fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(start)?;
    Ok(file)
}

/// Waits for the end of a tool, which is killed when that takes too long or the caller gives up.
fn ended(
    mut child: Reaped,
    patience: Duration,
    cancelled: &dyn Fn() -> bool,
) -> Result<ExitStatus, ImageError> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(status) = child.0.try_wait().map_err(ImageError::Start)? {
            return Ok(status);
        }
        if cancelled() {
            return Err(ImageError::Cancelled);
        }
        if Instant::now() > deadline {
            return Err(ImageError::TimedOut { after: patience });
        }
        thread::sleep(POLL);
    }
}

/// What was written to an [`output`]: both ends have one position.
fn all_of(file: &mut File) -> io::Result<Vec<u8>> {
    let length = file.stream_position()?.min(OUTPUT_MAX);
    file.rewind()?;
    let mut content = Vec::new();
    file.take(length).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(tool: &ConfinedTool<'_>, line: &str, input: Option<File>) -> Result<Vec<u8>, ImageError> {
        let arguments = vec!["-c".to_owned(), line.to_owned()];
        let run = Run { program: Path::new("/bin/sh"), arguments, input, patience: PATIENCE };
        tool.run(run, &|| false).map(|(printed, _)| printed)
    }

    #[test]
    fn a_tool_reads_its_input_writes_into_its_directory_and_says_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let tool = ConfinedTool::new(dir.path(), 4096).unwrap();
        let mut input = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut input, b"skip me: content").unwrap();
        input.seek(io::SeekFrom::Start(9)).unwrap();
        let printed = sh(&tool, "cat > made; cat made; id -u >&2", Some(input)).unwrap();
        assert_eq!(
            (printed.as_slice(), std::fs::read(dir.path().join("made")).unwrap().as_slice()),
            (&b"content"[..], &b"content"[..])
        );
        let Err(ImageError::Rejected { words, .. }) = sh(&tool, "echo no >&2; exit 3", None) else {
            panic!()
        };
        assert_eq!(words, "no");
        assert!(sh(&tool, "head -c 5000 /dev/zero > long", None).is_err());
    }

    #[test]
    fn a_tool_that_talks_without_end_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let tool = ConfinedTool::new(dir.path(), 1 << 40).unwrap();
        // What does not fit is an error of its own, which this one passes over.
        let printed =
            sh(&tool, "head -c 200000 /dev/zero; head -c 200000 /dev/zero >&2; exit 0", None).unwrap();
        assert!(printed.len() <= OUTPUT_MAX as usize && !printed.is_empty(), "{}", printed.len());
        let cancelled = tool.run(
            Run {
                program: Path::new("/bin/sh"),
                arguments: vec!["-c".into(), "sleep 60".into()],
                input: None,
                patience: PATIENCE,
            },
            &|| true,
        );
        assert!(matches!(cancelled, Err(ImageError::Cancelled)));
    }

    #[test]
    fn a_file_that_a_tool_replaced_by_something_else_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secret"), "of the host").unwrap();
        let tool = ConfinedTool::new(dir.path(), 4096).unwrap();
        let made = dir.path().join("made");
        std::os::unix::fs::symlink("secret", &made).unwrap();
        tool.open_made("made").unwrap_err();
        std::fs::remove_file(&made).unwrap();
        Command::new("mkfifo").arg(&made).status().unwrap();
        tool.open_made("made").unwrap_err();
        std::fs::remove_file(&made).unwrap();
        std::fs::write(&made, "a disk").unwrap();
        tool.open_made("made").unwrap();
    }
}
