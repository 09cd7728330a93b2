//! Renaming of files whose chunk maps are sealed.
//!
//! A seal names the file. So a client with the secret renames a sealed file in two steps: the manager moves
//! it, and then the client commits the same chunks under the new name, as a new version. If the second step
//! fails, the file is refused until it has its old name again.

use super::{Pool, PoolError, Result, WriteFile, WriteOptions};
use crate::protocol::{NewNode, Node, NodeId, code};

impl Pool {
    /// Moves or renames a file or folder, and seals a file anew that had the right name; blocks.
    pub fn rename_sealed(
        &self,
        from: (NodeId, &str),
        to: (NodeId, &str),
        replace: bool,
        options: &WriteOptions,
    ) -> Result<()> {
        let new_name = self.encrypts() && from.1 != to.1;
        let renamed = if new_name { self.block(self.open_to_rename(from, to.1, options))? } else { None };
        self.block(self.rename(from, to, replace))?;
        match renamed {
            Some(file) => file.commit().map(drop),
            None => Ok(()),
        }
    }

    /// The file, to be committed under its new name after it was renamed; none if that is not needed.
    async fn open_to_rename(
        &self,
        from: (NodeId, &str),
        name: &str,
        options: &WriteOptions,
    ) -> Result<Option<WriteFile>> {
        let node: Node = self.lookup(from.0, from.1).await?;
        if node.folder || node.version == 0 {
            return Ok(None);
        }
        let make = NewNode {
            parent: node.parent,
            name: from.1.to_owned(),
            folder: false,
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
        };
        let modified = node.modified;
        match WriteFile::open(self, make, Some(node), false, options.clone()).await {
            Ok(file) if file.is_sealed() => Ok(Some(file.with_content_time(modified).with_name(name))),
            Ok(_) => Ok(None),
            // Somebody else renamed it before; with its former name it is right again.
            Err(PoolError::OtherName { .. }) => Ok(None),
            // A file of a client with another secret, or without one.
            Err(PoolError::WrongSeal { .. } | PoolError::WrongSecret { .. }) => Ok(None),
            Err(error) if error.code() == Some(code::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
