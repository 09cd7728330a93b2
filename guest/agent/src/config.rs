//! The settings of a guest's owner: `/etc/whimbrel-guest.conf`.
//!
//! One setting a line, `#` begins a comment. A line that makes no sense is told and passed over: the rest
//! still holds.

use std::time::Duration;

/// Where the settings are.
pub(crate) const PATH: &str = "/etc/whimbrel-guest.conf";

/// Longest a process is held in one stretch unless the settings say otherwise.
const STUN_MAX: Duration = Duration::from_secs(60);
/// Never held, whatever the settings add: without them nobody gets into the guest, and services lose their
/// parent.
const ALWAYS_ALLOWED: &[&str] = &["systemd*", "init", "dbus-*", "sshd*", "agetty", "login"];
/// The kernel keeps so much of a name (`TASK_COMM_LEN`).
const COMM_MAX: usize = 15;

/// The settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    allowed: Vec<String>,
    /// Whether processes may be held at all.
    pub(crate) stun: bool,
    /// For how long at most.
    pub(crate) stun_max: Duration,
    /// Whether caches may be dropped.
    pub(crate) free_caches: bool,
    /// Whether the network is told after a move.
    pub(crate) announce: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { allowed: Vec::new(), stun: true, stun_max: STUN_MAX, free_caches: true, announce: true }
    }
}

impl Config {
    /// Reads settings; with them the lines that make no sense.
    pub(crate) fn parse(text: &str) -> (Self, Vec<String>) {
        let (mut config, mut wrong) = (Self::default(), Vec::new());
        for line in text.lines() {
            let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            let switch = |word: &str| match word {
                "on" => Some(true),
                "off" => Some(false),
                _ => None,
            };
            let known = match words.as_slice() {
                [] => true,
                ["allow", names @ ..] if !names.is_empty() => {
                    config.allowed.extend(names.iter().map(|name| (*name).to_owned()));
                    true
                }
                ["stun", word] => set(&mut config.stun, switch(word)),
                ["free-caches", word] => set(&mut config.free_caches, switch(word)),
                ["announce", word] => set(&mut config.announce, switch(word)),
                ["stun-max", seconds] => {
                    let seconds = seconds.parse().ok().filter(|seconds| (1..=600).contains(seconds));
                    set(&mut config.stun_max, seconds.map(Duration::from_secs))
                }
                _ => false,
            };
            if !known {
                wrong.push(line.trim().to_owned());
            }
        }
        (config, wrong)
    }

    /// Whether a process of this name is never held.
    pub(crate) fn allows(&self, name: &str) -> bool {
        let always = ALWAYS_ALLOWED.iter().copied();
        always.chain(self.allowed.iter().map(String::as_str)).any(|pattern| matches(pattern, name))
    }
}

fn set<T>(setting: &mut T, value: Option<T>) -> bool {
    let known = value.is_some();
    value.into_iter().for_each(|value| *setting = value);
    known
}

/// A star at the end stands for anything. Names are compared as far as the kernel keeps them.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning.get(..COMM_MAX).unwrap_or(beginning)),
        None => pattern == name || (pattern.len() > COMM_MAX && pattern.get(..COMM_MAX) == Some(name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_allowed_is_allowed_and_what_makes_no_sense_is_told() {
        let text = "# services\nallow nginx postgres* # all of them\nallow a-very-long-name-indeed\n\nstun-max 5\n\
                    announce off\nstun maybe\nallow\nstun-max 0\n";
        let (config, wrong) = Config::parse(text);
        for name in ["nginx", "postgres", "postgres: write", "sshd", "systemd-journal", "a-very-long-nam"] {
            assert!(config.allows(name), "{name}");
        }
        for name in ["nginx2", "muncher", "ngin", "a-very-long-na"] {
            assert!(!config.allows(name), "{name}");
        }
        assert_eq!((config.stun_max, config.announce, config.stun), (Duration::from_secs(5), false, true));
        assert_eq!(wrong, ["stun maybe", "allow", "stun-max 0"]);
        assert_eq!(Config::parse("").0, Config::default());
    }

    #[test]
    fn a_pattern_that_ends_within_a_character_is_no_panic() {
        let (config, _) = Config::parse("allow ääääääääääääääää*");
        assert!(!config.allows("x"));
    }
}
