//! The network port of a machine: tap, hold and release, announcements.
