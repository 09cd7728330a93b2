//! Error numbers (errno) for errors of the pool.

use crate::{client::PoolError, protocol::code};
use whimbrel_fuse::Errno;
use whimbrel_wire::Code;

/// The errno of an error. Logs the error where the errno says too little.
pub fn errno_of(error: &PoolError) -> Errno {
    match error {
        PoolError::Refused { source } => match source.code {
            code::NOT_FOUND => Errno::ENOENT,
            code::EXISTS => Errno::EEXIST,
            code::NOT_A_FOLDER => Errno::ENOTDIR,
            code::IS_A_FOLDER => Errno::EISDIR,
            code::NOT_EMPTY => Errno::ENOTEMPTY,
            code::FULL => Errno::ENOSPC,
            code::QUOTA => {
                tracing::warn!(because = %source, "a quota is used up");
                Errno::EDQUOT
            }
            code::GONE => Errno::ESTALE,
            code::INVALID => Errno::EINVAL,
            Code::FORBIDDEN => Errno::EACCES,
            code::PINNED => {
                tracing::warn!(because = %source, "a pinned version cannot be removed");
                Errno::EBUSY
            }
            _ => log_error(error),
        },
        PoolError::WrongSecret { .. } => Errno::EACCES,
        PoolError::WrongSeal { .. } | PoolError::OtherName { .. } => {
            tracing::error!(%error, "a file is not what a holder of the secret wrote");
            Errno::EACCES
        }
        PoolError::Local { source, .. } => match Errno::from(std::io::Error::from(source.kind())) {
            Errno::ETIMEDOUT => log_error(error),
            errno => errno,
        },
        _ => log_error(error),
    }
}

fn log_error(error: &PoolError) -> Errno {
    let because = std::error::Error::source(error).map(ToString::to_string);
    tracing::error!(%error, because, "the request to the pool failed");
    Errno::EIO
}
