//! Bill of materials: every package that the program is built from, as CycloneDX 1.5 JSON.
//!
//! The packages are those that `cargo metadata` resolves for Linux on x86-64, followed from `whimbrel`
//! through normal and build dependencies; checksums are those of `Cargo.lock`. The same commit gives the
//! same bytes: there is no time stamp and no serial number in it (both are optional in the specification).

use crate::tidy::metadata;
use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// Package whose program is shipped.
const PROGRAM: &str = "whimbrel";

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    /// None for packages of this workspace.
    source: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    id: String,
    deps: Vec<Edge>,
}

#[derive(Debug, Deserialize)]
struct Edge {
    pkg: String,
    dep_kinds: Vec<EdgeKind>,
}

#[derive(Debug, Deserialize)]
struct EdgeKind {
    /// None: normal; else `dev` or `build`.
    kind: Option<String>,
}

/// Writes the bill to `output`.
pub(crate) fn write(root: &Path, output: &Path) -> Result<()> {
    let lock = fs::read_to_string(root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
    let bill = bill(&metadata::read(root)?, &checksums(&lock))?;
    let text = serde_json::to_string_pretty(&bill)? + "\n";
    fs::write(output, text).with_context(|| format!("cannot write {}", output.display()))
}

fn bill(metadata: &Metadata, checksums: &BTreeMap<(String, String), String>) -> Result<Value> {
    let is_program = |package: &&Package| package.name == PROGRAM && package.source.is_none();
    let program = metadata.packages.iter().find(is_program).context("the workspace has no program")?;
    let reached = reached(&metadata.resolve, &program.id);
    let mut packages: Vec<&Package> =
        metadata.packages.iter().filter(|package| reached.contains_key(package.id.as_str())).collect();
    packages.sort_by_key(|package| (&package.name, &package.version));
    let urls: BTreeMap<&str, String> =
        packages.iter().map(|package| (package.id.as_str(), url(package))).collect();
    let others = packages.iter().filter(|package| package.id != program.id);
    let components: Vec<Value> = others.map(|package| component(package, "library", checksums)).collect();
    let edges = |package: &&Package| {
        let on: BTreeSet<&String> = reached[package.id.as_str()].iter().map(|id| &urls[id]).collect();
        json!({"ref": url(package), "dependsOn": on})
    };
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(program, "application", checksums)},
        "components": components,
        "dependencies": packages.iter().map(edges).collect::<Vec<_>>(),
    }))
}

/// Packages that one is built from, each with those that it names itself.
fn reached<'a>(resolve: &'a Resolve, from: &'a str) -> BTreeMap<&'a str, Vec<&'a str>> {
    let nodes: BTreeMap<&str, &Node> = resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let (mut found, mut next) = (BTreeMap::new(), vec![from]);
    while let Some(id) = next.pop() {
        let shipped = |edge: &&Edge| edge.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"));
        let edges = nodes.get(id).into_iter().flat_map(|node| &node.deps).filter(shipped);
        let named: Vec<&str> = edges.map(|edge| edge.pkg.as_str()).collect();
        next.extend(named.iter().filter(|id| !found.contains_key(*id)));
        found.insert(id, named);
    }
    found
}

fn component(package: &Package, kind: &str, checksums: &BTreeMap<(String, String), String>) -> Value {
    let url = url(package);
    let mut component = json!({
        "type": kind,
        "bom-ref": url,
        "name": package.name,
        "version": package.version,
        "purl": url,
    });
    if let Some(licence) = &package.license {
        // Old manifests write `/` for OR, which is no SPDX expression.
        component["licenses"] = json!([{"expression": licence.replace('/', " OR ")}]);
    }
    if let Some(sum) = checksums.get(&(package.name.clone(), package.version.clone())) {
        component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
    }
    component
}

/// Package URL (purl specification, type `cargo`). `+` of a version's build part is not allowed as it is.
fn url(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version.replace('+', "%2B"))
}

/// Checksums in a lock file, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let field = |block: &str, name: &str| {
        let rest = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""))?;
        rest.strip_suffix('"').map(str::to_owned)
    };
    let blocks = lock.split("[[package]]");
    let sum =
        |block: &str| Some(((field(block, "name")?, field(block, "version")?), field(block, "checksum")?));
    blocks.filter_map(sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, source: Option<&str>) -> Package {
        Package {
            id: name.into(),
            name: name.into(),
            version: "1.0.0+x".into(),
            license: Some("MIT/Apache-2.0".into()),
            source: source.map(Into::into),
        }
    }

    fn edge(pkg: &str, kind: Option<&str>) -> Edge {
        Edge { pkg: pkg.into(), dep_kinds: vec![EdgeKind { kind: kind.map(Into::into) }] }
    }

    #[test]
    fn what_is_built_in_is_listed_with_licence_and_checksum_and_what_only_tests_need_is_not() {
        let node = |id: &str, deps| Node { id: id.into(), deps };
        let metadata = Metadata {
            packages: ["whimbrel", "used", "builds", "tests"]
                .map(|name| package(name, (name != "whimbrel").then_some("registry")))
                .into(),
            resolve: Resolve {
                nodes: vec![
                    node("whimbrel", vec![edge("used", None), edge("tests", Some("dev"))]),
                    node("used", vec![edge("builds", Some("build"))]),
                ],
            },
        };
        let lock =
            "[[package]]\nname = \"used\"\nversion = \"1.0.0+x\"\nsource = \"r\"\nchecksum = \"abc\"\n";
        let bill = bill(&metadata, &checksums(lock)).unwrap();
        let names: Vec<&str> =
            bill["components"].as_array().unwrap().iter().filter_map(|one| one["name"].as_str()).collect();
        assert_eq!(names, ["builds", "used"]);
        let used = &bill["components"][1];
        assert_eq!(used["purl"], "pkg:cargo/used@1.0.0%2Bx");
        assert_eq!(used["licenses"][0]["expression"], "MIT OR Apache-2.0");
        assert_eq!(used["hashes"][0]["content"], "abc");
        assert_eq!(bill["dependencies"][2]["dependsOn"], json!(["pkg:cargo/used@1.0.0%2Bx"]));
    }
}
