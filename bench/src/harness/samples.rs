//! Repeated measurements of one thing, summed up by the median: one disturbed run must not decide.

use anyhow::Result;

/// At least one measurement, sorted.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// One number of each of several measurements.
    pub(crate) fn of<T>(measured: &[T], number: impl Fn(&T) -> f64) -> Self {
        Self::new(measured.iter().map(number).collect())
    }

    /// `values` in any order. Panics if there are none: an experiment that measured nothing has no result.
    pub(crate) fn new(mut values: Vec<f64>) -> Self {
        assert!(!values.is_empty(), "an experiment without a measurement");
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    pub(crate) fn median(&self) -> f64 {
        let middle = self.0.len() / 2;
        if self.0.len() % 2 == 1 { self.0[middle] } else { (self.0[middle - 1] + self.0[middle]) / 2.0 }
    }

    /// The smallest value that is not below so many percent of all (nearest rank).
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        self.0[(self.0.len() * percent).div_ceil(100).saturating_sub(1)]
    }

    pub(crate) fn min(&self) -> f64 {
        self.0[0]
    }

    pub(crate) fn max(&self) -> f64 {
        self.0[self.0.len() - 1]
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}

/// Measures ours and the peer in turn, so that a machine that warms up or slows down does it to both alike.
pub(crate) fn alternate(
    count: usize,
    ours: impl FnMut() -> Result<f64>,
    peer: impl FnMut() -> Result<f64>,
) -> Result<(Samples, Samples)> {
    let (ours, theirs) = in_turn(count, ours, peer)?;
    Ok((Samples::new(ours), Samples::new(theirs)))
}

/// The same for a measurement that is more than one number.
pub(crate) fn in_turn<T>(
    count: usize,
    mut ours: impl FnMut() -> Result<T>,
    mut peer: impl FnMut() -> Result<T>,
) -> Result<(Vec<T>, Vec<T>)> {
    let (mut a, mut b) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for round in 0..count {
        // Who goes first changes too: the second one may find a warmer cache.
        if round % 2 == 0 {
            a.push(ours()?);
            b.push(once_more(&mut peer)?);
        } else {
            b.push(once_more(&mut peer)?);
            a.push(ours()?);
        }
    }
    Ok((a, b))
}

/// A peer's turn, and another one if it fails: what it measures is its speed. Who reads is told.
fn once_more<T>(mut peer: impl FnMut() -> Result<T>) -> Result<T> {
    peer().or_else(|error| {
        eprintln!("    a turn of a peer is done again: {error:#}");
        peer()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn the_median_ignores_one_wild_value() {
        assert_eq!(Samples::new(vec![3.0, 1.0, 900.0]).median(), 3.0);
        assert_eq!(Samples::new(vec![4.0, 1.0, 2.0, 900.0]).median(), 3.0);
        let samples = Samples::new(vec![2.0, 1.0]);
        assert_eq!((samples.min(), samples.max(), samples.count()), (1.0, 2.0, 2));
    }

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let samples = Samples::new((1..=20).map(f64::from).collect());
        assert_eq!(
            (samples.percentile(50), samples.percentile(95), samples.percentile(99)),
            (10.0, 19.0, 20.0)
        );
        assert_eq!(Samples::new(vec![7.0]).percentile(1), 7.0);
    }

    #[test]
    fn neither_side_always_goes_first() {
        let order = RefCell::new(String::new());
        let note = |who| {
            order.borrow_mut().push(who);
            Ok(1.0)
        };
        alternate(2, || note('a'), || note('b')).unwrap();
        assert_eq!(*order.borrow(), "abba");
    }
}
