//! Work on a machine while it is protected, and spares that take the place of a lost standby.

use crate::protect::{assert_whole, busy, protection, wait_epochs};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS};
use whimbrel_testkit::lab::StreamEnd;

#[test]
fn work_goes_on_while_a_machine_is_protected_and_a_spare_takes_the_place_of_a_lost_standby() {
    let mut cluster = Cluster::start(&["alpha", "beta", "gamma"]);
    busy("web").run(&cluster, cluster.host("alpha"));
    let before = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    let alpha = cluster.host("alpha");
    // Nothing is to fail that is not broken on purpose, however busy this machine is.
    alpha.json(&["protect", "web", "beta", "--lease", "30s", "--spare", "gamma"]);
    let epoch = wait_epochs(alpha, 5)["epoch"].as_u64().expect("an epoch");

    // The standby gets epochs while all of the machine is read, and the client its answers.
    let stream = cluster.stream(GUEST_ADDRESS);
    alpha.json(&["checkpoint", "web", "--tag", "kept"]);
    alpha.run(&["balloon", "web", "160M"]);
    assert!(protection(alpha)["epoch"].as_u64() > Some(epoch), "{}", protection(alpha));
    let before = assert_whole(&before, &cluster);
    for (words, reason) in [
        (&["migrate", "web", "gamma"][..], "web is protected by beta: it moves only to its standby"),
        (&["checkpoint", "web", "--disks-only"], "web is protected by beta"),
    ] {
        let refusal = alpha.refuse(words);
        assert!(refusal.text.contains(reason) && refusal.text.contains("failover"), "{refusal:?}");
    }

    // The machine runs on when its standby is lost, and the next one has it.
    cluster.host_mut("beta").kill_daemon();
    let alpha = cluster.host("alpha");
    alpha.wait_log(0, "a spare becomes the standby");
    let now = wait_epochs(alpha, 5);
    assert_eq!((now["host"].as_str(), now["spares"][0].as_str()), (Some("gamma"), Some("beta")), "{now}");
    assert!(alpha.run(&["ps"]).contains("protected by gamma, spares beta"), "{}", alpha.run(&["ps"]));
    let before = assert_whole(&before, &cluster);

    // A migration to the standby is a failover. There too the machine finds its next standby: beta is off.
    alpha.run(&["migrate", "web", "gamma"]);
    cluster.host("gamma").wait_state("web", &["running"]);
    cluster.host("alpha").wait_empty();
    let now = wait_epochs(cluster.host("gamma"), 5);
    assert_eq!(now["host"], "alpha", "{now}");
    assert_whole(&before, &cluster);
    assert_eq!(stream.stop().end, StreamEnd::Stopped);

    // A guest that does not switch itself off stays protected, and one that does ends in order.
    let gamma = cluster.host("gamma");
    let refusal = gamma.refuse(&["stop", "web", "--timeout", "1s"]);
    assert!(refusal.code == 4 && refusal.text.contains("did not shut down"), "{refusal:?}");
    let epoch = protection(gamma)["epoch"].as_u64().expect("a machine that is protected as before");
    wait_epochs(gamma, epoch + 5);
    let mut stop = gamma.start_command(&["stop", "web"]);
    cluster.witness(GUEST_ADDRESS).power_off().expect("a request to switch off");
    assert!(stop.wait().expect("the command ends").success(), "{}", gamma.log_text());
    gamma.wait_state("web", &["stopped"]);
    cluster.host("alpha").wait_empty();
    // The capsule that was taken meanwhile is whole.
    cluster.host("alpha").run(&["show", "kept"]);
    cluster.host("alpha").run(&["verify"]);
}
