//! `whimbrel schedule`: work that the daemon does by itself.

use crate::{
    argument_types::{DurationArg, PushTarget, bucket},
    context::Context,
    error::CliError,
    output::Removed,
    table::{ago, count, fields, table, until},
};
use clap::Subcommand;
use std::time::Duration;
use whimbrel_api::{
    Retention, ScheduleInfo, ScheduleReport, ScheduleRequest, ScheduleRunRequest, ScheduledRun, ScheduledWork,
};
use whimbrel_core::{MachineName, Utc};

const EXAMPLES: &str = "\
Examples:
  whimbrel schedule create nightly checkpoint web --every 1d --at 3h --daily 7 --weekly 4 --monthly 6
  whimbrel schedule create hourly checkpoint db --every 1h --last 24
  whimbrel schedule create offsite push web --to beta --every 1d --at 4h --daily 7
  whimbrel schedule create vault push web --to s3://vault/vms --every 1d --daily 30
  whimbrel schedule create vault-tidy gc s3://vault/vms --every 7d
  whimbrel schedule create check verify --every 7d
  whimbrel schedule create tidy gc --every 1d
  whimbrel schedule run nightly --dry-run      what the rule would remove now
  whimbrel schedule show nightly               its last runs, and its capsules

Runs that were missed are made up for by one. A schedule removes only tags that it has made, never its newest one, and \
nothing after a failed run.";

/// Manage work that the daemon does by itself, like nightly checkpoints
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Create a schedule
    Create {
        /// Name for the schedule
        name: MachineName,
        #[command(subcommand)]
        work: Work,
    },
    /// List the schedules
    Ls,
    /// Show the last runs of a schedule, and its capsules
    Show {
        /// Name of the schedule
        name: MachineName,
    },
    /// Remove a schedule; its capsules stay
    Rm {
        /// Name of the schedule
        name: MachineName,
    },
    /// Run a schedule now, and wait for the end
    Run {
        /// Name of the schedule
        name: MachineName,
        /// Change nothing; print which tags the rule would remove
        #[arg(long)]
        dry_run: bool,
    },
}

/// Interval and time of a schedule.
#[derive(Debug, clap::Args)]
struct When {
    /// Interval, from a minute to a year
    #[arg(long, value_name = "DURATION")]
    every: DurationArg,
    /// Shift of the runs, like 3h for 3 o'clock UTC with an interval of a day
    #[arg(long, value_name = "DURATION", default_value = "0s")]
    at: DurationArg,
}

#[derive(Debug, Subcommand)]
enum Work {
    /// Take a capsule of a running machine, and remove old ones
    Checkpoint {
        /// Name of the machine
        machine: MachineName,
        #[command(flatten)]
        when: When,
        /// Take disk-only capsules
        #[arg(long)]
        disks_only: bool,
        #[command(flatten)]
        keep: Keep,
    },
    /// Copy the newest capsule of a machine to a host, a pool or a bucket
    Push {
        /// Name of the machine
        machine: MachineName,
        /// Target: a trusted host, pool:MANAGER[/FOLDER] or s3://BUCKET[/PREFIX]
        #[arg(long, value_name = "HOST|POOL|s3://BUCKET")]
        to: PushTarget,
        #[command(flatten)]
        when: When,
        #[command(flatten)]
        keep: Keep,
    },
    /// Read all stored data and check its digests
    Verify {
        /// Bucket to check, instead of the store of this host
        #[arg(value_name = "s3://BUCKET", value_parser = bucket)]
        bucket: Option<String>,
        #[command(flatten)]
        when: When,
    },
    /// Delete stored data that no capsule needs
    Gc {
        /// Bucket to delete data in, instead of the store of this host
        #[arg(value_name = "s3://BUCKET", value_parser = bucket)]
        bucket: Option<String>,
        #[command(flatten)]
        when: When,
    },
}

/// Rule of retention; without it all capsules stay.
#[derive(Debug, clap::Args)]
struct Keep {
    /// Number of newest capsules to retain [default: all, if no other number is given]
    #[arg(long, value_name = "N")]
    last: Option<u32>,
    /// Number of hours of which the newest capsule is retained
    #[arg(long, value_name = "N")]
    hourly: Option<u32>,
    /// Number of days of which the newest capsule is retained
    #[arg(long, value_name = "N")]
    daily: Option<u32>,
    /// Number of weeks of which the newest capsule is retained
    #[arg(long, value_name = "N")]
    weekly: Option<u32>,
    /// Number of months of which the newest capsule is retained
    #[arg(long, value_name = "N")]
    monthly: Option<u32>,
    /// Remove even the newest capsule if the numbers say so
    #[arg(long)]
    may_empty: bool,
}

impl Keep {
    fn rule(self) -> Option<Retention> {
        let all = [self.last, self.hourly, self.daily, self.weekly, self.monthly];
        let [last, hourly, daily, weekly, monthly] = all.map(Option::unwrap_or_default);
        let given = self.may_empty || all.iter().any(Option::is_some);
        given.then_some(Retention { last, hourly, daily, weekly, monthly, may_empty: self.may_empty })
    }
}

impl Work {
    fn apart(self) -> (ScheduledWork, When) {
        match self {
            Self::Checkpoint { machine, when, disks_only, keep } => {
                (ScheduledWork::Checkpoint { machine, disks_only, retain: keep.rule() }, when)
            }
            Self::Push { machine, to, when, keep } => {
                let ((host, pool), retain) = (to.apart(), keep.rule());
                (ScheduledWork::Push { machine, host, pool, retain }, when)
            }
            Self::Verify { bucket, when } => (ScheduledWork::Verify { bucket }, when),
            Self::Gc { bucket, when } => (ScheduledWork::Gc { bucket }, when),
        }
    }
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let (client, output) = (&context.client, &context.output);
        match self.action {
            Action::Create { name, work } => {
                let (work, when) = work.apart();
                let (every_ms, offset_ms) = (when.every.as_ms(), when.at.as_ms());
                let request = ScheduleRequest { name, work, every_ms, offset_ms };
                let made = client.create_schedule(&request).await?;
                output.result(&made, |made| {
                    format!("{}: runs in {}\n", made.schedule.name, until(made.next_ms))
                })
            }
            Action::Ls => output.result(client.schedules().await?.as_slice(), list),
            Action::Show { name } => output.result(&client.schedule(&name).await?, show),
            Action::Rm { name } => {
                client.delete_schedule(&name).await?;
                output.result(&Removed::one(&name), |removed| removed.sentence("removed"))
            }
            Action::Run { name, dry_run } => {
                let done = client.run_schedule(&name, &ScheduleRunRequest { dry_run }).await?;
                output.result(&done, report)?;
                match done.run {
                    Some(run) if !run.succeeded => Err(CliError::ScheduleFailed { name }),
                    _ => Ok(()),
                }
            }
        }
    }
}

fn work_of(work: &ScheduledWork) -> String {
    match work {
        ScheduledWork::Checkpoint { machine, disks_only: false, .. } => format!("checkpoint {machine}"),
        ScheduledWork::Checkpoint { machine, .. } => format!("checkpoint {machine}, disks only"),
        ScheduledWork::Push { machine, host, pool, .. } => {
            let to = host.as_ref().map(ToString::to_string).or(pool.clone()).unwrap_or_default();
            format!("push {machine} to {to}")
        }
        ScheduledWork::Verify { bucket: Some(bucket) } => format!("verify {bucket}"),
        ScheduledWork::Verify { bucket: None } => "verify".to_owned(),
        ScheduledWork::Gc { bucket: Some(bucket) } => format!("gc of {bucket}"),
        ScheduledWork::Gc { bucket: None } => "gc".to_owned(),
    }
}

fn rule_of(work: &ScheduledWork) -> String {
    let (ScheduledWork::Checkpoint { retain: Some(rule), .. }
    | ScheduledWork::Push { retain: Some(rule), .. }) = work
    else {
        return "all".to_owned();
    };
    let counts =
        [(rule.last, "last"), (rule.hourly, "hourly"), (rule.daily, "daily"), (rule.weekly, "weekly")];
    let counts = counts.into_iter().chain([(rule.monthly, "monthly")]).filter(|(count, _)| *count > 0);
    let texts: Vec<_> = counts.map(|(count, kind)| format!("{count} {kind}")).collect();
    if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
}

fn outcome(run: &ScheduledRun) -> String {
    if run.succeeded { run.text.clone() } else { format!("FAILED: {}", run.text) }
}

fn list(all: &[ScheduleInfo]) -> String {
    let rows = all.iter().map(|it| {
        let last = it.runs.last();
        let next = if it.running { "runs now".to_owned() } else { format!("in {}", until(it.next_ms)) };
        [
            it.schedule.name.to_string(),
            work_of(&it.schedule.work),
            crate::table::span(Duration::from_millis(it.schedule.every_ms)),
            next,
            last.map(|run| format!("{} ago", ago(run.started_ms))).unwrap_or_default(),
            last.map(outcome).unwrap_or_default(),
        ]
    });
    table(
        ["NAME", "WORK", "EVERY", "NEXT", "LAST", "OUTCOME"],
        rows,
        "no schedules; create one with `whimbrel schedule create NAME checkpoint MACHINE --every 1d --daily 7`",
    )
}

fn show(it: &ScheduleInfo) -> String {
    let text = fields(&[
        ("name", it.schedule.name.to_string()),
        ("work", work_of(&it.schedule.work)),
        ("every", crate::table::span(Duration::from_millis(it.schedule.every_ms))),
        ("next", Utc::from_ms(it.next_ms).to_string()),
        ("retains", rule_of(&it.schedule.work)),
    ]);
    let rows = it.runs.iter().rev().map(|run| {
        let took = crate::table::milliseconds(run.ended_ms.saturating_sub(run.started_ms) as f64);
        [Utc::from_ms(run.started_ms).to_string(), took, outcome(run)]
    });
    let runs = table(["BEGAN", "TOOK", "OUTCOME"], rows, "no runs yet");
    let tags: String = it.tags.iter().rev().map(|tag| format!("{tag}\n")).collect();
    format!("{text}\n{runs}\n{}{tags}", count(it.tags.len() as u64, "capsule") + "\n")
}

fn report(report: &ScheduleReport) -> String {
    match &report.run {
        Some(run) => outcome(run) + "\n",
        None => {
            let line = |tag: &String| format!("would remove {tag}\n");
            let removed: String = report.removed.iter().map(line).collect();
            let retained: String = report.retained.iter().map(|tag| format!("retains {tag}\n")).collect();
            format!("{removed}{retained}")
        }
    }
}
