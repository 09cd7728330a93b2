//! A machine gets another name, and everything that knew it by the former one follows.

use crate::network::{address_of, ask, ask_for, start};
use std::net::Ipv4Addr;
use whimbrel_e2e::Cluster;
use whimbrel_testkit::guest::assert_same_life;

#[test]
fn a_renamed_machine_lives_on_and_is_found_by_its_new_name_only() {
    let mut cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    alpha.run(&["network", "create", "lan0"]);
    start(&cluster, alpha, "web");
    start(&cluster, alpha, "db");
    alpha.run(&["network", "publish", "web", "2222:7000"]);
    alpha.run(&["schedule", "create", "nightly", "checkpoint", "web", "--every", "366d", "--last", "1"]);
    alpha.run(&["set", "web", "--label", "tier=front"]);
    let (web, db) = (address_of(alpha, "web"), address_of(alpha, "db"));
    let published = (Ipv4Addr::LOCALHOST, 2222).into();
    let place = cluster.lab.host("alpha");
    let before = crate::network::agent(place, published).state().expect("an answer");
    ask_for(place, db, "nslookup web.internal", &web.to_string());

    let refused = alpha.refuse(&["rename", "web", "shop"]);
    assert!(refused.text.contains("whimbrel suspend web"), "{refused:?}");
    alpha.run(&["suspend", "web"]);
    let refused = alpha.refuse(&["rename", "web", "db"]);
    assert!(refused.code == 4 && refused.text.contains("taken"), "{refused:?}");
    alpha.run(&["rename", "web", "shop"]);
    let refused = alpha.refuse(&["resume", "web"]);
    assert_eq!(refused.code, 3, "{refused:?}");
    alpha.run(&["resume", "shop"]);

    let shown = alpha.json(&["inspect", "shop"]);
    assert_eq!(shown["settings"]["labels"]["tier"], "front", "{shown}");
    assert_eq!(address_of(alpha, "shop"), web);
    assert_same_life(&before, &crate::network::agent(place, published).check().expect("an answer"));
    ask_for(place, db, "nslookup shop.internal", &web.to_string());
    assert!(!ask(place, db, "nslookup web.internal").contains(&web.to_string()), "its former name resolves");
    alpha.run(&["schedule", "run", "nightly"]);

    // Off, with disks that only the machine has; and what comes next is whole after another daemon.
    alpha.run(&["stop", "shop", "--kill"]);
    alpha.run(&["rename", "shop", "store"]);
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let (alpha, place) = (cluster.host("alpha"), cluster.lab.host("alpha"));
    alpha.run(&["start", "store"]);
    let after = crate::network::agent(place, published).check().expect("an answer");
    assert_ne!(before.boot, after.boot, "it was switched off");
    assert!(alpha.json(&["schedule", "show", "nightly"]).to_string().contains("store"));
    alpha.run(&["verify"]);
}
