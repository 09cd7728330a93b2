//! Settings of the guest agent: `/etc/whimbrel-guest.conf`, written by the guest's owner.
//!
//! One setting a line, `#` begins a comment. An invalid line is reported and ignored; the other lines apply.

use std::time::Duration;

/// Path of the settings file.
pub(crate) const PATH: &str = "/etc/whimbrel-guest.conf";

/// Default of the longest stun.
const STUN_MAX: Duration = Duration::from_secs(60);
/// Processes that are never stunned: without them no user gets into the guest, and services lose their
/// parent.
const ALWAYS_ALLOWED: &[&str] = &["systemd*", "init", "dbus-*", "sshd*", "agetty", "login"];
/// Bytes of a process name that the kernel stores (`TASK_COMM_LEN`).
const COMM_MAX: usize = 15;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    allowed: Vec<String>,
    pub(crate) stun: bool,
    pub(crate) stun_max: Duration,
    pub(crate) free_caches: bool,
    /// Whether addresses are announced after a migration.
    pub(crate) announce: bool,
    /// Whether the wall clock is set forward after a pause.
    pub(crate) clock: bool,
}

impl Default for Config {
    fn default() -> Self {
        let (stun, free_caches, announce, clock) = (true, true, true, true);
        Self { allowed: Vec::new(), stun, stun_max: STUN_MAX, free_caches, announce, clock }
    }
}

impl Config {
    /// Parses the settings; returns invalid lines too.
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
                ["clock", word] => set(&mut config.clock, switch(word)),
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

    /// Whether a process of this name is never stunned.
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

/// Matches a name, with an optional star at the end of the pattern, as far as the kernel stores names.
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
                    announce off\nclock off\nstun maybe\nallow\nstun-max 0\n";
        let (config, wrong) = Config::parse(text);
        for name in ["nginx", "postgres", "postgres: write", "sshd", "systemd-journal", "a-very-long-nam"] {
            assert!(config.allows(name), "{name}");
        }
        for name in ["nginx2", "muncher", "ngin", "a-very-long-na"] {
            assert!(!config.allows(name), "{name}");
        }
        assert_eq!((config.stun_max, config.announce, config.stun), (Duration::from_secs(5), false, true));
        assert!(!config.clock);
        assert_eq!(wrong, ["stun maybe", "allow", "stun-max 0"]);
        assert_eq!(Config::parse("").0, Config::default());
    }

    #[test]
    fn a_pattern_that_ends_within_a_character_is_no_panic() {
        let (config, _) = Config::parse("allow ääääääääääääääää*");
        assert!(!config.allows("x"));
    }
}
