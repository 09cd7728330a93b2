//! Calibration of predictions by past migrations: the cost of a page, and the overhead of a stop.
//!
//! Medians are used, because single stops differ by several times on a busy machine. The overhead of a stop
//! is nearly the same for all machines of a host, so all recent migrations count. The cost of pages is taken
//! from migrations of the same machine, if there are any.

use std::time::Duration;
use whimbrel_api::{MigrateMode, MigrationEnd, MigrationRecord, RoundInfo};
use whimbrel_core::MachineName;

/// Number of newest migrations that count.
const RECENT: usize = 20;
/// Smallest round that counts for the time of a page.
const TELLING_PAGES: u64 = 100;

/// Costs as far as past migrations show them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Calibration {
    /// Number of migrations that counted.
    pub(crate) from: u64,
    pub(crate) page_bytes: Option<f64>,
    pub(crate) again_bytes: Option<f64>,
    pub(crate) page_time: Option<Duration>,
    pub(crate) fixed: Option<Duration>,
}

impl Calibration {
    /// Calibration for a machine by `past` migrations, newest first.
    pub(crate) fn of(past: &[MigrationRecord], machine: &MachineName) -> Self {
        let moved = past.iter().filter(|record| record.request.mode == MigrateMode::Live);
        let moved: Vec<_> = moved.filter(|record| fixed_ms(record).is_some()).take(RECENT).collect();
        let own: Vec<_> = moved.iter().filter(|record| record.machine == *machine).copied().collect();
        let like = if own.is_empty() { &moved } else { &own };
        let first = like.iter().filter_map(|record| bytes_a_page(record.rounds.get(..1)?));
        let again = like.iter().filter_map(|record| bytes_a_page(record.rounds.get(1..)?));
        let again_rounds = like.iter().flat_map(|record| record.rounds.iter().skip(1));
        let times = again_rounds.filter(|round| round.pages >= TELLING_PAGES);
        let times = times.map(|round| round.ms / round.pages as f64);
        let ms = |ms: f64| Duration::try_from_secs_f64(ms / 1e3).ok();
        Self {
            from: moved.len() as u64,
            page_bytes: at(0.5, first.collect()),
            again_bytes: at(0.5, again.collect()),
            // Over a slow link most rounds wait for the link, so the fast rounds count.
            page_time: at(0.25, times.collect()).and_then(ms),
            fixed: at(0.5, moved.iter().filter_map(|record| fixed_ms(record)).collect()).and_then(ms),
        }
    }
}

/// Overhead of a stop; none for a migration that failed.
fn fixed_ms(record: &MigrationRecord) -> Option<f64> {
    let MigrationEnd::Moved { downtime_ms, pause, .. } = &record.end else { return None };
    let pages = match pause {
        Some(pause) => pause.pages_ms,
        None => record.rounds.last()?.ms,
    };
    Some((downtime_ms - pages).max(0.0))
}

fn bytes_a_page(rounds: &[RoundInfo]) -> Option<f64> {
    let (bytes, pages) = rounds.iter().fold((0, 0), |(bytes, pages), r| (bytes + r.bytes, pages + r.pages));
    (pages > 0 && bytes > 0).then(|| bytes as f64 / pages as f64)
}

fn at(part: f64, mut values: Vec<f64>) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values.get((values.len() as f64 * part) as usize).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn moved(machine: &str, downtime: f64, rounds: &[(u64, u64, f64)]) -> MigrationRecord {
        let rounds =
            rounds.iter().map(|(pages, bytes, ms)| json!({"pages": pages, "bytes": bytes, "ms": ms}));
        let record = json!({
            "id": "00c0ffee", "machine": machine, "from": "alpha", "started_ms": 7, "request": {"host": "beta"},
            "total_ms": 1.0, "rounds": rounds.collect::<Vec<_>>(), "end": "moved", "downtime_ms": downtime,
            "wire_bytes": 1, "stopped_by": "little_left", "network": {"kind": "no_ports"},
        });
        serde_json::from_value(record).unwrap()
    }

    #[test]
    fn one_slow_stop_among_many_says_nothing_and_pages_are_the_machines_own() {
        let other = |downtime| moved("db", downtime, &[(10, 10_000, 5.0), (10, 4_000, 5.0), (1, 1, 2.0)]);
        let own = moved(
            "web",
            14.0,
            &[(1000, 2_000_000, 20.0), (200, 40_000, 4.0), (200, 40_000, 8.0), (1, 1, 1.0)],
        );
        let past = [other(90.0), own, other(13.0), other(15.0), other(14.0)];
        let learned = Calibration::of(&past, &"web".parse().unwrap());
        assert_eq!((learned.from, learned.page_bytes), (5, Some(2000.0)));
        assert_eq!(learned.again_bytes.map(f64::round), Some(200.0));
        assert_eq!(learned.page_time, Some(Duration::from_micros(20)));
        assert_eq!(learned.fixed, Some(Duration::from_millis(13)));
        let new = Calibration::of(&past, &"new".parse().unwrap());
        assert_eq!((new.page_bytes, new.fixed), (Some(1000.0), learned.fixed));
    }

    #[test]
    fn migrations_that_failed_or_stopped_first_teach_nothing() {
        let mut failed = moved("web", 14.0, &[(1000, 2_000_000, 20.0)]);
        failed.end = MigrationEnd::Failed { reason: "on purpose".into() };
        let mut stopped = moved("web", 1400.0, &[(1000, 2_000_000, 1400.0)]);
        stopped.request.mode = MigrateMode::Stop;
        let web = "web".parse().unwrap();
        assert_eq!(Calibration::of(&[failed, stopped], &web), Calibration::default());
        assert_eq!(Calibration::of(&[], &web), Calibration::default());
    }
}
