//! QEMU binary of the host: path, version and machine types.

use crate::{
    process::spawn_to_ask,
    qmp::{Qmp, QmpError},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    env, fmt, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

const PROGRAM: &str = "qemu-system-x86_64";

/// QEMU binary of this host.
#[derive(Debug, Clone)]
pub struct QemuBinary {
    /// Path of the program.
    pub path: PathBuf,
    /// Version of the program.
    pub version: Version,
    /// Machine types by name; an alias maps to its type.
    machines: BTreeMap<String, String>,
}

/// Version of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major version number.
    pub major: u64,
    /// Minor version number.
    pub minor: u64,
    /// Micro version number.
    pub micro: u64,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// Cause of a missing QEMU.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The program is not installed, or not in PATH.
    #[error("there is no {program} in PATH")]
    NotFound {
        /// Name of the program.
        program: &'static str,
    },
    /// The program does not start.
    #[error("cannot start {path}")]
    Start {
        /// Path of the program.
        path: PathBuf,
        /// Cause reported by the kernel.
        source: io::Error,
    },
    /// The program starts but does not answer.
    #[error("cannot query {path}")]
    Query {
        /// Path of the program.
        path: PathBuf,
        /// Error of the query.
        source: QmpError,
    },
}

/// Path of the first `qemu-system-x86_64` in `PATH`.
pub fn find() -> Result<PathBuf, ProbeError> {
    program(PROGRAM).ok_or(ProbeError::NotFound { program: PROGRAM })
}

/// Path of the first program of that name in `PATH`.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let runs = |file: &PathBuf| {
        file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    env::split_paths(&path).map(|dir| dir.join(name)).find(runs)
}

impl QemuBinary {
    /// Queries the program at `path`. Takes about 50 ms.
    pub fn probe(path: &Path) -> Result<Self, ProbeError> {
        let start = |source| ProbeError::Start { path: path.to_owned(), source };
        let ask = |source| ProbeError::Query { path: path.to_owned(), source };
        let (_child, qmp) = spawn_to_ask(path, &[]).map_err(start)?;
        let qmp = Qmp::over(qmp).map_err(ask)?;
        let version = qmp.execute("query-version", json!({})).map_err(ask)?;
        let machines = qmp.execute("query-machines", json!({})).map_err(ask)?;
        Ok(Self {
            path: path.to_owned(),
            version: parse_version(&version),
            machines: parse_machines(&machines),
        })
    }

    /// Resolves an alias of a machine type (`q35` is `pc-q35-7.2`), so that another QEMU uses the same one.
    /// None if this QEMU does not have it.
    pub fn machine_type(&self, name: &str) -> Option<&str> {
        self.machines.get(name).map(String::as_str)
    }
}

fn parse_version(answer: &Value) -> Version {
    let number = |key: &str| answer["qemu"][key].as_u64().unwrap_or(0);
    Version { major: number("major"), minor: number("minor"), micro: number("micro") }
}

fn parse_machines(answer: &Value) -> BTreeMap<String, String> {
    let mut machines = BTreeMap::new();
    for machine in answer.as_array().into_iter().flatten() {
        let Some(name) = machine["name"].as_str() else { continue };
        machines.insert(name.to_owned(), name.to_owned());
        if let Some(alias) = machine["alias"].as_str() {
            machines.insert(alias.to_owned(), name.to_owned());
        }
    }
    machines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_resolves_to_a_versioned_type_and_oddities_are_skipped() {
        let answer = json!([
            {"name": "pc-q35-7.2", "alias": "q35", "cpu-max": 288},
            {"name": "none", "novelty": {}},
            {"alias": "nameless"}, 7
        ]);
        let machines = parse_machines(&answer);
        assert_eq!(machines["q35"], "pc-q35-7.2");
        assert_eq!(machines["none"], "none");
        assert_eq!(machines.len(), 3);
        assert!(parse_machines(&json!("nonsense")).is_empty());
    }
}
