//! Quotas: a commit is refused that would give a folder or a member more bytes than it may have.
//!
//! The bytes of all versions count, as they are read: what two files have in common counts for both. Sums are
//! counted in the database and remembered for a while, with what was committed here since; before a refusal
//! they are counted anew, so what was removed is free at once. Several managers count for themselves: they
//! may together exceed a quota by what they commit until the next count. A pool without quotas pays nothing.

use super::{ManagerService, invalid};
use crate::{
    meta::{MetaError, QuotaKey},
    protocol::{Commit, ListQuotas, NodeId, QuotaInfo, QuotaSubject, SetQuota, code},
};
use bytes::Bytes;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};
use whimbrel_core::{ByteSize, HostName};
use whimbrel_wire::{Answer, PeerIdentity, PublicKey, Refusal, Reply, Request};

/// Time after which the list of quotas is read again, because another manager may have changed it.
const LIST_TIME: Duration = Duration::from_secs(2);
/// Least time for which a sum is believed, and how many times the time that it took to count.
const SUM_TIME: Duration = Duration::from_secs(10);
const SUM_FACTOR: u32 = 10;

/// Bytes that count against one quota.
#[derive(Debug, Clone, Copy)]
struct Sum {
    bytes: u64,
    counted: Instant,
    valid: Duration,
}

/// What this manager knows of quotas.
#[derive(Debug, Default)]
pub(super) struct QuotaSums {
    limits: Vec<(QuotaKey, u64)>,
    /// When the limits were read; none if they must be.
    read: Option<Instant>,
    sums: HashMap<QuotaKey, Sum>,
    /// Bytes of commits that were admitted and have not ended.
    pending: HashMap<QuotaKey, u64>,
}

/// Bytes that were admitted and not committed yet.
#[derive(Debug)]
pub(super) struct QuotaHold {
    keys: Vec<QuotaKey>,
    bytes: u64,
    begun: Instant,
}

impl QuotaHold {
    /// A hold of no bytes, for a pool without quotas that apply.
    fn none() -> Self {
        Self { keys: Vec::new(), bytes: 0, begun: Instant::now() }
    }
}

impl QuotaSums {
    fn known(&self, of: QuotaKey) -> Option<u64> {
        let sum = self.sums.get(&of).filter(|sum| sum.counted.elapsed() < sum.valid)?;
        Some(sum.bytes + self.pending.get(&of).copied().unwrap_or(0))
    }

    fn forget(&mut self, of: QuotaKey) {
        self.sums.remove(&of);
    }
}

impl ManagerService {
    /// Admits the bytes of a commit, or refuses it. The answer must be given to [`Self::end_quota_hold`].
    pub(super) async fn hold_quota(
        &self,
        writer: Option<PublicKey>,
        commit: &Commit,
    ) -> Result<QuotaHold, Refusal> {
        let limits = self.quota_limits().await?;
        if limits.is_empty() {
            return Ok(QuotaHold::none());
        }
        let folder = match commit.node {
            None => commit.make.parent,
            // A file is where it is, whatever the writer says.
            Some(node) => match self.shared.meta.node(node).await {
                Err(MetaError::NotFound) => commit.make.parent,
                node => node?.parent,
            },
        };
        let keys = self.applying(limits, writer, folder).await?;
        match self.hold(keys, commit.size).await? {
            Ok(hold) => Ok(hold),
            // The answer of a commit that was made before was lost: its bytes count already.
            Err(_) if self.shared.meta.is_committed(commit.session, commit.number).await? => {
                Ok(QuotaHold::none())
            }
            Err(refusal) => Err(refusal),
        }
    }

    /// Ends a hold: the bytes are in the database now, or they are not wanted any more.
    pub(super) async fn end_quota_hold(&self, hold: QuotaHold, is_committed: bool) {
        if hold.keys.is_empty() {
            return;
        }
        let mut quotas = self.shared.quotas.lock().await;
        for key in hold.keys {
            if let Some(pending) = quotas.pending.get_mut(&key) {
                *pending = pending.saturating_sub(hold.bytes);
            }
            match quotas.sums.get_mut(&key).filter(|_| is_committed) {
                Some(sum) if sum.counted < hold.begun => sum.bytes += hold.bytes,
                // The count may have met them already.
                Some(_) => quotas.forget(key),
                None => {}
            }
        }
    }

    /// Refuses to move a file or folder to where its bytes do not fit.
    pub(super) async fn check_quota_of_move(
        &self,
        from: (NodeId, &str),
        to: NodeId,
    ) -> Result<QuotaHold, Refusal> {
        let limits = self.quota_limits().await?;
        let mut keys = self.applying(limits.clone(), None, to).await?;
        if keys.is_empty() {
            return Ok(QuotaHold::none());
        }
        let here = self.applying(limits, None, from.0).await?;
        keys.retain(|key| !here.contains(key));
        if keys.is_empty() {
            return Ok(QuotaHold::none());
        }
        let moved = self.shared.meta.lookup(from.0, from.1).await?.id;
        let bytes = self.shared.meta.counted_bytes(QuotaKey::Folder(moved)).await?;
        self.hold(keys, bytes).await?
    }

    /// Whose bytes are limited.
    async fn quota_limits(&self) -> Result<Vec<QuotaKey>, MetaError> {
        let mut quotas = self.shared.quotas.lock().await;
        if quotas.read.is_none_or(|at| at.elapsed() >= LIST_TIME) {
            quotas.read = Some(Instant::now());
            quotas.limits = self.shared.meta.quotas().await?;
        }
        Ok(quotas.limits.iter().map(|(key, _)| *key).collect())
    }

    /// Quotas among these that a file of the writer in a folder counts against.
    async fn applying(
        &self,
        mut limits: Vec<QuotaKey>,
        writer: Option<PublicKey>,
        folder: NodeId,
    ) -> Result<Vec<QuotaKey>, MetaError> {
        let of_folder = limits.iter().any(|key| matches!(key, QuotaKey::Folder(_)));
        let above = if of_folder { self.shared.meta.folders_above(folder).await? } else { Vec::new() };
        limits.retain(|key| match key {
            QuotaKey::Folder(folder) => above.contains(folder),
            QuotaKey::Member(key) => writer == Some(*key),
        });
        Ok(limits)
    }

    /// Holds bytes of all quotas, or of none.
    async fn hold(&self, keys: Vec<QuotaKey>, bytes: u64) -> Result<Result<QuotaHold, Refusal>, MetaError> {
        let mut quotas = self.shared.quotas.lock().await;
        for key in &keys {
            let limit = quotas.limits.iter().find(|(of, _)| of == key).map(|(_, limit)| *limit);
            let Some(limit) = limit else { continue };
            let fits = |used: u64| used.saturating_add(bytes) <= limit;
            if quotas.known(*key).is_some_and(fits) {
                continue;
            }
            let used = self.count_quota(&mut quotas, *key).await?;
            if !fits(used) {
                return Ok(Err(self.exceeds(*key, used, limit, bytes).await));
            }
        }
        for key in &keys {
            *quotas.pending.entry(*key).or_default() += bytes;
        }
        Ok(Ok(QuotaHold { keys, bytes, begun: Instant::now() }))
    }

    async fn count_quota(&self, quotas: &mut QuotaSums, key: QuotaKey) -> Result<u64, MetaError> {
        let began = Instant::now();
        let bytes = self.shared.meta.counted_bytes(key).await?;
        let valid = SUM_TIME.max(began.elapsed() * SUM_FACTOR);
        quotas.sums.insert(key, Sum { bytes, counted: Instant::now(), valid });
        Ok(quotas.known(key).unwrap_or(bytes))
    }

    async fn exceeds(&self, key: QuotaKey, used: u64, limit: u64, more: u64) -> Refusal {
        let (folder, member) = self.names_of(key).await;
        let of = match (folder, member) {
            (Some(path), _) => format!("the folder {path}"),
            (None, member) => format!("the member {}", member.unwrap_or_default()),
        };
        let [used, limit, more] = [used, limit, more].map(ByteSize);
        let text = format!("{of} has {used} of the {limit} of its quota, so {more} more do not fit");
        Refusal::new(code::QUOTA, text)
    }

    /// The path of a folder, or the name of a member.
    async fn names_of(&self, key: QuotaKey) -> (Option<String>, Option<String>) {
        match key {
            QuotaKey::Folder(folder) => {
                let path = self.shared.meta.path(folder).await;
                (Some(path.unwrap_or_else(|_| format!("number {folder}"))), None)
            }
            QuotaKey::Member(key) => {
                let peer = self.shared.trust.find(&key).ok().flatten();
                (None, Some(peer.map_or_else(|| key.to_string(), |peer| peer.name.to_string())))
            }
        }
    }

    pub(super) async fn set_quota(&self, request: Request) -> Answer {
        let (subject, bytes) = request.decode::<SetQuota>()?;
        let key = match subject {
            QuotaSubject::Folder(folder) if self.shared.meta.node(folder).await?.folder => {
                QuotaKey::Folder(folder)
            }
            QuotaSubject::Folder(_) => return Err(invalid("a quota is of a folder or of a member")),
            QuotaSubject::Member(name) => QuotaKey::Member(self.key_of(&name)?),
        };
        self.shared.meta.set_quota(key, bytes).await?;
        let mut quotas = self.shared.quotas.lock().await;
        quotas.read = None;
        quotas.forget(key);
        Reply::of::<SetQuota>(&(), Bytes::new())
    }

    fn key_of(&self, name: &str) -> Result<PublicKey, Refusal> {
        let none = || Refusal::new(code::NOT_FOUND, format!("no member has the name {name}"));
        let parsed: HostName = name.parse().map_err(|_| none())?;
        let peer = self.shared.trust.named(&parsed);
        let peer = peer.map_err(|error| super::internal(&error.to_string()))?;
        peer.and_then(|peer| peer.key).ok_or_else(none)
    }

    pub(super) async fn list_quotas(&self) -> Answer {
        Reply::of::<ListQuotas>(&self.quotas().await?, Bytes::new())
    }

    /// All quotas, and what counts against them now.
    pub async fn quotas(&self) -> Result<Vec<QuotaInfo>, Refusal> {
        let mut all = Vec::new();
        for (key, bytes) in self.shared.meta.quotas().await? {
            let known = self.shared.quotas.lock().await.known(key);
            let used = match known {
                Some(used) => used,
                None => self.shared.meta.counted_bytes(key).await?,
            };
            let (folder, member) = self.names_of(key).await;
            all.push(QuotaInfo { folder, member, bytes, used });
        }
        Ok(all)
    }
}

/// The key of a member that calls.
pub(super) fn key_of(identity: &PeerIdentity) -> Option<PublicKey> {
    match identity {
        PeerIdentity::Key(key) => Some(*key),
        _ => None,
    }
}
