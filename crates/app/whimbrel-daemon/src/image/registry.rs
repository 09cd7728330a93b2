//! Registries of container images (distribution-spec 1.1, "Pull"), for everybody or by a login, which a
//! registry takes itself or changes into a token (Docker's "Token Authentication Specification").
//!
//! An image is named by its repository and its tag. The manifest that the tag names has the digests of all
//! other parts, and each part is checked against its digest.

use super::{
    Offer,
    checksum::Checksum,
    download::{self, Download, FetchError, Progress, Said},
    location::Location,
    registry_login::{self, Authorization},
    sources::ImageSource,
};
use serde::Deserialize;
use std::{collections::BTreeMap, fs::File, ops::ControlFlow};
use whimbrel_api::ImageName;
use whimbrel_container::{ContainerError, Descriptor, Manifest, manifest_of};

/// Longest manifest, configuration or token: 4 MiB, as registries have it.
const TEXT_MAX: usize = 4 << 20;
/// Kinds of manifests that are read (image-spec, `media-types.md`, and Docker's before it).
const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";
const LATEST: &str = "latest";
/// Registry whose repositories of one part are below another one.
pub(super) const DOCKER_HUB: &str = "https://registry-1.docker.io";

/// A repository of a registry.
#[derive(Debug, Clone)]
pub(super) struct Repository {
    root: Location,
    name: String,
    /// Login of the owner of this host.
    login: Option<Authorization>,
    /// How it knows by now that it may answer.
    authorization: Option<Authorization>,
}

/// An image at a registry.
#[derive(Debug, Clone)]
pub(super) struct RemoteImage {
    repository: Repository,
    manifest: Manifest,
}

/// What a registry answers who asks for a token.
#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

/// The images that the source names. Registries do not list what they have.
pub(super) async fn offers(source: &ImageSource, root: &Location) -> Result<Vec<Offer>, FetchError> {
    let mut offers = Vec::new();
    for (name, place) in &source.files {
        let Some(name) = source.full_name(name) else { continue };
        offers.push(offer(source, name, root, place).await?);
    }
    Ok(offers)
}

/// The image that a name means: that of the settings, or else the repository and tag in the name.
pub(super) async fn offer_of(
    source: &ImageSource,
    root: &Location,
    name: &ImageName,
) -> Result<Option<Offer>, FetchError> {
    let known = source
        .files
        .iter()
        .find(|(file, _)| source.full_name(file).is_some_and(|its| its.tag() == name.tag()));
    let first = source.name.as_ref().map_or(String::new(), |first| format!("{first}/"));
    let place = match (known, name.as_str().strip_prefix(&first)) {
        (Some((_, place)), _) => place.clone(),
        (None, Some(place)) => match place.rsplit_once('/') {
            Some((repository, tag)) => format!("{repository}:{tag}"),
            None => place.to_owned(),
        },
        (None, None) => return Ok(None),
    };
    match offer(source, name.clone(), root, &place).await {
        Ok(offer) => Ok(Some(offer)),
        Err(error) if error.is_absent() => Ok(None),
        Err(error) => Err(error),
    }
}

async fn offer(
    source: &ImageSource,
    name: ImageName,
    root: &Location,
    place: &str,
) -> Result<Offer, FetchError> {
    let (repository, tag) = place.split_once(':').unwrap_or((place, LATEST));
    let library = root.to_string().trim_end_matches('/') == DOCKER_HUB && !repository.contains('/');
    let repository = if library { format!("library/{repository}") } else { repository.to_owned() };
    let login = source.login.as_ref().map(|file| registry_login::read(file, root)).transpose()?.flatten();
    let mut repository = Repository { root: root.clone(), name: repository, login, authorization: None };
    let (manifest, checksum) = repository.manifest(tag).await?;
    let size = manifest.layers.iter().map(|layer| layer.size).try_fold(0, u64::checked_add);
    Ok(Offer {
        names: vec![name],
        location: repository.part("manifests", tag)?,
        checksum,
        size,
        user: None,
        container: Some(Box::new(RemoteImage { repository, manifest })),
    })
}

impl Repository {
    /// The manifest of a tag for this system, and its checksum.
    async fn manifest(&mut self, tag: &str) -> Result<(Manifest, Checksum), FetchError> {
        let text = self.text(&self.part("manifests", tag)?).await?;
        match manifest_of(&text).map_err(unreadable)? {
            Ok(manifest) => Ok((manifest, checksum_of(&text))),
            Err(descriptor) => {
                let text = self.checked(&descriptor, "manifests").await?;
                match manifest_of(&text).map_err(unreadable)? {
                    Ok(manifest) => Ok((manifest, checksum_of(&text))),
                    Err(_) => Err(FetchError::List { reason: "an index leads to another index".into() }),
                }
            }
        }
    }

    fn part(&self, kind: &str, reference: &str) -> Result<Location, FetchError> {
        self.root.join(&format!("v2/{}/{kind}/{reference}", self.name))
    }

    /// A part that is a text, checked against its digest.
    async fn checked(&mut self, descriptor: &Descriptor, kind: &str) -> Result<Vec<u8>, FetchError> {
        let text = self.text(&self.part(kind, &descriptor.digest)?).await?;
        let (expected, found) = (digest(descriptor)?.to_string(), checksum_of(&text).to_string());
        if expected == found { Ok(text) } else { Err(FetchError::Checksum { expected, found }) }
    }

    async fn text(&mut self, location: &Location) -> Result<Vec<u8>, FetchError> {
        match download::read_with(location, TEXT_MAX, self.said()).await {
            Err(FetchError::Unauthorized { challenge }) => {
                self.authorization = Some(self.authorized(&challenge).await?);
                download::read_with(location, TEXT_MAX, self.said()).await
            }
            read => read,
        }
    }

    fn said(&self) -> Said<'_> {
        Said { accept: Some(ACCEPTED), authorization: self.authorization.as_ref() }
    }

    /// What the registry asks for: the login, or a token from the server that it names, for the login or for
    /// whoever asks.
    async fn authorized(&self, challenge: &str) -> Result<Authorization, FetchError> {
        let refused = || FetchError::Unauthorized { challenge: challenge.to_owned() };
        let kind = challenge.split(' ').next().unwrap_or_default();
        if kind.eq_ignore_ascii_case("basic") {
            return self.login.clone().ok_or_else(refused);
        }
        let fields = fields_of(challenge).ok_or_else(refused)?;
        let realm = fields.get("realm").ok_or_else(refused)?;
        let asked = ["service", "scope"]
            .iter()
            .filter_map(|name| Some(format!("{name}={}", encoded(fields.get(*name)?))));
        let question = if realm.contains('?') { '&' } else { '?' };
        let address = format!("{realm}{question}{}", asked.collect::<Vec<_>>().join("&"));
        let location: Location = address.parse()?;
        // The server of tokens is not less protected than the registry.
        if self.root.is_secure() && !location.is_secure() {
            return Err(refused());
        }
        let said = Said { accept: None, authorization: self.login.as_ref() };
        let text = download::read_with(&location, TEXT_MAX, said).await?;
        let token: Token = serde_json::from_slice(&text).map_err(|error| {
            unreadable(ContainerError::Invalid { part: "a token".into(), reason: error.to_string() })
        })?;
        let plain = |token: &String| token.bytes().all(|byte| byte.is_ascii_graphic());
        let token = token.token.or(token.access_token).filter(plain).ok_or_else(refused)?;
        Ok(Authorization::bearer(&token))
    }
}

impl RemoteImage {
    /// The configuration of the image, and its layers in files that `new_file` makes, each with its length.
    pub(super) async fn fetch(
        &self,
        new_file: &(dyn Fn() -> Result<File, FetchError> + Sync),
        progress: &mut Progress<'_>,
    ) -> Result<(Vec<u8>, Vec<(File, u64)>), FetchError> {
        let mut repository = self.repository.clone();
        // Asked for first, as a text: that renews a token which has ended.
        let config = repository.checked(&self.manifest.config, "blobs").await?;
        let total: u64 = self.manifest.layers.iter().map(|layer| layer.size).fold(0, u64::saturating_add);
        if total > download::IMAGE_MAX {
            return Err(FetchError::TooLong { limit: download::IMAGE_MAX });
        }
        let (mut layers, mut before) = (Vec::new(), 0);
        for layer in &self.manifest.layers {
            let (location, checksum, file) =
                (repository.part("blobs", &layer.digest)?, digest(layer)?, new_file()?);
            let wanted = Download {
                location: &location,
                checksum: &checksum,
                size: Some(layer.size),
                file: &file,
                said: Said { accept: None, authorization: repository.authorization.as_ref() },
            };
            let mut of_all = |done, _| -> ControlFlow<()> { progress(before + done, Some(total)) };
            wanted.run(&mut of_all).await?;
            before += layer.size;
            layers.push((file, layer.size));
        }
        Ok((config, layers))
    }
}

fn unreadable(error: ContainerError) -> FetchError {
    FetchError::List { reason: error.to_string() }
}

fn checksum_of(text: &[u8]) -> Checksum {
    let mut context = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
    context.update(text);
    Checksum::of(context)
}

fn digest(descriptor: &Descriptor) -> Result<Checksum, FetchError> {
    let digits = descriptor.digest.strip_prefix("sha256:").and_then(Checksum::parse);
    digits.ok_or_else(|| FetchError::List { reason: format!("{:?} is no digest", descriptor.digest) })
}

/// Fields of a challenge `Bearer name="text",…` (RFC 6750, 3).
fn fields_of(challenge: &str) -> Option<BTreeMap<String, String>> {
    let (kind, mut rest) = challenge.split_once(' ')?;
    if !kind.eq_ignore_ascii_case("bearer") {
        return None;
    }
    let mut fields = BTreeMap::new();
    while let Some((name, value)) = rest.split_once("=\"") {
        let (value, next) = value.split_once('"')?;
        fields.insert(name.trim_start_matches([',', ' ']).to_ascii_lowercase(), value.to_owned());
        rest = next;
    }
    Some(fields)
}

/// Text as a part of an address.
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte.is_ascii_alphanumeric() || b"-_.~:/,".contains(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_names_who_gives_tokens_for_what() {
        let challenge = r#"Bearer realm="https://auth.test/token",service="registry.test", scope="repository:a/b:pull,push""#;
        let fields = fields_of(challenge).unwrap();
        assert_eq!(fields["realm"], "https://auth.test/token");
        assert_eq!(encoded(&fields["scope"]), "repository:a/b:pull,push");
        assert_eq!(encoded("a b&c=d"), "a%20b%26c%3Dd");
        for other in ["Basic realm=\"x\"", "Bearer", "", "Bearer realm=\"never ends"] {
            assert!(fields_of(other).is_none_or(|fields| fields.is_empty()), "{other}");
        }
    }

    #[test]
    fn paths_of_parts_stay_in_the_registry() {
        let repository = |name: &str| Repository {
            root: "https://registry.test/".parse().unwrap(),
            name: name.into(),
            login: None,
            authorization: None,
        };
        let part = repository("a/b").part("manifests", "3.20").unwrap();
        assert_eq!(part.to_string(), "https://registry.test/v2/a/b/manifests/3.20");
        for (name, tag) in [("../a", "1"), ("a", "../../1"), ("a?b", "1"), ("a", "1#"), ("", "1")] {
            assert!(repository(name).part("manifests", tag).is_err(), "{name} {tag}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_challenge_is_a_panic(text in ".{0,80}") {
            let _ = fields_of(&format!("Bearer {text}"));
        }
    }
}
