//! Layer macro: forwards size, reads, flushes and extents to the device below, for layers that change only
//! writes.
//!
//! A macro, since a trait with these as defaults would have to be a [`Device`](crate::Device) itself, and
//! every device would have to name the one below.

/// Methods of `Device` that forward to the device in field `$below`.
macro_rules! all_but_writes {
    ($below:ident) => {
        $crate::layer::all_but_io!($below);

        fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), $crate::BlockError> {
            self.$below.read_at(offset, out)
        }

        fn try_read_at(&self, offset: u64, out: &mut [u8]) -> Result<bool, $crate::BlockError> {
            self.$below.try_read_at(offset, out)
        }
    };
}

/// Methods that neither read nor write.
macro_rules! all_but_io {
    ($below:ident) => {
        fn size(&self) -> u64 {
            self.$below.size()
        }

        fn is_read_only(&self) -> bool {
            self.$below.is_read_only()
        }

        fn flush(&self) -> Result<(), $crate::BlockError> {
            self.$below.flush()
        }

        fn extents(&self, offset: u64, len: u64) -> Result<Vec<$crate::Extent>, $crate::BlockError> {
            self.$below.extents(offset, len)
        }
    };
}

pub(crate) use {all_but_io, all_but_writes};
