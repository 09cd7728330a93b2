//! `whimbrel ssh`: finds where a machine takes SSH connections, waits until it does, and becomes ssh(1).

use crate::{context::Context, error::CliError};
use std::{
    os::unix::process::CommandExt,
    process::Command,
    time::{Duration, Instant},
};
use tokio::net::TcpStream;
use whimbrel_api::{CapsuleRef, NetworkInfo, PortProtocol, USER_LABEL};
use whimbrel_core::MachineName;

/// Port of SSH in a machine.
const SSH: u16 = 22;
/// Time for a connection to be taken or refused.
const ATTEMPT: Duration = Duration::from_secs(2);
/// Time between attempts.
const PAUSE: Duration = Duration::from_millis(500);
/// Waiting that a user is told about.
const TELL: Duration = Duration::from_secs(3);

const EXAMPLES: &str = "\
Examples:
  whimbrel ssh web
  whimbrel ssh root@web
  whimbrel ssh web -- -L 8080:localhost:80      options and a command for ssh come after `--`
  whimbrel ssh web -- cloud-init status --wait";

/// Log in to a machine in a managed network, by ssh
///
/// Waits until the machine takes connections. Uses the machine's own address on its host, and with --host its
/// published port 22. The user is that of the image if there is none before the name.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine, perhaps with a user
    #[arg(value_name = "[USER@]NAME")]
    machine: String,
    /// Longest time to wait for the machine, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    timeout: u64,
    /// Arguments for ssh
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

/// Where a machine takes connections.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    host: String,
    port: u16,
    /// Name of its host key: a machine that takes over an address is another one.
    alias: String,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let (user, name) = match self.machine.rsplit_once('@') {
            Some((user, name)) => (Some(user.to_owned()), name),
            None => (None, &*self.machine),
        };
        let name: MachineName = name.parse().map_err(|error| CliError::Usage {
            problem: format!("{error}"),
            hint: "write the machine as NAME or USER@NAME".to_owned(),
        })?;
        let user = match user {
            Some(user) => Some(user),
            None => user_of(context, &name).await?,
        };
        let networks = context.client.networks().await?;
        let place = find(&networks, &name, context.remote.as_deref()).ok_or_else(|| no_place(&name))?;
        wait(context, &name, &place, Duration::from_secs(self.timeout)).await?;
        let mut ssh = Command::new("ssh");
        ssh.arg("-p").arg(place.port.to_string());
        ssh.arg("-o").arg(format!("HostKeyAlias={}", place.alias));
        ssh.arg("-o").arg("StrictHostKeyChecking=accept-new");
        ssh.args(user.iter().flat_map(|user| ["-l", user.as_str()]));
        let (options, command) = split(self.arguments);
        ssh.args(options).arg(&place.host).args(command);
        Err(CliError::io("start ssh")(ssh.exec()))
    }
}

/// Options for ssh(1) come before the address, a command after it.
fn split(arguments: Vec<String>) -> (Vec<String>, Vec<String>) {
    // Options of ssh(1) that have a value.
    const VALUED: &str = "BbcDEeFIiJLlmOoPpQRSWw";
    let mut at = 0;
    while let Some(option) = arguments.get(at).and_then(|argument| argument.strip_prefix('-')) {
        let mut letters = option.char_indices();
        let value = letters.find(|(_, letter)| VALUED.contains(*letter));
        // The value is the rest of the argument, or the next one.
        at += if value.is_some_and(|(place, _)| place + 1 == option.len()) { 2 } else { 1 };
    }
    let mut options = arguments;
    let command = options.split_off(at.min(options.len()));
    (options, command)
}

/// The user that cloud-init made in the machine's image, if that is known.
async fn user_of(context: &Context, name: &MachineName) -> Result<Option<String>, CliError> {
    let machine = context.client.machine(name).await?;
    let Some(origin) = machine.origin else { return Ok(None) };
    // A capsule that is gone, or that this user may not see, only leaves ssh its own default.
    let capsule = context.client.capsule(&CapsuleRef::Id(origin)).await.ok();
    Ok(capsule.and_then(|mut capsule| capsule.labels.remove(USER_LABEL)))
}

/// The machine's address for users of its host; its published port for those of `remote`.
fn find(networks: &[NetworkInfo], name: &MachineName, remote: Option<&str>) -> Option<Place> {
    networks.iter().find_map(|network| {
        let own = network.machines.iter().find(|machine| machine.machine == *name)?;
        let alias = format!("whimbrel-{}", own.mac.replace(':', "-"));
        let Some(remote) = remote else {
            return Some(Place { host: own.address.to_string(), port: SSH, alias });
        };
        let leads = |port: &&whimbrel_api::PublishedPort| {
            port.machine == *name && port.guest_port == SSH && port.protocol == PortProtocol::Tcp
        };
        let port = network.ports.iter().find(leads)?;
        let host = port.listen.map_or_else(|| remote.to_owned(), |address| address.to_string());
        Some(Place { host, port: port.port, alias })
    })
}

fn no_place(name: &MachineName) -> CliError {
    CliError::Usage {
        problem: format!("{name} has no address in a network of its host, or no published port 22"),
        hint: format!("`whimbrel network show NAME` lists both; `whimbrel network publish {name} 2222:22`"),
    }
}

/// Waits until something takes connections.
async fn wait(
    context: &Context,
    name: &MachineName,
    place: &Place,
    patience: Duration,
) -> Result<(), CliError> {
    let (begun, mut told) = (Instant::now(), false);
    loop {
        let tried =
            tokio::time::timeout(ATTEMPT, TcpStream::connect((place.host.as_str(), place.port))).await;
        let error = match tried {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => std::io::ErrorKind::TimedOut.into(),
        };
        if begun.elapsed() > patience {
            return Err(CliError::io("connect to the machine; `whimbrel console` shows what it does")(error));
        }
        if begun.elapsed() > TELL && !told {
            told = true;
            let at = format!("{}:{}", place.host, place.port);
            context.output.remark(&format!("waiting for {name} to take connections at {at}"));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn networks() -> Vec<NetworkInfo> {
        let network = json!({
            "name": "lan0", "subnet": "10.0.0.0/24", "gateway": "10.0.0.1", "isolated": false,
            "machines": [{"machine": "web", "mac": "52:54:00:00:00:01", "address": "10.0.0.2"},
                         {"machine": "db", "mac": "52:54:00:00:00:02", "address": "10.0.0.3"}],
            "ports": [{"machine": "web", "port": 53, "address": "10.0.0.2", "guest_port": 22, "protocol": "udp"},
                      {"machine": "web", "port": 2222, "address": "10.0.0.2", "guest_port": 22, "protocol": "tcp"}],
        });
        vec![serde_json::from_value(network).unwrap()]
    }

    #[test]
    fn a_machine_is_reached_at_its_address_here_and_at_its_port_from_elsewhere() {
        let place = |name: &str, remote| find(&networks(), &name.parse().unwrap(), remote);
        let web = |host: &str, port| {
            Some(Place { host: host.into(), port, alias: "whimbrel-52-54-00-00-00-01".into() })
        };
        assert_eq!(place("web", None), web("10.0.0.2", 22));
        assert_eq!(place("web", Some("alpha.test")), web("alpha.test", 2222));
        assert_eq!([place("db", Some("alpha.test")), place("nobody", None)], [None, None]);
    }

    #[test]
    fn options_of_ssh_come_before_the_address_and_the_command_after_it() {
        let split = |line: &str| split(line.split(' ').map(str::to_owned).collect());
        let owned = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for (options, command) in
            [("", "uname -a"), ("-v -L 80:a:80", "ls -l"), ("-vi key -oA=b -p2", "true"), ("-N", "")]
        {
            let line = format!("{options} {command}");
            assert_eq!(split(line.trim()), (owned(options), owned(command)), "{line}");
        }
    }
}
