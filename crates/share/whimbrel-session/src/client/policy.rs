//! Policies of files: patterns and rules, which can be changed while the session runs. Pure.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr, time::Duration};
use whimbrel_core::glob;

/// The time at which a write reaches the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// Writes are refused.
    None,
    /// Before the file is closed, and durably before a sync returns.
    Through,
    /// Later; a sync makes the write durable here.
    Back,
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" | "read-only" => Ok(Self::None),
            "through" | "write-through" => Ok(Self::Through),
            "back" | "write-back" => Ok(Self::Back),
            other => Err(format!("{other:?} is not a policy: use none, through or back")),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Through => "through",
            Self::Back => "back",
        })
    }
}

/// A pattern for paths: `*` stands for any bytes, `?` for one. Without a slash it is compared with the last
/// name only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Glob(String);

impl Glob {
    /// Makes a pattern of a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Whether the pattern matches `path`.
    pub fn matches(&self, path: &[u8]) -> bool {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        let subject = if self.0.contains('/') { path } else { name };
        glob::matches(self.0.trim_start_matches('/').as_bytes(), subject)
    }
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A policy for the files of a pattern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Pattern of the files.
    pub files: Glob,
    /// Policy for these files.
    pub policy: Policy,
}

/// Settings that can be changed while a session runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountSettings {
    /// Policy of files without a rule.
    pub policy: Policy,
    /// Rules in order; the last one that matches counts.
    pub rules: Vec<Rule>,
    /// Seconds for which names and attributes are cached; none means the whole session.
    pub fresh: Option<u64>,
    /// Seconds until written data is written back; none means only on request.
    pub delay: Option<u64>,
    /// Seconds for which calls wait for an unreachable server.
    pub patience: u64,
    /// Files that are fetched whole when they are first opened.
    pub whole: Vec<Glob>,
    /// Files that bypass the kernel's page cache.
    pub direct: Vec<Glob>,
}

impl Default for MountSettings {
    fn default() -> Self {
        let globs = |texts: &[&str]| texts.iter().map(|text| Glob::new(*text)).collect();
        Self {
            policy: Policy::Through,
            rules: Vec::new(),
            fresh: Some(30),
            delay: Some(5),
            patience: 60,
            whole: globs(&["*.vmss", "*.mem", "*.memory"]),
            direct: globs(&["*.img", "*.raw", "*.qcow2", "*.vmdk", "*.vdi", "*.vhd", "*.vhdx"]),
        }
    }
}

impl MountSettings {
    /// Policy for a path.
    pub(crate) fn policy_of(&self, path: &[u8]) -> Policy {
        let rule = self.rules.iter().rev().find(|rule| rule.files.matches(path));
        rule.map_or(self.policy, |rule| rule.policy)
    }

    /// Whether any file may be written back later.
    pub fn writes_back(&self) -> bool {
        self.policy == Policy::Back || self.rules.iter().any(|rule| rule.policy == Policy::Back)
    }

    /// How long names and attributes are cached.
    pub fn ttl(&self) -> Duration {
        // The kernel adds to a 64-bit number of seconds: a year is long enough.
        Duration::from_secs(self.fresh.unwrap_or(365 * 24 * 3600))
    }

    /// Changes one setting by its name, as `whimbrel session set` does.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let seconds =
            |value: &str| value.parse::<u64>().map_err(|_| format!("{value:?} is not a number of seconds"));
        let maybe = |value: &str| {
            if value == "never" || value == "session" { Ok(None) } else { seconds(value).map(Some) }
        };
        let globs = |value: &str| value.split(',').filter(|text| !text.is_empty()).map(Glob::new).collect();
        match name {
            "write" => self.policy = value.parse()?,
            "fresh" => self.fresh = maybe(value)?,
            "delay" => self.delay = maybe(value)?,
            "patience" => self.patience = seconds(value)?,
            "whole" => self.whole = globs(value),
            "direct" => self.direct = globs(value),
            pattern => {
                // Any other name is a pattern: `'*.tmp'=back`; `default` removes the rule.
                self.rules.retain(|rule| rule.files.0 != pattern);
                if value != "default" {
                    self.rules.push(Rule { files: Glob::new(pattern), policy: value.parse()? });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rule_that_matches_counts() {
        let mut settings = MountSettings::default();
        settings.set("*.tmp", "back").unwrap();
        settings.set("keep/*", "none").unwrap();
        assert_eq!(settings.policy_of(b"a/b.tmp"), Policy::Back);
        assert_eq!(settings.policy_of(b"keep/b.tmp"), Policy::None);
        assert_eq!(settings.policy_of(b"a/b"), Policy::Through);
        settings.set("keep/*", "default").unwrap();
        assert_eq!(settings.policy_of(b"keep/b.tmp"), Policy::Back);
        assert!(settings.set("write", "sometimes").is_err() && settings.set("delay", "soon").is_err());
    }
}
