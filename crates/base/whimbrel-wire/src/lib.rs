//! The protocol between hosts: frames, versions, identities, TLS and ssh carriers.
//!
//! One connection carries many calls at once, in both directions, with a bounded number of bytes in flight.
//! `frame`, `hello`, `credit` and `limit` are pure (bytes or numbers in, decisions out, no I/O and no clock);
//! `connection`, `dispatch` and `pump` run them over any byte stream; `tls` and `ssh` make such streams.
//! What the calls mean is no business of this crate: an engine owns a range of kinds and its own headers.
//!
//! Invariants: nothing is read from a peer before its length was checked; no peer can make this side hold
//! more for a connection than its windows of requests and one reply for each call it made; a call ends in a
//! reply or in a typed error, never in silence. The bytes are described in `docs/protocols/wire.md`.

pub mod atomic_file;
mod call;
mod connection;
mod connection_tasks;
mod credit;
mod dispatcher;
mod endpoint;
mod error;
mod frame;
mod hello;
mod identity;
mod message_kinds;
mod peer_address;
mod public_key;
mod ref_pattern;
mod send_queue;
mod ssh;
mod tls;
mod token_bucket;
mod trust_list;

pub use call::{Answer, Call, Code, Refusal, Reply, Request, RequestOrder};
pub use connection::{Connection, Pending, Traffic};
pub use credit::{CONTROL_WINDOW, DEFAULT_WINDOW, MIN_WINDOW};
pub use dispatcher::{BoxFuture, Peer, PeerIdentity, Service};
pub use endpoint::{Endpoint, EndpointSettings, connect_io};
pub use error::{CallError, CloseReason, ConnectError, ConnectStep, IdentityError, TrustError};
pub use frame::{
    Decoder, Flags, FrameHead, HEAD_SIZE, MAX_HEADER, MAX_PAYLOAD, WireFrame, WireFrameError, encode_head,
};
pub use hello::{Hello, HelloError, Role, VERSIONS, Version, VersionRange};
pub use identity::Identity;
pub use message_kinds::{Right, Rights, range};
pub use peer_address::{ParseAddressError, PeerAddress};
pub use public_key::{ParseKeyError, PublicKey};
pub use ref_pattern::{PatternError, RefPattern, RefPatterns};
pub use ssh::{SshCommand, StdioReader, StdioWriter, connect_ssh, stdio};
pub use tls::{connect_tls, serve_tls};
pub use trust_list::{Route, Trust, TrustedPeer};
