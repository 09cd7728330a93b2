//! The package graph as cargo tells it, cut down to what the rules ask.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, de::DeserializeOwned};
use std::path::Path;
use std::process::Command;

/// All packages that a build for Linux on x86-64 uses.
#[derive(Debug, Deserialize)]
pub(crate) struct Graph {
    pub(crate) packages: Vec<Package>,
    /// Ids of the packages that are ours.
    pub(crate) workspace_members: Vec<String>,
    #[serde(default)]
    pub(crate) workspace_root: String,
}

/// One package.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) license: Option<String>,
    pub(crate) manifest_path: String,
    pub(crate) dependencies: Vec<Dependency>,
}

/// One line of a manifest's dependencies.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None`: normal; else `dev` or `build`.
    pub(crate) kind: Option<String>,
    /// Present for packages of this workspace.
    pub(crate) path: Option<String>,
}

impl Graph {
    /// The packages of this workspace.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Package> {
        self.packages.iter().filter(|package| self.workspace_members.contains(&package.id))
    }

    /// The manifest's path from the top folder.
    pub(crate) fn manifest(&self, package: &Package) -> String {
        let path = Path::new(&package.manifest_path);
        path.strip_prefix(&self.workspace_root).unwrap_or(path).display().to_string()
    }
}

/// Asks cargo for the package graph, or for those parts of it that `T` has.
pub(crate) fn read<T: DeserializeOwned>(root: &Path) -> Result<T> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--locked", "--filter-platform=x86_64-unknown-linux-gnu"])
        .current_dir(root)
        .output()
        .context("cannot start cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    serde_json::from_slice(&output.stdout).context("cannot read what cargo metadata printed")
}
