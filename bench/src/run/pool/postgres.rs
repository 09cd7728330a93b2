//! A PostgreSQL server of an experiment's own, in its own folder. `scripts/bootstrap` installs the programs.

use anyhow::{Context as _, Result, ensure};
use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

/// A server that runs.
pub(super) struct Postgres {
    process: Child,
    pub(super) url: String,
    _dir: TempDir,
}

/// A program of the server: on the path, or where Debian puts it, the newest version.
fn find(program: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut debian: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    debian.sort();
    places.extend(debian.into_iter().rev());
    let found = places.iter().map(|place| place.join(program)).find(|path| path.is_file());
    found.with_context(|| format!("no `{program}`: install the package postgresql"))
}

/// PostgreSQL refuses to run as root.
fn as_postgres(program: &str) -> Result<Command> {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups"]).arg(find(program)?);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

impl Postgres {
    /// Starts a server with the defaults of PostgreSQL below `parent`, on the loopback device.
    pub(super) fn start(parent: &Path) -> Result<Self> {
        // Its user must be able to get there.
        let dir = tempfile::Builder::new().prefix("postgres").tempdir_in(parent)?;
        let data = dir.path().join("db");
        std::fs::create_dir(&data)?;
        for path in [dir.path(), data.as_path()] {
            ensure!(Command::new("chown").arg("postgres").arg(path).status()?.success(), "no user postgres");
        }
        let made =
            as_postgres("initdb")?.args(["-A", "trust", "-U", "postgres", "-D"]).arg(&data).status()?;
        ensure!(made.success(), "initdb failed in {}", dir.path().display());
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let mut server = as_postgres("postgres")?;
        server.arg("-D").arg(&data).args(["-p", &port, "-h", "127.0.0.1", "-k"]).arg(dir.path());
        let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
        let server = Self { process: server.spawn()?, url, _dir: dir };
        let deadline = Instant::now() + PATIENCE;
        let mut ask = Command::new(find("psql")?);
        ask.args(["-At", &server.url, "-c", "SELECT 1"]).stdout(Stdio::null()).stderr(Stdio::null());
        while !ask.status()?.success() {
            ensure!(Instant::now() < deadline, "the database did not answer");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(server)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // SIGINT is its fast shutdown.
        let _ = Command::new("kill").args(["-INT", &self.process.id().to_string()]).status();
        let _ = self.process.wait();
    }
}
