//! Derived machines: a new machine on the disks of a capsule.
//!
//! The machine boots, whether the capsule has memory or not. Its disks are overlays over the capsule's images
//! and share every page that it does not change. Its capsules are children of that capsule. No check is
//! needed that a capsule with children is immutable: its id is the digest of its content.

use crate::{
    capsule::disk_alignment::{disk_bases, unaligned},
    core::{error::DaemonError, refs, state::Core},
    daemon::{Daemon, nic_of},
    machine::{
        cloud_init,
        firmware::{add_tpm, has_display},
        folder, hardware,
        hotplug::bridge_of,
        new_disks::{self, DISK_MAX, NewDisks},
        record::Record,
        settings,
    },
};
use std::sync::Arc;
use whimbrel_alignment::PageAlignment;
use whimbrel_api::{CloudInit, DeriveRequest, MachineInfo, NicRequest, Profile};
use whimbrel_core::{ByteSize, CapsuleId, CdromDrives, Firmware, MachineConfig, NicConfig, PAGE_SIZE};
use whimbrel_image::{ImageRef, Manifest};
use whimbrel_store::StoredDisk;
use whimbrel_vm::RunningMachine;

/// Disks of a derived machine, what is beneath them, and the images that they begin as.
struct DerivedDisks {
    all: NewDisks,
    images: Vec<ImageRef>,
    firmware: Firmware,
    tpm: Option<u32>,
}

impl Daemon {
    /// Starts a new machine on the disks of a capsule.
    pub(crate) fn derive(self: &Arc<Self>, request: DeriveRequest) -> Result<MachineInfo, DaemonError> {
        settings::check(&request.settings)?;
        let (capsule, manifest) = self.find(&request.capsule)?;
        let _claim = self.machines.reserve(&request.name, false)?;
        // Protects the capsule from garbage collection until the machine has its own pin.
        let use_it = refs::store_error("use the capsule");
        let _whole = self.store.pin(&capsule).map_err(&use_it)?;
        let mut config = derived_config(&manifest, &request)?;
        check_profile(&config.firmware, request.profile)?;
        let ports: Vec<_> = config.nics.iter().map(port_of).collect();
        self.networks.check_ports(&request.publish, &ports)?;
        self.check_first_boot(request.cloud_init.as_ref(), &ports)?;
        config.accel = whimbrel_qemu::best_accel(self.qemu()?);
        if let Some(asked) = &request.cpu {
            config.cpu = self.cpu_model(asked, config.accel)?;
        }
        self.materialize_boot_files(&manifest)?;
        let (capsule, manifest) = self.grown((capsule, manifest), request.disk_size)?;
        let _grown = self.store.pin(&capsule).map_err(&use_it)?;
        let disks = self.derived_disks((capsule, &manifest), &request)?;
        let is_asked = config.display || request.display || request.profile.is_some_and(Profile::has_display);
        config.display = has_display(&disks.firmware, is_asked)?;
        config.devices = request.profile.map_or(config.devices, Profile::devices);
        (config.disks, config.firmware, config.tpm) = (disks.all.disks, disks.firmware, disks.tpm);
        config.cdroms = CdromDrives::default();
        config.hotplug = bridge_of(&config.firmware);
        new_disks::check(&config)?;
        let mut record = Record::new(request.name.clone(), config, disks.all.bases);
        record.origin = Some(capsule);
        record.settings = request.settings;
        let live = self.boot_derived(&record, &disks.images, request.cloud_init.as_ref())?;
        self.register_new((record, live), request.cloud_init.as_ref(), request.publish)
    }

    /// Boots a derived machine whose disks begin as these images. On failure nothing of it is left.
    fn boot_derived(
        &self,
        record: &Record,
        images: &[ImageRef],
        cloud_init: Option<&CloudInit>,
    ) -> Result<RunningMachine, DaemonError> {
        let mut live = self.boot_new(record, cloud_init)?;
        if let Err(error) = live.set_stored_bases(images) {
            live.end();
            folder::delete(&self.directories, &record.name)?;
            return Err(error.into());
        }
        Ok(live)
    }

    /// The disks of the capsule without media of CD-ROM drives, and a seed disk if the request has one.
    fn derived_disks(
        &self,
        (capsule, manifest): (CapsuleId, &Manifest),
        request: &DeriveRequest,
    ) -> Result<DerivedDisks, DaemonError> {
        let mut all = NewDisks { disks: manifest.machine.disks.clone(), bases: disk_bases(manifest) };
        let mut len = new_disks::count_without_media(&manifest.machine);
        // A machine of an image that was made of a machine is not that one: it gets a seed of its own.
        if request.cloud_init.is_some() && self.has_seed((capsule, manifest), len)? {
            len -= 1;
        }
        all.disks.truncate(len);
        all.bases.truncate(len);
        let kept: Vec<_> = (0..len).map(|index| format!("disk{index}")).collect();
        let images = manifest.images.iter().filter(|image| kept.contains(&image.name)).cloned().collect();
        let folder = self.directories.machine(&request.name);
        let mut firmware = manifest.machine.firmware;
        if firmware.uefi().is_none()
            && let Some(profile) = request.profile
        {
            let boot = manifest.machine.boot.as_ref();
            firmware = self.add_firmware((profile, request.secure_boot), boot, &mut all, &folder)?;
        }
        let mut tpm = manifest.machine.tpm;
        if tpm.is_none() && (request.tpm || request.profile.is_some_and(Profile::has_tpm)) {
            tpm = Some(add_tpm(&firmware, &mut all)?);
        }
        if request.cloud_init.is_some() {
            all.push(cloud_init::disk(&folder));
        }
        Ok(DerivedDisks { all, images, firmware, tpm })
    }

    /// Whether the last of the capsule's first `len` disks is a seed disk.
    fn has_seed(&self, (capsule, manifest): (CapsuleId, &Manifest), len: usize) -> Result<bool, DaemonError> {
        let Some((disk, before)) = manifest.machine.disks[..len].split_last() else { return Ok(false) };
        let name = format!("disk{}", before.len());
        let Some(image) = manifest.image(&name) else { return Ok(false) };
        let failed = |source| DaemonError::Disk { disk: name.clone(), source };
        let stored = StoredDisk::new(self.image(Some(capsule), (&name, image.root, image.pages)));
        let disk_bytes = unaligned(Arc::new(stored), image.cuts.as_ref()).map_err(failed)?;
        let mut sector = [0; 512];
        disk_bytes.read_at(0, &mut sector).map_err(|source| failed(source.into()))?;
        Ok(cloud_init::is_seed(disk, &sector))
    }

    /// The capsule with a larger first disk: a child of it without a name, which shares all of its pages. The
    /// capsule itself if the disk has that size already.
    fn grown(
        &self,
        (capsule, mut manifest): (CapsuleId, Manifest),
        size: Option<ByteSize>,
    ) -> Result<(CapsuleId, Manifest), DaemonError> {
        let (Some(size), Some(disk)) = (size, manifest.machine.disks.first_mut()) else {
            return Ok((capsule, manifest));
        };
        let larger = ByteSize(size.0.checked_next_multiple_of(PAGE_SIZE as u64).unwrap_or(u64::MAX));
        if larger == disk.size {
            return Ok((capsule, manifest));
        }
        if larger < disk.size || larger > DISK_MAX {
            return Err(DaemonError::invalid(format!(
                "the first disk has {}: it can become larger, up to {DISK_MAX}, and not smaller",
                disk.size
            )));
        }
        disk.size = larger;
        let write = refs::store_error("write the larger disk");
        let writer = self.store.writer().map_err(&write)?;
        for image in manifest.images.iter_mut().filter(|image| image.name == "disk0") {
            // Pages keep their places: what follows the last border becomes longer.
            let cuts = image.cuts.as_ref().map(|cuts| PageAlignment::new(larger.0, cuts.changes()));
            let cuts = cuts.transpose().map_err(|error| DaemonError::invalid(error.to_string()))?;
            let pages = cuts.as_ref().map_or(larger.0 / PAGE_SIZE as u64, PageAlignment::page_count);
            image.root = writer.grow(image.root, image.pages, pages).map_err(&write)?;
            (image.pages, image.cuts) = (pages, cuts);
        }
        // Memory and devices are of a machine with the smaller disk.
        manifest.images.retain(|image| image.name != "memory");
        manifest.device.clear();
        (manifest.working_set, manifest.parents) = (None, vec![capsule]);
        let grown = writer.commit(&manifest, &[]).map_err(&write)?;
        Ok((grown, manifest))
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
    // A derived machine boots, so no state was saved without the port for qemu-ga.
    let mut config = MachineConfig { agent_port: true, ..manifest.machine.clone() };
    if config.disks.is_empty() {
        return Err(DaemonError::invalid("the capsule has no disks to boot from"));
    }
    hardware::set_size(&mut config, request.memory, request.cpus)?;
    let same_bridges = || config.nics.iter().map(port_of).collect::<Vec<_>>();
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

/// Whether a machine whose parent has this firmware can have the hardware of a profile.
fn check_profile(parent: &Firmware, profile: Option<Profile>) -> Result<(), DaemonError> {
    match (parent, profile) {
        (Firmware::Uefi(_), Some(Profile::Default | Profile::Micro | Profile::Foreign)) => {
            let reason = "the capsule is of a machine with UEFI, and so is one that is made of it: leave out --profile";
            Err(DaemonError::invalid(reason))
        }
        _ => Ok(()),
    }
}

/// A port like this one, with another address.
fn port_of(nic: &NicConfig) -> NicRequest {
    NicRequest { bridge: nic.bridge.clone(), mac: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_core::DiskConfig;

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
        // With a port for qemu-ga: it boots, whatever the parent had.
        assert!(config.agent_port && !parent.machine.agent_port);
        let nics = parent.machine.nics.clone();
        assert_eq!(MachineConfig { nics, agent_port: false, ..config }, parent.machine);
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
