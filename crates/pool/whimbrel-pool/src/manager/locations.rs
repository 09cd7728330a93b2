//! Places of chunks and pieces, for readers.
//!
//! A benefactor that is counted lost because it was silent may still answer: a reader asks it where nobody
//! else has what it needs. It comes last, because a host that is gone costs the reader a timeout.

use super::{ManagerService, invalid, placement::BenefactorState, service::payload};
use crate::{
    meta::{BenefactorRow, MetaError},
    protocol::{
        BenefactorAddress, BenefactorId, ChunkId, Locate, LocatePieces, LocatedChunk, MAX_BATCH, get_numbers,
        put_located,
    },
};
use std::collections::{HashMap, HashSet};
use whimbrel_wire::{Answer, PeerIdentity, Refusal, Reply, Request};

/// How likely a benefactor answers, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reach {
    Reports,
    Silent,
    Lost,
    /// There is no such benefactor.
    Nobody,
}

/// All benefactors, as a reader sees them.
struct Holders {
    members: Vec<BenefactorRow>,
    reach: HashMap<BenefactorId, Reach>,
}

impl Holders {
    fn new(members: Vec<BenefactorRow>, now: i64) -> Self {
        let reach = |member: &BenefactorRow| match BenefactorState::of(member, now) {
            BenefactorState::Online | BenefactorState::Draining => Reach::Reports,
            BenefactorState::Offline => Reach::Silent,
            BenefactorState::Lost => Reach::Lost,
        };
        let reach = members.iter().map(|member| (member.id, reach(member))).collect();
        Self { members, reach }
    }

    fn reach(&self, id: BenefactorId) -> Reach {
        self.reach.get(&id).copied().unwrap_or(Reach::Nobody)
    }

    fn best(&self, places: &[BenefactorId]) -> Reach {
        places.iter().map(|id| self.reach(*id)).min().unwrap_or(Reach::Nobody)
    }

    /// Leaves the lost out, unless nobody else has it.
    fn without_lost(&self, places: &mut Vec<BenefactorId>) {
        let most = self.best(places).max(Reach::Silent);
        places.retain(|id| self.reach(*id) <= most);
    }

    /// Addresses of all that are not lost, and of the lost among `places`.
    fn addresses<'a>(&self, places: impl Iterator<Item = &'a Vec<BenefactorId>>) -> Vec<BenefactorAddress> {
        let named: HashSet<BenefactorId> = places.flatten().copied().collect();
        let is_named = |member: &&BenefactorRow| !member.lost || named.contains(&member.id);
        self.members.iter().filter(is_named).map(BenefactorAddress::from).collect()
    }
}

impl From<&BenefactorRow> for BenefactorAddress {
    fn from(member: &BenefactorRow) -> Self {
        Self { id: member.id, address: member.address.clone(), key: member.key }
    }
}

impl ManagerService {
    pub(super) async fn locate(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let chunks = get_numbers(&request.payload).ok_or_else(|| invalid("a truncated list"))?;
        let mut located = self.shared.meta.locate(&chunks).await?;
        let holders = self.holders().await?;
        located.iter_mut().for_each(|one| holders.without_lost(&mut one.places));
        self.prefer_pieces(&holders, &chunks, &mut located).await?;
        let named = holders.addresses(located.iter().map(|one| &one.places));
        self.admit_reader(identity, &holders).await;
        Reply::of::<Locate>(&named, put_located(&located))
    }

    pub(super) async fn locate_pieces(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let chunks = get_numbers(&request.payload).filter(|chunks| chunks.len() <= MAX_BATCH);
        let chunks = chunks.ok_or_else(|| invalid("a truncated list, or too many chunks"))?;
        let mut located = self.shared.meta.coded_chunks(&chunks).await?;
        let holders = self.holders().await?;
        for chunk in &mut located {
            chunk.pieces.iter_mut().for_each(|piece| holders.without_lost(&mut piece.places));
            chunk.pieces.sort_by_key(|piece| (holders.best(&piece.places), piece.number));
        }
        let pieces = located.iter().flat_map(|chunk| &chunk.pieces);
        let named = holders.addresses(pieces.map(|piece| &piece.places));
        self.admit_reader(identity, &holders).await;
        Reply::of::<LocatePieces>(&named, payload(&located)?)
    }

    async fn holders(&self) -> Result<Holders, MetaError> {
        Ok(Holders::new(self.shared.meta.members().await?, self.now()))
    }

    /// Names no lost copy of a chunk that is kept in pieces: these are more likely to be read.
    async fn prefer_pieces(
        &self,
        holders: &Holders,
        chunks: &[ChunkId],
        located: &mut [LocatedChunk],
    ) -> Result<(), Refusal> {
        let is_lost = |one: &LocatedChunk| holders.best(&one.places) == Reach::Lost;
        let lost: Vec<ChunkId> =
            chunks.iter().zip(&*located).filter(|(_, one)| is_lost(one)).map(|(chunk, _)| *chunk).collect();
        if lost.is_empty() {
            return Ok(());
        }
        let coded = self.shared.meta.coded_chunks(&lost).await?;
        let coded: HashSet<ChunkId> = coded.iter().map(|one| one.chunk).collect();
        let in_pieces =
            chunks.iter().zip(located).filter(|(chunk, one)| coded.contains(chunk) && is_lost(one));
        in_pieces.for_each(|(_, one)| one.places.clear());
        Ok(())
    }

    /// Tells those that can be told of the reader.
    async fn admit_reader(&self, identity: &PeerIdentity, holders: &Holders) {
        let keys = holders.members.iter().filter(|member| !member.lost).map(|member| member.key);
        self.request_admission(identity, keys.collect()).await;
    }
}
