//! `whimbrel image serve`: gives the images of this host to others, by HTTP, as Incus and Ubuntu give theirs
//! (simplestreams).
//!
//! The folder is all that a client needs, so any web server can serve it too. Who reads is not asked: images
//! are public. What a client must be able to trust is signed ([`publisher::Publisher`]).

mod listener;
mod lists;
mod publisher;

use crate::{
    argument_types::absolute, context::Context, end_signal::told_to_end, error::CliError, table::table,
};
use lists::PublishedImage;
use publisher::Publisher;
use serde::Serialize;
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use whimbrel_api::ImageName;
use whimbrel_core::error_chain;

/// Interval at which it is looked for new images.
const LOOK_EVERY: Duration = Duration::from_secs(30);

const EXAMPLES: &str = "\
Examples:
  whimbrel image serve /srv/images                  all images, now and later, on port 8480
  whimbrel image serve /srv/images mine/web --sign-with ops@example.org
  whimbrel image serve /srv/images --write-only     for a web server that is there already

In /etc/whimbrel/host.toml of another host:
  [[image_sources]]
  kind = \"simplestreams\"
  url = \"http://THIS-HOST:8480/\"";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Folder for the files; other files in it are served too
    #[arg(value_parser = absolute)]
    folder: PathBuf,
    /// Images to serve [default: all that are on this host]
    #[arg(value_name = "IMAGE")]
    images: Vec<ImageName>,
    /// Address to serve them at
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:8480", conflicts_with = "write_only")]
    listen: SocketAddr,
    /// Write the files and end
    #[arg(long)]
    write_only: bool,
    /// Key of gpg(1) by which the lists are signed
    ///
    /// A host whose source has a `keyring` takes images from signed lists only.
    #[arg(long, value_name = "KEY")]
    sign_with: Option<String>,
}

/// Images that are served, for programs.
#[derive(Debug, Serialize)]
struct Served<'a> {
    folder: &'a PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    images: &'a [PublishedImage],
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        if context.remote.is_some() {
            return Err(CliError::Usage {
                problem: "the images of another computer cannot be served from here".to_owned(),
                hint: "run `whimbrel image serve` there".to_owned(),
            });
        }
        let bound = match self.write_only {
            true => None,
            false => Some(listener::bind(self.listen).await.map_err(CliError::io("listen"))?),
        };
        let mut publisher = Publisher::new(context, &self.folder, self.images, self.sign_with)?;
        let images = publisher.publish().await?;
        let address = bound.as_ref().and_then(|listener| listener.local_addr().ok());
        let served = Served { folder: &self.folder, address, images: &images };
        context.output.result(&served, describe)?;
        let Some(bound) = bound else { return Ok(()) };
        let end = told_to_end()?;
        tokio::select! {
            () = listener::serve(bound, self.folder.clone()) => Ok(()),
            ended = keep_up(context, &mut publisher, images.clone()) => ended,
            () = end => Ok(()),
        }
    }
}

/// Publishes what is new. What cannot be published now may be so later: the daemon may be starting.
async fn keep_up(
    context: &Context,
    publisher: &mut Publisher<'_>,
    mut before: Vec<PublishedImage>,
) -> Result<(), CliError> {
    let mut is_told = false;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let published = publisher.publish().await;
        let was_told = std::mem::replace(&mut is_told, published.is_err());
        match published {
            Ok(images) if images == before => {}
            Ok(images) => {
                let names: Vec<_> = images.iter().map(|image| image.name.as_str()).collect();
                context.output.remark(&format!("serving {}", names.join(", ")));
                before = images;
            }
            Err(error @ (CliError::Cancelled { .. } | CliError::Interrupted { .. })) => return Err(error),
            Err(error) if !was_told => {
                context.output.remark(&format!("the images stay as they are: {}", error_chain(&error)));
            }
            Err(_) => {}
        }
    }
}

fn describe(served: &Served<'_>) -> String {
    let rows = served.images.iter().map(|image| [image.name.to_string(), image.bytes.to_string()]);
    let images =
        table(["NAME", "FILE"], rows, "no images yet; `whimbrel image pull` or `image import` makes one");
    let place = match served.address {
        Some(address) => format!("serving them at http://{address}/; Ctrl-C ends it\n"),
        None => format!("written to {}\n", served.folder.display()),
    };
    images + &place
}
