//! The protocol between hosts: frames, versions, identities, TLS and ssh carriers.
