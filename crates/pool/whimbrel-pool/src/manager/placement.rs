//! Placement: which benefactors get new chunks, and which chunks repair copies where. Pure.

use crate::{
    domains::Domains,
    erasure::PieceCounts,
    meta::{BenefactorRow, LostPiece, UnderReplicated},
    protocol::{BenefactorId, ChunkId},
};
use std::collections::{BTreeMap, HashMap};

/// Silence in milliseconds after which nothing is written to a benefactor.
pub(crate) const OFFLINE_AFTER: i64 = 15_000;

/// Free bytes without which a benefactor gets no pieces.
const LEAST_FREE: u64 = 16 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BenefactorState {
    Online,
    /// Can be read, but gets no new chunks.
    Draining,
    /// Silent; its copies still count.
    Offline,
    /// Lost; its copies do not count.
    Lost,
}

impl BenefactorState {
    pub(crate) fn of(member: &BenefactorRow, now: i64) -> Self {
        match () {
            () if member.lost => Self::Lost,
            () if now - member.seen > OFFLINE_AFTER => Self::Offline,
            () if member.draining => Self::Draining,
            () => Self::Online,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Online => "online",
            Self::Draining => "draining",
            Self::Offline => "offline",
            Self::Lost => "lost",
        }
    }

    /// Whether copies there count as copies that exist and stay.
    pub(crate) fn counts(self) -> bool {
        matches!(self, Self::Online | Self::Offline)
    }
}

/// Free bytes that are not reserved.
pub(crate) fn free(member: &BenefactorRow) -> u64 {
    member.free.saturating_sub(member.reserved)
}

/// Chooses the benefactors for a write: online, not in `avoid`, in different domains, and of these those with
/// most free space. Fewer than `width` if there are no more.
pub(crate) fn stripe(
    members: &[BenefactorRow],
    width: usize,
    avoid: &[BenefactorId],
    domains: &Domains,
    now: i64,
) -> Vec<BenefactorId> {
    let good = |member: &&BenefactorRow| {
        BenefactorState::of(member, now) == BenefactorState::Online
            && !avoid.contains(&member.id)
            && free(member) > 0
    };
    let mut good: Vec<&BenefactorRow> = members.iter().filter(good).collect();
    // Benefactors with more faults are chosen last.
    good.sort_by_key(|member| (member.faults / 16, std::cmp::Reverse(free(member)), member.id));
    let mut chosen: Vec<BenefactorId> = Vec::new();
    while chosen.len() < width && !good.is_empty() {
        // The first of those that are farthest.
        let nearness = |at: &usize| domains.nearness(good[*at].id, &chosen);
        let Some(next) = (0..good.len()).min_by_key(nearness) else { break };
        chosen.push(good.remove(next).id);
    }
    chosen
}

/// The repair plan for chunks that lack copies.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Repair {
    /// Chunks that have enough copies, or are not used any more.
    pub(crate) healed: Vec<(ChunkId, i64)>,
    /// Chunks without a reachable copy.
    pub(crate) lost: Vec<ChunkId>,
    /// Chunks without a benefactor that can take a copy.
    pub(crate) stuck: Vec<ChunkId>,
    /// The shadow map: chunks to copy, by source and target.
    pub(crate) copies: BTreeMap<(BenefactorId, BenefactorId), Vec<usize>>,
}

/// Chooses the benefactors for the pieces of chunks, each in as few company of others as possible. None if
/// there are too few, or if the loss of one host, rack or site would take more pieces than may be lost.
pub(crate) fn for_pieces(
    members: &[BenefactorRow],
    counts: PieceCounts,
    domains: &Domains,
    now: i64,
) -> Option<Vec<BenefactorId>> {
    let online = |member: &&BenefactorRow| {
        BenefactorState::of(member, now) == BenefactorState::Online && free(member) > LEAST_FREE
    };
    let mut able: Vec<&BenefactorRow> = members.iter().filter(online).collect();
    able.sort_by_key(|member| (member.faults / 16, std::cmp::Reverse(free(member)), member.id));
    let mut chosen: Vec<BenefactorId> = Vec::new();
    while chosen.len() < counts.all() && !able.is_empty() {
        let next = (0..able.len()).min_by_key(|at| domains.sharing(able[*at].id, &chosen))?;
        chosen.push(able.remove(next).id);
    }
    let enough = chosen.len() == counts.all() && domains.survives(&chosen, counts.parity.into());
    enough.then_some(chosen)
}

/// An order to make a lost piece again: which piece, of which others, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rebuild {
    pub(crate) lost: LostPiece,
    /// Positions among the pieces of the chunk, as many as it has of data, and where each is read.
    pub(crate) sources: Vec<(usize, BenefactorId)>,
    pub(crate) target: BenefactorId,
}

/// Plans to make a lost piece again. None if too few others can be read, or nobody can take it. Other pieces
/// of the chunk are to be made at those in `taken`.
pub(crate) fn rebuild(
    lost: LostPiece,
    taken: &[BenefactorId],
    members: &[BenefactorRow],
    domains: &Domains,
    now: i64,
) -> Option<Rebuild> {
    let states: HashMap<BenefactorId, BenefactorState> =
        members.iter().map(|m| (m.id, BenefactorState::of(m, now))).collect();
    let serves = |id: &&BenefactorId| {
        matches!(states.get(*id), Some(BenefactorState::Online | BenefactorState::Draining))
    };
    let others = lost.of.pieces.iter().enumerate().filter(|(_, piece)| piece.chunk != lost.piece);
    let readable = others.filter_map(|(at, piece)| Some((at, *piece.places.iter().find(serves)?)));
    let sources: Vec<_> = readable.take(lost.of.counts.data.into()).collect();
    if sources.len() < usize::from(lost.of.counts.data) {
        return None;
    }
    let siblings: Vec<BenefactorId> = lost
        .of
        .pieces
        .iter()
        .filter(|piece| piece.chunk != lost.piece)
        .flat_map(|p| p.places.clone())
        .chain(taken.iter().copied())
        .collect();
    let able = members.iter().filter(|member| {
        states.get(&member.id) == Some(&BenefactorState::Online) && free(member) > LEAST_FREE
    });
    let prefer = |member: &&BenefactorRow| {
        let own = siblings.contains(&member.id);
        (own, domains.sharing(member.id, &siblings), std::cmp::Reverse((free(member), member.id)))
    };
    let target = able.min_by_key(prefer)?.id;
    Some(Rebuild { lost, sources, target })
}

/// Plans one more copy for each chunk that lacks copies, evenly among sources and targets, or whose copies
/// are too near to each other; the surplus copy is trimmed later.
pub(crate) fn repair(
    needy: &[UnderReplicated],
    members: &[BenefactorRow],
    domains: &Domains,
    now: i64,
) -> Repair {
    let states: HashMap<BenefactorId, BenefactorState> =
        members.iter().map(|m| (m.id, BenefactorState::of(m, now))).collect();
    let state = |id: &BenefactorId| states.get(id).copied().unwrap_or(BenefactorState::Lost);
    let mut room: BTreeMap<BenefactorId, u64> = members
        .iter()
        .filter(|member| state(&member.id) == BenefactorState::Online)
        .map(|member| (member.id, free(member)))
        .collect();
    let mut busy: HashMap<BenefactorId, usize> = HashMap::new();
    let mut plan = Repair::default();
    for (at, chunk) in needy.iter().enumerate() {
        let counted: Vec<BenefactorId> =
            chunk.places.iter().copied().filter(|id| state(id).counts()).collect();
        let want = usize::from(chunk.want);
        let is_complete = counted.len() >= want;
        let fits = |(id, room): &(&BenefactorId, &u64)| {
            **room > chunk.length
                && !chunk.places.contains(id)
                && (!is_complete || domains.improves(&counted, **id, want))
        };
        // Pieces of one chunk share a benefactor only if there is no other.
        let prefer = |(id, room): &(&BenefactorId, &u64)| {
            let sharing = domains.sharing(**id, &chunk.apart_from);
            let own = chunk.apart_from.contains(id);
            (own, sharing, domains.nearness(**id, &counted), std::cmp::Reverse((**room, **id)))
        };
        let target = || room.iter().filter(fits).min_by_key(prefer).map(|(id, _)| *id);
        // Nearer copies than possible are no loss: without a better place they stay as they are.
        let is_apart = || !domains.is_crowded(&counted, want) || target().is_none();
        let needs_no_spread = want == 0 || !chunk.apart_from.is_empty();
        if !chunk.used || (is_complete && (needs_no_spread || is_apart())) {
            plan.healed.push((chunk.chunk, chunk.since));
            continue;
        }
        let serves =
            |id: &&BenefactorId| matches!(state(id), BenefactorState::Online | BenefactorState::Draining);
        let source = chunk.places.iter().filter(serves).min_by_key(|id| busy.get(*id).copied().unwrap_or(0));
        let Some(source) = source.copied() else {
            plan.lost.push(chunk.chunk);
            continue;
        };
        let Some(target) = target() else {
            plan.stuck.push(chunk.chunk);
            continue;
        };
        *busy.entry(source).or_default() += 1;
        room.entry(target).and_modify(|room| *room -= chunk.length);
        plan.copies.entry((source, target)).or_default().push(at);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{CodedChunk, CodedPiece, MemberLabels};
    use proptest::prelude::*;
    use whimbrel_core::Digest;
    use whimbrel_wire::PublicKey;

    fn member(id: u16, free: u64, seen: i64, draining: bool, lost: bool) -> BenefactorRow {
        let (name, address) = (String::new(), String::new());
        BenefactorRow {
            id,
            key: PublicKey([0; 32]),
            name,
            address,
            capacity: free,
            used: 0,
            free,
            chunks: 0,
            draining,
            bytes_to_free: 0,
            lost,
            faults: 0,
            seen,
            reserved: 0,
            labels: Default::default(),
        }
    }

    fn members() -> impl Strategy<Value = Vec<BenefactorRow>> {
        let one = (0..100_u64, prop::sample::select(&[0_i64, 100_000][..]), any::<bool>(), any::<bool>());
        prop::collection::vec(one, 0..8).prop_map(|all| {
            let with_id = all.into_iter().enumerate();
            with_id
                .map(|(id, (free, seen, draining, lost))| member(id as u16, free, seen, draining, lost))
                .collect()
        })
    }

    fn needy() -> impl Strategy<Value = Vec<UnderReplicated>> {
        let one = (1..9_u64, 1..4_u8, any::<bool>(), prop::collection::btree_set(0..8_u16, 0..4));
        prop::collection::vec(one, 0..30).prop_map(|all| {
            let with_id = all.into_iter().enumerate();
            with_id
                .map(|(at, (length, want, used, places))| UnderReplicated {
                    chunk: at as u64 + 1,
                    digest: Digest([0; 32]),
                    length,
                    want,
                    used,
                    places: places.into_iter().collect(),
                    apart_from: Vec::new(),
                    since: 0,
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn every_chunk_is_healed_lost_stuck_or_copied_from_who_has_it_to_who_has_it_not(
            members in members(), needy in needy(),
        ) {
            let now = 100_000;
            let plan = repair(&needy, &members, &Domains::default(), now);
            let copied: usize = plan.copies.values().map(Vec::len).sum();
            prop_assert_eq!(plan.healed.len() + plan.lost.len() + plan.stuck.len() + copied, needy.len());
            let state = |id: u16| members.iter().find(|m| m.id == id).map(|m| BenefactorState::of(m, now));
            let mut taken: HashMap<u16, u64> = HashMap::new();
            for ((from, to), chunks) in &plan.copies {
                for at in chunks {
                    prop_assert!(needy[*at].places.contains(from) && !needy[*at].places.contains(to));
                    prop_assert!(matches!(state(*from), Some(BenefactorState::Online | BenefactorState::Draining)));
                    prop_assert_eq!(state(*to), Some(BenefactorState::Online));
                    *taken.entry(*to).or_default() += needy[*at].length;
                }
            }
            for member in &members {
                prop_assert!(taken.get(&member.id).copied().unwrap_or(0) <= member.free);
            }
            for chunk in &plan.lost {
                let places = &needy[*chunk as usize - 1].places;
                prop_assert!(!places.iter().any(|id| state(*id) == Some(BenefactorState::Online)));
            }
        }

        #[test]
        fn a_stripe_has_no_one_twice_nor_anyone_who_cannot_take(
            members in members(), width in 1..10_usize, avoid in prop::collection::vec(0..8_u16, 0..3),
        ) {
            let stripe = stripe(&members, width, &avoid, &Domains::default(), 100_000);
            let mut once = stripe.clone();
            once.sort_unstable();
            once.dedup();
            prop_assert_eq!(once.len(), stripe.len());
            prop_assert!(stripe.len() <= width);
            for id in stripe {
                let member = members.iter().find(|m| m.id == id).unwrap();
                prop_assert_eq!(BenefactorState::of(member, 100_000), BenefactorState::Online);
                prop_assert!(!avoid.contains(&id) && member.free > 0);
            }
        }
    }

    #[test]
    fn near_copies_get_one_elsewhere_and_stay_if_there_is_no_elsewhere() {
        let in_rack = |rack: &str| MemberLabels { rack: rack.into(), ..MemberLabels::default() };
        let racks = ["a", "a", "b"];
        let members: Vec<_> = (0..)
            .zip(racks)
            .map(|(id, rack)| BenefactorRow { labels: in_rack(rack), ..member(id, 1000, 0, false, false) })
            .collect();
        let domains = Domains::new(members.iter().map(|member| (member.id, &member.labels)));
        let (digest, since) = (Digest([0; 32]), 0);
        let chunk = |places: &[u16]| UnderReplicated {
            chunk: 1,
            digest,
            length: 1,
            want: 2,
            used: true,
            places: places.to_vec(),
            apart_from: Vec::new(),
            since,
        };
        let plan = |places: &[u16], members: &[BenefactorRow]| repair(&[chunk(places)], members, &domains, 0);
        let to = |plan: Repair| plan.copies.keys().map(|(_, to)| *to).collect::<Vec<_>>();
        assert_eq!(to(plan(&[0, 1], &members)), [2]);
        assert_eq!(plan(&[0, 1], &members[..2]).healed.len(), 1, "the other rack is full or away");
        assert_eq!(plan(&[0, 2], &members).healed.len(), 1);
        assert_eq!(to(plan(&[0], &members)), [2], "a missing copy is made in the other rack");
        assert_eq!(stripe(&members, 2, &[], &domains, 0), [0, 2]);
    }

    #[test]
    fn two_pieces_of_a_chunk_that_are_made_at_once_go_to_different_benefactors() {
        let members: Vec<_> = (0..6).map(|id| member(id, 1 << 40, 0, false, false)).collect();
        let piece = |number: u8| CodedPiece {
            number,
            chunk: 10 + u64::from(number),
            digest: Digest([number; 32]),
            places: if number < 4 { vec![number.into()] } else { Vec::new() },
        };
        let counts = PieceCounts { data: 4, parity: 2 };
        let of = CodedChunk { chunk: 1, counts, pieces: (0..6).map(piece).collect() };
        let lost = |piece| LostPiece { piece, of: of.clone(), digest: Digest([9; 32]) };
        let plan =
            |piece, taken: &[u16]| rebuild(lost(piece), taken, &members, &Domains::default(), 0).unwrap();
        let first = plan(14, &[]);
        assert_eq!(first.sources.len(), 4);
        let second = plan(15, &[first.target]);
        assert_eq!([first.target, second.target].into_iter().min(), Some(4));
        assert_ne!(first.target, second.target);
    }

    #[test]
    fn copies_come_from_all_who_have_them() {
        let members: Vec<_> = (0..4).map(|id| member(id, 1000, 0, false, false)).collect();
        let chunk = |at| UnderReplicated {
            chunk: at,
            digest: Digest([0; 32]),
            length: 1,
            want: 3,
            used: true,
            places: vec![0, 1],
            apart_from: Vec::new(),
            since: 0,
        };
        let needy: Vec<_> = (1..=20).map(chunk).collect();
        let plan = repair(&needy, &members, &Domains::default(), 0);
        let from =
            |id| plan.copies.iter().filter(|((from, _), _)| *from == id).map(|(_, c)| c.len()).sum::<usize>();
        assert_eq!((from(0), from(1)), (10, 10));
    }
}
