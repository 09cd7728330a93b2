//! `whimbrel network`: manages the networks of this host, and ports of it that lead to machines.

use crate::{
    argument_types::{HostPortArg, PortArg},
    context::Context,
    error::CliError,
    output::Removed,
    table::{fields, table},
};
use clap::Subcommand;
use whimbrel_api::{
    NetworkAddress, NetworkHostsRequest, NetworkInfo, NetworkRequest, PortProtocol, PortsRequest,
    PublishedPort,
};
use whimbrel_core::{HostName, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel network create lan0                       a bridge, addresses, names and a way out
  whimbrel run web --disk web.img --memory 1G --net lan0 --publish 8080:80
  whimbrel network show lan0                         addresses of machines, and ports that lead to them
  whimbrel network publish web 2222:22               ssh -p 2222 localhost
  whimbrel network unpublish web 2222
  whimbrel network share lan0 beta                   one network on two hosts; beta shares it with this one

Machines get their addresses by DHCP and find each other by name, as `web` or `web.internal`. A network of the same \
name has the same addresses on every host, so a machine keeps its address when it moves between them.";

/// Manage networks with addresses, names, a way out and published ports
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Create a network
    ///
    /// Needs the programs ip, nft and dnsmasq (on Debian: iproute2, nftables, dnsmasq-base).
    Create {
        /// Name for the network and its bridge: up to 15 small letters, digits and `_`
        name: String,
        /// IPv4 addresses [default: a /24 of 10.64.0.0/10 that follows from the name]
        #[arg(long, value_name = "ADDRESS/PREFIX")]
        subnet: Option<String>,
        /// IPv6 addresses, a /64, or `none` [default: a unique local /64 that follows from the name]
        #[arg(long, value_name = "ADDRESS/64|none")]
        ipv6: Option<String>,
        /// Let machines reach nothing but each other and this host
        #[arg(long)]
        isolated: bool,
    },
    /// List the networks
    Ls,
    /// Show the addresses and published ports of a network
    ///
    /// Tries each TCP port: one in whose machine nothing listens does not answer.
    Show {
        /// Name of the network
        name: String,
    },
    /// Remove a network that no machine uses
    Rm {
        /// Name of the network
        name: String,
    },
    /// Share a network with other hosts
    ///
    /// Machines on both hosts are neighbours then: they reach each other and find each other by name, also
    /// when they move. Each host needs a network of that name and must share it with the other. Frames go
    /// over the encrypted connection of the two hosts, which must trust each other.
    Share {
        /// Name of the network
        name: String,
        /// Names of trusted hosts
        #[arg(required = true, value_name = "HOST")]
        hosts: Vec<HostName>,
    },
    /// Share a network with other hosts no longer
    Unshare {
        /// Name of the network
        name: String,
        /// Names of the hosts
        #[arg(required = true, value_name = "HOST")]
        hosts: Vec<HostName>,
    },
    /// Publish ports of a machine on this host
    Publish {
        /// Name of the machine
        machine: MachineName,
        /// Port of this host, then port of the machine
        #[arg(required = true, value_name = "[ADDRESS:]PORT:PORT[/udp]")]
        ports: Vec<PortArg>,
    },
    /// Publish ports of a machine no longer
    Unpublish {
        /// Name of the machine
        machine: MachineName,
        /// Ports of this host
        #[arg(required = true, value_name = "PORT[/udp]")]
        ports: Vec<HostPortArg>,
    },
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let (client, output) = (&context.client, &context.output);
        match self.action {
            Action::Create { name, subnet, ipv6, isolated } => {
                let request = NetworkRequest { name, subnet, subnet6: ipv6, isolated };
                let network = client.create_network(&request).await?;
                output.result(&network, |network| {
                    format!("{}: created with {}\n", network.name, network.subnet)
                })
            }
            Action::Ls => output.result(client.networks().await?.as_slice(), list),
            Action::Show { name } => output.result(&client.network(&name).await?, show),
            Action::Rm { name } => {
                client.delete_network(&name).await?;
                output.result(&Removed::one(&name), |removed| removed.sentence("removed"))
            }
            Action::Share { name, hosts: share } => {
                let request = NetworkHostsRequest { share, ..NetworkHostsRequest::default() };
                output.result(&client.change_network_hosts(&name, &request).await?, hosts_of)
            }
            Action::Unshare { name, hosts: unshare } => {
                let request = NetworkHostsRequest { unshare, ..NetworkHostsRequest::default() };
                output.result(&client.change_network_hosts(&name, &request).await?, hosts_of)
            }
            Action::Publish { machine, ports } => {
                let publish = ports.into_iter().map(|port| port.0).collect();
                let request = PortsRequest { publish, ..PortsRequest::default() };
                output.result(client.change_ports(&machine, &request).await?.as_slice(), ports_of)
            }
            Action::Unpublish { machine, ports } => {
                let unpublish = ports.into_iter().map(|port| port.0).collect();
                let request = PortsRequest { unpublish, ..PortsRequest::default() };
                output.result(client.change_ports(&machine, &request).await?.as_slice(), ports_of)
            }
        }
    }
}

fn list(networks: &[NetworkInfo]) -> String {
    let rows = networks.iter().map(|network| {
        let state = match (&network.problem, network.isolated) {
            (Some(problem), _) => problem.clone(),
            (None, true) => "isolated".to_owned(),
            (None, false) => "works".to_owned(),
        };
        let subnet6 = network.subnet6.clone().unwrap_or_default();
        [
            network.name.clone(),
            network.subnet.clone(),
            subnet6,
            network.machines.len().to_string(),
            network.ports.len().to_string(),
            state,
        ]
    });
    table(
        ["NAME", "IPV4", "IPV6", "MACHINES", "PORTS", "STATE"],
        rows,
        "no networks; create one with `whimbrel network create NAME`",
    )
}

fn show(network: &NetworkInfo) -> String {
    let state = network.problem.clone().unwrap_or_else(|| "works".to_owned());
    let mut text = fields(&[
        ("name", network.name.clone()),
        ("ipv4", format!("{}, gateway {}", network.subnet, network.gateway)),
        ("ipv6", network.subnet6.clone().unwrap_or_else(|| "none".to_owned())),
        ("way out", if network.isolated { "none" } else { "by this host's addresses" }.to_owned()),
        ("state", state),
    ]);
    text += &format!("\n{}", machines_of(network));
    if !network.hosts.is_empty() {
        text += &format!("\n{}", hosts_of(network));
    }
    text + &format!("\n{}", ports_of(&network.ports))
}

/// Machines of this host; those of other hosts after them, if there are such hosts.
fn machines_of(network: &NetworkInfo) -> String {
    let row = |it: &NetworkAddress| [it.machine.to_string(), it.address.to_string(), it.mac.clone()];
    let own = network.machines.iter().map(row);
    if network.hosts.is_empty() {
        return table(["MACHINE", "ADDRESS", "MAC"], own, "no machines");
    }
    let others = network
        .hosts
        .iter()
        .flat_map(|host| host.machines.iter().map(move |it| (row(it), host.host.to_string())));
    let all = own.map(|row| (row, "here".to_owned())).chain(others);
    let rows = all.map(|([machine, address, mac], host)| [machine, address, mac, host]);
    table(["MACHINE", "ADDRESS", "MAC", "HOST"], rows, "no machines")
}

fn hosts_of(network: &NetworkInfo) -> String {
    let rows = network.hosts.iter().map(|host| {
        let state = match (host.joined, &host.reason) {
            (true, _) => "joined".to_owned(),
            (false, Some(reason)) => reason.clone(),
            (false, None) => "connecting".to_owned(),
        };
        [host.host.to_string(), host.machines.len().to_string(), state]
    });
    table(["HOST", "MACHINES", "STATE"], rows, &format!("{} is shared with no other host", network.name))
}

fn ports_of(ports: &[PublishedPort]) -> String {
    let rows = ports.iter().map(|port| {
        let host =
            port.listen.map_or_else(|| port.port.to_string(), |address| format!("{address}:{}", port.port));
        let protocol = match port.protocol {
            PortProtocol::Tcp => "tcp",
            PortProtocol::Udp => "udp",
        };
        let answers = match port.answers {
            Some(true) => "answers",
            Some(false) => "does not answer",
            None => "",
        };
        let to = format!("{}:{}", port.address, port.guest_port);
        [host, protocol.to_owned(), port.machine.to_string(), to, answers.to_owned()]
    });
    table(["PORT", "PROTOCOL", "MACHINE", "LEADS TO", "STATE"], rows, "no published ports")
}
