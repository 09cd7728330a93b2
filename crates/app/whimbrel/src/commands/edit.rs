//! `whimbrel edit`: a machine's settings as a text, in the editor of the user.
//!
//! The keys of the text are options of `run`, parsed as that verb parses them, and what differs from the
//! machine is changed as `apply` changes it.

use super::apply::{Options, Outcome, Step, Wanted, changes, own_ports, words_of};
use crate::{argument_types::PortArg, context::Context, error::CliError, settings_args::SettingsArgs};
use clap::Parser;
use std::{fs, io::Write, path::Path, process::Command};
use toml::{Table, Value};
use whimbrel_api::{Autostart, MachineInfo, PortProtocol, PortRequest, RestartPolicy};
use whimbrel_core::{ByteSize, MachineName};

const EXAMPLES: &str = "\
Examples:
  whimbrel edit web
  EDITOR='code --wait' whimbrel edit web

Nothing changes before the editor ends, and nothing if the text is as it was. Memory and CPUs change while the machine \
is stopped. `whimbrel set` changes what is not in the text.";

/// Editor of users who name none.
const EDITOR: &str = "vi";

/// Change a machine's settings in an editor
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Name of the machine
    name: MachineName,
}

/// Options of a text.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Edited {
    #[arg(long)]
    memory: ByteSize,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=256))]
    cpus: u32,
    #[arg(long)]
    publish: Vec<PortArg>,
    #[command(flatten)]
    settings: SettingsArgs,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
        let machine = context.client.machine(&self.name).await?;
        let networks = context.client.networks().await?;
        let ports: Vec<_> = networks.into_iter().flat_map(|network| network.ports).collect();
        let before = text_of(&machine, &own_ports(&machine.name, &ports));
        let file = draft(&self.name, &before)?;
        let path = file.path().to_owned();
        edit(&path)?;
        let text =
            fs::read_to_string(&path).map_err(|source| CliError::File { path: path.clone(), source })?;
        let wanted = wanted(&text).and_then(|wanted| changes(&machine, &ports, wanted));
        let steps = match wanted {
            _ if text == before => Vec::new(),
            Ok(steps) => steps,
            Err(problem) => return Err(refusal(file, problem)),
        };
        let outcome = Outcome { name: self.name.clone(), steps: steps.iter().map(Step::name).collect() };
        for step in steps {
            step.take(context, &self.name).await?;
        }
        context.output.result(&outcome, |outcome| match outcome.steps.is_empty() {
            true => format!("{}: nothing is changed\n", outcome.name),
            false => format!("{}: done: {}\n", outcome.name, outcome.steps.join(", ")),
        })
    }
}

/// A file with the text, which nobody else can read.
fn draft(name: &MachineName, text: &str) -> Result<tempfile::NamedTempFile, CliError> {
    let failed = CliError::io("write a file for the editor");
    let prefix = format!("whimbrel-{name}-");
    let file = tempfile::Builder::new().prefix(&prefix).suffix(".toml").tempfile();
    file.and_then(|mut file| file.write_all(text.as_bytes()).map(|()| file)).map_err(failed)
}

/// The error about a text, which stays for the user.
fn refusal(file: tempfile::NamedTempFile, problem: String) -> CliError {
    let kept = file.keep().map_or_else(|error| error.file.path().to_owned(), |(_, path)| path);
    CliError::Usage { problem, hint: format!("nothing was changed; your text is in {}", kept.display()) }
}

/// Waits for the editor, whose name may have arguments.
fn edit(path: &Path) -> Result<(), CliError> {
    let named = |name| std::env::var(name).ok().filter(|editor| !editor.trim().is_empty());
    let editor = named("VISUAL").or_else(|| named("EDITOR")).unwrap_or_else(|| EDITOR.to_owned());
    let script = format!("{editor} \"$1\"");
    let ended = Command::new("sh").args(["-c", &script, "sh"]).arg(path).status();
    match ended.map_err(CliError::io("start the editor"))?.success() {
        true => Ok(()),
        false => Err(CliError::Usage {
            problem: format!("the editor `{editor}` failed"),
            hint: "nothing was changed; set EDITOR to another one".to_owned(),
        }),
    }
}

/// The settings of a machine as a text.
fn text_of(machine: &MachineInfo, ports: &[PortRequest]) -> String {
    let mut table = Table::new();
    let mut set = |key: &str, value: Value| drop(table.insert(key.to_owned(), value));
    set("memory", format!("{}M", machine.memory.0 >> 20).into());
    set("cpus", i64::from(machine.cpus).into());
    set("publish", ports.iter().map(port_text).map(Value::from).collect::<Vec<_>>().into());
    let settings = &machine.settings;
    match settings.autostart {
        Autostart::Off => set("autostart", false.into()),
        Autostart::On { order, delay_s } => {
            set("autostart", i64::from(order).into());
            set("autostart-delay", format!("{delay_s}s").into());
        }
    }
    let rule = settings.restart;
    set(
        "restart",
        match rule.policy {
            RestartPolicy::No => "no".into(),
            RestartPolicy::OnFailure => format!("on-failure:{}", rule.limit).into(),
            RestartPolicy::Always => format!("always:{}", rule.limit).into(),
        },
    );
    let labels = settings.labels.iter().map(|(key, value)| Value::from(format!("{key}={value}")));
    set("label", labels.collect::<Vec<_>>().into());
    set("note", settings.note.clone().into());
    format!(
        "# {}. Each key is an option of `whimbrel run`, which `whimbrel help run` explains.\n{table}",
        machine.name
    )
}

fn port_text(port: &PortRequest) -> String {
    let listen = port.listen.map(|address| format!("{address}:")).unwrap_or_default();
    let protocol = if port.protocol == PortProtocol::Udp { "/udp" } else { "" };
    format!("{listen}{}:{}{protocol}", port.port, port.guest_port)
}

/// What a text says, or what is wrong with it.
fn wanted(text: &str) -> Result<Wanted, String> {
    let options: Options = toml::from_str(text).map_err(|error| error.to_string())?;
    let edited = Edited::try_parse_from(words_of(&options)).map_err(|error| {
        error.to_string().lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
    })?;
    let publish = edited.publish.iter().map(|port| port.0).collect();
    let settings = edited.settings.settings();
    Ok(Wanted { memory: edited.memory, cpus: edited.cpus, publish, settings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_api::PublishedPort;

    fn machine() -> (MachineInfo, Vec<PublishedPort>) {
        let machine = serde_json::json!({
            "name": "web", "state": {"kind": "running"}, "memory": 1536u64 << 20, "cpus": 2, "accel": "tcg",
            "disks": [], "nics": [], "since_ms": 0,
            "settings": {
                "autostart": {"kind": "on", "order": 3, "delay_s": 30},
                "restart": {"policy": "on-failure", "limit": 5},
                "labels": {"tier": "front", "odd": "a=\"b\" # c"},
                "note": "two\nlines",
            },
        });
        let port = serde_json::json!({
            "machine": "web", "listen": "127.0.0.1", "port": 53, "address": "10.0.0.2", "guest_port": 53,
            "protocol": "udp",
        });
        let read = |error| format!("{error}");
        let machine = serde_json::from_value(machine).map_err(read).expect("a machine");
        (machine, vec![serde_json::from_value(port).map_err(read).expect("a port")])
    }

    fn names(from: &str, to: &str) -> Result<Vec<&'static str>, String> {
        let (machine, ports) = machine();
        let text = text_of(&machine, &own_ports(&machine.name, &ports));
        assert!(text.contains(from), "{text}");
        let steps = changes(&machine, &ports, wanted(&text.replacen(from, to, 1))?)?;
        Ok(steps.iter().map(Step::name).collect())
    }

    #[test]
    fn a_text_says_what_the_machine_has_and_a_change_of_it_is_the_change() {
        assert_eq!(names("web", "web").unwrap(), Vec::<&str>::new());
        assert_eq!(names("tier=front", "tier=back").unwrap(), ["change its settings"]);
        assert_eq!(names("autostart = 3", "autostart = 4").unwrap(), ["change its settings"]);
        assert_eq!(names("on-failure:5", "always").unwrap(), ["change its settings"]);
        assert_eq!(names("\"127.0.0.1:53:53/udp\"", "").unwrap(), ["change its published ports"]);
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_words() {
        let refused = |from, to| names(from, to).expect_err("a refusal");
        assert!(refused("cpus = 2", "cpus = 4").contains("whimbrel stop web"));
        assert!(refused("cpus = 2", "cpus = 0").contains("--cpus"));
        assert!(refused("cpus = 2", "cups = 2").contains("--cups"));
        assert!(refused("cpus = 2", "cpus = ").contains("TOML"));
    }
}
