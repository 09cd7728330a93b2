//! Derived machines: a new machine on the disks of a capsule.
//!
//! The machine boots, whether the capsule has memory or not. Its disks are overlays over the capsule's images
//! and share every page that it does not change. Its capsules are children of that capsule. No check is
//! needed that a capsule with children is immutable: its id is the digest of its content.

use crate::{
    core::{error::DaemonError, refs, state::Core},
    daemon::{Daemon, nic_of},
    machine::record::Record,
    running::{RunningMachine, disk_alignment::disk_bases},
};
use std::sync::Arc;
use whimbrel_api::{DeriveRequest, MachineInfo, NicRequest};
use whimbrel_core::{ByteSize, CapsuleId, MachineConfig};
use whimbrel_image::{ImageRef, Manifest};

/// Granularity of the memory size.
const MEMORY_STEP: u64 = 1 << 20;
const CPUS_MAX: u32 = 256;

impl Daemon {
    /// Starts a new machine on the disks of a capsule.
    pub(crate) fn derive(self: &Arc<Self>, request: DeriveRequest) -> Result<MachineInfo, DaemonError> {
        let (capsule, manifest) = self.find(&request.capsule)?;
        let _claim = self.machines.reserve(&request.name, false)?;
        // Protects the capsule from garbage collection until the machine has its own pin.
        let _whole = self.store.pin(&capsule).map_err(refs::store_error("use the capsule"))?;
        let mut config = derived_config(&manifest, &request)?;
        config.accel = whimbrel_qemu::best_accel(self.qemu()?);
        self.materialize_boot_files(&manifest)?;
        let bases = disk_bases(&manifest);
        let mut record = Record::new(request.name, config, bases);
        record.origin = Some(capsule);
        let mut live = RunningMachine::boot(self, &record)?;
        let disks: Vec<ImageRef> =
            manifest.images.into_iter().filter(|image| image.name != "memory").collect();
        if let Err(error) = live.set_stored_bases(&disks) {
            live.end();
            return Err(error);
        }
        self.register_started(record, live).map(|machine| machine.info())
    }
}

impl Core {
    /// The lineage label of a machine's next capsule: the capsule that the machine was made from, copied from
    /// the last capsule if there is one.
    pub(crate) fn lineage_label(&self, record: &Record) -> Option<(String, String)> {
        let from: Option<CapsuleId> = match record.last {
            Some(last) => self.store.manifest(&last).ok().as_ref().and_then(refs::lineage_of),
            None => record.origin,
        };
        from.map(|from| (refs::LINEAGE_LABEL.to_owned(), from.to_string()))
    }
}

/// The parent's configuration with the changes of the request. NICs get new addresses, as two machines must
/// not share one.
fn derived_config(manifest: &Manifest, request: &DeriveRequest) -> Result<MachineConfig, DaemonError> {
    let mut config = manifest.machine.clone();
    if config.disks.is_empty() {
        return Err(DaemonError::invalid("the capsule has no disks to boot from"));
    }
    if let Some(ByteSize(bytes)) = request.memory {
        if bytes == 0 || bytes % MEMORY_STEP != 0 {
            return Err(DaemonError::invalid("guest memory is a multiple of 1 MiB"));
        }
        config.memory = ByteSize(bytes);
    }
    if let Some(cpus) = request.cpus {
        if !(1..=CPUS_MAX).contains(&cpus) {
            return Err(DaemonError::invalid(format!("a machine has between 1 and {CPUS_MAX} CPUs")));
        }
        config.cpus = cpus;
    }
    let same_bridges = || {
        let port = |nic: &whimbrel_core::NicConfig| NicRequest { bridge: nic.bridge.clone(), mac: None };
        config.nics.iter().map(port).collect::<Vec<_>>()
    };
    let ports = request.nics.clone().unwrap_or_else(same_bridges);
    config.nics = ports.iter().map(nic_of).collect();
    match (&mut config.boot, &request.append) {
        (Some(boot), Some(append)) => boot.append.clone_from(append),
        (None, Some(_)) => {
            let reason = "the capsule boots from its disk: there is no kernel to give a command line to";
            return Err(DaemonError::invalid(reason));
        }
        (_, None) => {}
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::{DiskConfig, NicConfig};

    fn manifest(disks: usize) -> Manifest {
        let nic = NicConfig { mac: "52:54:00:00:00:01".to_owned(), bridge: Some("br0".to_owned()) };
        let machine = MachineConfig {
            cpus: 2,
            disks: vec![DiskConfig { size: ByteSize(1 << 20) }; disks],
            nics: vec![nic],
            ..MachineConfig::minimal(ByteSize(1 << 30))
        };
        Manifest {
            format: whimbrel_image::FORMAT,
            machine,
            device: vec![],
            images: vec![],
            parents: vec![],
            time: 1,
            host: "test".into(),
            labels: Default::default(),
            working_set: None,
        }
    }

    fn request() -> DeriveRequest {
        serde_json::from_str(r#"{"capsule": "golden", "name": "kid"}"#).unwrap()
    }

    #[test]
    fn a_child_is_as_its_parent_with_addresses_of_its_own() {
        let parent = manifest(1);
        let config = derived_config(&parent, &request()).unwrap();
        assert_eq!(config.nics[0].bridge, parent.machine.nics[0].bridge);
        assert_ne!(config.nics[0].mac, parent.machine.nics[0].mac);
        assert_eq!(MachineConfig { nics: parent.machine.nics.clone(), ..config }, parent.machine);
    }

    #[test]
    fn what_is_asked_for_replaces_what_the_parent_has() {
        let nics = Some(vec![]);
        let changed = DeriveRequest { memory: Some(ByteSize(64 << 20)), cpus: Some(4), nics, ..request() };
        let config = derived_config(&manifest(2), &changed).unwrap();
        assert_eq!((config.memory, config.cpus, config.nics.len()), (ByteSize(64 << 20), 4, 0));
    }

    #[test]
    fn machines_that_cannot_be_are_refused() {
        let refused = |disks, request: DeriveRequest| derived_config(&manifest(disks), &request).is_err();
        assert!(refused(0, request()));
        assert!(refused(1, DeriveRequest { memory: Some(ByteSize(4096)), ..request() }));
        assert!(refused(1, DeriveRequest { cpus: Some(0), ..request() }));
        assert!(refused(1, DeriveRequest { append: Some("quiet".into()), ..request() }));
    }
}
