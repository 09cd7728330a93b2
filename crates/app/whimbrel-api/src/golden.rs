//! Golden capsules: capsules that are found by their attributes and not by their names.
//!
//! Every tagged capsule of this host or of a trusted one can match. Its attributes are its sizes and its
//! labels. This module does no I/O: it decides whether attributes fit, and which ones fit best.

use crate::openapi_names::Name;
use serde::{Deserialize, Serialize};
use std::{cmp::Reverse, collections::BTreeMap, fmt, str::FromStr};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, schema::Type},
};
use whimbrel_core::{ByteSize, CapsuleId, HostName, RefName};

/// Longest text of terms in bytes.
const LONGEST: usize = 1024;
/// Operators between an attribute and its value, longer ones before their prefixes.
const SIGNS: [(&str, How); 6] = [
    (">=", How::AtLeast),
    ("<=", How::AtMost),
    ("!=", How::Unlike),
    (">", How::Above),
    ("<", How::Below),
    ("=", How::Equal),
];

/// Terms that a golden capsule must meet, like `ram>=512M,os=debian`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms(Vec<Term>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    key: String,
    how: How,
    value: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Equal,
    Unlike,
    AtLeast,
    AtMost,
    Above,
    Below,
}

/// Error in the text of terms.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TermsError {
    /// Text that is too long, or not a term.
    #[error("{text:?} is not a term: write ATTRIBUTE, one of = != >= <= > <, and a value, like ram>=512M")]
    Term {
        /// First 80 characters of the text.
        text: String,
    },
    /// Value of `ram`, `disk` or `cpus` that is not a number.
    #[error("{value:?} is not a value for {key}: write a whole number, with K, M, G or T for bytes")]
    Number {
        /// Name of the attribute.
        key: String,
        /// First 80 characters of the value.
        value: String,
    },
}

/// Attributes of a capsule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attributes {
    /// Attribute `ram`: size of the guest memory.
    #[schema(value_type = u64)]
    pub ram: ByteSize,
    /// Attribute `disk`: size of all disks, zeros included.
    #[schema(value_type = u64)]
    pub disk: ByteSize,
    /// Attribute `cpus`: number of virtual CPUs.
    pub cpus: u32,
    /// Whether the capsule resumes instead of booting.
    pub active: bool,
    /// Time at which the capsule was taken.
    pub time_ms: u64,
    /// Labels, each an attribute of its own name.
    pub labels: BTreeMap<String, String>,
}

/// Body of `POST /v1/match`: find the golden capsule that fits best.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MatchRequest {
    /// Terms that it must meet.
    pub terms: Terms,
    /// Host to search [default: this host, then all trusted hosts].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
}

/// Golden capsule that fits best.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GoldenMatch {
    /// Host that has the capsule; none for this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Name>)]
    pub host: Option<HostName>,
    /// Tag of the capsule there.
    #[schema(value_type = Name)]
    pub name: RefName,
    /// Digest of the manifest.
    #[schema(value_type = String)]
    pub capsule: CapsuleId,
    /// Attributes of the capsule.
    pub attributes: Attributes,
}

impl Attributes {
    /// Whether these attributes meet all terms.
    pub fn fit(&self, terms: &Terms) -> bool {
        terms.0.iter().all(|term| self.holds(term))
    }

    /// Rank, smaller is better: with memory before disk-only, then the smallest, then the newest.
    pub fn rank(&self) -> impl Ord + use<> {
        (!self.active, self.ram.0, self.disk.0, self.cpus, Reverse(self.time_ms))
    }

    fn number(&self, key: &str) -> Option<u64> {
        match key {
            "ram" => Some(self.ram.0),
            "disk" => Some(self.disk.0),
            "cpus" => Some(self.cpus.into()),
            _ => None,
        }
    }

    fn holds(&self, Term { key, how, value }: &Term) -> bool {
        if let Some(own) = self.number(key) {
            return number(value).is_some_and(|value| how.admits(own.cmp(&value)));
        }
        let Some(own) = self.labels.get(key) else { return *how == How::Unlike };
        match (how, own == value) {
            (How::Equal, same) => same,
            (How::Unlike, same) => !same,
            // Only numbers have an order; texts do not.
            _ => match (own.parse::<f64>(), value.parse::<f64>()) {
                (Ok(own), Ok(value)) => own.partial_cmp(&value).is_some_and(|order| how.admits(order)),
                _ => false,
            },
        }
    }
}

impl How {
    fn admits(self, order: std::cmp::Ordering) -> bool {
        match self {
            Self::Equal => order.is_eq(),
            Self::Unlike => order.is_ne(),
            Self::AtLeast => order.is_ge(),
            Self::AtMost => order.is_le(),
            Self::Above => order.is_gt(),
            Self::Below => order.is_lt(),
        }
    }
}

fn number(text: &str) -> Option<u64> {
    text.parse::<ByteSize>().ok().map(|size| size.0)
}

fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

impl FromStr for Term {
    type Err = TermsError;

    fn from_str(text: &str) -> Result<Self, TermsError> {
        let fail = || TermsError::Term { text: short(text) };
        let at = text.find(['=', '!', '>', '<']).ok_or_else(fail)?;
        let (sign, how) = SIGNS.iter().find(|(sign, _)| text[at..].starts_with(sign)).ok_or_else(fail)?;
        let (key, value) = (text[..at].trim(), text[at + sign.len()..].trim());
        if key.is_empty() || value.is_empty() {
            return Err(fail());
        }
        if matches!(key, "ram" | "disk" | "cpus") && number(value).is_none() {
            return Err(TermsError::Number { key: key.to_owned(), value: short(value) });
        }
        Ok(Self { key: key.to_owned(), how: *how, value: value.to_owned() })
    }
}

impl FromStr for Terms {
    type Err = TermsError;

    fn from_str(text: &str) -> Result<Self, TermsError> {
        if text.len() > LONGEST {
            return Err(TermsError::Term { text: short(text) });
        }
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, Term { key, how, value }) in self.0.iter().enumerate() {
            let comma = if number > 0 { "," } else { "" };
            let sign = SIGNS.iter().find(|(_, known)| known == how).map_or("=", |(sign, _)| sign);
            write!(f, "{comma}{key}{sign}{value}")?;
        }
        Ok(())
    }
}

whimbrel_core::serde_by_text!(Terms);

impl PartialSchema for Terms {
    fn schema() -> RefOr<Schema> {
        let text = "Attributes, each with = != >= <= > or < and a value, separated by commas: ram>=512M,os=debian. `ram`, `disk` and \
                    `cpus` are those of the machine, all others are labels";
        ObjectBuilder::new().schema_type(Type::String).description(Some(text)).into()
    }
}

impl ToSchema for Terms {}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(ram: u64, labels: &[(&str, &str)]) -> Attributes {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Attributes {
            ram: ByteSize(ram << 20),
            disk: ByteSize(2 << 30),
            cpus: 2,
            active: true,
            time_ms: 5,
            labels,
        }
    }

    fn fits(machine: &Attributes, terms: &str) -> bool {
        machine.fit(&terms.parse().unwrap())
    }

    #[test]
    fn sizes_are_compared_as_numbers_and_labels_as_they_are_written() {
        let debian = machine(512, &[("os", "debian"), ("release", "12")]);
        for good in [
            "ram>=512M,os=debian",
            "ram=512M",
            "cpus<=2",
            "disk>1G",
            "release>9",
            "os!=alpine",
            "gpu!=yes",
            " ram >= 1M ",
        ] {
            assert!(fits(&debian, good), "{good}");
        }
        for bad in [
            "ram>512M",
            "os=Debian",
            "gpu=yes",
            "release<9",
            "os>alpine",
            "ram>=1M,os=alpine",
            "release=12.0",
        ] {
            assert!(!fits(&debian, bad), "{bad}");
        }
        for wrong in ["", "ram", "ram>=", "=5", "ram>=much", "cpus=two", "os=debian,,ram>1", "a!b"] {
            assert!(wrong.parse::<Terms>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_best_resumes_and_takes_least() {
        let small = machine(256, &[]);
        let boots = Attributes { active: false, ..machine(128, &[]) };
        let newer = Attributes { time_ms: 9, ..machine(256, &[]) };
        let mut all = [boots.clone(), machine(1024, &[]), small.clone(), newer.clone()];
        all.sort_by_key(Attributes::rank);
        assert_eq!(all, [newer, small, machine(1024, &[]), boots]);
    }

    #[test]
    fn terms_are_what_they_are_written_as() {
        for text in ["ram>=512M,os=debian", "a=b=c", "a=>b", "x!=y,z<1", "key= a b "] {
            let terms: Terms = text.parse().unwrap();
            assert_eq!(terms.to_string().parse(), Ok(terms), "{text}");
        }
        assert!("a=b,".repeat(400).parse::<Terms>().is_err(), "too long");
    }
}
