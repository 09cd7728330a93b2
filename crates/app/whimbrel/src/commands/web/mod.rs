//! `whimbrel web`: the web page of several hosts, on this computer.

mod relay;

use crate::{
    context::{Context, read_token},
    end_signal::told_to_end,
    error::CliError,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use relay::{PageHost, Relay};
use serde::Serialize;
use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, str::FromStr};
use tokio::net::TcpListener;
use whimbrel_client::{ApiAddress, Client, Fingerprint, RemoteHost};

const EXAMPLES: &str = "\
Examples:
  whimbrel web                                             this host alone
  whimbrel web local attic=https://10.0.0.5,token=attic.token
  whimbrel web a=https://10.0.0.5,token=a.token b=https://10.0.0.6,token=b.token,fingerprint=sha256:…

`whimbrel token create NAME` on a host prints a token, and its log has the fingerprint of its certificate.
From another computer: ssh -L 7481:127.0.0.1:7481 HOST, then http://127.0.0.1:7481/";

/// Show several hosts on one web page, on this computer
///
/// The page asks this command, and this command asks the hosts, each with its own token: a browser never has
/// them, and each host allows what its token allows. The page has a password of its own, which is printed.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Host with its address, the file with its token and, if no authority vouches for it, the fingerprint of
    /// its certificate; or `local` [default: that of --host, or the host here]
    #[arg(value_name = "local|NAME=ADDRESS,token=FILE[,fingerprint=FINGERPRINT]")]
    hosts: Vec<HostArg>,
    /// Address of this computer where the page is served
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7481")]
    listen: SocketAddr,
}

/// A host of the page.
#[derive(Debug, Clone, PartialEq, Eq)]
enum HostArg {
    Local,
    Remote { name: String, address: ApiAddress, token: PathBuf, fingerprint: Option<Fingerprint> },
}

impl FromStr for HostArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == LOCAL {
            return Ok(Self::Local);
        }
        let (name, rest) = text.split_once('=').ok_or("it is `local`, or begins with NAME=")?;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name == LOCAL || name.starts_with('.') || !name.bytes().all(fits) {
            return Err(format!("{name:?} cannot name a host here: letters, digits, `-`, `_` and `.` can"));
        }
        let mut parts = rest.split(',');
        let address = parts.next().unwrap_or_default().parse().map_err(|error| format!("{error}"))?;
        let (mut token, mut fingerprint) = (None, None);
        for part in parts {
            match part.split_once('=') {
                Some(("token", file)) => token = Some(file.into()),
                Some(("fingerprint", text)) => {
                    fingerprint = Some(text.parse().map_err(|error| format!("{error}"))?);
                }
                _ => return Err(format!("{part:?} is not token=FILE or fingerprint=FINGERPRINT")),
            }
        }
        let token = token.ok_or("the host needs token=FILE")?;
        Ok(Self::Remote { name: name.to_owned(), address, token, fingerprint })
    }
}

/// Name of the host of the socket.
const LOCAL: &str = "local";

/// Where the page is, for programs.
#[derive(Debug, Serialize)]
struct Served<'a> {
    address: String,
    password: &'a str,
    hosts: &'a [PageHost],
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        if !self.listen.ip().is_loopback() {
            return Err(CliError::Usage {
                problem: format!("{} is not an address of this computer alone", self.listen),
                hint: "the page is plain HTTP; from elsewhere: ssh -L 7481:127.0.0.1:7481 HOST".to_owned(),
            });
        }
        let hosts = hosts(self.hosts, context)?;
        let listener = TcpListener::bind(self.listen).await.map_err(CliError::io("listen"))?;
        let place = listener.local_addr().map_err(CliError::io("listen"))?;
        let password = URL_SAFE_NO_PAD.encode(rand::random::<[u8; 24]>());
        let served = Served { address: format!("http://{place}/"), password: &password, hosts: &hosts };
        context.output.result(&served, describe)?;
        let end = told_to_end()?;
        let router = Relay { password, hosts }.router();
        tokio::select! {
            ended = axum::serve(listener, router).into_future() => ended.map_err(CliError::io("serve the page")),
            () = end => Ok(()),
        }
    }
}

/// The hosts of the page; without any, the one that other commands use.
fn hosts(wanted: Vec<HostArg>, context: &Context) -> Result<Vec<PageHost>, CliError> {
    if wanted.is_empty() {
        let name = context.remote.clone().unwrap_or_else(|| LOCAL.to_owned());
        return Ok(vec![PageHost::new(name, context.client.clone())]);
    }
    let mut names = BTreeSet::new();
    let host = |host| {
        let host = match host {
            HostArg::Local => PageHost::new(LOCAL.to_owned(), Client::new(context.socket.clone())),
            HostArg::Remote { name, address, token, fingerprint } => {
                let token = read_token(&token)?;
                PageHost::new(name, Client::over_tls(RemoteHost { address, token, fingerprint }))
            }
        };
        match names.insert(host.name.clone()) {
            true => Ok(host),
            false => Err(CliError::Usage {
                problem: format!("two hosts have the name {}", host.name),
                hint: "give each a name of its own".to_owned(),
            }),
        }
    };
    wanted.into_iter().map(host).collect()
}

fn describe(served: &Served<'_>) -> String {
    let count = served.hosts.len();
    let hosts = if count == 1 { "one host".to_owned() } else { format!("{count} hosts") };
    format!(
        "the page of {hosts} is at {}; Ctrl-C ends it\nlog in with the password {}\n",
        served.address, served.password
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_a_name_an_address_and_a_file_with_a_token() {
        assert_eq!("local".parse(), Ok(HostArg::Local));
        let print = format!("sha256:{}", "ab".repeat(32));
        let text = format!("attic=https://10.0.0.5,token=a/b.token,fingerprint={print}");
        let HostArg::Remote { name, address, token, fingerprint } = text.parse().unwrap() else {
            panic!("{text} is a host elsewhere")
        };
        assert_eq!((name.as_str(), address.to_string().as_str()), ("attic", "https://10.0.0.5:7443"));
        assert_eq!(token, PathBuf::from("a/b.token"));
        assert!(fingerprint.is_some());
        for bad in [
            "",
            "attic",
            "attic=10.0.0.5,token=t",
            "attic=https://10.0.0.5",
            "attic=https://10.0.0.5,token=t,fingerprint=x",
            "attic=https://10.0.0.5,token=t,color=red",
            "local=https://10.0.0.5,token=t",
            "=https://10.0.0.5,token=t",
            "../a=https://10.0.0.5,token=t",
            "a/b=https://10.0.0.5,token=t",
        ] {
            assert!(bad.parse::<HostArg>().is_err(), "{bad}");
        }
    }
}
