//! Capsules: what the store says about them, and the requests that name, compare, export and import them.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, schema::Type},
};
use whimbrel_core::{ByteSize, CapsuleId, Digest, HostName, MachineName, NameError, RefName};

/// How a caller names a capsule: by its full id, or by a name.
///
/// In a URL and in JSON it is one string. A name is a tag, the name of a machine (its newest capsule), or the
/// first digits of an id, in that order; the daemon looks it up. `NAME@-5m` is a protected machine as it was
/// then.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CapsuleRef {
    /// All 64 digits of the id.
    Id(CapsuleId),
    /// A tag, a machine, or the beginning of an id.
    Name(RefName),
    /// Of the capsules that were kept of a protected machine the newest that is at least so old.
    Past(PointInTime),
}

/// A machine as it was some time ago: `NAME@-AGE`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PointInTime {
    /// Which machine.
    pub machine: MachineName,
    /// How long ago.
    pub ago_ms: u64,
}

/// Units of an age, the largest first.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

impl PointInTime {
    /// None if the text has no `@`.
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

/// Why a text names no capsule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CapsuleRefError {
    /// It is no name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// What is before or behind the `@` is not what it should be.
    #[error(
        "{text:?} is no moment of a machine: write NAME@-AGE, the age as a whole number with ms, s, m, h or d, like web@-5m"
    )]
    Past {
        /// What was given (at most 80 characters of it).
        text: String,
    },
}

impl PartialSchema for CapsuleRef {
    fn schema() -> RefOr<Schema> {
        let text = "A tag, a machine (its newest capsule), an id or the beginning of one, or NAME@-AGE (like web@-5m): of those kept of \
                    a protected machine the newest that is at least so old";
        ObjectBuilder::new().schema_type(Type::String).description(Some(text)).into()
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

impl TryFrom<String> for CapsuleRef {
    type Error = CapsuleRefError;

    fn try_from(text: String) -> Result<Self, CapsuleRefError> {
        text.parse()
    }
}

impl From<CapsuleRef> for String {
    fn from(capsule: CapsuleRef) -> String {
        capsule.to_string()
    }
}

impl From<CapsuleId> for CapsuleRef {
    fn from(id: CapsuleId) -> Self {
        Self::Id(id)
    }
}

/// One capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CapsuleInfo {
    /// Digest of its manifest.
    #[schema(value_type = String)]
    pub id: CapsuleId,
    /// Refs that name it: tags, and the machine whose newest capsule it is.
    #[schema(value_type = Vec<String>)]
    pub names: Vec<RefName>,
    /// The machine it was taken from.
    #[schema(value_type = String)]
    pub machine: MachineName,
    /// Whether it holds memory and device state, so that it resumes instead of booting.
    pub active: bool,
    /// Whether all of it is here; the rest of one that is not lies on other hosts.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub whole: bool,
    /// When it was taken.
    pub time_ms: u64,
    /// Where it was taken.
    #[schema(value_type = String)]
    pub host: HostName,
    /// Guest memory of the machine.
    #[schema(value_type = u64)]
    pub memory: ByteSize,
    /// Its page arrays: `memory`, `disk0`, …
    pub images: Vec<ImageInfo>,
    /// The capsules it follows, none for the first.
    #[schema(value_type = Vec<String>)]
    pub parents: Vec<CapsuleId>,
    /// What the user wrote on it.
    pub labels: BTreeMap<String, String>,
}

fn yes() -> bool {
    true
}

fn is_true(value: &bool) -> bool {
    *value
}

/// One page array of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// `memory`, `disk0`, …
    pub name: String,
    /// Its length in pages of 4 KiB, empty ones counted. A disk whose files lie at odd places has some more
    /// than its size says.
    pub pages: u64,
    /// Bytes of the memory or disk that it is an image of.
    #[schema(value_type = u64)]
    pub size: ByteSize,
    /// Root digest of its tree.
    #[schema(value_type = String)]
    pub root: Digest,
}

/// What differs between two capsules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CapsuleDiff {
    /// The first capsule.
    #[schema(value_type = String)]
    pub a: CapsuleId,
    /// The second capsule.
    #[schema(value_type = String)]
    pub b: CapsuleId,
    /// Every page array that either has.
    pub images: Vec<ImageDiff>,
    /// Settings of the machine that differ.
    pub config: Vec<ConfigChange>,
}

/// What differs between two versions of a page array.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageDiff {
    /// `memory`, `disk0`, …
    pub name: String,
    /// Pages in the first; 0 if it has no such array.
    pub pages_a: u64,
    /// Pages in the second; 0 if it has no such array.
    pub pages_b: u64,
    /// Pages whose content differs.
    pub changed: u64,
    /// Of these, pages whose new content the first holds nowhere at all.
    pub new_contents: u64,
}

/// One setting of a machine in two capsules, as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigChange {
    /// `memory`, `cpus`, `disks[1].size`, …
    pub field: String,
    /// In the first; none if it is absent there.
    pub a: Option<String>,
    /// In the second; none if it is absent there.
    pub b: Option<String>,
}

/// Body of `PUT /v1/tags/{tag}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TagRequest {
    /// What the tag is to name.
    pub capsule: CapsuleRef,
}

/// What an exported or imported file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExportFormat {
    /// A whole capsule in one file.
    Capsule,
    /// One page array, byte for byte, with holes.
    Raw,
    /// One page array as QEMU's qcow2.
    Qcow2,
}

/// Body of `POST /v1/export`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportRequest {
    /// What to export.
    pub capsule: CapsuleRef,
    /// File to create on the host, absolute. It must not exist.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// What to write.
    pub format: ExportFormat,
    /// Which page array, for `raw` and `qcow2`; the first disk unless said otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
}

/// Body of `POST /v1/import`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportRequest {
    /// File on the host, absolute.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// The tag the new capsule gets.
    #[schema(value_type = String)]
    pub name: RefName,
    /// What the file is. A disk becomes an inactive capsule.
    pub format: ExportFormat,
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
