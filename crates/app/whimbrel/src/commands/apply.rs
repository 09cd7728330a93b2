//! `whimbrel apply`: makes the machines of a file, and changes those that differ.
//!
//! The file has a table for each machine, whose keys are the options of `launch` and `run`: they are parsed
//! as these verbs parse them. All of it is read, and compared with what there is, before anything is done.

use super::{launch, run};
use crate::{context::Context, error::CliError};
use clap::{
    Parser,
    error::{ContextKind, ContextValue},
};
use serde::Serialize;
use std::{collections::BTreeMap, fs, path::PathBuf};
use toml::{Spanned, Value};
use whimbrel_api::{
    HardwareChange, HostPort, MachineInfo, MachineSettings, MachineState, PortRequest, PortsRequest,
    PublishedPort, SettingsRequest,
};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel apply machines.toml --dry-run
  whimbrel apply machines.toml

machines.toml:
  [web]
  image = \"debian/12\"                 # as `launch`; without an image, as `run`
  memory = \"2G\"
  publish = [\"8080:80\", \"2222:22\"]
  autostart = true
  label = [\"tier=front\"]

  [db]
  disk = [\"/srv/db.raw\"]
  memory = \"4G\"
  net = \"lan0\"

A key is a long option of `launch` or `run`. Machines that are not in the file stay as they are. Of a machine that \
exists, published ports and settings are changed. One that is stopped is started, with the memory and CPUs of the \
file. Whatever else is set when a machine is made stays.";

/// Create the machines of a file, and change those that differ
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// TOML file with a table for each machine
    file: PathBuf,
    /// Only print what would be done
    #[arg(long)]
    dry_run: bool,
}

/// Options of a machine, each with its place in the file.
pub(super) type Options = BTreeMap<Spanned<String>, Value>;

/// How a machine is made.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
pub(super) enum Creation {
    Launch(Box<launch::Args>),
    Run(Box<run::Args>),
}

/// What can be compared of a machine that exists.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) memory: ByteSize,
    pub(crate) cpus: u32,
    pub(crate) publish: Vec<PortRequest>,
    pub(crate) settings: MachineSettings,
}

/// A machine of the file.
struct Entry {
    name: MachineName,
    /// Line of its table.
    line: usize,
    creation: Creation,
}

pub(super) enum Step {
    Create(Creation),
    Hardware(Box<SettingsRequest>),
    Publish(PortsRequest),
    Settings(Box<SettingsRequest>),
    Start,
}

/// What was done, or would be, with a machine.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) name: MachineName,
    pub(super) steps: Vec<&'static str>,
}

/// What is wrong in a line of the file.
struct Wrong {
    line: usize,
    why: String,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let text = fs::read_to_string(&self.file)
            .map_err(|source| CliError::File { path: self.file.clone(), source })?;
        let refuse = |wrong: Wrong| CliError::Usage {
            problem: format!("{}:{}: {}", self.file.display(), wrong.line, wrong.why),
            hint: "nothing was done; `whimbrel help apply` shows a file".to_owned(),
        };
        let entries = entries(&text).map_err(refuse)?;
        let machines = context.client.machines().await?;
        let networks = context.client.networks().await?;
        let ports: Vec<_> = networks.into_iter().flat_map(|network| network.ports).collect();
        let mut plan = Vec::new();
        for Entry { name, line, creation } in entries {
            let machine = machines.iter().find(|machine| machine.name == name);
            let steps = steps(machine, &ports, creation).map_err(|why| refuse(Wrong { line, why }))?;
            plan.push((name, steps));
        }
        let outcome = |(name, steps): &(MachineName, Vec<Step>)| Outcome {
            name: name.clone(),
            steps: steps.iter().map(Step::name).collect(),
        };
        let outcomes: Vec<_> = plan.iter().map(outcome).collect();
        if !self.dry_run {
            for (name, step) in plan.into_iter().flat_map(|(name, steps)| with_name(name, steps)) {
                step.take(context, &name).await?;
            }
        }
        context.output.result(&outcomes, |outcomes| outcomes.iter().map(Outcome::line).collect())
    }
}

fn with_name(name: MachineName, steps: Vec<Step>) -> impl Iterator<Item = (MachineName, Step)> {
    steps.into_iter().map(move |step| (name.clone(), step))
}

impl Outcome {
    fn line(&self) -> String {
        let steps = if self.steps.is_empty() { "as the file says".to_owned() } else { self.steps.join(", ") };
        format!("{}: {steps}\n", self.name)
    }
}

impl Creation {
    fn wanted(&self) -> Wanted {
        match self {
            Self::Launch(args) => args.wanted(),
            Self::Run(args) => args.wanted(),
        }
    }
}

impl Step {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Create(_) => "create",
            Self::Hardware(_) => "change its hardware",
            Self::Publish(_) => "change its published ports",
            Self::Settings(_) => "change its settings",
            Self::Start => "start",
        }
    }

    pub(super) async fn take(self, context: &Context, name: &MachineName) -> Result<(), CliError> {
        let client = &context.client;
        match self {
            Self::Create(Creation::Launch(args)) => args.create(context).await.map(drop),
            Self::Create(Creation::Run(args)) => args.create(context).await.map(drop),
            Self::Publish(ports) => Ok(client.change_ports(name, &ports).await.map(drop)?),
            Self::Hardware(settings) | Self::Settings(settings) => {
                Ok(client.change_settings(name, &settings).await.map(drop)?)
            }
            Self::Start => Ok(client.start_machine(name).await.map(drop)?),
        }
    }
}

/// The machines of a file.
fn entries(text: &str) -> Result<Vec<Entry>, Wrong> {
    let line_of = |offset: usize| 1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count();
    let tables: BTreeMap<Spanned<String>, Options> = toml::from_str(text).map_err(|error| Wrong {
        line: line_of(error.span().map_or(0, |span| span.start)),
        why: error.message().to_owned(),
    })?;
    let entry = |(name, options): (Spanned<String>, Options)| -> Result<Entry, Wrong> {
        let line = line_of(name.span().start);
        let lines = options.keys().map(|key| (key.get_ref().clone(), line_of(key.span().start)));
        let lines: BTreeMap<_, _> = lines.collect();
        let name = name.into_inner();
        let creation = creation(&name, &options).map_err(|error| wrong(&error, line, &lines))?;
        let name = name.parse::<MachineName>().map_err(|error| Wrong { line, why: error.to_string() })?;
        Ok(Entry { name, line, creation })
    };
    tables.into_iter().map(entry).collect()
}

/// The verb that makes a machine, with these options.
fn creation(name: &str, options: &Options) -> Result<Creation, clap::Error> {
    let image = options.iter().find(|(key, _)| key.get_ref() == "image");
    let mut words = match image.map(|(_, value)| value) {
        Some(image) => vec!["launch".to_owned(), word(image), name.to_owned()],
        None => vec!["run".to_owned(), name.to_owned()],
    };
    words.extend(words_of(options));
    Creation::try_parse_from(words)
}

/// The options on a command line.
pub(super) fn words_of(options: &Options) -> Vec<String> {
    let options = options.iter().map(|(key, value)| (key.get_ref(), value));
    let words = options.filter(|(key, _)| *key != "image").flat_map(|(key, value)| match value {
        Value::Boolean(true) => vec![format!("--{key}")],
        Value::Boolean(false) => Vec::new(),
        Value::Array(values) => values.iter().map(|value| format!("--{key}={}", word(value))).collect(),
        value => vec![format!("--{key}={}", word(value))],
    });
    words.collect()
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// What is wrong in the line of the key that an error is about, or of its table.
fn wrong(error: &clap::Error, table: usize, lines: &BTreeMap<String, usize>) -> Wrong {
    let about = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) => option.clone(),
        Some(ContextValue::Strings(options)) => options.join(" "),
        _ => String::new(),
    };
    let option = about.trim_start_matches('-').split(['=', ' ']).next().unwrap_or_default();
    let text = error.to_string();
    let why = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    let missing = text.lines().skip(1).take_while(|line| line.starts_with("  ")).map(str::trim);
    let why = missing.fold(why, |why, what| format!("{why} {what}"));
    Wrong { line: lines.get(option).copied().unwrap_or(table), why }
}

/// What is to be done with a machine, or why it cannot become what is wanted.
fn steps(
    machine: Option<&MachineInfo>,
    ports: &[PublishedPort],
    creation: Creation,
) -> Result<Vec<Step>, String> {
    let Some(machine) = machine else { return Ok(vec![Step::Create(creation)]) };
    let mut steps = changes(machine, ports, creation.wanted())?;
    steps.extend(is_ended(machine).then_some(Step::Start));
    Ok(steps)
}

/// What is to be changed of a machine, or why it cannot become what is wanted.
pub(super) fn changes(
    machine: &MachineInfo,
    ports: &[PublishedPort],
    wanted: Wanted,
) -> Result<Vec<Step>, String> {
    let hardware = changed_hardware(machine, &wanted)?;
    let ports = changed_ports(&machine.name, ports, &wanted.publish).map(Step::Publish);
    let settings = changed_settings(&machine.settings, wanted.settings).map(Box::new).map(Step::Settings);
    Ok(hardware.into_iter().chain(ports).chain(settings).collect())
}

fn is_ended(machine: &MachineInfo) -> bool {
    matches!(machine.state, MachineState::Stopped | MachineState::Crashed { .. })
}

/// The change of memory and CPUs, which only a machine that does not run can have.
fn changed_hardware(machine: &MachineInfo, wanted: &Wanted) -> Result<Option<Step>, String> {
    let differing = [
        ("memory", machine.memory.to_string(), wanted.memory.to_string()),
        ("CPUs", machine.cpus.to_string(), wanted.cpus.to_string()),
    ];
    match differing.into_iter().find(|(_, is, should)| is != should) {
        None => Ok(None),
        Some(_) if is_ended(machine) => {
            let hardware = HardwareChange {
                memory: Some(wanted.memory),
                cpus: Some(wanted.cpus),
                ..HardwareChange::default()
            };
            let settings = SettingsRequest { hardware, ..SettingsRequest::default() };
            Ok(Some(Step::Hardware(Box::new(settings))))
        }
        Some((what, is, should)) => {
            let name = &machine.name;
            Err(format!("{name} has {is} of {what} and not {should}: stop it first (`whimbrel stop {name}`)"))
        }
    }
}

/// Published ports of a machine, of those of the host.
pub(super) fn own_ports(name: &MachineName, all: &[PublishedPort]) -> Vec<PortRequest> {
    let of = |port: &PublishedPort| PortRequest {
        listen: port.listen,
        port: port.port,
        guest_port: port.guest_port,
        protocol: port.protocol,
    };
    all.iter().filter(|port| port.machine == *name).map(of).collect()
}

fn changed_ports(name: &MachineName, all: &[PublishedPort], wanted: &[PortRequest]) -> Option<PortsRequest> {
    let own = own_ports(name, all);
    let gone = own.iter().filter(|port| !wanted.contains(port));
    let unpublish: Vec<_> = gone.map(|it| HostPort { port: it.port, protocol: it.protocol }).collect();
    let publish: Vec<_> = wanted.iter().filter(|port| !own.contains(port)).copied().collect();
    (!unpublish.is_empty() || !publish.is_empty()).then_some(PortsRequest { publish, unpublish })
}

fn changed_settings(before: &MachineSettings, wanted: MachineSettings) -> Option<SettingsRequest> {
    if *before == wanted {
        return None;
    }
    let removed = before.labels.keys().filter(|key| !wanted.labels.contains_key(*key));
    let removed = removed.map(|key| (key.clone(), None)).collect::<BTreeMap<_, _>>();
    Some(SettingsRequest {
        autostart: Some(wanted.autostart),
        restart: Some(wanted.restart),
        labels: wanted.labels.into_iter().map(|(key, value)| (key, Some(value))).chain(removed).collect(),
        note: Some(wanted.note),
        hardware: HardwareChange::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
# two machines
[web]
image = \"debian/12\"
cpus = 2
publish = [\"8080:80\", \"2222:22\"]
autostart = true
label = [\"tier=front\"]

[db]
disk = [\"/srv/db.raw\"]
memory = \"4G\"
";

    fn refused(text: &str) -> (usize, String) {
        match entries(text) {
            Err(Wrong { line, why }) => (line, why),
            Ok(_) => panic!("{text}"),
        }
    }

    #[test]
    fn a_file_says_what_the_verbs_say() {
        let entries = entries(FILE).unwrap_or_else(|wrong| panic!("line {}: {}", wrong.line, wrong.why));
        let names: Vec<_> = entries.iter().map(|entry| (entry.name.as_str(), entry.line)).collect();
        assert_eq!(names, [("db", 9), ("web", 2)]);
        let [db, web] = [0, 1].map(|index| entries[index].creation.wanted());
        assert!(matches!(entries[0].creation, Creation::Run(_)) && db.memory == ByteSize(4 << 30));
        assert!(matches!(entries[1].creation, Creation::Launch(_)) && web.memory == ByteSize(1 << 30));
        assert_eq!((web.cpus, web.publish.len()), (2, 2));
        assert_eq!(web.settings.labels["tier"], "front");
    }

    #[test]
    fn an_error_names_the_line_that_it_is_in() {
        let with = |from: &str, to: &str| refused(&FILE.replace(from, to));
        assert_eq!(with("cpus = 2", "cpus = 2x").0, 4);
        assert_eq!(with("cpus = 2", "cpus = 0").0, 4);
        let (line, why) = with("label =", "lable =");
        assert!(line == 7 && why.contains("--lable"), "{line}: {why}");
        let (line, why) = with("memory = \"4G\"", "");
        assert!(line == 9 && why.contains("--memory"), "{line}: {why}");
        assert_eq!(with("memory = \"4G\"", "memory = \"4 apples\"").0, 11);
        assert_eq!(with("[db]", "[\"d b\"]").0, 9);
        assert_eq!(with("[db]", "[web]").0, 9);
        assert_eq!(with("debian/12", "/").0, 2);
    }

    #[test]
    fn what_is_as_the_file_says_is_left_alone() {
        let wanted = || entries(FILE).unwrap_or_else(|wrong| panic!("{}", wrong.why)).remove(1).creation;
        let mut machine: MachineInfo = serde_json::from_value(serde_json::json!({
            "name": "web", "state": {"kind": "running"}, "memory": 1u64 << 30, "cpus": 2, "accel": "tcg",
            "disks": [], "nics": [], "since_ms": 0,
        }))
        .unwrap();
        machine.settings = wanted().wanted().settings;
        let port = |port, guest_port| {
            let text = serde_json::json!({
                "machine": "web", "port": port, "address": "10.0.0.2", "guest_port": guest_port, "protocol": "tcp",
            });
            serde_json::from_value::<PublishedPort>(text).unwrap()
        };
        let ports = [port(8080, 80), port(2222, 22)];
        let names = |machine: &MachineInfo, ports: &[PublishedPort]| {
            let steps = steps(Some(machine), ports, wanted()).unwrap();
            steps.iter().map(Step::name).collect::<Vec<_>>()
        };
        assert_eq!(names(&machine, &ports), Vec::<&str>::new());
        assert_eq!(names(&machine, &ports[..1]), ["change its published ports"]);
        machine.settings.labels.insert("old".into(), "yes".into());
        machine.state = MachineState::Stopped;
        assert_eq!(names(&machine, &ports), ["change its settings", "start"]);
        machine.cpus = 4;
        assert_eq!(names(&machine, &ports), ["change its hardware", "change its settings", "start"]);
        machine.state = MachineState::Running;
        let why = steps(Some(&machine), &ports, wanted()).err().expect("a refusal");
        assert!(why.contains("CPUs") && why.contains("whimbrel stop web"), "{why}");
    }
}
