//! Extended attributes: those of users, access lists, and those of root where the client may set owners.
//!
//! The file is examined through a descriptor that cannot read, and changed by its path in `/proc`, so no name
//! is resolved twice and no symlink followed. The marks of this server are not shown.

use super::{exports::fd_path, name_changes::version_of, refuse, sessions::ServedSession, write_intent};
use crate::proto::{Attr, Xattr, XattrAction};
use bytes::Bytes;
use rustix::{
    fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr},
    io::Errno,
};
use std::{ffi::OsStr, os::unix::ffi::OsStrExt, sync::PoisonError};
use whimbrel_wire::Refusal;

/// Longest value and longest list of names that Linux has (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const MAX: usize = 64 << 10;

/// Whether clients may use this name.
fn allowed(session: &ServedSession, name: &[u8]) -> bool {
    let user = name.starts_with(b"user.") && name != write_intent::NAME.as_bytes();
    let list = name == b"system.posix_acl_access" || name == b"system.posix_acl_default";
    user || list || (session.tree.ownership && name.starts_with(b"trusted."))
}

fn named<'a>(session: &ServedSession, name: &'a [u8]) -> Result<&'a OsStr, Refusal> {
    match allowed(session, name) {
        true => Ok(OsStr::from_bytes(name)),
        false => Err(refuse("use this extended attribute")(Errno::OPNOTSUPP)),
    }
}

/// Lists names, or reads a value.
pub(super) fn read(session: &ServedSession, wanted: &Xattr) -> Result<(Attr, Bytes), Refusal> {
    let (found, attr) = session.tree.find(&wanted.file)?;
    let mut out = vec![0; MAX];
    let payload = match &wanted.action {
        XattrAction::Get(name) => {
            let name = named(session, name)?;
            let len = getxattr(fd_path(&found), name, &mut out[..]);
            out.truncate(len.map_err(refuse("read an extended attribute"))?);
            out
        }
        _ => {
            let len = listxattr(fd_path(&found), &mut out[..]);
            out.truncate(len.map_err(refuse("list extended attributes"))?);
            let names = out.split(|byte| *byte == 0).filter(|name| allowed(session, name));
            names.flat_map(|name| name.iter().copied().chain([0])).collect()
        }
    };
    Ok((attr, payload.into()))
}

/// Sets or removes a value. The reply has the version of the content before, as for a change of attributes.
pub(super) fn change(
    session: &ServedSession,
    wanted: &Xattr,
    value: &[u8],
) -> Result<(Attr, Bytes), Refusal> {
    let (found, attr) = session.tree.find(&wanted.file)?;
    let order = session.files.write_lock(attr.ident);
    let _order = order.write().unwrap_or_else(PoisonError::into_inner);
    let before = version_of(session, &wanted.file.path);
    match &wanted.action {
        XattrAction::Set(name, flags) => {
            let flags = XattrFlags::from_bits_truncate(*flags);
            setxattr(fd_path(&found), named(session, name)?, value, flags)
                .map_err(refuse("set an extended attribute"))?;
        }
        XattrAction::Remove(name) => {
            removexattr(fd_path(&found), named(session, name)?)
                .map_err(refuse("remove an extended attribute"))?;
        }
        XattrAction::List | XattrAction::Get(_) => {}
    }
    Ok((super::exports::attr_of(&found)?, before))
}
