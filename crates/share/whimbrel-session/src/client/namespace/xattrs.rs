//! Extended attributes: asked of the server each time, and changed there at once, under every policy.
//!
//! Changes of names that are queued for the file are sent before, so that the server knows it.

use crate::client::{
    connection::server_connection::CallFailure,
    policy::Policy,
    session::{Core, errno_of_fail},
};
use crate::proto::{FileRef, Op, RelPath, Xattr, XattrAction, XattrCall, version_before};
use bytes::Bytes;
use std::time::Instant;
use whimbrel_fuse::{Errno, Result};
use whimbrel_wire::Code;

fn errno(fail: CallFailure) -> Errno {
    // An older server lacks `XATTR`.
    if fail.is(Code::UNKNOWN_KIND) { Errno::ENOTSUP } else { fail.errno() }
}

impl Core {
    fn xattr_subject(&self, id: u64) -> Result<FileRef> {
        if self.is_affected(id) {
            self.send_changes().map_err(errno_of_fail)?;
        }
        let nodes = self.inodes();
        let path = nodes.path(id).ok_or(Errno::ENODATA)?;
        Ok(FileRef { path, ident: nodes.get(id).ok_or(Errno::ESTALE)?.attr.ident })
    }

    fn ask_xattr(&self, file: FileRef, action: XattrAction) -> Result<Bytes> {
        let _waits = self.connection.waiting();
        let asked = self.connection.call::<XattrCall, _>(Xattr { file, action });
        asked.map(|(_, payload)| payload).map_err(errno)
    }

    /// The value of an extended attribute.
    pub(in crate::client) fn xattr(&self, id: u64, name: &[u8]) -> Result<Vec<u8>> {
        let file = self.xattr_subject(id)?;
        self.ask_xattr(file, XattrAction::Get(name.to_vec())).map(|value| value.to_vec())
    }

    /// The names of all extended attributes, with a zero after each.
    pub(in crate::client) fn xattr_names(&self, id: u64) -> Result<Bytes> {
        let file = self.xattr_subject(id)?;
        self.ask_xattr(file, XattrAction::List)
    }

    /// Sets or removes an extended attribute. It sets the time of the inode, which is no new content.
    pub(in crate::client) fn change_xattr(&self, id: u64, action: XattrAction, value: &[u8]) -> Result<()> {
        let file = self.xattr_subject(id)?;
        if self.policy_of(&file.path) == Policy::None {
            return Err(Errno::EROFS);
        }
        let _waits = self.connection.waiting();
        let removes = matches!(action, XattrAction::Remove(_));
        let begun = Instant::now();
        let asked =
            self.connection.send::<XattrCall, _>(Xattr { file, action }, Bytes::copy_from_slice(value), None);
        let (attr, payload) = match self.connection.runtime().block_on(asked) {
            (Ok(answer), _) => answer,
            // The value was removed before the answer was lost.
            (Err(fail), true) if removes && fail.is_errno(&[Errno::ENODATA.number()]) => return Ok(()),
            (Err(fail), _) => return Err(errno(fail)),
        };
        let path = RelPath::root();
        let nothing = Op::SetAttr { path, mode: None, uid: None, gid: None, mtime: None };
        self.adopt_own_change(id, &nothing, attr, (version_before(&payload), begun));
        Ok(())
    }
}
