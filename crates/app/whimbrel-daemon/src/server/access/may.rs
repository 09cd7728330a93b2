//! Rights of users of the API: who asks, what for, and whether they may. Pure.
//!
//! A scope is two lists of patterns: machines by name, and capsules by tag. Capsules of a machine (its newest
//! one, its epoch snapshots, tags of its guest) count under the machine. With one list only, the other one is
//! empty; with neither, the scope is everything.

use crate::core::{history, refs};
use std::path::Path;
use whimbrel_api::{ApiError, ErrorCode, Role, TokenInfo};
use whimbrel_core::{MachineName, RefName};
use whimbrel_wire::RefPatterns;

/// Sender of a request, by the tokens and groups of this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiUser {
    /// `token NAME` or `user NAME`.
    pub(crate) name: String,
    pub(crate) role: Role,
    pub(crate) scope: Scope,
    /// The token, if there is one: what it opened ends with it.
    pub(crate) token: Option<TokenInfo>,
}

/// The machines and capsules that an identity may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scope {
    pub(crate) machines: Option<RefPatterns>,
    pub(crate) capsules: Option<RefPatterns>,
}

/// A kind of call: what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Action {
    /// Name of the call, for the refusal.
    pub(crate) name: &'static str,
    pub(crate) role: Role,
}

/// What a call is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Object<'a> {
    /// The host as such; or objects that are judged one by one, in the request or in the answer.
    Host,
    Machine(&'a MachineName),
    /// A ref as the store calls it, or as a user names a new tag.
    Ref(&'a RefName),
    /// A capsule, by the refs that name it and the machine that it was taken from.
    Capsule {
        refs: &'a [RefName],
        machine: Option<&'a MachineName>,
    },
    /// A file of the host, which the daemon would read or write as root.
    File(&'a Path),
    /// Everything that the host has.
    Everything,
}

impl Scope {
    pub(crate) fn all() -> Self {
        Self { machines: None, capsules: None }
    }

    pub(crate) fn is_all(&self) -> bool {
        self.machines.is_none() && self.capsules.is_none()
    }

    fn has(list: Option<&RefPatterns>, name: &str) -> bool {
        list.is_some_and(|patterns| patterns.matches(name))
    }

    fn has_machine(&self, name: &str) -> bool {
        Self::has(self.machines.as_ref(), name)
    }

    fn has_ref(&self, name: &RefName) -> bool {
        let text = name.as_str();
        let machine = history::machine_in(text).or_else(|| refs::guest_machine_in(text));
        let own = refs::known_as(name);
        match machine.or((own != text).then_some(own)) {
            Some(machine) => self.has_machine(machine),
            None => Self::has(self.capsules.as_ref(), text),
        }
    }

    fn covers(&self, object: Object<'_>) -> bool {
        self.is_all()
            || match object {
                Object::Host => true,
                Object::Machine(name) => self.has_machine(name.as_str()),
                Object::Ref(name) => self.has_ref(name),
                Object::Capsule { refs, machine } => {
                    refs.iter().any(|name| self.has_ref(name))
                        || machine.is_some_and(|machine| self.has_machine(machine.as_str()))
                }
                Object::File(_) | Object::Everything => false,
            }
    }
}

impl Object<'_> {
    /// The object in words, for refusals and the audit log.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Host => "the host".to_owned(),
            Self::Machine(name) => format!("machine {name}"),
            Self::Ref(name) => format!("capsule {}", refs::known_as(name)),
            Self::Capsule { refs: [name, ..], .. } => format!("capsule {}", refs::known_as(name)),
            Self::Capsule { machine: Some(machine), .. } => format!("a capsule of {machine}"),
            Self::Capsule { .. } => "this capsule".to_owned(),
            Self::File(path) => format!("file {}", path.display()),
            Self::Everything => "everything on this host".to_owned(),
        }
    }
}

/// Whether `identity` may do this with the object.
pub(crate) fn may(identity: &ApiUser, action: Action, object: Object<'_>) -> Result<(), ApiError> {
    // Files of the host are read and written as root, whatever the call.
    let role = if matches!(object, Object::File(_)) { Role::Admin } else { action.role };
    let refused = |text: String| {
        let error = ApiError::new(ErrorCode::Forbidden, text);
        Err(error.with_hint("`whimbrel token ls` on the host shows what each token is for"))
    };
    if identity.role < role {
        let (who, has) = (&identity.name, identity.role);
        let what = match object {
            Object::File(_) => format!("{} with a {}", action.name, object.text()),
            _ => action.name.to_owned(),
        };
        return refused(format!("not allowed: {what} needs the role {role}, and {who} has {has}"));
    }
    match identity.scope.covers(object) {
        true => Ok(()),
        false => {
            let (who, what) = (&identity.name, object.text());
            refused(format!("not allowed: {who} may not use {} for {what}", action.name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scoped(machines: Option<&str>, capsules: Option<&str>) -> ApiUser {
        let list = |text: &str| text.parse().unwrap();
        ApiUser {
            name: "token ci".into(),
            role: Role::Admin,
            scope: Scope { machines: machines.map(list), capsules: capsules.map(list) },
            token: None,
        }
    }

    fn allowed(identity: &ApiUser, object: Object<'_>) -> bool {
        may(identity, Action { name: "test", role: Role::Viewer }, object).is_ok()
    }

    #[test]
    fn capsules_of_a_machine_count_under_it_and_tags_under_themselves() {
        let (machines, capsules) = (scoped(Some("web*"), None), scoped(None, Some("web*")));
        let named = |text: &str| -> RefName { text.parse().unwrap() };
        for own in ["machine.web", "kept.web-1.1763760000000", "guest.web.mine"] {
            assert!(allowed(&machines, Object::Ref(&named(own))), "{own}");
            assert!(!allowed(&capsules, Object::Ref(&named(own))), "{own}");
        }
        assert!(!allowed(&machines, Object::Ref(&named("web"))), "a tag is no machine");
        assert!(allowed(&capsules, Object::Ref(&named("web-golden"))));
        assert!(!allowed(&machines, Object::Ref(&named("machine.db"))));
        let web = "web".parse().unwrap();
        let tagged = [named("secret")];
        let capsule = |machine| Object::Capsule { refs: &tagged, machine };
        assert!(allowed(&machines, capsule(Some(&web))) && !allowed(&machines, capsule(None)));
    }

    #[test]
    fn a_scope_never_has_everything_nor_files() {
        let star = scoped(Some("*"), Some("*"));
        assert!(
            !allowed(&star, Object::Everything) && !allowed(&star, Object::File(Path::new("/etc/shadow")))
        );
        let all = scoped(None, None);
        assert!(allowed(&all, Object::Everything) && allowed(&all, Object::File(Path::new("/x"))));
        let operator = ApiUser { role: Role::Operator, ..all };
        assert!(!allowed(&operator, Object::File(Path::new("/x"))) && allowed(&operator, Object::Everything));
    }
}
