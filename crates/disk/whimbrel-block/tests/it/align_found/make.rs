//! File systems with files, and disks with a file system, built with standard tools and without mounting.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use whimbrel_alignment::{FileSystem, RegionKind};
use whimbrel_core::is_zero;

/// Names and contents.
pub(crate) type Files = [(String, Vec<u8>)];

const MIB: u64 = 1 << 20;
/// Bytes of a disk: an odd number of sectors, as real disks have.
const DISK: u64 = 320 * MIB + 35 * 512;

/// Recipe of a file system: `fill` gets the image, a folder with the files, and their names.
pub(crate) struct Maker {
    pub(crate) name: &'static str,
    pub(crate) file_system: FileSystem,
    size: u64,
    fill: fn(&Path, &Path, &Files),
}

pub(crate) const MAKERS: &[Maker] = &[
    Maker { name: "ext4", file_system: FileSystem::Ext, size: 24 * MIB, fill: ext4 },
    Maker { name: "ext2", file_system: FileSystem::Ext, size: 24 * MIB, fill: ext2 },
    Maker { name: "fat16", file_system: FileSystem::Fat16, size: 40 * MIB, fill: fat16 },
    Maker {
        name: "fat16 without alignment",
        file_system: FileSystem::Fat16,
        size: 40 * MIB,
        fill: odd_fat16,
    },
    Maker {
        name: "fat32 without alignment",
        file_system: FileSystem::Fat32,
        size: 272 * MIB,
        fill: odd_fat32,
    },
    Maker {
        name: "fat12 without alignment",
        file_system: FileSystem::Fat12,
        size: 12 * MIB,
        fill: odd_fat12,
    },
    Maker { name: "ntfs", file_system: FileSystem::Ntfs, size: 24 * MIB, fill: ntfs },
    Maker { name: "xfs", file_system: FileSystem::Xfs, size: 304 * MIB, fill: xfs },
];

/// Position of a file system on a disk: input for `sfdisk`, and the resulting sector.
pub(crate) struct Place {
    pub(crate) name: &'static str,
    pub(crate) kind: RegionKind,
    pub(crate) start: u64,
    table: Option<&'static str>,
}

pub(crate) const PLACES: &[Place] = &[
    Place { name: "a whole disk", kind: RegionKind::Whole, start: 0, table: None },
    Place {
        name: "MBR, sector 63",
        kind: RegionKind::Primary,
        start: 63,
        table: Some("label: dos\nstart=63,type=83\n"),
    },
    Place {
        name: "MBR, sector 2048",
        kind: RegionKind::Primary,
        start: 2048,
        table: Some("label: dos\nstart=2048,type=83\n"),
    },
    Place {
        name: "MBR, second logical",
        kind: RegionKind::Logical,
        start: 9003,
        table: Some(
            "label: dos\nstart=63,size=1985,type=82\nstart=4001,type=5\nstart=4064,size=4000,type=83\nstart=9003,type=83\n",
        ),
    },
    Place {
        name: "GPT, sector 34",
        kind: RegionKind::Gpt,
        start: 34,
        table: Some("label: gpt\nfirst-lba: 34\nstart=34,type=L\n"),
    },
];

impl Maker {
    /// Image of this file system with `files` in it; their folder is `dir/files`.
    pub(crate) fn make(&self, dir: &Path, files: &Files) -> PathBuf {
        let image = dir.join(self.name);
        File::create(&image).unwrap().set_len(self.size).unwrap();
        (self.fill)(&image, &dir.join("files"), files);
        image
    }
}

impl Place {
    /// Disk with space for any file system here, and a partition table that lists it.
    pub(crate) fn make(&self, dir: &Path) -> PathBuf {
        let disk = dir.join(format!("disk-{}", self.start));
        File::create(&disk).unwrap().set_len(DISK).unwrap();
        if let Some(table) = self.table {
            // The sector numbers are the point, so no tool may round them.
            run(Command::new("sfdisk").args(["-q", "--no-reread", "--force"]).arg(&disk), table);
        }
        disk
    }

    /// Writes `image` to its position on `disk`. Later content of the disk is lost, including a backup of the
    /// table.
    pub(crate) fn put(&self, disk: &Path, image: &Path) {
        let mut from = File::open(image).unwrap();
        let to = File::options().write(true).open(disk).unwrap();
        let (mut at, mut buffer) = (self.start * 512, vec![0; MIB as usize]);
        to.set_len(at).unwrap();
        loop {
            let len = from.read(&mut buffer).unwrap();
            if len == 0 {
                break to.set_len(DISK).unwrap();
            }
            if !is_zero(&buffer[..len]) {
                to.write_all_at(&buffer[..len], at).unwrap();
            }
            at += len as u64;
        }
    }
}

/// Random files of odd sizes, also in `dir/files`: one large, one middling, and a score of small ones.
pub(crate) fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let sizes = [3_000_001, 300_007].into_iter().chain((0..20).map(|n| 5_000 + n * 1_777));
    let mut state = 0x005e_edf1_1e5f_u64;
    let mut random = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb)
    };
    let folder = dir.join("files");
    fs::create_dir(&folder).unwrap();
    let make = |(number, size): (usize, usize)| {
        let name = format!("FILE{number}.BIN");
        let content: Vec<u8> =
            (0..size.div_ceil(8)).flat_map(|_| random().to_le_bytes()).take(size).collect();
        fs::write(folder.join(&name), &content).unwrap();
        (name, content)
    };
    sizes.enumerate().map(make).collect()
}

/// Runs `command` with `input`; shows its output if it fails.
fn run(command: &mut Command, input: &str) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child =
        command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/bootstrap installs it"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn mke2fs(image: &Path, folder: &Path, kind: &str) {
    run(Command::new("mke2fs").args(["-q", "-F", "-t", kind, "-b", "4096", "-d"]).arg(folder).arg(image), "");
}

fn ext4(image: &Path, folder: &Path, _: &Files) {
    mke2fs(image, folder, "ext4");
}

fn ext2(image: &Path, folder: &Path, _: &Files) {
    mke2fs(image, folder, "ext2");
}

fn fat(image: &Path, folder: &Path, files: &Files, options: &[&str]) {
    run(Command::new("mkfs.vfat").args(["-s", "8"]).args(options).arg(image), "");
    let paths = files.iter().map(|(name, _)| folder.join(name));
    run(Command::new("mcopy").arg("-i").arg(image).args(paths).arg("::"), "");
}

fn fat16(image: &Path, folder: &Path, files: &Files) {
    fat(image, folder, files, &["-F", "16"]);
}

fn odd_fat16(image: &Path, folder: &Path, files: &Files) {
    fat(image, folder, files, &["-F", "16", "-a", "-R", "1"]);
}

fn odd_fat32(image: &Path, folder: &Path, files: &Files) {
    fat(image, folder, files, &["-F", "32", "-a", "-R", "33"]);
}

fn odd_fat12(image: &Path, folder: &Path, files: &Files) {
    fat(image, folder, files, &["-F", "12", "-a", "-R", "1"]);
}

fn ntfs(image: &Path, folder: &Path, files: &Files) {
    let geometry = ["-F", "-q", "-Q", "-c", "4096", "-s", "512", "-p", "63", "-H", "255", "-S", "63"];
    run(Command::new("mkfs.ntfs").args(geometry).arg(image), "");
    for (name, _) in files {
        run(Command::new("ntfscp").args(["-q", "-f"]).arg(image).arg(folder.join(name)).arg(name), "");
    }
}

fn xfs(image: &Path, folder: &Path, files: &Files) {
    let lines = files.iter().map(|(name, _)| format!("{name} ---644 0 0 {}\n", folder.join(name).display()));
    let proto = image.with_file_name("proto");
    fs::write(&proto, format!("/\n0 0\nd--755 0 0\n{}$\n", lines.collect::<String>())).unwrap();
    run(Command::new("mkfs.xfs").args(["-q", "-f", "-b", "size=4096", "-p"]).arg(&proto).arg(image), "");
}
