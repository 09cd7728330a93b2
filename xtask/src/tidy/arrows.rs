//! Arrows between crates point downward only. This file is the one place that says what "down" is.
//!
//! A crate may use every crate of a lower layer that its own layer may see, plus the sideways edges listed
//! with their reason. A workspace crate that stands in no layer is a violation too, so a new crate cannot
//! slip past.

use super::Finding;
use super::metadata::{Dependency, Graph, Package};

const RULE: &str = "arrows";

/// Where a crate stands; a crate may use crates of strictly smaller layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Layer {
    /// Words: no I/O, no async.
    Words,
    /// Pure functions over the words.
    Images,
    /// Contracts: traits, frames, types of the API.
    Contracts,
    /// Engines and drivers; they do not know each other.
    Engines,
    /// The daemon, which introduces engines to each other.
    Daemon,
    /// The binary.
    Binary,
    /// Experiments and end-to-end cases; may see everything.
    Outside,
}

const LAYERS: &[(&str, Layer)] = &[
    ("whimbrel-core", Layer::Words),
    ("whimbrel-alignment", Layer::Images),
    ("whimbrel-image", Layer::Images),
    ("whimbrel-wire", Layer::Contracts),
    ("whimbrel-machine", Layer::Contracts),
    ("whimbrel-block", Layer::Contracts),
    ("whimbrel-api", Layer::Contracts),
    ("whimbrel-guest-protocol", Layer::Contracts),
    ("whimbrel-memory", Layer::Engines),
    ("whimbrel-qemu", Layer::Engines),
    ("whimbrel-net", Layer::Engines),
    ("whimbrel-nbd", Layer::Engines),
    ("whimbrel-store", Layer::Engines),
    ("whimbrel-hashcache", Layer::Engines),
    ("whimbrel-capture", Layer::Engines),
    ("whimbrel-migrate", Layer::Engines),
    ("whimbrel-transfer", Layer::Engines),
    ("whimbrel-protect", Layer::Engines),
    ("whimbrel-pool", Layer::Engines),
    ("whimbrel-session", Layer::Engines),
    ("whimbrel-fuse", Layer::Engines),
    ("whimbrel-client", Layer::Engines),
    ("whimbrel-daemon", Layer::Daemon),
    ("whimbrel", Layer::Binary),
    ("whimbrel-e2e", Layer::Outside),
    ("whimbrel-bench", Layer::Outside),
    ("whimbrel-fuzz", Layer::Outside),
    ("whimbrel-test-agent", Layer::Outside),
    ("whimbrel-guest-agent", Layer::Outside),
    ("xtask", Layer::Outside),
];

/// Only tests may use it, and it may use everything below the daemon.
const TESTKIT: &str = "whimbrel-testkit";

/// Edges inside a layer, each with the reason it is there.
const SIDEWAYS: &[(&str, &str, &str)] = &[
    ("whimbrel-image", "whimbrel-alignment", "a manifest says how the pages of a disk are cut"),
    ("whimbrel-block", "whimbrel-machine", "a tracked disk is a page array"),
    ("whimbrel-migrate", "whimbrel-capture", "a migration is the capture loop with another host as its sink"),
    ("whimbrel-transfer", "whimbrel-store", "a sync is between two stores"),
    ("whimbrel-protect", "whimbrel-capture", "an epoch is a round of the capture loop"),
    ("whimbrel-protect", "whimbrel-migrate", "a standby is a target whose handover is yet to come"),
    ("whimbrel-pool", "whimbrel-fuse", "the file system face of a pool"),
    ("whimbrel-session", "whimbrel-fuse", "the file system face of a session"),
    ("whimbrel-session", "whimbrel-hashcache", "pages that a session's host has are not sent to it"),
    ("whimbrel-session", "whimbrel-nbd", "a file of a session as a block device"),
];

/// Every edge that should not be, and every crate without a layer.
pub(crate) fn check(graph: &Graph) -> Vec<Finding> {
    graph.members().flat_map(|package| check_package(graph, package)).collect()
}

fn check_package(graph: &Graph, package: &Package) -> Vec<Finding> {
    let manifest = graph.manifest(package);
    if package.name != TESTKIT && layer(&package.name).is_none() {
        let text = format!("{} stands in no layer: add it to {}", package.name, file!());
        return vec![Finding::violation(&manifest, 0, RULE, text)];
    }
    let ours = package.dependencies.iter().filter(|dependency| dependency.path.is_some());
    ours.filter_map(|to| objection(&package.name, to).map(|why| (to, why)))
        .map(|(to, why)| {
            let text = format!("{} -> {}: {why}", package.name, to.name);
            Finding::violation(&manifest, 0, RULE, text)
        })
        .collect()
}

/// Why `from` may not use `to`; none if it may.
fn objection(from: &str, to: &Dependency) -> Option<&'static str> {
    let is_dev = to.kind.as_deref() == Some("dev");
    let outside = layer(from) == Some(Layer::Outside);
    if to.name == TESTKIT {
        let allowed = is_dev || outside;
        return (!allowed).then_some("the test kit is a dev-dependency only; move the dependency there");
    }
    // Tests of a crate may put it together with anything below the daemon, as the test kit itself may.
    let from_layer = if from == TESTKIT || is_dev { Layer::Daemon.max(layer(from)?) } else { layer(from)? };
    let Some(to_layer) = layer(&to.name) else {
        return Some("the target stands in no layer");
    };
    let sideways = SIDEWAYS.iter().any(|(a, b, _)| *a == from && *b == to.name);
    let downward = to_layer < from_layer;
    (!downward && !sideways).then_some(
        "points up or sideways; pass a trait of a lower layer instead, or argue for the edge in the table of arrows.rs",
    )
}

fn layer(name: &str) -> Option<Layer> {
    LAYERS.iter().find(|(crate_name, _)| *crate_name == name).map(|(_, layer)| *layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(name: &str, kind: Option<&str>) -> Dependency {
        Dependency { name: name.into(), kind: kind.map(Into::into), path: Some(String::new()) }
    }

    #[test]
    fn engines_do_not_know_each_other_without_a_reason() {
        assert!(objection("whimbrel-store", &edge("whimbrel-qemu", None)).is_some());
        assert!(objection("whimbrel-migrate", &edge("whimbrel-capture", None)).is_none());
        assert!(
            objection("whimbrel-capture", &edge("whimbrel-migrate", None)).is_some(),
            "edges have a direction"
        );
    }

    #[test]
    fn nothing_points_up() {
        assert!(objection("whimbrel-core", &edge("whimbrel-image", None)).is_some());
        assert!(objection("whimbrel-client", &edge("whimbrel-daemon", None)).is_some());
        assert!(objection("whimbrel", &edge("whimbrel-daemon", None)).is_none());
        assert!(objection("whimbrel-nbd", &edge("whimbrel-block", None)).is_none());
    }

    #[test]
    fn the_test_kit_never_gets_into_the_product() {
        assert!(objection("whimbrel-daemon", &edge(TESTKIT, None)).is_some());
        assert!(objection("whimbrel-daemon", &edge(TESTKIT, Some("dev"))).is_none());
        assert!(objection("whimbrel-e2e", &edge(TESTKIT, None)).is_none());
        assert!(objection(TESTKIT, &edge("whimbrel-qemu", None)).is_none());
    }

    #[test]
    fn every_sideways_edge_names_crates_that_have_a_layer() {
        for (from, to, _) in SIDEWAYS {
            assert_eq!(layer(from), layer(to), "{from} -> {to} is no sideways edge");
        }
    }

    #[test]
    fn a_new_crate_cannot_slip_past() {
        let package = Package {
            id: "new".into(),
            name: "whimbrel-new".into(),
            version: "0.1.0".into(),
            license: None,
            manifest_path: "/r/crates/whimbrel-new/Cargo.toml".into(),
            dependencies: Vec::new(),
        };
        let graph = Graph {
            packages: vec![package],
            workspace_members: vec!["new".into()],
            workspace_root: "/r".into(),
        };
        let found = check(&graph);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, "crates/whimbrel-new/Cargo.toml");
    }
}
