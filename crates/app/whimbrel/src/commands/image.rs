//! `whimbrel image`: fetches, builds, lists, serves and removes images of distributions and containers.

use crate::{
    argument_types::absolute,
    capsule_text,
    context::Context,
    error::CliError,
    image_build, image_server, operation,
    output::Removed,
    table::{ago, table},
};
use clap::Subcommand;
use serde::Serialize;
use std::path::PathBuf;
use whimbrel_api::{
    CapsuleInfo, ImageName, ImageOffers, ImagePullRequest, ImportFormat, ImportRequest, USER_LABEL,
};
use whimbrel_core::{ByteSize, CapsuleId};

const EXAMPLES: &str = "\
Examples:
  whimbrel image ls --available            what the sources of this host offer
  whimbrel image pull debian/12
  whimbrel image import disk.qcow2 mine/web
  whimbrel image import app.tar mine/app   saved with `docker save app -o app.tar`
  whimbrel image pull docker/nginx/1.27    from a registry of container images
  whimbrel image build mine/web            by a recipe like a Dockerfile in this folder
  whimbrel image serve /srv/images         to other hosts
  whimbrel launch mine/web web             a machine with a disk like that
  whimbrel checkpoint web --disks-only --tag image.mine.web-2

An image is a capsule with a tag that begins with `image.`: `debian/12` has the tag image.debian.12. So `push`, `pull`, \
`log` and `gc` work with images, too. The sources are set in the daemon's settings file.";

/// Manage images of distributions and containers, for `launch`
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Fetch an image from a source
    ///
    /// If the image that is here was made of the same file, nothing is fetched.
    Pull {
        /// Name of the image, like `debian/12`
        image: ImageName,
    },
    /// List the images on this host
    Ls {
        /// List the images that the sources of this host offer
        #[arg(long)]
        available: bool,
    },
    /// Make an image of a disk or of a container image
    ///
    /// A disk is a file in the format raw, qcow2, vmdk, vhdx or vpc, also compressed by gzip, xz or zstd. A
    /// container image is a folder or a tar archive in the OCI layout, or what `docker save` and
    /// `podman save` write.
    Import {
        /// File or folder on the host
        #[arg(value_parser = absolute)]
        file: PathBuf,
        /// Name for the image
        image: ImageName,
    },
    Build(Box<image_build::Args>),
    /// Serve images to other hosts, as simplestreams over HTTP
    ///
    /// Whoever reaches the address can fetch them. The folder has all files, so any web server can serve it.
    Serve(image_server::Args),
    /// Remove an image
    ///
    /// Machines that were made of it stay complete. `whimbrel gc` frees what nothing needs.
    Rm {
        /// Name of the image
        image: ImageName,
    },
}

/// Image on this host.
#[derive(Debug, Serialize)]
struct Image {
    name: String,
    capsule: CapsuleId,
    size: ByteSize,
    time_ms: u64,
    user: Option<String>,
    whole: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let (client, output) = (&context.client, &context.output);
        match self.action {
            Action::Pull { image } => {
                operation::perform(context, client.pull_image(&ImagePullRequest { name: image })).await
            }
            Action::Ls { available: true } => output.result(&client.images().await?, offered),
            Action::Ls { available: false } => {
                let images: Vec<_> = client.capsules().await?.iter().flat_map(images_of).collect();
                output.result(images.as_slice(), list)
            }
            Action::Import { file, image } => {
                let request =
                    ImportRequest { path: file, name: image.tag(), format: ImportFormat::Disk, key: None };
                operation::perform(context, client.import(&request)).await
            }
            Action::Build(build) => build.run(context).await,
            Action::Serve(serve) => serve.run(context).await,
            Action::Rm { image } => {
                let left = client.remove(&image.tag()).await?;
                image_build::remove_states(context, &image, 0).await;
                if let Some(note) = capsule_text::left_behind(&left) {
                    output.remark(&format!("note: {image} was capsule {}: {note}", left.capsule.short()));
                }
                output.result(&Removed::one(&image), |removed| removed.sentence("removed"))
            }
        }
    }
}

fn images_of(capsule: &CapsuleInfo) -> Vec<Image> {
    let names = capsule.names.iter().filter_map(|tag| ImageName::of(tag, &capsule.labels));
    let disks = capsule.images.iter().filter(|image| image.name != "memory");
    let size = ByteSize(disks.map(|disk| disk.size.0).sum());
    let image = |name: ImageName| Image {
        name: name.to_string(),
        capsule: capsule.id,
        size,
        time_ms: capsule.time_ms,
        user: capsule.labels.get(USER_LABEL).cloned(),
        whole: capsule.whole,
    };
    names.map(image).collect()
}

fn list(images: &[Image]) -> String {
    let rows = images.iter().map(|image| {
        let here = if image.whole { "" } else { "partial" };
        let user = image.user.clone().unwrap_or_default();
        [
            image.name.clone(),
            image.capsule.short(),
            image.size.to_string(),
            user,
            ago(image.time_ms),
            here.into(),
        ]
    });
    table(
        ["NAME", "ID", "DISK", "USER", "AGE", ""],
        rows,
        "no images; `whimbrel image ls --available` lists those that can be pulled",
    )
}

fn offered(offers: &ImageOffers) -> String {
    let rows = offers.images.iter().map(|offer| {
        let size = offer.size.map(|size| size.to_string()).unwrap_or_default();
        [offer.name.to_string(), size, offer.location.clone()]
    });
    let problems: String = offers.problems.iter().map(|problem| format!("cannot list {problem}\n")).collect();
    table(["NAME", "FILE", "LOCATION"], rows, "no source of this host offers an image") + &problems
}
