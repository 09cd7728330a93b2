//! Settings of the daemon, from options, a TOML file and defaults, in this order.

use crate::error::CliError;
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
};
use whimbrel_api::Role;
use whimbrel_core::{Accel, HostName, MachineName};
use whimbrel_daemon::{ContainerSettings, ImageSource};

/// Settings file that is read if no other one is named. It need not exist.
pub(crate) const DEFAULT_FILE: &str = "/etc/whimbrel/host.toml";
/// Longest settings file that is read.
const FILE_MAX: u64 = 1 << 20;

/// Settings of one source, all of them optional.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    pub(crate) name: Option<HostName>,
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) data: Option<PathBuf>,
    /// Executor of guest instructions, in place of the result of the probe.
    pub(crate) accel: Option<Accel>,
    /// Directory on a tmpfs for guest memory.
    pub(crate) run_dir: Option<PathBuf>,
    pub(crate) socket: Option<PathBuf>,
    /// Machines whose guests may send frames of other stations.
    pub(crate) unfiltered: Option<Vec<MachineName>>,
    /// Pools to show, each as a manager prints it.
    pub(crate) pools: Option<Vec<String>>,
    /// Sources of images.
    pub(crate) image_sources: Option<Vec<ImageSource>>,
    /// Kernel and disks of machines of container images.
    pub(crate) containers: Option<ContainerSettings>,
    /// Address of the API for users elsewhere.
    pub(crate) api_listen: Option<SocketAddr>,
    /// Address of the web page.
    pub(crate) web: Option<SocketAddr>,
    /// Certificate chain of the API and its key.
    pub(crate) api_cert: Option<PathBuf>,
    pub(crate) api_key: Option<PathBuf>,
    /// Whether the store is encrypted, and where its master key comes from.
    pub(crate) encrypt: Option<bool>,
    pub(crate) key_file: Option<PathBuf>,
    pub(crate) key_command: Option<String>,
    /// Address of the metrics without a token.
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Whether processes of their own serve machines at rest.
    pub(crate) machine_processes: Option<bool>,
    /// Groups of this computer and their roles.
    pub(crate) api_groups: Option<BTreeMap<String, Role>>,
}

impl Settings {
    /// Reads `file`, or the default file if it exists.
    pub(crate) fn read(file: Option<&Path>) -> Result<Self, CliError> {
        let path = file.unwrap_or(Path::new(DEFAULT_FILE));
        match read_bounded(path) {
            Ok(text) => toml::from_str(&text).map_err(|error| unusable(path, error)),
            Err(error) if file.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(unusable(path, error)),
        }
    }

    /// Merges two sources; settings of `below` apply where these are missing.
    pub(crate) fn over(self, below: Self) -> Self {
        let (has_file, has_command) = (self.key_file.is_some(), self.key_command.is_some());
        Self {
            name: self.name.or(below.name),
            listen: self.listen.or(below.listen),
            data: self.data.or(below.data),
            accel: self.accel.or(below.accel),
            run_dir: self.run_dir.or(below.run_dir),
            socket: self.socket.or(below.socket),
            unfiltered: self.unfiltered.or(below.unfiltered),
            pools: self.pools.or(below.pools),
            image_sources: self.image_sources.or(below.image_sources),
            containers: self.containers.or(below.containers),
            api_listen: self.api_listen.or(below.api_listen),
            web: self.web.or(below.web),
            api_cert: self.api_cert.or(below.api_cert),
            api_key: self.api_key.or(below.api_key),
            encrypt: self.encrypt.or(below.encrypt),
            // A source on the command line replaces that of the file, whichever it is.
            key_file: self.key_file.or(below.key_file.filter(|_| !has_command)),
            key_command: self.key_command.or(below.key_command.filter(|_| !has_file)),
            metrics_listen: self.metrics_listen.or(below.metrics_listen),
            machine_processes: self.machine_processes.or(below.machine_processes),
            api_groups: self.api_groups.or(below.api_groups),
        }
    }
}

fn read_bounded(path: &Path) -> io::Result<String> {
    if fs::metadata(path)?.len() > FILE_MAX {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "longer than 1 MiB"));
    }
    fs::read_to_string(path)
}

fn unusable(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> CliError {
    CliError::Settings { path: path.to_owned(), source: source.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Settings, CliError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("host.toml");
        fs::write(&path, text).unwrap();
        Settings::read(Some(&path))
    }

    #[test]
    fn an_option_wins_over_the_file() {
        let file = read("name = \"alpha\"\nlisten = \"10.0.0.1:7400\"\ndata = \"/srv\"\n").unwrap();
        let options = Settings { data: Some("/tmp/d".into()), ..Settings::default() };
        let merged = options.over(file);
        assert_eq!(merged.name.unwrap().as_str(), "alpha");
        assert_eq!((merged.data, merged.socket), (Some("/tmp/d".into()), None));
    }

    #[test]
    fn a_typing_error_in_the_file_is_not_overlooked() {
        for bad in ["nmae = \"alpha\"", "name = \"../x\"", "listen = \"here\"", "name ="] {
            let failure = read(bad).unwrap_err();
            assert_eq!(failure.exit_code(), 2, "{bad}");
            assert!(!failure.to_api().causes.is_empty(), "{bad}");
        }
    }

    #[test]
    fn a_file_that_was_named_must_exist() {
        assert!(Settings::read(Some(Path::new("/nonexistent/host.toml"))).is_err());
    }
}
