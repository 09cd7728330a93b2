//! Seed disk of a new machine: what cloud-init in the guest reads at its first boot.
//!
//! A small FAT file system with the label CIDATA, as cloud-init's data source NoCloud wants it
//! (docs.cloud-init.io, "NoCloud"): `meta-data`, `user-data` and, if it is not DHCP, `network-config`. The
//! file lies in the machine's folder and is the base of its last disk, so the seed goes wherever the machine
//! goes.

use crate::{
    core::error::DaemonError,
    machine::record::{DiskBase, Record},
};
use ipnet::{IpNet, Ipv4Net};
use std::{
    fs,
    io::{Cursor, Write},
    path::Path,
};
use whimbrel_api::{CloudInit, StaticAddress};
use whimbrel_core::{ByteSize, DiskConfig, MachineName};
use whimbrel_wire::atomic_file;

/// Name of the file in the machine's folder.
const FILE: &str = "seed.img";
/// Bytes of the file system: room for two texts of the greatest length.
const SIZE: usize = 2 << 20;
/// Label of the file system, padded with blanks.
const LABEL: &[u8; 11] = b"CIDATA     ";
/// Longest text of a user.
const TEXT_MAX: usize = 512 << 10;
/// Most keys that are taken.
const KEYS_MAX: usize = 64;
/// User data that changes nothing.
const NOTHING: &str = "#cloud-config\n{}\n";

/// Most name servers of an address; the resolver of Linux asks no more (resolv.conf(5), `MAXNS`).
const NAMESERVERS_MAX: usize = 3;

/// Checks what a user wants the guest to be told; `has_port` is whether the machine has a network port.
pub(crate) fn check(wanted: &CloudInit, has_port: bool) -> Result<(), DaemonError> {
    check_names(wanted, has_port)?;
    let texts = [("user data", &wanted.user_data), ("network configuration", &wanted.network_config)];
    for (what, text) in texts {
        if text.as_ref().is_some_and(|text| text.len() > TEXT_MAX) {
            return Err(DaemonError::invalid(format!("the {what} is longer than {} KiB", TEXT_MAX >> 10)));
        }
    }
    let starts =
        |text: &String| ["#", "Content-Type:", "MIME-Version:"].iter().any(|start| text.starts_with(start));
    if !wanted.user_data.as_ref().is_none_or(starts) {
        return Err(DaemonError::invalid(
            "cloud-init would ignore this user data: it must begin with #cloud-config, #! or a MIME header",
        ));
    }
    if wanted.ssh_keys.len() > KEYS_MAX {
        return Err(DaemonError::invalid(format!("at most {KEYS_MAX} SSH keys can be given")));
    }
    match wanted.ssh_keys.iter().find(|key| !is_public_key(key)) {
        Some(key) => Err(DaemonError::invalid(format!(
            "{:?} is not a public SSH key, like `ssh-ed25519 AAAA… name`",
            key.chars().take(40).collect::<String>()
        ))),
        None => Ok(()),
    }
}

/// Checks the host name and the address that the guest is told.
fn check_names(wanted: &CloudInit, has_port: bool) -> Result<(), DaemonError> {
    if let Some(name) = wanted.hostname.as_ref().filter(|name| !is_hostname(name)) {
        let shown: String = name.chars().take(80).collect();
        return Err(DaemonError::invalid(format!(
            "{shown:?} is no host name: labels of letters, digits and hyphens, with dots between them"
        )));
    }
    if let Some(wanted_address) = &wanted.address {
        if wanted.network_config.is_some() {
            let text =
                "an address and a network configuration exclude each other: put the address into the file";
            return Err(DaemonError::invalid(text));
        }
        if !has_port {
            return Err(DaemonError::invalid("the machine has no network port that could have the address"));
        }
        parse_address(wanted_address)?;
    }
    Ok(())
}

/// IPv4 address that the guest is told, if it is told one.
pub(crate) fn ipv4_of(wanted: Option<&CloudInit>) -> Option<Ipv4Net> {
    match parse_address(wanted?.address.as_ref()?).ok()? {
        IpNet::V4(address) => Some(address),
        IpNet::V6(_) => None,
    }
}

/// The address with the length of its network. The gateway is of the same family, and another one.
fn parse_address(wanted: &StaticAddress) -> Result<IpNet, DaemonError> {
    let shown: String = wanted.address.chars().take(80).collect();
    let address: IpNet = wanted.address.parse().map_err(|_| {
        DaemonError::invalid(format!(
            "{shown:?} is no address with the length of its network, like 10.1.2.5/24"
        ))
    })?;
    // Networks of two addresses or one have neither (RFC 3021, RFC 6164).
    let has_both = address.max_prefix_len() - address.prefix_len() >= 2;
    let is_network = has_both && address.addr() == address.network();
    let is_broadcast = has_both && matches!(address, IpNet::V4(net) if net.addr() == net.broadcast());
    let addr = address.addr();
    if is_network || is_broadcast || addr.is_multicast() || addr.is_loopback() || addr.is_unspecified() {
        return Err(DaemonError::invalid(format!("{shown} is no address that a machine can have")));
    }
    if let Some(gateway) = wanted.gateway
        && (gateway.is_ipv4() != addr.is_ipv4() || gateway == addr)
    {
        return Err(DaemonError::invalid(format!("{gateway} cannot be the gateway of {shown}")));
    }
    match wanted.nameservers.len() > NAMESERVERS_MAX {
        true => Err(DaemonError::invalid(format!("at most {NAMESERVERS_MAX} name servers can be given"))),
        false => Ok(address),
    }
}

/// Whether it is a host name (RFC 1123, 2.1), at most 253 bytes.
fn is_hostname(name: &str) -> bool {
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// The disk of a seed in a machine's folder, and what lies beneath it.
pub(crate) fn disk(folder: &Path) -> (DiskConfig, DiskBase) {
    (DiskConfig { size: ByteSize(SIZE as u64) }, DiskBase::File { path: folder.join(FILE) })
}

/// Whether a disk of a capsule is a seed disk, by its size and its first sector: the label of FAT12 or FAT16
/// (fatgen103, "BS_VolLab").
pub(crate) fn is_seed(disk: &DiskConfig, sector: &[u8]) -> bool {
    disk.size.0 == SIZE as u64 && sector.get(43..54) == Some(LABEL)
}

/// Writes the seed into a machine's folder, durably.
pub(crate) fn write(folder: &Path, record: &Record, wanted: &CloudInit) -> Result<(), DaemonError> {
    let path = folder.join(FILE);
    let failed = |source| DaemonError::io("write", &path, source);
    let address = wanted.address.as_ref().zip(record.config.nics.first());
    let made = address.map(|(address, nic)| network_config(address, &nic.mac)).transpose()?;
    let network = made.as_deref().or(wanted.network_config.as_deref());
    let image = image(&record.name, wanted, network).map_err(failed)?;
    fs::write(&path, image).and_then(|()| fs::File::open(&path)?.sync_all()).map_err(failed)?;
    atomic_file::sync_dir(folder).map_err(failed)
}

/// An id by which cloud-init knows that this is a new machine.
fn instance_id() -> String {
    format!("i-{:016x}", rand::random::<u64>())
}

/// Network configuration of one address, in cloud-init's version 1, which it can apply in every distribution
/// (docs.cloud-init.io, "Networking config Version 1"). JSON is YAML.
fn network_config(wanted: &StaticAddress, mac: &str) -> Result<String, DaemonError> {
    let address = parse_address(wanted)?;
    let kind = if address.addr().is_ipv4() { "static" } else { "static6" };
    let mut subnet = serde_json::json!({ "type": kind, "address": address.to_string() });
    if let Some(gateway) = wanted.gateway {
        subnet["gateway"] = gateway.to_string().into();
    }
    if !wanted.nameservers.is_empty() {
        subnet["dns_nameservers"] = serde_json::json!(wanted.nameservers);
    }
    let port = serde_json::json!({
        "type": "physical", "name": "eth0", "mac_address": mac, "subnets": [subnet],
    });
    Ok(serde_json::json!({ "version": 1, "config": [port] }).to_string())
}

fn image(name: &MachineName, wanted: &CloudInit, network: Option<&str>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; SIZE];
    let label = fatfs::FormatVolumeOptions::new().volume_label(*LABEL);
    fatfs::format_volume(Cursor::new(&mut bytes[..]), label)?;
    let volume = fatfs::FileSystem::new(Cursor::new(&mut bytes[..]), fatfs::FsOptions::new())?;
    let hostname = wanted.hostname.clone().unwrap_or_else(|| whimbrel_net::managed::host_label(name));
    let meta = serde_json::json!({
        "instance-id": instance_id(),
        "local-hostname": hostname,
        "public-keys": wanted.ssh_keys,
    });
    let user = wanted.user_data.as_deref().unwrap_or(NOTHING);
    let files = [("meta-data", Some(&*meta.to_string())), ("user-data", Some(user))];
    for (file, text) in files.into_iter().chain([("network-config", network)]) {
        let Some(text) = text else { continue };
        volume.root_dir().create_file(file)?.write_all(text.as_bytes())?;
    }
    volume.unmount()?;
    Ok(bytes)
}

/// Whether `text` is one line of a kind, a key and perhaps a comment (sshd(8), "AUTHORIZED_KEYS").
fn is_public_key(text: &str) -> bool {
    let mut words = text.split(' ');
    let kind = words
        .next()
        .is_some_and(|kind| ["ssh-", "ecdsa-", "sk-"].iter().any(|start| kind.starts_with(start)));
    let base64 = |byte: u8| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte);
    kind && words.next().is_some_and(|key| key.len() >= 32 && key.bytes().all(base64))
        && !text.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use whimbrel_core::{MachineConfig, NicConfig};

    const KEY: &str =
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0i0xV0sZ0nq3o0r6JbqgqQ0d8kq2wV8m2s3sZb1e2F me@home";

    /// A machine `web.1` with this many network ports.
    fn record(ports: usize) -> Record {
        let mut config = MachineConfig::minimal(ByteSize(64 << 20));
        config.nics = vec![NicConfig { mac: "52:54:00:00:00:07".to_owned(), bridge: None }; ports];
        Record::new("web.1".parse().expect("a name"), config, Vec::new())
    }

    fn wanted() -> CloudInit {
        CloudInit { ssh_keys: vec![KEY.to_owned()], ..CloudInit::default() }
    }

    #[test]
    fn other_programs_find_the_label_and_the_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let user = "#cloud-config\npackages: [nginx]\n".to_owned();
        let all = CloudInit {
            user_data: Some(user.clone()),
            network_config: Some("version: 2\n".into()),
            ..wanted()
        };
        write(dir.path(), &record(0), &all).expect("a seed");
        let path = dir.path().join(FILE);
        let (disk, _) = disk(dir.path());
        assert!(is_seed(&disk, &fs::read(&path).expect("a seed")[..512]) && !is_seed(&disk, &[0; 512]));
        let said = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output().expect("a program of the host");
            String::from_utf8(output.stdout).expect("text")
        };
        let path = path.to_str().expect("a path in UTF-8");
        assert_eq!(said("blkid", &["-p", "-o", "value", "-s", "LABEL", path]).trim(), "CIDATA");
        assert_eq!(said("mtype", &["-i", path, "::user-data"]), user);
        assert_eq!(said("mtype", &["-i", path, "::network-config"]), "version: 2\n");
        let meta: serde_json::Value =
            serde_json::from_str(&said("mtype", &["-i", path, "::meta-data"])).expect("JSON");
        assert_eq!((&meta["local-hostname"], &meta["public-keys"][0]), (&"web-1".into(), &KEY.into()));
        assert!(meta["instance-id"].as_str().is_some_and(|id| id.len() > 8), "{meta}");
    }

    #[test]
    fn what_cloud_init_would_ignore_or_misread_is_refused() {
        check(&wanted(), false).expect("a key");
        for key in
            ["", "ssh-ed25519", "AAAAC3NzaC1lZDI1NTE5AAAAIJ0i0xV0sZ0nq3o0r6Jb", &format!("{KEY}\nssh-rsa x")]
        {
            assert!(check(&CloudInit { ssh_keys: vec![key.into()], ..wanted() }, false).is_err(), "{key}");
        }
        let user = |text: String| check(&CloudInit { user_data: Some(text), ..wanted() }, false);
        assert!(user("#!/bin/sh\n".into()).is_ok() && user("packages: []".into()).is_err());
        assert!(user("#".repeat(TEXT_MAX + 1)).is_err());
    }

    fn address(address: &str, gateway: Option<&str>) -> CloudInit {
        let gateway = gateway.map(|gateway| gateway.parse().expect("an address"));
        let nameservers = vec!["9.9.9.9".parse().expect("an address")];
        CloudInit {
            address: Some(StaticAddress { address: address.to_owned(), gateway, nameservers }),
            ..CloudInit::default()
        }
    }

    #[test]
    fn a_guest_gets_the_host_name_and_the_address_that_are_asked_for() {
        let dir = tempfile::tempdir().expect("a directory");
        let asked =
            CloudInit { hostname: Some("db.example.org".into()), ..address("10.1.2.5/24", Some("10.1.2.1")) };
        check(&asked, true).expect("an address");
        write(dir.path(), &record(2), &asked).expect("a seed");
        let path = dir.path().join(FILE);
        let read = |file: &str| -> serde_json::Value {
            let output = Command::new("mtype").arg("-i").arg(&path).arg(format!("::{file}")).output();
            serde_json::from_slice(&output.expect("mtools").stdout).expect("JSON")
        };
        assert_eq!(read("meta-data")["local-hostname"], "db.example.org");
        let port = serde_json::json!({
            "type": "physical", "name": "eth0", "mac_address": "52:54:00:00:00:07",
            "subnets": [{
                "type": "static", "address": "10.1.2.5/24", "gateway": "10.1.2.1", "dns_nameservers": ["9.9.9.9"],
            }],
        });
        assert_eq!(read("network-config"), serde_json::json!({ "version": 1, "config": [port] }));
    }

    #[test]
    fn addresses_and_host_names_that_cannot_be_are_refused() {
        for good in ["10.0.0.4/31", "fd00::5/64", "192.168.1.7/32"] {
            check(&address(good, None), true).expect(good);
        }
        for bad in [
            "",
            "10.1.2.5",
            "10.1.2.5/33",
            "10.1.2.0/24",
            "10.1.2.255/24",
            "fd00::/64",
            "127.0.0.1/8",
            "ff02::1/64",
        ] {
            assert!(check(&address(bad, None), true).is_err(), "{bad}");
        }
        for gateway in ["fd00::1", "10.1.2.5"] {
            assert!(check(&address("10.1.2.5/24", Some(gateway)), true).is_err(), "{gateway}");
        }
        assert!(check(&address("10.1.2.5/24", None), false).is_err(), "there is no port");
        let both = CloudInit { network_config: Some("version: 2\n".into()), ..address("10.1.2.5/24", None) };
        assert!(check(&both, true).is_err());
        let long = "a".repeat(64);
        for name in ["", "-a", "a-", "a b", "a..b", "a\nb", long.as_str()] {
            let named = CloudInit { hostname: Some(name.into()), ..CloudInit::default() };
            assert!(check(&named, false).is_err(), "{name:?}");
        }
    }
}
