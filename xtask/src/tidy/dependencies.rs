//! Every outside package that a crate of ours names has its reason written down.

use super::Finding;
use super::metadata::Graph;
use super::source::SourceFile;
use std::collections::BTreeSet;

const RULE: &str = "dependencies";
const PAGE: &str = "docs/design/dependencies.md";

/// Every package that is named in a manifest and not on the page of reasons.
pub(crate) fn check(graph: &Graph, files: &[SourceFile]) -> Vec<Finding> {
    let page = files.iter().find(|file| file.path == PAGE).map_or("", |file| file.text.as_str());
    let dependencies = graph.members().flat_map(|package| &package.dependencies);
    let outside: BTreeSet<&str> =
        dependencies.filter(|dependency| dependency.path.is_none()).map(|d| d.name.as_str()).collect();
    let silent = outside.into_iter().filter(|name| !page.contains(&format!("`{name}`")));
    silent
        .map(|name| {
            Finding::violation("Cargo.toml", 0, RULE, format!("{name}: give the reason for it in {PAGE}"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::metadata::{Dependency, Package};
    use super::*;

    #[test]
    fn a_package_without_a_reason_is_named_once() {
        let dependency = |name: &str| Dependency { name: name.into(), kind: None, path: None };
        let package = |id: &str| Package {
            id: id.into(),
            name: id.into(),
            version: "0.1.0".into(),
            license: None,
            manifest_path: String::new(),
            dependencies: vec![dependency("known"), dependency("unknown")],
        };
        let graph = Graph {
            packages: vec![package("a"), package("b")],
            workspace_members: vec!["a".into(), "b".into()],
            workspace_root: String::new(),
        };
        let page = SourceFile { path: PAGE.into(), text: "| `known` | because |".into() };
        let found = check(&graph, &[page]);
        assert_eq!(found.len(), 1);
        assert!(found[0].text.starts_with("unknown"));
    }
}
