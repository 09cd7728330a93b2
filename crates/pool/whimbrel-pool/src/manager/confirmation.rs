//! Registration of written chunks: a copy counts once the benefactor that has it has confirmed it.
//!
//! A chunk that is registered is known to all clients, which then do not send it. So a client is not believed:
//! the manager asks each benefactor for the chunks that are said to be there, which also makes them durable.
//! Only a benefactor that reports to another manager cannot be asked here; its copies count, and the next
//! inventory corrects them.

use super::{ManagerService, invalid};
use crate::protocol::{
    BenefactorId, FlushChunks, RegisterChunks, WrittenChunk, code, get_bits, get_written, put_digests,
    put_numbers,
};
use bytes::Bytes;
use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};
use tokio::{task::JoinSet, time::timeout};
use whimbrel_wire::{Answer, Connection, PublicKey, Refusal, Reply, Request};

/// Timeout of a question, after which a copy is not counted.
const CONFIRM_TIME: Duration = Duration::from_secs(10);

impl ManagerService {
    pub(super) async fn register_chunks(&self, request: Request) -> Answer {
        let session = request.decode::<RegisterChunks>()?;
        let mut written = get_written(&request.payload).ok_or_else(|| invalid("a truncated list"))?;
        self.confirm(&mut written).await?;
        if let Some(chunk) = written.iter().find(|chunk| chunk.places.is_empty()) {
            let text = format!("no benefactor confirms a copy of chunk {}", chunk.digest);
            return Err(Refusal::new(code::STORAGE, text));
        }
        let chunks = self.shared.meta.register_chunks(session, &written, self.now()).await?;
        Reply::of::<RegisterChunks>(&(), put_numbers(chunks))
    }

    /// Removes places that their benefactors do not confirm.
    async fn confirm(&self, written: &mut [WrittenChunk]) -> Result<(), Refusal> {
        let members = self.shared.meta.members().await?;
        let keys: HashMap<BenefactorId, PublicKey> =
            members.iter().map(|member| (member.id, member.key)).collect();
        let mut by_place: BTreeMap<BenefactorId, Vec<usize>> = BTreeMap::new();
        for (at, chunk) in written.iter_mut().enumerate() {
            chunk.places.retain(|place| keys.contains_key(place));
            chunk.places.iter().for_each(|place| by_place.entry(*place).or_default().push(at));
        }
        let mut asked = JoinSet::new();
        for (place, chunks) in by_place {
            let connection = keys.get(&place).and_then(|key| self.shared.connections().get(key).cloned());
            let Some(connection) = connection else { continue };
            let digests = put_digests(chunks.iter().map(|at| &written[*at].digest));
            asked.spawn(async move { (place, missing(&connection, digests, chunks.len()).await, chunks) });
        }
        while let Some(done) = asked.join_next().await {
            let Ok((place, missing, chunks)) = done else { continue };
            for (at, _) in chunks.into_iter().zip(missing).filter(|(_, missing)| *missing) {
                written[at].places.retain(|other| *other != place);
            }
        }
        Ok(())
    }
}

/// Whether each chunk is missing at a benefactor; all are if it does not answer.
async fn missing(connection: &Connection, digests: Bytes, count: usize) -> Vec<bool> {
    match timeout(CONFIRM_TIME, connection.request::<FlushChunks>(&(), digests)).await {
        Ok(Ok((_, bits))) => get_bits(&bits, count),
        failed => {
            tracing::warn!(?failed, "a benefactor does not confirm its copies");
            vec![true; count]
        }
    }
}
