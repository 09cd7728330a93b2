//! `whimbrel image build`: makes an image by a recipe, in a machine that does what the recipe says.
//!
//! The state of the machine after each step is a capsule, with a tag of its own. So the next build goes on
//! after the last step that is still the same, from a machine that runs; a step is known by what it says,
//! what it copies and all steps before it. The image is the machine's disk once it is switched off.

mod context;
mod recipe;

use crate::{
    argument_types::{DurationArg, NicArg},
    commands::launch,
    context::Context,
    error::CliError,
    first_boot::shell_word,
    guest_command::exec_when_up,
    operation, output,
    table::count,
};
use base64::{Engine, engine::general_purpose::STANDARD};
use context::CopySource;
use recipe::{Instruction, Recipe, Step};
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use whimbrel_api::{
    CapsuleInfo, CheckpointRequest, CloudInit, DeriveRequest, ErrorCode, ExecRequest, ExecResult,
    IMAGE_LABEL, ImageName, OperationResult, OperationState, PROGRAM_LABEL, ResumeMode, ResumeRequest,
    StopRequest, USER_LABEL,
};
use whimbrel_client::ClientError;
use whimbrel_core::{ByteSize, CapsuleId, Digest, MachineName, RefName};

/// Name of the recipe in its folder.
const RECIPE: &str = "Imagefile";
/// Tags of states have this before the number of the step.
const STATE: &str = "build-";
/// Label of the capsule of a step: what the step is known by.
const STEP_LABEL: &str = "image-step";
/// Time for the guest to answer after its start.
const BOOT_MAX: Duration = Duration::from_secs(600);
/// Seconds for the guest to switch itself off.
const STOP_S: u64 = 120;
/// In place of the program of a container image, which could end, and the machine with it.
const NO_PROGRAM: &str = "#!/bin/sh\nexec /.whimbrel/busybox tail -f /dev/null\n";
/// What a machine of the image is to have of its own, and not of this one: its number, its keys, and what
/// cloud-init did. Waits for the disk.
const CLEAN: &str = "
if command -v cloud-init >/dev/null; then
    cloud-init clean --logs >/dev/null 2>&1
    rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
fi
[ -s /etc/machine-id ] && : >/etc/machine-id
sync";
/// Waits until the first boot is over, which may install packages itself.
const BOOTED: &str =
    "if command -v cloud-init >/dev/null; then cloud-init status --wait >/dev/null; fi; exit 0";

const EXAMPLES: &str = "\
Examples:
  whimbrel image build mine/web                      by the file Imagefile in this folder
  whimbrel image build mine/web ~/site -f web.recipe
  whimbrel launch mine/web web -p 8080:80

Imagefile:
  FROM debian/12
  RUN apt-get update && apt-get -y install nginx
  COPY site /var/www/html

Instructions are those of a Dockerfile: FROM, RUN, COPY, ENV, WORKDIR and LABEL, and CMD for a container image. A build \
goes on after the last step that is the same as in the build before, from the state of the machine then. `whimbrel image \
rm` removes the states of an image with it.";

/// Make an image by a recipe like a Dockerfile
///
/// The recipe is carried out in a machine that is deleted afterwards, through qemu-ga, which the image that
/// it begins with must have. A step that fails leaves the image of before, and the states of the steps before
/// that one.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name for the image
    image: ImageName,
    /// Folder of the recipe, from which it copies
    #[arg(default_value = ".")]
    folder: PathBuf,
    /// Recipe [default: the file Imagefile in the folder]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Size of the machine's memory
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    memory: ByteSize,
    /// Number of the machine's virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    cpus: u32,
    /// Size of the disk [default: that of the image in FROM]
    #[arg(long, value_name = "SIZE")]
    disk_size: Option<ByteSize>,
    /// Network port of the machine, as of `whimbrel launch` [default: the network lan0]
    #[arg(long, value_name = "BRIDGE")]
    net: Option<NicArg>,
    /// Carry out every step, and keep no states
    #[arg(long)]
    no_cache: bool,
    /// Leave the machine of a build that failed, to look into it
    #[arg(long)]
    keep: bool,
    /// Time for each step
    #[arg(long, value_name = "DURATION", default_value = "1h")]
    timeout: DurationArg,
}

/// The result for programs.
#[derive(Debug, Serialize)]
struct Built {
    image: String,
    capsule: CapsuleId,
    steps: usize,
    /// Steps that were the same as in the build before.
    cached: usize,
}

/// The state of the shell that instructions act on.
#[derive(Debug, Clone, Default)]
struct Shell {
    variables: BTreeMap<String, String>,
    folder: Option<String>,
    program: Option<Vec<String>>,
    labels: BTreeMap<String, String>,
}

impl Shell {
    /// Takes over an instruction that does nothing by itself.
    fn follow(&mut self, instruction: &Instruction) {
        match instruction {
            Instruction::Env(name, value) => drop(self.variables.insert(name.clone(), value.clone())),
            Instruction::Workdir(folder) => self.folder = Some(folder.clone()),
            Instruction::Label(name, value) => drop(self.labels.insert(name.clone(), value.clone())),
            Instruction::Cmd(words) => self.program = Some(words.clone()),
            Instruction::Run(_) | Instruction::Copy { .. } => {}
        }
    }

    /// Lines that set the variables.
    fn exports(&self) -> String {
        let line = |(name, value): (&String, &String)| format!("export {name}={}\n", shell_word(value));
        self.variables.iter().map(line).collect()
    }

    /// A command that is carried out with the variables and in the folder.
    fn command(&self, words: &[String]) -> Vec<String> {
        let folder = self.folder.as_deref().map(shell_word);
        let enter = folder.map(|folder| format!("mkdir -p {folder} && cd {folder} || exit\n"));
        let script = format!("{}{}exec \"$@\"", self.exports(), enter.unwrap_or_default());
        let shell = ["/bin/sh", "-c", &script, "sh"].map(str::to_owned);
        shell.into_iter().chain(words.iter().cloned()).collect()
    }

    /// What the script of a container's program is to end with (`whimbrel_container`).
    fn program_lines(&self) -> String {
        let folder = self.folder.iter().map(|folder| format!("folder={}\n", shell_word(folder)));
        let words = self.program.iter().map(|words| {
            let words: Vec<_> = words.iter().map(|word| shell_word(word)).collect();
            format!("set -- {}\n", words.join(" "))
        });
        self.exports() + &folder.chain(words).collect::<String>()
    }

    /// `path` in the guest, from the folder on.
    fn place(&self, path: &str) -> String {
        match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("{}/{path}", self.folder.as_deref().unwrap_or("").trim_end_matches('/')),
        }
    }
}

/// A step, with what it copies and what it is known by.
struct Planned<'a> {
    step: &'a Step,
    sources: Vec<CopySource>,
    key: Digest,
}

impl Planned<'_> {
    /// Whether the step changes the guest, so that its state is worth a capsule.
    fn acts(&self) -> bool {
        matches!(self.step.instruction, Instruction::Run(_) | Instruction::Copy { .. })
    }
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let recipe = self.recipe()?;
        let machine = self.machine()?;
        let base = launch::image(context, &recipe.from).await?;
        let steps = self.plan(&recipe, &base)?;
        let build = Build { args: &self, context, base, machine, steps };
        build.refuse_leftover().await?;
        let built = build.build().await?;
        context.output.result(&built, |built| {
            let cached =
                if built.cached > 0 { format!(", {} as before", built.cached) } else { String::new() };
            format!("{}: made in {}{cached}\n", built.image, count(built.steps as u64, "step"))
        })
    }

    fn recipe(&self) -> Result<Recipe, CliError> {
        let path = self.file.clone().unwrap_or_else(|| self.folder.join(RECIPE));
        let text =
            fs::read_to_string(&path).map_err(|source| CliError::File { path: path.clone(), source })?;
        Recipe::parse(&text).map_err(|bad| CliError::Usage {
            problem: format!("{}: {bad}", path.display()),
            hint: "`whimbrel image build --help` shows a recipe".to_owned(),
        })
    }

    /// Name of the machine: one for each image, so that two builds of one image are told from each other.
    fn machine(&self) -> Result<MachineName, CliError> {
        let name = format!("build-{}", self.image.to_string().replace(['/', '.'], "-"));
        name.parse().map_err(|error| CliError::Usage {
            problem: format!("{error}"),
            hint: "choose a shorter name for the image".to_owned(),
        })
    }

    /// Tag of the state after a step, by its number from 1.
    fn tag(&self, step: usize) -> Option<RefName> {
        format!("{STATE}{step}{}", end_of_states(&self.image)).parse().ok()
    }

    fn plan<'a>(&self, recipe: &'a Recipe, base: &CapsuleInfo) -> Result<Vec<Planned<'a>>, CliError> {
        let disk = self.disk_size.map_or(0, |size| size.0);
        let net = self.net.as_ref().map(|net| format!("{:?}", net.0));
        let begin = format!("{} {} {} {disk} {net:?}", base.id, self.memory.0, self.cpus);
        let mut key = Digest::of(begin.as_bytes());
        let mut steps = Vec::new();
        for step in &recipe.steps {
            if matches!(step.instruction, Instruction::Cmd(_)) && !launch::is_container(base) {
                return Err(CliError::Usage {
                    problem: format!(
                        "line {}: CMD is for container images, and {} has a system",
                        step.line, recipe.from
                    ),
                    hint: "have RUN set up a service of that system, as with systemctl".to_owned(),
                });
            }
            let sources = match &step.instruction {
                Instruction::Copy { from, .. } => self.sources(from)?,
                _ => Vec::new(),
            };
            let copied: String = sources.iter().map(|source| format!(" {}", source.digest)).collect();
            key = Digest::of(format!("{key} {}{copied}", step.text).as_bytes());
            steps.push(Planned { step, sources, key });
        }
        Ok(steps)
    }

    fn sources(&self, names: &[String]) -> Result<Vec<CopySource>, CliError> {
        names.iter().map(|name| CopySource::read(Path::new(&self.folder), name)).collect()
    }
}

struct Build<'a> {
    args: &'a Args,
    context: &'a Context,
    base: CapsuleInfo,
    machine: MachineName,
    steps: Vec<Planned<'a>>,
}

impl Build<'_> {
    async fn refuse_leftover(&self) -> Result<(), CliError> {
        match self.context.client.machine(&self.machine).await {
            Err(ClientError::Api(error)) if error.code == ErrorCode::NotFound => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) => Err(CliError::Usage {
                problem: format!(
                    "there is a machine {0}, of a build that runs, or that was kept or killed",
                    self.machine
                ),
                hint: format!("`whimbrel stop {0} --kill; whimbrel delete {0}` removes it", self.machine),
            }),
        }
    }

    async fn build(&self) -> Result<Built, CliError> {
        let (cached, state) = self.last_known().await?;
        // If it cannot be made, one of that name is not of this build, and stays.
        match state {
            Some(state) => self.resume(state).await?,
            None => self.launch().await?,
        }
        let made = tokio::select! {
            made = self.make(cached) => made,
            _ = tokio::signal::ctrl_c() => Err(CliError::Cancelled { left: format!("{} is as it was", self.args.image) }),
        };
        if made.is_err() && self.args.keep {
            let note = format!(
                "note: the machine {0} is left; `whimbrel exec {0} -- COMMAND` looks into it",
                self.machine
            );
            self.context.output.remark(&note);
            return made;
        }
        let removed = self.remove_machine().await;
        let made = made?;
        removed?;
        Ok(made)
    }

    /// The number of steps that are the same as in the build before, and the capsule of the state after them.
    async fn last_known(&self) -> Result<(usize, Option<CapsuleId>), CliError> {
        if self.args.no_cache {
            return Ok((0, None));
        }
        let capsules = self.context.client.capsules().await?;
        let of_step = |number: usize, step: &Planned<'_>| {
            let (tag, key) = (self.args.tag(number)?, step.key.to_string());
            let is_it = |capsule: &&CapsuleInfo| {
                capsule.names.contains(&tag) && capsule.labels.get(STEP_LABEL) == Some(&key)
            };
            capsules.iter().find(is_it).map(|capsule| capsule.id)
        };
        let numbers = (1..=self.steps.len()).rev().zip(self.steps.iter().rev());
        let mut known = numbers.filter_map(|(number, step)| Some((number, Some(of_step(number, step)?))));
        Ok(known.next().unwrap_or_default())
    }

    async fn make(&self, cached: usize) -> Result<Built, CliError> {
        let mut shell = Shell::default();
        for (number, planned) in (1..).zip(&self.steps).take(cached) {
            self.announce(number, planned, ", as before");
            shell.follow(&planned.step.instruction);
        }
        self.shell(&["/bin/sh", "-c", BOOTED].map(str::to_owned), "wait for the first boot").await?;
        for (number, planned) in (1..).zip(&self.steps).skip(cached) {
            self.announce(number, planned, "");
            shell.follow(&planned.step.instruction);
            self.carry_out(planned, &shell).await?;
            if planned.acts() && !self.args.no_cache {
                self.keep_state(number, planned).await?;
            }
        }
        let capsule = self.finish(&shell).await?;
        // Steps that this recipe does not have.
        remove_states(self.context, &self.args.image, self.steps.len()).await;
        Ok(Built { image: self.args.image.to_string(), capsule, steps: self.steps.len(), cached })
    }

    fn announce(&self, number: usize, planned: &Planned<'_>, how: &str) {
        let line = format!("[{number}/{}] {}{how}", self.steps.len(), planned.step.text);
        self.context.output.remark(&line);
    }

    async fn launch(&self) -> Result<(), CliError> {
        let is_container = launch::is_container(&self.base);
        let nic = match &self.args.net {
            Some(net) => net.0.clone(),
            None => launch::default_port(self.context).await?,
        };
        let request = DeriveRequest {
            memory: Some(self.args.memory),
            cpus: Some(self.args.cpus),
            nics: Some(vec![nic]),
            disk_size: self.args.disk_size,
            cloud_init: Some(CloudInit {
                user_data: is_container.then(|| NO_PROGRAM.to_owned()),
                ..CloudInit::default()
            }),
            ..DeriveRequest::new(self.base.id.into(), self.machine.clone())
        };
        self.context.client.derive(&request).await?;
        Ok(())
    }

    async fn resume(&self, state: CapsuleId) -> Result<(), CliError> {
        let request = ResumeRequest {
            capsule: state.into(),
            host: None,
            pool: None,
            reclaim: false,
            name: Some(self.machine.clone()),
            mode: ResumeMode::Lazy,
            then_full: true,
            network: None,
        };
        operation::complete(self.context, self.context.client.resume(&request)).await.map(drop)
    }

    async fn carry_out(&self, planned: &Planned<'_>, shell: &Shell) -> Result<(), CliError> {
        let what = format!("do line {} of the recipe", planned.step.line);
        match &planned.step.instruction {
            Instruction::Run(words) => self.shell(&shell.command(words), &what).await,
            Instruction::Copy { to, .. } => {
                let into = planned.sources.len() > 1 && !to.ends_with('/');
                let to = shell.place(to) + if into { "/" } else { "" };
                for source in &planned.sources {
                    let then = source.send(self.context, &self.machine, &to).await?;
                    let tar = "tar=$(command -v tar || echo '/.whimbrel/busybox tar')";
                    let script = format!("to={}\n{tar}\n{then}", shell_word(&to));
                    self.shell(&["/bin/sh", "-c", &script].map(str::to_owned), &what).await?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Runs a command in the guest and shows what it prints.
    async fn shell(&self, command: &[String], what: &str) -> Result<(), CliError> {
        let timeout = self.args.timeout.0;
        let request = ExecRequest {
            command: command.to_vec(),
            env: Vec::new(),
            input: String::new(),
            timeout_s: Some(timeout.as_secs().max(1)),
        };
        let ended = exec_when_up(self.context, &self.machine, &request, Instant::now() + BOOT_MAX).await?;
        let text = printed(&ended);
        if !text.is_empty() {
            self.context.output.remark(text.trim_end());
        }
        match ended.exit_code {
            Some(0) => Ok(()),
            Some(code) => {
                Err(CliError::Step { step: what.to_owned(), said: format!("it ended with {code}") })
            }
            None => Err(CliError::Step { step: what.to_owned(), said: "a signal ended it".to_owned() }),
        }
    }

    async fn keep_state(&self, number: usize, planned: &Planned<'_>) -> Result<(), CliError> {
        let Some(tag) = self.args.tag(number) else { return Ok(()) };
        let labels = [(STEP_LABEL.to_owned(), planned.key.to_string())].into();
        let request = CheckpointRequest { tag: Some(tag), labels, ..CheckpointRequest::default() };
        self.checkpoint(&request).await.map(drop)
    }

    async fn checkpoint(&self, request: &CheckpointRequest) -> Result<CapsuleId, CliError> {
        let taken =
            operation::complete(self.context, self.context.client.checkpoint(&self.machine, request)).await?;
        match taken.state {
            OperationState::Succeeded { result: OperationResult::Checkpoint(report) } => Ok(report.capsule),
            _ => Err(ClientError::Lost { operation: taken.id }.into()),
        }
    }

    /// Makes the image of the machine's disk.
    async fn finish(&self, shell: &Shell) -> Result<CapsuleId, CliError> {
        let is_container = launch::is_container(&self.base);
        let program = match is_container {
            true => format!("printf %s {} >>/.whimbrel/program\n", shell_word(&shell.program_lines())),
            false => String::new(),
        };
        let script = format!("{program}{CLEAN}");
        self.shell(&["/bin/sh", "-c", &script].map(str::to_owned), "clean the machine").await?;
        let stop = StopRequest { timeout_s: Some(STOP_S), ..StopRequest::default() };
        self.context.client.stop(&self.machine, &stop).await?;
        let kept = [USER_LABEL, PROGRAM_LABEL].into_iter();
        let kept = kept.filter_map(|label| Some((label.to_owned(), self.base.labels.get(label)?.clone())));
        let mut labels: BTreeMap<_, _> = kept.chain(shell.labels.clone()).collect();
        labels.insert(IMAGE_LABEL.to_owned(), self.args.image.to_string());
        if let Some(words) = &shell.program {
            labels.insert(PROGRAM_LABEL.to_owned(), words.join(" "));
        }
        let tag = Some(self.args.image.tag());
        let request = CheckpointRequest { tag, labels, disks_only: true, ..CheckpointRequest::default() };
        self.checkpoint(&request).await
    }

    async fn remove_machine(&self) -> Result<(), CliError> {
        self.context.discard(&self.machine).await?;
        // The name by which the newest capsule of the machine stays known: the image, or a state.
        let Ok(name) = self.machine.as_str().parse::<RefName>() else { return Ok(()) };
        match self.context.client.remove(&name).await {
            Err(ClientError::Api(error)) if error.code == ErrorCode::NotFound => Ok(()),
            removed => Ok(removed.map(drop)?),
        }
    }
}

/// Removes the states of an image's build after its first `steps` steps. One that cannot be removed only
/// takes space, and the next build overwrites it.
pub(crate) async fn remove_states(context: &Context, image: &ImageName, steps: usize) {
    let end = end_of_states(image);
    let capsules = context.client.capsules().await.unwrap_or_default();
    let is_state = |tag: &&RefName| {
        let number = tag.as_str().strip_prefix(STATE).and_then(|rest| rest.strip_suffix(&end));
        number.and_then(|number| number.parse::<usize>().ok()).is_some_and(|number| number > steps)
    };
    let states = capsules.iter().filter(|capsule| capsule.labels.contains_key(STEP_LABEL));
    for tag in states.flat_map(|capsule| &capsule.names).filter(is_state) {
        let _ = context.client.remove(tag).await;
    }
}

/// Tags of the states of an image's build have this after the number of the step.
fn end_of_states(image: &ImageName) -> String {
    format!(".{}", image.to_string().replace('/', "."))
}

/// What a program in the guest has printed.
fn printed(ended: &ExecResult) -> String {
    let text = |part: &str| String::from_utf8_lossy(&STANDARD.decode(part).unwrap_or_default()).into_owned();
    let all = text(&ended.stdout) + &text(&ended.stderr);
    output::printable(&all).into_owned()
}
