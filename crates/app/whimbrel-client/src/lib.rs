//! Client of the HTTP API of a host, over its Unix socket or over TLS, with typed calls.
//!
//! [`Client`] has one method for each route. Every call opens a connection of its own: on a Unix socket that
//! costs microseconds, over TLS a handshake, and a slow call never delays another. Nothing here prints,
//! retries or waits longer than the daemon takes. Replies have size limits; a larger one is
//! [`ClientError::TooLarge`].

mod byte_stream;
mod client;
mod connection;
mod error;
mod event_stream;
mod operation_stream;
mod raw_stream;
mod remote;

pub use byte_stream::ByteStream;
pub use client::Client;
pub use error::ClientError;
pub use event_stream::EventStream;
pub use raw_stream::RawStream;
pub use remote::{ApiAddress, ApiAddressError, DEFAULT_PORT, RemoteHost};
pub use whimbrel_wire::web_tls::{Fingerprint, FingerprintError};
