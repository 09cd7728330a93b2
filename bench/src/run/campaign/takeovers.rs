//! `takeovers.lost`: a protected machine with redis and PostgreSQL, whose hosts, processes, cables and
//! witness fail at random; clients check their own histories after each takeover.

use super::Length;
use crate::harness::{Chance, Goal, Row, Samples};
use crate::run::Context;
use crate::run::protect::{ALL_VICTIMS, Kills, disturb};
use anyhow::Result;

/// Minutes of a record, which is one of several in its set.
const MINUTES: u64 = 5;
const MINUTES_QUICK: u64 = 3;

/// The row. A takeover that does not come, or a history that cannot be read, ends the campaign as failed.
pub(crate) fn run(context: &Context) -> Result<Vec<Row>> {
    let length = Length::of(context, MINUTES, MINUTES_QUICK);
    let mut chance = Chance(length.seed);
    let any = |chance: &mut Chance| ALL_VICTIMS[chance.below(ALL_VICTIMS.len() as u64) as usize];
    let Kills { sums, split, of } = disturb(&mut chance, |_, chance| length.goes_on().then(|| any(chance)))?;
    let [redis, postgres] = sums.written;
    let kinds: Vec<String> = of.iter().map(|(victim, count)| format!("{count} {victim:?}")).collect();
    let case = format!(
        "{} takeovers in {} min, seed {} ({}), {redis} writes of redis, {postgres} transactions of PostgreSQL, {split} \
         split",
        of.values().sum::<usize>(),
        length.minutes,
        length.seed,
        kinds.join(", ")
    );
    let lost = sums.lost.iter().sum::<u64>() as f64;
    Ok(vec![Row::new("takeovers.lost", case, "writes", &Samples::new(vec![lost])).goal(Goal::AtMost(0.0))])
}
