//! Images of distributions: what the sources of this host offer, and how one becomes a capsule.
//!
//! An image is a disk-only capsule with a tag (`ImageName::tag`), so all that works with capsules works with
//! images. The file of an image goes into a file without a name, is checked against the checksum that its
//! source lists, and then becomes a capsule as an imported disk does. The tag is set last: a failure, a
//! cancel or a crash leaves the image that was there before, or none.

mod checksum;
mod container;
mod download;
mod folder;
mod location;
mod proxy;
mod registry;
mod registry_login;
mod signature;
mod simplestreams;
mod sources;

pub use container::ContainerSettings;
pub(crate) use download::FetchError;
pub(crate) use sources::ImageSources;
pub use sources::{ImageSource, ImageSourceKind};

use crate::{
    capsule::{
        disk_image::{disk_in, unnamed_file},
        maintenance::ImportedDisks,
    },
    core::{error::DaemonError, operations::ProgressReporter},
    daemon::Daemon,
};
use std::{collections::BTreeMap, ops::ControlFlow, path::Path, sync::Arc};
use whimbrel_api::{
    CHECKSUM_LABEL, IMAGE_LABEL, ImageName, ImageOffer, ImageOffers, ImagePullRequest, Operation,
    OperationKind, OperationResult, USER_LABEL, Unit,
};
use whimbrel_container::ContainerImage;
use whimbrel_core::{ByteSize, CapsuleId, error_chain};

/// An image at a source.
#[derive(Debug, Clone)]
pub(crate) struct Offer {
    /// Names of the image, the one to show first; at least one.
    names: Vec<ImageName>,
    location: location::Location,
    checksum: checksum::Checksum,
    size: Option<u64>,
    user: Option<String>,
    /// The parts of a container image, if it is one; `checksum` is then that of its manifest.
    container: Option<Box<registry::RemoteImage>>,
}

impl Offer {
    fn info(&self) -> Option<ImageOffer> {
        Some(ImageOffer {
            name: self.names.first()?.clone(),
            location: self.location.to_string(),
            size: self.size.map(ByteSize),
            checksum: self.checksum.to_string(),
            user: self.user.clone(),
        })
    }

    fn labels(&self, name: &ImageName) -> BTreeMap<String, String> {
        let user = self.user.iter().map(|user| (USER_LABEL, user.clone()));
        let about = [(IMAGE_LABEL, name.to_string()), (CHECKSUM_LABEL, self.checksum.to_string())];
        about.into_iter().chain(user).map(|(label, text)| (label.to_owned(), text)).collect()
    }
}

impl Daemon {
    /// Reads the lists of all sources.
    pub(crate) fn image_offers(&self) -> ImageOffers {
        let mut offers = ImageOffers::default();
        for source in self.images.all() {
            match self.runtime.block_on(source.offers(&self.directories)) {
                Ok(found) => offers.images.extend(found.iter().filter_map(Offer::info)),
                Err(error) => offers.problems.push(format!("{}: {}", source.location(), error_chain(&error))),
            }
        }
        offers.images.sort_unstable_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
        offers
    }

    /// Fetches an image and makes a capsule of it.
    pub(crate) fn pull_image(self: &Arc<Self>, request: ImagePullRequest) -> Result<Operation, DaemonError> {
        let (host, subject) = (self.clone(), request.name.tag().to_string());
        Ok(self.operations().start(OperationKind::Pull, subject, move |reporter| {
            let before = host.stored_bytes();
            reporter.progress("looking for the image", Unit::Items, 0, None);
            let offer = host.find_offer(&request.name)?;
            let capsule = match host.image_of(&request.name, &offer) {
                Some(present) => present,
                None => host.fetch_image(&request.name, &offer, reporter)?,
            };
            let added = ByteSize(host.stored_bytes().saturating_sub(before));
            Ok(OperationResult::Import { capsule, added })
        }))
    }

    /// The offer of the first source that has the image. One that cannot be read is an error only if no other
    /// has it.
    fn find_offer(&self, name: &ImageName) -> Result<Offer, DaemonError> {
        let mut failure = None;
        for source in self.images.all().filter(|source| source.may_have(name)) {
            match self.runtime.block_on(source.offer_of(name, &self.directories)) {
                Ok(Some(offer)) => return Ok(offer),
                Ok(None) => {}
                Err(error) => drop(failure.get_or_insert((source.location().to_string(), error))),
            }
        }
        Err(match failure {
            Some((location, source)) => DaemonError::ImageSource { location, source },
            None => DaemonError::NotFound { what: "image", name: name.to_string() },
        })
    }

    /// The image of that name here, if it was made of the offered file.
    fn image_of(&self, name: &ImageName, offer: &Offer) -> Option<CapsuleId> {
        let capsule = self.store.get_ref(&name.tag()).ok().flatten()?;
        let manifest = self.store.manifest(&capsule).ok()?;
        (manifest.labels.get(CHECKSUM_LABEL)? == &offer.checksum.to_string()).then_some(capsule)
    }

    fn fetch_image(
        &self,
        name: &ImageName,
        offer: &Offer,
        reporter: &ProgressReporter,
    ) -> Result<CapsuleId, DaemonError> {
        let mut progress = |done, total| -> ControlFlow<()> {
            reporter.progress("downloading", Unit::Bytes, done, total);
            reporter.flow()
        };
        let location = offer.location.to_string();
        let failed = |source| match source {
            FetchError::Cancelled => DaemonError::Cancelled { left: "nothing was stored".into() },
            source => DaemonError::ImageSource { location: location.clone(), source },
        };
        let (path, labels) = (Path::new(&location), offer.labels(name));
        if let Some(image) = &offer.container {
            // Before anything is fetched.
            let host = self.host_files(path)?;
            let new_file = || unnamed_file(&self.directories, 0).map_err(no_file);
            let fetched = self.runtime.block_on(image.fetch(&new_file, &mut progress));
            let (config, layers) = fetched.map_err(failed)?;
            let image = ContainerImage::of_parts(&config, layers);
            let image = image.map_err(|source| DaemonError::Container { path: path.to_owned(), source })?;
            return self.import_container((image, host), (path, &name.tag(), labels), reporter);
        }
        let file = unnamed_file(&self.directories, 0)?;
        let wanted = download::Download {
            location: &offer.location,
            checksum: &offer.checksum,
            size: offer.size,
            file: &file,
            said: download::Said::default(),
        };
        self.runtime.block_on(wanted.run(&mut progress)).map_err(failed)?;
        reporter.progress("converting", Unit::Bytes, 0, None);
        let disk = disk_in(&self.directories, (file, path), &|| reporter.is_cancelled())?;
        self.import_disks(
            ImportedDisks { disks: vec![disk], path, name: &name.tag(), labels, boot: None },
            reporter,
        )
    }
}

/// A file for a download that cannot be made.
fn no_file(error: DaemonError) -> FetchError {
    FetchError::File { path: "a new file".into(), source: std::io::Error::other(error) }
}
