//! Tests only: hosts in network namespaces, link emulator, guests, fakes.
