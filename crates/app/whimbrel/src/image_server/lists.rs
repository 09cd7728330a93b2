//! Lists of a server of simplestreams: an index that names one list, and the list of the images
//! (<https://canonical-simplestreams.readthedocs-hosted.com>).

use serde::Serialize;
use serde_json::{Value, json};
use whimbrel_api::ImageName;
use whimbrel_core::{ByteSize, CapsuleId};

/// Path of the index.
pub(super) const INDEX: &str = "streams/v1/index.json";
/// Path of the list of images.
pub(super) const PRODUCTS: &str = "streams/v1/images.json";
/// Folder of the disks.
pub(super) const DISKS: &str = "disks";
const CONTENT: &str = "images";
/// Processor of all images, as products name it.
const ARCH: &str = "amd64";

/// Image with its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct PublishedImage {
    pub(super) name: ImageName,
    pub(super) capsule: CapsuleId,
    /// Time at which the capsule was taken.
    pub(super) time_ms: u64,
    /// Length of the file.
    pub(super) bytes: ByteSize,
    /// SHA-256 of the file, in hexadecimal digits.
    pub(super) sha256: String,
}

impl PublishedImage {
    fn product(&self) -> String {
        format!("{}:{ARCH}", self.name)
    }

    /// One version: an image has one disk at a time. Versions are compared as texts, so all have 13 digits.
    fn details(&self) -> Value {
        let name = self.name.as_str();
        let (os, release) = name.split_once('/').unwrap_or((name, "current"));
        let disk = json!({
            "ftype": "disk-kvm.img",
            "path": disk_path(&self.capsule),
            "sha256": self.sha256,
            "size": self.bytes.0,
        });
        json!({
            "aliases": name,
            "arch": ARCH,
            "os": os,
            "release": release,
            "release_title": release,
            "variant": "default",
            "versions": {format!("{:013}", self.time_ms): {"items": {"disk.qcow2": disk}}},
        })
    }
}

/// Path of the disk of a capsule.
pub(super) fn disk_path(capsule: &CapsuleId) -> String {
    format!("{DISKS}/{capsule}.qcow2")
}

/// The lists with their paths. The index comes last: it names what is there by then.
pub(super) fn lists(images: &[PublishedImage]) -> [(&'static str, Value); 2] {
    let products = images.iter().map(|image| (image.product(), image.details()));
    let products = json!({
        "content_id": CONTENT,
        "datatype": "image-downloads",
        "format": "products:1.0",
        "products": products.collect::<serde_json::Map<_, _>>(),
    });
    let names: Vec<_> = images.iter().map(PublishedImage::product).collect();
    let entry = json!({
        "datatype": "image-downloads",
        "format": "products:1.0",
        "path": PRODUCTS,
        "products": names,
    });
    let index = json!({"format": "index:1.0", "index": {CONTENT: entry}});
    [(PRODUCTS, products), (INDEX, index)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::Digest;

    #[test]
    fn later_versions_are_greater_as_texts_and_images_of_one_capsule_share_a_file() {
        let capsule = CapsuleId(Digest::of(b"disk"));
        let image = |name: &str, time_ms| PublishedImage {
            name: name.parse().expect("a name"),
            capsule,
            time_ms,
            bytes: ByteSize(7),
            sha256: "ab".repeat(32),
        };
        let [(_, products), (_, index)] =
            lists(&[image("debian/12", 999_999_999_999), image("mine", 1_764_448_440_123)]);
        let version = |product: &str| {
            let versions = products["products"][product]["versions"].as_object().expect("versions");
            versions.iter().next().map(|(name, version)| (name.clone(), version.clone())).expect("a version")
        };
        let (old, new) = (version("debian/12:amd64"), version("mine:amd64"));
        assert!(old.0 < new.0, "{} {}", old.0, new.0);
        assert_eq!(old.1, new.1);
        assert_eq!(products["products"]["debian/12:amd64"]["os"], "debian");
        assert_eq!(index["index"]["images"]["products"], json!(["debian/12:amd64", "mine:amd64"]));
    }
}
