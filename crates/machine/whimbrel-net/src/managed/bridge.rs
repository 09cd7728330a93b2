//! The bridge of a managed network: made, brought up, and removed with iproute2.
//!
//! Its hardware address is fixed. A bridge without one takes that of a port, and changes it when the port
//! leaves; guests then lose their gateway for seconds.

use super::{
    ManagedNetwork, ProgramError, addresses,
    program::{run, set},
};
use std::net::Ipv4Addr;

/// Makes the bridge, or what it lacks, and lets packets through the host.
pub fn ensure(network: &ManagedNetwork) -> Result<(), ProgramError> {
    let name = network.name.as_str();
    if !exists(name) {
        let mac = addresses::bridge_mac(name).to_string();
        let add = ["link", "add", name, "address", &mac, "type", "bridge", "mcast_snooping", "0"];
        run("ip", &add, "")?;
    }
    let address = format!("{}/{}", network.gateway(), network.subnet.prefix_len());
    run("ip", &["addr", "replace", &address, "dev", name], "")?;
    if let Some(subnet6) = network.subnet6 {
        // The host advertises the network, and is not to listen to itself.
        set(&format!("ipv6/conf/{name}/accept_ra"), "0")?;
        let address = format!("{}/{}", addresses::gateway6(subnet6), subnet6.prefix_len());
        run("ip", &["-6", "addr", "replace", &address, "dev", name, "nodad"], "")?;
    }
    run("ip", &["link", "set", name, "up"], "")?;
    // For connections from the host itself to 127.0.0.1. The firewall drops such addresses from the bridge.
    set(&format!("ipv4/conf/{name}/route_localnet"), "1")?;
    if !network.isolated {
        set("ipv4/ip_forward", "1")?;
    }
    if network.subnet6.is_some() && !network.isolated {
        forward_ipv6()?;
    }
    Ok(())
}

/// Keeps frames that come from another host from being passed on to a third one. Each two hosts have a link
/// of their own, so none needs that, and no frame goes in a circle (bridge(8), `isolated`).
pub fn isolate(device: &str) -> Result<(), ProgramError> {
    run("ip", &["link", "set", "dev", device, "type", "bridge_slave", "isolated", "on"], "")
}

/// Removes the bridge, if it is there.
pub fn remove(name: &str) -> Result<(), ProgramError> {
    if exists(name) { run("ip", &["link", "del", name, "type", "bridge"], "") } else { Ok(()) }
}

/// Whether there is an interface of that name. Asks a socket, because `/sys` may show the interfaces of
/// another network namespace. Without an answer it counts as present: its first use will tell.
pub fn exists(name: &str) -> bool {
    use rustix::net::{AddressFamily, SocketType, netdevice, socket};
    let asked = socket(AddressFamily::INET, SocketType::DGRAM, None);
    asked.map_or(true, |socket| netdevice::name_to_index(&socket, name).is_ok())
}

/// IPv4 addresses of this host, with their interfaces.
pub fn addresses() -> Vec<(Ipv4Addr, String)> {
    use nix::ifaddrs::{InterfaceAddress, getifaddrs};
    let all = getifaddrs().into_iter().flatten();
    let address = |it: InterfaceAddress| Some((it.address?.as_sockaddr_in()?.ip(), it.interface_name));
    all.filter_map(address).collect()
}

/// A router does not take its own address from advertisements unless it is told to (`accept_ra` 2), so the
/// host would lose its IPv6 address where it has it from one.
fn forward_ipv6() -> Result<(), ProgramError> {
    let interfaces = std::fs::read_dir("/proc/sys/net/ipv6/conf").into_iter().flatten().flatten();
    for interface in interfaces {
        let path = interface.path().join("accept_ra");
        if std::fs::read_to_string(&path).is_ok_and(|now| now.trim() == "1") {
            let setting = format!("ipv6/conf/{}/accept_ra", interface.file_name().to_string_lossy());
            set(&setting, "2")?;
        }
    }
    set("ipv6/conf/all/forwarding", "1")
}
