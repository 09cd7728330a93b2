//! Sources of images: what the owner of this host configured, or else the two public ones.

use super::{
    Offer, container::ContainerSettings, download::FetchError, folder, location::Location, registry,
    simplestreams,
};
use crate::core::{directories::Directories, error::DaemonError};
use serde::Deserialize;
use std::{collections::BTreeMap, path::PathBuf};
use whimbrel_api::ImageName;

/// Place from which images are fetched.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSource {
    /// First part of the names of its images; none uses the names of the source.
    #[serde(default)]
    pub name: Option<ImageName>,
    /// How the source lists its images.
    pub kind: ImageSourceKind,
    /// Address of HTTP or HTTPS, or an absolute path.
    pub url: String,
    /// Files of a folder by the names of their images [default: all images in the folder]; repositories of a
    /// registry, each as `REPOSITORY:TAG`.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// Keyring of gpgv(1): lists must be signed by one of its keys.
    #[serde(default)]
    pub keyring: Option<PathBuf>,
    /// User that cloud-init makes in the images.
    #[serde(default)]
    pub user: Option<String>,
    /// File with the login at a registry, as `docker login` writes it.
    #[serde(default)]
    pub login: Option<PathBuf>,
}

/// How a source lists its images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageSourceKind {
    /// Files beside a `SHA512SUMS` or `SHA256SUMS`.
    Folder,
    /// A server of simplestreams.
    Simplestreams,
    /// A registry of container images.
    Registry,
}

impl ImageSource {
    /// The public sources of Debian and Ubuntu, and Docker's registry.
    pub fn defaults() -> Vec<Self> {
        let file = |(name, folder): (&str, &str)| {
            (name.to_owned(), format!("{folder}/latest/debian-{name}-genericcloud-amd64.qcow2"))
        };
        let source = |name: &str, kind, url: &str| Self {
            name: name.parse().ok(),
            kind,
            url: url.to_owned(),
            files: BTreeMap::new(),
            keyring: None,
            user: Some(name.to_owned()),
            login: None,
        };
        let debian = source("debian", ImageSourceKind::Folder, "https://cloud.debian.org/images/cloud/");
        let releases = [("12", "bookworm"), ("13", "trixie")];
        vec![
            Self { files: releases.into_iter().map(file).collect(), ..debian },
            source("ubuntu", ImageSourceKind::Simplestreams, "https://cloud-images.ubuntu.com/releases/"),
            source("docker", ImageSourceKind::Registry, "https://registry-1.docker.io/"),
        ]
    }

    /// Name here of the image that the source calls `name`; none if that cannot be a name.
    pub(super) fn full_name(&self, name: &str) -> Option<ImageName> {
        match &self.name {
            Some(first) => format!("{first}/{name}").parse().ok(),
            None => name.parse().ok(),
        }
    }
}

/// A source whose settings were checked.
pub(crate) struct CheckedSource {
    source: ImageSource,
    location: Location,
}

impl CheckedSource {
    pub(super) fn location(&self) -> &Location {
        &self.location
    }

    /// Whether the name begins as the source's own.
    pub(super) fn may_have(&self, name: &ImageName) -> bool {
        let first = self.source.name.as_ref().map(|first| format!("{}.", first.tag()));
        first.is_none_or(|first| name.tag().as_str().starts_with(&first))
    }

    pub(super) async fn offers(&self, layout: &Directories) -> Result<Vec<Offer>, FetchError> {
        match self.source.kind {
            ImageSourceKind::Folder => folder::offers(&self.source, &self.location, layout).await,
            ImageSourceKind::Simplestreams => {
                simplestreams::offers(&self.source, &self.location, layout).await
            }
            ImageSourceKind::Registry => registry::offers(&self.source, &self.location).await,
        }
    }

    /// The image of that name; none if the source does not have it.
    pub(super) async fn offer_of(
        &self,
        name: &ImageName,
        layout: &Directories,
    ) -> Result<Option<Offer>, FetchError> {
        if self.source.kind == ImageSourceKind::Registry {
            return registry::offer_of(&self.source, &self.location, name).await;
        }
        let tag = name.tag();
        let names = |offer: &Offer| offer.names.iter().any(|known| known.tag() == tag);
        Ok(self.offers(layout).await?.into_iter().find(names))
    }
}

/// The sources of this host.
pub(crate) struct ImageSources {
    sources: Vec<CheckedSource>,
    pub(super) containers: ContainerSettings,
}

impl ImageSources {
    /// Checks the settings of the sources; nothing is read of them yet.
    pub(crate) fn new(sources: Vec<ImageSource>, containers: ContainerSettings) -> Result<Self, DaemonError> {
        containers.check()?;
        let check = |source: ImageSource| {
            let location = source.url.parse();
            let location = location.map_err(|error: FetchError| DaemonError::invalid(error.to_string()))?;
            let unused = source.kind == ImageSourceKind::Simplestreams && !source.files.is_empty();
            let idle_login = source.kind != ImageSourceKind::Registry && source.login.is_some();
            let nameless = source.files.keys().find(|name| source.full_name(name).is_none());
            let problem = match nameless {
                _ if unused => {
                    format!("the image source {} is of simplestreams, which has no `files`", source.url)
                }
                _ if idle_login => {
                    format!("the image source {} is no registry, so it has no `login`", source.url)
                }
                Some(name) => format!("{name:?} cannot be the name of an image"),
                None => return Ok(CheckedSource { source, location }),
            };
            Err(DaemonError::invalid(problem))
        };
        Ok(Self { sources: sources.into_iter().map(check).collect::<Result<_, _>>()?, containers })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &CheckedSource> {
        self.sources.iter()
    }
}
