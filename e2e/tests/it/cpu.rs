//! CPU models that hosts have in common.

use whimbrel_e2e::{Cluster, GUEST_ADDRESS, Guest};
use whimbrel_testkit::guest::assert_same_life;

#[test]
fn a_machine_of_the_common_model_boots_and_moves_to_the_hosts_that_it_was_made_for() {
    let cluster = Cluster::start(&["alpha", "beta"]);
    let (alpha, beta) = (cluster.host("alpha"), cluster.host("beta"));
    let found = alpha.json(&["cpu", "baseline", "beta"]);
    let names: Vec<_> = found["hosts"].as_array().expect("hosts").iter().map(|host| &host["name"]).collect();
    assert_eq!(names, ["alpha", "beta"]);
    assert!(
        found["features"].as_array().is_some_and(|features| features.iter().any(|name| name == "sse4.2"))
    );
    let model = alpha.run(&["-q", "cpu", "baseline", "beta"]);
    assert_eq!(found["model"], model.trim_end());
    assert!(model.starts_with("qemu64,") && model.contains(",-svm"), "{model}");
    let unknown = alpha.refuse(&["cpu", "baseline", "gamma"]);
    assert!(unknown.text.contains("gamma"), "{unknown:?}");

    let guest = Guest { arguments: vec!["--cpu".into(), "baseline".into()], ..Guest::small("web") };
    guest.run(&cluster, alpha);
    let mut witness = cluster.witness(GUEST_ADDRESS);
    let before = witness.state().expect("an answer");
    let (_, record) = alpha.record("web");
    assert_eq!(record["config"]["cpu"], format!("{},enforce", model.trim_end()), "QEMU checks each feature");
    alpha.run(&["migrate", "web", "beta"]);
    assert_same_life(&before, &witness.check().expect("an answer"));
    assert_eq!(beta.machines(), [("web".to_owned(), "running".to_owned())]);
}
