//! The program of an image, and the script by which a machine starts it.

use crate::ContainerError;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Search path of programs of an image that names none.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Program of an image that names none.
const SHELL: &str = "/bin/sh";
const SIGNAL: &str = "TERM";

/// What an image says of its program (image-spec, `config.md`): the fields that a machine needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(crate) struct Program {
    user: String,
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: String,
    stop_signal: String,
}

impl Program {
    /// The words of the program and its arguments.
    pub(crate) fn words(&self) -> Vec<String> {
        let words: Vec<_> = [&self.entrypoint, &self.cmd].into_iter().flatten().flatten().cloned().collect();
        if words.is_empty() { vec![SHELL.to_owned()] } else { words }
    }

    /// A script that sets the environment of the program, its user and its arguments.
    pub(crate) fn script(&self) -> Result<String, ContainerError> {
        let mut script = String::new();
        for (name, value) in self.environment() {
            script += &format!("export {name}={}\n", quoted(value)?);
        }
        let signal = self.stop_signal.trim_start_matches("SIG");
        let is_signal = !signal.is_empty() && signal.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let folder = if self.working_dir.is_empty() { "/" } else { &self.working_dir };
        script += &format!("signal={}\n", if is_signal { signal } else { SIGNAL });
        script += &format!("user={}\n", quoted(&self.user)?);
        script += &format!("folder={}\n", quoted(folder)?);
        let words: Result<Vec<_>, _> = self.words().iter().map(|word| quoted(word)).collect();
        Ok(script + &format!("set -- {}\n", words?.join(" ")))
    }

    /// Variables by name. What no shell takes as a name is left out.
    fn environment(&self) -> BTreeMap<&str, &str> {
        let is_name = |name: &&str| {
            name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        };
        let given = self.env.iter().flatten().filter_map(|variable| variable.split_once('='));
        [("PATH", PATH)].into_iter().chain(given.filter(|(name, _)| is_name(name))).collect()
    }
}

/// `text` as one word of a shell.
fn quoted(text: &str) -> Result<String, ContainerError> {
    match text.contains('\0') {
        true => Err(ContainerError::invalid("the program", "a word has a zero byte in it")),
        false => Ok(format!("'{}'", text.replace('\'', r"'\''"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// What the shell makes of the script.
    fn seen(program: &Program) -> Vec<String> {
        let script = program.script().unwrap();
        let show = "printf '%s\\0' \"$PATH\" \"$A\" \"$signal\" \"$user\" \"$folder\" \"$@\"";
        let output =
            Command::new("sh").env_clear().args(["-c", &format!("{script}{show}")]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.strip_suffix('\0').unwrap_or_default().split('\0').map(str::to_owned).collect()
    }

    #[test]
    fn the_shell_sees_what_the_image_says_whatever_is_in_it() {
        let odd = "it's $HOME `id` \"x\"\n\\ end";
        let image = serde_json::json!({
            "Env": [format!("A={odd}"), "PATH=/app/bin", "A-B=x", "1=2", "nothing", "B=$(touch /tmp/never)"],
            "Entrypoint": ["/run me", odd], "Cmd": [""], "User": "web:1000",
            "WorkingDir": "/a b", "StopSignal": "SIGQUIT", "Volumes": {"/data": {}},
        });
        let program: Program = serde_json::from_value(image).unwrap();
        assert_eq!(seen(&program), ["/app/bin", odd, "QUIT", "web:1000", "/a b", "/run me", odd, ""]);
    }

    #[test]
    fn an_image_that_says_nothing_runs_a_shell() {
        let program: Program = serde_json::from_str(r#"{"Env": null, "Cmd": null}"#).unwrap();
        assert_eq!(seen(&program), [PATH, "", "TERM", "", "/", "/bin/sh"]);
    }

    #[test]
    fn a_signal_that_is_none_is_not_in_the_script() {
        let program = Program { stop_signal: "TERM; reboot".into(), ..Program::default() };
        assert!(program.script().unwrap().contains("signal=TERM\n"));
        assert!(Program { user: "\0".into(), ..Program::default() }.script().is_err());
    }
}
