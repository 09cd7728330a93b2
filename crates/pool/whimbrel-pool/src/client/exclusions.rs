//! Exclusions of benefactors from a write, with the cause: failed benefactors do not mean a full pool.

use super::PoolError;
use std::sync::Arc;

/// Summary of the exclusions from one write.
#[derive(Debug, Default)]
pub(super) enum Exclusions {
    #[default]
    Nobody,
    /// None was excluded for being full; the cause of the last exclusion.
    Failed(Arc<PoolError>),
    /// A benefactor was excluded for being full.
    Full,
}

impl Exclusions {
    pub(super) fn add(&mut self, error: PoolError) {
        *self = match self {
            Self::Full => return,
            _ if error.is_full() => Self::Full,
            _ => Self::Failed(Arc::new(error)),
        };
    }

    /// The error for `lost` chunks that no benefactor took, if the manager answered `refused` to a request
    /// for more.
    pub(super) fn unwritten(&self, lost: usize, refused: Option<PoolError>) -> PoolError {
        match (self, refused) {
            (Self::Failed(because), refused) if refused.as_ref().is_none_or(PoolError::is_full) => {
                PoolError::Unwritten { lost, because: Some(because.clone()) }
            }
            (_, Some(refused)) => refused,
            (_, None) => PoolError::Unwritten { lost, because: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::code;
    use whimbrel_wire::Refusal;

    fn full() -> PoolError {
        PoolError::Refused { source: Refusal::new(code::FULL, "no") }
    }

    #[test]
    fn a_pool_is_full_only_if_somebody_was_or_nobody_failed_otherwise() {
        let mut left_out = Exclusions::default();
        assert!(left_out.unwritten(1, Some(full())).is_full());
        left_out.add(PoolError::Abandoned);
        for refused in [None, Some(full())] {
            let error = left_out.unwritten(1, refused);
            assert!(matches!(error, PoolError::Unwritten { because: Some(_), .. }), "{error:?}");
        }
        let other = left_out.unwritten(1, Some(PoolError::Answer { what: "x" }));
        assert!(matches!(other, PoolError::Answer { .. }));
        left_out.add(full());
        left_out.add(PoolError::Abandoned);
        assert!(left_out.unwritten(1, Some(full())).is_full());
    }
}
