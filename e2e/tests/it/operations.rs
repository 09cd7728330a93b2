//! The pages of `docs/operations`: every block of commands is run as it stands, or says why it is not.

use crate::pages::{self, Hosts, docs};
use std::fs;

fn follow(page: &str, hosts: Hosts<'_>) {
    pages::follow(&format!("operations/{page}"), hosts);
}

#[test]
fn the_page_of_the_tour_works() {
    follow("tour.md", Hosts::Bare(&["alpha", "beta"]));
}

#[test]
fn the_page_of_hosts_works() {
    follow("hosts.md", Hosts::Running(&["alpha", "beta"]));
}

#[test]
fn the_page_of_images_works() {
    follow("images.md", Hosts::Bare(&["alpha"]));
}

#[test]
fn the_page_of_hardware_works() {
    follow("hardware.md", Hosts::Running(&["alpha"]));
}

#[test]
fn the_page_of_the_first_boot_works() {
    follow("first-boot.md", Hosts::Running(&["alpha"]));
}

#[test]
fn the_page_of_the_life_of_a_machine_works() {
    follow("life.md", Hosts::Running(&["alpha"]));
}

#[test]
fn the_page_of_schedules_works() {
    follow("schedules.md", Hosts::Running(&["alpha", "beta"]));
}

#[test]
fn the_page_of_networks_works() {
    follow("networks.md", Hosts::Running(&["alpha", "beta"]));
}

#[test]
fn the_page_of_users_elsewhere_works() {
    follow("remote.md", Hosts::Bare(&["alpha", "beta"]));
}

#[test]
fn the_page_of_the_web_page_works() {
    follow("web.md", Hosts::Bare(&["alpha"]));
}

#[test]
fn the_page_of_metrics_works() {
    follow("metrics.md", Hosts::Bare(&["alpha"]));
}

#[test]
fn the_page_of_the_api_for_programs_works() {
    follow("programs.md", Hosts::Bare(&["alpha"]));
}

#[test]
fn the_page_of_migration_works() {
    follow("migration.md", Hosts::Running(&["alpha", "beta", "gamma"]));
}

#[test]
fn the_page_of_evacuation_works() {
    follow("evacuation.md", Hosts::Running(&["alpha", "beta", "gamma"]));
}

#[test]
fn the_page_of_guests_works() {
    follow("guests.md", Hosts::Running(&["alpha"]));
}

#[test]
fn the_page_of_encryption_works() {
    follow("encryption.md", Hosts::Bare(&["alpha"]));
}

#[test]
fn the_page_of_versions_works() {
    follow("versions.md", Hosts::Running(&["alpha"]));
}

#[test]
fn the_page_of_capsules_works() {
    follow("capsules.md", Hosts::Running(&["work", "home", "vault"]));
}

#[test]
fn the_page_of_protection_works() {
    follow("protection.md", Hosts::Running(&["alpha", "beta", "gamma", "delta"]));
}

#[test]
fn the_page_of_sessions_works() {
    follow("sessions.md", Hosts::Running(&["here", "state", "lan"]));
}

#[test]
fn the_page_of_the_pool_works() {
    follow("pool.md", Hosts::Running(&["alpha", "beta", "gamma"]));
}

#[test]
fn the_page_of_error_codes_works() {
    follow("troubleshooting.md", Hosts::Running(&["alpha", "beta"]));
}

#[test]
fn no_page_is_left_out_and_no_command_without_a_reason() {
    let this = include_str!("operations.rs");
    for entry in fs::read_dir(docs().join("operations")).expect("the pages") {
        let name = entry.expect("a page").file_name().into_string().expect("a name in UTF-8");
        if !name.ends_with(".md") {
            continue;
        }
        let page = format!("operations/{name}");
        assert_eq!(pages::silent(&page), Vec::<String>::new(), "add `not run:` and why");
        assert_eq!(
            this.contains(&format!("follow({name:?}")),
            pages::is_run(&page),
            "{name}: run it, or do not"
        );
    }
}
