//! Typed calls of the HTTP API of a host, over its unix socket.
//!
//! One method a route, in [`Client`]. Every call opens a connection of its own: on a unix socket that costs
//! microseconds, and a call that hangs never holds up another. Nothing here prints, retries or waits longer
//! than the daemon takes. Replies are bounded before they are kept; what exceeds a bound is
//! [`ClientError::TooLarge`].

mod client;
mod connection;
mod dirty_trace;
mod error;
mod operation_stream;
mod raw_stream;

pub use client::Client;
pub use dirty_trace::TraceStream;
pub use error::ClientError;
pub use raw_stream::RawStream;
