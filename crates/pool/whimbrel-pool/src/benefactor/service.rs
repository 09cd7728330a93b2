//! The service that answers a benefactor's calls: put, get and flush, and copy for its managers.
//!
//! A chunk's digest is checked before it is stored, so a client cannot store content under a wrong digest.
//! Its checksum is checked when it is read. Disk work runs on threads that may block.

use super::{ChunkError, ChunkStore, backups::HeldBackups, check_frame};
use crate::{
    connections::ConnectionCache,
    manager::answer_about_backups,
    protocol::{
        BenefactorAddress, CopyChunks, FlushChunks, GetChunk, GetChunks, InviteLocally, ListBackups,
        MAX_BATCH, PutChunks, ReadBackup, call_name, code, get_digests, put_bits,
    },
};
use bytes::Bytes;
use std::{sync::Arc, time::Instant};
use whimbrel_core::Digest;
use whimbrel_metrics::CallDurations;
use whimbrel_wire::{Answer, BoxFuture, Call, Code, LocalSocket, Peer, Refusal, Reply, Request, Service};

/// Bytes of frames in one request of a copy.
const COPY_BYTES: usize = 4 << 20;

/// Bytes of frames in one answer, unless a single frame is longer.
const ANSWER_BYTES: usize = 4 << 20;
/// Bytes of frames that a reader mostly asks for at once, and of what goes beyond by a chunk.
const USUAL_ANSWER: usize = (1 << 20) + (64 << 10);

/// The service of a chunk store.
#[derive(Debug, Clone)]
pub struct BenefactorService {
    store: Arc<ChunkStore>,
    links: Arc<ConnectionCache>,
    calls: Arc<CallDurations>,
    /// None if it has no folder for them.
    backups: Option<HeldBackups>,
    local: Option<Arc<LocalSocket>>,
}

impl From<ChunkError> for Refusal {
    fn from(error: ChunkError) -> Self {
        let code = match error {
            ChunkError::Missing { .. } => code::NOT_FOUND,
            ChunkError::Damaged { .. } => code::DAMAGED,
            ChunkError::Full { .. } => code::FULL,
            _ => code::STORAGE,
        };
        Refusal::new(code, error.to_string())
    }
}

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Refusal> {
    tokio::task::spawn_blocking(work).await.map_err(|_| Refusal::new(Code::INTERNAL, "the task failed"))
}

pub(super) fn invalid(text: &str) -> Refusal {
    Refusal::new(code::INVALID, text)
}

impl BenefactorService {
    /// A service of `store`, which copies chunks over `links` and counts calls in `calls`.
    pub fn new(store: Arc<ChunkStore>, links: Arc<ConnectionCache>, calls: Arc<CallDurations>) -> Self {
        Self { store, links, calls, backups: None, local: None }
    }

    /// Serves the backups of the manager that lie here, too.
    pub(super) fn with_backups(self, backups: HeldBackups) -> Self {
        Self { backups: Some(backups), ..self }
    }

    /// Invites members on this host to a Unix socket.
    pub(super) fn with_local(self, local: Option<Arc<LocalSocket>>) -> Self {
        Self { local, ..self }
    }

    fn invite(&self, peer: &Peer) -> Answer {
        let local = self.local.as_ref().ok_or_else(|| Refusal::unknown_kind(InviteLocally::KIND))?;
        let invitation = local.invite(&peer.identity);
        let invitation = invitation.map_err(|error| Refusal::new(Code::INTERNAL, error.to_string()))?;
        Reply::of::<InviteLocally>(&invitation, Bytes::new())
    }

    async fn put(&self, request: Request) -> Answer {
        let named = request.decode::<PutChunks>()?;
        let chunks = split(named, request.payload)?;
        let store = self.store.clone();
        blocking(move || -> Result<(), Refusal> {
            for (digest, frame) in &chunks {
                check_frame(digest, frame).map_err(|fault| invalid(&fault.to_string()))?;
            }
            Ok(store.put(&chunks)?)
        })
        .await??;
        Reply::of::<PutChunks>(&(), Bytes::new())
    }

    async fn get(&self, request: Request) -> Answer {
        let digest = request.decode::<GetChunk>()?;
        let store = self.store.clone();
        let frame = blocking(move || store.get(&digest)).await??;
        Reply::of::<GetChunk>(&(), frame)
    }

    /// Reads chunks as far as they fit into an answer. One that cannot be read ends the answer; if it is the
    /// first, its error is the answer.
    async fn get_many(&self, request: Request) -> Answer {
        request.decode::<GetChunks>()?;
        let digests = get_digests(&request.payload).filter(|digests| digests.len() <= MAX_BATCH);
        let digests = digests.ok_or_else(|| invalid("a truncated list, or too many chunks"))?;
        let store = self.store.clone();
        let read = move || -> Result<(Vec<u32>, Vec<u8>), Refusal> {
            let (mut lengths, mut frames) = (Vec::new(), Vec::with_capacity(USUAL_ANSWER));
            for digest in &digests {
                let before = frames.len();
                match store.get_into(digest, &mut frames) {
                    Err(error) if lengths.is_empty() => return Err(error.into()),
                    Err(_) => break,
                    Ok(()) => {}
                }
                if !lengths.is_empty() && frames.len() > ANSWER_BYTES {
                    frames.truncate(before);
                    break;
                }
                lengths.push((frames.len() - before) as u32);
            }
            Ok((lengths, frames))
        };
        let (lengths, frames) = blocking(read).await??;
        Reply::of::<GetChunks>(&lengths, frames.into())
    }

    async fn flush(&self, request: Request) -> Answer {
        let digests = get_digests(&request.payload).ok_or_else(|| invalid("a truncated list"))?;
        let store = self.store.clone();
        let here = blocking(move || store.flush(&digests)).await??;
        let missing: Vec<bool> = here.into_iter().map(|here| !here).collect();
        Reply::of::<FlushChunks>(&(), put_bits(&missing))
    }

    /// Copies chunks to another benefactor: for a manager only, which says where they may go.
    pub(super) async fn copy(&self, request: Request) -> Answer {
        let begun = Instant::now();
        let answer = self.copy_to(request).await;
        self.observe(CopyChunks::KIND, &answer, begun);
        answer
    }

    fn observe(&self, kind: u16, answer: &Answer, begun: Instant) {
        let outcome = if answer.is_ok() { "done" } else { "refused" };
        self.calls.observe(call_name(kind), outcome, begun.elapsed());
    }

    async fn copy_to(&self, request: Request) -> Answer {
        let to = request.decode::<CopyChunks>()?;
        let digests = get_digests(&request.payload).ok_or_else(|| invalid("a truncated list"))?;
        let mut failed = vec![true; digests.len()];
        let mut batch: Vec<(usize, Digest, Bytes)> = Vec::new();
        for (at, digest) in digests.into_iter().enumerate() {
            let store = self.store.clone();
            // A missing or damaged chunk stays marked as failed.
            let Ok(frame) = blocking(move || store.get(&digest)).await? else { continue };
            batch.push((at, digest, frame));
            let bytes: usize = batch.iter().map(|(.., frame)| frame.len()).sum();
            if bytes >= COPY_BYTES || batch.len() >= MAX_BATCH {
                self.send(&to, std::mem::take(&mut batch), &mut failed).await?;
            }
        }
        self.send(&to, batch, &mut failed).await?;
        Reply::of::<CopyChunks>(&(), put_bits(&failed))
    }

    async fn send(
        &self,
        to: &BenefactorAddress,
        batch: Vec<(usize, Digest, Bytes)>,
        failed: &mut [bool],
    ) -> Result<(), Refusal> {
        if batch.is_empty() {
            return Ok(());
        }
        let away =
            |error: &dyn std::error::Error| Refusal::new(code::STORAGE, format!("the copy failed: {error}"));
        let connection = self.links.benefactor(&to.address, to.key).await.map_err(|error| away(&error))?;
        let named = batch.iter().map(|(_, digest, frame)| (*digest, frame.len() as u32)).collect();
        let payload = batch.iter().flat_map(|(.., frame)| frame.iter().copied()).collect::<Vec<u8>>();
        let put = connection.request::<PutChunks>(&named, payload.into()).await;
        put.map_err(|error| away(&error))?;
        let digests: Vec<Digest> = batch.iter().map(|(_, digest, _)| *digest).collect();
        let flush = connection.request::<FlushChunks>(&(), crate::protocol::put_digests(&digests)).await;
        let (_, missing) = flush.map_err(|error| away(&error))?;
        let missing = crate::protocol::get_bits(&missing, batch.len());
        batch.iter().zip(missing).for_each(|((at, ..), missing)| failed[*at] = missing);
        Ok(())
    }
}

fn split(named: Vec<(Digest, u32)>, mut payload: Bytes) -> Result<Vec<(Digest, Bytes)>, Refusal> {
    let total: usize = named.iter().map(|(_, length)| *length as usize).sum();
    if named.len() > MAX_BATCH || total != payload.len() {
        return Err(invalid("the length of the frames differs from the header"));
    }
    Ok(named.into_iter().map(|(digest, length)| (digest, payload.split_to(length as usize))).collect())
}

impl Service for BenefactorService {
    fn handle<'a>(&'a self, peer: &'a Peer, request: Request) -> BoxFuture<'a, Answer> {
        Box::pin(async move {
            let (begun, kind) = (Instant::now(), request.kind);
            let answer = match request.kind {
                PutChunks::KIND => self.put(request).await,
                GetChunk::KIND => self.get(request).await,
                GetChunks::KIND => self.get_many(request).await,
                FlushChunks::KIND => self.flush(request).await,
                InviteLocally::KIND => self.invite(peer),
                CopyChunks::KIND => {
                    Err(Refusal::new(Code::FORBIDDEN, "a benefactor copies chunks for its managers only"))
                }
                ListBackups::KIND | ReadBackup::KIND => match &self.backups {
                    Some(backups) => answer_about_backups(backups.folder(), request).await,
                    None => Err(Refusal::unknown_kind(request.kind)),
                },
                other => Err(Refusal::unknown_kind(other)),
            };
            self.observe(kind, &answer, begun);
            answer
        })
    }
}
