//! Tokens of the API, in `DATA/api-tokens.json` (mode 0600).
//!
//! Only the BLAKE3 digest of a token is stored. A token is 32 random bytes, so neither a slow hash nor a salt
//! would make guessing harder. A damaged file lets no token in, and is never overwritten.

use crate::{
    core::{error::DaemonError, rights},
    server::access::may::{ApiUser, Scope},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::RwLock,
};
use tokio::sync::watch;
use whimbrel_api::{NewToken, TokenInfo, TokenRequest};
use whimbrel_core::{Digest, RefName};
use whimbrel_wire::json_file;

/// What every token begins with, so that programs that look for leaked secrets recognise it.
const PREFIX: &str = "whimbrel_";
const FORMAT: u32 = 1;
/// Most tokens of a host.
const TOKENS_MAX: usize = 1000;
/// Longest token that is hashed.
const LENGTH_MAX: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    digest: Digest,
    #[serde(flatten)]
    info: TokenInfo,
}

/// Content of the file.
#[derive(Serialize, Deserialize)]
struct TokenFile {
    format: u32,
    tokens: Vec<Entry>,
}

pub(crate) struct Tokens {
    path: PathBuf,
    /// The tokens, or why they cannot be read.
    table: RwLock<Result<Vec<Entry>, String>>,
    changed: watch::Sender<()>,
}

impl Tokens {
    pub(crate) fn load(path: PathBuf) -> Self {
        let table = read(&path).map_err(|error| error.to_string());
        if let Err(error) = &table {
            tracing::error!(path = %path.display(), error, "no token is accepted: the file cannot be read");
        }
        Self { path, table: RwLock::new(table), changed: watch::Sender::new(()) }
    }

    /// Holder of the token; none if it is unknown, revoked or expired.
    pub(crate) fn find(&self, token: &str) -> Option<ApiUser> {
        if token.len() > LENGTH_MAX {
            return None;
        }
        let digest = Digest::of(token.as_bytes());
        let table = self.table.read().expect("no panic while held");
        let info = &table.as_ref().ok()?.iter().find(|entry| entry.digest == digest)?.info;
        is_valid(info).then(|| identity(info)).flatten()
    }

    /// Ends when the token is revoked or has expired.
    pub(crate) async fn ended(&self, token: &TokenInfo) {
        let mut changed = self.changed.subscribe();
        while self.has(token) {
            let left = token.expires_ms.map(|end| end.saturating_sub(crate::now_ms()));
            let expiry = async {
                match left {
                    Some(left) => tokio::time::sleep(std::time::Duration::from_millis(left)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! { _ = changed.changed() => {}, () = expiry => {} }
        }
    }

    fn has(&self, token: &TokenInfo) -> bool {
        let table = self.table.read().expect("no panic while held");
        is_valid(token) && table.as_ref().is_ok_and(|all| all.iter().any(|entry| entry.info == *token))
    }

    pub(crate) fn list(&self) -> Result<Vec<TokenInfo>, DaemonError> {
        let table = self.table.read().expect("no panic while held");
        let entries = table.as_ref().map_err(|reason| self.unreadable(reason))?;
        Ok(entries.iter().map(|entry| entry.info.clone()).collect())
    }

    /// Creates a token, durably.
    pub(crate) fn create(&self, request: TokenRequest) -> Result<NewToken, DaemonError> {
        // Both lists are parsed, so that a wrong one is refused now.
        rights::lists(request.machines.clone(), request.capsules.clone())?;
        let secret: [u8; 32] = rand::random();
        let token = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(secret));
        let created_ms = crate::now_ms();
        let end = |seconds: u64| created_ms.saturating_add(seconds.saturating_mul(1000));
        let info = TokenInfo {
            name: request.name,
            role: request.role,
            machines: request.machines,
            capsules: request.capsules,
            created_ms,
            expires_ms: request.expires_s.map(end),
        };
        let entry = Entry { digest: Digest::of(token.as_bytes()), info: info.clone() };
        self.change(|entries| {
            // An expired token has no use but to be listed.
            if let Some(old) = entries.iter().position(|old| old.info.name == info.name) {
                if is_valid(&entries[old].info) {
                    return Err(DaemonError::invalid(format!("there is a token {} already", info.name)));
                }
                entries.remove(old);
            }
            if entries.len() >= TOKENS_MAX {
                return Err(DaemonError::invalid(format!("a host has at most {TOKENS_MAX} tokens")));
            }
            entries.push(entry);
            Ok(())
        })?;
        Ok(NewToken { token, info })
    }

    /// Revokes a token, durably: the next request with it is refused, and streams that it opened end.
    pub(crate) fn revoke(&self, name: &RefName) -> Result<(), DaemonError> {
        self.change(|entries| {
            let before = entries.len();
            entries.retain(|entry| entry.info.name != *name);
            let none = || DaemonError::NotFound { what: "token", name: name.to_string() };
            (entries.len() < before).then_some(()).ok_or_else(none)
        })
    }

    fn change(
        &self,
        change: impl FnOnce(&mut Vec<Entry>) -> Result<(), DaemonError>,
    ) -> Result<(), DaemonError> {
        let mut table = self.table.write().expect("no panic while held");
        let mut entries = table.as_ref().map_err(|reason| self.unreadable(reason))?.clone();
        change(&mut entries)?;
        let file = TokenFile { format: FORMAT, tokens: entries };
        let written = json_file::replace(&self.path, &file);
        written.map_err(|source| DaemonError::io("write", &self.path, source))?;
        *table = Ok(file.tokens);
        drop(table);
        self.changed.send_replace(());
        Ok(())
    }

    fn unreadable(&self, reason: &str) -> DaemonError {
        DaemonError::UnreadableFile { path: self.path.clone(), reason: reason.to_owned() }
    }
}

/// Reads the tokens; none if there is no file. Earlier versions wrote the list by itself.
fn read(path: &Path) -> io::Result<Vec<Entry>> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text?,
    };
    match text.first() {
        Some(b'[') => Ok(serde_json::from_slice(&text)?),
        _ => Ok(json_file::decode_format::<TokenFile>(&text, FORMAT)?.tokens),
    }
}

/// Why the file of tokens cannot be read, if it cannot.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    read(path).map(drop)
}

fn is_valid(info: &TokenInfo) -> bool {
    info.expires_ms.is_none_or(|end| crate::now_ms() < end)
}

/// The holder of a token; none if a list cannot be read, which is then no reason to allow more.
fn identity(info: &TokenInfo) -> Option<ApiUser> {
    let (machines, capsules) = rights::lists(info.machines.clone(), info.capsules.clone()).ok()?;
    let (name, scope) = (format!("token {}", info.name), Scope { machines, capsules });
    Some(ApiUser { name, role: info.role, scope, token: Some(info.clone()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use whimbrel_api::Role;

    fn request(name: &str) -> TokenRequest {
        let name = name.parse().unwrap();
        TokenRequest { name, role: Role::Operator, machines: None, capsules: None, expires_s: None }
    }

    #[test]
    fn a_token_is_kept_as_a_digest_and_is_gone_once_revoked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api-tokens.json");
        let tokens = Tokens::load(path.clone());
        let new = tokens.create(request("ci")).unwrap();
        assert!(tokens.create(request("ci")).is_err(), "a name is for one token");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!fs::read_to_string(&path).unwrap().contains(&new.token[PREFIX.len()..]));
        let tokens = Tokens::load(path);
        assert_eq!(tokens.find(&new.token).unwrap().name, "token ci");
        assert_eq!(tokens.find(&format!("{}x", new.token)), None);
        tokens.revoke(&"ci".parse().unwrap()).unwrap();
        assert_eq!(tokens.find(&new.token), None);
        assert!(tokens.revoke(&"ci".parse().unwrap()).is_err());
    }

    #[tokio::test]
    async fn what_a_token_opened_ends_when_it_is_revoked_or_expires() {
        let dir = tempfile::tempdir().unwrap();
        let tokens = std::sync::Arc::new(Tokens::load(dir.path().join("api-tokens.json")));
        let info = tokens.create(request("ci")).unwrap().info;
        let (waiting, of) = (tokens.clone(), info.clone());
        let ended = tokio::spawn(async move { waiting.ended(&of).await });
        tokens.create(request("other")).unwrap();
        assert!(!ended.is_finished());
        tokens.revoke(&info.name).unwrap();
        ended.await.unwrap();
        let short = TokenRequest { expires_s: Some(0), ..request("short") };
        let short = tokens.create(short).unwrap();
        assert_eq!(tokens.find(&short.token), None);
        tokens.ended(&short.info).await;
    }

    #[test]
    fn a_damaged_file_lets_nobody_in_and_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api-tokens.json");
        fs::write(&path, "[{\"digest\":").unwrap();
        let tokens = Tokens::load(path.clone());
        assert!(tokens.create(request("ci")).is_err() && tokens.list().is_err());
        assert_eq!(fs::read_to_string(path).unwrap(), "[{\"digest\":");
    }
}
