//! `whimbrel untag`: removes names of capsules.

use crate::{capsule_text, context::Context, error::CliError, operation, output::Removed};
use std::{fmt, str::FromStr};
use whimbrel_api::{BucketRequest, is_bucket};
use whimbrel_core::{NameError, RefName};

const EXAMPLES: &str = "\
Examples:
  whimbrel untag before-upgrade
  whimbrel untag monday tuesday && whimbrel gc
  whimbrel untag s3://vault/vms/monday && whimbrel gc s3://vault/vms";

/// Name of a capsule here, or in a bucket.
#[derive(Debug, Clone)]
struct NamePlace {
    bucket: Option<String>,
    name: RefName,
}

impl FromStr for NamePlace {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Ok(match text.rsplit_once('/').filter(|_| is_bucket(text)) {
            Some((bucket, name)) => Self { bucket: Some(bucket.to_owned()), name: name.parse()? },
            None => Self { bucket: None, name: text.parse()? },
        })
    }
}

impl fmt::Display for NamePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bucket.iter().try_for_each(|bucket| write!(f, "{bucket}/"))?;
        self.name.fmt(f)
    }
}

/// Remove names of capsules
///
/// `whimbrel gc` deletes capsules that have no name left. Children of such a capsule, and machines that are
/// based on it, stay complete.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Tag, or machine (the name of its newest capsule); s3://BUCKET/ in front names one in a bucket
    #[arg(required = true, value_name = "NAME")]
    names: Vec<NamePlace>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        for place in &self.names {
            let name = &place.name;
            if let Some(bucket) = place.bucket.clone() {
                let request = BucketRequest { bucket, untag: Some(name.clone()), gc: false, verify: false };
                operation::complete(context, context.client.bucket(&request)).await?;
                continue;
            }
            let left = context.client.remove(name).await?;
            if let Some(note) = capsule_text::left_behind(&left) {
                context.output.remark(&format!("note: {name} named {}: {note}", left.capsule.short()));
            }
        }
        context.output.result(&Removed::many(&self.names), |removed| removed.sentence("removed"))
    }
}

/// Arguments of the old name `rm`. People try it to delete a machine, so names of machines are refused.
#[derive(Debug, clap::Args)]
pub(crate) struct OldArgs {
    #[command(flatten)]
    args: Args,
}

impl OldArgs {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machines = context.client.machines().await?;
        let is_machine = |place: &&NamePlace| {
            place.bucket.is_none() && machines.iter().any(|one| one.name.as_str() == place.name.as_str())
        };
        match self.args.names.iter().find(is_machine) {
            Some(name) => Err(CliError::Usage {
                problem: format!("{name} is a machine"),
                hint: format!(
                    "`whimbrel delete {name}` deletes a machine, `whimbrel untag {name}` a name of a capsule"
                ),
            }),
            None => self.args.run(context).await,
        }
    }
}
