//! Users and groups of this host, as its user database has them.

use crate::core::error::DaemonError;
use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use std::ffi::CString;
use whimbrel_api::Role;

/// Refuses a group that this host does not have.
pub(super) fn check(groups: &[(String, Role)]) -> Result<(), DaemonError> {
    groups.iter().try_for_each(|(name, _)| match Group::from_name(name) {
        Ok(Some(_)) => Ok(()),
        _ => Err(DaemonError::NotFound { what: "group", name: name.clone() }),
    })
}

pub(super) fn user_name(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// Names of the groups of a user: that of its process, and those that the database gives the user.
pub(super) fn of(uid: u32, gid: u32) -> Vec<String> {
    let gid = Gid::from_raw(gid);
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    let listed = user.and_then(|user| getgrouplist(&CString::new(user.name).ok()?, user.gid).ok());
    let all = listed.unwrap_or_default().into_iter().chain([gid]);
    all.filter_map(|gid| Group::from_gid(gid).ok().flatten()).map(|group| group.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_of_a_process_counts_and_unknown_ones_are_refused() {
        assert!(of(0, 0).contains(&"root".to_owned()));
        assert!(of(3_999_999_999, 0).contains(&"root".to_owned()), "also of a user without a name");
        assert_eq!(user_name(3_999_999_999), "3999999999");
        assert!(check(&[("no-such-group".into(), Role::Viewer)]).is_err());
        assert!(check(&[("root".into(), Role::Viewer)]).is_ok());
    }
}
