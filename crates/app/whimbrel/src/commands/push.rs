//! `whimbrel push`: sends a machine or a capsule to another host or to a pool.

use crate::{
    argument_types::{BalloonArg, PushTarget},
    context::Context,
    error::CliError,
    operation,
};
use whimbrel_api::{CapsuleRef, PushRequest};

const EXAMPLES: &str = "\
Examples:
  whimbrel push web home                  at work: suspend web, send it home, wait for its arrival
  whimbrel resume web                     at home: continue, at any time
  whimbrel push before-upgrade vault      copy a capsule
  whimbrel push web pool:MANAGER/vms      copy the newest capsule of web to a pool
  whimbrel push web s3://vault/vms        copy it to a bucket
  whimbrel push web vault --continuous    upload every new capsule of web in the background
  whimbrel push web pool:MANAGER/vms --continuous   the same to a pool, with all epoch snapshots
  whimbrel push web --stop-continuous

A machine that was pushed to a host is resumed there and not here. If that host is lost for good, use \
`whimbrel resume web --reclaim`.";

/// Send a machine or a capsule to another host or to a pool
///
/// A push to a host suspends a running machine first. A push to a pool copies its newest capsule and leaves
/// it running. Ctrl-C only ends the progress display: the other host continues to fetch while it can. Call
/// the command again to see the progress.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Machine, or capsule by tag or id
    subject: CapsuleRef,
    /// Target: a host, pool:MANAGER[/FOLDER] or s3://BUCKET[/PREFIX] [default: the trusted host, if there is
    /// only one]
    host: Option<PushTarget>,
    /// Shrink guest memory before the suspend: auto, off, or the size to shrink to
    #[arg(long, value_name = "auto|off|SIZE", default_value = "auto")]
    balloon: BalloonArg,
    /// Leave the machine running and upload every capsule that is taken of it
    #[arg(long, alias = "follow", conflicts_with = "stop_continuous")]
    continuous: bool,
    /// Stop uploading the capsules of the machine
    #[arg(long, alias = "unfollow")]
    stop_continuous: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let (host, pool) = self.host.map_or((None, None), PushTarget::apart);
        let request = PushRequest {
            subject: self.subject,
            host,
            pool,
            balloon: self.balloon.0,
            follow: self.continuous,
            unfollow: self.stop_continuous,
        };
        operation::perform(context, context.client.push(&request)).await
    }
}
