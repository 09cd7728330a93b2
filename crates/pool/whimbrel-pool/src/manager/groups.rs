//! Groups of files that appear together: their calls, and the retention of whole groups.
//!
//! The groups of a folder are a series, to which the folder's policy applies as to the versions of a file.
//! What it does not retain is removed as a whole, or not at all while a version in it is pinned. Files in a
//! group are not removed one by one.

use super::{ManagerService, invalid, service::payload};
use crate::{
    meta::{GroupRow, MetaError},
    policy::{Candidate, Retention, expired},
    protocol::{AbandonGroup, BeginGroup, CommitGroup, EndJob, ListGroups, MAX_HOLDER, NodeId, Purged},
};
use bytes::Bytes;
use std::collections::BTreeMap;
use whimbrel_wire::{Answer, Call, Refusal, Reply, Request};

impl ManagerService {
    pub(super) async fn group_call(&self, request: Request) -> Answer {
        let (meta, now) = (&self.shared.meta, self.now());
        match request.kind {
            BeginGroup::KIND => {
                let (parent, name, group) = request.decode::<BeginGroup>()?;
                if group.job.len() > MAX_HOLDER || group.job.chars().any(char::is_control) {
                    return Err(invalid("a job has up to 200 bytes and no control characters"));
                }
                let folder = meta.begin_group((parent, &name), &group, now).await?;
                Reply::of::<BeginGroup>(&folder, Bytes::new())
            }
            CommitGroup::KIND => {
                let (parent, name) = request.decode::<CommitGroup>()?;
                let folder = meta.commit_group((parent, &name), now).await?;
                // What the policy does not retain any more goes at once.
                if let Err(error) = self.apply_group_policies(false).await {
                    tracing::warn!(%error, "old groups could not be removed");
                }
                Reply::of::<CommitGroup>(&folder, Bytes::new())
            }
            AbandonGroup::KIND => {
                let (parent, name) = request.decode::<AbandonGroup>()?;
                Reply::of::<AbandonGroup>(&meta.abandon_group((parent, &name), now).await?, Bytes::new())
            }
            ListGroups::KIND => {
                let groups = meta.groups_in(request.decode::<ListGroups>()?).await?;
                Reply::of::<ListGroups>(&(), payload(&groups)?)
            }
            EndJob::KIND => {
                let job = request.decode::<EndJob>()?;
                Reply::of::<EndJob>(&self.end_job(&job).await?, Bytes::new())
            }
            other => Err(Refusal::unknown_kind(other)),
        }
    }

    /// Removes all groups of a job that has ended well; those with pinned versions stay. Returns how many
    /// went and how many stayed.
    async fn end_job(&self, job: &str) -> Result<(u64, u64), Refusal> {
        if job.is_empty() {
            return Err(invalid("the name of a job is needed"));
        }
        let (mut removed, mut pinned) = (0, 0);
        for group in self.shared.meta.groups().await?.into_iter().filter(|group| group.job == job) {
            match self.shared.meta.remove_group(group.node, self.now()).await {
                Ok(gone) => removed += u64::from(gone),
                Err(MetaError::Pinned { .. }) => pinned += 1,
                Err(error) => return Err(error.into()),
            }
        }
        Ok((removed, pinned))
    }

    /// Removes the groups that no policy retains, or only lists them.
    pub(super) async fn apply_group_policies(&self, dry: bool) -> Result<Vec<Purged>, MetaError> {
        let (meta, now) = (&self.shared.meta, self.now() / 1000);
        let mut series: BTreeMap<NodeId, Vec<GroupRow>> = BTreeMap::new();
        for group in meta.groups().await?.into_iter().filter(|group| group.committed > 0) {
            series.entry(group.parent).or_default().push(group);
        }
        let mut purged = Vec::new();
        for (folder, groups) in series {
            let keep = match meta.policy(folder).await {
                Err(MetaError::NotFound) => continue,
                policy => policy?.1.keep,
            };
            if keep == Retention::default() {
                continue;
            }
            let candidate = |group: GroupRow| Candidate {
                order: group.committed.unsigned_abs(),
                created: group.committed / 1000,
                what: group,
                pinned: false,
            };
            let candidates: Vec<_> = groups.into_iter().map(candidate).collect();
            for old in expired(&candidates, &keep, now, true) {
                purged.extend(self.purge_group(&old.what, old.why, dry).await?);
            }
        }
        Ok(purged)
    }

    async fn purge_group(&self, group: &GroupRow, why: &str, dry: bool) -> Result<Option<Purged>, MetaError> {
        let meta = &self.shared.meta;
        let path = match meta.path(group.node).await {
            // Somebody else removed it meanwhile.
            Err(MetaError::NotFound) => return Ok(None),
            path => path?,
        };
        let (_, size, pinned) = meta.contents(group.node).await?;
        let mut pinned_by = if pinned { vec!["a version in the group".to_owned()] } else { Vec::new() };
        if !dry && !pinned {
            match meta.remove_group(group.node, self.now()).await {
                Ok(_) | Err(MetaError::NotFound) => {}
                Err(MetaError::Pinned { by, .. }) => pinned_by = vec![by],
                Err(error) => return Err(error),
            }
        }
        Ok(Some(Purged { path, version: 0, size, why: why.to_owned(), pinned_by }))
    }
}
