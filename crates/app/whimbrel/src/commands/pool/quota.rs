//! Quotas of folders and members: `whimbrel pool quota`.

use super::PoolArgs;
use crate::{context::Context, error::CliError, table::table};
use serde::Serialize;
use tokio::runtime::Runtime;
use whimbrel_core::ByteSize;
use whimbrel_pool::protocol::{QuotaInfo, QuotaSubject};

const EXAMPLES: &str = "\
Examples:
  whimbrel pool quota --manager MANAGER                        list quotas, and what counts against each
  whimbrel pool quota /blast 2T --manager MANAGER              all versions of all files below /blast
  whimbrel pool quota --of-member ada 500G --manager MANAGER   all versions that ada has written
  whimbrel pool quota /blast none --manager MANAGER            no quota any more

All versions count, as they are read: what two of them have in common counts for both.";

/// List quotas, or limit the bytes of a folder or a member
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Quota {
    /// Folder, like /blast, with everything below it; with --of-member, the size
    #[arg(value_name = "FOLDER")]
    folder: Option<String>,
    /// Most bytes of all versions, like 2T; none removes the quota
    #[arg(value_name = "SIZE")]
    size: Option<String>,
    /// Name of a member, as it was admitted, in place of a folder
    #[arg(long, value_name = "NAME")]
    of_member: Option<String>,
    #[command(flatten)]
    member: PoolArgs,
}

/// What to change.
#[derive(Debug)]
enum Change {
    Folder(String, Option<u64>),
    Member(String, Option<u64>),
    Nothing,
}

#[derive(Debug, Serialize)]
struct Quotas {
    quotas: Vec<QuotaInfo>,
}

fn limit(text: &str) -> Result<Option<u64>, CliError> {
    let bad = |error: whimbrel_core::ParseSizeError| CliError::Usage {
        problem: error.to_string(),
        hint: "write a size like 500G, or none".to_owned(),
    };
    if text == "none" { Ok(None) } else { text.parse::<ByteSize>().map(|size| Some(size.0)).map_err(bad) }
}

impl Quota {
    fn change(&self) -> Result<Change, CliError> {
        Ok(match (&self.of_member, &self.folder, &self.size) {
            (None, None, None) => Change::Nothing,
            (None, Some(folder), Some(size)) => Change::Folder(folder.clone(), limit(size)?),
            (Some(name), Some(size), None) => Change::Member(name.clone(), limit(size)?),
            _ => {
                return Err(CliError::Usage {
                    problem: "a quota has a folder or --of-member, and a size".to_owned(),
                    hint:
                        "write `whimbrel pool quota /blast 2T` or `whimbrel pool quota --of-member ada 500G`"
                            .to_owned(),
                });
            }
        })
    }

    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let change = self.change()?;
        let pool = self.member.pool(runtime)?;
        let quotas = pool.block(async {
            match change {
                Change::Nothing => {}
                Change::Folder(path, bytes) => {
                    let folder = pool.find(&path).await?.id;
                    pool.set_quota(QuotaSubject::Folder(folder), bytes).await?;
                }
                Change::Member(name, bytes) => pool.set_quota(QuotaSubject::Member(name), bytes).await?,
            }
            pool.quotas().await
        });
        let quotas = Quotas { quotas: quotas.map_err(CliError::Pool)? };
        context.output.result(&quotas, |quotas| quotas_text(&quotas.quotas))
    }
}

/// A table of quotas.
pub(super) fn quotas_text(quotas: &[QuotaInfo]) -> String {
    let rows = quotas.iter().map(|quota| {
        let of = quota.folder.clone().or_else(|| quota.member.clone()).unwrap_or_default();
        let part = (u128::from(quota.used) * 100).checked_div(u128::from(quota.bytes)).unwrap_or(100);
        [of, ByteSize(quota.used).to_string(), ByteSize(quota.bytes).to_string(), format!("{part} %")]
    });
    table(["QUOTA OF", "USED", "LIMIT", ""], rows, "no quotas")
}
