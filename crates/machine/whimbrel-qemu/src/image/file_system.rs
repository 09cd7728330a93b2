//! A file system made of layers of a container image: unpacked by a program of the caller, written by
//! e2fsprogs, all of them confined.

use super::{
    ImageError,
    confined_tool::{ConfinedTool, PATIENCE, Run, patience_for},
};
use rustix::fs::{Mode, OFlags};
use std::{fs::File, path::Path, time::Duration};

/// Space of the disk for each inode, in bytes. A machine makes fewer files than that has.
const BYTES_PER_INODE: u64 = 32 << 10;
/// Bytes of a block.
const BLOCK: u64 = 4096;
/// Name of the file with the file system.
const DISK: &str = "disk.img";

/// What the unpacking program leaves in the directory.
#[derive(Debug, Clone, Copy)]
pub struct UnpackedTree<'a> {
    /// Name of the folder with the files.
    pub folder: &'a str,
    /// Name of the file with commands of debugfs(8) that set owners and modes.
    pub commands: &'a str,
    /// Number of files.
    pub files: u64,
}

/// A file system that is being made, in a directory of its own.
#[derive(Debug)]
pub struct NewFileSystem<'a> {
    tool: ConfinedTool<'a>,
    size: u64,
}

impl<'a> NewFileSystem<'a> {
    /// A file system of `size` bytes to be made in the directory `dir`, which becomes that of the tools.
    pub fn new(dir: &'a Path, size: u64) -> Result<Self, ImageError> {
        Ok(Self { tool: ConfinedTool::new(dir, size)?, size })
    }

    /// Has `program` unpack a layer that it reads as its standard input. Returns what it prints.
    pub fn unpack(
        &self,
        program: &Path,
        arguments: Vec<String>,
        layer: File,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<u8>, ImageError> {
        let patience = patience_for(self.size);
        let run = Run { program, arguments, input: Some(layer), patience };
        self.tool.run(run, cancelled).map(|(printed, _)| printed).map_err(|error| match error {
            ImageError::Rejected { words, .. } => {
                // In one line, as an error of ours.
                let words = words.trim_start_matches("error: ").replace("\n  because: ", ": ");
                ImageError::Rejected { tool: "the unpacking process".to_owned(), words }
            }
            error => error,
        })
    }

    /// Writes the file system with a tree, and opens it.
    pub fn write(
        &self,
        label: &str,
        tree: UnpackedTree<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<File, ImageError> {
        let inodes = (self.size / BYTES_PER_INODE).max(tree.files.saturating_add(tree.files / 4 + 1024));
        let patience = patience_for(self.size);
        // Tables that are zeros are written as holes here, and not by the machine when it runs.
        let options = "lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0";
        let inodes = inodes.to_string();
        let blocks = (self.size / BLOCK).to_string();
        let arguments = [
            "-q",
            "-F",
            "-t",
            "ext4",
            "-b",
            "4096",
            "-m",
            "0",
            "-N",
            &inodes,
            "-L",
            label,
            "-E",
            options,
            "-d",
            tree.folder,
            DISK,
            &blocks,
        ];
        self.e2fsprogs("mke2fs", &arguments, patience, cancelled)?;
        let arguments = ["-w", "-f", tree.commands, DISK];
        let words = self.e2fsprogs("debugfs", &arguments, patience, cancelled)?;
        // The program succeeds whatever becomes of its commands, and begins with its name and version.
        if let Some(line) = words.lines().find(|line| !line.starts_with("debugfs ")) {
            return Err(ImageError::Rejected { tool: "debugfs".to_owned(), words: line.to_owned() });
        }
        // What was written is checked by a program that did not write it.
        self.e2fsprogs("e2fsck", &["-f", "-n", DISK], patience + PATIENCE, cancelled)?;
        self.open_disk()
    }

    /// Opens the file system. The directory is that of the tools: a link to a file of the host may have its
    /// name, or a fifo that nobody writes to.
    fn open_disk(&self) -> Result<File, ImageError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let disk = rustix::fs::open(self.tool.dir.join(DISK), flags, Mode::empty());
        let disk = File::from(disk.map_err(|errno| ImageError::Read(errno.into()))?);
        match disk.metadata().map_err(ImageError::Read)?.is_file() {
            true => Ok(disk),
            false => Err(ImageError::Header { what: "its file system is no file" }),
        }
    }

    /// Runs a program of e2fsprogs and returns what it prints to its standard error.
    fn e2fsprogs(
        &self,
        program: &str,
        arguments: &[&str],
        patience: Duration,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<String, ImageError> {
        let arguments = arguments.iter().map(|word| (*word).to_owned()).collect();
        let run = Run { program: Path::new(program), arguments, input: None, patience };
        self.tool.run(run, cancelled).map(|(_, words)| words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_a_tool_replaced_by_something_else_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("secret"), "of the host").unwrap();
        let new = NewFileSystem::new(dir.path(), 64 << 20).unwrap();
        let disk = dir.path().join(DISK);
        std::os::unix::fs::symlink("secret", &disk).unwrap();
        new.open_disk().unwrap_err();
        std::fs::remove_file(&disk).unwrap();
        std::process::Command::new("mkfifo").arg(&disk).status().unwrap();
        new.open_disk().unwrap_err();
        std::fs::remove_file(&disk).unwrap();
        std::fs::write(&disk, "a disk").unwrap();
        new.open_disk().unwrap();
    }
}
