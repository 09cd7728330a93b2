//! An error and its causes as one line of text.

use std::{error::Error, iter};

/// The error and its causes, the outermost first.
pub fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(Some(error), |&error| error.source())
}

/// The texts of an error and its causes, joined by `: `.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::fmt::Error);

    #[test]
    fn causes_follow_their_effect() {
        assert_eq!(error_chain(&Outer(std::fmt::Error)), format!("outer: {}", std::fmt::Error));
        assert_eq!(causes(&Outer(std::fmt::Error)).count(), 2);
    }
}
