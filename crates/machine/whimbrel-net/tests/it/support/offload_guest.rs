//! A real guest whose network port leaves checksums and the cutting of segments to the network.

use crate::support::PATIENCE;
use std::{net::SocketAddr, os::unix::net::UnixStream, sync::Arc, time::Duration};
use tempfile::TempDir;
use whimbrel_core::{Boot, ByteSize, Digest, MachineConfig, NicConfig};
use whimbrel_machine::Machine;
use whimbrel_net::{Gates, GuestNetwork, GuestSide, Mac, Port, PortConfig, PortFilter, TapConfig, Uplink};
use whimbrel_qemu::{LaunchSpec, Qemu, RamBacking, Sharing, TapDevices, probe};
use whimbrel_testkit::{
    guest::{GuestFiles, GuestOptions, TestAgent},
    lab::Lab,
};

pub(crate) const GUEST: [u8; 4] = [10, 77, 0, 100];
const MAC: [u8; 6] = [0x52, 0x54, 0, 0x77, 0, 0x64];

/// The guest on host `alpha`. Ended with the value.
pub(crate) struct OffloadGuest {
    pub(crate) port: Option<Port>,
    pub(crate) qemu: Option<Qemu>,
    _place: TempDir,
}

impl OffloadGuest {
    /// Boots it, with its port in the bridge of `alpha`.
    pub(crate) fn boot(lab: &Lab) -> Self {
        let place = tempfile::Builder::new().prefix("wn").tempdir_in("/dev/shm").unwrap();
        let spec = spec(&place);
        let mut qemu = Qemu::launch(&probe().unwrap().path, &spec).unwrap();
        let tap = TapConfig { name: "tap0".into(), bridge: Some("br0".into()) };
        let device = qemu.tap_device(0).unwrap();
        assert!(device.is_some() && qemu.tap_device(1).unwrap().is_none());
        let guest = GuestSide::Tap { namespace: qemu.network().unwrap(), device, port: 0 };
        let filter = PortFilter::Only(Mac(MAC));
        let config = PortConfig { guest, uplink: Uplink::Tap(tap), gates: Gates::OPEN, filter };
        let alpha = lab.host("alpha");
        let port = alpha.run(|| Port::open(config)).unwrap();
        alpha.wait_forwarding().unwrap();
        qemu.unpause().unwrap();
        let console = UnixStream::connect(spec.serial_socket()).unwrap();
        TestAgent::over(console.try_clone().unwrap(), console).wait_ready(Duration::from_secs(120)).unwrap();
        assert!(port.has_offloads() && port.wait_connected(PATIENCE));
        Self { port: Some(port), qemu: Some(qemu), _place: place }
    }

    pub(crate) fn port(&self) -> &Port {
        self.port.as_ref().unwrap()
    }

    /// Address of a service of the test agent.
    pub(crate) fn at(port: u16) -> SocketAddr {
        SocketAddr::from((GUEST, port))
    }
}

impl Drop for OffloadGuest {
    fn drop(&mut self) {
        self.qemu.take().into_iter().for_each(Qemu::kill);
    }
}

fn spec(place: &TempDir) -> LaunchSpec {
    let files = GuestFiles::get();
    let options =
        GuestOptions { address: Some("10.77.0.100/24".into()), buffer_mib: 4, ..Default::default() };
    let digest = Digest::of(b"not looked at");
    let config = MachineConfig {
        machine: probe().unwrap().machine_type("q35").unwrap().to_owned(),
        nics: vec![NicConfig { mac: Mac(MAC).to_string(), bridge: None }],
        boot: Some(Boot { kernel: digest, initrd: Some(digest), append: options.to_string() }),
        ..MachineConfig::minimal(ByteSize(256 << 20))
    };
    let GuestNetwork { namespace, taps } = GuestNetwork::create(1).unwrap();
    let ram = RamBacking { path: place.path().join("ram"), sharing: Sharing::Shared };
    LaunchSpec {
        kernel: Some(files.kernel.clone()),
        initrd: Some(files.initrd.clone()),
        network: Some(Arc::new(TapDevices { namespace, taps })),
        ..LaunchSpec::new(config, place.path(), ram)
    }
}
