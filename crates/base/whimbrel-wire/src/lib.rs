//! The protocol between hosts: wire frames, versions, identities; the transports TLS, ssh and Unix sockets.
//!
//! One connection carries many calls at once, in both directions, with a bounded number of bytes in flight.
//! `frame`, `hello`, `credit` and `token_bucket` are pure: no I/O and no clock. `connection`, `dispatcher`
//! and `connection_tasks` run them over any byte stream; `tls`, `ssh` and `local_socket` make such streams.
//! This crate does not know what calls mean: each engine has a range of kinds and its own headers.
//!
//! Invariants: a length is checked before anything is read for it. For one connection, a peer can make this
//! side hold at most its windows of requests and one reply for each call of this side. A call ends in a reply
//! or in a typed error. The bytes are described in `docs/protocols/wire.md`.

pub mod atomic_file;
mod call;
mod connection;
mod connection_tasks;
mod credit;
mod dispatcher;
mod endpoint;
mod error;
mod frame;
pub mod golden;
mod handshakes;
mod hello;
mod identity;
pub mod json_file;
mod line_log;
mod local_socket;
mod log_limit;
mod message_kinds;
mod peer_address;
pub mod private_dir;
mod public_key;
mod ref_pattern;
mod send_queue;
mod ssh;
mod tls;
mod token_bucket;
mod trust_list;
pub mod web_tls;

pub use call::{Answer, Call, Code, Refusal, Reply, Request, RequestOrder};
pub use connection::{Connection, Pending, Traffic};
pub use credit::{CONTROL_WINDOW, DEFAULT_WINDOW, MIN_WINDOW};
pub use dispatcher::{BoxFuture, Peer, PeerIdentity, Service};
pub use endpoint::{Endpoint, EndpointSettings, connect_io};
pub use error::{CallError, CloseReason, ConnectError, ConnectStep, IdentityError, TrustError};
pub use frame::{
    Decoder, Flags, FrameHead, HEAD_SIZE, MAX_HEADER, MAX_PAYLOAD, WireFrame, WireFrameError, encode_head,
};
pub use handshakes::Handshakes;
pub use hello::{
    Hello, HelloError, Protocol, ProtocolMismatch, ProtocolVersions, Role, VERSIONS, Version, VersionRange,
};
pub use identity::Identity;
pub use line_log::{LineLog, LogBounds};
pub use local_socket::{Invitation, LocalSocket, connect_local};
pub use message_kinds::{Right, Rights, range};
pub use peer_address::{ParseAddressError, PeerAddress};
pub use public_key::{ParseKeyError, PublicKey};
pub use ref_pattern::{PatternError, RefPattern, RefPatterns};
pub use ssh::{SshCommand, StdioReader, StdioWriter, connect_ssh, stdio};
pub use tls::{connect_tls, serve_tls};
pub use trust_list::{Route, Trust, TrustedPeer};
