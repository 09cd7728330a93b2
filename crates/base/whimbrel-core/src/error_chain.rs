//! An error and its causes: as one line of text, and what they say of this process.

use std::{error::Error, io, iter};

/// Numbers of ENOMEM, ENFILE, EMFILE and ENOBUFS on Linux (`errno(3)`).
const SHORTAGES: [i32; 4] = [12, 23, 24, 105];

/// The error and its causes, the outermost first.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&error| error.source())
}

/// The texts of an error and its causes, joined by `: `.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Whether this process lacked memory or descriptors: the error says nothing of what it was used on, and the
/// same attempt may succeed later.
pub fn is_shortage(error: &(dyn Error + 'static)) -> bool {
    let number = |cause: &(dyn Error + 'static)| cause.downcast_ref::<io::Error>()?.raw_os_error();
    causes(error).filter_map(number).any(|number| SHORTAGES.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot open it")]
    struct Opening(#[source] io::Error);

    #[test]
    fn a_shortage_is_found_below_other_errors() {
        let of_number = |number| Opening(io::Error::from_raw_os_error(number));
        assert!(is_shortage(&of_number(24)));
        assert!(!is_shortage(&of_number(2)), "a file that is not there");
        assert!(!is_shortage(&Opening(io::Error::other("no number"))));
    }

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::fmt::Error);

    #[test]
    fn causes_follow_their_effect() {
        assert_eq!(error_chain(&Outer(std::fmt::Error)), format!("outer: {}", std::fmt::Error));
        assert_eq!(causes(&Outer(std::fmt::Error)).count(), 2);
    }
}
