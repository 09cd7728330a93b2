//! Appliances (OVA): a tar archive with the description of a machine and its disks. DMTF DSP0243, section 5:
//! the description comes first, then perhaps a manifest with checksums, then files in the order of the
//! description.
//!
//! Nothing is taken of the description but that it is there: the disks become those of a capsule, in their
//! order. Each is copied out, checked against the manifest if there is one, and then read as any other image.

use super::disk_image::unnamed_file;
use crate::{
    core::{directories::Directories, error::DaemonError},
    machine::new_disks::check_count,
};
use aws_lc_rs::digest::{Algorithm, Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA512};
use std::{collections::BTreeMap, fs::File, io, os::unix::fs::FileExt, path::Path};
use whimbrel_core::is_zero;
use whimbrel_qemu::{ImageError, MAX_DISKS};

/// Most files that an appliance may have.
const MEMBERS_MAX: usize = 1000;
/// Longest manifest that is read.
const MANIFEST_MAX: u64 = 1 << 20;
/// Bytes that are copied at once.
const PIECE: usize = 1 << 20;
/// Ends of names of files that are no disks.
const OTHERS: [&str; 7] = ["ovf", "mf", "cert", "iso", "nvram", "txt", "xml"];

/// A file in an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ApplianceFile {
    name: String,
    offset: u64,
    length: u64,
}

/// Checksum of a file, as a manifest has it.
type FileChecksum = (&'static Algorithm, String);

/// Copies of the disks in an archive, each in a file without a name; none if it is no appliance.
pub(super) fn disks_in(
    layout: &Directories,
    (archive, path): (&File, &Path),
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<Vec<File>>, DaemonError> {
    let failed = |source| DaemonError::Image { path: path.to_owned(), source };
    let read = |source| failed(ImageError::Read(source));
    let members = archive.try_clone().and_then(members).map_err(read)?;
    if !members.first().is_some_and(|first| has_end(first, "ovf")) {
        return Ok(None);
    }
    let is_disk = |member: &&ApplianceFile| !OTHERS.iter().any(|end| has_end(member, end));
    let disks: Vec<_> = members.iter().filter(is_disk).collect();
    if disks.is_empty() {
        return Err(failed(ImageError::Header { what: "the appliance has no disk" }));
    }
    check_count("disks", disks.len(), MAX_DISKS)?;
    let manifest = members.iter().find(|member| has_end(member, "mf"));
    let checksums = manifest.map(|manifest| read_manifest(archive, manifest)).transpose().map_err(failed)?;
    let copy = |member: &ApplianceFile| {
        let checksum = checksums.as_ref().map(|checksums| {
            let unlisted =
                ImageError::Header { what: "the manifest has no checksum of a disk that is known" };
            checksums.get(&member.name).ok_or(unlisted)
        });
        let copy = unnamed_file(layout, 0)?;
        let checksum = checksum.transpose().map_err(failed)?;
        copied((archive, member), &copy, checksum, cancelled).map_err(failed)?;
        Ok(copy)
    };
    disks.into_iter().map(copy).collect::<Result<_, DaemonError>>().map(Some)
}

fn read_manifest(
    archive: &File,
    manifest: &ApplianceFile,
) -> Result<BTreeMap<String, FileChecksum>, ImageError> {
    if manifest.length > MANIFEST_MAX {
        return Err(ImageError::Header { what: "the manifest of the appliance is too long" });
    }
    let mut text = vec![0; manifest.length as usize];
    archive.read_exact_at(&mut text, manifest.offset).map_err(ImageError::Read)?;
    Ok(checksums(&String::from_utf8_lossy(&text)))
}

fn has_end(member: &ApplianceFile, end: &str) -> bool {
    Path::new(&member.name).extension().is_some_and(|extension| extension.eq_ignore_ascii_case(end))
}

/// The files of an archive, in their order. Names are those of its headers alone: names of any length, which
/// the archive's reader would hold in memory, are none that an appliance has.
fn members(archive: File) -> io::Result<Vec<ApplianceFile>> {
    let mut archive = tar::Archive::new(archive);
    let mut members = Vec::new();
    for entry in archive.entries_with_seek()?.raw(true) {
        let entry = entry?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let name = String::from_utf8_lossy(&entry.path_bytes()).trim_start_matches("./").to_owned();
        members.push(ApplianceFile { name, offset: entry.raw_file_position(), length: entry.size() });
        if members.len() > MEMBERS_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it has too many files"));
        }
    }
    Ok(members)
}

/// Checksums by file: lines like `SHA256(disk.vmdk)= 5f…`. Lines of other kinds are left out.
fn checksums(manifest: &str) -> BTreeMap<String, FileChecksum> {
    let line = |line: &str| {
        let (kind, rest) = line.split_once('(')?;
        let (name, digits) = rest.rsplit_once(')')?;
        let algorithm: &'static Algorithm = match kind.trim() {
            "SHA1" => &SHA1_FOR_LEGACY_USE_ONLY,
            "SHA256" => &SHA256,
            "SHA512" => &SHA512,
            _ => return None,
        };
        let digits = digits.trim_start().strip_prefix('=')?.trim().to_ascii_lowercase();
        Some((name.to_owned(), (algorithm, digits)))
    };
    manifest.lines().filter_map(line).collect()
}

/// Copies a file of the archive without its zeros, and compares it with its checksum if it has one.
fn copied(
    (archive, member): (&File, &ApplianceFile),
    copy: &File,
    checksum: Option<&FileChecksum>,
    cancelled: &dyn Fn() -> bool,
) -> Result<(), ImageError> {
    let mut context = checksum.map(|(algorithm, _)| Context::new(algorithm));
    let mut buffer = vec![0; PIECE];
    let mut done = 0;
    while done < member.length {
        if cancelled() {
            return Err(ImageError::Cancelled);
        }
        let piece = &mut buffer[..PIECE.min((member.length - done) as usize)];
        archive.read_exact_at(piece, member.offset + done).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => ImageError::Header { what: "the archive is cut off" },
            _ => ImageError::Read(source),
        })?;
        context.iter_mut().for_each(|context| context.update(piece));
        if !is_zero(piece) {
            copy.write_all_at(piece, done).map_err(ImageError::Read)?;
        }
        done += piece.len() as u64;
    }
    copy.set_len(done).map_err(ImageError::Read)?;
    let digest = context.map(|context| context.finish());
    let digits =
        digest.map(|digest| digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    match checksum.zip(digits).is_none_or(|((_, expected), found)| *expected == found) {
        true => Ok(()),
        false => Err(ImageError::Header { what: "a disk is not the one of the appliance's manifest" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::PathBuf};

    /// An archive of these files.
    fn archive(dir: &Path, files: &[(&str, &[u8])]) -> PathBuf {
        let path = dir.join("app.ova");
        let mut builder = tar::Builder::new(File::create(&path).unwrap());
        for (name, content) in files {
            let mut header = tar::Header::new_ustar();
            header.set_size(content.len() as u64);
            header.set_mode(0o600);
            builder.append_data(&mut header, name, *content).unwrap();
        }
        builder.into_inner().unwrap();
        path
    }

    fn disks(dir: &Path, path: &Path) -> Result<Option<Vec<Vec<u8>>>, String> {
        let layout = Directories::create(&dir.join("data"), &dir.join("run")).unwrap();
        let found = disks_in(&layout, (&File::open(path).unwrap(), path), &|| false);
        let content = |disk: File| {
            let mut content = vec![0; disk.metadata().unwrap().len() as usize];
            disk.read_exact_at(&mut content, 0).unwrap();
            content
        };
        let found = found.map_err(|error| whimbrel_core::error_chain(&error).to_string())?;
        Ok(found.map(|disks| disks.into_iter().map(content).collect()))
    }

    #[test]
    fn the_disks_of_an_appliance_come_in_their_order_and_as_its_manifest_says() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (mut one, other) = (vec![1; 3 << 20], vec![2; 5000]);
        one[1 << 20..].fill(0);
        let line = |kind: &str, algorithm, name: &str, content: &[u8]| {
            let digest = aws_lc_rs::digest::digest(algorithm, content);
            let digits: String = digest.as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
            format!("{kind}({name})= {digits}\n")
        };
        let [first, second] = [
            line("SHA256", &SHA256, "z.vmdk", &other),
            line("SHA1", &SHA1_FOR_LEGACY_USE_ONLY, "a.vmdk", &one),
        ];
        let manifest = format!("{first}nothing\n{second}");
        let parts = |manifest: &str| {
            let files: [(&str, &[u8]); 5] = [
                ("app.ovf", b"<Envelope/>"),
                ("app.mf", manifest.as_bytes()),
                ("z.vmdk", &other),
                ("./a.vmdk", &one),
                ("drivers.ISO", b"no disk"),
            ];
            archive(dir.path(), &files)
        };
        assert_eq!(disks(dir.path(), &parts(&manifest)).unwrap(), Some(vec![other.clone(), one.clone()]));
        for (wrong, why) in [
            (manifest.replace("z.vmdk", "b.vmdk"), "no checksum"),
            (format!("{first}{}", second.replace("SHA1", "SHA3")), "no checksum"),
            (format!("{}{second}", line("SHA256", &SHA256, "z.vmdk", &one)), "not the one"),
            (" ".repeat(2 << 20), "too long"),
        ] {
            let refused = disks(dir.path(), &parts(&wrong)).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }

        let path = parts(&manifest);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..1 << 20]).unwrap();
        assert!(disks(dir.path(), &path).is_err(), "it is cut off");
        let without = archive(dir.path(), &[("app.ovf", b"<Envelope/>"), ("app.mf", b"")]);
        assert!(disks(dir.path(), &without).unwrap_err().contains("no disk"));
        let many: Vec<_> = (0..=MAX_DISKS).map(|number| format!("{number}.vmdk")).collect();
        let files: Vec<(&str, &[u8])> = many.iter().map(|name| (&**name, &b"a disk"[..])).collect();
        let many = archive(dir.path(), &[&[("app.ovf", &b""[..])][..], &files].concat());
        assert!(disks(dir.path(), &many).unwrap_err().contains("up to"));
        let other = archive(dir.path(), &[("a.vmdk", b"a disk"), ("app.ovf", b"")]);
        assert_eq!(disks(dir.path(), &other).unwrap(), None, "a description comes first");
    }

    proptest::proptest! {
        #[test]
        fn no_manifest_and_no_archive_is_a_panic(text in "\\PC{0,200}", bytes in proptest::collection::vec(0..=255_u8, 0..2000)) {
            let _ = checksums(&text);
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("archive");
            fs::write(&path, bytes).unwrap();
            let _ = members(File::open(path).unwrap());
        }
    }
}
