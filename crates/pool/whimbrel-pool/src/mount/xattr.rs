//! Extended attributes: version, policy and copies of a file or folder, as text.

use super::{file_system::PoolFiles, inode::Inode};
use crate::{client::PoolError, policy::Policy, protocol::Node};
use std::ffi::{OsStr, OsString};
use whimbrel_fuse::{Errno, Result};

const PREFIX: &str = "user.whimbrel.";
const OF_FILES: [&str; 4] = ["version", "versions", "chunks", "sent"];
const OF_ALL: [&str; 2] = ["copies", "policy"];

fn short(name: &OsStr) -> Option<&str> {
    name.to_str()?.strip_prefix(PREFIX)
}

impl PoolFiles {
    fn xattr_node(&self, inode: u64) -> Result<Node> {
        match Inode::of(inode) {
            Inode::Node(id) => self.call(self.pool.node(id)),
            _ => Err(Errno::ENODATA),
        }
    }

    pub(super) fn get_attribute(&self, inode: u64, name: &OsStr) -> Result<Vec<u8>> {
        // The kernel asks for other attributes at every write and listing.
        let Some(name) = short(name) else { return Err(Errno::ENODATA) };
        let node = self.xattr_node(inode)?;
        let text = match name {
            "copies" => self.call(self.pool.policy(node.id))?.1.copies.to_string(),
            "policy" => {
                let policy = self.call(self.pool.policy(node.id))?.1;
                serde_json::to_string(&policy).map_err(|_| Errno::EIO)?
            }
            _ if node.folder || !OF_FILES.contains(&name) => return Err(Errno::ENODATA),
            _ => {
                let versions = self.call(self.pool.versions(node.id))?;
                let current = versions.iter().find(|version| version.id == node.version);
                let current = current.ok_or(Errno::ENODATA)?;
                match name {
                    "version" => current.number.to_string(),
                    "versions" => versions.len().to_string(),
                    "chunks" => current.chunks.to_string(),
                    _ => current.sent.to_string(),
                }
            }
        };
        Ok(text.into_bytes())
    }

    pub(super) fn list_attributes(&self, inode: u64) -> Result<Vec<OsString>> {
        let Ok(node) = self.xattr_node(inode) else { return Ok(Vec::new()) };
        let of_files = OF_FILES.iter().filter(|_| !node.folder && node.version > 0);
        Ok(OF_ALL.iter().chain(of_files).map(|name| format!("{PREFIX}{name}").into()).collect())
    }

    pub(super) fn set_attribute(&self, inode: u64, name: &OsStr, value: &[u8]) -> Result<()> {
        let name = short(name).ok_or(Errno::ENOTSUP)?;
        let node = self.xattr_node(inode)?;
        let text = std::str::from_utf8(value).map_err(|_| Errno::EINVAL)?.trim();
        let policy = match name {
            "policy" => serde_json::from_str(text).map_err(|_| Errno::EINVAL)?,
            "copies" => {
                let copies = text.parse().map_err(|_| Errno::EINVAL)?;
                Policy { copies, ..self.call(self.pool.policy(node.id))?.1 }
            }
            _ => return Err(Errno::EPERM),
        };
        policy.check().map_err(|_| Errno::EINVAL)?;
        self.call(self.pool.set_policy(node.id, Some(policy)))
    }

    pub(super) fn remove_attribute(&self, inode: u64, name: &OsStr) -> Result<()> {
        let node = self.xattr_node(inode)?;
        match short(name) {
            Some("policy" | "copies") => self.call(self.pool.set_policy(node.id, None)),
            _ => Err(Errno::ENODATA),
        }
    }

    pub(super) fn call<T>(&self, call: impl Future<Output = std::result::Result<T, PoolError>>) -> Result<T> {
        self.pool.block(call).map_err(|error| super::errno_of(&error))
    }
}
