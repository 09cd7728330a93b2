//! The connection to the server, and the rate that it reaches.

pub(in crate::client) mod lease_calls;
pub(in crate::client) mod server_connection;
pub(in crate::client) mod transfer_rate;
