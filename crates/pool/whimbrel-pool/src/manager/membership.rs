//! Removal of members and their labels: calls of admins, and what all members may know of each other.

use super::{ManagerService, invalid, placement::BenefactorState};
use crate::{
    domains::Domains,
    meta::{BenefactorRow, MetaError, SharedNumber},
    protocol::{
        Expel, Forget, LabelMember, ListMembers, MAX_LABEL, MemberDetails, MemberReport, RequestHeartbeat,
        code,
    },
};
use bytes::Bytes;
use whimbrel_core::{HostName, lock};
use whimbrel_wire::{Answer, Call, PeerIdentity, PublicKey, Refusal, Reply, Request, TrustError};

/// Longest absence that can be expected of a member, in seconds.
const AWAY_MAX: u64 = 30 * 86_400;

impl ManagerService {
    pub(super) async fn membership(&self, request: Request) -> Answer {
        match request.kind {
            Expel::KIND => self.expel(request).await,
            Forget::KIND => self.forget(request).await,
            LabelMember::KIND => self.label(request).await,
            _ => {
                request.decode::<ListMembers>()?;
                Reply::of::<ListMembers>(&self.member_report().await?, Bytes::new())
            }
        }
    }

    /// The benefactor with this name.
    async fn benefactor_named(&self, name: &str) -> Result<BenefactorRow, Refusal> {
        let mut named = self.shared.meta.members().await?;
        named.retain(|member| member.name == name);
        let count = named.len();
        named
            .pop()
            .filter(|_| count == 1)
            .ok_or_else(|| Refusal::new(code::NOT_FOUND, format!("{count} benefactors have the name {name}")))
    }

    /// Takes all rights from a member: a benefactor, a client or an admin. Its key is never admitted again.
    async fn expel(&self, request: Request) -> Answer {
        let (name, force) = request.decode::<Expel>()?;
        let trusted = match name.parse::<HostName>() {
            Ok(name) => self.shared.trust.named(&name).map_err(failed)?,
            Err(_) => None,
        };
        let key = match trusted.as_ref().and_then(|peer| peer.key) {
            Some(key) => key,
            None => self.benefactor_named(&name).await?.key,
        };
        let members = self.shared.meta.members().await?;
        let benefactor = members.iter().find(|member| member.key == key).map(|member| member.id);
        let meta = &self.shared.meta;
        let removed = meta.remove_member(benefactor, Some((key, &name)), force, self.now()).await?;
        tracing::warn!(name, %key, lost = removed.lost, "a member was expelled");
        lock(&self.shared.expelled).insert(key);
        if let Some(peer) = trusted {
            self.shared.trust.remove(&peer.name).map_err(failed)?;
        }
        let connection = self.shared.connections().remove(&key);
        if let Some(connection) = connection {
            connection.close();
        }
        self.announce_members();
        Reply::of::<Expel>(&removed, Bytes::new())
    }

    /// Requests heartbeats of all benefactors, which then refuse who is no longer admitted.
    fn announce_members(&self) {
        for connection in self.shared.connections().values() {
            let connection = connection.clone();
            // Benefactors that cannot be reached learn it with their next heartbeat; clients do not know
            // the request.
            tokio::spawn(async move { connection.request::<RequestHeartbeat>(&(), Bytes::new()).await });
        }
    }

    /// Reads the list of expelled keys, which another manager may have changed.
    pub(super) async fn load_expelled(&self) -> Result<(), MetaError> {
        let keys = self.shared.meta.expelled().await?;
        *lock(&self.shared.expelled) = keys.into_iter().collect();
        Ok(())
    }

    pub(super) fn is_expelled(&self, key: &PublicKey) -> bool {
        lock(&self.shared.expelled).contains(key)
    }

    /// Refuses whoever was expelled, also if its key is in the list of admitted members again.
    pub(super) fn refuse_expelled(&self, identity: &PeerIdentity) -> Result<(), Refusal> {
        match identity {
            PeerIdentity::Key(key) if self.is_expelled(key) => Err(Refusal::new(
                whimbrel_wire::Code::FORBIDDEN,
                "this key was expelled from the pool for good; a member that may return needs a new key",
            )),
            _ => Ok(()),
        }
    }

    /// Removes a benefactor that does not return. Its key stays admitted.
    async fn forget(&self, request: Request) -> Answer {
        let (name, force) = request.decode::<Forget>()?;
        let member = self.benefactor_named(&name).await?;
        if !matches!(
            BenefactorState::of(&member, self.now()),
            BenefactorState::Offline | BenefactorState::Lost
        ) {
            return Err(invalid(
                "the benefactor is there; `whimbrel pool drain` lets it leave, `whimbrel pool expel` removes it",
            ));
        }
        let removed = self.shared.meta.remove_member(Some(member.id), None, force, self.now()).await?;
        tracing::info!(name, lost = removed.lost, "a benefactor was forgotten");
        Reply::of::<Forget>(&removed, Bytes::new())
    }

    async fn label(&self, request: Request) -> Answer {
        let (name, labels) = request.decode::<LabelMember>()?;
        let texts = [&labels.site, &labels.rack, &labels.host];
        if texts.iter().any(|text| text.len() > MAX_LABEL || text.chars().any(char::is_control)) {
            return Err(invalid("a label has up to 64 bytes and no control characters"));
        }
        if labels.away > AWAY_MAX {
            return Err(invalid("a member can be expected to be away for up to 30 days"));
        }
        let member = self.benefactor_named(&name).await?;
        self.shared.meta.set_labels(member.id, &labels).await?;
        Reply::of::<LabelMember>(&(), Bytes::new())
    }

    /// What is known of the members beside their status.
    pub async fn member_report(&self) -> Result<MemberReport, Refusal> {
        let (meta, now) = (&self.shared.meta, self.now());
        let members = meta.members().await?;
        let details = |member: BenefactorRow| MemberDetails {
            id: member.id,
            counts: BenefactorState::of(&member, now).counts(),
            name: member.name,
            labels: member.labels,
        };
        let left = u64::try_from(self.shared.quarantine - now).unwrap_or(0);
        let backup = meta.shared_number(SharedNumber::Backup).await?;
        let age = |made: u64| u64::try_from(now).unwrap_or(0).saturating_sub(made) / 1000;
        Ok(MemberReport {
            members: members.into_iter().map(details).collect(),
            crowded: meta.shared_number(SharedNumber::Crowded).await?,
            quarantine: Some(left / 1000).filter(|left| *left > 0),
            backup_age: (backup > 0).then(|| age(backup)),
        })
    }

    /// The failure domains of the benefactors whose copies count.
    pub(super) fn domains(&self, members: &[BenefactorRow]) -> Domains {
        let now = self.now();
        let counted = members.iter().filter(|member| BenefactorState::of(member, now).counts());
        Domains::new(counted.map(|member| (member.id, &member.labels)))
    }
}

fn failed(error: TrustError) -> Refusal {
    super::internal(&error.to_string())
}
