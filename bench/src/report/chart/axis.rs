//! Scales of the axes: parts of the axis for values, and round numbers for ticks.

/// About so many ticks stand on a linear axis.
const TICKS: f64 = 5.0;

/// A range of values and how they are spread over the axis.
pub(super) enum Scale {
    Linear { low: f64, high: f64, step: f64 },
    Log { low: f64, high: f64 },
}

impl Scale {
    /// An axis from zero, or from below it where a value is, to a tick above all values.
    pub(super) fn linear(values: &[f64]) -> Self {
        let low = values.iter().copied().fold(0.0, f64::min);
        let high = values.iter().copied().fold(low.max(0.0), f64::max);
        let step = round_step((high - low).max(1e-9) / TICKS);
        // A label stands above the largest value and below a negative one.
        let low = if low < 0.0 { (low / step - 0.4).floor() * step } else { 0.0 };
        Self::Linear { low, high: (high / step + 0.4).ceil() * step, step }
    }

    /// An axis of whole decades around all values above zero.
    pub(super) fn log(values: &[f64]) -> Self {
        let (low, high) = extremes(values);
        let high = high.log10().ceil();
        Self::Log { low: low.log10().floor().min(high - 1.0), high }
    }

    /// A logarithmic axis that ends at its smallest and largest value.
    pub(super) fn tight_log(values: &[f64]) -> Self {
        let (low, high) = extremes(values);
        Self::Log { low: low.log10(), high: high.log10().max(low.log10() + 1e-9) }
    }

    /// Where a value lies: 0 at the low end, 1 at the high one.
    pub(super) fn part(&self, value: f64) -> f64 {
        match self {
            Self::Linear { low, high, .. } => (value - low) / (high - low),
            Self::Log { low, high } => (value.max(1e-12).log10().max(*low) - low) / (high - low),
        }
    }

    /// The value from which bars rise.
    pub(super) fn foot(&self) -> f64 {
        match self {
            Self::Linear { .. } => 0.0,
            Self::Log { low, .. } => 10f64.powf(*low),
        }
    }

    /// Round values from one end to the other.
    pub(super) fn ticks(&self) -> Vec<f64> {
        match self {
            Self::Linear { low, high, step } => {
                let count = ((high - low) / step).round() as i32;
                (0..=count).map(|at| low + f64::from(at) * step).collect()
            }
            Self::Log { low, high } => {
                (low.ceil() as i32..=high.floor() as i32).map(|decade| 10f64.powi(decade)).collect()
            }
        }
    }
}

/// A tick as text, without zeros at its end.
pub(super) fn label(value: f64) -> String {
    let text = format!("{value:.6}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

fn extremes(values: &[f64]) -> (f64, f64) {
    let positive = values.iter().copied().filter(|value| *value > 0.0);
    let (low, high) = positive.fold((f64::MAX, 0.0), |(low, high), value| (value.min(low), value.max(high)));
    if low > high { (1.0, 10.0) } else { (low, high) }
}

/// The smallest of 1, 2 and 5 times a power of ten that is not below `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= step * 0.999_999);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_enclose_the_values() {
        let labels = |scale: Scale| scale.ticks().into_iter().map(label).collect::<Vec<_>>();
        assert_eq!(labels(Scale::linear(&[1.0, 70.5])), ["0", "20", "40", "60", "80"]);
        assert_eq!(labels(Scale::linear(&[-13.4, 27.7])), ["-20", "-10", "0", "10", "20", "30", "40"]);
        assert_eq!(labels(Scale::log(&[0.0047, 34.6])), ["0.001", "0.01", "0.1", "1", "10", "100"]);
        assert_eq!(labels(Scale::linear(&[])).first().map(String::as_str), Some("0"));
    }

    #[test]
    fn parts_go_from_end_to_end() {
        let scale = Scale::tight_log(&[128.0, 10_000.0, 1000.0]);
        assert_eq!((scale.part(128.0), scale.part(10_000.0)), (0.0, 1.0));
        assert!((0.4..0.6).contains(&scale.part(1000.0)));
    }
}
