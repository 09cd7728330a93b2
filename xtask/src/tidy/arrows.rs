//! Crates stand on shelves, the folders below `crates/`, and arrows between shelves point down only.
//!
//! A crate may use every crate of the shelves that its own shelf lists, and on its own shelf those that
//! [`WITHIN`] lists with the reason. Machines, files and the pool are three products that do not know each
//! other: no shelf of one lists a shelf of another. Packages outside `crates/` are tests and tools; they may
//! use everything.

use super::Finding;
use super::metadata::{Dependency, Graph, Package};

const RULE: &str = "arrows";

/// Each shelf and the shelves that it may use.
const SHELVES: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("machine", &["base"]),
    ("disk", &["base"]),
    ("capsule", &["base", "disk"]),
    ("move", &["base", "disk", "capsule"]),
    ("share", &["base", "disk", "capsule"]),
    ("pool", &["base", "capsule"]),
    ("app", &["base", "machine", "disk", "capsule", "move", "share", "pool"]),
];

/// The shelf of the daemon and the programs; tests of other shelves may not use it.
const APP: &str = "app";
/// Only tests may use it, and it may use every shelf but [`APP`].
const TESTKIT: &str = "whimbrel-testkit";

/// Brings losses back and stands in for the system: nothing may use it.
const SIMULATION: &str = "whimbrel-simulation";

/// Edges on one shelf, each with the reason it is there.
const WITHIN: &[(&str, &str, &str)] = &[
    ("whimbrel-wire", "whimbrel-core", "core has the words of every crate"),
    ("whimbrel-machine", "whimbrel-core", "core has the words of every crate"),
    ("whimbrel-fuse", "whimbrel-core", "core has the words of every crate"),
    ("whimbrel-block", "whimbrel-alignment", "an aligned disk is a block device"),
    ("whimbrel-nbd", "whimbrel-block", "the server exports a block device"),
    ("whimbrel-store", "whimbrel-image", "the store keeps images"),
    ("whimbrel-migrate", "whimbrel-capture", "a migration is the capture loop with another host as its sink"),
    ("whimbrel-protect", "whimbrel-capture", "an epoch is a round of the capture loop"),
    ("whimbrel-protect", "whimbrel-migrate", "a standby is a target whose handover is yet to come"),
    ("whimbrel-client", "whimbrel-api", "the client sends and receives the types of the API"),
    ("whimbrel-daemon", "whimbrel-api", "the daemon answers in the types of the API"),
    ("whimbrel-daemon", "whimbrel-vm", "the daemon runs machines, and so does the process of one machine"),
    ("whimbrel-daemon", "whimbrel-schedule", "the daemon does what schedules ask of their host"),
    ("whimbrel-schedule", "whimbrel-api", "what a schedule does and shows is in the types of the API"),
    ("whimbrel-simulation", "whimbrel-schedule", "schedules run for weeks under a simulated clock"),
    ("whimbrel-simulation", "whimbrel-api", "requests of schedules are in the types of the API"),
    ("whimbrel-vm", "whimbrel-api", "what a machine shows is in the types of the API"),
    ("whimbrel", "whimbrel-api", "the command line prints the types of the API"),
    ("whimbrel", "whimbrel-client", "the command line asks the daemon"),
    ("whimbrel", "whimbrel-daemon", "the daemon is one verb of the program"),
];

/// Every edge that should not be, and every crate on no shelf.
pub(crate) fn check(graph: &Graph) -> Vec<Finding> {
    graph.members().flat_map(|package| check_package(graph, package)).collect()
}

fn check_package(graph: &Graph, package: &Package) -> Vec<Finding> {
    let manifest = graph.manifest(package);
    let Place::Shelf(shelf) = place(&manifest) else {
        return match place(&manifest) {
            Place::Unknown => {
                let text = format!("{} stands on no shelf: add its folder to {}", package.name, file!());
                vec![Finding::violation(&manifest, 0, RULE, text)]
            }
            _ => Vec::new(),
        };
    };
    let ours = package.dependencies.iter().filter_map(|to| {
        let target = graph.members().find(|member| member.name == to.name && to.path.is_some())?;
        let why = objection((&package.name, shelf), (&to.name, &graph.manifest(target)), to)?;
        Some(Finding::violation(&manifest, 0, RULE, format!("{} -> {}: {why}", package.name, to.name)))
    });
    ours.collect()
}

/// Where a package stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place<'a> {
    Shelf(&'a str),
    /// Outside `crates/`.
    Outside,
    /// Below `crates/`, and on no shelf of [`SHELVES`].
    Unknown,
}

fn place(manifest: &str) -> Place<'_> {
    let Some(rest) = manifest.strip_prefix("crates/") else { return Place::Outside };
    let shelf = rest.split('/').next().unwrap_or_default();
    match SHELVES.iter().any(|(name, _)| *name == shelf) && rest.matches('/').count() == 2 {
        true => Place::Shelf(shelf),
        false => Place::Unknown,
    }
}

/// Why a crate may not use another one; none if it may.
fn objection(
    (from, shelf): (&str, &str),
    (to, manifest): (&str, &str),
    edge: &Dependency,
) -> Option<&'static str> {
    let is_dev = edge.kind.as_deref() == Some("dev");
    if to == TESTKIT {
        return (!is_dev).then_some("the test kit is a dev-dependency only; move the dependency there");
    }
    if to == SIMULATION {
        return Some("the simulation is a program of its own; nothing depends on it");
    }
    let Place::Shelf(other) = place(manifest) else {
        return Some("the target stands on no shelf");
    };
    // Tests of a crate may put it together with anything below the daemon, as the test kit itself may.
    if (is_dev || from == TESTKIT) && other != APP {
        return None;
    }
    let below = SHELVES.iter().any(|(name, uses)| *name == shelf && uses.contains(&other));
    let within = shelf == other && WITHIN.iter().any(|(a, b, _)| *a == from && *b == to);
    (!below && !within).then_some(
        "points up or sideways; pass a trait of a lower shelf instead, or argue for the edge in the tables of arrows.rs",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, folder: &str, uses: &[(&str, Option<&str>)]) -> Package {
        let edge = |(name, kind): &(&str, Option<&str>)| Dependency {
            name: (*name).to_owned(),
            kind: kind.map(Into::into),
            path: Some(String::new()),
        };
        Package {
            id: name.into(),
            name: name.into(),
            version: "0.1.0".into(),
            license: None,
            manifest_path: format!("/r/{folder}/{name}/Cargo.toml"),
            dependencies: uses.iter().map(edge).collect(),
        }
    }

    /// The findings about one package among the others of a small workspace.
    fn found(name: &str, folder: &str, uses: &[(&str, Option<&str>)]) -> usize {
        let others = [
            ("whimbrel-core", "crates/base"),
            ("whimbrel-qemu", "crates/machine"),
            ("whimbrel-block", "crates/disk"),
            ("whimbrel-store", "crates/capsule"),
            ("whimbrel-capture", "crates/move"),
            ("whimbrel-session", "crates/share"),
            ("whimbrel-api", "crates/app"),
            (TESTKIT, "crates/app"),
            (SIMULATION, "crates/app"),
        ];
        let others = others.iter().filter(|(other, _)| *other != name).map(|(n, f)| package(n, f, &[]));
        let packages: Vec<Package> = others.chain([package(name, folder, uses)]).collect();
        let workspace_members = packages.iter().map(|package| package.id.clone()).collect();
        check(&Graph { packages, workspace_members, workspace_root: "/r".into() }).len()
    }

    #[test]
    fn arrows_point_down_and_not_from_product_to_product() {
        assert_eq!(found("whimbrel-store", "crates/capsule", &[("whimbrel-block", None)]), 0);
        assert_eq!(found("whimbrel-block", "crates/disk", &[("whimbrel-store", None)]), 1);
        assert_eq!(found("whimbrel-session", "crates/share", &[("whimbrel-qemu", None)]), 1);
        assert_eq!(found("whimbrel-pool", "crates/pool", &[("whimbrel-session", None)]), 1);
        assert_eq!(found("whimbrel-e2e", "e2e", &[("whimbrel-session", None)]), 0);
    }

    #[test]
    fn on_one_shelf_an_edge_needs_a_reason_and_has_a_direction() {
        assert_eq!(found("whimbrel-migrate", "crates/move", &[("whimbrel-capture", None)]), 0);
        assert_eq!(found("whimbrel-transfer", "crates/move", &[("whimbrel-capture", None)]), 1);
        assert_eq!(found("whimbrel-api", "crates/app", &[("whimbrel-client", None)]), 0, "no such package");
    }

    #[test]
    fn the_test_kit_never_gets_into_the_product_and_the_daemon_into_no_test_of_a_crate() {
        assert_eq!(found("whimbrel-pool", "crates/pool", &[(TESTKIT, None)]), 1);
        assert_eq!(found("whimbrel-pool", "crates/pool", &[(TESTKIT, Some("dev"))]), 0);
        assert_eq!(found("whimbrel-pool", "crates/pool", &[("whimbrel-qemu", Some("dev"))]), 0);
        assert_eq!(found("whimbrel-pool", "crates/pool", &[("whimbrel-api", Some("dev"))]), 1);
        assert_eq!(found(TESTKIT, "crates/app", &[("whimbrel-qemu", None)]), 0);
    }

    #[test]
    fn nothing_depends_on_the_simulation() {
        assert_eq!(found(SIMULATION, "crates/app", &[("whimbrel-store", None)]), 0);
        assert_eq!(found("whimbrel-daemon", "crates/app", &[(SIMULATION, None)]), 1);
        assert_eq!(found("whimbrel-pool", "crates/pool", &[(SIMULATION, Some("dev"))]), 1);
    }

    #[test]
    fn a_new_crate_cannot_slip_past() {
        assert_eq!(found("whimbrel-new", "crates", &[]), 1);
        assert_eq!(found("whimbrel-new", "crates/attic", &[]), 1);
    }

    #[test]
    fn no_shelf_uses_itself_or_one_that_uses_it() {
        for (index, (shelf, uses)) in SHELVES.iter().enumerate() {
            let lower = &SHELVES[..index];
            assert!(uses.iter().all(|used| lower.iter().any(|(name, _)| name == used)), "{shelf} points up");
        }
    }
}
