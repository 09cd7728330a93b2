//! Command line: its verbs in groups, and the global options. Each verb is a file in `commands`.

use crate::{commands::*, context::Context, error::CliError};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::path::{Path, PathBuf};
use whimbrel_client::{ApiAddress, Fingerprint};

/// Socket of the daemon when no other one is given.
pub(crate) const DEFAULT_SOCKET: &str = "/run/whimbrel/host.sock";

/// Verbs of `whimbrel --help` by group, separated by blanks. clap has one heading for all of them.
const GROUPS: [(&str, &str); 10] = [
    (
        "Machines",
        "launch run apply ssh ps top inspect console display logs exec cp start stop set edit rename pause unpause balloon dirty-rate delete",
    ),
    (
        "Capsules",
        "checkpoint suspend resume rewind clone derive ls show log diff bisect tag untag promote outdated export import share open image",
    ),
    ("Moving", "migrate evacuate resolve push pull migrations"),
    ("Protection", "protect unprotect failover"),
    ("Store", "gc verify repair encryption cache schedule"),
    ("Hosts", "trust key token network cpu doctor report upgrade"),
    ("Files", "serve mount session"),
    ("Pool", "pool"),
    ("Daemon", "host events web mcp"),
    ("Other", "completions help"),
];

const AFTER_HELP: &str = "\
Getting started:
  whimbrel doctor                                        check what this host has and lacks
  whimbrel host &                                        start the daemon
  whimbrel launch debian/12 web && whimbrel ssh web      create a machine and log in to it
  whimbrel checkpoint web --tag before-upgrade           save its state
  whimbrel resume before-upgrade --name web2             run that state beside it

Exit codes:
  0    success
  1    failure
  2    wrong arguments or settings
  3    no such machine, capsule, host or operation
  4    the name is taken, or the machine is busy
  5    a host or the daemon cannot be reached, or is not trusted
  6    stored data is damaged
  130  interrupted or cancelled

`whimbrel help COMMAND` shows the options and examples of a command.";

/// Run, checkpoint, migrate and protect virtual machines on unmodified QEMU
#[derive(Debug, Parser)]
#[command(name = "whimbrel", version, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    /// Socket of the daemon [default: /run/whimbrel/host.sock]
    #[arg(long, global = true, env = "WHIMBREL_SOCKET", hide_env_values = true)]
    #[arg(value_name = "PATH", help_heading = "Global options")]
    pub(crate) socket: Option<PathBuf>,
    /// Use the daemon of another computer, by its API: `https://HOST:PORT` [default port: 7443]
    #[arg(id = "remote", long = "host", global = true, env = "WHIMBREL_HOST", hide_env_values = true)]
    #[arg(value_name = "URL", help_heading = "Global options")]
    pub(crate) remote: Option<ApiAddress>,
    /// File with the token for --host
    #[arg(long, global = true, env = "WHIMBREL_TOKEN_FILE", hide_env_values = true)]
    #[arg(value_name = "FILE", help_heading = "Global options")]
    pub(crate) token_file: Option<PathBuf>,
    /// Fingerprint of the certificate of --host, as its daemon prints it
    #[arg(long, global = true, env = "WHIMBREL_FINGERPRINT", hide_env_values = true)]
    #[arg(value_name = "SHA256", help_heading = "Global options")]
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Print results as JSON to stdout and errors as JSON to stderr
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// Do not print progress or remarks
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// Log more to stderr; repeat the option for all details
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = "Global options")]
    pub(crate) verbose: u8,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Reads the arguments of this process. Wrong ones, and requests for help, end it.
    pub(crate) fn from_arguments() -> Self {
        Self::from_arg_matches(&definition().get_matches()).unwrap_or_else(|error| error.exit())
    }

    pub(crate) fn socket(&self) -> &Path {
        self.socket.as_deref().unwrap_or(Path::new(DEFAULT_SOCKET))
    }
}

/// Definition of the command line, with the verbs in groups.
fn definition() -> clap::Command {
    let command = Cli::command();
    let (header, literal) = (command.get_styles().get_header(), command.get_styles().get_literal());
    let mut list = String::new();
    for (group, verbs) in GROUPS {
        list += &format!("\n{header}{group}:{header:#}\n");
        for verb in verbs.split(' ') {
            let about = command.find_subcommand(verb).and_then(clap::Command::get_about);
            let about = about.map_or_else(|| "Print the help of a command".to_owned(), ToString::to_string);
            list += &format!("  {literal}{verb:<11}{literal:#}  {about}\n");
        }
    }
    let options = format!("{header}Global options:{header:#}");
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{list}\n{options}\n{{options}}{{after-help}}"
    );
    command.help_template(template)
}

/// All verbs: those that call the daemon, and those that do not need one.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Call(Call),
    #[command(alias = "daemon")]
    Host(host::Args),
    Doctor(doctor::Args),
    Mount(Box<mount::Args>),
    Pool(pool::Args),
    Session(session::Args),
    #[command(hide = true)]
    Vm(vm::Args),
    #[command(hide = true)]
    UnpackLayer(unpack_layer::Args),
    #[command(hide = true)]
    DecompressImage(decompress_image::Args),
    Completions(completions::Args),
    Manuals(completions::Manuals),
}

impl Command {
    /// Whether this process is a daemon, which logs more than a command.
    pub(crate) fn is_daemon(&self) -> bool {
        match self {
            Self::Host(_) | Self::Vm(_) => true,
            Self::Pool(args) => args.is_daemon(),
            _ => false,
        }
    }
}

/// Defines the verbs that call the daemon and print what it answers.
macro_rules! calls {
    ($($(#[$attribute:meta])* $verb:ident($arguments:path),)*) => {
        /// Verbs that call the daemon.
        #[derive(Debug, Subcommand)]
        pub(crate) enum Call {
            $($(#[$attribute])* $verb($arguments),)*
        }

        impl Call {
            /// Calls the daemon and prints what it answers.
            pub(crate) async fn run(self, context: &Context) -> Result<(), CliError> {
                match self {
                    $(Self::$verb(args) => args.run(context).await,)*
                }
            }
        }
    };
}

calls! {
    Launch(launch::Args),
    Run(run::Args),
    Apply(apply::Args),
    Ssh(ssh::Args),
    Ps(ps::Args),
    Top(top::Args),
    Inspect(inspect::Args),
    Console(console::Args),
    Display(display::Args),
    Logs(logs::Args),
    Exec(exec::Args),
    Cp(cp::Args),
    Start(start::Args),
    Stop(stop::Args),
    Set(set::Args),
    Edit(edit::Args),
    Rename(rename::Args),
    #[command(alias = "forget")]
    Delete(delete::Args),
    Pause(pause::Args),
    Unpause(unpause::Args),
    Upgrade(upgrade::Args),
    Balloon(balloon::Args),
    Checkpoint(checkpoint::Args),
    Suspend(suspend::Args),
    Rewind(rewind::Args),
    Resume(resume::Args),
    Clone(clone::Args),
    Derive(derive::Args),
    Migrate(migrate::Args),
    Protect(protect::Args),
    Unprotect(unprotect::Args),
    Failover(failover::Args),
    Migrations(migrations::Args),
    Evacuate(evacuate::Args),
    Resolve(resolve::Args),
    #[command(alias = "wws")]
    DirtyRate(dirty_rate::Args),
    Push(push::Args),
    Pull(pull::Args),
    Ls(ls::Args),
    Log(log::Args),
    Show(show::Args),
    Diff(diff::Args),
    Bisect(bisect::Args),
    Tag(tag::Args),
    Promote(promote::Args),
    #[command(alias = "rebase")]
    Outdated(outdated::Args),
    Untag(untag::Args),
    /// Old name of `untag`, which people also try on machines.
    #[command(hide = true)]
    Rm(untag::OldArgs),
    Encryption(encryption::Args),
    Cache(cache::Args),
    Schedule(schedule::Args),
    Gc(gc::Args),
    Verify(verify::Args),
    Repair(repair::Args),
    Export(export::Args),
    Import(import::Args),
    Share(share::Args),
    Open(open::Args),
    Image(image::Args),
    Trust(trust::Args),
    Network(network::Args),
    Cpu(cpu::Args),
    Token(token::Args),
    Key(key::Args),
    Events(events::Args),
    Web(web::Args),
    Mcp(mcp::Args),
    Report(report::Args),
    Serve(serve::Args),
    #[command(hide = true)]
    DialStdio(dial_stdio::Args),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    /// Every visible command, with the words that call it.
    fn visible(command: &Command, path: &str, into: &mut Vec<(String, Command)>) {
        for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
            let path = format!("{path} {}", verb.get_name());
            into.push((path.clone(), verb.clone()));
            visible(verb, &path, into);
        }
    }

    fn all() -> Vec<(String, Command)> {
        let mut all = Vec::new();
        visible(&Cli::command(), "whimbrel", &mut all);
        all
    }

    #[test]
    fn the_definition_is_sound() {
        definition().debug_assert();
    }

    #[test]
    fn every_visible_verb_is_in_one_group() {
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, verbs)| verbs.split(' ')).collect();
        let command = Cli::command();
        let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set()).map(Command::get_name);
        let mut verbs: Vec<&str> = verbs.chain(["help"]).collect();
        grouped.sort_unstable();
        verbs.sort_unstable();
        assert_eq!(grouped, verbs);
    }

    #[test]
    fn every_verb_teaches_by_example() {
        let top = |path: &str| path.split(' ').count() == 2;
        for (path, verb) in all().iter().filter(|(path, _)| top(path)) {
            let examples = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(examples.contains(path), "{path} has no example");
        }
    }

    #[test]
    fn a_summary_is_an_imperative_on_one_line() {
        for (path, verb) in all() {
            let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
            let (first, rest) = about.split_once(' ').unwrap_or_default();
            let word = first.starts_with(|c: char| c.is_ascii_uppercase()) && !first.ends_with('s');
            assert!(word && (8..=70).contains(&rest.chars().count()), "{path}: {about}");
            assert!(!about.ends_with('.'), "{path}: {about}");
        }
    }

    #[test]
    fn options_are_described_without_pronouns_and_questions() {
        const REFUSED: [&str; 13] = [
            "It", "Its", "They", "Those", "That", "This", "Who", "Whose", "What", "Where", "When", "How",
            "Which",
        ];
        for (path, verb) in all() {
            for argument in verb.get_arguments().filter(|argument| !argument.is_hide_set()) {
                let values = argument.get_possible_values();
                let values = values.iter().filter_map(|value| value.get_help());
                for help in argument.get_help().into_iter().chain(values).map(ToString::to_string) {
                    let first = help.split([' ', ',', ':']).next().unwrap_or_default();
                    assert!(!REFUSED.contains(&first), "{path} {}: {help}", argument.get_id());
                    assert!(!help.starts_with("The same") && !help.ends_with('.'), "{path}: {help}");
                }
            }
        }
    }

    #[test]
    fn old_names_are_still_understood() {
        let dir = tempfile::tempdir().unwrap();
        let key = whimbrel_wire::Identity::load_or_create(dir.path()).unwrap().public_key().to_string();
        for old in [
            "wws web --page-bytes 1 --again-bytes 2 --fixed 1ms",
            "report web",
            "forget web",
            "rm web",
            "rebase golden",
            "trust limit beta --all",
            "cache forget /disk",
            "daemon --name alpha",
            "run web --memory 1G --self-service checkpoint",
            "resume web --take-back --then full",
            "push web beta --follow",
            "push web --unfollow",
            "migrate web beta --mode live --downtime-limit 1ms --free-caches",
            "migrate web beta --mode lazy --safe gamma",
            "migrate web beta --mode stop",
            "protect web beta --then beta --keep 1/min,6 --stretch 2 --block 64",
            "serve --stdio",
            "serve /vms --listen 0.0.0.0:1 --upstream a:/b --with=--fresh=session --idle 3 --keys /k",
            "mount a:/b /m --cache /c --capacity 0 --fresh 1 --delay never --patience 1 --known /k --shared /s",
            "mount a:/b /m --whole *.mem --keys /k --remote w --same-ids --others --control /c",
            "mount a:/b /m --id user:1=2",
            "mount pool:a /m --protocol window",
            "mount pool:a /m --protocol local",
            "session --control /c end web --leave",
            "session nbd web file --end",
            "session note /f --whole",
            "session key --keys /k",
            "pool purge --manager 1.2.3.4:5/KEY",
            "pool pin /f 1 --release --holder a/b --manager 1.2.3.4:5/KEY --keys /k",
            "pool drain b1 --stop --manager 1.2.3.4:5/KEY",
            "pool manager --data /d --listen 1.2.3.4:5 --pins-for 1h",
            "pool policy /f --width 3 --cut fixed:1M --manager 1.2.3.4:5/KEY",
        ] {
            let line = format!("whimbrel {}", old.replace("KEY", &key));
            let parsed = definition().try_get_matches_from(line.split(' '));
            assert!(parsed.is_ok(), "{old}: {parsed:?}");
        }
    }
}
