//! The stripe of a write: chooses the benefactors for each batch of chunks. Pure.
//!
//! The choice is round robin (IV.A of the paper) and skips benefactors with full queues, so a slow one gets
//! as much as it takes and delays no other. One that fails, or makes no progress for too long, is excluded
//! for the rest of the write.

use crate::{
    domains::Domains,
    protocol::{BenefactorAddress, BenefactorId},
};
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq)]
struct BenefactorQueue {
    place: BenefactorAddress,
    /// Bytes sent and not yet acknowledged.
    queued: u64,
    excluded: bool,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Stripe {
    queues: Vec<BenefactorQueue>,
    next: usize,
    cap: u64,
    domains: Arc<Domains>,
}

/// Result of [`Stripe::choose`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StripeChoice {
    /// The chosen benefactors, in this order.
    Places(Vec<BenefactorAddress>),
    /// All possible benefactors have full queues.
    Wait,
    Nobody,
}

impl Stripe {
    pub(crate) fn new(places: Vec<BenefactorAddress>, cap: u64, domains: Arc<Domains>) -> Self {
        let queues =
            places.into_iter().map(|place| BenefactorQueue { place, queued: 0, excluded: false }).collect();
        Self { queues, next: 0, cap, domains }
    }

    /// Adds benefactors that are not in the stripe.
    pub(crate) fn extend(&mut self, places: Vec<BenefactorAddress>) {
        for place in places {
            if !self.queues.iter().any(|lane| lane.place.id == place.id) {
                self.queues.push(BenefactorQueue { place, queued: 0, excluded: false });
            }
        }
    }

    /// Chooses up to `copies` benefactors that are not in `not`, and adds `bytes` to their queues.
    pub(crate) fn choose(&mut self, bytes: u64, copies: usize, not: &[BenefactorId]) -> StripeChoice {
        let able = |lane: &BenefactorQueue| !lane.excluded && !not.contains(&lane.place.id);
        if !self.queues.iter().any(able) {
            return StripeChoice::Nobody;
        }
        let count = self.queues.len();
        let order = (0..count).map(|step| (self.next + step) % count);
        // An empty queue takes anything, so a limit below the size of a batch blocks nothing.
        let room = |lane: &BenefactorQueue| lane.queued == 0 || lane.queued + bytes <= self.cap;
        let wanted = copies.min(self.queues.iter().filter(|lane| able(lane)).count());
        let (mut chosen, mut places): (Vec<usize>, _) = (Vec::with_capacity(wanted), not.to_vec());
        while chosen.len() < wanted {
            // Copies are in different domains: nearer benefactors are not taken because a farther one is
            // busy.
            let nearness = |at: &usize| self.domains.nearness(self.queues[*at].place.id, &places);
            let free = order.clone().filter(|at| able(&self.queues[*at]) && !chosen.contains(at));
            let farthest = free.clone().map(|at| nearness(&at)).min();
            let mut farthest = free.filter(|at| Some(nearness(at)) == farthest);
            let Some(next) = farthest.find(|at| room(&self.queues[*at])) else { return StripeChoice::Wait };
            chosen.push(next);
            places.push(self.queues[next].place.id);
        }
        self.next = (chosen[0] + 1) % count;
        chosen.iter().for_each(|at| self.queues[*at].queued += bytes);
        StripeChoice::Places(chosen.iter().map(|at| self.queues[*at].place.clone()).collect())
    }

    /// Removes `bytes` from a benefactor's queue when they were taken or failed.
    pub(crate) fn done(&mut self, id: BenefactorId, bytes: u64) {
        if let Some(lane) = self.queues.iter_mut().find(|lane| lane.place.id == id) {
            lane.queued = lane.queued.saturating_sub(bytes);
        }
    }

    pub(crate) fn exclude(&mut self, id: BenefactorId) {
        self.queues.iter_mut().filter(|lane| lane.place.id == id).for_each(|lane| lane.excluded = true);
    }

    pub(crate) fn excluded(&self) -> Vec<BenefactorId> {
        self.queues.iter().filter(|lane| lane.excluded).map(|lane| lane.place.id).collect()
    }

    /// Number of benefactors that are not excluded.
    pub(crate) fn width(&self) -> usize {
        self.queues.iter().filter(|lane| !lane.excluded).count()
    }

    pub(crate) fn place(&self, id: BenefactorId) -> Option<BenefactorAddress> {
        self.queues.iter().find(|lane| lane.place.id == id).map(|lane| lane.place.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::MemberLabels;
    use proptest::prelude::*;
    use whimbrel_wire::PublicKey;

    fn stripe(width: u16, cap: u64) -> Stripe {
        let place = |id| BenefactorAddress { id, address: String::new(), key: PublicKey([0; 32]) };
        Stripe::new((0..width).map(place).collect(), cap, Arc::default())
    }

    fn ids(choice: StripeChoice) -> Vec<BenefactorId> {
        match choice {
            StripeChoice::Places(places) => places.into_iter().map(|place| place.id).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn all_take_turns_and_a_slow_one_is_passed_over() {
        let mut stripe = stripe(3, 2);
        let turns: Vec<_> = (0..6).map(|_| ids(stripe.choose(1, 1, &[]))[0]).collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
        assert_eq!(stripe.choose(1, 1, &[]), StripeChoice::Wait);
        for _ in 0..10 {
            stripe.done(1, 1);
            assert_eq!(ids(stripe.choose(1, 1, &[])), [1], "0 and 2 are slow");
        }
    }

    #[test]
    fn copies_are_in_different_racks_even_if_one_must_wait_for_that() {
        let rack = |rack: &str| MemberLabels { rack: rack.into(), ..MemberLabels::default() };
        let racks = [rack("a"), rack("a"), rack("a"), rack("b")];
        let mut stripe = stripe(4, 3);
        stripe.domains = Arc::new(Domains::new((0..).zip(&racks)));
        let choices: Vec<_> = (0..3).map(|_| ids(stripe.choose(1, 2, &[]))).collect();
        assert_eq!(choices, [[0, 3], [1, 3], [2, 3]]);
        assert_eq!(stripe.choose(1, 2, &[]), StripeChoice::Wait, "the other rack has a full queue");
        stripe.exclude(3);
        assert_eq!(ids(stripe.choose(1, 2, &[])), [0, 1], "there is one rack left");
    }

    #[test]
    fn copies_are_at_different_places_and_fewer_when_there_are_fewer() {
        let mut stripe = stripe(3, 100);
        assert_eq!(ids(stripe.choose(1, 2, &[])), [0, 1]);
        stripe.exclude(2);
        assert_eq!(ids(stripe.choose(1, 3, &[])).len(), 2);
        stripe.exclude(0);
        assert_eq!(ids(stripe.choose(1, 2, &[])), [1]);
        assert_eq!(stripe.choose(1, 1, &[1]), StripeChoice::Nobody);
    }

    proptest! {
        #[test]
        fn queues_stay_under_the_cap_and_the_dead_get_nothing(
            steps in prop::collection::vec((1..5_u64, 1..4_usize, any::<u8>()), 1..200),
        ) {
            let mut stripe = stripe(4, 8);
            let mut under_way: Vec<(u16, u64)> = Vec::new();
            let mut dead = Vec::new();
            for (bytes, copies, luck) in steps {
                if luck < 8 {
                    dead.push(u16::from(luck % 4));
                    stripe.exclude(u16::from(luck % 4));
                }
                match stripe.choose(bytes, copies, &[]) {
                    StripeChoice::Places(places) => {
                        for place in places {
                            prop_assert!(!dead.contains(&place.id));
                            under_way.push((place.id, bytes));
                        }
                    }
                    StripeChoice::Wait => prop_assert!(!under_way.is_empty(), "nothing to wait for"),
                    StripeChoice::Nobody => prop_assert_eq!((0..4).filter(|id| !dead.contains(id)).count(), 0),
                }
                for id in 0..4 {
                    let queued: u64 = under_way.iter().filter(|(at, _)| *at == id).map(|(_, bytes)| bytes).sum();
                    prop_assert!(queued <= 8);
                }
                if luck % 2 == 1 && !under_way.is_empty() {
                    let (id, bytes) = under_way.remove(usize::from(luck) % under_way.len());
                    stripe.done(id, bytes);
                }
            }
        }
    }
}
