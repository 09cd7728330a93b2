//! Admission of members at benefactors: each learns of a new member before that member connects to it.
//!
//! The reply to a heartbeat lists the admitted members, so until its next heartbeat a benefactor would refuse
//! a member that was admitted since. Before the manager names a benefactor to a member, it therefore requests
//! a heartbeat, unless the benefactor has confirmed a list with the member. Only admitted members cause such
//! requests. A benefactor that does not answer is named all the same, and not asked again for a while.
//!
//! A benefactor that reports to another manager has no connection here; that manager tells it of members.

use super::ManagerService;
use crate::protocol::{RequestHeartbeat, admission};
use bytes::Bytes;
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{task::JoinSet, time::timeout};
use whimbrel_core::Digest;
use whimbrel_wire::{PeerIdentity, PublicKey};

/// Longest time that a member waits for the benefactors.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time before a benefactor that did not answer is asked again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// A list of admitted members, as sent to benefactors.
#[derive(Debug, PartialEq, Eq)]
struct AdmissionList {
    digest: Digest,
    keys: HashSet<PublicKey>,
}

/// The list sent last to one benefactor.
#[derive(Debug, Default)]
struct SentList {
    list: Option<Arc<AdmissionList>>,
    /// Whether the benefactor has confirmed that it holds the list.
    held: bool,
    last_failure: Option<Instant>,
}

/// Lists sent to benefactors, by their keys.
#[derive(Debug, Default)]
pub(super) struct Admissions {
    /// The newest list, shared by all benefactors that got it.
    latest: Option<Arc<AdmissionList>>,
    sent: HashMap<PublicKey, SentList>,
}

impl Admissions {
    /// Records that `admitted` is sent to a benefactor.
    pub(super) fn update(&mut self, benefactor: PublicKey, admitted: &[(String, PublicKey)]) {
        let digest = admission(admitted);
        let told = self.sent.entry(benefactor).or_default();
        if told.list.as_ref().is_some_and(|list| list.digest == digest) {
            return;
        }
        let latest = match self.latest.take() {
            Some(latest) if latest.digest == digest => latest,
            _ => Arc::new(AdmissionList { digest, keys: admitted.iter().map(|(_, key)| *key).collect() }),
        };
        self.latest = Some(latest.clone());
        *told = SentList { list: Some(latest), held: false, last_failure: None };
    }

    fn holds(&mut self, benefactor: PublicKey, digest: Digest) {
        let told = self.sent.entry(benefactor).or_default();
        match &told.list {
            Some(list) if list.digest == digest => told.held = true,
            _ => told.last_failure = Some(Instant::now()),
        }
    }

    fn record_failure(&mut self, benefactor: PublicKey) {
        self.sent.entry(benefactor).or_default().last_failure = Some(Instant::now());
    }

    /// Whether a heartbeat must be requested before `member` connects to the benefactor.
    fn is_needed(&self, benefactor: &PublicKey, member: &PublicKey) -> bool {
        let Some(told) = self.sent.get(benefactor) else { return true };
        let knows = told.held && told.list.as_ref().is_some_and(|list| list.keys.contains(member));
        !knows && told.last_failure.is_none_or(|at| at.elapsed() >= RETRY_DELAY)
    }
}

impl ManagerService {
    pub(super) fn admissions(&self) -> MutexGuard<'_, Admissions> {
        self.shared.admissions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests heartbeats so that these benefactors admit `member`, as far as they answer in time.
    pub(super) async fn request_admission(&self, member: &PeerIdentity, benefactors: Vec<PublicKey>) {
        let PeerIdentity::Key(member) = member else { return };
        let mut asked = JoinSet::new();
        for key in benefactors {
            if !self.admissions().is_needed(&key, member) {
                continue;
            }
            let Some(connection) = self.shared.connections().get(&key).cloned() else { continue };
            let service = self.clone();
            asked.spawn(async move {
                match timeout(HEARTBEAT_TIMEOUT, connection.request::<RequestHeartbeat>(&(), Bytes::new()))
                    .await
                {
                    Ok(Ok((held, _))) => service.admissions().holds(key, held),
                    failed => {
                        tracing::debug!(?failed, benefactor = %key, "a benefactor was not told of a member");
                        service.admissions().record_failure(key);
                    }
                }
            });
        }
        while asked.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_benefactor_is_asked_until_it_holds_the_list_with_the_member_and_not_after_that() {
        let [benefactor, old, new] = [1, 2, 3].map(|byte| PublicKey([byte; 32]));
        let before = [("old".to_owned(), old)];
        let after = [("old".to_owned(), old), ("new".to_owned(), new)];
        let mut all = Admissions::default();
        assert!(all.is_needed(&benefactor, &old), "this manager has not heard of it");
        all.update(benefactor, &before);
        assert!(all.is_needed(&benefactor, &old), "the answer may still be on its way");
        all.holds(benefactor, admission(&before));
        assert!(!all.is_needed(&benefactor, &old) && all.is_needed(&benefactor, &new));
        all.update(benefactor, &before);
        assert!(!all.is_needed(&benefactor, &old), "nothing new");
        all.update(benefactor, &after);
        all.holds(benefactor, admission(&after));
        assert!(!all.is_needed(&benefactor, &new));
        // Removed and admitted again: the earlier confirmation of the benefactor does not count.
        all.update(benefactor, &before);
        all.update(benefactor, &after);
        assert!(all.is_needed(&benefactor, &new));
    }

    #[test]
    fn a_benefactor_that_does_not_answer_is_left_alone_for_a_while() {
        let [benefactor, member] = [1, 2].map(|byte| PublicKey([byte; 32]));
        let mut all = Admissions::default();
        all.record_failure(benefactor);
        assert!(!all.is_needed(&benefactor, &member));
        all.update(benefactor, &[("member".to_owned(), member)]);
        assert!(all.is_needed(&benefactor, &member), "it is there again");
        all.holds(benefactor, admission(&[]));
        assert!(!all.is_needed(&benefactor, &member), "it holds the list of another manager");
    }
}
