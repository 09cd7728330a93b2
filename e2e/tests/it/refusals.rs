//! What goes wrong is refused with a clear word, and leaves nothing behind.

use whimbrel_e2e::{Cluster, Guest};

#[test]
fn bad_requests_are_refused_with_a_reason_and_a_next_step() {
    let cluster = Cluster::start(&["alpha"]);
    let alpha = cluster.host("alpha");
    let not_found: [&[&str]; 8] = [
        &["checkpoint", "nobody"],
        &["suspend", "nobody"],
        &["stop", "nobody"],
        &["show", "nothing"],
        &["resume", "nothing"],
        &["clone", "nothing", "--count", "2"],
        &["untag", "nothing"],
        &["run", "x", "--memory", "64M", "--disk", "/does/not/exist.raw"],
    ];
    for arguments in not_found {
        let refusal = alpha.refuse(arguments);
        assert_eq!(refusal.code, 3, "{arguments:?}: {refusal:?}");
        assert!(refusal.text.starts_with("error: "), "{refusal:?}");
    }
    for arguments in
        [&["run", "../x", "--memory", "64M"][..], &["clone", "x", "--count", "0"], &["frobnicate"]]
    {
        assert_eq!(alpha.refuse(arguments).code, 2, "{arguments:?}");
    }
    let refusal = alpha.refuse(&["migrate", "nobody", "beta"]);
    assert_eq!(refusal.code, 3, "{refusal:?}");
    assert!(alpha.machines().is_empty(), "nothing is left of what was refused");
    assert_eq!(std::fs::read_dir(alpha.data().join("machines")).expect("a directory").count(), 0);

    let guest = Guest { address: None, ..Guest::small("one") };
    guest.run(&cluster, alpha);
    let refusal = alpha.refuse(&["run", "one", "--memory", "64M"]);
    assert_eq!(refusal.code, 4, "a taken name: {refusal:?}");
    assert!(refusal.text.contains("hint:"), "{refusal:?}");
    let refusal = alpha.refuse(&["migrate", "one", "beta"]);
    assert_eq!(refusal.code, 5, "an unknown host: {refusal:?}");
    let refusal = alpha.refuse(&["run", "two", "--memory", "64M", "--net", "nobridge"]);
    assert!(refusal.text.contains("nobridge"), "{refusal:?}");
    let tcg = ["run", "two", "--memory", "64M", "--accel", "tcg", "--cpu"];
    for (model, reason) in [
        ("host", "needs KVM"),
        ("max,vendor=Mine", "no CPU model"),
        ("nonsense", "unable to find CPU model"),
        ("Haswell", "TCG doesn't support requested feature"),
    ] {
        let refusal = alpha.refuse(&[&tcg[..], &[model]].concat());
        assert!(refusal.text.contains(reason), "{model}: {refusal:?}");
    }
    assert_eq!(alpha.machines().len(), 1);
    alpha.run(&[&tcg[..], &["x86-64-v3,-f16c"]].concat());
    assert_eq!(alpha.machines().len(), 2);
}
