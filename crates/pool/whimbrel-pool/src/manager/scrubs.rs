//! Reports of benefactors about their scrubs. Progress is kept in memory: it is repeated every few seconds.

use super::{ManagerService, invalid};
use crate::meta::BenefactorRow;
use crate::protocol::{ListScrubs, MAX_BATCH, ReportDamage, ReportScrub, ScrubReport, code, get_digests};
use bytes::Bytes;
use whimbrel_core::lock;
use whimbrel_wire::{Answer, PeerIdentity, Refusal, Reply, Request};

impl ManagerService {
    pub(super) async fn report_scrub(&self, identity: &PeerIdentity, request: Request) -> Answer {
        let report = request.decode::<ReportScrub>()?;
        let PeerIdentity::Key(key) = identity else { return Err(invalid("a benefactor must have a key")) };
        // Others could fill the memory.
        if self.shared.meta.members().await?.iter().any(|member| member.key == *key) {
            lock(&self.shared.scrubs).insert(*key, report);
        }
        Reply::of::<ReportScrub>(&(), Bytes::new())
    }

    pub(super) async fn report_damage(&self, identity: &PeerIdentity, request: Request) -> Answer {
        request.decode::<ReportDamage>()?;
        let digests = get_digests(&request.payload).filter(|digests| digests.len() <= MAX_BATCH);
        let digests = digests.ok_or_else(|| invalid("an invalid list"))?;
        let members = self.shared.meta.members().await?;
        let member = members.iter().find(|member| PeerIdentity::Key(member.key) == *identity);
        let member = member.ok_or_else(|| Refusal::new(code::NOT_FOUND, "benefactor not registered"))?;
        tracing::warn!(benefactor = %member.name, chunks = digests.len(), "a scrub found damaged copies");
        self.shared.meta.record_damage(member.id, &digests, self.now()).await?;
        Reply::of::<ReportDamage>(&(), Bytes::new())
    }

    pub(super) async fn list_scrubs(&self) -> Answer {
        Reply::of::<ListScrubs>(&self.scrubs().await?, Bytes::new())
    }

    /// Last reports of benefactors about their scrubs, by name.
    pub async fn scrubs(&self) -> Result<Vec<(String, ScrubReport)>, Refusal> {
        let members = self.shared.meta.members().await?;
        let scrubs = lock(&self.shared.scrubs);
        let report = |member: BenefactorRow| scrubs.get(&member.key).map(|report| (member.name, *report));
        Ok(members.into_iter().filter_map(report).collect())
    }
}
