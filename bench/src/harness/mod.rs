//! What every experiment shares: samples and their median, rows with a goal, the report, the machine it ran
//! on.

mod chance;
mod machine;
mod report;
mod row;
mod samples;
mod scratch;
mod sweeper;

pub(crate) use chance::Chance;
pub(crate) use report::{Report, number};
pub(crate) use row::{Goal, Row};
pub(crate) use samples::{Samples, alternate, in_turn};
pub(crate) use scratch::scratch;
pub(crate) use sweeper::Sweeper;
