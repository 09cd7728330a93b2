//! Compatibility of a machine and a host: the check of an offer before anything is sent, and its result.
//!
//! Pure: [`HostCapacity`] describes the host, the offer what the machine needs. An [`Incompatibility`] is
//! sent to the source as a value, so that programs can handle it, and has a hint for people.

use crate::protocol::Offer;
use serde::{Deserialize, Serialize};
use whimbrel_core::{Accel, ByteSize, MachineName};

/// Capacity of a host for the machine of an offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCapacity {
    /// Whether a machine of that name exists here.
    pub name_taken: bool,
    /// Version of the host's QEMU.
    pub qemu_version: String,
    /// Whether that QEMU knows the machine type.
    pub knows_machine_type: bool,
    /// Fastest accelerator of the host.
    pub accel: Accel,
    /// Model of the host's processor.
    pub processor: String,
    /// Bytes of memory that a guest may have.
    pub memory: u64,
    /// Bytes of disk space for disks.
    pub disk: u64,
    /// First bridge that the machine's ports need and that is not here.
    pub bridge_missing: Option<String>,
}

/// Reason why a machine does not fit a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[allow(missing_docs, reason = "the text of each variant says what its fields are")]
pub enum Incompatibility {
    #[error("the target already has a machine {name}")]
    Name { name: MachineName },
    #[error("the machine needs {needed} of memory, the target has {free} free")]
    Memory { needed: ByteSize, free: ByteSize },
    #[error("the machine's disks need {needed}, the target has room for {free}")]
    Disk { needed: ByteSize, free: ByteSize },
    #[error("QEMU {target} of the target does not know the machine type {machine} of QEMU {origin} here")]
    MachineType { machine: String, origin: String, target: String },
    #[error("the machine runs on {} here, the target has only {}", accel_name(*origin), accel_name(*target))]
    Accel { origin: Accel, target: Accel },
    #[error("the machine's CPU has all features of QEMU {origin} here, the target has QEMU {target}")]
    Qemu { origin: String, target: String },
    #[error("the machine's CPU has all features of {origin} here, the target has {target}")]
    Processor { origin: String, target: String },
    #[error("the target has no bridge {bridge} for the machine's network")]
    Bridge { bridge: String },
}

impl Incompatibility {
    /// Advice for the user.
    pub fn hint(&self) -> String {
        match self {
            Self::Name { name } => {
                format!("delete the other machine on the target: `whimbrel delete {name}`")
            }
            Self::Memory { .. } => "stop or migrate a machine on the target, or choose another one".into(),
            Self::Disk { .. } => "free space on the target (`whimbrel gc`), or choose another one".into(),
            Self::MachineType { origin, .. } => {
                format!("install QEMU {origin} or newer on the target")
            }
            Self::Accel { origin: Accel::Kvm, .. } => {
                "running CPUs cannot leave KVM; `whimbrel doctor` on the target shows what KVM lacks there"
                    .into()
            }
            Self::Accel { .. } => "start the machine with --accel kvm to migrate it there".into(),
            Self::Qemu { origin, .. } => {
                format!("install QEMU {origin} on the target; a machine started with `--cpu x86-64-v2` can move between releases")
            }
            Self::Processor { .. } => {
                "choose a target with the same processor; a machine started with `--cpu x86-64-v2` can move to others".into()
            }
            Self::Bridge { bridge } => {
                format!("create the bridge {bridge} there, or keep the network here with `--network home`")
            }
        }
    }
}

fn accel_name(accel: Accel) -> &'static str {
    match accel {
        Accel::Kvm => "KVM",
        Accel::Tcg => "TCG",
    }
}

/// Compares what a machine needs with what a host has.
pub fn check(offer: &Offer, here: &HostCapacity) -> Result<(), Incompatibility> {
    let config = &offer.config;
    if here.name_taken {
        return Err(Incompatibility::Name { name: offer.name.clone() });
    }
    if !here.knows_machine_type {
        let (origin, target) = (offer.qemu_version.clone(), here.qemu_version.clone());
        return Err(Incompatibility::MachineType { machine: config.machine.clone(), origin, target });
    }
    // Every host has TCG, but not every host has KVM.
    if config.accel == Accel::Kvm && here.accel != Accel::Kvm {
        return Err(Incompatibility::Accel { origin: config.accel, target: here.accel });
    }
    if config.cpu_depends_on_host() {
        same_features(offer, here)?;
    }
    let misfit = |needed: u64, free: u64| (needed > free).then_some((ByteSize(needed), ByteSize(free)));
    if let Some((needed, free)) = misfit(config.memory.0, here.memory) {
        return Err(Incompatibility::Memory { needed, free });
    }
    if let Some((needed, free)) = misfit(offer.disk_bytes, here.disk) {
        return Err(Incompatibility::Disk { needed, free });
    }
    match &here.bridge_missing {
        Some(bridge) => Err(Incompatibility::Bridge { bridge: bridge.clone() }),
        None => Ok(()),
    }
}

/// Compares the features that the CPU models `max` and `host` give on both hosts. QEMU adds features with
/// each release; bug fix releases add none. Under KVM the features also depend on the processor.
fn same_features(offer: &Offer, here: &HostCapacity) -> Result<(), Incompatibility> {
    if release(&offer.qemu_version) != release(&here.qemu_version) {
        let (origin, target) = (offer.qemu_version.clone(), here.qemu_version.clone());
        return Err(Incompatibility::Qemu { origin, target });
    }
    if offer.config.accel == Accel::Kvm && offer.processor != here.processor {
        let (origin, target) = (offer.processor.clone(), here.processor.clone());
        return Err(Incompatibility::Processor { origin, target });
    }
    Ok(())
}

/// Release of a version: `7.2` of `7.2.22`.
fn release(version: &str) -> Vec<&str> {
    version.split('.').take(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::HandoverId;
    use whimbrel_core::MachineConfig;

    fn offer(accel: Accel, cpu: &str) -> Offer {
        let config = MachineConfig { cpu: cpu.into(), accel, ..MachineConfig::minimal(ByteSize(64 << 20)) };
        Offer {
            qemu_version: "7.2.22".into(),
            disk_bytes: 1 << 30,
            processor: "Fast CPU".into(),
            ..Offer::of(HandoverId([1; 16]), "web".parse().unwrap(), config)
        }
    }

    fn here() -> HostCapacity {
        HostCapacity {
            name_taken: false,
            qemu_version: "7.2.15".into(),
            knows_machine_type: true,
            accel: Accel::Kvm,
            processor: "Fast CPU".into(),
            memory: 64 << 20,
            disk: 1 << 30,
            bridge_missing: None,
        }
    }

    #[test]
    fn a_machine_that_fits_exactly_is_taken() {
        for accel in [Accel::Tcg, Accel::Kvm] {
            assert_eq!(check(&offer(accel, "max"), &here()), Ok(()));
        }
        assert_eq!(
            check(&offer(Accel::Tcg, "max"), &HostCapacity { processor: "Other".into(), ..here() }),
            Ok(())
        );
        let newer = HostCapacity { qemu_version: "10.0.2".into(), ..here() };
        assert_eq!(
            check(&offer(Accel::Kvm, "Haswell"), &newer),
            Ok(()),
            "a named CPU is the same everywhere"
        );
        let of_the_host = check(&offer(Accel::Kvm, "host,-vmx"), &newer);
        assert!(matches!(of_the_host, Err(Incompatibility::Qemu { .. })), "{of_the_host:?}");
    }

    #[test]
    fn every_difference_is_named_and_has_a_hint() {
        let cases: [(Accel, HostCapacity, Incompatibility); 8] = [
            (
                Accel::Tcg,
                HostCapacity { name_taken: true, ..here() },
                Incompatibility::Name { name: "web".parse().unwrap() },
            ),
            (
                Accel::Tcg,
                HostCapacity { memory: 1, ..here() },
                Incompatibility::Memory { needed: ByteSize(64 << 20), free: ByteSize(1) },
            ),
            (
                Accel::Tcg,
                HostCapacity { disk: 2, ..here() },
                Incompatibility::Disk { needed: ByteSize(1 << 30), free: ByteSize(2) },
            ),
            (
                Accel::Tcg,
                HostCapacity { knows_machine_type: false, ..here() },
                Incompatibility::MachineType {
                    machine: "pc-q35-7.2".into(),
                    origin: "7.2.22".into(),
                    target: "7.2.15".into(),
                },
            ),
            (
                Accel::Kvm,
                HostCapacity { accel: Accel::Tcg, ..here() },
                Incompatibility::Accel { origin: Accel::Kvm, target: Accel::Tcg },
            ),
            (
                Accel::Tcg,
                HostCapacity { qemu_version: "10.0.2".into(), ..here() },
                Incompatibility::Qemu { origin: "7.2.22".into(), target: "10.0.2".into() },
            ),
            (
                Accel::Kvm,
                HostCapacity { processor: "Slow CPU".into(), ..here() },
                Incompatibility::Processor { origin: "Fast CPU".into(), target: "Slow CPU".into() },
            ),
            (
                Accel::Tcg,
                HostCapacity { bridge_missing: Some("br9".into()), ..here() },
                Incompatibility::Bridge { bridge: "br9".into() },
            ),
        ];
        for (accel, here, misfit) in cases {
            assert_eq!(check(&offer(accel, "max"), &here), Err(misfit.clone()));
            assert!(!misfit.hint().is_empty() && !misfit.to_string().is_empty());
        }
    }
}
