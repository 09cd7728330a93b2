//! Policies: which old versions go, applied folder by folder.
//!
//! What a policy removes from a folder depends on its versions, the policy, pins, and, for a retention by
//! time, the clock. So a round looks at folders that got a version since the last one, and at those of which
//! a version is old enough by now. All others are looked at when policies or pins were changed here, and once
//! an hour: another manager may have changed them, or committed out of order.

use super::ManagerService;
use crate::{
    meta::{MetaError, RetainedVersion},
    policy::{Candidate, Expired, Retention, expired, timestep},
    protocol::{NodeId, Purged},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    time::{Duration, Instant},
};
use whimbrel_core::lock;

/// Time after which all folders are looked at.
const ALL_EVERY: Duration = Duration::from_secs(3600);

/// What the rounds so far have found.
#[derive(Debug, Default)]
pub(super) struct PolicyRounds {
    /// Versions with higher numbers are new.
    seen: u64,
    /// When all folders were looked at; none if they must be.
    all: Option<Instant>,
    /// Seconds since 1970 at which a version of the folder is too old.
    due: HashMap<NodeId, i64>,
}

impl ManagerService {
    /// Makes the next round look at all folders.
    pub(super) fn policies_changed(&self) {
        lock(&self.shared.policy_rounds).all = None;
    }

    /// Applies the policies to folders in which something may have to go; returns how many these were, and
    /// the removed versions.
    pub(super) async fn apply_due_policies(&self) -> Result<(usize, Vec<Purged>), MetaError> {
        let (meta, now) = (&self.shared.meta, self.now() / 1000);
        let seen = lock(&self.shared.policy_rounds).seen;
        let (changed, newest) = meta.folders_changed_since(seen).await?;
        let all = {
            let mut rounds = lock(&self.shared.policy_rounds);
            rounds.seen = newest;
            let all = rounds.all.is_none_or(|at| at.elapsed() >= ALL_EVERY);
            if all {
                // Before they are looked at: a change meanwhile is seen in the next round.
                rounds.all = Some(Instant::now());
                rounds.due.clear();
            }
            all
        };
        let folders: BTreeSet<NodeId> = match all {
            true => {
                let folders = meta.policy_folders().await.inspect_err(|_| self.policies_changed());
                folders?.into_iter().collect()
            }
            false => {
                let mut rounds = lock(&self.shared.policy_rounds);
                let due = rounds.due.extract_if(|_, at| *at <= now).map(|(folder, _)| folder);
                due.chain(changed).collect()
            }
        };
        let mut purged = Vec::new();
        for folder in &folders {
            let (gone, due) = self.apply_policies_in(*folder, false).await.inspect_err(|_| {
                // The rest was not looked at.
                self.policies_changed();
            })?;
            purged.extend(gone);
            if let Some(due) = due {
                lock(&self.shared.policy_rounds).due.insert(*folder, due);
            }
        }
        purged.extend(self.apply_group_policies(false).await?);
        Ok((folders.len(), purged))
    }

    /// Applies the policies of all folders, or only lists what they would remove, with pinned versions.
    pub(crate) async fn apply_policies(&self, dry: bool) -> Result<Vec<Purged>, MetaError> {
        let mut purged = Vec::new();
        for folder in self.shared.meta.policy_folders().await? {
            purged.extend(self.apply_policies_in(folder, dry).await?.0);
        }
        purged.extend(self.apply_group_policies(dry).await?);
        Ok(purged)
    }

    /// Applies the policies to the files of one folder. Returns also when the next version is too old.
    async fn apply_policies_in(
        &self,
        folder: NodeId,
        dry: bool,
    ) -> Result<(Vec<Purged>, Option<i64>), MetaError> {
        let (meta, now) = (&self.shared.meta, self.now() / 1000);
        let of_folder = match meta.policy(folder).await {
            Ok((_, policy)) => policy.keep,
            // The folder was removed meanwhile.
            Err(MetaError::NotFound) => return Ok((Vec::new(), None)),
            Err(error) => return Err(error),
        };
        if meta.is_in_group(folder).await? {
            // A group goes as a whole.
            return Ok((Vec::new(), None));
        }
        let only_own = of_folder == Retention::default();
        let (mut purged, mut due) = (Vec::new(), None::<i64>);
        for (_, versions) in series(meta.versions_in(folder, only_own).await?) {
            // A file may have its own policy. For the many files of a series the folder's policy applies.
            let own = versions
                .iter()
                .map(|one| &one.what)
                .find(|kept| kept.has_own_policy && timestep(&kept.name).is_none());
            let keep = match own {
                Some(kept) => meta.policy(kept.node).await?.1.keep,
                None => of_folder,
            };
            let too_old = next_too_old(&versions, &keep, now);
            due = due.into_iter().chain(too_old).min();
            for expired in expired(&versions, &keep, now, true) {
                purged.push(self.purge(expired, dry).await?);
            }
        }
        Ok((purged, due))
    }

    async fn purge(&self, expired: Expired<RetainedVersion>, dry: bool) -> Result<Purged, MetaError> {
        let (meta, Expired { what: kept, why, pinned }) = (&self.shared.meta, expired);
        let path = meta.path(kept.node).await?;
        let mut pinned_by = if pinned { pinned_by(&kept) } else { Vec::new() };
        if !dry && !pinned {
            match meta.drop_version(kept.node, kept.info.number, true, self.now()).await {
                // Somebody else removed it meanwhile.
                Ok(()) | Err(MetaError::NotFound) => {}
                // The version was pinned just now, or its file has another version that is pinned.
                Err(MetaError::Pinned { by, .. }) => pinned_by = vec![by],
                Err(error) => return Err(error),
            }
        }
        let (version, size, why) = (kept.info.number, kept.info.size, why.to_owned());
        Ok(Purged { path, version, size, why, pinned_by })
    }
}

/// When the next version is older than the policy retains by time.
fn next_too_old(versions: &[Candidate<RetainedVersion>], keep: &Retention, now: i64) -> Option<i64> {
    let seconds = keep.seconds?;
    let ends =
        versions.iter().map(|version| version.created.saturating_add_unsigned(seconds).saturating_add(1));
    ends.filter(|end| *end > now).min()
}

fn pinned_by(kept: &RetainedVersion) -> Vec<String> {
    let by_hand = kept.info.pinned.then(|| "hand".to_owned());
    kept.info.holders.iter().cloned().chain(by_hand).collect()
}

/// Groups versions by series: the timesteps of a node of an application, or one file.
fn series(all: Vec<RetainedVersion>) -> BTreeMap<(NodeId, String), Vec<Candidate<RetainedVersion>>> {
    let mut out: BTreeMap<(NodeId, String), Vec<Candidate<RetainedVersion>>> = BTreeMap::new();
    for kept in all {
        let step = timestep(&kept.name);
        let order = match &step {
            // Versions of one timestep are ordered within it.
            Some(step) => step.step << 16 | u64::from(kept.info.number.min(0xffff)),
            None => kept.info.number.into(),
        };
        let name = step.map_or(&*kept.name, |step| step.series).to_owned();
        let pinned = kept.info.pinned || !kept.info.holders.is_empty();
        let created = kept.info.created / 1_000_000_000;
        // The current version of a file can only be removed with the file, which is right for a timestep and
        // for a version that is too old.
        out.entry((kept.folder, name)).or_default().push(Candidate { what: kept, order, created, pinned });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        manager::ManagerOptions,
        meta::Meta,
        policy::Policy,
        protocol::{Commit, NewNode, VersionInfo},
    };
    use whimbrel_wire::Trust;

    fn retaining(last: Option<u32>, seconds: Option<u64>) -> Policy {
        Policy { keep: Retention { last, seconds, ..Retention::default() }, ..Policy::default() }
    }

    #[tokio::test]
    async fn a_round_looks_only_where_something_may_have_to_go_and_misses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let meta = Meta::open(&dir.path().join("pool.db").display().to_string()).await.unwrap();
        let options = ManagerOptions::new(dir.path().to_owned(), "127.0.0.1:0".parse().unwrap());
        let trust = std::sync::Arc::new(Trust::load(dir.path()).unwrap());
        let service = ManagerService::start(meta.clone(), trust, &options).await.unwrap();
        let now = service.now();
        let new = |parent, name: &str, folder| NewNode {
            parent,
            name: name.into(),
            folder,
            mode: 0,
            uid: 0,
            gid: 0,
        };
        let mut folders = Vec::new();
        for name in ["a", "b", "c"] {
            let folder = meta.make(&new(1, name, true), now).await.unwrap().id;
            meta.set_policy(folder, Some(&retaining(Some(1), None)), now).await.unwrap();
            folders.push(folder);
        }
        let session = meta.start_session(&[], now).await.unwrap();
        let mut number = 0;
        let mut write = async |folder| {
            number += 1;
            let (node, make) = (None, new(folder, "file", false));
            let (size, modified, copies, sent, base) = (0, 0, 1, 0, 0);
            let commit = Commit { session, number, node, make, size, modified, copies, sent, base };
            meta.commit(&commit, Vec::new(), &[], now).await.unwrap();
        };
        for folder in &folders {
            write(*folder).await;
            write(*folder).await;
        }
        let round = async || {
            let (looked, gone) = service.apply_due_policies().await.unwrap();
            (looked, gone.len())
        };
        assert_eq!(round().await, (3, 3));
        assert_eq!(round().await, (0, 0), "nothing was written");
        write(folders[1]).await;
        assert_eq!(round().await, (1, 1));
        service.policies_changed();
        assert_eq!(round().await, (3, 0));
        lock(&service.shared.policy_rounds).due.insert(folders[2], now / 1000);
        assert_eq!((round().await, round().await), ((1, 0), (0, 0)), "a time that has come, once");
    }

    #[test]
    fn a_folder_is_due_when_its_next_version_is_too_old() {
        let info = VersionInfo {
            id: 1,
            number: 1,
            size: 0,
            created: 0,
            chunks: 0,
            sent: 0,
            modified: 0,
            pinned: false,
            holders: Vec::new(),
        };
        let (name, has_own_policy) = (String::new(), false);
        let what = RetainedVersion { folder: 1, node: 2, name, current: false, info, has_own_policy };
        let version = |created| Candidate { what: what.clone(), order: 1, created, pinned: false };
        let versions = [version(100), version(200), version(300)];
        let due = |seconds, now| next_too_old(&versions, &retaining(None, seconds).keep, now);
        assert_eq!(due(Some(50), 160), Some(251));
        assert_eq!(due(Some(50), 251), Some(351), "this one goes in the present round");
        assert_eq!((due(Some(50), 400), due(None, 160)), (None, None));
        let gone = expired(&versions, &retaining(None, Some(50)).keep, 251, true);
        assert_eq!(gone.len(), 2);
    }
}
