//! Folders of images: files beside a list of their checksums, `SHA512SUMS` or `SHA256SUMS`, which may be
//! signed. Debian, Ubuntu and many others publish their cloud images so.

use super::{
    Offer,
    checksum::{self, Checksum},
    download::{self, FetchError},
    location::Location,
    signature,
    sources::ImageSource,
};
use crate::core::directories::Directories;
use std::{collections::BTreeMap, path::Path};

/// Lists in the order of preference, each with the endings of its signatures.
const LISTS: [&str; 2] = ["SHA512SUMS", "SHA256SUMS"];
const SIGNATURES: [&str; 3] = ["sign", "gpg", "asc"];
/// Longest list or signature.
const LIST_MAX: usize = 1 << 20;
/// Endings of files that are images, where the source does not name any.
const ENDINGS: [&str; 6] = ["qcow2", "img", "raw", "vmdk", "vhdx", "vhd"];
/// Endings after those, of images that are compressed as a whole.
const COMPRESSED: [&str; 3] = [".gz", ".xz", ".zst"];

/// All images of a folder: those that the source names, or else every file that ends like one.
pub(super) async fn offers(
    source: &ImageSource,
    root: &Location,
    layout: &Directories,
) -> Result<Vec<Offer>, FetchError> {
    let mut lists = BTreeMap::new();
    let mut offers = Vec::new();
    for (name, file) in &source.files {
        let (folder, file) = file.rsplit_once('/').unwrap_or(("", file));
        if !lists.contains_key(folder) {
            lists.insert(folder, list(&inside(root, folder)?, source.keyring.as_deref(), layout).await?);
        }
        if let Some(checksum) = lists[folder].get(file) {
            offers.extend(offer(source, name, &inside(root, folder)?.join(file)?, checksum));
        }
    }
    if source.files.is_empty() {
        for (file, checksum) in list(root, source.keyring.as_deref(), layout).await? {
            let plain = COMPRESSED.iter().find_map(|ending| file.strip_suffix(ending)).unwrap_or(&file);
            let stem = plain.rsplit_once('.').filter(|(_, ending)| ENDINGS.contains(ending));
            // A name that cannot be used is one that nobody can ask for.
            let Some((stem, location)) = stem.map(|(stem, _)| stem).zip(root.join(&file).ok()) else {
                continue;
            };
            offers.extend(offer(source, stem, &location, &checksum));
        }
    }
    Ok(offers)
}

fn inside(root: &Location, folder: &str) -> Result<Location, FetchError> {
    if folder.is_empty() { Ok(root.clone()) } else { root.join(folder) }
}

fn offer(source: &ImageSource, name: &str, location: &Location, checksum: &Checksum) -> Option<Offer> {
    Some(Offer {
        names: vec![source.full_name(name)?],
        location: location.clone(),
        checksum: checksum.clone(),
        size: None,
        user: source.user.clone(),
        container: None,
    })
}

/// The checksums of a folder, from the first list that it has.
async fn list(
    folder: &Location,
    keyring: Option<&Path>,
    layout: &Directories,
) -> Result<BTreeMap<String, Checksum>, FetchError> {
    for name in LISTS {
        match download::read(&folder.join(name)?, LIST_MAX).await {
            Ok(text) => {
                if let Some(keyring) = keyring {
                    signature::check(layout, keyring, &text, &signature_of(folder, name).await?)?;
                }
                return Ok(checksum::parse_list(&String::from_utf8_lossy(&text)));
            }
            Err(error) if error.is_absent() => {}
            Err(error) => return Err(error),
        }
    }
    Err(FetchError::List { reason: format!("there is no {} and no {} in {folder}", LISTS[0], LISTS[1]) })
}

async fn signature_of(folder: &Location, list: &str) -> Result<Vec<u8>, FetchError> {
    for ending in SIGNATURES {
        match download::read(&folder.join(&format!("{list}.{ending}"))?, LIST_MAX).await {
            Err(error) if error.is_absent() => {}
            found => return found,
        }
    }
    Err(FetchError::Signature { reason: format!("{list} of {folder} has none ({})", SIGNATURES.join(", ")) })
}
