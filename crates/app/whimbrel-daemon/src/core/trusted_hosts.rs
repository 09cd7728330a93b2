//! Trusted hosts: the trust list as the API shows and changes it.

use crate::core::{error::DaemonError, rights, state::Core};
use whimbrel_api::{RefRights, TrustEntry};
use whimbrel_core::HostName;
use whimbrel_wire::{Rights, TrustError, TrustedPeer};

impl Core {
    pub(crate) fn trust_list(&self) -> Result<Vec<TrustEntry>, DaemonError> {
        let peers = self.trust.list().map_err(identity_error)?;
        Ok(peers.iter().map(rights::entry).collect())
    }

    pub(crate) fn trust_add(&self, entry: TrustEntry) -> Result<TrustEntry, DaemonError> {
        let key = entry.key.as_deref().map(parsed).transpose()?;
        let address = entry.address.as_deref().map(parsed).transpose()?;
        let (read, write) = rights::lists(entry.read.clone(), entry.write.clone())?;
        let name = entry.name.clone();
        let peer = TrustedPeer { name, key, address, rights: Rights::all(), read, write };
        match self.trust.add(peer) {
            Ok(()) => Ok(entry),
            Err(error @ (TrustError::AlreadyTrusted { .. } | TrustError::NoKey { .. })) => {
                Err(DaemonError::invalid(error.to_string()))
            }
            Err(error) => Err(identity_error(error)),
        }
    }

    pub(crate) fn trust_remove(&self, name: &HostName) -> Result<(), DaemonError> {
        match self.trust.remove(name) {
            Ok(_) => Ok(()),
            Err(TrustError::NotListed { name }) => {
                Err(DaemonError::NotFound { what: "host", name: name.to_string() })
            }
            Err(error) => Err(identity_error(error)),
        }
    }

    /// Changes which refs of this host a trusted host may use.
    pub(crate) fn trust_limit(&self, name: &HostName, changed: RefRights) -> Result<TrustEntry, DaemonError> {
        match self.trust.limit(name, rights::lists(changed.read, changed.write)?) {
            Ok(peer) => Ok(rights::entry(&peer)),
            Err(TrustError::NotListed { name }) => {
                Err(DaemonError::NotFound { what: "host", name: name.to_string() })
            }
            Err(error) => Err(DaemonError::Identity { source: error.into() }),
        }
    }
}

fn identity_error(source: TrustError) -> DaemonError {
    DaemonError::Identity { source: source.into() }
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, DaemonError> {
    text.parse().map_err(|error: T::Err| DaemonError::invalid(error.to_string()))
}
