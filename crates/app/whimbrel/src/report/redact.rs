//! Takes out of texts and JSON what nobody should see who helps: keys, tokens, passwords, addresses, and what
//! users wrote for their guests.
//!
//! Addresses become numbers, equal ones the same number, so that it stays visible who spoke with whom. Names
//! of hosts, machines and tags, paths, and digests of content stay: without them a report says nothing. When
//! in doubt, text is taken out.

use serde_json::Value;
use std::{collections::BTreeMap, net::IpAddr};

/// Fields whose text is for guests or lets somebody in.
const HIDDEN: &[&str] = &[
    "append",
    "authorization",
    "cloud_init",
    "key",
    "network_config",
    "note",
    "password",
    "private_key",
    "public_key",
    "secret",
    "ssh_keys",
    "token",
    "user_data",
];
/// Fields with addresses, also those that have names.
const ADDRESSES: &[&str] = &["address", "gateway", "listen", "mac", "subnet", "subnet6", "witness"];
/// Words in a text after which, with `=` or `:`, a secret comes.
const ANNOUNCING: &[&str] =
    &["authorization", "bearer", "key", "passphrase", "passwd", "password", "secret", "token", "user_data"];
/// What is shown instead.
const INSTEAD: &str = "[hidden]";
/// Shortest run of letters that may be a key: 32 bytes in base64 have 43.
const KEY_MIN: usize = 40;

/// Addresses that were seen, with their numbers.
#[derive(Debug, Default)]
pub(crate) struct Redactor {
    addresses: BTreeMap<String, usize>,
}

impl Redactor {
    /// Takes secrets out of an answer or a record.
    pub(crate) fn json(&mut self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.text(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.json(item)),
            Value::Object(fields) => {
                for (name, field) in fields {
                    match name.as_str() {
                        "labels" => {
                            field.as_object_mut().into_iter().flatten().for_each(|(_, label)| hide(label))
                        }
                        name if HIDDEN.contains(&name) => hide(field),
                        name if ADDRESSES.contains(&name) => self.hide_address(field),
                        _ => self.json(field),
                    }
                }
            }
            _ => {}
        }
    }

    fn hide_address(&mut self, field: &mut Value) {
        match field {
            Value::String(text) if !text.is_empty() => *text = self.number(text),
            other => self.json(other),
        }
    }

    /// Takes secrets out of a log.
    pub(crate) fn text(&mut self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len());
        let mut in_key = false;
        for line in text.split_inclusive('\n') {
            let begins = line.contains("-----BEGIN");
            if begins || in_key {
                in_key = !line.contains("-----END");
                if begins {
                    shown += &format!("{INSTEAD}\n");
                }
                continue;
            }
            shown += &self.words(&without_announced(line));
        }
        shown
    }

    /// Replaces words that are addresses, tokens or keys.
    fn words(&mut self, line: &str) -> String {
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || "-_+/.:%@".contains(letter);
        let mut shown = String::with_capacity(line.len());
        let mut rest = line;
        while let Some(begin) = rest.find(is_part) {
            let (before, from) = rest.split_at(begin);
            let (word, after) = from.split_at(from.find(|letter| !is_part(letter)).unwrap_or(from.len()));
            shown += before;
            shown += &self.word(word);
            rest = after;
        }
        shown + rest
    }

    fn word(&mut self, word: &str) -> String {
        let core = word.trim_end_matches(['.', ':', '/']);
        let tail = &word[core.len()..];
        if is_key(core) {
            return format!("{INSTEAD}{tail}");
        }
        if let Some((scheme, rest)) = core.split_once("://") {
            return format!("{scheme}://{}{tail}", self.number(rest));
        }
        if is_address(core) {
            return self.number(core) + tail;
        }
        // A path, a subnet or a pool may have an address in it.
        let parts: Vec<String> = core
            .split('/')
            .map(|part| if is_address(part) { self.number(part) } else { part.to_owned() })
            .collect();
        parts.join("/") + tail
    }

    fn number(&mut self, address: &str) -> String {
        let next = self.addresses.len() + 1;
        let number = *self.addresses.entry(address.to_owned()).or_insert(next);
        format!("[address {number}]")
    }
}

fn hide(field: &mut Value) {
    match field {
        Value::String(text) if !text.is_empty() => *text = INSTEAD.to_owned(),
        Value::Array(items) => items.iter_mut().for_each(hide),
        Value::Object(fields) => fields.iter_mut().for_each(|(_, field)| hide(field)),
        _ => {}
    }
}

/// Replaces what comes after words such as `password=`.
fn without_announced(line: &str) -> String {
    let mut shown = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((value, end)) = announced(rest) {
        shown += &rest[..value];
        shown += INSTEAD;
        rest = &rest[end..];
    }
    shown + rest
}

/// Place of the first value that a word announces.
fn announced(line: &str) -> Option<(usize, usize)> {
    let is_letter = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
    let mut at = 0;
    while let Some(begin) = line[at..].find(is_letter).map(|found| at + found) {
        let end = line[begin..].find(|letter| !is_letter(letter)).map_or(line.len(), |found| begin + found);
        let word = line[begin..end].to_ascii_lowercase();
        if ANNOUNCING.iter().any(|announcing| word.ends_with(announcing)) {
            let gap = line[end..].find(|letter: char| !"=: \t\"'".contains(letter)).unwrap_or(0);
            let between = &line[end..end + gap];
            if between.contains(['=', ':']) || word == "bearer" && gap > 0 {
                let value = end + gap;
                let quote = between.chars().last().filter(|letter| "\"'".contains(*letter));
                let ends = |letter: char| match quote {
                    Some(quote) => letter == quote,
                    None => letter.is_whitespace() || ",;)}\"'".contains(letter),
                };
                let length = line[value..].find(ends).unwrap_or(line.len() - value);
                return Some((value, value + length));
            }
        }
        at = end;
    }
    None
}

fn is_address(word: &str) -> bool {
    let bare = word.split('%').next().unwrap_or(word);
    let host =
        bare.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()).map_or(bare, |(host, _)| host);
    let address = bare.parse::<IpAddr>().or_else(|_| host.parse());
    let hardware =
        bare.split(':').count() == 6 && bare.split(':').all(|part| part.len() == 2 && is_hex(part));
    let mail = word.split_once('@').is_some_and(|(user, host)| {
        !user.is_empty() && host.starts_with(|letter: char| letter.is_ascii_alphabetic())
    });
    address.is_ok_and(|address| !address.is_loopback() && !address.is_unspecified()) || hardware || mail
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a word has a token in it, or a run that looks random: capitals, small letters and digits. Digests
/// of content are hexadecimal and stay.
fn is_key(word: &str) -> bool {
    let random = |text: &str, least: usize| {
        text.len() >= least
            && text.bytes().any(|byte| byte.is_ascii_uppercase())
            && text.bytes().any(|byte| byte.is_ascii_lowercase())
            && text.bytes().any(|byte| byte.is_ascii_digit())
    };
    let tokens = word.split("whimbrel_").skip(1).any(|rest| random(rest, 20));
    // A host's public key, in letters of one case.
    tokens || word.contains("whk1-") || word.split(['.', ':', '%', '@']).any(|run| random(run, KEY_MIN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TOKEN: &str = "whimbrel_56dHDZ_JlwcJq2D8dH7zyvAZXhzyWi1i9Nrfz4_GEDk";
    const HOST_KEY: &str = "2xz5swaublomfrkswjvnyerpqgfzffclley364rghcqojhfp7tbw6wjg";
    const KEY: &str = "2v0m3kqfY2a0cQ/Q8Vb7p6m1sJ3+8bqS8Yk0m5m0w3E";

    #[test]
    fn secrets_in_a_log_are_hidden_however_they_stand_there() {
        for text in [
            TOKEN.to_owned(),
            format!("header=\"Bearer {TOKEN}\""),
            format!("peer 10.9.8.7:7400/{KEY}= refused"),
            format!("pool 10.9.8.7:7500/whk1-{HOST_KEY}/folder"),
            format!("ssh-ed25519 {KEY}{KEY} me@laptop"),
            "password=CANARY more".into(),
            "db_password: 'CANARY with spaces'".into(),
            "{\"token\": \"CANARY\"}".into(),
            "Authorization: CANARY".into(),
            "-----BEGIN PRIVATE KEY-----\nCANARY\n-----END PRIVATE KEY-----\n".into(),
            "url=https://user:CANARY@db.example.org:5432/x".into(),
            "from 10.9.8.7, [2001:db8::7]:443 and 52:54:00:12:34:56".into(),
        ] {
            let shown = Redactor::default().text(&text);
            let found = ["CANARY", KEY, "10.9.8.7", "2001:db8::7", "laptop", "52:54", "56dHDZ", HOST_KEY];
            assert!(found.iter().all(|secret| !shown.contains(secret)), "{text:?} became {shown:?}");
        }
    }

    #[test]
    fn what_a_report_is_for_stays_and_equal_addresses_have_one_number() {
        let text = "2026-11-25T23:51:11.755485Z  INFO whimbrel_daemon::lifecycle: serving host=alpha \
                    socket=/run/whimbrel/host.sock listen=127.0.0.1:7480 digest=\
                    1f0a5cbe1f0a5cbe1f0a5cbe1f0a5cbe1f0a5cbe1f0a5cbe1f0a5cbe1f0a5cbe 7.2.19 web@-5m \
                    whimbrel_machine_memory_available_after_the_balloon_bytes 12\n";
        assert_eq!(Redactor::default().text(text), text);
        let shown = Redactor::default().text("10.0.0.1:7400 asks 10.0.0.2, 10.0.0.1:7400 waits");
        assert_eq!(shown, "[address 1] asks [address 2], [address 1] waits");
    }

    #[test]
    fn fields_for_guests_and_of_keys_are_hidden_and_the_rest_stays() {
        let mut value = json!({
            "name": "web", "config": { "append": "console=ttyS0 CANARY", "memory": 5 }, "labels": { "a": "CANARY" },
            "note": "CANARY", "key": "CANARY", "address": "canary.example.org:7400", "nics": [{ "mac": "CANARY" }],
            "cloud_init": { "user_data": "CANARY", "ssh_keys": ["CANARY"] }, "reason": "no route to 10.9.8.7",
        });
        Redactor::default().json(&mut value);
        let text = value.to_string().to_lowercase();
        assert!(!text.contains("canary") && !text.contains("10.9.8.7"), "{text}");
        assert_eq!((&value["name"], &value["config"]["memory"]), (&json!("web"), &json!(5)));
    }
}
