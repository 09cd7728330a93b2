//! Roles of members: what a manager answers to whom. A host that lends disk need not be able to remove files.
//!
//! The file `DATA/roles` has a line `KEY ROLE` for each admission with a role; the last one of a key counts.
//! A key without a line was admitted without a role and may send all requests. A file that cannot be read
//! lets nobody in.

use crate::protocol::{
    Drain, Expel, FindGarbage, Forget, Heartbeat, LabelMember, ListBackups, MakeBackup, Purge, ReadBackup,
    ReleasePin, ReportDamage, ReportScrub, SetQuota,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::HashMap,
    fmt,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    str::FromStr,
};
use whimbrel_wire::{Call, Code, PeerIdentity, PublicKey, Refusal, Request};

const NAME: &str = "roles";

/// What a member of a pool may ask of the manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolRole {
    /// Lends disk: reports and asks which chunks it may delete.
    Benefactor,
    /// Reads and writes files, and sets their policies and pins.
    Client,
    /// Does what clients may, applies policies, drains benefactors and removes pins of others.
    Admin,
}

impl fmt::Display for PoolRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Benefactor => "benefactor",
            Self::Client => "client",
            Self::Admin => "admin",
        })
    }
}

/// Error for a text that is not a role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a role is benefactor, client or admin")]
pub struct PoolRoleError;

impl FromStr for PoolRole {
    type Err = PoolRoleError;

    fn from_str(text: &str) -> Result<Self, PoolRoleError> {
        let all = [Self::Benefactor, Self::Client, Self::Admin];
        all.into_iter().find(|role| role.to_string() == text).ok_or(PoolRoleError)
    }
}

impl PoolRole {
    /// Whether a member with this role may send `request`.
    fn may(self, request: &Request) -> bool {
        let is_report = matches!(
            request.kind,
            Heartbeat::KIND | FindGarbage::KIND | ReportScrub::KIND | ReportDamage::KIND
        );
        let is_for_admins = match request.kind {
            Drain::KIND | Expel::KIND | Forget::KIND | LabelMember::KIND | SetQuota::KIND => true,
            MakeBackup::KIND | ListBackups::KIND | ReadBackup::KIND => true,
            // The flags: only list what would be removed, and a pin of anybody.
            Purge::KIND => !request.decode::<Purge>().unwrap_or(false),
            ReleasePin::KIND => request.decode::<ReleasePin>().is_ok_and(|(.., anybody)| anybody),
            _ => false,
        };
        match self {
            Self::Benefactor => is_report,
            Self::Client => !is_report && !is_for_admins,
            Self::Admin => !is_report,
        }
    }
}

/// The roles that the folder of a manager has.
#[derive(Debug)]
pub struct PoolRoles {
    path: PathBuf,
}

impl PoolRoles {
    /// The roles in the folder `data` of a manager.
    pub fn new(data: &Path) -> Self {
        Self { path: data.join(NAME) }
    }

    /// Gives a key a role, durably.
    pub fn set(&self, key: PublicKey, role: PoolRole) -> io::Result<()> {
        let mut file = File::options().create(true).append(true).open(&self.path)?;
        file.write_all(format!("{key} {role}\n").as_bytes())?;
        file.sync_all()?;
        File::open(self.path.parent().unwrap_or(Path::new(".")))?.sync_all()
    }

    fn read(&self) -> io::Result<HashMap<PublicKey, PoolRole>> {
        let text = match fs::read_to_string(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HashMap::new()),
            read => read?,
        };
        let parse = |line: &str| {
            let (key, role) = line.split_once(' ')?;
            Some((key.parse().ok()?, role.parse().ok()?))
        };
        text.lines().map(|line| parse(line).ok_or_else(|| io::ErrorKind::InvalidData.into())).collect()
    }

    /// Refuses a request that the role of the peer does not allow.
    pub(super) fn check(&self, identity: &PeerIdentity, request: &Request) -> Result<(), Refusal> {
        let PeerIdentity::Key(key) = identity else { return Ok(()) };
        let roles = self.read().map_err(|error| {
            tracing::error!(%error, path = %self.path.display(), "the roles cannot be read");
            Refusal::new(Code::INTERNAL, "the manager cannot read the roles of its members")
        })?;
        match roles.get(key) {
            Some(role) if !role.may(request) => {
                let text = format!(
                    "a member with the role {role} may not do this; `whimbrel pool admit --role` sets it"
                );
                Err(Refusal::new(Code::FORBIDDEN, text))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{CommitFile, Remove, SetPolicy};
    use bytes::Bytes;

    fn request<C: Call>(header: &C::Header) -> Request {
        Request::of::<C>(header, Bytes::new()).unwrap()
    }

    #[test]
    fn each_role_opens_its_requests_and_the_last_one_of_a_key_counts() {
        use PoolRole::{Admin, Benefactor, Client};
        let raw = |kind| Request::new(kind, Bytes::new(), Bytes::new());
        let mine = (1, String::from("a"), false);
        let cases = [
            (raw(Heartbeat::KIND), vec![Benefactor]),
            (raw(FindGarbage::KIND), vec![Benefactor]),
            (raw(CommitFile::KIND), vec![Client, Admin]),
            (raw(Remove::KIND), vec![Client, Admin]),
            (raw(SetPolicy::KIND), vec![Client, Admin]),
            (request::<ReleasePin>(&mine), vec![Client, Admin]),
            (request::<ReleasePin>(&(1, String::from("a"), true)), vec![Admin]),
            (request::<Purge>(&true), vec![Client, Admin]),
            (request::<Purge>(&false), vec![Admin]),
            (raw(Purge::KIND), vec![Admin]),
            (raw(Drain::KIND), vec![Admin]),
            (raw(MakeBackup::KIND), vec![Admin]),
            (raw(Expel::KIND), vec![Admin]),
            (raw(LabelMember::KIND), vec![Admin]),
            (raw(SetQuota::KIND), vec![Admin]),
            (raw(ReadBackup::KIND), vec![Admin]),
        ];
        let dir = tempfile::tempdir().unwrap();
        let (roles, key) = (PoolRoles::new(dir.path()), PublicKey([1; 32]));
        let peer = PeerIdentity::Key(key);
        for (request, _) in &cases {
            roles.check(&peer, request).unwrap();
        }
        for role in [Benefactor, Client, Admin] {
            roles.set(key, role).unwrap();
            for (request, may) in &cases {
                let checked = roles.check(&peer, request);
                assert_eq!(checked.is_ok(), may.contains(&role), "{role} {:#x}", request.kind);
            }
        }
        roles.check(&PeerIdentity::Key(PublicKey([2; 32])), &cases[0].0).unwrap();
        fs::write(dir.path().join(NAME), "torn").unwrap();
        assert!(roles.check(&peer, &cases[2].0).is_err(), "nobody is let in by damage");
    }
}
