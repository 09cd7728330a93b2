//! Features of the processor that a QEMU can give to its guests, and the model that several hosts can run.
//!
//! QEMU computes a common model itself on one architecture only (`query-cpu-model-baseline` of s390x). Here
//! each host says what its QEMU expands the model `max` to, and what all of them say is the common model.
//! Only features of instructions count, which a guest sees and QEMU migrates: not those of QEMU's own
//! interfaces, of nested guests, or of a clock that no move preserves.

use crate::{
    probe::{ProbeError, QemuBinary},
    process::spawn_to_ask,
    qmp::Qmp,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use whimbrel_core::Accel;

/// What the model `qemu64` has without more, under QEMU's own names. Its `svm` is for nested guests.
const BASE: &[&str] = &[
    "apic",
    "clflush",
    "cmov",
    "cx16",
    "cx8",
    "de",
    "fpu",
    "fxsr",
    "lahf-lm",
    "lm",
    "mca",
    "mce",
    "mmx",
    "msr",
    "mtrr",
    "nx",
    "pae",
    "pat",
    "pge",
    "pni",
    "pse",
    "pse36",
    "sep",
    "sse",
    "sse2",
    "svm",
    "syscall",
    "tsc",
    "hypervisor",
];
/// Features that a common model may have beyond those.
const MORE: &[&str] = &[
    "3dnowprefetch",
    "abm",
    "adx",
    "aes",
    "arat",
    "avx",
    "avx-vnni",
    "avx2",
    "avx512-bf16",
    "avx512-fp16",
    "avx512-vpopcntdq",
    "avx512bitalg",
    "avx512bw",
    "avx512cd",
    "avx512dq",
    "avx512f",
    "avx512ifma",
    "avx512vbmi",
    "avx512vbmi2",
    "avx512vl",
    "avx512vnni",
    "bmi1",
    "bmi2",
    "cldemote",
    "clflushopt",
    "clwb",
    "clzero",
    "cr8legacy",
    "erms",
    "f16c",
    "fma",
    "fsgsbase",
    "fsrm",
    "gfni",
    "invpcid",
    "la57",
    "misalignsse",
    "mmxext",
    "movbe",
    "movdir64b",
    "movdiri",
    "pcid",
    "pclmulqdq",
    "pdpe1gb",
    "pku",
    "popcnt",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "serialize",
    "sha-ni",
    "smap",
    "smep",
    "ssbd",
    "sse4.1",
    "sse4.2",
    "sse4a",
    "ssse3",
    "stibp",
    "spec-ctrl",
    "umip",
    "vaes",
    "vme",
    "vpclmulqdq",
    "x2apic",
    "xgetbv1",
    "xsave",
    "xsaveopt",
];
/// Base model of the text.
const MODEL: &str = "qemu64";

impl QemuBinary {
    /// Features that this QEMU gives to guests of the model `max` on this host. Takes about 100 ms.
    pub fn cpu_features(&self, accel: Accel) -> Result<BTreeSet<String>, ProbeError> {
        let start = |source| ProbeError::Start { path: self.path.clone(), source };
        let ask = |source| ProbeError::Query { path: self.path.clone(), source };
        let accel = match accel {
            Accel::Tcg => "tcg",
            Accel::Kvm => "kvm",
        };
        let (_child, qmp) = spawn_to_ask(&self.path, &["-accel", accel]).map_err(start)?;
        let qmp = Qmp::over(qmp).map_err(ask)?;
        let asked = json!({"type": "full", "model": {"name": "max"}});
        Ok(features(&qmp.execute("query-cpu-model-expansion", asked).map_err(ask)?))
    }
}

/// Features that are on in an expanded model and may be in a common one.
fn features(expanded: &Value) -> BTreeSet<String> {
    let on = |name: &&str| expanded["model"]["props"][*name] == true;
    BASE.iter().chain(MORE).filter(|name| on(name)).map(ToString::to_string).collect()
}

/// Features that all sets have. Names that no QEMU of ours has are left out, whoever says them.
pub fn common_cpu_features(sets: &[BTreeSet<String>]) -> BTreeSet<String> {
    let all = BASE.iter().chain(MORE).filter(|name| sets.iter().all(|set| set.contains(**name)));
    all.map(ToString::to_string).collect()
}

/// The model with these features and no others, as `run --cpu` takes it.
pub fn cpu_model_of(features: &BTreeSet<String>) -> String {
    // Nested guests would not survive a move; a guest under QEMU always sees that it is one.
    let wanted = |name: &str| name == "hypervisor" || (name != "svm" && features.contains(name));
    let less = BASE.iter().filter(|name| !wanted(name)).map(|name| format!(",-{name}"));
    let more = MORE.iter().filter(|name| wanted(name)).map(|name| format!(",+{name}"));
    less.chain(more).fold(MODEL.to_owned(), |text, feature| text + &feature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use whimbrel_core::cpu_model;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_feature_that_one_host_lacks_is_in_no_common_model() {
        let old = set(&["fpu", "sse2", "svm", "popcnt", "made-up"]);
        let new = set(&["fpu", "sse2", "svm", "popcnt", "avx2", "made-up"]);
        let common = common_cpu_features(&[old, new]);
        assert_eq!(common, set(&["fpu", "sse2", "svm", "popcnt"]));
        let text = cpu_model_of(&common);
        assert!(text.starts_with("qemu64,-apic,") && text.ends_with(",+popcnt"), "{text}");
        assert!(text.contains(",-svm") && !text.contains("avx") && !text.contains("sse2"), "{text}");
        assert_eq!(cpu_model(&text, Accel::Tcg).unwrap(), format!("{text},enforce"));
    }

    #[test]
    fn only_what_is_on_and_known_counts() {
        let expanded =
            json!({"model": {"name": "max", "props": {"avx": true, "aes": false, "kvm": true, "fpu": 1}}});
        assert_eq!(features(&expanded), set(&["avx"]));
        assert!(features(&json!([])).is_empty());
    }

    #[test]
    fn names_are_said_once() {
        let all: BTreeSet<_> = BASE.iter().chain(MORE).collect();
        assert_eq!(all.len(), BASE.len() + MORE.len());
    }

    fn features_of_a_host() -> impl Strategy<Value = BTreeSet<String>> {
        let names: Vec<&str> = BASE.iter().chain(MORE).copied().collect();
        prop::sample::subsequence(names, 0..90).prop_map(|names| set(&names))
    }

    proptest! {
        /// A common model asks no host for a feature that it lacks, whatever the order of the hosts.
        #[test]
        fn every_host_has_what_the_common_model_asks_for(hosts in prop::collection::vec(features_of_a_host(), 1..5)) {
            let common = common_cpu_features(&hosts);
            prop_assert!(hosts.iter().all(|host| common.is_subset(host)));
            let reversed: Vec<_> = hosts.iter().rev().cloned().collect();
            prop_assert_eq!(cpu_model_of(&common_cpu_features(&reversed)), cpu_model_of(&common));
        }
    }
}
