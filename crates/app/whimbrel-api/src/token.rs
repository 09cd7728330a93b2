//! Tokens of the remote API: who may do what, and on which machines and capsules.

use crate::openapi_names::Name;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use utoipa::ToSchema;
use whimbrel_core::RefName;

/// What a user of the API may do. Each role includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Look at machines, capsules and operations.
    Viewer,
    /// As a viewer; and start, stop, move, checkpoint and resume machines, and use their consoles.
    Operator,
    /// As an operator; and name files of the host, change trust and tokens, and decide handovers.
    Admin,
}

impl Role {
    /// All roles, the least one first.
    pub const ALL: [Self; 3] = [Self::Viewer, Self::Operator, Self::Admin];

    /// Name of the role in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A text that is no role.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a role is viewer, operator or admin")]
pub struct RoleError;

impl FromStr for Role {
    type Err = RoleError;

    fn from_str(text: &str) -> Result<Self, RoleError> {
        Self::ALL.into_iter().find(|role| role.as_str() == text).ok_or(RoleError)
    }
}

/// Body of `POST /v1/tokens`: create a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// Name for the token, not in use.
    #[schema(value_type = Name)]
    pub name: RefName,
    /// What its holder may do.
    pub role: Role,
    /// Machines that it is for, with `*` and `?` [default: all, or none if `capsules` is given].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<Vec<String>>,
    /// Tags that it is for, with `*` and `?` [default: all, or none if `machines` is given].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capsules: Option<Vec<String>>,
    /// Seconds until it expires; without them, it never does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_s: Option<u64>,
}

/// Description of a token, without its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenInfo {
    /// Name of the token.
    #[schema(value_type = Name)]
    pub name: RefName,
    /// What its holder may do.
    pub role: Role,
    /// Machines that it is for; with neither list, it is for everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<Vec<String>>,
    /// Tags that it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capsules: Option<Vec<String>>,
    /// Time at which it was created.
    pub created_ms: u64,
    /// Time at which it expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
}

/// A new token. Its text is in no other answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    /// Text of the token, for the header `Authorization: Bearer TEXT`.
    pub token: String,
    /// Description of the token.
    #[serde(flatten)]
    pub info: TokenInfo,
}

/// Sender of a request, and the calls that it may make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CallerInfo {
    /// `token NAME` or `user NAME`.
    pub name: String,
    /// What the caller may do.
    pub role: Role,
    /// Machines that the token is for; with neither list, everything is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<Vec<String>>,
    /// Tags that the token is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capsules: Option<Vec<String>>,
    /// Time at which the token expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
    /// Calls that are allowed, as `POST /v1/machines/{name}/stop`. What a call names is judged beside that.
    pub calls: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_read_back_and_are_in_order() {
        for role in Role::ALL {
            assert_eq!(role.as_str().parse(), Ok(role));
            assert_eq!(serde_json::to_string(&role).unwrap(), format!("\"{role}\""));
        }
        assert!(Role::Viewer < Role::Operator && Role::Operator < Role::Admin);
        assert_eq!("root".parse::<Role>(), Err(RoleError));
    }
}
