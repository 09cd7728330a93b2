//! The protocol between hosts: frames, versions, identities, TLS and ssh carriers.
//!
//! One connection carries many calls at once, in both directions, with a bounded number of bytes in flight.
//! `frame`, `hello`, `credit` and `limit` are pure (bytes or numbers in, decisions out, no I/O and no clock);
//! `connection`, `dispatch` and `pump` run them over any byte stream; `tls` and `ssh` make such streams.
//! What the calls mean is no business of this crate: an engine owns a range of kinds and its own headers.
//!
//! Invariants: nothing is read from a peer before its length was checked; no peer can make this side hold more
//! for a connection than its windows of requests and one reply for each call it made; a call ends in a reply or in a typed error, never in silence.
//! The bytes are described in `docs/protocols/wire.md`.

mod address;
mod answer;
mod connection;
mod credit;
mod dispatch;
pub mod durable;
mod endpoint;
mod error;
mod frame;
mod hello;
mod identity;
mod key;
mod kind;
mod limit;
mod outbox;
mod pattern;
mod pump;
mod ssh;
mod tls;
mod trust;

pub use address::{ParseAddressError, PeerAddress};
pub use answer::{Answer, Call, Code, Order, Refusal, Reply, Request};
pub use connection::{Connection, Pending, Traffic};
pub use credit::{CONTROL_WINDOW, DEFAULT_WINDOW, MIN_WINDOW};
pub use dispatch::{BoxFuture, Peer, PeerIdentity, Service};
pub use endpoint::{Endpoint, Settings, connect_io};
pub use error::{CallError, CloseReason, ConnectError, IdentityError, Stage, TrustError};
pub use frame::{
    Decoder, Flags, Frame, FrameError, FrameHead, HEAD_SIZE, MAX_HEADER, MAX_PAYLOAD, encode_head,
};
pub use hello::{Hello, HelloError, Role, VERSIONS, Version, VersionRange};
pub use identity::Identity;
pub use key::{ParseKeyError, PublicKey};
pub use kind::{Right, Rights, range};
pub use pattern::{PatternError, RefPattern, RefPatterns};
pub use ssh::{SshCommand, StdioReader, StdioWriter, connect_ssh, stdio};
pub use tls::{connect_tls, serve_tls};
pub use trust::{Route, Trust, TrustedPeer};
