//! Leases: what a client may answer itself, as long as the server has not recalled it.
//!
//! From version 5 on, every answer with attributes of a file grants a lease of it, and an answer with names
//! grants one of their directory. A lease lasts for the term after the latest [`Watch`] was sent, and is over
//! once it was given back.

use super::Ident;
use serde::{Deserialize, Serialize};

/// Most leases in one message.
pub const MAX_LEASES: usize = 1024;

/// Renews all leases of a session. The server answers when it has news, or when the time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// Most milliseconds to wait for news.
    pub wait: u32,
    /// What the client knows, so that a change of it is news.
    pub known: Standing,
}

/// State of the leases of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Standing {
    /// Differs once the server has dropped all leases of the session; zero before the first answer.
    pub generation: u64,
    /// Whether changes by other processes of the server recall leases, too.
    pub covers_outside: bool,
    /// Whether no other session of the server has leases.
    pub alone: bool,
}

/// News of the leases of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {
    /// State of the leases as the server has it.
    pub standing: Standing,
    /// Milliseconds for which the leases last from the moment that the request was sent.
    pub term: u32,
    /// Files and directories whose leases are recalled, at most [`MAX_LEASES`].
    pub recalled: Vec<Ident>,
}

/// Gives leases back: nothing here relies on them any more, and what was unsent under them was sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Return {
    /// Generation of the leases.
    pub generation: u64,
    /// Files and directories, at most [`MAX_LEASES`].
    pub files: Vec<Ident>,
}

/// Says that files or directories were changed here, and that the server has yet to get it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Generation of the leases.
    pub generation: u64,
    /// Files and directories, at most [`MAX_LEASES`].
    pub files: Vec<Ident>,
}
