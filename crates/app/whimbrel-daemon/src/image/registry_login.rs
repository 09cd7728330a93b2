//! Logins at registries, in the file that `docker login`, `podman login` and `skopeo login` write
//! (containers-auth.json(5)). The file is read for each image, so a new login counts at once.

use super::{download::FetchError, location::Location, registry::DOCKER_HUB};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
};

/// Longest file of logins.
const FILE_MAX: u64 = 1 << 20;
/// Names under which the tools store the login of Docker's registry.
const DOCKER_NAMES: [&str; 2] = ["docker.io", "index.docker.io"];

/// Value of the header `Authorization`, which no log shows.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Authorization(String);

impl Authorization {
    /// A token that a server has given (RFC 6750, 2.1).
    pub(super) fn bearer(token: &str) -> Self {
        Self(format!("Bearer {token}"))
    }

    pub(super) fn header(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Authorization(…)")
    }
}

#[derive(Deserialize)]
struct Logins {
    #[serde(default)]
    auths: BTreeMap<String, Login>,
}

#[derive(Deserialize)]
struct Login {
    /// `USER:PASSWORD` in base64; none if a helper program has it.
    auth: Option<String>,
}

/// Login at a registry, if the file has one (RFC 7617).
pub(super) fn read(path: &Path, registry: &Location) -> Result<Option<Authorization>, FetchError> {
    let failed = |source| FetchError::File { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.mode();
    if mode & 0o077 != 0 {
        return Err(failed(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "other users can read the passwords in it; see: chmod 600",
        )));
    }
    let mut text = String::new();
    file.take(FILE_MAX).read_to_string(&mut text).map_err(failed)?;
    let invalid = |what: String| failed(io::Error::new(io::ErrorKind::InvalidData, what));
    let logins: Logins = serde_json::from_str(&text)
        .map_err(|error| invalid(format!("not a file of `docker login`: {error}")))?;
    let Some((name, login)) = logins.auths.iter().find(|(name, _)| is_of(name, registry)) else {
        return Ok(None);
    };
    let helper = || invalid(format!("the login of {name} is not in the file; a helper program may have it"));
    let auth = login.auth.as_ref().ok_or_else(helper)?;
    let is_login = STANDARD.decode(auth).is_ok_and(|login| login.contains(&b':'));
    if !is_login {
        return Err(invalid(format!("the login of {name} is no USER:PASSWORD in base64")));
    }
    Ok(Some(Authorization(format!("Basic {auth}"))))
}

/// Whether the file means this registry by that name.
fn is_of(name: &str, registry: &Location) -> bool {
    let Location::Web(address) = registry else { return false };
    let named = name.strip_prefix("https://").or_else(|| name.strip_prefix("http://")).unwrap_or(name);
    let host = ["/v1", "/v2"]
        .iter()
        .find_map(|version| named.trim_end_matches('/').strip_suffix(version))
        .unwrap_or(named.trim_end_matches('/'));
    let is_docker = registry.to_string().trim_end_matches('/') == DOCKER_HUB;
    address.authority().is_some_and(|place| place.as_str().eq_ignore_ascii_case(host))
        || is_docker && DOCKER_NAMES.contains(&host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::PermissionsExt as _};

    fn login(text: &str, mode: u32, registry: &str) -> Result<Option<String>, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.json");
        fs::write(&path, text).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
        let found = read(&path, &registry.parse().expect("an address"));
        found
            .map(|login| login.map(|login| login.header().to_owned()))
            .map_err(|error| std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string))
    }

    #[test]
    fn the_login_of_a_registry_is_found_under_the_names_that_tools_give_it() {
        let file = |name: &str| format!(r#"{{"auths": {{"{name}": {{"auth": "YTpi"}}}}, "other": 1}}"#);
        let found = |name: &str, registry: &str| login(&file(name), 0o600, registry).expect("a file");
        let basic = Some("Basic YTpi".to_owned());
        assert_eq!(found("reg.test:5000", "http://reg.test:5000/"), basic);
        assert_eq!(found("https://REG.test/v2/", "https://reg.test/"), basic);
        for name in ["docker.io", "https://index.docker.io/v1/", "registry-1.docker.io"] {
            assert_eq!(found(name, "https://registry-1.docker.io/"), basic, "{name}");
        }
        for (name, registry) in [
            ("reg.test", "https://reg.test:5000/"),
            ("reg.test/team", "https://reg.test/"),
            ("docker.io", "https://reg.test/"),
            ("test", "https://reg.test/"),
        ] {
            assert_eq!(found(name, registry), None, "{name} is not {registry}");
        }
        assert_eq!(format!("{:?}", Authorization::bearer("secret")), "Authorization(…)");
    }

    #[test]
    fn a_file_that_others_can_read_or_that_is_none_is_refused() {
        let said = |text: &str, mode| login(text, mode, "https://reg.test/").expect_err("a refusal");
        assert!(said(r#"{"auths": {}}"#, 0o644).contains("chmod 600"));
        assert!(said("reg.test a b", 0o600).contains("docker login"));
        assert!(said(r#"{"auths": {"reg.test": {}}}"#, 0o600).contains("helper"));
        for auth in ["a\\r\\nX: y", "????", "YQ=="] {
            let text = format!(r#"{{"auths": {{"reg.test": {{"auth": "{auth}"}}}}}}"#);
            assert!(said(&text, 0o600).contains("base64"), "{auth}");
        }
    }
}
