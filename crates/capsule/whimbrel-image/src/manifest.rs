//! Manifest: the list of the parts of a capsule. Its digest is the capsule's id, so the encoding is
//! canonical.
//!
//! JSON without spaces, fields in the order of the types, maps ordered by key, absent options as `null` (an
//! absent alignment is left out). A manifest is accepted only if encoding it again gives the same bytes, so a
//! capsule cannot have two ids.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use whimbrel_alignment::PageAlignment;
use whimbrel_core::{CapsuleId, Digest, MachineConfig, PAGE_SIZE};

/// Format version that this program writes and reads.
pub const FORMAT: u32 = 1;
/// Size limit of an encoded manifest in bytes.
pub const MAX_MANIFEST: usize = 1 << 20;
/// Size limit of an image in pages: 16 TiB.
const MAX_PAGES: u64 = 1 << 32;

/// The complete state of a machine at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Format version, [`FORMAT`].
    pub format: u32,
    /// Configuration from which the machine is built again.
    pub machine: MachineConfig,
    /// Blobs whose concatenation is the device state; a disk-only capsule has none. There are several, so
    /// that a part that seldom changes is stored once.
    pub device: Vec<Digest>,
    /// Page arrays: `memory`, `disk0`, …
    pub images: Vec<ImageRef>,
    /// Capsules that it was made from; they may have been deleted.
    pub parents: Vec<CapsuleId>,
    /// Milliseconds since 1970, UTC.
    pub time: u64,
    /// Host that made the capsule.
    pub host: String,
    /// Labels that users gave.
    pub labels: BTreeMap<String, String>,
    /// Prefetch list: a blob with the pages that the machine touched first after its last resume.
    pub working_set: Option<Digest>,
}

/// One page array of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRef {
    /// Name, such as `memory` or `disk0`, unique in the capsule.
    pub name: String,
    /// Length in pages.
    pub pages: u64,
    /// Root digest of the tree; none if every page is zero.
    pub root: Option<Digest>,
    /// Alignment of the pages of a disk; none if pages begin at byte 0, as in manifests from before alignment
    /// existed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuts: Option<PageAlignment>,
}

impl ImageRef {
    /// Bytes of the array: of an aligned disk fewer than those of its pages.
    pub fn size(&self) -> u64 {
        self.cuts.as_ref().map_or_else(|| self.pages.saturating_mul(PAGE_SIZE as u64), PageAlignment::size)
    }
}

/// Errors of encoding and decoding a manifest.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The manifest exceeds the size limit.
    #[error("a manifest of {found} bytes, the limit is {MAX_MANIFEST}")]
    TooLong {
        /// Bytes of the manifest.
        found: usize,
    },
    /// Another version of the program wrote the manifest.
    #[error("capsule format {found} is unknown; this version reads format {FORMAT}")]
    Format {
        /// Format version found.
        found: u32,
    },
    /// The bytes are no JSON of the expected shape.
    #[error("not a capsule manifest")]
    Syntax {
        /// Cause, with line and column.
        source: serde_json::Error,
    },
    /// The bytes differ from the canonical encoding.
    #[error("the manifest is not in canonical form")]
    NotCanonical,
    /// Two images have one name, or a name has other characters than allowed.
    #[error("image name {name:?} is invalid or used twice")]
    ImageName {
        /// Name of the image.
        name: String,
    },
    /// An image exceeds the size limit.
    #[error("image {name:?} of {pages} pages is too large")]
    ImageSize {
        /// Name of the image.
        name: String,
        /// Length in pages.
        pages: u64,
    },
    /// The alignment gives another number of pages, or is the plain one, which is left out.
    #[error("the alignment of image {name:?} does not fit its {pages} pages")]
    ImageAlignment {
        /// Name of the image.
        name: String,
        /// Length in pages.
        pages: u64,
    },
}

#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

impl Manifest {
    /// Image with this name.
    pub fn image(&self, name: &str) -> Option<&ImageRef> {
        self.images.iter().find(|image| image.name == name)
    }

    /// Blobs that the manifest names: device state, prefetch list, boot files.
    pub fn blobs(&self) -> impl Iterator<Item = Digest> {
        self.device.iter().copied().chain(self.working_set).chain(self.machine.boot_files())
    }

    /// Canonical encoding; fails if it could not be decoded.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        self.check()?;
        let bytes = serde_json::to_vec(self).map_err(|source| ManifestError::Syntax { source })?;
        match bytes.len() <= MAX_MANIFEST {
            true => Ok(bytes),
            false => Err(ManifestError::TooLong { found: bytes.len() }),
        }
    }

    /// Capsule id: the digest of the canonical encoding.
    pub fn id(&self) -> Result<CapsuleId, ManifestError> {
        Ok(CapsuleId(Digest::of(&self.encode()?)))
    }

    /// Decodes a manifest and checks it.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() > MAX_MANIFEST {
            return Err(ManifestError::TooLong { found: bytes.len() });
        }
        let syntax = |source| ManifestError::Syntax { source };
        let FormatOnly { format } = serde_json::from_slice(bytes).map_err(syntax)?;
        if format != FORMAT {
            return Err(ManifestError::Format { found: format });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(syntax)?;
        if manifest.encode()? != bytes {
            return Err(ManifestError::NotCanonical);
        }
        Ok(manifest)
    }

    fn check(&self) -> Result<(), ManifestError> {
        if self.format != FORMAT {
            return Err(ManifestError::Format { found: self.format });
        }
        let mut names = BTreeSet::new();
        for ImageRef { name, pages, cuts, .. } in &self.images {
            let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
            if !plain || name.is_empty() || name.len() > 63 || !names.insert(name) {
                return Err(ManifestError::ImageName { name: name.chars().take(80).collect() });
            }
            if *pages > MAX_PAGES {
                return Err(ManifestError::ImageSize { name: name.clone(), pages: *pages });
            }
            // An alignment that changes nothing must be left out, or one capsule would have two encodings.
            if cuts.as_ref().is_some_and(|cuts| cuts.is_identity() || cuts.page_count() != *pages) {
                return Err(ManifestError::ImageAlignment { name: name.clone(), pages: *pages });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_core::{ByteSize, DiskConfig};

    fn sample() -> Manifest {
        let machine = MachineConfig {
            disks: vec![DiskConfig { size: ByteSize(4096) }],
            ..MachineConfig::minimal(ByteSize(1 << 20))
        };
        let image = |name: &str, pages, root| ImageRef { name: name.into(), pages, root, cuts: None };
        Manifest {
            format: FORMAT,
            machine,
            device: vec![Digest([1; 32])],
            images: vec![image("memory", 256, Some(Digest([2; 32]))), image("disk0", 1, None)],
            parents: vec![],
            time: 1_700_000_000_000,
            host: "alpha".into(),
            labels: BTreeMap::from([("why".into(), "test".into())]),
            working_set: None,
        }
    }

    #[test]
    fn the_bytes_of_a_manifest_are_pinned() {
        let golden = format!(
            concat!(
                r#"{{"format":1,"machine":{{"memory":1048576,"cpus":1,"machine":"pc-q35-7.2","cpu":"max","accel":"tcg","#,
                r#""disks":[{{"size":4096}}],"nics":[],"boot":null}},"device":["{}"],"images":[{{"name":"memory","pages":256,"#,
                r#""root":"{}"}},{{"name":"disk0","pages":1,"root":null}}],"parents":[],"time":1700000000000,"#,
                r#""host":"alpha","labels":{{"why":"test"}},"working_set":null}}"#
            ),
            "01".repeat(32),
            "02".repeat(32)
        );
        assert_eq!(String::from_utf8(sample().encode().unwrap()).unwrap(), golden);
        assert_eq!(Manifest::decode(golden.as_bytes()).unwrap(), sample());
    }

    #[test]
    fn a_later_format_and_a_second_spelling_are_refused_by_name() {
        let text = String::from_utf8(sample().encode().unwrap()).unwrap();
        let later = text.replace(r#""format":1"#, r#""format":2,"new":[]"#);
        assert!(matches!(Manifest::decode(later.as_bytes()), Err(ManifestError::Format { found: 2 })));
        let spaced = text.replace(r#""time":"#, r#""time": "#);
        assert!(matches!(Manifest::decode(spaced.as_bytes()), Err(ManifestError::NotCanonical)));
        let mut twice = sample();
        twice.images[1].name = "memory".into();
        assert!(matches!(twice.encode(), Err(ManifestError::ImageName { .. })));
    }

    fn cut(pages: u64, text: &str) -> Manifest {
        let mut manifest = sample();
        manifest.images[1] =
            ImageRef { pages, cuts: Some(text.parse().unwrap()), ..manifest.images[1].clone() };
        manifest
    }

    #[test]
    fn cuts_stand_with_their_image_and_only_where_they_say_something() {
        let manifest = cut(257, "0180804000ff03");
        let bytes = manifest.encode().unwrap();
        let text = String::from_utf8(bytes.clone()).unwrap();
        let expected = r#"{"name":"disk0","pages":257,"root":null,"cuts":"0180804000ff03"}"#;
        assert!(text.contains(expected), "{text}");
        assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
        for (pages, text, why) in [(256, "0180804000ff03", "another length"), (256, "0180804000", "no cuts")]
        {
            let refused = cut(pages, text).encode();
            assert!(matches!(refused, Err(ManifestError::ImageAlignment { .. })), "{why}");
        }
        let spelled = text.replace(r#""0180804000ff03""#, "null");
        assert!(matches!(Manifest::decode(spelled.as_bytes()), Err(ManifestError::NotCanonical)));
        let wrong = text.replace("0180804000ff03", "0180804000ff03ff");
        assert!(matches!(Manifest::decode(wrong.as_bytes()), Err(ManifestError::Syntax { .. })));
    }

    proptest! {
        #[test]
        fn a_damaged_manifest_is_refused_or_is_another_capsule(at in 0..400usize, bit in 0..8u8) {
            let mut bytes = sample().encode().unwrap();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            if let Ok(other) = Manifest::decode(&bytes) { prop_assert_ne!(other, sample()); }
        }
    }
}
