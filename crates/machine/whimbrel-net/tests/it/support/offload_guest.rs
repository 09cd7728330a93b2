//! A real guest whose network port leaves checksums and the cutting of segments to the network, or not.

use crate::support::PATIENCE;
use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::net::UnixStream,
    sync::Arc,
    time::Duration,
};
use tempfile::TempDir;
use whimbrel_core::{Boot, ByteSize, Digest, MachineConfig, NicConfig};
use whimbrel_machine::Machine;
use whimbrel_net::{Gates, GuestNetwork, GuestSide, Mac, Port, PortConfig, PortFilter, TapConfig, Uplink};
use whimbrel_qemu::{LaunchSpec, Qemu, RamBacking, Sharing, TapDevices, probe};
use whimbrel_testkit::{
    guest::{GuestFiles, GuestOptions, TestAgent},
    lab::Lab,
};

const GUEST: [u8; 4] = [10, 77, 0, 100];
/// Guest beside it, whose QEMU has a tap of its own in the bridge.
const PEER: [u8; 4] = [10, 77, 0, 101];

/// What QEMU has for a network port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// What an earlier version gave it.
    Stream,
    Tap,
}

/// The guest on host `alpha`. Ended with the value.
pub(crate) struct OffloadGuest {
    port: Port,
    qemu: Option<Qemu>,
    spec: LaunchSpec,
    _place: TempDir,
}

impl OffloadGuest {
    /// Boots it, with its port in the bridge of `alpha`.
    pub(crate) fn boot(lab: &Lab, link: Link) -> Self {
        let place = place();
        let spec = spec(&place, link, GUEST);
        let qemu = Qemu::launch(&probe().unwrap().path, &spec).unwrap();
        let mut guest = Self::plugged(lab, place, spec, qemu);
        guest.qemu().unpause().unwrap();
        wait_ready(&guest.spec);
        guest
    }

    /// Ends this QEMU and goes on in another one. Returns what that one says of the state, if it refuses it.
    pub(crate) fn go_on(mut self, lab: &Lab, link: Link) -> Result<Self, String> {
        self.qemu().pause().unwrap();
        let state = self.qemu().device_state().unwrap();
        let place = place();
        fs::copy(&self.spec.ram.path, place.path().join("ram")).unwrap();
        drop(self);
        let spec = LaunchSpec { incoming: true, ..spec(&place, link, GUEST) };
        let mut qemu = Qemu::launch(&probe().unwrap().path, &spec).unwrap();
        if qemu.load(&state).is_err() {
            qemu.kill();
            return Err(fs::read_to_string(spec.log()).unwrap());
        }
        let mut guest = Self::plugged(lab, place, spec, qemu);
        guest.qemu().unpause().unwrap();
        Ok(guest)
    }

    fn plugged(lab: &Lab, place: TempDir, mut spec: LaunchSpec, qemu: Qemu) -> Self {
        let link = if spec.network.take().is_some() { Link::Tap } else { Link::Stream };
        let device = qemu.tap_device(0).unwrap();
        assert_eq!(device.is_some(), link == Link::Tap);
        let guest = match link {
            Link::Stream => GuestSide::Stream(spec.net_socket(0)),
            Link::Tap => GuestSide::Tap { namespace: qemu.network().unwrap(), device, port: 0 },
        };
        let tap = TapConfig { name: "tap%d".into(), bridge: Some("br0".into()) };
        let filter = PortFilter::Only(mac(GUEST));
        let config = PortConfig { guest, uplink: Uplink::Tap(tap), gates: Gates::OPEN, filter };
        let alpha = lab.host("alpha");
        let port = alpha.run(|| Port::open(config)).unwrap();
        alpha.wait_forwarding().unwrap();
        assert!(port.wait_connected(PATIENCE));
        assert_eq!(port.has_offloads(), link == Link::Tap);
        Self { port, qemu: Some(qemu), spec, _place: place }
    }

    /// Boots the guest again, by its own wish.
    pub(crate) fn reboot(&mut self) {
        let console = UnixStream::connect(self.spec.serial_socket()).unwrap();
        let mut agent = TestAgent::over_console(console).unwrap();
        let before = agent.state().unwrap();
        agent.reboot().unwrap();
        agent.wait_ready(Duration::from_secs(60)).unwrap();
        assert_ne!(agent.state().unwrap().nonce, before.nonce);
    }

    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    fn qemu(&mut self) -> &mut Qemu {
        self.qemu.as_mut().unwrap()
    }

    /// Address of a service of the test agent.
    pub(crate) fn at(port: u16) -> SocketAddr {
        SocketAddr::from((GUEST, port))
    }
}

/// The same guest, whose QEMU's tap is itself in the bridge of `alpha`. Ended with the value.
pub(crate) struct PeerGuest {
    qemu: Option<Qemu>,
    _place: TempDir,
}

impl PeerGuest {
    pub(crate) fn boot(lab: &Lab) -> Self {
        let place = place();
        let mut spec = spec(&place, Link::Tap, PEER);
        let mut qemu = Qemu::launch(&probe().unwrap().path, &spec).unwrap();
        spec.network = None;
        let alpha = lab.host("alpha");
        let entered = format!("--net=/proc/{}/ns/net", qemu.pid());
        let moved = ["nsenter", &entered, "ip", "link", "set", "net0", "netns", &alpha.path()].join(" ");
        alpha.output("sh", &["-c", &moved]).unwrap();
        alpha.ip("link set net0 address fe:54:00:77:00:65 mtu 1500 master br0 up").unwrap();
        alpha.wait_forwarding().unwrap();
        qemu.unpause().unwrap();
        wait_ready(&spec);
        Self { qemu: Some(qemu), _place: place }
    }

    pub(crate) fn at(port: u16) -> SocketAddr {
        SocketAddr::from((PEER, port))
    }
}

impl Drop for PeerGuest {
    fn drop(&mut self) {
        self.qemu.take().into_iter().for_each(Qemu::kill);
    }
}

fn wait_ready(spec: &LaunchSpec) {
    let console = UnixStream::connect(spec.serial_socket()).unwrap();
    TestAgent::over_console(console).unwrap().wait_ready(Duration::from_secs(120)).unwrap();
}

fn mac([.., last]: [u8; 4]) -> Mac {
    Mac([0x52, 0x54, 0, 0x77, 0, last])
}

impl Drop for OffloadGuest {
    fn drop(&mut self) {
        self.qemu.take().into_iter().for_each(Qemu::kill);
    }
}

fn place() -> TempDir {
    tempfile::Builder::new().prefix("wn").tempdir_in("/dev/shm").unwrap()
}

fn spec(place: &TempDir, link: Link, address: [u8; 4]) -> LaunchSpec {
    let files = GuestFiles::get();
    let own = format!("{}/24", Ipv4Addr::from(address));
    let options = GuestOptions { address: Some(own), buffer_mib: 4, ..Default::default() };
    let digest = Digest::of(b"not looked at");
    let config = MachineConfig {
        machine: probe().unwrap().machine_type("q35").unwrap().to_owned(),
        nics: vec![NicConfig { mac: mac(address).to_string(), bridge: None }],
        boot: Some(Boot { kernel: digest, initrd: Some(digest), append: options.to_string() }),
        ..MachineConfig::minimal(ByteSize(256 << 20))
    };
    let network = (link == Link::Tap).then(|| {
        let GuestNetwork { namespace, taps } = GuestNetwork::create(1).unwrap();
        Arc::new(TapDevices { namespace, taps })
    });
    let ram = RamBacking { path: place.path().join("ram"), sharing: Sharing::Shared };
    LaunchSpec {
        kernel: Some(files.kernel.clone()),
        initrd: Some(files.initrd.clone()),
        network,
        ..LaunchSpec::new(config, place.path(), ram)
    }
}
