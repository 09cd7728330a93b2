//! One line of a result: what was measured, what the peer did in the same run, and whether the goal is met.

use super::Samples;
use serde::Serialize;

/// What a value should be for the row to count as met.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Goal {
    /// The value, in the row's unit, is not above this.
    AtMost(f64),
    /// The value, in the row's unit, is not below this.
    AtLeast(f64),
    /// The value is not above this many times the peer's.
    PeerAtMost(f64),
    /// The value is not below this many times the peer's.
    PeerAtLeast(f64),
}

/// One line of a result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Row {
    /// Name of the row, `family.what`.
    pub(crate) row: &'static str,
    /// Which of several, where a row has several.
    pub(crate) case: String,
    /// Unit of `value`, `peer_value`, `min` and `max`.
    pub(crate) unit: &'static str,
    /// Median of ours.
    pub(crate) value: f64,
    /// Who it is compared with.
    pub(crate) peer: Option<String>,
    /// Median of the peer.
    pub(crate) peer_value: Option<f64>,
    /// `value / peer_value`.
    pub(crate) ratio: Option<f64>,
    /// The goal in words.
    pub(crate) goal: Option<String>,
    /// Whether the goal is met; absent where there is none.
    pub(crate) met: Option<bool>,
    /// How many times ours was measured.
    pub(crate) n: usize,
    /// Smallest of ours.
    pub(crate) min: f64,
    /// Largest of ours.
    pub(crate) max: f64,
}

impl Row {
    /// A row with no peer and no goal yet.
    pub(crate) fn new(
        row: &'static str,
        case: impl Into<String>,
        unit: &'static str,
        ours: &Samples,
    ) -> Self {
        Self {
            row,
            case: case.into(),
            unit,
            value: ours.median(),
            peer: None,
            peer_value: None,
            ratio: None,
            goal: None,
            met: None,
            n: ours.count(),
            min: ours.min(),
            max: ours.max(),
        }
    }

    /// Takes so many percent of ours as the value in place of the median.
    pub(crate) fn percentile(mut self, percent: usize, ours: &Samples) -> Self {
        self.value = ours.percentile(percent);
        self
    }

    /// Adds what `peer` did in the same run.
    pub(crate) fn against(mut self, peer: impl Into<String>, theirs: &Samples) -> Self {
        self.peer = Some(peer.into());
        self.peer_value = Some(theirs.median());
        self.ratio = (theirs.median() != 0.0).then(|| self.value / theirs.median());
        self
    }

    /// Judges the row. A goal relative to a peer that was not measured is not met.
    pub(crate) fn goal(mut self, goal: Goal) -> Self {
        let ratio = self.ratio;
        let (text, met) = match goal {
            Goal::AtMost(limit) => (format!("<= {limit} {}", self.unit), self.value <= limit),
            Goal::AtLeast(limit) => (format!(">= {limit} {}", self.unit), self.value >= limit),
            Goal::PeerAtMost(times) => (format!("<= {times} x peer"), ratio.is_some_and(|r| r <= times)),
            Goal::PeerAtLeast(times) => (format!(">= {times} x peer"), ratio.is_some_and(|r| r >= times)),
        };
        self.goal = Some(text);
        self.met = Some(met);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(value: f64) -> Row {
        Row::new("a.b", "", "ms", &Samples::new(vec![value]))
    }

    #[test]
    fn a_goal_is_judged_in_its_direction() {
        assert_eq!(row(2.0).goal(Goal::AtMost(2.0)).met, Some(true));
        assert_eq!(row(2.1).goal(Goal::AtMost(2.0)).met, Some(false));
        assert_eq!(row(2.1).goal(Goal::AtLeast(2.0)).met, Some(true));
        let peer = Samples::new(vec![4.0]);
        assert_eq!(row(2.0).against("p", &peer).goal(Goal::PeerAtMost(0.5)).met, Some(true));
        assert_eq!(row(2.0).against("p", &peer).goal(Goal::PeerAtLeast(0.6)).met, Some(false));
    }

    #[test]
    fn a_missing_peer_never_meets_a_goal_about_it() {
        assert_eq!(row(0.0).goal(Goal::PeerAtMost(9.0)).met, Some(false));
        let nothing = Samples::new(vec![0.0]);
        assert_eq!(row(0.0).against("p", &nothing).goal(Goal::PeerAtMost(9.0)).met, Some(false));
    }
}
