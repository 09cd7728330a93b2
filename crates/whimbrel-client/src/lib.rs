//! Typed calls of the HTTP API of a host.
