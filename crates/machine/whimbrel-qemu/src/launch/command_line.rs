//! Command line of QEMU. Pure.
//!
//! The order of devices, their ids and addresses are part of the device state: after a change, older states
//! do not load. PCI slots: 01 screen, 02 balloon, 03 random numbers, 04 guest port, 05 USB, 06 the bridge
//! for devices that come later, 08-0f network, 10-1d disks. SATA disks and CD-ROM drives are at ports of the
//! controller that q35 has.

use super::{
    devices::{self, LEGACY, RECONNECT_DELAY},
    spec::{LaunchSpec, Sharing, SpecError, guest_disks},
};
use crate::guest_agent::QEMU_GA_PORT;
use std::{
    ffi::{OsStr, OsString},
    os::{
        fd::AsRawFd,
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::Path,
};
use whimbrel_core::{Accel, Firmware};

/// System calls that QEMU gives up before the guest runs: none of what it does here needs them.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// Loader of machines without a BIOS: it knows no disk and no screen, and starts the kernel within
/// milliseconds (github.com/bonzini/qboot). Comes with QEMU.
const KERNEL_LOADER: &str = "qboot.rom";
/// Parts of a PC that a guest with paravirtual devices does not use, and takes time to look for.
const WITHOUT_PC_PARTS: &str = ",hpet=off,smm=off,sata=off,smbus=off,usb=off";
/// Screen of machines that have one: every guest knows the VGA of QEMU. Its memory, in MiB, is part of each
/// device state and is compared at each pause; it holds 1920 x 1080 points.
const SCREEN: &str = "VGA,id=display0,addr=0x1,vgamem_mb=8";
/// Flash memory: the program of the firmware, and its variables, which are a disk to all but the guest.
const CODE: &str = "uefi-code";

struct Value(OsString);

impl Value {
    fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().into())
    }

    fn text(mut self, text: impl AsRef<str>) -> Self {
        self.0.push(text.as_ref());
        self
    }

    /// Appends a path. QEMU reads a doubled comma as one that is part of the value.
    fn path(mut self, path: &Path) -> Self {
        let mut bytes = Vec::with_capacity(path.as_os_str().len());
        for byte in path.as_os_str().as_bytes() {
            bytes.extend(std::iter::repeat_n(*byte, if *byte == b',' { 2 } else { 1 }));
        }
        self.0.push(OsString::from_vec(bytes));
        self
    }
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn flag(&mut self, name: &str) {
        self.0.push(name.into());
    }

    fn option(&mut self, name: &str, value: impl AsRef<OsStr>) {
        self.0.push(name.into());
        self.0.push(value.as_ref().into());
    }

    fn value(&mut self, name: &str, value: Value) {
        self.option(name, value.0);
    }
}

impl LaunchSpec {
    /// Arguments of QEMU, without the program's name. The machine starts paused.
    pub fn argv(&self) -> Result<Vec<OsString>, SpecError> {
        self.check()?;
        let mut args = Args::default();
        self.machine(&mut args);
        self.boot(&mut args);
        self.channels(&mut args);
        self.platform_devices(&mut args);
        (0..self.config.nics.len()).for_each(|index| self.nic(&mut args, index));
        guest_disks(&self.config).for_each(|index| self.disk(&mut args, index));
        // Paused, so that the caller can arm dirty tracking before the first instruction.
        args.flag("-S");
        if self.incoming {
            args.option("-incoming", "defer");
        }
        Ok(args.0)
    }

    fn machine(&self, args: &mut Args) {
        let config = &self.config;
        let mib = config.memory.0 >> 20;
        args.flag("-no-user-config");
        args.flag("-nodefaults");
        args.option("-sandbox", SANDBOX);
        args.option("-display", "none");
        args.option("-vga", "none");
        if config.display {
            let server = Value::new("unix:").path(&self.display_socket());
            // All who look see the same, and none of them can switch the machine off past its owner.
            args.value("-vnc", server.text(",share=force-shared,power-control=off"));
        }
        let accel = match config.accel {
            Accel::Tcg => "tcg,thread=multi",
            Accel::Kvm => "kvm",
        };
        args.option("-accel", accel);
        let firmware = self.firmware(args);
        args.option("-machine", format!("{},memory-backend=ram0,vmport=off{firmware}", config.machine));
        args.option("-cpu", &config.cpu);
        args.option("-smp", config.cpus.to_string());
        args.option("-m", format!("{mib}M"));
        let share = match self.ram.sharing {
            Sharing::Shared => "on",
            Sharing::Private => "off",
        };
        let ram = Value::new(format!("memory-backend-file,id=ram0,size={mib}M,share={share},mem-path="));
        args.value("-object", ram.path(&self.ram.path));
        // A machine that is switched off stays, so that its end differs from a crash, and its disks can still
        // be saved. The reaction to a guest panic is left to the guest.
        args.option("-action", "shutdown=pause,panic=none");
    }

    /// Firmware of the machine; returns the options of the machine type for it.
    fn firmware(&self, args: &mut Args) -> String {
        match (&self.firmware, self.config.firmware.uefi()) {
            (Some(code), Some(uefi)) => {
                let variables = uefi.variables as usize;
                let node = Value::new(format!("driver=raw,node-name={CODE},read-only=on,file.driver=file,"));
                args.value("-blockdev", node.text("file.filename=").path(code));
                self.disk_node(args, variables);
                let smm = if uefi.secure { self.secure_boot(args) } else { "" };
                format!(",pflash0={CODE},pflash1=disk{variables}{smm}")
            }
            _ if self.config.firmware == Firmware::Micro => {
                args.option("-bios", KERNEL_LOADER);
                WITHOUT_PC_PARTS.to_owned()
            }
            _ => String::new(),
        }
    }

    /// Keeps the variables from everything but the firmware, which has a mode of the processor (SMM) to
    /// itself. Sleep to memory would leave that open (edk2, OvmfPkg/README, SMM support).
    fn secure_boot(&self, args: &mut Args) -> &'static str {
        args.option("-global", "driver=cfi.pflash01,property=secure,value=on");
        args.option("-global", "ICH9-LPC.disable_s3=1");
        ",smm=on"
    }

    fn boot(&self, args: &mut Args) {
        if let Some(kernel) = &self.kernel {
            args.option("-kernel", kernel);
        }
        if let Some(initrd) = &self.initrd {
            // The only path in which QEMU takes a comma for the start of a second file, on multiboot kernels.
            args.value("-initrd", Value::new("").path(initrd));
        }
        if let Some(boot) = &self.config.boot {
            args.option("-append", &boot.append);
        }
    }

    fn channels(&self, args: &mut Args) {
        let listen = ",server=on,wait=off";
        args.value("-qmp", Value::new("unix:").path(&self.qmp_socket()).text(listen));
        let serial = Value::new("socket,id=serial0,path=").path(&self.serial_socket());
        args.value("-chardev", serial.text(listen));
        args.option("-serial", "chardev:serial0");
        let guest = Value::new("socket,id=guest0,path=").path(&self.guest_socket());
        args.value("-chardev", guest.text(listen));
        if self.config.agent_port {
            let agent = Value::new("socket,id=agent0,path=").path(&self.agent_socket());
            args.value("-chardev", agent.text(listen));
        }
    }

    fn platform_devices(&self, args: &mut Args) {
        if self.balloon {
            let balloon = format!("virtio-balloon-pci,id=balloon0,addr=0x2,free-page-reporting=on,{LEGACY}");
            args.option("-device", balloon);
        }
        args.option("-device", format!("virtio-rng-pci,id=rng0,addr=0x3,{LEGACY}"));
        // Port 0 is for consoles.
        let ports = if self.config.agent_port { 3 } else { 2 };
        args.option("-device", format!("virtio-serial-pci,id=port0,addr=0x4,max_ports={ports},{LEGACY}"));
        args.option(
            "-device",
            "virtserialport,id=guest0-port,bus=port0.0,nr=1,chardev=guest0,name=org.whimbrel.guest.0",
        );
        if self.config.agent_port {
            let port = format!("id=agent0-port,bus=port0.0,nr=2,chardev=agent0,name={QEMU_GA_PORT}");
            args.option("-device", format!("virtserialport,{port}"));
        }
        if self.config.display {
            args.option("-device", SCREEN);
            // A tablet says where the pointer is, as a viewer does; a mouse says how far it went.
            args.option("-device", "qemu-xhci,id=usb0,addr=0x5");
            args.option("-device", "usb-tablet,id=tablet0,bus=usb0.0,port=1");
        }
        if self.config.hotplug.is_some() {
            args.option("-device", devices::BRIDGE);
        }
        args.option("-device", "pvpanic,id=panic0");
        self.tpm(args);
        if self.config.firmware == Firmware::Micro {
            // The loader stops at the generation id: its table needs a command of ACPI's loader that qboot
            // does not have.
            return;
        }
        let guid = self.vmgenid.map_or_else(|| "auto".to_owned(), |guid| guid.to_string());
        args.option("-device", format!("vmgenid,id=vmgenid0,guid={guid}"));
    }

    /// A TPM behind the interface of older ones (FIFO), whose registers are in the device state. Those of the
    /// newer interface (CRB) are memory, and the header of every later state would change with each command.
    fn tpm(&self, args: &mut Args) {
        let Some(control) = &self.tpm else { return };
        args.option("-chardev", format!("socket,id=tpm0-control,fd={}", control.as_raw_fd()));
        args.option("-tpmdev", "emulator,id=tpm0,chardev=tpm0-control");
        args.option("-device", "tpm-tis,id=tpm0-port,tpmdev=tpm0,ppi=off");
    }

    fn nic(&self, args: &mut Args, index: usize) {
        match &self.network {
            // The kernel's own server of virtio (vhost) would read guest memory past QEMU.
            Some(taps) => {
                let fd = taps.taps[index].as_raw_fd();
                args.option("-netdev", format!("tap,id=net{index},fd={fd},vhost=off"));
            }
            None => {
                let netdev = Value::new(format!("stream,id=net{index},server=on,addr.type=unix,addr.path="));
                args.value("-netdev", netdev.path(&self.net_socket(index)));
            }
        }
        args.option("-device", devices::nic(&self.config, index));
    }

    /// A disk as QEMU sees it, by the name of its id, without a device for the guest.
    fn disk_node(&self, args: &mut Args, index: usize) {
        let id = format!("disk{index}");
        let nbd = Value::new(format!("driver=nbd,node-name={id}-nbd,server.type=unix,server.path="));
        let read_only = if self.config.cdroms.has(index) { ",read-only=on" } else { "" };
        let common = format!(",cache.direct=on,discard=unmap{read_only}");
        let rest = format!(",export=,reconnect-delay={RECONNECT_DELAY}{common}");
        args.value("-blockdev", nbd.path(&self.disks[index]).text(rest));
        args.option("-blockdev", format!("driver=raw,node-name={id},file={id}-nbd{common}"));
    }

    fn disk(&self, args: &mut Args, index: usize) {
        self.disk_node(args, index);
        args.option("-device", devices::disk(&self.config, index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::RamBacking;
    use whimbrel_core::{
        ByteSize, CdromDrives, DeviceModel, DiskConfig, HotplugBridge, MachineConfig, NicConfig,
    };

    fn spec() -> LaunchSpec {
        let config = MachineConfig {
            memory: ByteSize(64 << 20),
            cpus: 2,
            machine: "pc-q35-7.2".into(),
            cpu: "max,-avx512f".into(),
            accel: Accel::Tcg,
            disks: vec![DiskConfig { size: ByteSize(1 << 20) }],
            nics: vec![NicConfig { mac: "52:54:00:00:00:01".into(), bridge: None }],
            boot: None,
            agent_port: true,
            firmware: Firmware::Bios,
            tpm: None,
            display: false,
            devices: DeviceModel::Virtio,
            cdroms: CdromDrives::default(),
            hotplug: None,
        };
        let ram = RamBacking { path: "/ram,share=off".into(), sharing: Sharing::Shared };
        LaunchSpec { disks: vec!["/nbd".into()], ..LaunchSpec::new(config, "/slot", ram) }
    }

    #[test]
    fn a_comma_in_a_path_cannot_smuggle_in_an_option() {
        let argv = spec().argv().unwrap();
        let object = argv.iter().position(|arg| arg == "-object").unwrap() + 1;
        assert_eq!(argv[object], "memory-backend-file,id=ram0,size=64M,share=on,mem-path=/ram,,share=off");
    }

    #[test]
    fn a_machine_of_before_the_agent_port_gets_the_devices_that_its_state_was_saved_with() {
        let ports = |agent_port| {
            let mut spec = spec();
            spec.config.agent_port = agent_port;
            let words = spec.argv().unwrap().into_iter().map(|word| word.into_string().unwrap());
            words.filter(|word| word.contains("port0") || word.contains("agent")).collect::<Vec<_>>()
        };
        let old = ports(false);
        assert!(
            old.len() == 2 && old[0].contains("max_ports=2") && !old.concat().contains("agent"),
            "{old:?}"
        );
        let new = ports(true);
        assert!(new.len() == 4 && new[1].contains("max_ports=3") && new[3].contains("nr=2"), "{new:?}");
    }

    #[test]
    fn variables_are_flash_memory_and_no_disk_and_the_loader_meets_no_generation_id() {
        let words = |firmware, path: Option<&str>| {
            let mut spec = spec();
            (spec.config.firmware, spec.firmware) = (firmware, path.map(Into::into));
            spec.argv().map(|words| words.iter().map(|word| word.to_string_lossy().into_owned()).collect())
        };
        let has = |words: &Vec<String>, part: &str| words.iter().any(|word| word.contains(part));
        let of = |variables, secure| {
            let code = whimbrel_core::Digest::of(b"");
            Firmware::Uefi(whimbrel_core::Uefi { code, variables, secure })
        };
        let uefi = |variables| of(variables, false);
        let flash: Vec<String> = words(uefi(0), Some("/code")).unwrap();
        let secure: Vec<String> = words(of(0, true), Some("/code")).unwrap();
        assert!(has(&secure, "smm=on") && has(&secure, "property=secure,value=on"), "{secure:?}");
        assert!(!has(&flash, "smm") && !has(&flash, "property=secure"), "{flash:?}");
        assert!(has(&flash, "pflash0=uefi-code,pflash1=disk0") && has(&flash, "read-only=on"), "{flash:?}");
        assert!(!has(&flash, "virtio-blk-pci") && has(&flash, "vmgenid"), "{flash:?}");
        let micro = words(Firmware::Micro, None).unwrap();
        assert!(has(&micro, KERNEL_LOADER) && !has(&micro, "vmgenid"), "{micro:?}");
        assert!(words(uefi(1), Some("/code")).is_err() && words(uefi(0), None).is_err());
    }

    #[test]
    fn a_tpm_has_a_disk_that_the_guest_never_sees_and_needs_its_connection() {
        let mut spec = spec();
        spec.config.tpm = Some(0);
        assert!(spec.argv().is_err(), "without its connection");
        spec.tpm = Some(std::sync::Arc::new(std::fs::File::open("/dev/null").unwrap().into()));
        let words = spec.argv().unwrap().into_iter().map(|word| word.into_string().unwrap());
        let words: Vec<_> = words.collect();
        let has = |part: &str| words.iter().any(|word| word.contains(part));
        assert!(has("tpm-tis") && !has("disk0") && !has("virtio-blk"), "{words:?}");
        spec.config.tpm = Some(1);
        assert!(spec.argv().is_err(), "with a disk that is not there");
    }

    #[test]
    fn a_cdrom_and_emulated_disks_are_at_ports_of_the_sata_controller() {
        let devices = |devices, first, disks: usize| {
            let mut spec = spec();
            spec.config.devices = devices;
            spec.config.cdroms = CdromDrives { disks: vec![1], first };
            spec.config.disks = vec![DiskConfig { size: ByteSize(1 << 20) }; disks];
            spec.disks = vec!["/nbd".into(); disks];
            let words = spec.argv()?.into_iter().map(|word| word.into_string().unwrap());
            let is_part =
                |word: &String| ["ide", "virtio-blk", "e1000"].iter().any(|kind| word.starts_with(kind));
            Ok::<_, SpecError>(words.filter(is_part).collect::<Vec<_>>())
        };
        let has = |word: &str, parts: &[&str]| {
            assert!(parts.iter().all(|part| word.contains(part)), "{word}");
        };
        let virtio = devices(DeviceModel::Virtio, false, 3).unwrap();
        has(&virtio[0], &["virtio-blk-pci,id=disk0", "addr=0x10", "bootindex=0"]);
        has(&virtio[1], &["ide-cd,id=disk1", "bus=ide.0", "bootindex=15"]);
        has(&virtio[2], &["virtio-blk-pci,id=disk2", "addr=0x12", "bootindex=2"]);
        let emulated = devices(DeviceModel::Emulated, true, 3).unwrap();
        has(&emulated[0], &["e1000,id=nic0"]);
        has(&emulated[1], &["ide-hd,id=disk0", "bus=ide.0", "bootindex=14"]);
        has(&emulated[2], &["ide-cd,id=disk1", "bus=ide.1", "bootindex=1"]);
        has(&emulated[3], &["ide-hd,id=disk2", "bus=ide.2"]);
        assert!(devices(DeviceModel::Emulated, false, 7).is_err(), "the controller has six ports");
        assert!(devices(DeviceModel::Virtio, false, 1).is_err(), "a drive without its medium");
    }

    #[test]
    fn devices_that_were_added_to_a_running_machine_stay_on_their_bridge() {
        let mut spec = spec();
        spec.config.disks = vec![DiskConfig { size: ByteSize(1 << 20) }; 2];
        spec.disks = vec!["/nbd".into(); 2];
        spec.config.nics = vec![spec.config.nics[0].clone(); 2];
        let words = |spec: &LaunchSpec| spec.argv().unwrap().join(" ".as_ref()).into_string().unwrap();
        assert!(!words(&spec).contains("hotplug0"));
        spec.config.hotplug = Some(HotplugBridge { disks: vec![1], nics: vec![1] });
        let words = words(&spec);
        for part in
            ["pci-bridge,id=hotplug0", "bus=hotplug0,addr=0x11", "bus=hotplug0,addr=0x9", ",addr=0x10"]
        {
            assert!(words.contains(part), "no {part}: {words}");
        }
        assert_eq!(words.matches("bus=hotplug0").count(), 2);
    }

    #[test]
    fn words_that_would_be_several_options_are_refused() {
        let refused = |change: fn(&mut LaunchSpec)| {
            let mut spec = spec();
            change(&mut spec);
            assert!(spec.argv().is_err(), "{spec:?}");
        };
        assert!(spec().argv().is_ok());
        refused(|spec| spec.config.machine = "q35,accel=kvm".into());
        refused(|spec| spec.config.machine = String::new());
        refused(|spec| spec.config.cpu = "max -enable-kvm".into());
        refused(|spec| spec.config.nics[0].mac = "52:54:00:00:00:01,x=y".into());
        refused(|spec| spec.config.memory.0 += 1);
        refused(|spec| spec.config.memory.0 = 0);
        refused(|spec| spec.config.cpus = 0);
        refused(|spec| spec.disks.clear());
        refused(|spec| spec.kernel = Some("/kernel".into()));
        refused(|spec| spec.dir = "/x".repeat(54).into());
        refused(|spec| spec.config.nics = vec![spec.config.nics[0].clone(); 9]);
    }
}
