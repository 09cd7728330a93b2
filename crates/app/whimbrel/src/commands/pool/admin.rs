//! Administration of a pool: `whimbrel pool status`, `policy`, `versions`, `prune` and `drain`.

use super::{PoolArgs, quota::quotas_text, removal::labels_text};
use crate::{
    argument_types::DurationArg,
    context::Context,
    error::CliError,
    metrics::status_page,
    output,
    table::{count, fields, span, table},
};
use clap::ValueEnum;
use serde::Serialize;
use std::{str::FromStr, time::Duration};
use tokio::runtime::Runtime;
use whimbrel_core::ByteSize;
use whimbrel_pool::{
    chunk::Chunking,
    erasure::{Coding, PieceCounts, PieceCountsError},
    policy::{Policy, Safety},
    protocol::{MemberLabels, MemberReport, PoolStatus, Purged, QuotaInfo, ScrubReport, VersionInfo},
};

/// Age from which versions are kept in pieces, if none is named.
const CODE_AFTER: Duration = Duration::from_secs(30 * 86_400);

/// Show benefactors, space, missing copies and the gain of deduplication
#[derive(Debug, clap::Args)]
pub(super) struct Status {
    #[command(flatten)]
    member: PoolArgs,
    /// Print the status in the text format of Prometheus
    #[arg(long)]
    metrics: bool,
}

/// Show or change the policy of a folder or file
#[derive(Debug, clap::Args)]
pub(super) struct SetPolicy {
    /// Folder, like /blast, with everything below it, or a file
    path: String,
    #[command(flatten)]
    member: PoolArgs,
    /// Number of copies of every chunk
    #[arg(long, value_name = "N")]
    copies: Option<u8>,
    /// Number of copies with which close returns
    #[arg(long)]
    safety: Option<When>,
    /// Number of benefactors to which a file is written at once
    #[arg(long, alias = "width", value_name = "N")]
    stripe_width: Option<u16>,
    /// Chunking: content:AVERAGE, fixed:SIZE or pages:AVERAGE
    #[arg(long, alias = "cut", value_name = "CHUNKING")]
    chunking: Option<Cut>,
    /// Retain the newest N versions
    #[arg(long, value_name = "N")]
    keep_last: Option<u32>,
    /// Retain versions younger than this
    #[arg(long, value_name = "DURATION")]
    keep_for: Option<DurationArg>,
    /// Retain the newest version of each of the last N days
    #[arg(long, value_name = "N")]
    keep_daily: Option<u32>,
    /// Retain the newest version of each of the last N weeks
    #[arg(long, value_name = "N")]
    keep_weekly: Option<u32>,
    /// Keep what is older than --code-after in pieces: DATA+PARITY, like 4+2, or inherit
    #[arg(long, value_name = "PIECES")]
    code: Option<Code>,
    /// Age from which versions are kept in pieces [default: 30d]
    #[arg(long, value_name = "DURATION", requires = "code")]
    code_after: Option<DurationArg>,
    /// Retain all versions
    #[arg(long, conflicts_with_all = ["keep_last", "keep_for", "keep_daily", "keep_weekly"])]
    keep_all: bool,
    /// Remove the policy of this path, so that the parent folder's applies
    #[arg(long, conflicts_with_all = ["copies", "safety", "stripe_width", "chunking", "keep_last", "keep_for", "keep_daily", "keep_weekly"])]
    inherit: bool,
}

/// Number of copies with which a write is complete.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum When {
    /// One copy; the others are made within seconds
    Optimistic,
    /// All copies that the policy asks for
    Pessimistic,
}

/// Counts of pieces, as text.
#[derive(Debug, Clone, Copy)]
enum Code {
    Pieces(PieceCounts),
    Inherit,
}

impl FromStr for Code {
    type Err = PieceCountsError;

    fn from_str(text: &str) -> Result<Self, PieceCountsError> {
        if text == "inherit" { Ok(Self::Inherit) } else { text.parse().map(Self::Pieces) }
    }
}

/// The policy of a path, and how old versions are kept.
#[derive(Debug, Serialize)]
struct ShownPolicy {
    #[serde(flatten)]
    policy: Policy,
    coding: Option<Coding>,
}

/// Chunking of files, as text.
#[derive(Debug, Clone, Copy)]
struct Cut(Chunking);

impl FromStr for Cut {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is not a chunking: write fixed:1M, content:256K or pages:1");
        let (way, value) = text.split_once(':').ok_or_else(bad)?;
        let size =
            || value.parse::<ByteSize>().ok().and_then(|size| u32::try_from(size.0).ok()).ok_or_else(bad);
        let cutting = match way {
            "fixed" => Chunking::Fixed { size: size()? },
            "content" => Chunking::Content { average: size()? },
            "pages" => Chunking::Pages { average: value.parse().map_err(|_| bad())? },
            _ => return Err(bad()),
        };
        cutting.check().map_err(|error| error.to_string())?;
        Ok(Self(cutting))
    }
}

/// List the versions of a file
#[derive(Debug, clap::Args)]
pub(super) struct Versions {
    /// Path of the file, like /blast/state
    path: String,
    #[command(flatten)]
    member: PoolArgs,
}

/// Delete the versions that no policy retains
#[derive(Debug, clap::Args)]
pub(super) struct Prune {
    /// Delete nothing; list the versions that would be deleted
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    member: PoolArgs,
}

/// Let a benefactor leave when all its chunks are on others
#[derive(Debug, clap::Args)]
pub(super) struct Drain {
    /// Name of the benefactor, as in `whimbrel pool status`
    benefactor: String,
    /// Cancel a drain; the benefactor stays
    #[arg(long, alias = "stop")]
    cancel: bool,
    #[command(flatten)]
    member: PoolArgs,
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

impl Status {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let status = pool.block(pool.status()).map_err(CliError::Pool)?;
        let scrubs = match pool.block(pool.scrubs()) {
            // A manager of an earlier version.
            Err(error) if error.code() == Some(whimbrel_wire::Code::UNKNOWN_KIND) => Vec::new(),
            scrubs => scrubs.map_err(CliError::Pool)?,
        };
        let members = match pool.block(pool.members()) {
            Err(error) if error.code() == Some(whimbrel_wire::Code::UNKNOWN_KIND) => MemberReport::default(),
            members => members.map_err(CliError::Pool)?,
        };
        let quotas = match pool.block(pool.quotas()) {
            Err(error) if error.code() == Some(whimbrel_wire::Code::UNKNOWN_KIND) => Vec::new(),
            quotas => quotas.map_err(CliError::Pool)?,
        };
        if self.metrics {
            return output::write(status_page(&status, &scrubs, &members).as_bytes());
        }
        let scrubs = scrubs.into_iter().map(|(benefactor, scrub)| BenefactorScrub { benefactor, scrub });
        let shown = Shown { status, members, quotas, scrubs: scrubs.collect() };
        context.output.result(&shown, for_people)
    }
}

/// The status of a pool, with what its benefactors say of their scrubs.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    status: PoolStatus,
    #[serde(flatten)]
    members: MemberReport,
    quotas: Vec<QuotaInfo>,
    scrubs: Vec<BenefactorScrub>,
}

#[derive(Debug, Serialize)]
struct BenefactorScrub {
    benefactor: String,
    #[serde(flatten)]
    scrub: ScrubReport,
}

fn scrubbed(scrub: &ScrubReport) -> [String; 3] {
    let part = (u128::from(scrub.bytes) * 100 / u128::from(scrub.of.max(1))).min(100);
    let ended = scrub.ended.map(|age| format!("{} ago", span(Duration::from_secs(age))));
    let late = if scrub.late { ", rate too low for the interval" } else { "" };
    [
        format!("{part} %{late}"),
        ended.unwrap_or_else(|| "-".to_owned()),
        scrub.damaged.max(scrub.last_damaged).to_string(),
    ]
}

fn for_people(shown: &Shown) -> String {
    let status = &shown.status;
    let saved = match status.unique {
        0 => "-".to_owned(),
        unique => format!("{:.1} times", status.logical as f64 / unique as f64),
    };
    let eta = match (status.repair, status.repair_eta) {
        (0, _) => "all chunks have their copies".to_owned(),
        (left, Some(seconds)) => {
            format!("{} to copy, {} left", count(left, "chunk"), span(Duration::from_secs(seconds)))
        }
        (left, None) => format!("{} to copy, no progress", count(left, "chunk")),
    };
    let age = |age| format!("{} ago", span(Duration::from_secs(age)));
    let mut about = vec![
        ("pool", format!("{:016x}", status.pool)),
        ("files", format!("{} in {}", count(status.versions, "version"), count(status.files, "file"))),
        ("bytes", format!("{} stored as {}, {saved}", size(status.logical), size(status.unique))),
        ("repair", eta),
        ("lost", count(status.lost, "chunk")),
        ("writing", count(status.sessions, "session")),
        ("pinned", count(status.pinned, "version")),
        ("backup", shown.members.backup_age.map_or_else(|| "none".to_owned(), age)),
    ];
    if shown.members.crowded > 0 {
        about.push(("too near", count(shown.members.crowded, "chunk")));
    }
    if let Some(left) = shown.members.quarantine {
        about.push(("quarantine", format!("{} left; unknown chunks stay", span(Duration::from_secs(left)))));
    }
    let about = fields(&about);
    let rows = status.benefactors.iter().map(|b| {
        [
            b.name.clone(),
            b.state.clone(),
            size(b.used),
            size(b.free),
            b.chunks.to_string(),
            b.faults.to_string(),
            b.address.clone(),
        ]
    });
    let header = ["BENEFACTOR", "STATE", "USED", "FREE", "CHUNKS", "FAULTS", "ADDRESS"];
    let labels = shown.members.members.iter().filter(|one| one.labels != MemberLabels::default());
    let labels: Vec<_> = labels.map(|one| [one.name.clone(), labels_text(&one.labels)]).collect();
    let mut members = table(header, rows, "no benefactors");
    if !labels.is_empty() {
        members = format!("{members}\n{}", table(["LABELS OF", ""], labels, ""));
    }
    if !shown.quotas.is_empty() {
        members = format!("{members}\n{}", quotas_text(&shown.quotas));
    }
    if shown.scrubs.is_empty() {
        return format!("{about}\n{members}");
    }
    let scrubs = shown.scrubs.iter().map(|of| {
        let [part, ended, damaged] = scrubbed(&of.scrub);
        [of.benefactor.clone(), part, ended, damaged]
    });
    let scrubs = table(["SCRUB OF", "CHECKED", "LAST ROUND", "DAMAGED"], scrubs, "no scrubs");
    format!("{about}\n{members}\n{scrubs}")
}

impl SetPolicy {
    fn changes(&self) -> bool {
        let numbers = self.copies.is_some() || self.stripe_width.is_some() || self.keep_last.is_some();
        let keeps = self.keep_for.is_some()
            || self.keep_daily.is_some()
            || self.keep_weekly.is_some()
            || self.keep_all;
        numbers || keeps || self.safety.is_some() || self.chunking.is_some()
    }

    fn coding(&self, code: Code) -> Option<Coding> {
        let after = self.code_after.map_or(CODE_AFTER, |after| after.0).as_secs();
        match code {
            Code::Pieces(pieces) => Some(Coding { pieces, after }),
            Code::Inherit => None,
        }
    }

    fn apply(&self, mut policy: Policy) -> Policy {
        policy.copies = self.copies.unwrap_or(policy.copies);
        policy.width = self.stripe_width.unwrap_or(policy.width);
        policy.cutting = self.chunking.map_or(policy.cutting, |chunking| chunking.0);
        policy.safety = match self.safety {
            Some(When::Optimistic) => Safety::Optimistic,
            Some(When::Pessimistic) => Safety::Pessimistic,
            None => policy.safety,
        };
        let keep = &mut policy.keep;
        if self.keep_all {
            *keep = Default::default();
        }
        keep.last = self.keep_last.or(keep.last);
        keep.seconds = self.keep_for.map(|span| span.0.as_secs()).or(keep.seconds);
        keep.daily = self.keep_daily.or(keep.daily);
        keep.weekly = self.keep_weekly.or(keep.weekly);
        policy
    }

    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let policy = pool.block(async {
            let folder = pool.find(&self.path).await?.id;
            if self.inherit {
                pool.set_policy(folder, None).await?;
            } else if self.changes() {
                let now = pool.policy(folder).await?.1;
                pool.set_policy(folder, Some(self.apply(now))).await?;
            }
            if let Some(code) = self.code {
                pool.set_coding(folder, self.coding(code)).await?;
            }
            let coding = match pool.coding(folder).await {
                // A manager of an earlier version.
                Err(error) if error.code() == Some(whimbrel_wire::Code::UNKNOWN_KIND) => None,
                coding => coding?.1,
            };
            Ok(ShownPolicy { policy: pool.policy(folder).await?.1, coding })
        });
        context.output.result(&policy.map_err(CliError::Pool)?, |ShownPolicy { policy, coding }| {
            let keep = [
                policy.keep.last.map(|n| format!("the last {n}")),
                policy.keep.seconds.map(|n| format!("all of the last {}", span(Duration::from_secs(n)))),
                policy.keep.daily.map(|n| format!("one a day for {}", count(n.into(), "day"))),
                policy.keep.weekly.map(|n| format!("one a week for {}", count(n.into(), "week"))),
            ];
            let keep: Vec<String> = keep.into_iter().flatten().collect();
            let keep = if keep.is_empty() { "all versions".to_owned() } else { keep.join(", ") };
            fields(&[
                ("copies", policy.copies.to_string()),
                ("safety", format!("{:?}", policy.safety).to_lowercase()),
                ("stripe width", policy.width.to_string()),
                ("chunking", format!("{:?}", policy.cutting)),
                ("retained", keep),
                ("pieces", coding_text(*coding)),
            ])
        })
    }
}

/// How old versions are kept, for people.
fn coding_text(coding: Option<Coding>) -> String {
    let text = |Coding { pieces, after }| format!("{pieces} after {}", span(Duration::from_secs(after)));
    coding.map_or_else(|| "none, old versions have copies too".to_owned(), text)
}

impl Versions {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let versions = pool.block(async { pool.versions(pool.find(&self.path).await?.id).await });
        context.output.result(versions.map_err(CliError::Pool)?.as_slice(), |versions: &[VersionInfo]| {
            let pinned = |v: &VersionInfo| {
                let by_hand = v.pinned.then(|| "pinned".to_owned());
                let held = v.holders.iter().map(|holder| format!("pinned by {holder}"));
                by_hand.into_iter().chain(held).collect::<Vec<_>>().join(", ")
            };
            let rows = versions
                .iter()
                .map(|v| [v.number.to_string(), size(v.size), size(v.sent), v.chunks.to_string(), pinned(v)]);
            table(["VERSION", "SIZE", "SENT", "CHUNKS", ""], rows, "no versions")
        })
    }
}

#[derive(Debug, Serialize)]
struct Drained {
    benefactor: String,
    leaves: bool,
}

impl Drain {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let (benefactor, leaves) = (self.benefactor, !self.cancel);
        pool.block(pool.drain(&benefactor, leaves)).map_err(CliError::Pool)?;
        context.output.result(&Drained { benefactor, leaves }, |done| match done.leaves {
            true => format!("{}: leaves when all its chunks are on other benefactors\n", done.benefactor),
            false => format!("{}: stays\n", done.benefactor),
        })
    }
}

impl Prune {
    pub(super) fn run(self, context: &Context, runtime: &Runtime) -> Result<(), CliError> {
        let pool = self.member.pool(runtime)?;
        let purged = pool.block(pool.purge(self.dry_run)).map_err(CliError::Pool)?;
        let verb = if self.dry_run { "would be deleted" } else { "deleted" };
        context.output.result(purged.as_slice(), |purged: &[Purged]| {
            let stays = |p: &Purged| match &p.pinned_by[..] {
                [] => p.why.clone(),
                by => format!("stays: pinned by {}", by.join(", ")),
            };
            let rows = purged.iter().map(|p| [p.path.clone(), p.version.to_string(), size(p.size), stays(p)]);
            let goes = || purged.iter().filter(|p| p.pinned_by.is_empty());
            let bytes = goes().map(|p| p.size).sum();
            let sum = format!("{} {verb}, {}\n", count(goes().count() as u64, "version"), size(bytes));
            if purged.is_empty() { sum } else { table(["FILE", "VERSION", "SIZE", "WHY"], rows, "") + &sum }
        })
    }
}
