//! Publisher of images: a file for each, and the lists that name them.
//!
//! A file is exported by the daemon under another name and gets its own when its digest is known, and lists
//! are replaced as wholes: a client never sees a half of anything. The digest is kept beside the file, so
//! that a publisher that starts again reads nothing anew. Files of images that are gone are removed; no other
//! file of the folder is touched.

use super::lists::{DISKS, PublishedImage, disk_path, lists};
use crate::{context::Context, error::CliError, operation};
use aws_lc_rs::digest::{Context as Digester, SHA256};
use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    io::{self, Read},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
};
use whimbrel_api::{CapsuleInfo, CapsuleRef, ExportFormat, ExportRequest, ImageName, PROGRAM_LABEL};
use whimbrel_core::{ByteSize, CapsuleId};
use whimbrel_wire::atomic_file;

/// Bytes of a file that are read at once.
const PART: usize = 1 << 20;
/// Ending of a file that is not complete.
const PARTIAL: &str = "part";
/// Ending of a file with the digest of another one, in the form of sha256sum(1).
const DIGEST: &str = "sha256";
/// Mode of what is published.
const MODE: u32 = 0o644;
const FOLDER_MODE: u32 = 0o755;

pub(super) struct Publisher<'a> {
    context: &'a Context,
    folder: &'a Path,
    /// Images to publish; all if there is none.
    wanted: Vec<ImageName>,
    key: Option<String>,
    /// Whether lists that are there may be signed by another key, or by none.
    is_first: bool,
}

impl<'a> Publisher<'a> {
    /// Makes the folders.
    pub(super) fn new(
        context: &'a Context,
        folder: &'a Path,
        wanted: Vec<ImageName>,
        key: Option<String>,
    ) -> Result<Self, CliError> {
        for made in [folder, &folder.join(DISKS), &folder.join("streams/v1")] {
            fs::create_dir_all(made).map_err(CliError::io("create the folder"))?;
        }
        // A web server may run as another user.
        for made in [DISKS, "streams", "streams/v1"] {
            let mode = Permissions::from_mode(FOLDER_MODE);
            fs::set_permissions(folder.join(made), mode)
                .map_err(CliError::io("open the folder to others"))?;
        }
        Ok(Self { context, folder, wanted, key, is_first: true })
    }

    /// Brings the folder up to date. The images that it has then, by name.
    pub(super) async fn publish(&mut self) -> Result<Vec<PublishedImage>, CliError> {
        let capsules = self.context.client.capsules().await?;
        let mut found: Vec<_> = capsules.iter().flat_map(|capsule| self.images_of(capsule)).collect();
        found.sort_by(|(a, _), (b, _)| a.as_str().cmp(b.as_str()));
        if let Some(missing) =
            self.wanted.iter().find(|wanted| !found.iter().any(|(name, _)| is_same(name, wanted)))
        {
            return Err(CliError::Usage {
                problem: format!("this host has no complete image {missing}"),
                hint: "`whimbrel image ls` lists them".to_owned(),
            });
        }
        let mut images = Vec::new();
        for (name, capsule) in found {
            let (bytes, sha256) = self.file_of(&capsule.id).await?;
            images.push(PublishedImage {
                name,
                capsule: capsule.id,
                time_ms: capsule.time_ms,
                bytes,
                sha256,
            });
        }
        self.write_lists(&images)?;
        self.is_first = false;
        self.remove_others(&images)?;
        Ok(images)
    }

    fn images_of<'c>(&self, capsule: &'c CapsuleInfo) -> Vec<(ImageName, &'c CapsuleInfo)> {
        // The disk of a container image does not boot by itself.
        let boots = !capsule.labels.contains_key(PROGRAM_LABEL);
        let has_disk = boots && capsule.images.iter().any(|image| image.name != "memory");
        let names = capsule.names.iter().filter_map(|tag| ImageName::of(tag, &capsule.labels));
        let is_wanted =
            |name: &ImageName| self.wanted.is_empty() || self.wanted.iter().any(|one| is_same(one, name));
        let names = names.filter(|name| has_disk && capsule.whole && is_wanted(name));
        names.map(|name| (name, capsule)).collect()
    }

    /// Length and digest of the file of a capsule, which is made if it is not there.
    async fn file_of(&self, capsule: &CapsuleId) -> Result<(ByteSize, String), CliError> {
        let path = self.folder.join(disk_path(capsule));
        let digest_path = path.with_extension(DIGEST);
        let length = fs::metadata(&path).map(|found| ByteSize(found.len()));
        if let (Ok(length), Some(digest)) = (length, read_digest(&digest_path)) {
            return Ok((length, digest));
        }
        let partial = path.with_extension(PARTIAL);
        remove(&partial)?;
        let request = ExportRequest {
            capsule: CapsuleRef::Id(*capsule),
            path: partial.clone(),
            format: ExportFormat::Qcow2,
            image: None,
            key: None,
        };
        operation::complete(self.context, self.context.client.export(&request)).await?;
        let read = partial.clone();
        let digested = tokio::task::spawn_blocking(move || digest(&read)).await;
        let digested = digested.unwrap_or_else(|error| Err(io::Error::other(error)));
        let (length, digest) = digested.map_err(|source| CliError::File { path: partial.clone(), source })?;
        let name = path.file_name().unwrap_or_default().display();
        write_whole(&digest_path, format!("{digest}  {name}\n").as_bytes())?;
        publish_file(&partial, &path)?;
        Ok((length, digest))
    }

    /// Replaces the lists, each with its signature if there is a key.
    fn write_lists(&self, images: &[PublishedImage]) -> Result<(), CliError> {
        for (path, list) in lists(images) {
            let (path, list) = (self.folder.join(path), list.to_string());
            let is_same_list = fs::read(&path).is_ok_and(|before| before == list.as_bytes());
            let signed = path.with_extension("sjson");
            if is_same_list && !self.is_first {
                continue;
            }
            match &self.key {
                // A signature of another list would be refused, and nobody would know why.
                None => remove(&signed)?,
                Some(key) => sign(key, &list, &signed)?,
            }
            write_whole(&path, list.as_bytes())?;
        }
        Ok(())
    }

    /// Removes the files that were made for images that are gone.
    fn remove_others(&self, images: &[PublishedImage]) -> Result<(), CliError> {
        let kept: BTreeSet<_> = images.iter().map(|image| image.capsule.to_string()).collect();
        let entries = fs::read_dir(self.folder.join(DISKS)).map_err(CliError::io("read the folder"))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            let is_made_here =
                stem.parse::<CapsuleId>().is_ok() && ["qcow2", DIGEST, PARTIAL].contains(&ending);
            if is_made_here && !kept.contains(stem) {
                remove(&path)?;
            }
        }
        Ok(())
    }
}

/// Whether two names are of one image: `debian/12` and `debian.12` are.
fn is_same(one: &ImageName, other: &ImageName) -> bool {
    one.tag() == other.tag()
}

fn read_digest(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let digits = text.split(' ').next().unwrap_or_default();
    (digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| digits.to_owned())
}

/// Length and SHA-256 of a file.
fn digest(path: &Path) -> io::Result<(ByteSize, String)> {
    let (mut file, mut digester) = (File::open(path)?, Digester::new(&SHA256));
    let (mut part, mut length) = (vec![0; PART], 0);
    loop {
        let count = file.read(&mut part)?;
        if count == 0 {
            break;
        }
        digester.update(&part[..count]);
        length += count as u64;
    }
    let digits = digester.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((ByteSize(length), digits))
}

/// Signs a list: the text, and around it the signature (gpg(1), `--clearsign`).
fn sign(key: &str, list: &str, signed: &Path) -> Result<(), CliError> {
    let failed = |said: String| CliError::Step { step: "sign the lists of images".to_owned(), said };
    let (text, partial) = (signed.with_extension("unsigned"), signed.with_extension(PARTIAL));
    write_whole(&text, list.as_bytes())?;
    remove(&partial)?;
    let mut gpg = Command::new("gpg");
    gpg.args(["--batch", "--quiet", "--local-user", key, "--clearsign", "--output"]).args([&partial, &text]);
    let ended = gpg.output().map_err(|error| failed(format!("gpg(1) cannot be started: {error}")));
    remove(&text)?;
    let ended = ended?;
    if !ended.status.success() {
        return Err(failed(String::from_utf8_lossy(&ended.stderr).trim().to_owned()));
    }
    publish_file(&partial, signed)
}

/// Replaces a file as a whole, for everybody to read.
fn write_whole(path: &Path, content: &[u8]) -> Result<(), CliError> {
    let written = atomic_file::replace(path, content);
    let opened = written.and_then(|()| fs::set_permissions(path, Permissions::from_mode(MODE)));
    opened.map_err(CliError::io("write what is published"))
}

/// Gives a complete file its name, for everybody to read.
fn publish_file(partial: &Path, path: &Path) -> Result<(), CliError> {
    let opened = fs::set_permissions(partial, Permissions::from_mode(MODE));
    let published = opened.and_then(|()| fs::rename(partial, path));
    published.map_err(CliError::io("publish a file"))
}

fn remove(path: &Path) -> Result<(), CliError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(CliError::io("remove an old file")(error))
        }
        _ => Ok(()),
    }
}
