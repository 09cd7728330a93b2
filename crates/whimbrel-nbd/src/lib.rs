//! NBD server for any block device.
