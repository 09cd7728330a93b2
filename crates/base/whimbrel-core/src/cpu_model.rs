//! CPU models: what a user may ask for, and the text that QEMU gets.
//!
//! Pure. The text is stored in the machine's configuration, so a capsule needs no table of a release. A
//! named model is enforced: QEMU refuses to start without one of its features, instead of leaving it out in
//! silence. The guest then has the same features on every host and under every QEMU that starts it.

use crate::{Accel, MachineConfig};

/// Everything that this host and its QEMU have. Differs between them, so machines of that model move only
/// between equals.
pub(crate) const ALL_FEATURES: &str = "max";
/// The processor of the host, as KVM shows it.
const HOST: &str = "host";
const ENFORCE: &str = "enforce";
/// Levels of the x86-64 psABI (chapter 3.1.1, "Processor Architecture"), which QEMU has no names for.
const LEVELS: [(&str, &str); 2] = [
    ("x86-64-v2", "qemu64,+cx16,+lahf-lm,+popcnt,+pni,+sse4.1,+sse4.2,+ssse3"),
    (
        "x86-64-v3",
        "qemu64,+cx16,+lahf-lm,+popcnt,+pni,+sse4.1,+sse4.2,+ssse3,+aes,+avx,+avx2,+bmi1,+bmi2,+f16c,+fma,\
         +abm,+movbe,+xsave",
    ),
];

/// Reason why a CPU model is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuModelError {
    /// Only KVM can show a guest the processor of the host.
    #[error("the CPU model `host` needs KVM; under QEMU's translator use `max`")]
    HostNeedsKvm,
    /// QEMU would read it as another option.
    #[error("`{0}` is no CPU model; write a name, then features: `Haswell,-hle,+vmx`")]
    Malformed(String),
}

/// QEMU's text for `asked`: a level of x86-64, `max`, `host`, or a model of QEMU with features to add or to
/// leave out. QEMU alone knows its models, so an unknown one fails when the machine is started.
pub fn cpu_model(asked: &str, accel: Accel) -> Result<String, CpuModelError> {
    let mut words = asked.split(',');
    let name = words.next().unwrap_or_default();
    let feature = |word: &str| word.strip_prefix(['+', '-']).is_some_and(is_plain);
    if !is_plain(name) || !words.all(feature) {
        return Err(CpuModelError::Malformed(asked.to_owned()));
    }
    if name == HOST && accel != Accel::Kvm {
        return Err(CpuModelError::HostNeedsKvm);
    }
    let level = LEVELS.iter().find(|(level, _)| *level == name);
    let text = level.map_or(asked.to_owned(), |(_, model)| format!("{model}{}", &asked[name.len()..]));
    if is_of_this_host(&text) { Ok(text) } else { Ok(format!("{text},{ENFORCE}")) }
}

impl MachineConfig {
    /// Whether the features of the CPU depend on the host that starts the machine.
    pub fn cpu_depends_on_host(&self) -> bool {
        is_of_this_host(&self.cpu)
    }
}

fn is_of_this_host(model: &str) -> bool {
    matches!(model.split(',').next(), Some(ALL_FEATURES | HOST))
}

fn is_plain(word: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    word.starts_with(|first: char| first.is_ascii_alphanumeric()) && word.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_model_is_enforced_and_one_of_the_host_is_not() {
        let text = |asked| cpu_model(asked, Accel::Kvm).unwrap();
        assert_eq!(text("max"), "max");
        assert_eq!(text("host,-vmx"), "host,-vmx");
        assert_eq!(text("Haswell,-hle"), "Haswell,-hle,enforce");
        assert_eq!(text("x86-64-v2"), format!("{},enforce", LEVELS[0].1));
        assert_eq!(text("x86-64-v3,+vmx"), format!("{},+vmx,enforce", LEVELS[1].1));
    }

    #[test]
    fn a_model_cannot_carry_another_option() {
        for asked in
            ["", ",", "max,", "max,-", "max,vendor=Mine", "max -enable-kvm", "-max", "a,b", "EPYC,+a=b"]
        {
            assert_eq!(cpu_model(asked, Accel::Kvm), Err(CpuModelError::Malformed(asked.into())));
        }
    }

    #[test]
    fn the_translator_has_no_processor_of_the_host_to_show() {
        assert_eq!(cpu_model("host", Accel::Tcg), Err(CpuModelError::HostNeedsKvm));
    }
}
