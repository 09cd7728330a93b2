//! The host daemon: registry, supervision, API.
