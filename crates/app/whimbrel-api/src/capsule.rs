//! Capsules: their description, and the requests that name, compare, export and import them.

use crate::openapi_names::{CAPSULE, Name};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, schema::Type},
};
use whimbrel_core::{ByteSize, CapsuleId, Digest, FileKey, HostName, MachineName, NameError, RefName};

/// Name of a capsule in a request: its full id, a name, or a point in time.
///
/// In a URL and in JSON it is one string. A name is a tag, the name of a machine (its newest capsule), or the
/// first digits of an id, in that order; the daemon looks it up. `NAME@-5m` is an epoch snapshot of a
/// protected machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CapsuleRef {
    /// Full id of 64 digits.
    Id(CapsuleId),
    /// Tag, machine, or first digits of an id.
    Name(RefName),
    /// Newest epoch snapshot of a protected machine that is at least of this age.
    Past(PointInTime),
}

/// Machine at a time in the past: `NAME@-AGE`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PointInTime {
    /// Name of the machine.
    pub machine: MachineName,
    /// Age in milliseconds.
    pub ago_ms: u64,
}

/// Units of an age, largest first.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

impl PointInTime {
    /// Parses a text; none if it has no `@`.
    fn parse(text: &str) -> Option<Result<Self, CapsuleRefError>> {
        let (name, age) = text.split_once('@')?;
        let past = || {
            let age = age.strip_prefix('-')?;
            let unit = age.find(|c: char| !c.is_ascii_digit())?;
            let (_, factor) = UNITS.iter().find(|(known, _)| *known == &age[unit..])?;
            let ago_ms = age[..unit].parse::<u64>().ok()?.checked_mul(*factor)?;
            Some(Self { machine: name.parse().ok()?, ago_ms })
        };
        Some(past().ok_or_else(|| CapsuleRefError::Past { text: text.chars().take(80).collect() }))
    }
}

impl fmt::Display for PointInTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |(_, factor): &&(&str, u64)| self.ago_ms.is_multiple_of(*factor) && self.ago_ms >= *factor;
        let (unit, factor) = UNITS.iter().find(fits).copied().unwrap_or(("s", 1));
        write!(f, "{}@-{}{unit}", self.machine, self.ago_ms / factor)
    }
}

/// Error in the name of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CapsuleRefError {
    /// Text that is not a valid name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Text with an `@` and without a valid name or age.
    #[error(
        "{text:?} is not a machine at a point in time: write NAME@-AGE, the age as a whole number with ms, s, m, h or d, like web@-5m"
    )]
    Past {
        /// First 80 characters of the text.
        text: String,
    },
}

impl PartialSchema for CapsuleRef {
    fn schema() -> RefOr<Schema> {
        let text = "A tag, a machine (its newest capsule), an id or its first digits, or NAME@-AGE (like web@-5m): the newest epoch \
                    snapshot of a protected machine that is at least of this age";
        ObjectBuilder::new().schema_type(Type::String).pattern(Some(CAPSULE)).description(Some(text)).into()
    }
}

impl ToSchema for CapsuleRef {}

impl FromStr for CapsuleRef {
    type Err = CapsuleRefError;

    fn from_str(text: &str) -> Result<Self, CapsuleRefError> {
        if let Some(past) = PointInTime::parse(text) {
            return past.map(Self::Past);
        }
        Ok(text.parse().map(Self::Id).or_else(|_| text.parse().map(Self::Name))?)
    }
}

impl fmt::Display for CapsuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Name(name) => name.fmt(f),
            Self::Past(past) => past.fmt(f),
        }
    }
}

whimbrel_core::serde_by_text!(CapsuleRef);

impl From<CapsuleId> for CapsuleRef {
    fn from(id: CapsuleId) -> Self {
        Self::Id(id)
    }
}

/// Description of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CapsuleInfo {
    /// Digest of the manifest.
    #[schema(value_type = String)]
    pub id: CapsuleId,
    /// Refs of the capsule: tags, and the machine whose newest capsule it is.
    #[schema(value_type = Vec<Name>)]
    pub names: Vec<RefName>,
    /// Machine that the capsule was taken from.
    #[schema(value_type = Name)]
    pub machine: MachineName,
    /// Whether the capsule has memory and device state, so that it resumes instead of booting.
    pub active: bool,
    /// Whether the capsule is complete. Other hosts have the missing objects of a partial capsule.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub whole: bool,
    /// Time at which the capsule was taken.
    pub time_ms: u64,
    /// Host on which the capsule was taken.
    #[schema(value_type = Name)]
    pub host: HostName,
    /// Memory size of the machine.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Images of the page arrays `memory`, `disk0`, …
    pub images: Vec<ImageInfo>,
    /// Parents; none for the first capsule of a machine.
    #[schema(value_type = Vec<String>)]
    pub parents: Vec<CapsuleId>,
    /// Labels that the user gave.
    pub labels: BTreeMap<String, String>,
}

fn yes() -> bool {
    true
}

fn is_true(value: &bool) -> bool {
    *value
}

/// Image of one page array of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Name of the page array: `memory`, `disk0`, …
    pub name: String,
    /// Length in pages of 4 KiB, including zero pages. An aligned disk has some more pages than its size.
    pub pages: u64,
    /// Size of the memory or disk.
    #[schema(value_type = u64)]
    pub size: ByteSize,
    /// Root digest of the image.
    #[schema(value_type = String)]
    pub root: Digest,
}

/// Differences between two capsules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CapsuleDiff {
    /// Id of the first capsule.
    #[schema(value_type = String)]
    pub a: CapsuleId,
    /// Id of the second capsule.
    #[schema(value_type = String)]
    pub b: CapsuleId,
    /// Differences of all page arrays of both.
    pub images: Vec<ImageDiff>,
    /// Differences of the configuration.
    pub config: Vec<ConfigChange>,
}

/// Differences between two versions of a page array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageDiff {
    /// Name of the page array: `memory`, `disk0`, …
    pub name: String,
    /// Pages in the first capsule; 0 if it has no such array.
    pub pages_a: u64,
    /// Pages in the second capsule; 0 if it has no such array.
    pub pages_b: u64,
    /// Pages whose content differs.
    pub changed: u64,
    /// Changed pages whose content the first capsule does not have anywhere.
    pub new_contents: u64,
}

/// Setting of a machine that differs between two capsules, as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigChange {
    /// Name of the setting: `memory`, `cpus`, `disks[1].size`, …
    pub field: String,
    /// Value in the first capsule; none if it is absent there.
    pub a: Option<String>,
    /// Value in the second capsule; none if it is absent there.
    pub b: Option<String>,
}

/// Body of `PUT /v1/tags/{tag}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TagRequest {
    /// Capsule that the tag names from now on.
    pub capsule: CapsuleRef,
}

/// Content of an exported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExportFormat {
    /// Complete capsule in one file.
    Capsule,
    /// One page array, byte by byte, with holes.
    Raw,
    /// One page array in the format qcow2 of QEMU.
    Qcow2,
}

/// Body of `POST /v1/export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// Capsule to export.
    pub capsule: CapsuleRef,
    /// Absolute path of the file to create on the host. It must not exist.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Content of the file.
    pub format: ExportFormat,
    /// Page array to write as `raw` or `qcow2` [default: the first disk].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Key to encrypt a capsule with: 64 hexadecimal digits [default: it is not encrypted].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub key: Option<FileKey>,
}

/// Body of `POST /v1/import`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// Absolute path of the file on the host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Tag for the new capsule.
    #[schema(value_type = Name)]
    pub name: RefName,
    /// Content of the file. A disk becomes a disk-only capsule.
    pub format: ImportFormat,
    /// Key of an encrypted capsule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub key: Option<FileKey>,
}

/// Content of an imported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ImportFormat {
    /// Complete capsule in one file.
    Capsule,
    /// Image of a disk (raw, qcow2, vmdk, vhdx or vpc, also compressed by gzip, xz or zstd) or of a container
    /// (OCI layout or `docker save`), whichever the content is.
    // Earlier versions named the format, and left it to QEMU to find another one.
    #[serde(alias = "raw", alias = "qcow2")]
    Disk,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capsule_is_named_by_id_or_by_a_harmless_name() {
        let id = "ab".repeat(32);
        assert!(matches!(id.parse(), Ok(CapsuleRef::Id(_))));
        assert!(matches!("before-upgrade".parse(), Ok(CapsuleRef::Name(_))));
        assert!("../x".parse::<CapsuleRef>().is_err());
        let json = serde_json::to_string(&id.parse::<CapsuleRef>().unwrap()).unwrap();
        assert_eq!(json, format!("\"{id}\""));
    }

    #[test]
    fn a_moment_is_a_machine_and_an_age() {
        let past = |text: &str| match text.parse::<CapsuleRef>() {
            Ok(CapsuleRef::Past(past)) => Some((past.machine.to_string(), past.ago_ms, past.to_string())),
            _ => None,
        };
        let web = |ago_ms, text: &str| Some(("web".to_owned(), ago_ms, text.to_owned()));
        assert_eq!(past("web@-5m"), web(300_000, "web@-5m"));
        assert_eq!(past("web@-120s"), web(120_000, "web@-2m"));
        assert_eq!(past("web@-1500ms"), web(1500, "web@-1500ms"));
        assert_eq!(past("web@-0s"), web(0, "web@-0s"));
        assert_eq!(past("web@-2d"), web(172_800_000, "web@-2d"));
        for bad in [
            "web@5m",
            "web@-",
            "web@-5",
            "web@-m",
            "@-5m",
            "we/b@-5m",
            "web@-99999999999999999999d",
            "web@-5m@-1m",
        ] {
            let refused = bad.parse::<CapsuleRef>().unwrap_err();
            assert!(refused.to_string().contains("NAME@-AGE"), "{refused}");
        }
    }
}
