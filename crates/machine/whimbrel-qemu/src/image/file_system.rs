//! A file system made of layers of a container image: unpacked by a program of the caller, written by
//! e2fsprogs, all of them confined.

use super::{
    ImageError,
    confined_tool::{ConfinedTool, PATIENCE, Run, patience_for},
};
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
        self.tool.unpack(Run { program, arguments, input: Some(layer), patience }, cancelled)
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
        self.tool.open_made(DISK)
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
