//! `whimbrel report`.

use crate::{
    context::Context,
    error::CliError,
    picture::{svg, text},
    round_text,
    table::{ago, milliseconds, table},
};
use std::path::{Path, PathBuf};
use whimbrel_api::{ApiError, ErrorCode, MigrationEnd, MigrationRecord, RoundInfo};
use whimbrel_core::ByteSize;

const EXAMPLES: &str = "\
Examples:
  whimbrel report                    the migrations that this host remembers
  whimbrel report web                how web moved away from here last
  whimbrel report web --svg web.svg  the same as a picture in a file";

/// Show how a machine moved away: each round's rate, bytes and what was dirtied meanwhile
///
/// The host that a machine was on remembers its last 100 migrations, those that failed included.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The migration's id, or the machine; all that are remembered if absent
    #[arg(value_name = "ID|NAME")]
    migration: Option<String>,
    /// Write the picture to a file
    #[arg(long, value_name = "FILE", requires = "migration")]
    svg: Option<PathBuf>,
    /// The same as PNG
    #[arg(long, value_name = "FILE", requires = "migration")]
    png: Option<PathBuf>,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let all = context.client.migrations().await?;
        let Some(wanted) = self.migration else {
            return context.output.result(&all, |all| list(all));
        };
        let is_it = |record: &&MigrationRecord| record.id.0 == wanted || record.machine.as_str() == wanted;
        let Some(record) = all.iter().find(is_it) else {
            let text = format!("no migration of that id or of a machine {wanted} is remembered here");
            let hint = "`whimbrel report` lists them; the host that the machine was on remembers";
            return Err(CliError::Operation(ApiError::new(ErrorCode::NotFound, text).with_hint(hint)));
        };
        if let Some(path) = &self.svg {
            write(path, svg::draw(record).map(String::into_bytes))?;
        }
        if let Some(path) = &self.png {
            write(path, svg::draw_png(record))?;
        }
        context.output.result(record, describe)
    }
}

fn write(path: &Path, picture: Result<Vec<u8>, String>) -> Result<(), CliError> {
    let failed = CliError::io("write the picture");
    let picture = picture.map_err(std::io::Error::other);
    picture.and_then(|picture| std::fs::write(path, picture)).map_err(failed)
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
        "no machine has moved away from here",
    )
}

fn describe(record: &MigrationRecord) -> String {
    let end = match &record.end {
        MigrationEnd::Moved { stopped_by, pause, .. } => {
            let parts = pause.as_ref().map(round_text::pause_parts).unwrap_or_default();
            format!("paused because {stopped_by}\n{parts}")
        }
        MigrationEnd::Failed { reason } => format!("it failed: {reason}\n"),
    };
    let rows = (1..).zip(&record.rounds).map(|(number, round)| row(number, round));
    let header =
        ["ROUND", "BEGUN", "TOOK", "PAGES", "SENT", "RATE", "LIMIT", "DIRTIED AT", "WAITED", "LEFT", "TO GO"];
    format!("{}\n{}\n{end}", text::draw(record), table(header, rows, "no round ended"))
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
