//! Number of files that this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of open files as far as allowed: a shell gives 1024, and a session or a hundred machines
/// need more.
pub(crate) fn raise_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // What was allowed before still is.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
