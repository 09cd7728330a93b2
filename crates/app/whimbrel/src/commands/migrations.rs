//! `whimbrel migrations`: lists past migrations, or shows one of them round by round.

use crate::{
    context::Context,
    error::CliError,
    migration_chart, round_text,
    table::{ago, milliseconds, table},
};
use whimbrel_api::{ApiError, ErrorCode, MigrationEnd, MigrationRecord, RoundInfo};
use whimbrel_core::ByteSize;

const EXAMPLES: &str = "\
Examples:
  whimbrel migrations             a table of all migrations that this host remembers
  whimbrel migrations web         the last migration of web, round by round
  whimbrel migrations 1f0c22a7    the migration with this id";

/// Show past migrations from this host, round by round
///
/// The source remembers its last 100 migrations, including those that failed.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Id of a migration, or name of a machine [default: a table of all]
    #[arg(value_name = "ID|NAME")]
    pub(crate) migration: Option<String>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let all = context.client.migrations().await?;
        let Some(wanted) = self.migration else {
            return context.output.result(&all, |all| list(all));
        };
        let is_it = |record: &&MigrationRecord| record.id.0 == wanted || record.machine.as_str() == wanted;
        let Some(record) = all.iter().find(is_it) else {
            let text = format!("no migration with the id {wanted}, and none of a machine {wanted}");
            let hint = "`whimbrel migrations` lists them on the host that the machine was on";
            return Err(CliError::Operation(ApiError::new(ErrorCode::NotFound, text).with_hint(hint)));
        };
        context.output.result(record, describe)
    }
}

fn list(all: &[MigrationRecord]) -> String {
    let rows = all.iter().map(|record| {
        let downtime = match &record.end {
            MigrationEnd::Moved { downtime_ms, .. } => milliseconds(*downtime_ms),
            MigrationEnd::Failed { .. } => "failed".to_owned(),
        };
        let (id, machine, to) = (&record.id, &record.machine, &record.request.host);
        let (rounds, total) = (record.rounds.len(), milliseconds(record.total_ms));
        [
            id.to_string(),
            machine.to_string(),
            to.to_string(),
            rounds.to_string(),
            total,
            downtime,
            ago(record.started_ms),
        ]
    });
    table(
        ["ID", "MACHINE", "TO", "ROUNDS", "TOOK", "DOWNTIME", "AGE"],
        rows,
        "no past migrations from this host",
    )
}

fn describe(record: &MigrationRecord) -> String {
    let end = match &record.end {
        MigrationEnd::Moved { stopped_by, pause, .. } => {
            let parts = pause.as_ref().map(round_text::pause_parts).unwrap_or_default();
            format!("paused because {stopped_by}\n{parts}")
        }
        MigrationEnd::Failed { reason } => format!("failed: {reason}\n"),
    };
    let rows = (1..).zip(&record.rounds).map(|(number, round)| row(number, round));
    let header =
        ["ROUND", "START", "TOOK", "PAGES", "SENT", "RATE", "LIMIT", "DIRTY", "WAITED", "LEFT", "PREDICTED"];
    format!("{}\n{}\n{end}", migration_chart::draw(record), table(header, rows, "no round was completed"))
}

fn row(number: u32, round: &RoundInfo) -> [String; 11] {
    [
        number.to_string(),
        milliseconds(round.begun_ms),
        milliseconds(round.ms),
        round_text::pages(round.pages).to_string(),
        ByteSize(round.bytes).to_string(),
        round_text::spoken(round_text::rate(round)),
        round.limit.map_or("none".to_owned(), |limit| round_text::spoken(limit.0 as f64 * 8.0)),
        round_text::spoken(round_text::dirty_rate(round)),
        round_text::pages(round.skipped).to_string(),
        round_text::pages(round.left).to_string(),
        round.downtime_ms.map_or(String::new(), milliseconds),
    ]
}
