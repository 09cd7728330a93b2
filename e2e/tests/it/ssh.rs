//! Two hosts that do not trust each other's keys, and an ssh between them.

use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest, HostProcess, Ssh};
use whimbrel_testkit::guest::{CheckResult, assert_same_life};

/// Lets `host` know `name` by nothing but an ssh destination.
fn know_by_ssh(host: &HostProcess, name: &str, destination: &str) {
    host.run(&["trust", "add", name, "--ssh", destination]);
}

fn forget_keys(a: &HostProcess, b: &HostProcess) {
    a.run(&["trust", "rm", b.name()]);
    b.run(&["trust", "rm", a.name()]);
}

#[test]
fn a_machine_moves_over_ssh_where_no_key_is_trusted_and_over_both_carriers_where_one_is() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let Some(_ssh) = Ssh::start(&cluster, alpha, beta) else { return };
    forget_keys(alpha, beta);
    Guest::small("web").run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let mut before = witness.write(200).expect("a first life");

    let refusal = alpha.refuse(&["migrate", "web", "beta"]);
    assert_eq!(refusal.code, 5, "there is no other way: {refusal:?}");
    know_by_ssh(alpha, "beta", "open");
    let mut move_over = |from: &HostProcess, to: &HostProcess| {
        from.run(&["migrate", "web", to.name()]);
        assert!(from.machines().is_empty(), "nothing is left on the source");
        let after = witness.check().expect("an answer on the connection that was open all the time");
        assert_same_life(&before, &after);
        assert!(
            matches!(after.ram, CheckResult::Good(_)) && matches!(after.disk, CheckResult::Good(_)),
            "{after:?}"
        );
        before = witness.write(20).expect("a disk that takes writes");
    };
    move_over(alpha, beta);

    // One way by ssh, the other way by TLS: alpha knows beta's key for that, and goes there by ssh all the
    // same.
    alpha.run(&["trust", "rm", "beta"]);
    alpha.run(&["trust", "add", "beta", &beta.key(), "ssh:restricted"]);
    beta.run(&["trust", "add", "alpha", &alpha.key(), &alpha.address()]);
    move_over(beta, alpha);
    beta.run(&["trust", "rm", "alpha"]);
    move_over(alpha, beta);
}

#[test]
fn where_ssh_leads_nowhere_it_is_said_why_and_the_machine_stays() {
    let mut cluster = Cluster::start(&["alpha", "beta"]);
    let Some(_ssh) = Ssh::start(&cluster, cluster.host("alpha"), cluster.host("beta")) else { return };
    let alpha = cluster.host("alpha");
    forget_keys(alpha, cluster.host("beta"));
    Guest::small("web").run(&cluster, alpha);
    let born = cluster.witness(GUEST_ADDRESS).write(20).expect("a first life");
    for destination in ["closed", "locked", "bare", "open"] {
        know_by_ssh(alpha, destination, destination);
    }

    cluster.host_mut("beta").kill_daemon();
    let alpha = cluster.host("alpha");
    let cases = [
        ("closed", "ssh cannot log in to", "Connection refused", "BatchMode"),
        ("locked", "ssh cannot log in to", "Permission denied", "BatchMode"),
        ("bare", "whimbrel cannot be run on", "not found", "install whimbrel"),
        ("open", "no daemon runs on", "no host daemon listens", "whimbrel host"),
    ];
    for (destination, what, ssh_said, hint) in cases {
        let refusal = alpha.refuse(&["migrate", "web", destination]);
        assert_eq!(refusal.code, 5, "{refusal:?}");
        assert!(refusal.text.contains(what) && refusal.text.contains(ssh_said), "{destination}: {refusal:?}");
        let advice = refusal.text.lines().find(|line| line.starts_with("hint: ")).unwrap_or_default();
        assert!(advice.contains(hint), "{destination}: {refusal:?}");
    }
    let here = cluster.witness(GUEST_ADDRESS).check().expect("a machine that stayed");
    assert_same_life(&born, &here);
    assert_eq!(alpha.machines(), [("web".to_owned(), "running".to_owned())]);

    for destination in ["-oProxyCommand=reboot", "two words", ""] {
        let argument = format!("--ssh={destination}");
        assert_eq!(alpha.refuse(&["trust", "add", "odd", &argument]).code, 2, "{destination:?}");
    }
    let keyless = alpha.refuse(&["trust", "add", "odd", "10.0.0.9:7400"]);
    assert_eq!(keyless.code, 2, "an address where a key should be: {keyless:?}");
}
