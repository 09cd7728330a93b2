//! Images of distributions: their names, what sources offer, and the request that fetches one.

use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr};
use utoipa::ToSchema;
use whimbrel_core::{ByteSize, NameError, RefName};

/// Prefix of the tags that name images.
const PREFIX: &str = "image.";

/// Label with the name of an image, as its source calls it.
pub const IMAGE_LABEL: &str = "image";
/// Label with the user that cloud-init makes in an image.
pub const USER_LABEL: &str = "image-user";
/// Label with the checksum of the file that an image was made of.
pub const CHECKSUM_LABEL: &str = "image-checksum";
/// Label with the program of a container image and its arguments.
pub const PROGRAM_LABEL: &str = "image-program";

/// Name of an image, like `debian/12`: parts of letters, digits, `-`, `_` and `.`, with `/` between them.
///
/// An image is a capsule with the tag `image.` and the name, in which each `/` is a dot. So `debian/12` and
/// `debian.12` are one image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ImageName(String);

impl ImageName {
    /// Name as its user wrote it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Tag of the image in a store.
    pub fn tag(&self) -> RefName {
        tag_of(&self.0).expect("checked when the name was made")
    }

    /// Name of the image with this tag, as `labels` of its capsule or else the tag have it; none if the tag
    /// names no image.
    pub fn of(tag: &RefName, labels: &BTreeMap<String, String>) -> Option<Self> {
        let plain = tag.as_str().strip_prefix(PREFIX)?;
        let label = labels.get(IMAGE_LABEL).and_then(|name| name.parse::<Self>().ok());
        label.filter(|name| name.tag() == *tag).or_else(|| plain.parse().ok())
    }
}

fn tag_of(name: &str) -> Result<RefName, NameError> {
    format!("{PREFIX}{}", name.replace('/', ".")).parse()
}

impl FromStr for ImageName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let is_part = |part: &str| part.starts_with(|first: char| first.is_ascii_alphanumeric());
        match tag_of(text) {
            Ok(_) if text.split('/').all(is_part) => Ok(Self(text.to_owned())),
            _ => Err(NameError { what: "image", text: text.chars().take(80).collect() }),
        }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

whimbrel_core::serde_by_text!(ImageName);

/// Image that a source of this host offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageOffer {
    /// Name of the image.
    #[schema(value_type = String)]
    pub name: ImageName,
    /// Where its file is.
    pub location: String,
    /// Length of the file, if the source says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>)]
    pub size: Option<ByteSize>,
    /// Checksum of the file, as `sha256:` or `sha512:` and digits.
    pub checksum: String,
    /// User that cloud-init makes in it, if the source says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Images that the sources of a host offer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct ImageOffers {
    /// The images, by name.
    pub images: Vec<ImageOffer>,
    /// Sources that could not be read, each with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// Body of `POST /v1/images`: fetches an image from a source. If the one that is here was made of the same
/// file, nothing is fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ImagePullRequest {
    /// Name of the image at its source, and here.
    #[schema(value_type = String)]
    pub name: ImageName,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_one_tag_and_is_shown_as_its_source_calls_it() {
        let name: ImageName = "ubuntu/24.04".parse().unwrap();
        assert_eq!(name.tag().as_str(), "image.ubuntu.24.04");
        let labels = |name: &str| [(IMAGE_LABEL.to_owned(), name.to_owned())].into();
        assert_eq!(ImageName::of(&name.tag(), &labels("ubuntu/24.04")), Some(name.clone()));
        let shown = |label: &str| ImageName::of(&name.tag(), &labels(label)).unwrap().to_string();
        // A label of another image, or one that is no name, is not believed.
        assert_eq!([shown("debian/12"), shown("../x")], ["ubuntu.24.04", "ubuntu.24.04"]);
        assert_eq!(ImageName::of(&"web".parse().unwrap(), &labels("web")), None);
    }

    #[test]
    fn names_that_are_paths_or_too_long_are_refused() {
        for bad in ["", "/", "a/", "/a", "a//b", "../a", "a/../b", "a b", "a\n", &"a".repeat(58)] {
            assert!(bad.parse::<ImageName>().is_err(), "{bad:?}");
        }
    }
}
