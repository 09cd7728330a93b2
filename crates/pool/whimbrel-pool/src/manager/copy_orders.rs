//! Orders to copy chunks: a benefactor takes them over the connection that it opened to a manager only.
//!
//! A writer that has lost a benefactor in the middle of a file asks the manager to have the copies made. So
//! nobody else can have a benefactor send chunks, and copies go to members of the pool only.

use super::{ManagerService, invalid, placement::BenefactorState};
use crate::{
    meta::BenefactorRow,
    protocol::{
        BenefactorAddress, BenefactorId, CopyChunks, MAX_BATCH, OrderCopies, code, get_bits, get_digests,
        put_bits,
    },
};
use bytes::Bytes;
use std::time::Duration;
use whimbrel_wire::{Answer, CallError, PublicKey, Refusal, Reply, Request};

/// Timeout of an order; its chunks are tried again later.
const COPY_TIME: Duration = Duration::from_secs(60);

/// Failure of an order.
#[derive(Debug, thiserror::Error)]
pub(super) enum CopyError {
    /// The source has no connection to this manager.
    #[error("the benefactor that has the chunks is not connected to this manager")]
    NotConnected,
    /// The source or the target failed.
    #[error("the benefactor that has the chunks did not copy them")]
    Failed(#[from] CallError),
    /// There was no answer in time.
    #[error("the benefactor that has the chunks did not answer in time")]
    Late,
}

impl ManagerService {
    /// Has `count` chunks copied; whether each failed.
    pub(super) async fn copy_chunks(
        &self,
        source: &PublicKey,
        to: &BenefactorAddress,
        digests: Bytes,
        count: usize,
    ) -> Result<Vec<bool>, CopyError> {
        let connection = self.shared.connections().get(source).cloned().ok_or(CopyError::NotConnected)?;
        let order = connection.request::<CopyChunks>(to, digests);
        let copied = tokio::time::timeout(COPY_TIME, order).await.map_err(|_| CopyError::Late)?;
        let (_, failed) = copied.inspect_err(|error| self.record_refusal(to.id, error))?;
        Ok(get_bits(&failed, count))
    }

    /// Has chunks of a write session copied from one benefactor to another.
    pub(super) async fn order_copies(&self, request: Request) -> Answer {
        let (session, from, to) = request.decode::<OrderCopies>()?;
        let digests = get_digests(&request.payload).filter(|digests| digests.len() <= MAX_BATCH);
        let count = digests.ok_or_else(|| invalid("a truncated list, or too many chunks"))?.len();
        self.shared.meta.renew_session(session, self.now()).await?;
        let members = self.shared.meta.members().await?;
        let online = |id: BenefactorId| {
            let is_online = |one: &&BenefactorRow| {
                one.id == id && BenefactorState::of(one, self.now()) == BenefactorState::Online
            };
            let none = || Refusal::new(code::NOT_FOUND, format!("benefactor {id} is not online"));
            members.iter().find(is_online).ok_or_else(none)
        };
        let (from, to) = (online(from)?, online(to)?);
        let to = BenefactorAddress::from(to);
        let failed = self.copy_chunks(&from.key, &to, request.payload, count).await;
        let failed = failed.map_err(|error| {
            tracing::warn!(error = &error as &dyn std::error::Error, "chunks of a write were not copied");
            Refusal::new(code::STORAGE, error.to_string())
        })?;
        Reply::of::<OrderCopies>(&(), put_bits(&failed))
    }
}
