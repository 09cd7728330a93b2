//! `whimbrel host`: runs the daemon.

use crate::{
    argument_types::{AccelArg, absolute},
    cli::DEFAULT_SOCKET,
    error::CliError,
    settings::{DEFAULT_FILE, Settings},
};
use std::{net::SocketAddr, path::PathBuf};
use whimbrel_api::{Role, RoleError};
use whimbrel_core::{Accel, HostName, MachineName};
use whimbrel_daemon::{DaemonOptions, ImageSource, KeySource};

pub(crate) const DEFAULT_DATA: &str = "/var/lib/whimbrel";

const EXAMPLES: &str = "\
Examples:
  whimbrel host
  whimbrel host --listen 10.0.0.1:7400
  whimbrel host --name alpha --data /var/lib/whimbrel --listen 10.0.0.1:7400
  whimbrel host --api-listen 10.0.0.1:7443 --api-group operators=operator
  whimbrel host --web 127.0.0.1:7480
  whimbrel host --encrypt --key-file /etc/whimbrel/master.key
  whimbrel host --config /etc/whimbrel/alpha.toml

Settings file (TOML); options on the command line override it:
  name = \"alpha\"
  data = \"/var/lib/whimbrel\"
  listen = \"10.0.0.1:7400\"
  socket = \"/run/whimbrel/host.sock\"
  run_dir = \"/dev/shm/whimbrel-alpha\"
  api_listen = \"10.0.0.1:7443\"
  web = \"127.0.0.1:7480\"
  metrics_listen = \"127.0.0.1:7490\"
  machine_processes = false
  encrypt = true
  key_command = \"vault kv get -field=key kv/whimbrel\"
  api_groups = { operators = \"operator\", adm = \"viewer\" }";

/// Run the daemon of this host
///
/// Machines keep running when the daemon ends. The next daemon finds them and manages them again.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of this host, by which other hosts trust it [default: its host name up to the first dot]
    #[arg(long)]
    name: Option<HostName>,
    /// Directory for the store, the machines and the key [default: /var/lib/whimbrel]
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    data: Option<PathBuf>,
    /// Address for other hosts; without one, they cannot connect
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Executor of guest instructions for machines that name none, and for those that other hosts send
    /// [default: kvm if `doctor` finds that it works, else tcg]
    #[arg(long)]
    accel: Option<AccelArg>,
    /// Directory on a tmpfs for guest memory [default: /dev/shm/whimbrel-NAME]
    #[arg(long, value_name = "DIR", value_parser = absolute)]
    run_dir: Option<PathBuf>,
    /// Machine whose guest may send frames of other stations: a router or a bridge (may be repeated)
    #[arg(long, value_name = "MACHINE")]
    unfiltered: Vec<MachineName>,
    /// Address for users elsewhere, who need a token (`whimbrel token create`); without one, there is only
    /// the
    /// socket
    #[arg(long, value_name = "ADDRESS:PORT")]
    api_listen: Option<SocketAddr>,
    /// Address of the web page: without TLS on loopback, else with it; --api-listen has it, too
    #[arg(long, value_name = "ADDRESS:PORT")]
    web: Option<SocketAddr>,
    /// Pool to show on the web page beside those that the host uses, as `whimbrel pool manager` prints it
    /// (may be repeated)
    #[arg(long, value_name = "MANAGER")]
    pool: Vec<String>,
    /// Certificate chain for --api-listen and --web, in PEM [default: one of its own, made at the first
    /// start]
    #[arg(long, value_name = "FILE", requires = "api_key", value_parser = absolute)]
    api_cert: Option<PathBuf>,
    /// Key of --api-cert, in PEM
    #[arg(long, value_name = "FILE", requires = "api_cert", value_parser = absolute)]
    api_key: Option<PathBuf>,
    /// Group of this computer that may use the socket: viewer, operator or admin (may be repeated)
    #[arg(long, value_name = "GROUP=ROLE", value_parser = group)]
    api_group: Vec<(String, Role)>,
    /// Address for Prometheus, without TLS or a token; /metrics is also in the API
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_listen: Option<SocketAddr>,
    /// Encrypt the store and the disks of machines; an existing store becomes encrypted
    #[arg(long)]
    encrypt: bool,
    /// File with the master key, 64 hexadecimal digits, for its owner only [default: the credential
    /// `whimbrel-master-key` of systemd]
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    key_file: Option<PathBuf>,
    /// Command line that prints the master key
    #[arg(long, value_name = "COMMAND", conflicts_with = "key_file")]
    key_command: Option<String>,
    /// Serve machines in the daemon alone: without a process for each machine at rest, guests stand still
    /// while the daemon hangs, or there is none
    #[arg(long)]
    no_machine_processes: bool,
    /// Settings file [default: /etc/whimbrel/host.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Args {
    /// Runs the daemon until it ends. `socket` is the global option.
    pub(crate) fn run(self, socket: Option<PathBuf>) -> Result<(), CliError> {
        let options = self.options(socket)?;
        crate::open_files::raise_limit();
        whimbrel_daemon::run(options).map_err(|error| CliError::Daemon(Box::new(error)))
    }

    fn options(self, socket: Option<PathBuf>) -> Result<DaemonOptions, CliError> {
        let file = Settings::read(self.config.as_deref())?;
        let options = Settings {
            name: self.name,
            listen: self.listen,
            data: self.data,
            accel: self.accel.map(Accel::from),
            run_dir: self.run_dir,
            socket,
            unfiltered: (!self.unfiltered.is_empty()).then_some(self.unfiltered),
            pools: (!self.pool.is_empty()).then_some(self.pool),
            image_sources: None,
            containers: None,
            api_listen: self.api_listen,
            web: self.web,
            api_cert: self.api_cert,
            api_key: self.api_key,
            metrics_listen: self.metrics_listen,
            encrypt: self.encrypt.then_some(true),
            key_file: self.key_file,
            key_command: self.key_command,
            machine_processes: self.no_machine_processes.then_some(false),
            api_groups: (!self.api_group.is_empty()).then(|| self.api_group.into_iter().collect()),
        };
        let settings = options.over(file);
        let name = settings.name.or_else(own_name).ok_or_else(no_name)?;
        let data = settings.data.unwrap_or_else(|| DEFAULT_DATA.into());
        let encryption = match (settings.encrypt, settings.key_file, settings.key_command) {
            (Some(true), Some(_), Some(_)) => return Err(two_keys()),
            (Some(true), Some(file), None) => Some(KeySource::File(file)),
            (Some(true), None, Some(line)) => Some(KeySource::Command(line)),
            (Some(true), None, None) => Some(KeySource::Credential),
            (_, None, None) => None,
            (_, _, _) => return Err(key_without_use()),
        };
        let certificate = match (settings.api_cert, settings.api_key) {
            (Some(chain), Some(key)) => Some((chain, key)),
            (None, None) => None,
            _ => return Err(half_certificate()),
        };
        Ok(DaemonOptions {
            api_listen: settings.api_listen,
            web: settings.web,
            api_certificate: certificate,
            api_groups: settings.api_groups.unwrap_or_default().into_iter().collect(),
            listen: settings.listen,
            metrics: settings.metrics_listen,
            machine_processes: settings.machine_processes.unwrap_or(true),
            accel: settings.accel,
            run_dir: settings.run_dir.unwrap_or_else(|| format!("/dev/shm/whimbrel-{name}").into()),
            socket: settings.socket.unwrap_or_else(|| DEFAULT_SOCKET.into()),
            unfiltered: settings.unfiltered.unwrap_or_default(),
            pools: settings.pools.unwrap_or_default(),
            image_sources: settings.image_sources.unwrap_or_else(ImageSource::defaults),
            containers: settings.containers.unwrap_or_default(),
            name,
            data,
            encryption,
        })
    }
}

fn own_name() -> Option<HostName> {
    std::fs::read_to_string("/proc/sys/kernel/hostname").ok().and_then(|name| short_name(&name))
}

/// The name of a computer without its domain, if it can be a host's.
fn short_name(name: &str) -> Option<HostName> {
    name.trim().split('.').next()?.to_ascii_lowercase().parse().ok()
}

/// A group and its role, as `GROUP=ROLE`.
fn group(text: &str) -> Result<(String, Role), RoleError> {
    let (group, role) = text.split_once('=').ok_or(RoleError)?;
    Ok((group.to_owned(), role.parse()?))
}

fn half_certificate() -> CliError {
    CliError::Usage {
        problem: "the API needs a certificate and its key, or neither".to_owned(),
        hint: "set both `api_cert` and `api_key`".to_owned(),
    }
}

fn two_keys() -> CliError {
    CliError::Usage {
        problem: "the master key comes from a file or from a command, not from both".to_owned(),
        hint: "set `key_file` or `key_command`".to_owned(),
    }
}

fn key_without_use() -> CliError {
    CliError::Usage {
        problem: "there is a master key, but nothing is to be encrypted".to_owned(),
        hint: "add `encrypt = true`, or use `--encrypt`".to_owned(),
    }
}

fn no_name() -> CliError {
    CliError::Usage {
        problem: "the name of this computer cannot be the name of a host".to_owned(),
        hint: format!("use `--name alpha`, or set it in {DEFAULT_FILE}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_called_as_its_computer_where_that_is_a_name() {
        let name = |text: &str| short_name(text).map(|name| name.to_string());
        assert_eq!(name("Alpha.example.org\n").as_deref(), Some("alpha"));
        assert_eq!(name("(none)\n"), None);
        assert_eq!(name("\n"), None);
    }
}
