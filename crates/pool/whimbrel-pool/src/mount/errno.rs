//! Which errno says what the pool said.

use crate::{client::PoolError, protocol::code};
use whimbrel_fuse::Errno;

/// The errno of an error, and a word in the log where the number says too little.
pub fn errno_of(error: &PoolError) -> Errno {
    match error {
        PoolError::Refused { source } => match source.code {
            code::NOT_FOUND => Errno::ENOENT,
            code::EXISTS => Errno::EEXIST,
            code::NOT_A_FOLDER => Errno::ENOTDIR,
            code::IS_A_FOLDER => Errno::EISDIR,
            code::NOT_EMPTY => Errno::ENOTEMPTY,
            code::FULL => Errno::ENOSPC,
            code::GONE => Errno::ESTALE,
            code::INVALID => Errno::EINVAL,
            code::PINNED => {
                tracing::warn!(because = %source, "it stays");
                Errno::EBUSY
            }
            _ => loud(error),
        },
        PoolError::Sealed { .. } => Errno::EACCES,
        PoolError::Local { source, .. } => match Errno::from(std::io::Error::from(source.kind())) {
            Errno::ETIMEDOUT => loud(error),
            errno => errno,
        },
        _ => loud(error),
    }
}

fn loud(error: &PoolError) -> Errno {
    let because = std::error::Error::source(error).map(ToString::to_string);
    tracing::error!(%error, because, "the pool could not do it");
    Errno::EIO
}
