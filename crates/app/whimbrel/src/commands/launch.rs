//! `whimbrel launch`: creates a machine of an image, and all that the machine needs.

use super::apply::Wanted;
use crate::{
    argument_types::{NicArg, PortArg},
    context::Context,
    error::CliError,
    first_boot::{self, FirstBoot},
    hardware_args::ProfileArg,
    machine_text, operation,
    settings_args::SettingsArgs,
};
use whimbrel_api::{
    CapsuleInfo, CapsuleRef, DeriveRequest, ErrorCode, ImageName, ImagePullRequest, MachineInfo,
    NetworkRequest, NicRequest, PROGRAM_LABEL,
};
use whimbrel_client::ClientError;
use whimbrel_core::{ByteSize, MachineName};

/// Network of machines for which the user names none.
const NETWORK: &str = "lan0";

const EXAMPLES: &str = "\
Examples:
  whimbrel launch debian/12 web && whimbrel ssh web
  whimbrel launch debian/12 web -p 8080:80 --memory 2G --cpus 2 --disk-size 20G
  whimbrel launch ubuntu/24.04 ci --ssh-key ci.pub --user-data ci.yaml
  whimbrel launch debian/12 web --autostart --restart always
  whimbrel launch mine/web web2 --net lan1
  whimbrel launch docker/postgres/16 db -p 5432:5432 --env POSTGRES_PASSWORD=secret

Fetches the image if it is not here, and makes the network lan0 if there is none. The machine shares all disk pages \
with the image that it does not change. A machine of a container image runs its program, with what --env sets.";

/// Create a machine of an image, and start it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the image, like `debian/12` or, of a container image, `docker/nginx/1.27`
    image: ImageName,
    /// Name for the machine, not in use on this host
    name: MachineName,
    /// Size of the guest memory
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    memory: ByteSize,
    /// Hardware, as of `whimbrel run` [default: that of the image]
    #[arg(long, value_name = "PROFILE")]
    profile: Option<ProfileArg>,
    /// Start only programs that are signed, if --profile gives it UEFI [default: as the profile]
    #[arg(long, value_name = "yes|no", value_parser = clap::builder::BoolishValueParser::new())]
    secure_boot: Option<bool>,
    /// Give it a TPM 2.0, if the image has none
    #[arg(long)]
    tpm: bool,
    /// Give it a screen, a keyboard and a pointer, if the image has none
    #[arg(long)]
    display: bool,
    /// Number of virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    cpus: u32,
    /// CPU model, as of `whimbrel run` [default: that of the image]
    #[arg(long, value_name = "MODEL[,+FEATURE|,-FEATURE]")]
    cpu: Option<String>,
    /// Size of the disk [default: that of the image]
    #[arg(long, value_name = "SIZE")]
    disk_size: Option<ByteSize>,
    /// Network port in a network or bridge of this host, or `none` for an unplugged one (repeatable)
    /// [default: the network lan0, which is made if it is not there]
    #[arg(long = "net", value_name = "BRIDGE[,mac=ADDRESS]")]
    nics: Vec<NicArg>,
    /// Port of this host that leads to a port of the machine (repeatable)
    #[arg(short, long, value_name = "[ADDRESS:]PORT:PORT[/udp]")]
    publish: Vec<PortArg>,
    /// Variable of the environment of the program, for a container image (repeatable)
    #[arg(long = "env", value_name = "NAME=VALUE", value_parser = first_boot::variable)]
    env: Vec<(String, String)>,
    #[command(flatten)]
    first_boot: FirstBoot,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let image = CapsuleRef::Name(self.image.tag());
        let machine = self.create(context).await?;
        let is_container = context.client.capsule(&image).await.is_ok_and(|image| is_container(&image));
        context.output.result(&machine, |machine| {
            let (sentence, name) = (machine_text::sentence(machine), &machine.name);
            match is_container {
                true => format!("{sentence}`whimbrel logs {name}` shows what its program prints, `whimbrel exec {name} -- COMMAND` runs another one\n"),
                false => format!("{sentence}log in with `whimbrel ssh {name}`\n"),
            }
        })
    }

    pub(crate) fn wanted(&self) -> Wanted {
        let publish = self.publish.iter().map(|port| port.0).collect();
        Wanted { memory: self.memory, cpus: self.cpus, publish, settings: self.settings.settings() }
    }

    pub(crate) async fn create(self, context: &Context) -> Result<MachineInfo, CliError> {
        let mut cloud_init = self.first_boot.cloud_init_with_own_keys()?;
        let capsule = CapsuleRef::Name(self.image.tag());
        let image = image(context, &self.image).await?;
        match (self.env.is_empty(), is_container(&image)) {
            (true, _) => {}
            (false, true) => {
                cloud_init.user_data =
                    Some(first_boot::script_of(&self.env, cloud_init.user_data.as_deref())?);
            }
            (false, false) => {
                return Err(CliError::Usage {
                    problem: "--env is for container images, and this image has a system".to_owned(),
                    hint: "--user-data has what cloud-init is to do in it".to_owned(),
                });
            }
        }
        if cloud_init.ssh_keys.is_empty() && cloud_init.user_data.is_none() && !is_container(&image) {
            let note = "note: no SSH key in ~/.ssh: without --ssh-key or --user-data nobody can log in";
            context.output.remark(note);
        }
        let nics = match self.nics.is_empty() {
            true => vec![default_port(context).await?],
            false => self.nics.into_iter().map(|port| port.0).collect(),
        };
        let request = DeriveRequest {
            capsule,
            name: self.name,
            memory: Some(self.memory),
            cpus: Some(self.cpus),
            cpu: self.cpu,
            profile: self.profile.map(Into::into),
            secure_boot: self.secure_boot,
            tpm: self.tpm,
            display: self.display,
            nics: Some(nics),
            append: None,
            disk_size: self.disk_size,
            cloud_init: Some(cloud_init),
            publish: self.publish.into_iter().map(|port| port.0).collect(),
            settings: self.settings.settings(),
        };
        Ok(context.client.derive(&request).await?)
    }
}

/// The image of that name, which is fetched if it is not here.
pub(crate) async fn image(context: &Context, name: &ImageName) -> Result<CapsuleInfo, CliError> {
    let capsule = CapsuleRef::Name(name.tag());
    match context.client.capsule(&capsule).await {
        Err(ClientError::Api(error)) if error.code == ErrorCode::NotFound => {
            let request = ImagePullRequest { name: name.clone() };
            operation::complete(context, context.client.pull_image(&request)).await?;
            Ok(context.client.capsule(&capsule).await?)
        }
        found => Ok(found?),
    }
}

/// Whether an image was made of a container image, which has a program in place of a system.
pub(crate) fn is_container(image: &CapsuleInfo) -> bool {
    image.labels.contains_key(PROGRAM_LABEL)
}

/// A port in the default network, which is made if it is not there.
pub(crate) async fn default_port(context: &Context) -> Result<NicRequest, CliError> {
    let networks = context.client.networks().await?;
    if !networks.iter().any(|network| network.name == NETWORK) {
        let request = NetworkRequest { name: NETWORK.to_owned(), ..NetworkRequest::default() };
        let made = context.client.create_network(&request).await?;
        context.output.remark(&format!("made the network {} with {}", made.name, made.subnet));
    }
    Ok(NicRequest { bridge: Some(NETWORK.to_owned()), mac: None })
}
