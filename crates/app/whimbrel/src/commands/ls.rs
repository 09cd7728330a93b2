//! `whimbrel ls`: lists capsules of this host or of another one.

use crate::operation;
use crate::{
    capsule_text,
    context::Context,
    error::CliError,
    table::{ago, table},
};
use std::str::FromStr;
use whimbrel_api::{BucketRequest, RemoteCapsule, is_bucket};
use whimbrel_core::{HostName, NameError};

const EXAMPLES: &str = "\
Examples:
  whimbrel ls
  whimbrel ls --from s3://vault/vms
  whimbrel ls --from beta    capsules that beta offers; `whimbrel pull beta:NAME` fetches one
  whimbrel ls --json | jq -r '.[] | select(.machine == \"web\") | .id'";

/// List the capsules in the store
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// List the capsules that a trusted host offers, or those of a bucket
    #[arg(long, value_name = "HOST|s3://BUCKET")]
    from: Option<From>,
}

/// Place whose capsules are listed.
#[derive(Debug, Clone)]
enum From {
    Host(HostName),
    Bucket(String),
}

impl FromStr for From {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if is_bucket(text) { Ok(Self::Bucket(text.to_owned())) } else { text.parse().map(Self::Host) }
    }
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        match self.from {
            Some(From::Bucket(bucket)) => {
                let request = BucketRequest { bucket, untag: None, gc: false, verify: false };
                operation::perform(context, context.client.bucket(&request)).await
            }
            Some(From::Host(host)) => {
                let all = context.client.remote(&host).await?;
                context.output.result(all.as_slice(), remote)
            }
            None => {
                let all = context.client.capsules().await?;
                context.output.result(all.as_slice(), capsule_text::list)
            }
        }
    }
}

fn remote(capsules: &[RemoteCapsule]) -> String {
    let rows = capsules.iter().map(|capsule| {
        [
            capsule.machine.as_ref().map_or(capsule.name.to_string(), ToString::to_string),
            capsule.id.short(),
            ago(capsule.time_ms),
            capsule.memory.to_string(),
            capsule.disks.to_string(),
            if capsule.whole { String::new() } else { "partial".to_owned() },
        ]
    });
    table(["NAME", "ID", "AGE", "MEMORY", "DISKS", ""], rows, "the host offers no capsules to this host")
}
