//! Guides: every block of commands of `docs/guides` is run, as it stands, on the host that it names.

use crate::pages::{self, Hosts, docs};
use std::fs;

fn follow(page: &str, hosts: &[&str]) {
    pages::follow(&format!("guides/{page}"), Hosts::Running(hosts));
}

#[test]
fn the_guide_of_the_first_hour_works() {
    follow("first-hour.md", &["alpha"]);
}

#[test]
fn the_guide_of_two_hosts_works() {
    follow("two-hosts.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_a_protected_database_works() {
    follow("protect-a-database.md", &["alpha", "beta", "gamma"]);
}

#[test]
fn the_guide_of_backups_works() {
    follow("backups.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_sandboxes_works() {
    follow("sandboxes.md", &["alpha"]);
}

#[test]
fn the_guide_of_home_and_office_works() {
    follow("home-and-office.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_a_pool_for_a_lab_works() {
    follow("lab-pool.md", &["alpha", "beta", "gamma"]);
}

#[test]
fn the_guide_from_libvirt_works() {
    follow("from-libvirt.md", &["alpha"]);
}

#[test]
fn the_guide_of_a_host_that_others_use_works() {
    follow("security.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_a_host_with_kvm_works() {
    follow("kvm.md", &["alpha", "beta"]);
}

#[test]
fn the_guide_of_troubleshooting_works() {
    follow("troubleshooting.md", &["alpha"]);
}

#[test]
fn no_guide_is_left_out_of_the_list_or_of_the_tests() {
    let list = fs::read_to_string(docs().join("guides/README.md")).expect("the list");
    let this = include_str!("guides.rs");
    for entry in fs::read_dir(docs().join("guides")).expect("the guides") {
        let name = entry.expect("a guide").file_name().into_string().expect("a name in UTF-8");
        if name != "README.md" {
            assert!(list.contains(&format!("({name})")), "{name} is not in docs/guides/README.md");
            assert!(this.contains(&format!("follow({name:?}")), "{name} is not run");
        }
    }
}
