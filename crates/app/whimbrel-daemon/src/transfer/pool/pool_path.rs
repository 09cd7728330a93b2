//! Pool path: a folder of a pool, as `MANAGER[,MANAGER…][/FOLDER]` with managers as `whimbrel pool manager`
//! prints them.

use crate::core::error::DaemonError;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use whimbrel_pool::ManagerAddress;

const FOLDER_MAX: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolPath {
    /// Managers of the pool; one is enough.
    pub(super) managers: Vec<ManagerAddress>,
    /// Path from the root, without a slash at either end.
    pub(super) folder: String,
}

impl FromStr for PoolPath {
    type Err = DaemonError;

    fn from_str(text: &str) -> Result<Self, DaemonError> {
        let mut managers = Vec::new();
        let mut rest = text;
        loop {
            // After the address comes a key, then another manager, a folder or nothing.
            let key = rest.find('/').map_or(rest.len(), |slash| slash + 1);
            let end = rest[key..].find(['/', ',']).map_or(rest.len(), |end| key + end);
            let manager = rest[..end].parse().map_err(|error| DaemonError::invalid(format!("{error}")))?;
            managers.push(manager);
            match rest[end..].strip_prefix(',') {
                Some(another) => rest = another,
                None => break rest = &rest[end..],
            }
        }
        let folder = rest.trim_matches('/').to_owned();
        let odd = |part: &str| part.is_empty() || part == "." || part == ".." || part == ".versions";
        if folder.len() > FOLDER_MAX || (!folder.is_empty() && folder.split('/').any(odd)) {
            return Err(DaemonError::invalid(format!("{folder:?} is not a valid folder of a pool")));
        }
        Ok(Self { managers, folder })
    }
}

impl fmt::Display for PoolPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("pool:")?;
        for (at, manager) in self.managers.iter().enumerate() {
            write!(f, "{}{manager}", if at > 0 { "," } else { "" })?;
        }
        if self.folder.is_empty() { Ok(()) } else { write!(f, "/{}", self.folder) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use whimbrel_wire::PublicKey;

    #[test]
    fn a_place_comes_back_and_half_of_one_is_refused() {
        let one = format!("10.0.0.1:7500/{}", PublicKey([7; 32]));
        let two = format!("{one},[fe80::1]:7500/{}", PublicKey([8; 32]));
        for (text, managers, folder) in [
            (one.clone(), 1, ""),
            (format!("{one}/vms/web"), 1, "vms/web"),
            (format!("{two}/vms"), 2, "vms"),
            (two, 2, ""),
        ] {
            let place: PoolPath = text.parse().unwrap();
            assert_eq!((place.managers.len(), place.folder.as_str()), (managers, folder));
            assert_eq!(place.to_string(), format!("pool:{text}"));
        }
        for bad in ["", "/", "10.0.0.1:7500", "10.0.0.1:7500/key/vms", ",", "é:1/"] {
            assert!(bad.parse::<PoolPath>().is_err(), "{bad}");
        }
        for folder in ["../x", "a//b", "a/.versions/b"] {
            assert!(format!("{one}/{folder}").parse::<PoolPath>().is_err(), "{folder}");
        }
    }
}
