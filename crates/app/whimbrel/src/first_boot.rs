//! Options of the verbs that create a machine about its first boot by cloud-init.

use crate::error::CliError;
use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
};
use whimbrel_api::{CloudInit, StaticAddress};

/// Longest file of keys that is read by itself.
const KEY_MAX: u64 = 64 << 10;

#[derive(Debug, clap::Args)]
pub(crate) struct FirstBoot {
    /// Public SSH key, in a file, of who may log in; for images with cloud-init (repeatable)
    #[arg(long = "ssh-key", value_name = "FILE", help_heading = "First boot, by cloud-init")]
    ssh_keys: Vec<PathBuf>,
    /// User data for cloud-init: `#cloud-config`, a script, or MIME parts
    #[arg(long, value_name = "FILE", help_heading = "First boot, by cloud-init")]
    user_data: Option<PathBuf>,
    /// Network configuration for cloud-init [default: DHCP]
    #[arg(long, value_name = "FILE", help_heading = "First boot, by cloud-init")]
    network_config: Option<PathBuf>,
    /// Setting of the guest (repeatable): hostname=NAME [default: that of the machine], or, of its first
    /// network port, address=ADDRESS/LENGTH, gateway=ADDRESS and dns=ADDRESS [default: DHCP]
    #[arg(long = "set", value_name = "NAME=VALUE", help_heading = "First boot, by cloud-init")]
    set: Vec<GuestSetting>,
}

/// A setting of the guest that needs no file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum GuestSetting {
    Hostname(String),
    /// With the length of its network.
    Address(String),
    Gateway(IpAddr),
    Nameserver(IpAddr),
}

impl FromStr for GuestSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = text.split_once('=').ok_or("it must be NAME=VALUE")?;
        let ip = || value.parse().map_err(|_| format!("{value:?} is not an IP address"));
        match name {
            "hostname" => Ok(Self::Hostname(value.to_owned())),
            "address" => Ok(Self::Address(value.to_owned())),
            "gateway" => Ok(Self::Gateway(ip()?)),
            "dns" => Ok(Self::Nameserver(ip()?)),
            other => Err(format!("{other:?} is not hostname, address, gateway or dns")),
        }
    }
}

impl FirstBoot {
    /// What cloud-init is to do, if any of its options is given.
    pub(crate) fn cloud_init(&self) -> Result<Option<CloudInit>, CliError> {
        let has_files = self.user_data.is_some() || self.network_config.is_some();
        if self.ssh_keys.is_empty() && self.set.is_empty() && !has_files {
            return Ok(None);
        }
        self.read(&self.ssh_keys).map(Some)
    }

    /// What cloud-init is to do: without --ssh-key, to let in the SSH keys of the user of this command.
    pub(crate) fn cloud_init_with_own_keys(&self) -> Result<CloudInit, CliError> {
        match self.ssh_keys.is_empty() {
            true => self.read(&own_keys()),
            false => self.read(&self.ssh_keys),
        }
    }

    fn read(&self, keys: &[PathBuf]) -> Result<CloudInit, CliError> {
        let keys = keys.iter().map(text).collect::<Result<Vec<_>, _>>()?;
        let lines = keys.iter().flat_map(|keys| keys.lines()).map(str::trim);
        let (hostname, address) = self.named_settings()?;
        Ok(CloudInit {
            hostname,
            address,
            user_data: self.user_data.as_ref().map(text).transpose()?,
            network_config: self.network_config.as_ref().map(text).transpose()?,
            ssh_keys: lines
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .map(str::to_owned)
                .collect(),
        })
    }

    /// Host name and address of --set. Of settings that there is one of, the last counts.
    fn named_settings(&self) -> Result<(Option<String>, Option<StaticAddress>), CliError> {
        let (mut hostname, mut address, mut gateway, mut nameservers) = (None, None, None, Vec::new());
        for setting in self.set.iter().cloned() {
            match setting {
                GuestSetting::Hostname(name) => hostname = Some(name),
                GuestSetting::Address(text) => address = Some(text),
                GuestSetting::Gateway(router) => gateway = Some(router),
                GuestSetting::Nameserver(server) => nameservers.push(server),
            }
        }
        if address.is_none() && (gateway.is_some() || !nameservers.is_empty()) {
            return Err(CliError::Usage {
                problem: "a gateway and name servers come by DHCP unless the guest has an address".to_owned(),
                hint: "add --set address=ADDRESS/LENGTH, like 10.1.2.5/24".to_owned(),
            });
        }
        Ok((hostname, address.map(|address| StaticAddress { address, gateway, nameservers })))
    }
}

/// Settings of the clone `number`, from 1, of `count`: a host name with its number, and the address that
/// follows on that of the one before.
pub(crate) fn of_clone(first: &CloudInit, number: u32, count: u32) -> Result<CloudInit, CliError> {
    let mut settings = first.clone();
    if let Some(name) = settings.hostname.as_mut().filter(|_| count > 1) {
        // The number belongs to the host, not to its domain.
        let label = name.find('.').unwrap_or(name.len());
        name.insert_str(label, &format!("-{number}"));
    }
    if let Some(address) = &mut settings.address {
        address.address = address_after(&address.address, number - 1).ok_or_else(|| CliError::Usage {
            problem: format!("{} has no {count} addresses from there on", address.address),
            hint: "begin with a lower address, or make fewer clones".to_owned(),
        })?;
    }
    Ok(settings)
}

/// The address `steps` after this one in its network, if the network has it.
fn address_after(text: &str, steps: u32) -> Option<String> {
    if steps == 0 {
        return Some(text.to_owned());
    }
    let (address, length) = text.split_once('/')?;
    let length: u32 = length.parse().ok()?;
    let is_same_net = |old: u128, new: u128, bits: u32| {
        let host = bits.checked_sub(length)?;
        (old.checked_shr(host).unwrap_or(0) == new.checked_shr(host).unwrap_or(0)).then_some(())
    };
    let next: IpAddr = match address.parse().ok()? {
        IpAddr::V4(old) => {
            let new = u32::from(old).checked_add(steps)?;
            is_same_net(u32::from(old).into(), new.into(), 32)?;
            std::net::Ipv4Addr::from(new).into()
        }
        IpAddr::V6(old) => {
            let new = u128::from(old).checked_add(steps.into())?;
            is_same_net(old.into(), new, 128)?;
            std::net::Ipv6Addr::from(new).into()
        }
    };
    Some(format!("{next}/{length}"))
}

/// A variable of an environment, as `NAME=VALUE`.
pub(crate) fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("it must be NAME=VALUE")?;
    let is_first = |first: char| first.is_ascii_alphabetic() || first == '_';
    match name.starts_with(is_first) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    {
        true => Ok((name.to_owned(), value.to_owned())),
        false => Err(format!("{name:?} is no name of a variable")),
    }
}

/// `text` as one word of a shell.
pub(crate) fn shell_word(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// A script for the machine of a container image that sets these variables, and goes on with `script`.
pub(crate) fn script_of(variables: &[(String, String)], script: Option<&str>) -> Result<String, CliError> {
    let usage = || CliError::Usage {
        problem: "the user data is no script, so no variables can be set beside it".to_owned(),
        hint: "begin the file with `#!/bin/sh`, or leave it out".to_owned(),
    };
    let script = script.map(|script| script.strip_prefix("#!").ok_or_else(usage)).transpose()?;
    let rest = script.and_then(|script| script.split_once('\n')).map_or("", |(_, rest)| rest);
    let line = |(name, value): &(String, String)| format!("export {name}={}\n", shell_word(value));
    Ok(format!("#!/bin/sh\n{}{rest}", variables.iter().map(line).collect::<String>()))
}

fn text(path: &PathBuf) -> Result<String, CliError> {
    fs::read_to_string(path).map_err(|source| CliError::File { path: path.clone(), source })
}

/// Public keys in the folder where ssh looks for the secret ones, `~/.ssh/id_*.pub`.
fn own_keys() -> Vec<PathBuf> {
    std::env::var_os("HOME").map(|home| keys_in(&Path::new(&home).join(".ssh"))).unwrap_or_default()
}

fn keys_in(folder: &Path) -> Vec<PathBuf> {
    let is_key = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let small = fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() <= KEY_MAX);
        name.starts_with("id_") && name.ends_with(".pub") && small
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut keys: Vec<_> = entries.filter(is_key).collect();
    keys.sort_unstable();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_set_before_a_script_goes_on() {
        let set = [variable("A=it's $b").unwrap(), variable("_x=").unwrap()];
        let script = script_of(&set, Some("#!/bin/sh -e\nprintf '%s|%s' \"$A\" \"$_x\"\n")).unwrap();
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "it's $b|");
        assert!(script_of(&set, None).unwrap().ends_with("export _x=''\n"));
        assert!(script_of(&set, Some("#cloud-config\n")).is_err());
        for bad in ["A", "=x", "1=x", "A B=x", "A;reboot=x", ""] {
            variable(bad).unwrap_err();
        }
    }

    #[test]
    fn clones_get_names_with_numbers_and_addresses_in_a_row() {
        let texts = ["hostname=db.example.org", "address=10.1.2.254/23", "gateway=10.1.2.1", "dns=9.9.9.9"];
        let set = texts.map(|text| text.parse().unwrap()).to_vec();
        let boot = FirstBoot { ssh_keys: Vec::new(), user_data: None, network_config: None, set };
        let first = boot.cloud_init().unwrap().unwrap();
        let said = |number| {
            let own =
                of_clone(&first, number, 4).map(|own| (own.hostname.unwrap(), own.address.unwrap().address));
            own.map_err(|error| error.to_string())
        };
        assert_eq!(said(1).unwrap(), ("db-1.example.org".to_owned(), "10.1.2.254/23".to_owned()));
        assert_eq!(said(3).unwrap(), ("db-3.example.org".to_owned(), "10.1.3.0/23".to_owned()));
        said(300).unwrap_err();
        assert_eq!(of_clone(&first, 1, 1).unwrap(), first);
        assert_eq!(address_after("fd00::ff/64", 1).as_deref(), Some("fd00::100/64"));
        assert!(address_after("0.0.0.1/0", 1).is_some() && address_after("255.255.255.255/0", 1).is_none());
        for bad in ["hostname", "name=x", "gateway=x", "dns="] {
            assert!(bad.parse::<GuestSetting>().is_err(), "{bad}");
        }
        let lonely = FirstBoot { set: vec!["dns=9.9.9.9".parse().unwrap()], ..boot };
        lonely.cloud_init().unwrap_err();
    }

    #[test]
    fn only_public_keys_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["id_rsa", "id_rsa.pub", "id_ed25519.pub", "known_hosts", "other.pub"] {
            fs::write(folder.path().join(name), "ssh-ed25519 AAAA me\n").unwrap();
        }
        let found = keys_in(folder.path());
        let names: Vec<_> = found.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        assert_eq!(names, ["id_ed25519.pub", "id_rsa.pub"]);
        assert!(keys_in(&folder.path().join("nowhere")).is_empty());
    }
}
