//! Error numbers for the kernel, and their conversion from errors of the standard library.

use std::{fmt, io};

/// Result of a file system method.
pub type Result<T> = std::result::Result<T, Errno>;

/// A positive error number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(i32);

macro_rules! numbers {
    ($($name:ident),* $(,)?) => {
        impl Errno {
            $(#[doc = concat!("`", stringify!($name), "`.")] pub const $name: Errno = Errno(libc::$name);)*
        }

        fn name_of(number: i32) -> Option<&'static str> {
            match number {
                $(libc::$name => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

numbers!(
    E2BIG,
    EACCES,
    EAGAIN,
    EBADF,
    EBUSY,
    EDQUOT,
    EEXIST,
    EFBIG,
    EHOSTUNREACH,
    EINTR,
    EINVAL,
    EIO,
    EISDIR,
    ELOOP,
    EMFILE,
    EMLINK,
    ENAMETOOLONG,
    ENFILE,
    ENODATA,
    ENODEV,
    ENOENT,
    ENOLCK,
    ENOMEM,
    ENOSPC,
    ENOSYS,
    ENOTCONN,
    ENOTDIR,
    ENOTEMPTY,
    ENOTSUP,
    ENOTTY,
    ENXIO,
    EOVERFLOW,
    EPERM,
    EPIPE,
    ERANGE,
    EROFS,
    ESPIPE,
    ESTALE,
    ETIMEDOUT,
    ETXTBSY,
    EXDEV,
);

impl Errno {
    /// The error with this number; a number that is not an errno becomes `EIO`.
    pub fn from_number(number: i32) -> Self {
        // The kernel accepts numbers up to 511 from a file system and reports anything else as a bug of its
        // own.
        if (1..512).contains(&number) { Self(number) } else { Self::EIO }
    }

    /// The number as in `errno.h`.
    pub fn number(self) -> i32 {
        self.0
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match name_of(self.0) {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::error::Error for Errno {}

impl From<io::ErrorKind> for Errno {
    fn from(kind: io::ErrorKind) -> Self {
        use io::ErrorKind as K;
        match kind {
            K::NotFound => Self::ENOENT,
            K::PermissionDenied => Self::EACCES,
            K::AlreadyExists => Self::EEXIST,
            K::WouldBlock => Self::EAGAIN,
            K::InvalidInput => Self::EINVAL,
            K::TimedOut => Self::ETIMEDOUT,
            K::Interrupted => Self::EINTR,
            K::Unsupported => Self::ENOTSUP,
            K::OutOfMemory => Self::ENOMEM,
            K::StorageFull => Self::ENOSPC,
            K::QuotaExceeded => Self::EDQUOT,
            K::FileTooLarge => Self::EFBIG,
            K::NotADirectory => Self::ENOTDIR,
            K::IsADirectory => Self::EISDIR,
            K::DirectoryNotEmpty => Self::ENOTEMPTY,
            K::ReadOnlyFilesystem => Self::EROFS,
            K::StaleNetworkFileHandle => Self::ESTALE,
            K::HostUnreachable => Self::EHOSTUNREACH,
            K::InvalidFilename => Self::EINVAL,
            K::CrossesDevices => Self::EXDEV,
            _ => Self::EIO,
        }
    }
}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        error.raw_os_error().map_or_else(|| error.kind().into(), Self::from_number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_system_keeps_its_number_and_one_of_ours_gets_the_right_one() {
        assert_eq!(Errno::from(io::Error::from_raw_os_error(libc::EXDEV)), Errno::EXDEV);
        assert_eq!(Errno::from(io::Error::from(io::ErrorKind::NotFound)), Errno::ENOENT);
        assert_eq!(Errno::from(io::Error::other("what")), Errno::EIO);
    }

    #[test]
    fn a_number_that_is_none_is_an_io_error() {
        for number in [0, -5, 512, i32::MAX] {
            assert_eq!(Errno::from_number(number), Errno::EIO, "{number}");
        }
        assert_eq!(format!("{:?}", Errno::ENOSPC), "ENOSPC");
    }
}
