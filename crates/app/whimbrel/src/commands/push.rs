//! `whimbrel push`.

use crate::{
    argument_types::{BalloonArg, PushTarget},
    context::Context,
    error::CliError,
    operation,
};
use whimbrel_api::{CapsuleRef, PushRequest};

const EXAMPLES: &str = "\
Examples:
  whimbrel push web home              at work: suspend web and send it home; says when all of it is there
  whimbrel resume web                 at home: go on; what has not arrived comes when it is touched
  whimbrel push before-upgrade vault  copy a capsule
  whimbrel push web pool:MANAGER/vms  copy the newest capsule of web to a checkpoint pool
  whimbrel push web vault --follow    copy every capsule of web from now on, in the background
  whimbrel push web pool:MANAGER/vms --follow   and what `protect --keep` keeps, each a version
  whimbrel push web --unfollow

A machine that was pushed belongs to the other host: there it is resumed, here no longer (if the other host
is lost for good: `whimbrel resume web --take-back`).";

/// Bring a machine or a capsule to another host
///
/// A running machine is suspended first; for a pool it is not, its newest capsule is copied there. Ctrl-C
/// ends the watching: the other host goes on fetching while it can. Call it again to see how far it is;
/// nothing travels twice.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// A machine, or a capsule (tag or id)
    subject: CapsuleRef,
    /// Where to: a host, or pool:MANAGER[/FOLDER]; may be left out if only one host is trusted
    host: Option<PushTarget>,
    /// Take memory from the guest before it is suspended: auto, off or what to leave it
    #[arg(long, value_name = "auto|off|SIZE", default_value = "auto")]
    balloon: BalloonArg,
    /// Let the machine run; upload every capsule that is taken of it
    #[arg(long, conflicts_with = "unfollow")]
    follow: bool,
    /// End that
    #[arg(long)]
    unfollow: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let (host, pool) = self.host.map_or((None, None), PushTarget::apart);
        let request = PushRequest {
            subject: self.subject,
            host,
            pool,
            balloon: self.balloon.0,
            follow: self.follow,
            unfollow: self.unfollow,
        };
        operation::perform(context, context.client.push(&request)).await
    }
}
