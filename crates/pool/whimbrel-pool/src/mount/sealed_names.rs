//! Names of sealed files: a seal has the name of its file, which is compared with the name that was asked
//! for.
//!
//! The kernel opens files by number. So the names under which it looked them up are recorded, because the
//! manager is not believed when it is asked for the name of a number later.

use super::{PoolFiles, errno_of};
use crate::protocol::{Node, NodeId};
use whimbrel_core::lock;
use whimbrel_fuse::{Errno, Result};

impl PoolFiles {
    /// Looks up a file or folder for the kernel.
    pub(super) fn lookup_node(&self, parent: NodeId, name: &str) -> Result<Node> {
        let node = self.call(self.pool.lookup(parent, name))?;
        if self.pool.encrypts() && !node.folder {
            lock(&self.state).names.insert(node.id, name.to_owned());
        }
        Ok(node)
    }

    /// A file with the name that the kernel knows. `ESTALE` makes the kernel look it up again.
    pub(super) fn named(&self, id: NodeId) -> Result<Node> {
        let node = self.call(self.pool.node(id))?;
        match lock(&self.state).names.get(&id) {
            Some(name) if *name != node.name => Err(Errno::ESTALE),
            _ => Ok(node),
        }
    }

    /// Renames a file or folder, and seals a file under its new name.
    pub(super) fn rename_sealed(
        &self,
        from: (NodeId, &str),
        to: (NodeId, &str),
        replace: bool,
    ) -> Result<()> {
        let node = self.lookup_node(from.0, from.1)?;
        let renamed = self.pool.rename_sealed(from, to, replace, &self.options);
        if renamed.is_ok() && !node.folder {
            lock(&self.state).names.insert(node.id, to.1.to_owned());
            // Cloned, because a file that is being sent is locked for long.
            let open: Vec<_> = lock(&self.state).writers.values().cloned().collect();
            let renamed = open.iter().filter(|writing| writing.file.node() == Some(node.id));
            renamed.for_each(|writing| writing.file.renamed(to.1));
        } else {
            lock(&self.state).names.remove(&node.id);
        }
        renamed.map_err(|error| errno_of(&error))
    }
}
