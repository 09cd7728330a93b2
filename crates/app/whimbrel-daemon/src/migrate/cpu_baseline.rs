//! The CPU model that a group of hosts has in common: each says what its QEMU can give, and the rest is
//! arithmetic (`whimbrel_qemu::common_cpu_features`).
//!
//! A machine of such a model moves between all of them, also to other releases of QEMU. A host is asked for
//! its features under the accelerator that its machines get by default.

use crate::{core::error::DaemonError, daemon::Daemon, transfer::pull::transfer_error};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, sync::Arc};
use whimbrel_api::{CpuBaseline, CpuBaselineRequest, CpuHost};
use whimbrel_core::{Accel, HostName};
use whimbrel_qemu::{best_accel, common_cpu_features, cpu_model_of};
use whimbrel_transfer::{WireLink, call};
use whimbrel_wire::{Call, range};

/// Word of `run --cpu` for the common model of this host and all that it trusts.
pub(crate) const BASELINE: &str = "baseline";
/// Most hosts of a group.
const HOSTS_MAX: usize = 256;
/// Most features that an answer may have, and bytes of a name: more is no list of features.
const FEATURES_MAX: usize = 512;
const NAME_MAX: usize = 40;

/// Asks a host for the features of its processor.
pub(crate) struct QueryCpu;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CpuReply {
    pub(crate) accel: Accel,
    pub(crate) qemu_version: String,
    pub(crate) features: Vec<String>,
}

impl Call for QueryCpu {
    const KIND: u16 = range::MIGRATE + 0x63;
    type Header = ();
    type Reply = CpuReply;
}

impl Daemon {
    /// What this host says of its processor.
    pub(crate) fn own_cpu(&self) -> Result<CpuReply, DaemonError> {
        let qemu = self.qemu()?;
        let accel = best_accel(qemu);
        let features = qemu.cpu_features(accel);
        let features = features.map_err(|source| DaemonError::Qemu {
            action: "list features of the processor",
            source: source.into(),
        })?;
        let (qemu_version, features) = (qemu.version.to_string(), features.into_iter().collect());
        Ok(CpuReply { accel, qemu_version, features })
    }

    /// The model that this host and others have in common.
    pub(crate) fn cpu_baseline(
        self: &Arc<Self>,
        request: &CpuBaselineRequest,
    ) -> Result<CpuBaseline, DaemonError> {
        let others: BTreeSet<&HostName> = request.hosts.iter().filter(|host| **host != self.name).collect();
        if others.len() > HOSTS_MAX {
            return Err(DaemonError::invalid(format!("a group has at most {HOSTS_MAX} hosts")));
        }
        let mut all = vec![(self.name.clone(), self.own_cpu()?)];
        for host in others {
            all.push((host.clone(), self.cpu_of(host)?));
        }
        baseline(&all)
    }

    /// The model that a user has asked for, with that of all trusted hosts for `baseline`.
    pub(crate) fn cpu_model(self: &Arc<Self>, asked: &str, accel: Accel) -> Result<String, DaemonError> {
        let common = (asked == BASELINE).then(|| self.common_cpu()).transpose()?;
        whimbrel_core::cpu_model(common.as_deref().unwrap_or(asked), accel)
            .map_err(|error| DaemonError::Invalid { reason: error.to_string() })
    }

    fn common_cpu(self: &Arc<Self>) -> Result<String, DaemonError> {
        let trusted = self.trust_list()?.into_iter();
        let hosts = trusted.filter(|entry| entry.address.is_some()).map(|entry| entry.name).collect();
        Ok(self.cpu_baseline(&CpuBaselineRequest { hosts })?.model)
    }

    fn cpu_of(self: &Arc<Self>, host: &HostName) -> Result<CpuReply, DaemonError> {
        let link = WireLink(self.peer_connection(host)?);
        let answer = call::<QueryCpu>(&link, &(), Bytes::new());
        let (cpu, _) = answer.map_err(|error| transfer_error(host, error))?;
        let sane =
            cpu.features.len() <= FEATURES_MAX && cpu.features.iter().all(|name| name.len() <= NAME_MAX);
        match sane {
            true => Ok(cpu),
            false => Err(DaemonError::invalid(format!("{host} does not say what its processor has"))),
        }
    }
}

fn baseline(all: &[(HostName, CpuReply)]) -> Result<CpuBaseline, DaemonError> {
    let (first, own) = &all[0];
    if let Some((host, cpu)) = all.iter().find(|(_, cpu)| cpu.accel != own.accel) {
        return Err(DaemonError::invalid(format!(
            "machines run on {:?} on {first} and on {:?} on {host}, so they cannot move between them; `whimbrel doctor` \
             says what KVM lacks",
            own.accel, cpu.accel
        )));
    }
    let sets: Vec<BTreeSet<String>> =
        all.iter().map(|(_, cpu)| cpu.features.iter().cloned().collect()).collect();
    let common = common_cpu_features(&sets);
    let anywhere: BTreeSet<&String> = sets.iter().flatten().collect();
    let hosts = all.iter().zip(&sets).map(|((name, cpu), set)| CpuHost {
        name: name.clone(),
        accel: cpu.accel,
        qemu_version: cpu.qemu_version.clone(),
        lacks: anywhere.iter().filter(|feature| !set.contains(**feature)).map(ToString::to_string).collect(),
    });
    Ok(CpuBaseline {
        model: cpu_model_of(&common),
        hosts: hosts.collect(),
        features: common.into_iter().collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str, accel: Accel, features: &[&str]) -> (HostName, CpuReply) {
        let features = features.iter().map(ToString::to_string).collect();
        (name.parse().unwrap(), CpuReply { accel, qemu_version: "7.2.22".into(), features })
    }

    #[test]
    fn what_a_host_lacks_is_named_and_not_in_the_model() {
        let (old, new) = (["fpu", "sse2"], ["fpu", "sse2", "avx2"]);
        let found = baseline(&[host("alpha", Accel::Kvm, &new), host("beta", Accel::Kvm, &old)]).unwrap();
        assert_eq!(found.features, ["fpu", "sse2"]);
        assert_eq!(
            (&found.hosts[0].lacks[..], &found.hosts[1].lacks[..]),
            (&[][..], &["avx2".to_owned()][..])
        );
        assert!(!found.model.contains("avx2"), "{}", found.model);
        let mixed = baseline(&[host("alpha", Accel::Kvm, &new), host("beta", Accel::Tcg, &new)]);
        assert!(mixed.unwrap_err().to_string().contains("cannot move"));
    }
}
