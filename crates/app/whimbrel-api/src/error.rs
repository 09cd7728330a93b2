//! Errors of requests and operations, and the HTTP status of each code.

use serde::{Deserialize, Serialize};
use std::{error::Error, fmt};
use utoipa::ToSchema;

/// Kind of a failure. Programs may branch on it, because its meaning never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// No machine, capsule, host or operation of that name.
    NotFound,
    /// Name that is in use already.
    NameTaken,
    /// Request that is wrong in every state of the host.
    Invalid,
    /// Machine or capsule that is in use by another operation, or in a state that forbids this one.
    Busy,
    /// Another host that does not answer.
    Unreachable,
    /// Another host that is not trusted here, or does not trust this one.
    Untrusted,
    /// Request without a token that is valid here.
    Unauthenticated,
    /// Request that this user or token may not make.
    Forbidden,
    /// Too many failed logins or connections from one address.
    RateLimited,
    /// Stored data that does not match its digest.
    Damaged,
    /// Full disk or memory.
    NoSpace,
    /// QEMU that refused a command or ended.
    QemuFailed,
    /// Function that this host, kernel or QEMU does not have.
    Unsupported,
    /// Operation that was cancelled.
    Cancelled,
    /// Fault of the daemon. Unknown codes are read as this one.
    #[serde(other)]
    Internal,
}

impl ErrorCode {
    /// All codes, in the order of the documentation.
    pub const ALL: [ErrorCode; 15] = [
        Self::NotFound,
        Self::NameTaken,
        Self::Invalid,
        Self::Busy,
        Self::Unreachable,
        Self::Untrusted,
        Self::Unauthenticated,
        Self::Forbidden,
        Self::RateLimited,
        Self::Damaged,
        Self::NoSpace,
        Self::QemuFailed,
        Self::Unsupported,
        Self::Cancelled,
        Self::Internal,
    ];

    /// HTTP status of this code (RFC 9110; 429 is RFC 6585, 507 is RFC 4918).
    pub const fn http_status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Unauthenticated => 401,
            Self::Untrusted | Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::NameTaken | Self::Busy | Self::Cancelled => 409,
            Self::RateLimited => 429,
            Self::Damaged | Self::QemuFailed | Self::Internal => 500,
            Self::Unsupported => 501,
            Self::Unreachable => 502,
            Self::NoSpace => 507,
        }
    }

    /// Meaning of the code in words.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::NotFound => "no machine, capsule, host or operation of that name",
            Self::NameTaken => "the name is in use already",
            Self::Invalid => "the request is wrong in every state of the host",
            Self::Busy => "another operation uses the machine or capsule, or its state forbids this one",
            Self::Unreachable => "another host does not answer",
            Self::Untrusted => "another host is not trusted here, or does not trust this one",
            Self::Unauthenticated => "the request has no token that is valid here",
            Self::Forbidden => "this user or token may not make the request",
            Self::RateLimited => "too many failed logins or connections from one address",
            Self::Damaged => "stored data does not match its digest",
            Self::NoSpace => "disk or memory is full",
            Self::QemuFailed => "QEMU refused a command or ended",
            Self::Unsupported => "this host, kernel or QEMU does not have the function",
            Self::Cancelled => "the operation was cancelled",
            Self::Internal => "the daemon has a fault",
        }
    }

    /// Name of the code in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::NameTaken => "name_taken",
            Self::Invalid => "invalid",
            Self::Busy => "busy",
            Self::Unreachable => "unreachable",
            Self::Untrusted => "untrusted",
            Self::Unauthenticated => "unauthenticated",
            Self::Forbidden => "forbidden",
            Self::RateLimited => "rate_limited",
            Self::Damaged => "damaged",
            Self::NoSpace => "no_space",
            Self::QemuFailed => "qemu_failed",
            Self::Unsupported => "unsupported",
            Self::Cancelled => "cancelled",
            Self::Internal => "internal",
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Body of every failed request, and error of a failed operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Kind of the failure.
    pub code: ErrorCode,
    /// Message of one line, in lower case, without a full stop.
    pub message: String,
    /// Causes, outermost first; none repeats the one before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<String>,
    /// Remedy, with the next command if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl ApiError {
    /// Error without causes.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), causes: Vec::new(), hint: None }
    }

    /// Error with the chain of sources of `error` as causes.
    pub fn from_error(code: ErrorCode, error: &(dyn Error + 'static)) -> Self {
        let chain = std::iter::successors(error.source(), |&cause| cause.source());
        Self {
            code,
            message: error.to_string(),
            causes: chain.map(ToString::to_string).collect(),
            hint: None,
        }
    }

    /// Adds a remedy.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_reads_back_and_is_an_error_status() {
        for code in ErrorCode::ALL {
            let json = serde_json::to_string(&code).unwrap();
            assert_eq!(json, format!("\"{}\"", code.as_str()));
            assert_eq!(serde_json::from_str::<ErrorCode>(&json).unwrap(), code);
            assert!((400..600).contains(&code.http_status()), "{code}");
        }
    }

    #[test]
    fn a_code_of_a_newer_host_does_not_hide_its_message() {
        let read: ApiError =
            serde_json::from_str(r#"{"code":"eaten_by_dog","message":"m","more":1}"#).unwrap();
        assert_eq!(read, ApiError::new(ErrorCode::Internal, "m"));
    }

    #[test]
    fn the_chain_of_sources_becomes_causes_without_repetition() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot open the store")]
        struct Outer(#[source] std::io::Error);
        let error = ApiError::from_error(ErrorCode::Damaged, &Outer(std::io::Error::other("disk on fire")));
        assert_eq!(
            (error.message.as_str(), error.causes),
            ("cannot open the store", vec!["disk on fire".to_owned()])
        );
    }
}
