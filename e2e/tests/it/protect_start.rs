//! A machine that was switched off while its standby could not hear of it: it does not start here while it
//! may run there.

use crate::protect::{assert_whole, busy, wait_epochs};
use whimbrel_e2e::{Cluster, GUEST_ADDRESS};

/// Protects `web` without a witness, pulls the cable of its standby, and switches it off.
fn switch_off_unheard(cluster: &Cluster, from: &str, standby: &str) {
    let host = cluster.host(from);
    host.json(&["protect", "web", standby, "--lease", "2s"]);
    wait_epochs(host, 5);
    cluster.lab.unplug("beta").expect("a cable to pull");
    host.run(&["stop", "web", "--kill"]);
    host.wait_state("web", &["stopped"]);
}

#[test]
fn a_machine_that_its_standby_may_have_taken_over_does_not_start_here_unless_its_user_says_so() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    busy("web").run(&cluster, cluster.host("alpha"));
    let before = cluster.witness(GUEST_ADDRESS).write(100).expect("a first life");
    switch_off_unheard(&cluster, "alpha", "beta");
    let refusal = cluster.host("alpha").refuse(&["start", "web"]);
    let says = "its standby beta does not answer";
    assert!(refusal.text.contains(says) && refusal.text.contains("resolve web --run-here"), "{refusal:?}");

    // A restarted daemon still knows, and the standby decides when a person has switched the machine over.
    cluster.host_mut("alpha").kill_daemon();
    cluster.host_mut("alpha").start_daemon();
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    assert!(alpha.refuse(&["start", "web"]).text.contains(says));
    beta.run(&["failover", "web", "--primary-is-dead", "--force"]);
    beta.wait_state("web", &["running"]);
    let logged = alpha.log_text().len();
    cluster.lab.replug("beta").expect("a cable to put back");
    alpha.wait_log(logged, "a person switched the machine over");
    for words in [&["start", "web"][..], &["resolve", "web", "--run-here"]] {
        let refusal = alpha.refuse(words);
        assert!(refusal.text.contains("was taken over by its standby beta"), "{refusal:?}");
    }
    assert_whole(&before, &cluster);
    alpha.run(&["delete", "web"]);

    // A standby that answers is told to end, and does not switch over later.
    switch_off_unheard(&cluster, "beta", "alpha");
    let refusal = beta.refuse(&["resolve", "web"]);
    assert!(refusal.text.contains("its standby alpha does not answer"), "{refusal:?}");
    beta.run(&["resolve", "web", "--run-here"]);
    beta.wait_state("web", &["running"]);
    cluster.lab.replug("beta").expect("a cable to put back");
    alpha.wait_empty();
    alpha.refuse(&["failover", "web", "--primary-is-dead", "--force"]);
}
