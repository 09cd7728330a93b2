//! Balancing: moves chunks from benefactors with more than their share to those with less, such as new ones.
//!
//! Chunks also leave a benefactor whose owner needs the disk. Shares are computed from counted chunks,
//! because the bytes that a benefactor reports decrease only after garbage collection. Nothing moves while
//! repair has work, and little while write sessions are open.

use super::{ManagerService, placement};
use crate::{
    meta::{BenefactorRow, MetaError},
    protocol::{BenefactorAddress, BenefactorId, ChunkId, put_digests},
};
use std::collections::HashMap;
use whimbrel_core::Digest;

/// Most chunks moved in one order and in one round.
const ORDER: u32 = 64;
const ROUND: u64 = 4096;
/// Chunks moved in one round while clients write.
const ROUND_DURING_WRITES: u64 = ROUND / 8;
/// An excess of fewer chunks, or of less than this part of a share, is ignored.
const LEAST: u64 = 16;
const TENTH: u64 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ChunkMove {
    from: BenefactorId,
    to: BenefactorId,
    chunks: u64,
}

/// The next move, from the benefactor most above its share to the one most below it, or none. Pure.
fn next_move(
    members: &[BenefactorRow],
    holdings: &HashMap<BenefactorId, u64>,
    now: i64,
) -> Option<ChunkMove> {
    let online: Vec<&BenefactorRow> = members
        .iter()
        .filter(|member| placement::BenefactorState::of(member, now) == placement::BenefactorState::Online)
        .collect();
    // Capacity for chunks, without the bytes that the owner needs.
    let weight =
        |member: &BenefactorRow| u128::from((member.used + member.free).saturating_sub(member.bytes_to_free));
    let held = |member: &BenefactorRow| holdings.get(&member.id).copied().unwrap_or(0);
    let weights: u128 = online.iter().map(|member| weight(member)).sum();
    let total: u128 = online.iter().map(|member| u128::from(held(member))).sum();
    let share = |member: &BenefactorRow| (total * weight(member)).checked_div(weights).unwrap_or(0) as u64;
    let over = |member: &&&BenefactorRow| held(member).saturating_sub(share(member));
    let under = |member: &&&BenefactorRow| share(member).saturating_sub(held(member));
    let counts = |member: &&&BenefactorRow| over(member) >= LEAST.max(share(member) / TENTH);
    let from = online.iter().filter(counts).max_by_key(over)?;
    let to = online.iter().filter(|member| placement::free(member) > 0).max_by_key(under)?;
    let chunks = over(&from).min(under(&to)).min(ROUND);
    (chunks > 0).then_some(ChunkMove { from: from.id, to: to.id, chunks })
}

impl ManagerService {
    /// The chunks whose copies are not nearer to each other after the move.
    async fn without_crowding(
        &self,
        chunks: Vec<(ChunkId, Digest)>,
        shift: ChunkMove,
        members: &[BenefactorRow],
    ) -> Result<Vec<(ChunkId, Digest)>, MetaError> {
        let domains = self.domains(members);
        if domains.is_empty() {
            return Ok(chunks);
        }
        let ids: Vec<ChunkId> = chunks.iter().map(|(id, _)| *id).collect();
        let located = self.shared.meta.locate(&ids).await?;
        let siblings = self.shared.meta.sibling_places(&ids).await?;
        let may_move = |places: &[BenefactorId]| {
            let moved = |id: &BenefactorId| if *id == shift.from { shift.to } else { *id };
            let after: Vec<BenefactorId> = places.iter().map(moved).collect();
            !domains.is_crowded(&after, after.len()) || domains.is_crowded(places, places.len())
        };
        // A piece stays as far from the others of its chunk as it is.
        let stays_apart = |id: &ChunkId| {
            let others = siblings.get(id).map_or(&[][..], |others| others);
            domains.sharing(shift.to, others) <= domains.sharing(shift.from, others)
        };
        let kept =
            chunks.into_iter().zip(located).filter(|((id, _), at)| may_move(&at.places) && stays_apart(id));
        Ok(kept.map(|(chunk, _)| chunk).collect())
    }

    /// Runs one round and returns the number of moved chunks.
    pub async fn balance(&self) -> Result<u64, MetaError> {
        let meta = &self.shared.meta;
        if !meta.under_replicated(1).await?.is_empty() {
            return Ok(0);
        }
        let (members, holdings) = (self.members().await?, meta.holdings().await?);
        let Some(shift) = next_move(&members, &holdings.into_iter().collect(), self.now()) else {
            return Ok(0);
        };
        let member = |id| members.iter().find(|member: &&BenefactorRow| member.id == id);
        let Some((source, target)) = member(shift.from).zip(member(shift.to)) else { return Ok(0) };
        let to = BenefactorAddress { id: target.id, address: target.address.clone(), key: target.key };
        let mut moved = 0;
        while moved < shift.chunks {
            if moved >= ROUND_DURING_WRITES && meta.sessions().await? > 0 {
                break;
            }
            let most = ORDER.min((shift.chunks - moved) as u32);
            let chunks = meta.movable(shift.from, shift.to, most).await?;
            let chunks = self.without_crowding(chunks, shift, &members).await?;
            if chunks.is_empty() {
                break;
            }
            let digests = put_digests(chunks.iter().map(|(_, digest)| digest));
            let failed = match self.copy_chunks(&source.key, &to, digests, chunks.len()).await {
                Ok(failed) => failed,
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(error, from = %source.name, to = %target.name, "balancing could not copy chunks");
                    break;
                }
            };
            let done: Vec<_> = chunks
                .iter()
                .zip(failed)
                .filter(|(_, failed)| !failed)
                .map(|((chunk, _), _)| *chunk)
                .collect();
            if done.is_empty() {
                break;
            }
            meta.replace_places(&done, shift.from, shift.to, self.now()).await?;
            moved += done.len() as u64;
        }
        if moved > 0 {
            tracing::info!(chunks = moved, from = %source.name, to = %target.name, "balancing moved chunks");
        }
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_wire::PublicKey;

    fn member(id: u16, used: u64, free: u64, owed: u64) -> BenefactorRow {
        BenefactorRow {
            id,
            key: PublicKey([0; 32]),
            name: String::new(),
            address: String::new(),
            capacity: used + free,
            used,
            free,
            chunks: 0,
            draining: false,
            bytes_to_free: owed,
            lost: false,
            faults: 0,
            seen: 0,
            reserved: 0,
            labels: Default::default(),
        }
    }

    proptest! {
        #[test]
        fn moving_ends_and_leaves_nobody_far_from_its_share(
            start in prop::collection::vec((0..5000_u64, 1..4_u64, any::<bool>()), 1..8),
        ) {
            let members: Vec<BenefactorRow> = start
                .iter()
                .enumerate()
                .map(|(id, (held, size, owes))| member(id as u16, *held, 20_000 * size - held, if *owes { *held } else { 0 }))
                .collect();
            let mut holdings: HashMap<u16, u64> =
                start.iter().enumerate().map(|(id, (held, ..))| (id as u16, *held)).collect();
            let total: u64 = holdings.values().sum();
            for round in 0.. {
                let Some(shift) = next_move(&members, &holdings, 0) else { break };
                prop_assert!(round < 100, "it goes on for ever");
                prop_assert!(shift.from != shift.to && shift.chunks <= holdings[&shift.from]);
                *holdings.get_mut(&shift.from).unwrap() -= shift.chunks;
                *holdings.get_mut(&shift.to).unwrap() += shift.chunks;
            }
            prop_assert_eq!(holdings.values().sum::<u64>(), total);
            let weight = |m: &BenefactorRow| m.used + m.free - m.bytes_to_free;
            let weights: u64 = members.iter().map(weight).sum();
            for member in &members {
                let share = total * weight(member) / weights;
                prop_assert!(holdings[&member.id] <= share + share / 10 + LEAST + 1);
            }
        }
    }

    #[test]
    fn who_owes_its_owner_gives_and_a_full_one_gets_nothing() {
        let holdings = HashMap::from([(0, 1000), (1, 1000)]);
        let owes = [member(0, 1000, 0, 500), member(1, 1000, 9000, 0)];
        let found = next_move(&owes, &holdings, 0).unwrap();
        assert_eq!((found.from, found.to), (0, 1));
        assert!(next_move(&[member(0, 1000, 0, 500), member(1, 1000, 0, 0)], &holdings, 0).is_none());
    }
}
