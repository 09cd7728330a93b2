//! Servers of simplestreams, as Incus, LXD and Ubuntu have them: an index names lists of products, a product
//! has versions, and a version has files with their SHA-256.
//!
//! Read here: products for this processor that have a disk image, by their aliases; of their versions the
//! newest. With a keyring the signed forms of index and lists are read (`.sjson`).

use super::{
    Offer,
    checksum::Checksum,
    download::{self, FetchError},
    location::Location,
    signature,
    sources::ImageSource,
};
use crate::core::directories::Directories;
use serde::Deserialize;
use std::{collections::BTreeMap, path::Path};

const INDEX: &str = "streams/v1/index.json";
/// Longest index or list of products; those of public servers have 1 to 5 MiB.
const LIST_MAX: usize = 32 << 20;
/// Most lists that are read of an index.
const LISTS_MAX: usize = 32;
/// Processor, as products name it.
const ARCH: &str = "amd64";
/// Types of files that are disks, in the order of preference.
const DISKS: [&str; 2] = ["disk-kvm.img", "disk1.img"];

#[derive(Deserialize)]
struct Index {
    index: BTreeMap<String, IndexEntry>,
}

#[derive(Deserialize)]
struct IndexEntry {
    path: String,
    #[serde(default)]
    datatype: String,
}

#[derive(Deserialize)]
struct Products {
    products: BTreeMap<String, Product>,
}

#[derive(Deserialize)]
struct Product {
    #[serde(default)]
    aliases: String,
    #[serde(default)]
    arch: String,
    #[serde(default)]
    versions: BTreeMap<String, Version>,
}

#[derive(Deserialize)]
struct Version {
    #[serde(default)]
    items: BTreeMap<String, Item>,
}

#[derive(Deserialize)]
struct Item {
    #[serde(default)]
    ftype: String,
    #[serde(default)]
    path: String,
    sha256: Option<String>,
    size: Option<u64>,
}

/// All disk images of a server.
pub(super) async fn offers(
    source: &ImageSource,
    root: &Location,
    layout: &Directories,
) -> Result<Vec<Offer>, FetchError> {
    let keyring = source.keyring.as_deref();
    let index: Index = parse(&read(root, INDEX, keyring, layout).await?)?;
    let lists = index.index.into_values().filter(|entry| entry.datatype == "image-downloads");
    let mut offers = Vec::new();
    for entry in lists.take(LISTS_MAX) {
        let products: Products = parse(&read(root, &entry.path, keyring, layout).await?)?;
        offers.extend(products.products.values().filter_map(|product| offer(source, root, product)));
    }
    Ok(offers)
}

async fn read(
    root: &Location,
    path: &str,
    keyring: Option<&Path>,
    layout: &Directories,
) -> Result<Vec<u8>, FetchError> {
    let Some(keyring) = keyring else { return download::read(&root.join(path)?, LIST_MAX).await };
    let signed = path.strip_suffix(".json").map(|stem| format!("{stem}.sjson"));
    let message = download::read(&root.join(signed.as_deref().unwrap_or(path))?, LIST_MAX).await?;
    signature::open(layout, keyring, &message)
}

fn parse<T: for<'a> Deserialize<'a>>(text: &[u8]) -> Result<T, FetchError> {
    serde_json::from_slice(text).map_err(|error| FetchError::List { reason: error.to_string() })
}

/// The newest disk of a product; none if it has none for this processor, or no name that can be used.
fn offer(source: &ImageSource, root: &Location, product: &Product) -> Option<Offer> {
    if product.arch != ARCH {
        return None;
    }
    let names: Vec<_> =
        product.aliases.split(',').filter_map(|alias| source.full_name(alias.trim())).collect();
    let newest_first = product.versions.values().rev();
    let item = newest_first.filter_map(|version| disk(version)).next().filter(|_| !names.is_empty())?;
    Some(Offer {
        names,
        location: root.join(&item.path).ok()?,
        checksum: Checksum::parse(item.sha256.as_deref()?)?,
        size: item.size,
        user: source.user.clone(),
        container: None,
    })
}

fn disk(version: &Version) -> Option<&Item> {
    let of = |kind: &&str| version.items.values().find(|item| item.ftype == *kind && item.sha256.is_some());
    DISKS.iter().find_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn source() -> ImageSource {
        serde_json::from_value(
            json!({"name": "ubuntu", "kind": "simplestreams", "url": "https://images.test/"}),
        )
        .unwrap()
    }

    fn found(text: &[u8]) -> Vec<Offer> {
        let Ok(products) = parse::<Products>(text) else { return Vec::new() };
        let root = "https://images.test/".parse().unwrap();
        products.products.values().filter_map(|product| offer(&source(), &root, product)).collect()
    }

    /// The form of Ubuntu's and of Incus's lists, with what is not read here.
    fn products() -> Vec<u8> {
        let item = |kind: &str, path: &str, digit: &str| json!({"ftype": kind, "path": path, "sha256": digit.repeat(64), "size": 10, "md5": "x"});
        let versions = json!({
            "20250101": {"items": {"disk1.img": item("disk1.img", "server/old.img", "0")}},
            "20250301": {"items": {"disk1.img": item("disk1.img", "server/new.img", "a"),
                                   "lxd.tar.xz": item("lxd.tar.xz", "server/lxd.tar.xz", "b")}},
            "20250401": {"items": {"lxd.tar.xz": item("lxd.tar.xz", "server/lxd.tar.xz", "b")}},
        });
        let product = |arch: &str, aliases: &str| json!({"arch": arch, "aliases": aliases, "os": "ubuntu", "versions": versions});
        let list = json!({"format": "products:1.0", "products": {
            "com.ubuntu.cloud:server:24.04:amd64": product("amd64", "24.04,n,noble"),
            "com.ubuntu.cloud:server:24.04:arm64": product("arm64", "24.04"),
            "nameless": product("amd64", "../x"),
        }});
        serde_json::to_vec(&list).unwrap()
    }

    #[test]
    fn the_newest_version_with_a_disk_for_this_processor_is_offered_by_all_its_aliases() {
        let offers = found(&products());
        assert_eq!(offers.len(), 1, "{offers:?}");
        let names: Vec<_> = offers[0].names.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["ubuntu/24.04", "ubuntu/n", "ubuntu/noble"]);
        assert_eq!(offers[0].location.to_string(), "https://images.test/server/new.img");
        assert_eq!(offers[0].checksum.to_string(), format!("sha256:{}", "a".repeat(64)));
    }

    proptest! {
        #[test]
        fn a_forged_list_never_names_what_is_elsewhere(at in 0..2000_usize, byte in any::<u8>(), cut in 0..2000_usize) {
            let mut text = products();
            let (at, cut) = (at % text.len(), text.len() - cut % 40);
            text[at] = byte;
            text.truncate(cut);
            for offer in found(&text) {
                prop_assert!(offer.location.to_string().starts_with("https://images.test/"));
            }
        }
    }
}
