//! Failure domains: which benefactors may fail together. Pure.
//!
//! A benefactor may have labels of its site, rack and host. Copies of a chunk belong into different sites,
//! as far as there are so many, else into different racks, else on different hosts. The domains are a tree:
//! a rack is part of a site. Benefactors without a site count as in one site together, those of a site
//! without a rack as in one rack, and each without a host as on a host of its own. A benefactor that is
//! away at times, such as every night, should not have the only copies.

use crate::protocol::{BenefactorId, MemberLabels};
use std::collections::{BTreeSet, HashMap};

/// Levels of domains, from the largest: site, rack, host.
const LEVELS: usize = 3;

/// The domain of a benefactor on each level.
type Position = [String; LEVELS];

/// The domains of the benefactors whose copies count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Domains {
    /// Empty if no benefactor has labels, so that nothing is computed.
    positions: HashMap<BenefactorId, Position>,
    /// Number of domains on each level.
    counts: [usize; LEVELS],
    /// Benefactors that are always there, if others are not.
    steady: BTreeSet<BenefactorId>,
}

/// Whether a benefactor shares a site, a rack or a host with those that have copies, and before these
/// whether none of all is always there: the greater, the worse. A tree makes it enough to compare so:
/// whoever takes the least gets as many domains of each level as possible.
pub(crate) type Nearness = [bool; LEVELS + 1];

fn position(id: BenefactorId, labels: &MemberLabels) -> Position {
    let MemberLabels { site, rack, host, .. } = labels;
    // Names repeat: each site may have a rack 1.
    let in_rack = format!("{site}\0{rack}");
    let own_host = if host.is_empty() { format!("\0{id}") } else { host.clone() };
    [site.clone(), in_rack.clone(), format!("{in_rack}\0{own_host}")]
}

impl Domains {
    /// The domains of these benefactors.
    pub(crate) fn new<'a>(members: impl IntoIterator<Item = (BenefactorId, &'a MemberLabels)>) -> Self {
        let members: Vec<_> = members.into_iter().collect();
        if members.iter().all(|(_, labels)| **labels == MemberLabels::default()) {
            return Self::default();
        }
        let positions: HashMap<BenefactorId, Position> =
            members.iter().map(|(id, labels)| (*id, position(*id, labels))).collect();
        let count = |level: usize| positions.values().map(|at| &at[level]).collect::<BTreeSet<_>>().len();
        let counts = std::array::from_fn(count);
        let steady = members.iter().filter(|(_, labels)| labels.away == 0).map(|(id, _)| *id).collect();
        Self { positions, counts, steady }
    }

    /// Whether any benefactor has labels.
    pub(crate) fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Number of domains in which these benefactors are, on each level, and whether one is always there.
    fn spread(&self, places: &[BenefactorId]) -> ([usize; LEVELS], bool) {
        let count = |level: usize| {
            let at = places.iter().filter_map(|id| self.positions.get(id)).map(|at| &at[level]);
            at.collect::<BTreeSet<_>>().len()
        };
        let steady = self.steady.is_empty() || places.iter().any(|id| self.steady.contains(id));
        (std::array::from_fn(count), steady)
    }

    /// Whether copies at these places should be further apart, if `copies` are wanted.
    pub(crate) fn is_crowded(&self, places: &[BenefactorId], copies: usize) -> bool {
        if self.is_empty() || places.is_empty() {
            return false;
        }
        let known = places.iter().filter(|id| self.positions.contains_key(id)).count();
        let (spread, steady) = self.spread(places);
        let wanted = |level: usize| self.counts[level].min(copies).min(known);
        !steady || (0..LEVELS).any(|level| spread[level] < wanted(level))
    }

    /// Whether a copy at `other` adds a domain to those of these places that `copies` should be in.
    pub(crate) fn improves(&self, places: &[BenefactorId], other: BenefactorId, copies: usize) -> bool {
        let all: Vec<BenefactorId> = places.iter().copied().chain([other]).collect();
        let ((before, steady), (after, steady_after)) = (self.spread(places), self.spread(&all));
        let wanted = |level: usize| self.counts[level].min(copies);
        (steady_after && !steady)
            || (0..LEVELS).any(|level| before[level] < wanted(level) && before[level] < after[level])
    }

    /// Whether the copies at these places are no nearer to each other without that at `other`.
    pub(crate) fn can_spare(&self, rest: &[BenefactorId], other: BenefactorId, copies: usize) -> bool {
        self.is_empty() || !self.is_crowded(rest, copies) || !self.improves(rest, other, copies)
    }

    /// Counts those of these places that are in the site, the rack and on the host of a benefactor. Without
    /// labels, only the benefactor itself counts.
    pub(crate) fn sharing(&self, id: BenefactorId, places: &[BenefactorId]) -> [usize; LEVELS] {
        let Some(own) = self.positions.get(&id) else {
            let same = places.iter().filter(|place| **place == id).count();
            return [same; LEVELS];
        };
        std::array::from_fn(|level| {
            let at =
                |place: &&BenefactorId| self.positions.get(place).is_some_and(|at| at[level] == own[level]);
            places.iter().filter(at).count()
        })
    }

    /// Whether the loss of one domain takes at most `most` of these places. The largest domains do not count
    /// where there is only one of them.
    pub(crate) fn survives(&self, places: &[BenefactorId], most: usize) -> bool {
        let counts = |level: usize| level == LEVELS - 1 || self.counts[level] > 1;
        let within = |id: &BenefactorId| {
            let sharing = self.sharing(*id, places);
            (0..LEVELS).all(|level| !counts(level) || sharing[level] <= most)
        };
        places.iter().all(within)
    }

    /// How near a benefactor is to these places.
    pub(crate) fn nearness(&self, id: BenefactorId, places: &[BenefactorId]) -> Nearness {
        let Some(own) = self.positions.get(&id) else { return Default::default() };
        let shared = |level: usize| {
            let at = |place: &BenefactorId| self.positions.get(place).map(|at| &at[level]);
            places.iter().any(|place| at(place) == Some(&own[level]))
        };
        let lacks_steady = !places.iter().any(|place| self.steady.contains(place));
        let unsteady = lacks_steady && !self.steady.is_empty() && !self.steady.contains(&id);
        [unsteady, shared(0), shared(1), shared(2)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(site: &str, rack: &str, host: &str, away: u64) -> MemberLabels {
        MemberLabels { site: site.into(), rack: rack.into(), host: host.into(), away }
    }

    #[test]
    fn copies_in_one_rack_are_crowded_if_there_are_two_and_equal_names_in_two_sites_are_two_racks() {
        let all = [
            labels("a", "1", "", 0),
            labels("a", "1", "", 0),
            labels("b", "1", "", 0),
            labels("b", "1", "", 0),
        ];
        let domains = Domains::new((0..).zip(&all));
        assert!(domains.is_crowded(&[0, 1], 2) && domains.is_crowded(&[2, 3], 2));
        assert!(!domains.is_crowded(&[0, 2], 2) && !domains.is_crowded(&[0, 1, 2], 2));
        assert!(!domains.is_crowded(&[0, 2, 3], 3), "there is no third rack");
        assert!(!domains.is_crowded(&[0], 2), "a missing copy is another matter");
        assert!(domains.improves(&[0, 1], 2, 2) && !domains.improves(&[0, 2], 3, 2));
        assert!(domains.can_spare(&[0, 2], 1, 2) && !domains.can_spare(&[0, 1], 2, 2));
        let one = Domains::new((0..2).zip(&all));
        assert!(!one.is_crowded(&[0, 1], 2), "there is one rack only");
    }

    #[test]
    fn one_copy_is_where_somebody_always_is() {
        let all = [labels("", "", "", 0), labels("", "", "", 50_000), labels("", "", "", 50_000)];
        let domains = Domains::new((0..).zip(&all));
        assert!(domains.is_crowded(&[1, 2], 2) && !domains.is_crowded(&[0, 2], 2));
        assert!(domains.improves(&[1, 2], 0, 2) && domains.nearness(0, &[1]) < domains.nearness(2, &[1]));
        assert_eq!(domains.nearness(1, &[0]), domains.nearness(2, &[0]));
    }

    proptest! {
        #[test]
        fn whoever_takes_the_farthest_is_not_crowded(
            sites in prop::collection::vec((0..3_u8, 0..3_u8, 0..3_u8, any::<bool>()), 1..12), copies in 1..5_usize,
        ) {
            let text = |number: u8| if number == 0 { String::new() } else { number.to_string() };
            let all: Vec<MemberLabels> = sites
                .iter()
                .map(|(site, rack, host, away)| labels(&text(*site), &text(*rack), &text(*host), u64::from(*away)))
                .collect();
            let domains = Domains::new((0..).zip(&all));
            let mut places: Vec<BenefactorId> = Vec::new();
            while places.len() < copies.min(all.len()) {
                let free = (0..all.len() as u16).filter(|id| !places.contains(id));
                places.extend(free.min_by_key(|id| domains.nearness(*id, &places)));
            }
            prop_assert!(!domains.is_crowded(&places, copies), "{:?}", places);
        }
    }
}
